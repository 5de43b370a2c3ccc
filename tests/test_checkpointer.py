"""The public object in one process: promises, refusals, fences, and trouble."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast import events
from holdfast import startup as meeting_module
from holdfast.capture import copier as copier_module
from holdfast.capture.overtaking import OvertakeDetector
from holdfast.capture.task import Timeouts
from holdfast.catalogue import catalogue
from holdfast.storage.local import LocalStore
from support.runs.leftovers import end_keepers, keeper_pids

State = dict[str, Any]


def build(seed: int = 0) -> State:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(33, 7000), nn.BatchNorm1d(7000), nn.Linear(7000, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {"model": model, "optimizer": optimizer, "rng": holdfast.Rng(), "tokens": 0}


def train(state: State, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    loss = state["model"](torch.randn(9, 33, generator=generator)).square().mean()
    loss.backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["tokens"] += 9


def content(state: State) -> dict[str, Any]:
    found: dict[str, Any] = {k: v.clone() for k, v in state["model"].state_dict().items()}
    for name, parameter in state["model"].named_parameters():
        for kind, tensor in state["optimizer"].state[parameter].items():
            found[f"{name}.{kind}"] = tensor.clone()
    return found | {"tokens": state["tokens"]}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[k], other[k]) if isinstance(one[k], torch.Tensor) else one[k] == other[k]
        for k in one
    )


@pytest.fixture
def heard() -> Iterator[list[events.Event]]:
    found: list[events.Event] = []
    stop = holdfast.subscribe(lambda event, _: found.append(event))
    yield found
    stop()


@pytest.fixture
def held_copy(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies wait until this is set: whatever happens before, happens during a capture."""
    gate = threading.Event()
    real: Callable[..., Any] = vars(copier_module)["copy_image"]

    def gated(*arguments: Any) -> Any:
        assert gate.wait(30)
        return real(*arguments)

    monkeypatch.setattr(copier_module, "copy_image", gated)
    return gate


def _then(done: threading.Event, act: Callable[..., None], *arguments: Any) -> None:
    act(*arguments)
    done.set()


def test_what_was_saved_comes_back_and_training_goes_on_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    state = build()
    truth: dict[int, dict[str, Any]] = {}
    with holdfast.Checkpointer(tmp_path, state, storage=holdfast.Every(steps=4)) as checkpointer:
        assert checkpointer.restore() is None
        for step in range(10):
            train(state, step)
            truth[step] = content(state)
            checkpointer.step(step)
    draw = torch.rand(3)
    again = build(seed=1)
    with holdfast.Checkpointer(tmp_path, again) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None and (restored.step, restored.source) == (9, "storage")
        assert same(content(again), truth[9])
        assert torch.equal(torch.rand(3), draw)


def test_a_run_that_falls_back_and_saves_the_same_steps_again_never_mixes_them(
    tmp_path: Path,
) -> None:
    state = build()
    with holdfast.Checkpointer(tmp_path, state, storage=holdfast.Every(steps=1)) as checkpointer:
        for step in range(6):
            train(state, step)
            checkpointer.save(step, durable=True).wait_durable(30)
    first = content(state)
    state = build(seed=3)
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        restored = checkpointer.restore(step=2)
        assert restored is not None and restored.generation == (1, 2)
        for step in range(3, 6):
            train(state, step + 100)  # other data: other bytes under the same step numbers
            checkpointer.save(step, durable=True).wait_durable(30)
    second = content(state)
    assert not same(first, second)
    found = catalogue(LocalStore(tmp_path))
    assert [str(g) for g in found.abandoned] == ["1-3", "1-4", "1-5"]
    for wanted, expected in ((None, second), (5, second), ("1-5", first), ("2-5", second)):
        into = build(seed=9)
        assert holdfast.load(tmp_path, into, wanted).step == 5
        assert same(content(into), expected), wanted


