"""Memory too small for an image: durable saves pass through it, and nothing else is promised."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import events
from holdfast.capture.task import Timeouts
from holdfast.catalogue import catalogue
from holdfast.observe.report_builder import read_report
from holdfast.storage.local import LocalStore
from support.runs.evidence import check_storage, read_events, slot_records, unpublished_attempts
from support.runs.keepers import kill_keeper
from support.runs.leftovers import keeper_pids
from support.runs.lives import Lives
from support.runs.mishaps import build, content, listening, train

MIB = 1 << 20
ARENA_BYTES = 24 * MIB
#: With this many rows a rank alone has an image of 60 MiB, and two have 30 MiB each.
ROWS = 450

#: The keeper's writes wait while the file "shut" is there, and fail while "full" is.
_GATED = """
import sys
if "holdfast.keeper" in sys.orig_argv:
    import errno, os, time
    import holdfast.storage.direct as direct
    write, count = direct.write_once, [0]
    def gated(descriptor, offset, data):
        while os.path.exists({shut!r}):
            time.sleep(0.01)
        if os.path.exists({full!r}) and offset > 30 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, offset, data)
    direct.write_once = gated
"""


@pytest.fixture
def gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Files that shut the way to storage, and that make storage full."""
    shut, full = tmp_path / "shut", tmp_path / "full"
    (tmp_path / "sitecustomize.py").write_text(_GATED.format(shut=str(shut), full=str(full)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return shut, full


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_ARENA_BYTES", str(ARENA_BYTES))


@pytest.fixture
def watched(arena_dir: Path) -> Iterator[list[int]]:
    """How much the slots of the arena took together, looked at all the while."""
    seen, is_over = [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.005):
            sizes = 0
            for path in arena_dir.glob("*/*/*.slot"):
                try:
                    sizes += path.stat().st_size
                except FileNotFoundError:
                    continue
            seen.append(sizes)

    watching = threading.Thread(target=watch)
    watching.start()
    yield seen
    is_over.set()
    watching.join()


def wide() -> dict[str, Any]:
    """A state of 60 MiB."""
    return build(wide=2170, layers=2)


def stored(root: Path, step: int) -> dict[str, bytes]:
    again = wide()
    train(again, 0)
    holdfast.load(root, again, step)
    return content(again)


def reasons(heard: list[events.Event]) -> list[str]:
    return [event.reason for event in heard if isinstance(event, events.SnapshotMissed)]


def wait_until(found: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not found():
        assert time.monotonic() < deadline, f"{what} did not come in {timeout_s:g} s"
        time.sleep(0.005)


@pytest.mark.timeout(300)
def test_a_state_larger_than_the_arena_is_durable_bit_for_bit_and_kept_nowhere_else(
    tmp_path: Path, arena_dir: Path, watched: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    root, state, truth = tmp_path / "run", wide(), {}
    with listening() as heard:
        checkpointer = holdfast.Checkpointer(root, state, storage=holdfast.Every(steps=3))
        for step in range(10):
            train(state, step)
            truth[step] = content(state)
            handle = checkpointer.step(step)
            # The next update begins at once: the fence alone keeps it out of the file.
            if handle is not None and handle.durable and step % 2:
                handle.wait_captured(60)
                assert handle.state == "durable", "captured, and yet no memory has it"
        checkpointer.close()
    published = [manifest.step for manifest in catalogue(LocalStore(root)).manifests]
    assert published[-1] == 9 and len(published) >= 3
    for step in published:
        assert stored(root, step) == truth[step], f"step {step}"
    assert 2 * MIB < max(watched) <= ARENA_BYTES
    kinds = {type(event) for event in heard}
    assert events.ImagePassed in kinds and events.ImageCaptured not in kinds
    assert not read_events(root, "*", "SnapshotCaptured")
    notices = [
        line for line in capsys.readouterr().err.splitlines() if "only durable saves" in line
    ]
    assert len(notices) == 1 and "shared memory too small" in notices[0]
    assert sum("only durable saves" in reason for reason in reasons(heard)) >= 3
    report = read_report(root)
    durable = [save for save in report.saves if save.state == "durable"]
    assert {save.step for save in durable} == set(published)
    assert all(0 < save.ring_bytes <= ARENA_BYTES for save in durable)


@pytest.mark.timeout(300)
def test_memory_that_grows_keeps_snapshots_again(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, state = tmp_path / "run", wide()
    checkpointer = holdfast.Checkpointer(root, state, storage=holdfast.Every(steps=1))
    train(state, 0)
    checkpointer.save(0, durable=True).wait_durable(60)
    with checkpointer:
        monkeypatch.setenv("HOLDFAST_ARENA_BYTES", str(400 * MIB))
        kill_keeper(arena_dir)  # the next one is told of more
        wait_until(lambda: not keeper_pids(arena_dir), "the keeper's end")
        for step in range(1, 4):
            train(state, step)
            handle = checkpointer.save(step, durable=True)
            handle.wait_durable(60)
    assert read_events(root, "rank-*", "ImageCaptured")[-1]["step"] == 3
    assert not [r for r in slot_records(arena_dir) if r.ring_bytes]


@pytest.mark.timeout(300)
def test_an_update_waits_for_slow_storage_no_longer_than_until_the_copy_is_made(
    tmp_path: Path, gates: tuple[Path, Path], watched: list[int]
) -> None:
    shut, _ = gates
    root, state = tmp_path / "run", wide()
    train(state, 0)
    checkpointer = holdfast.Checkpointer(root, state, storage=None, memory=None)
    checkpointer.save(0, durable=True).wait_durable(60)
    shut.touch()
    expected = content(state)
    handle = checkpointer.save(1, durable=True)
    updated = threading.Event()

    def update() -> None:
        train(state, 1)
        updated.set()

    training = threading.Thread(target=update)
    training.start()
    assert not updated.wait(1.0), "the update overtook a copy that had no room"
    shut.unlink()
    assert updated.wait(30)
    training.join()
    handle.wait_durable(60)
    assert stored(root, 1) == expected != content(state)
    assert max(watched) <= ARENA_BYTES
    checkpointer.close()


@pytest.mark.timeout(300)
def test_storage_that_hangs_costs_the_save_and_lets_training_go(
    tmp_path: Path, gates: tuple[Path, Path]
) -> None:
    shut, _ = gates
    root, state = tmp_path / "run", wide()
    train(state, 0)
    with listening() as heard:
        checkpointer = holdfast.Checkpointer(root, state, storage=None, memory=None)
        checkpointer._saver.timeouts = Timeouts(room_s=0.5, durable_grant_s=2.0)
        checkpointer.save(0, durable=True).wait_durable(60)
        shut.touch()
        handle = checkpointer.save(1, durable=True)
        train(state, 1)  # given up while it was fenced
        with pytest.raises(holdfast.SnapshotSkipped, match=r"storage took nothing for 0\.5 s"):
            handle.wait_captured(30)
        # Storage still hangs in the first one: the next is not begun, and holds nothing for long.
        again = checkpointer.save(2, durable=True)
        train(state, 2)
        assert again.state != "durable"
        shut.unlink()
        expected, last = content(state), None
        for step in range(3, 100):
            last = checkpointer.save(step, durable=True)
            checkpointer._saver.end_capture(timeout_s=30)
            if not checkpointer._saver.previous_was_skipped():
                break
        assert last is not None
        last.wait_durable(60)
        checkpointer.close()
    assert stored(root, last.step) == expected
    assert any("storage took nothing" in reason for reason in reasons(heard))
    assert not unpublished_attempts(root)


@pytest.mark.timeout(300)
def test_a_disk_that_fills_up_in_the_middle_lets_training_go_and_leaves_nothing(
    tmp_path: Path, gates: tuple[Path, Path]
) -> None:
    _, full = gates
    root, state = tmp_path / "run", wide()
    train(state, 0)
    checkpointer = holdfast.Checkpointer(root, state, storage=None, memory=None)
    checkpointer.save(0, durable=True).wait_durable(60)
    first = content(state)
    full.touch()
    for step in range(1, 4):
        handle = checkpointer.save(step, durable=True)
        train(state, step)
        with pytest.raises(holdfast.SaveError, match="No space left"):
            handle.wait_captured(30)
        with pytest.raises(holdfast.SaveError, match="No space left"):
            handle.wait_durable(30)
    assert stored(root, 0) == first
    wait_until(lambda: not unpublished_attempts(root), "the end of what could not be written")
    full.unlink()
    checkpointer.save(4, durable=True).wait_durable(60)
    assert stored(root, 4) == content(state)
    checkpointer.close()


def test_a_limit_that_is_no_number_of_bytes_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for said in ("64MiB", "-1", "0", "1e9", "²"):
        monkeypatch.setenv("HOLDFAST_ARENA_BYTES", said)
        with pytest.raises(holdfast.UsageError, match=r"HOLDFAST_ARENA_BYTES is .*bytes"):
            holdfast.Checkpointer(tmp_path / "run", build())


def newest(root: Path) -> int:
    latest = catalogue(LocalStore(root)).latest
    return -1 if latest is None else latest.step


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", [1, 2])
def test_whoever_is_killed_in_the_middle_a_published_checkpoint_comes_back(
    world: int, tmp_path: Path, arena_dir: Path
) -> None:
    root, chance = tmp_path / "run", random.Random(world)
    life = {"storage": 1, "rows": ROWS, "layout": "fsdp"}
    with Lives(root, seed=world) as lives:
        for whom in ("keeper", "trainer", "trainer", "keeper and trainers"):
            before = newest(root)
            lives.start(world, 100_000, **life)
            step, source = lives.wait_restored(world)
            assert (step, source) == (before, "storage" if before >= 0 else "")
            wait_until(lambda: newest(root) >= before + 2, "checkpoints")  # noqa: B023
            known = unpublished_attempts(root)
            wait_until(lambda: bool(unpublished_attempts(root) - known), "a write")  # noqa: B023
            time.sleep(chance.random() * 0.05)
            if "keeper" in whom:
                kill_keeper(arena_dir)
            if whom == "keeper":
                killed_at = newest(root)
                pids = lives.pids
                wait_until(lambda: newest(root) >= killed_at + 2, "the next")  # noqa: B023
                assert all(os.path.exists(f"/proc/{pid}") for pid in pids), "a rank died"
            lives.raise_errors()
            lives.kill([0])
            lives.end(world)
            # What the keeper has whole of a save it may still publish, and nothing else.
            time.sleep(0.3)
        before = newest(root)
        lives.start(world, 3, **life)
        assert lives.wait_restored(world) == (before, "storage")
        lives.wait_end(120)
    check_storage(root, before + 3)
    assert not read_events(root, "rank-*", "ImageCaptured")


def test_two_ranks_of_a_host_share_what_room_there_is(tmp_path: Path, arena_dir: Path) -> None:
    with Lives(tmp_path / "run", seed=9) as lives:
        lives.start(2, 6, storage=2, rows=ROWS, layout="fsdp")
        lives.wait_restored(2)
        lives.wait_end(120)
    passed = read_events(tmp_path / "run", "rank-*", "ImagePassed")
    assert {event["rank"] for event in passed} == {0, 1}
    assert len({event["ring_bytes"] for event in passed}) == 1
    check_storage(tmp_path / "run", 5)


def test_what_is_in_memory_from_before_stays_and_a_ring_takes_only_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arena_dir: Path
) -> None:
    monkeypatch.setenv("HOLDFAST_ARENA_BYTES", str(80 * MIB))  # one image and part of another
    root, state = tmp_path / "run", wide()
    checkpointer = holdfast.Checkpointer(root, state, storage=None)
    train(state, 0)
    checkpointer.save(0).wait_captured(60)
    kept = content(state)
    for step in (1, 2):
        train(state, step)
        checkpointer.save(step, durable=True).wait_durable(60)
        assert stored(root, step) == content(state)
        held = [r for r in slot_records(arena_dir) if r.state == "captured"]
        assert [r.step for r in held] == [0]
    # Storage is lost: what memory has is what comes back.
    checkpointer._hang_up()
    for manifest in (root / "manifests").glob("*.json"):
        manifest.unlink()
    again = wide()
    train(again, 0)
    newer = holdfast.Checkpointer(root, again, storage=None)
    restored = newer.restore()
    assert restored is not None and (restored.step, restored.source) == (0, "memory")
    assert content(again) == kept
    newer.close()
    torch.manual_seed(0)
