"""Segments of an image are copied by several threads, each once, and none is given out too late."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.capture.copy_plan import Segment, SegmentCopy, SharedCopy, plan_segments
from holdfast.capture.progress import CopyCancelled
from holdfast.capture.task import CaptureTask
from holdfast.format.checksum import BLOCK_BYTES, checksum

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Image:
    """Random sources, the image they make, and what is copied of it."""

    def __init__(self, sizes: list[int], gaps: list[int], segment_bytes: int) -> None:
        numbers = np.random.default_rng(len(sizes))
        self.sources = [numbers.integers(1, 256, size, dtype=np.uint8) for size in sizes]
        self.moves: list[SegmentCopy] = []
        at = 0
        self.expected: Bytes = np.zeros(sum(sizes) + sum(gaps), dtype=np.uint8)
        for source, gap in zip(self.sources, gaps, strict=True):
            at += gap
            self.moves.append(SegmentCopy(at, source.ctypes.data, source.size))
            self.expected[at : at + source.size] = source
            at += source.size
        self.memory: Bytes = np.zeros_like(self.expected)
        self.segments = plan_segments(self.moves, self.expected.size, segment_bytes)

    def sharing(self, check: Callable[[], None] = lambda: None) -> SharedCopy:
        return SharedCopy(self.segments, self.memory.data, self.memory.ctypes.data, check)

    @property
    def sums(self) -> list[int]:
        whole = range(0, self.expected.size - BLOCK_BYTES + 1, BLOCK_BYTES)
        return [checksum(self.expected[at : at + BLOCK_BYTES].data) for at in whole]


def together(work: Callable[[], None], threads: int) -> None:
    running = [threading.Thread(target=work) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(30)
        assert not thread.is_alive()


_sizes = st.integers(1, 3 * BLOCK_BYTES) | st.just(BLOCK_BYTES)


@given(
    pieces=st.lists(st.tuples(_sizes, st.sampled_from([0, 1, 4096, BLOCK_BYTES])), max_size=6),
    blocks=st.integers(1, 4),
    threads=st.integers(1, 4),
)
def test_whoever_copies_the_image_and_its_sums_are_the_same(
    pieces: list[tuple[int, int]], blocks: int, threads: int
) -> None:
    sizes, gaps = [size for size, _ in pieces], [gap for _, gap in pieces]
    image = Image(sizes, gaps, blocks * BLOCK_BYTES)
    sharing = image.sharing()
    heard: list[int] = []

    def done(final_bytes: int) -> None:
        assert (image.memory[:final_bytes] == image.expected[:final_bytes]).all()
        heard.append(final_bytes)

    together(lambda: sharing.work(done), threads)
    assert sharing.finish() == image.sums
    assert (image.memory == image.expected).all()
    assert not image.segments or max(heard) == image.expected.size


def test_segments_are_whole_blocks_and_hold_each_byte_once() -> None:
    one = BLOCK_BYTES
    moves = [SegmentCopy(10, 1000, 2 * one), SegmentCopy(3 * one, 9_000_000, 5)]
    assert plan_segments(moves, 3 * one + 5, 2 * one) == [
        Segment(
            0, 2 * one, ((SegmentCopy(10, 1000, one - 10),), (SegmentCopy(one, 990 + one, one),))
        ),
        Segment(
            2 * one,
            3 * one + 5,
            ((SegmentCopy(2 * one, 990 + 2 * one, 10),), (SegmentCopy(3 * one, 9_000_000, 5),)),
        ),
    ]


def test_nobody_gets_a_segment_of_a_capture_that_was_called_off() -> None:
    image = Image([8 * BLOCK_BYTES], [0], BLOCK_BYTES)
    asked = 0

    def check() -> None:
        nonlocal asked
        asked += 1
        if asked > 3:
            raise CopyCancelled("a new incarnation began")

    sharing = image.sharing(check)
    sharing.work()
    sharing.work()
    with pytest.raises(CopyCancelled, match="new incarnation"):
        sharing.finish()
    assert asked == 4
    assert not image.memory[3 * BLOCK_BYTES :].any()


def test_the_end_waits_for_whoever_still_copies() -> None:
    image = Image([2 * BLOCK_BYTES], [0], BLOCK_BYTES)
    begun, go_on, finished = threading.Event(), threading.Event(), threading.Event()

    def check() -> None:
        if threading.current_thread() is helper:
            begun.set()
            assert go_on.wait(30)

    sharing = image.sharing(check)
    helper = threading.Thread(target=sharing.work)
    helper.start()
    assert begun.wait(30)
    sharing.work()

    def end() -> None:
        sharing.finish()
        sharing.stop()
        finished.set()

    ending = threading.Thread(target=end)
    ending.start()
    assert not finished.wait(0.05)
    go_on.set()
    assert finished.wait(30)
    assert (image.memory == image.expected).all()
    helper.join()
    ending.join()


def test_who_hears_of_the_progress_may_fail_and_the_image_is_not_taken_for_whole() -> None:
    image = Image([2 * BLOCK_BYTES], [0], BLOCK_BYTES)

    def fail(final_bytes: int) -> None:
        raise OSError("the keeper went away")

    sharing = image.sharing()
    sharing.work(fail)
    with pytest.raises(OSError, match="keeper"):
        sharing.finish()


class Held:
    """A state whose captures are held until a second thread takes part in them."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.layer = torch.nn.Linear(2048, 4096)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        self.helpers: set[str] = set()
        self.began, self.helped = threading.Event(), threading.Event()
        self.copy: Callable[..., list[int]] = vars(SharedCopy)["_copy"]
        state = {"model": self.layer, "optimizer": self.optimizer}
        self.checkpointer = holdfast.Checkpointer(root, state)
        self.checkpointer.restore()
        patch.setattr(SharedCopy, "_copy", lambda sharing, segment: self._wait(sharing, segment))

    def _wait(self, sharing: SharedCopy, segment: Segment) -> list[int]:
        name = threading.current_thread().name
        if name == "holdfast-capture":
            self.began.set()
            assert self.helped.wait(30), "nobody else copies"
        else:
            self.helpers.add(name)
            self.helped.set()
        return self.copy(sharing, segment)

    def backward(self) -> torch.Tensor:
        """Gradients for a step; the weights as they are."""
        self.optimizer.zero_grad()
        self.layer(torch.ones(2, 2048)).sum().backward()
        return self.layer.weight.detach().clone()