@pytest.mark.promise
def test_an_update_waits_for_the_copy_of_what_it_overwrites(
    tmp_path: Path, held_copy: threading.Event
) -> None:
    state = build()
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=None)
    train(state, 0)
    before = content(state)
    handle = checkpointer.save(0, durable=True)
    updated = threading.Event()
    updater = threading.Thread(target=_then, args=(updated, train, state, 1))
    updater.start()
    assert not updated.wait(0.3)
    held_copy.set()
    assert updated.wait(30)
    handle.wait_durable(30)
    into = build(seed=2)
    holdfast.load(tmp_path, into)
    assert same(content(into), before)
    checkpointer.close()


def test_before_update_is_the_same_fence_for_loops_without_a_torch_optimizer(
    tmp_path: Path, held_copy: threading.Event
) -> None:
    state = build()
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=None)
    train(state, 0)
    checkpointer.save(0)
    passed = threading.Event()
    threading.Thread(target=_then, args=(passed, checkpointer.before_update)).start()
    assert not passed.wait(0.2)
    held_copy.set()
    assert passed.wait(30)
    checkpointer.close()


@pytest.mark.parametrize("how", ["version", "data"])
def test_an_update_that_goes_around_the_fence_is_noticed_and_never_sealed(
    how: str,
    tmp_path: Path,
    held_copy: threading.Event,
    heard: list[events.Event],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = build()
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=None)
    train(state, 0)
    held_copy.set()
    checkpointer.save(0).wait_captured(30)
    good = content(state)
    held_copy.clear()
    handle = checkpointer.save(1)
    weight = state["model"][0].weight
    if how == "version":
        with torch.no_grad():
            weight.add_(1)
    else:  # unseen by version counters: found by comparing sampled bytes
        check = OvertakeDetector.check

        def check_later(*arguments: Any) -> None:
            weight.data.view(-1).numpy()[:] += 1.0
            check(*arguments)

        monkeypatch.setattr(OvertakeDetector, "check", check_later)
    held_copy.set()
    with pytest.raises(holdfast.CaptureOvertaken, match=r"model\.0\.weight"):
        handle.wait_captured(30)
    monkeypatch.undo()
    missed = [e for e in heard if isinstance(e, events.SnapshotMissed)]
    assert missed and missed[-1].overtaken and missed[-1].leaf == "model.0.weight"
    del checkpointer, state
    again = build(seed=4)
    newer = holdfast.Checkpointer(tmp_path, again, storage=None)
    restored = newer.restore()
    assert restored is not None and restored.step == 0
    assert same(content(again), good)
    newer.close()


@pytest.mark.promise
def test_volatile_leaves_are_those_of_the_moment_save_was_called(
    tmp_path: Path, held_copy: threading.Event
) -> None:
    state = build()
    state["ema"] = {"weight": torch.ones(200_000)}
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        train(state, 0)
        buffer = state["model"][1].running_mean
        expected = buffer.clone()
        handle = checkpointer.save(0, durable=True)
        buffer.fill_(-5)
        state["ema"]["weight"].fill_(-5)
        state["tokens"] = -5
        held_copy.set()
        handle.wait_durable(30)
    with holdfast.open(tmp_path) as found:
        assert torch.equal(found.read("model.1.running_mean"), expected)
        assert torch.equal(found.read("ema.weight"), torch.ones(200_000))
        assert found.values["tokens"] == 9


@pytest.mark.promise
def test_storage_that_refuses_costs_a_checkpoint_and_never_a_step(
    tmp_path: Path, heard: list[events.Event]
) -> None:
    root = tmp_path / "run"
    state = build()
    checkpointer = holdfast.Checkpointer(root, state, storage=None)
    train(state, 0)
    (root / "steps").write_text("in the way")
    handle = checkpointer.save(0, durable=True)
    with pytest.raises(holdfast.PersistFailed, match="steps"):
        handle.wait_durable(30)
    handle.wait_captured(30)
    train(state, 1)
    (root / "steps").unlink()
    checkpointer.save(1, durable=True).wait_durable(30)
    checkpointer.close()
    assert [str(m.generation) for m in catalogue(LocalStore(root)).manifests] == ["1-1"]


