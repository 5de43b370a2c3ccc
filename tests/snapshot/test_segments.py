"""Segments of an image are copied by several threads, each once, and none is given out too late."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.format.checksum import BLOCK_BYTES, checksum
from holdfast.snapshot.capture import Stopped
from holdfast.snapshot.segments import Missing, Move, Segment, Sharing, plan_segments

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Image:
    """Random sources, the image they make, and what is copied of it."""

    def __init__(self, sizes: list[int], gaps: list[int], segment_bytes: int) -> None:
        numbers = np.random.default_rng(len(sizes))
        self.sources = [numbers.integers(1, 256, size, dtype=np.uint8) for size in sizes]
        self.moves: list[Move] = []
        at = 0
        self.expected: Bytes = np.zeros(sum(sizes) + sum(gaps), dtype=np.uint8)
        for source, gap in zip(self.sources, gaps, strict=True):
            at += gap
            self.moves.append(Move(at, source.ctypes.data, source.size))
            self.expected[at : at + source.size] = source
            at += source.size
        self.memory: Bytes = np.zeros_like(self.expected)
        self.segments = plan_segments(self.moves, self.expected.size, segment_bytes)

    def sharing(self, check: Callable[[], None] = lambda: None) -> Sharing:
        return Sharing(self.segments, self.memory.data, self.memory.ctypes.data, check)

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
    moves = [Move(10, 1000, 2 * one), Move(3 * one, 9_000_000, 5)]
    assert plan_segments(moves, 3 * one + 5, 2 * one) == [
        Segment(0, 2 * one, ((Move(10, 1000, one - 10),), (Move(one, 990 + one, one),))),
        Segment(
            2 * one, 3 * one + 5,
            ((Move(2 * one, 990 + 2 * one, 10),), (Move(3 * one, 9_000_000, 5),)),
        ),
    ]  # fmt: skip


def test_nobody_gets_a_segment_of_a_capture_that_was_called_off() -> None:
    image = Image([8 * BLOCK_BYTES], [0], BLOCK_BYTES)
    asked = 0

    def check() -> None:
        nonlocal asked
        asked += 1
        if asked > 3:
            raise Stopped("a new incarnation began")

    sharing = image.sharing(check)
    sharing.work()
    sharing.work()
    with pytest.raises(Stopped, match="new incarnation"):
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


def test_an_interrupt_of_one_thread_goes_on_to_its_caller_and_spoils_the_image() -> None:
    image = Image([2 * BLOCK_BYTES], [0], BLOCK_BYTES)

    def interrupt() -> None:
        raise KeyboardInterrupt

    sharing = image.sharing(interrupt)
    with pytest.raises(KeyboardInterrupt):
        sharing.work()
    with pytest.raises(Missing):
        sharing.finish()


def test_who_hears_of_the_progress_may_fail_and_the_image_is_not_taken_for_whole() -> None:
    image = Image([2 * BLOCK_BYTES], [0], BLOCK_BYTES)

    def fail(final_bytes: int) -> None:
        raise OSError("the keeper went away")

    sharing = image.sharing()
    sharing.work(fail)
    with pytest.raises(OSError, match="keeper"):
        sharing.finish()


def test_a_training_thread_held_by_the_fence_copies_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(2048, 4096)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    me, helped = threading.get_ident(), threading.Event()
    copy = vars(Sharing)["_copy"]

    def copy_slowly(sharing: Sharing, segment: Segment) -> list[int]:
        if threading.get_ident() == me:
            helped.set()
        else:
            assert helped.wait(30), "nobody else copies"
        found: list[int] = copy(sharing, segment)
        return found

    with holdfast.Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}) as checkpointer:
        checkpointer.restore()
        monkeypatch.setattr(Sharing, "_copy", copy_slowly)
        before = model.weight.detach().clone()
        model(torch.ones(2, 2048)).sum().backward()
        handle = checkpointer.save(0, durable=True)
        optimizer.step()
        handle.wait_durable(60)
    assert helped.is_set()
    with holdfast.open(tmp_path) as saved:
        assert (torch.as_tensor(saved.read("model.weight")) == before).all()
    assert (model.weight != before).any()