def weight_of(root: Path, step: int) -> torch.Tensor:
    with holdfast.open(root, step) as saved:
        return torch.as_tensor(saved.read("model.weight"))


def test_while_the_fence_holds_training_a_second_thread_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(tmp_path, monkeypatch)
    with held.checkpointer as checkpointer:
        before = held.backward()
        handle = checkpointer.save(0, durable=True)
        held.optimizer.step()
        handle.wait_durable(60)
    assert held.helpers == {"holdfast-help"}  # never the training thread, which may be interrupted
    assert torch.equal(weight_of(tmp_path, 0), before)
    assert not torch.equal(held.layer.weight, before)


def test_while_who_saved_waits_for_the_snapshot_a_second_thread_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(tmp_path, monkeypatch)
    with held.checkpointer as checkpointer:
        before = held.backward()
        handle = checkpointer.save(0, durable=True)
        handle.wait_captured()
        held.optimizer.step()
        handle.wait_durable(60)
    assert held.helpers == {"holdfast-help"}
    assert torch.equal(weight_of(tmp_path, 0), before)


def test_a_forked_child_that_waits_copies_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would copy its own memory into the slot that its parent fills."""
    held = Held(tmp_path, monkeypatch)
    started: list[str] = []

    def start(thread: threading.Thread) -> None:
        started.append(thread.name)

    with held.checkpointer as checkpointer:
        before = held.backward()
        handle = checkpointer.save(0, durable=True)
        assert held.began.wait(30)
        child = os.fork()
        if not child:
            monkeypatch.setattr(threading.Thread, "start", start)
            with contextlib.suppress(BaseException):
                handle.wait_captured(0.2)
            os._exit(len(started))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        held.helped.set()
        handle.wait_durable(60)
    assert torch.equal(weight_of(tmp_path, 0), before)


def test_where_no_thread_can_be_started_one_copies_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(tmp_path, monkeypatch)
    held.helped.set()
    start: Callable[[threading.Thread], None] = vars(threading.Thread)["start"]

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "holdfast-help":
            raise RuntimeError("can't start new thread")
        start(thread)

    with held.checkpointer as checkpointer:
        before = held.backward()
        monkeypatch.setattr(threading.Thread, "start", refuse)
        handle = checkpointer.save(0, durable=True)
        handle.wait_captured(60)
        held.optimizer.step()
        handle.wait_durable(60)
    assert held.helpers == set()
    assert torch.equal(weight_of(tmp_path, 0), before)


def test_who_only_looks_has_no_second_thread_copy_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(tmp_path, monkeypatch)
    with held.checkpointer as checkpointer:
        held.backward()
        handle = checkpointer.save(0)
        assert held.began.wait(30)
        with pytest.raises(holdfast.DeadlineExceeded):
            handle.wait_captured(0.01)
        assert not held.helped.wait(0.5)
        held.helped.set()
        handle.wait_captured(60)


def test_who_waits_beside_training_takes_no_processor_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(tmp_path, monkeypatch)
    with held.checkpointer as checkpointer:
        held.backward()
        handle = checkpointer.save(0)
        with ThreadPoolExecutor(1) as beside:
            waiting = beside.submit(handle.wait_captured, 60)
            assert not held.helped.wait(0.5)
            held.helped.set()
            waiting.result()
    assert held.helpers == set()


def test_an_interrupt_at_the_fence_harms_neither_the_snapshot_nor_a_save_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(tmp_path, monkeypatch)

    def interrupt(capture: CaptureTask, timeout_s: float) -> bool:
        raise KeyboardInterrupt

    with held.checkpointer as checkpointer:
        before = held.backward()
        handle = checkpointer.save(0)
        with monkeypatch.context() as patch:
            patch.setattr(CaptureTask, "wait_released", interrupt)
            with pytest.raises(KeyboardInterrupt):
                held.optimizer.step()
        held.helped.set()
        checkpointer.save(0, durable=True).wait_durable(60)
        handle.wait_captured(60)
    assert torch.equal(weight_of(tmp_path, 0), before)


def test_what_was_missed_is_captured_when_it_is_saved_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(tmp_path, monkeypatch)

    failures: list[Segment] = []

    def fail_once(sharing: SharedCopy, segment: Segment) -> list[int]:
        if failures:
            return held.copy(sharing, segment)
        failures.append(segment)
        time.sleep(0.2)  # whoever saves again does so before it is known
        raise RuntimeError("no memory")

    with held.checkpointer as checkpointer:
        before = held.backward()
        monkeypatch.setattr(SharedCopy, "_copy", fail_once)
        missed = checkpointer.save(0)
        assert missed.state == "pending"
        checkpointer.save(0, durable=True).wait_durable(60)
    assert len(failures) == 1
    assert torch.equal(weight_of(tmp_path, 0), before)


def test_what_a_signals_handler_saves_while_the_fence_waits_is_of_the_end_of_that_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(tmp_path, monkeypatch)
    held.helped.set()
    saved: list[holdfast.SaveHandle] = []
    wait: Callable[[CaptureTask, float], bool] = vars(CaptureTask)["wait_released"]

    def copy_late(sharing: SharedCopy, segment: Segment) -> list[int]:
        time.sleep(0.02)  # the next update, if it did not wait, would be in the copy
        return held.copy(sharing, segment)

    def save_once_more(capture: CaptureTask, timeout_s: float) -> bool:
        """As a handler would that runs while this waits."""
        is_released = wait(capture, timeout_s)
        if not saved:
            monkeypatch.setattr(SharedCopy, "_copy", copy_late)
            saved.append(held.checkpointer.save(1, durable=True))
        return is_released

    with held.checkpointer as checkpointer:
        before = held.backward()
        checkpointer.save(0)
        monkeypatch.setattr(CaptureTask, "wait_released", save_once_more)
        held.optimizer.step()
        after = held.layer.weight.detach().clone()
        held.optimizer.step()
        saved[0].wait_durable(60)
    assert not torch.equal(before, after)
    assert torch.equal(weight_of(tmp_path, 1), after)