def test_a_snapshot_can_be_made_durable_after_it_was_taken(tmp_path: Path) -> None:
    state = build()
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=None)
    train(state, 0)
    checkpointer.step(0)
    checkpointer.save(0, durable=True).wait_durable(30)
    checkpointer.close()
    assert holdfast.load(tmp_path, build(seed=1)).step == 0


def test_close_leaves_nothing_newer_in_memory_than_in_storage(tmp_path: Path) -> None:
    state = build()
    with holdfast.Checkpointer(tmp_path, state, storage=holdfast.Every(steps=100)) as checkpointer:
        for step in range(5):
            train(state, step)
            checkpointer.step(step)
    assert holdfast.load(tmp_path, build(seed=1)).step == 4


def test_only_the_newest_checkpoints_are_kept_and_their_files_go_with_them(tmp_path: Path) -> None:
    state = build()
    keep = holdfast.Keep(last=2, every=4)
    with holdfast.Checkpointer(tmp_path, state, storage=None, keep=keep) as checkpointer:
        for step in range(10):
            train(state, step)
            checkpointer.save(step, durable=True).wait_durable(30)
    steps = [m.step for m in catalogue(LocalStore(tmp_path)).manifests]
    assert steps == [0, 3, 4, 7, 8, 9]
    images = {path.parent.name.split("-")[1] for path in tmp_path.glob("steps/*/*")}
    assert {"0", "3", "4", "7", "8", "9"} <= images <= {"0", "3", "4", "5", "6", "7", "8", "9"}


def test_a_save_is_due_when_its_minutes_are_over(tmp_path: Path) -> None:
    state = build()
    timed = holdfast.Every(minutes=0.025)
    with holdfast.Checkpointer(tmp_path, state, memory=None, storage=timed) as checkpointer:
        train(state, 0)
        assert checkpointer.step(0) is None
        time.sleep(1.6)
        handle = checkpointer.step(1)
        assert handle is not None
        handle.wait_durable(30)
        assert checkpointer.step(2) is None


def test_saving_before_restoring_a_run_that_has_checkpoints_is_refused(tmp_path: Path) -> None:
    state = build()
    with holdfast.Checkpointer(tmp_path, state) as checkpointer:
        train(state, 0)
        checkpointer.save(0, durable=True)
    again = holdfast.Checkpointer(tmp_path, state)
    with pytest.raises(holdfast.UsageError, match=r"call restore\(\) before"):
        again.save(1)
    again.close()


def test_parity_on_one_host_warns_that_storage_alone_protects(tmp_path: Path) -> None:
    heard: list[events.Event] = []
    stop = events.subscribe(lambda event, _: heard.append(event))
    state = build()
    with holdfast.Checkpointer(tmp_path, state, storage=None, parity=1) as checkpointer:
        train(state, 0)
        handle = checkpointer.save(0)
        handle.wait_captured(30)
        with pytest.raises(holdfast.UsageError, match="on several hosts with parity=1"):
            handle.wait_protected(1)
    stop()
    assert any(isinstance(e, events.Warned) and "only storage protects" in e.message for e in heard)


def test_calls_that_mean_nothing_are_refused_with_what_to_do(tmp_path: Path) -> None:
    state = build()
    with pytest.raises(holdfast.UsageError, match="state is a dict"):
        holdfast.Checkpointer(tmp_path, {})
    with pytest.raises(holdfast.UsageError, match="parity"):
        holdfast.Checkpointer(tmp_path, state, parity=-1)
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=None)
    train(state, 0)
    handle = checkpointer.save(3)
    handle.wait_captured(30)
    with pytest.raises(holdfast.UsageError, match="durable"):
        handle.wait_durable(1)
    with pytest.raises(holdfast.UsageError, match="after step 3"):
        checkpointer.save(2)
    with pytest.raises(holdfast.UsageError, match="before the first save"):
        checkpointer.restore()
    checkpointer.close()
    checkpointer.close()
    with pytest.raises(holdfast.UsageError, match="closed"):
        checkpointer.save(4)


def test_a_state_that_does_not_fit_is_refused_with_every_difference(tmp_path: Path) -> None:
    state = build()
    train(state, 0)
    holdfast.save(tmp_path, state)
    other: State = build()
    other["model"] = nn.Sequential(
        nn.Linear(33, 7001), nn.Tanh(), nn.Linear(7001, 3), nn.Linear(1, 1)
    )
    other["optimizer"] = torch.optim.AdamW(other["model"].parameters())
    before = {k: v.clone() for k, v in other["model"].state_dict().items()}
    with pytest.raises(holdfast.StateMismatch) as caught:
        holdfast.load(tmp_path, other)
    text = str(caught.value)
    for expected in ("model.0.weight", "[7000, 33]", "[7001, 33]", "model.3.weight: in the model"):
        assert expected in text
    after = other["model"].state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.promise
def test_a_restore_that_breaks_off_leaves_a_state_that_refuses_to_be_used(tmp_path: Path) -> None:
    state = build()
    with holdfast.Checkpointer(tmp_path, state) as checkpointer:
        train(state, 0)
        checkpointer.save(0, durable=True)
    image = next(tmp_path.glob("steps/*/*.safetensors"))
    data = bytearray(image.read_bytes())
    data[200_000] ^= 1
    image.write_bytes(data)
    again = build(seed=1)
    checkpointer = holdfast.Checkpointer(tmp_path, again)
    with pytest.raises(holdfast.RestoreError, match="block"):
        checkpointer.restore()
    with pytest.raises(holdfast.StatePoisoned):
        checkpointer.step(1)
    data[200_000] ^= 1
    image.write_bytes(data)
    restored = checkpointer.restore()
    assert restored is not None
    assert same(content(again), content(state))
    checkpointer.close()


def test_a_flipped_bit_in_memory_is_found_and_the_next_source_is_taken(
    tmp_path: Path, arena_dir: Path, heard: list[events.Event]
) -> None:
    state = build()
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=None)
    train(state, 0)
    checkpointer.save(0, durable=True).wait_durable(30)
    train(state, 1)
    checkpointer.save(1).wait_captured(30)
    slots = sorted(arena_dir.rglob("*.slot"))
    for slot in slots:  # the middle of every image in memory
        with slot.open("r+b") as file:
            file.seek(200_000)
            byte = file.read(1)
            file.seek(200_000)
            file.write(bytes([byte[0] ^ 4]))
    again = build(seed=5)
    newer = holdfast.Checkpointer(tmp_path, again, storage=None)
    restored = newer.restore()
    assert restored is not None
    assert (restored.step, restored.source) == (0, "storage")
    assert any(isinstance(e, events.SourceDropped) for e in heard)
    newer.close()


def test_memory_survives_an_exception_in_the_training_loop(tmp_path: Path) -> None:
    state = build()

    def run() -> None:
        with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
            train(state, 0)
            checkpointer.save(0).wait_captured(30)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        run()
    again = build(seed=6)
    with holdfast.Checkpointer(tmp_path, again, storage=None) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        assert (restored.step, restored.source) == (0, "memory")
        assert same(content(again), content(state))


def test_a_close_says_so_if_storage_refuses_what_was_made_durable_after_all(
    tmp_path: Path,
) -> None:
    root = tmp_path / "run"
    state = build()
    checkpointer = holdfast.Checkpointer(root, state, storage=None)
    train(state, 0)
    (root / "steps").write_text("in the way")
    checkpointer.save(0).wait_captured(30)
    checkpointer.save(0, durable=True)
    with pytest.raises(holdfast.PersistFailed, match="steps"):
        checkpointer.close()
    (root / "steps").unlink()
    with holdfast.Checkpointer(root, build(seed=6), storage=None) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None  # memory is not given back before it is anywhere else
        assert (restored.step, restored.source) == (0, "memory")


def test_a_close_that_cannot_store_the_newest_snapshot_says_so_and_leaves_it_in_memory(
    tmp_path: Path,
) -> None:
    root = tmp_path / "run"
    state = build()
    checkpointer = holdfast.Checkpointer(root, state)
    train(state, 0)
    (root / "steps").write_text("in the way")
    checkpointer.save(0).wait_captured(30)
    with pytest.raises(holdfast.PersistFailed, match="stays in memory"):
        checkpointer.close()
    (root / "steps").unlink()
    again = build(seed=6)
    with holdfast.Checkpointer(root, again) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        assert (restored.step, restored.source) == (0, "memory")
    assert holdfast.load(root, build(seed=7)).step == 0


def test_what_a_killed_keeper_had_published_is_still_whole_after_the_next_one_ends(
    tmp_path: Path, arena_dir: Path
) -> None:
    state = build()
    first = holdfast.Checkpointer(tmp_path, state)
    train(state, 0)
    first.save(0, durable=True).wait_durable(30)
    for keeper in end_keepers(arena_dir, grace_s=0.0):
        assert "holdfast.keeper" in keeper
    again = build(seed=6)
    with holdfast.Checkpointer(tmp_path, again) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        assert restored.source == "memory"
    assert holdfast.load(tmp_path, build(seed=7)).step == 0
    with pytest.raises(holdfast.HoldfastError):
        first.close()


def test_shapes_that_come_and_go_are_saved_as_they_are(tmp_path: Path) -> None:
    state = build()
    buffer = torch.arange(100_000.0)
    state["extra"] = {"values": buffer, "more": torch.ones(3)}
    expected = {}
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        for step, size in enumerate((100_000, 50, 100_000, 7, 100_000)):
            train(state, step)
            state["extra"]["values"] = buffer.resize_(size).fill_(step)
            expected[step] = buffer.clone()
            checkpointer.save(step, durable=True).wait_durable(30)
    for step, wanted in expected.items():
        with holdfast.open(tmp_path, step) as found:
            assert torch.equal(found.read("extra.values"), wanted)


def test_a_state_that_cannot_be_saved_at_one_step_costs_that_step_only(
    tmp_path: Path, heard: list[events.Event]
) -> None:
    state = build()
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        train(state, 0)
        state["odd"] = object()
        handle = checkpointer.step(0)
        assert handle is not None
        with pytest.raises(holdfast.SnapshotSkipped, match="odd"):
            handle.wait_captured(5)
        with pytest.raises(holdfast.UnsupportedState, match="odd"):
            checkpointer.save(1)
        del state["odd"]
        train(state, 2)
        checkpointer.save(2, durable=True).wait_durable(30)
    assert sum(isinstance(event, events.SnapshotMissed) for event in heard) == 2


def test_a_step_that_is_not_saved_does_not_wait_for_the_capture_of_one_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_copy, copy = threading.Event(), copier_module.Copier.copy

    def waits(*given: Any) -> Any:
        assert may_copy.wait(60)
        return copy(*given)

    monkeypatch.setattr(copier_module.Copier, "copy", waits)
    state = build()
    with holdfast.Checkpointer(tmp_path, state, memory=None) as checkpointer:
        handle = checkpointer.save(0, durable=True)
        assert checkpointer.step(1) is None  # as long as nothing was missed
        assert handle.state == "pending" and not may_copy.is_set()
        may_copy.set()
        handle.wait_durable(60)


def test_a_stopped_keeper_holds_training_up_once_and_not_at_every_step(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch, heard: list[events.Event]
) -> None:
    quick = Timeouts(grant_s=0.5, durable_grant_s=0.5)
    monkeypatch.setattr(meeting_module, "Timeouts", lambda **_: quick)
    state = build()
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        train(state, 0)
        checkpointer.save(0).wait_captured(30)
        (keeper,) = keeper_pids(arena_dir)
        os.kill(keeper, signal.SIGSTOP)
        try:
            for step in range(1, 11):
                train(state, step)
                checkpointer.step(step)
        finally:
            os.kill(keeper, signal.SIGCONT)
        deadline = time.monotonic() + 30
        for step in range(11, 10_000):
            train(state, step)
            handle = checkpointer.save(step)
            try:
                handle.wait_captured(30)
                break
            except holdfast.SnapshotSkipped:
                assert time.monotonic() < deadline
    missed = [event.reason for event in heard if isinstance(event, events.SnapshotMissed)]
    assert sum("no answer to the request for a slot" in reason for reason in missed[:10]) == 1
    assert any("has not answered since" in reason for reason in missed[:10])


def test_two_timed_policies_keep_their_own_time(tmp_path: Path) -> None:
    state = build()
    memory, storage = holdfast.Every(minutes=0.003), holdfast.Every(minutes=0.02)
    with holdfast.Checkpointer(tmp_path, state, memory=memory, storage=storage) as checkpointer:
        deadline = time.monotonic() + 30
        for step in range(10_000):
            handle = checkpointer.step(step)
            if handle is not None and handle.durable:
                handle.wait_durable(30)
                break
            assert time.monotonic() < deadline, "the frequent policy starved the other"
            time.sleep(0.02)


@pytest.mark.parametrize("step", ["first", -1, 1.5, None])
def test_a_step_that_is_no_number_is_refused_and_harms_nothing(tmp_path: Path, step: Any) -> None:
    state = build()
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        with pytest.raises(holdfast.UsageError, match="whole number"):
            checkpointer.save(step)
        with pytest.raises(holdfast.UsageError, match="whole number"):
            checkpointer.step(step)
        train(state, 0)
        checkpointer.save(0).wait_captured(30)


def test_a_checkpoint_that_could_not_be_taken_when_it_was_due_is_due_at_the_next_save(
    tmp_path: Path,
) -> None:
    state = build()
    with holdfast.Checkpointer(tmp_path, state, storage=holdfast.Every(steps=2)) as checkpointer:
        train(state, 0)
        checkpointer.step(0)
        train(state, 1)
        state["odd"] = object()
        due = checkpointer.step(1)
        assert due is not None and due.durable and due.state == "failed"
        del state["odd"]
        train(state, 2)
        instead = checkpointer.step(2)
        assert instead is not None and instead.durable


def test_a_snapshot_that_was_missed_at_the_very_end_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("out of luck")

    state = build()
    with holdfast.Checkpointer(tmp_path, state) as checkpointer:
        train(state, 0)
        checkpointer.step(0)
        train(state, 1)
        with monkeypatch.context() as patch:
            patch.setattr(copier_module, "copy_image", fail)
            missed = checkpointer.step(1)
            assert missed is not None
            with pytest.raises(holdfast.SnapshotSkipped, match="out of luck"):
                missed.wait_captured(30)
    assert holdfast.load(tmp_path, build(seed=1)).step == 1


def test_an_error_of_the_training_loop_is_not_replaced_by_that_of_a_save(tmp_path: Path) -> None:
    state = build()

    def run() -> None:
        with holdfast.Checkpointer(tmp_path, state) as checkpointer:
            state["odd"] = object()
            checkpointer.step(0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()


def test_another_state_is_refused_and_not_saved_in_silence(tmp_path: Path) -> None:
    state = build()
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        with pytest.raises(holdfast.UsageError, match="Change it in place"):
            checkpointer.state = build(seed=1)
        assert checkpointer.state is state
