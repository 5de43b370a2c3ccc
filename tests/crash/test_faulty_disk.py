"""A real run whose keeper's system calls fail, stop short, are late or kill it.

Training goes on, what was told durable stays whole, and the next save succeeds when the disk is
well again.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest

from holdfast.catalogue import catalogue
from holdfast.storage.local import LocalStore
from holdfast.testing.faults import newest_durable
from holdfast.testing.faults.faulty_calls import Action, Call, CallRule, FaultyCalls, missing
from support.runs.evidence import check_storage, read_events
from support.runs.leftovers import keeper_pids
from support.runs.lives import Lives, read_progress

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(missing()), reason=f"this machine lacks {missing()}"),
]

ROWS = 301
IMAGES, PUBLICATION = "/run/steps/", "/run/manifests/"


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyCalls:
    made = FaultyCalls(tmp_path / "faults")
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    return made


def failing(call: Call, path: str, code: int, **which: int) -> CallRule:
    return CallRule((call,), path, Action.FAIL, code, **which)


#: Each is there until it has met a call and training has gone on; with the reason that is told.
BROKEN = {
    "full": (failing(Call.ALLOCATE, IMAGES, errno.ENOSPC), "No space left"),
    "writes fail": (failing(Call.WRITE, IMAGES, errno.EIO), "Input/output error"),
    "second write fails": (failing(Call.WRITE, IMAGES, errno.EIO, first=2), "Input/output error"),
    "quota": (failing(Call.OPEN, IMAGES, errno.EDQUOT), "quota"),
    "sync fails": (failing(Call.SYNC, IMAGES, errno.EIO), "Input/output error"),
    "read-only": (failing(Call.MAKE_DIRECTORY, IMAGES, errno.EROFS), "Read-only"),
    "manifest is not written": (failing(Call.LINK, PUBLICATION, errno.EIO), "Input/output error"),
    "manifest is not synced": (failing(Call.SYNC, PUBLICATION, errno.EIO), "Input/output error"),
}
STRAINED = {
    "short writes": CallRule((Call.WRITE,), IMAGES, Action.SHORTEN, 70_000),
    "slow syncs": CallRule((Call.SYNC,), IMAGES, Action.DELAY, 400),
}


def wait_met(faults: FaultyCalls, number: int, what: str) -> None:
    until_s = time.monotonic() + 60
    while not faults.met(number):
        assert time.monotonic() < until_s, f"{what}: no call was met"
        time.sleep(0.02)


def wait_durable(root: Path, step: int, what: str) -> int:
    until_s = time.monotonic() + 60
    while (found := newest_durable(root)) is None or found.step <= step:
        assert time.monotonic() < until_s, f"{what}: nothing later than {step} became durable"
        time.sleep(0.02)
    return found.step


def reasons(root: Path, since: int) -> list[str]:
    return [event["reason"] for event in read_events(root, "keeper", "PersistBroke")[since:]]


def test_training_goes_on_and_what_is_told_durable_is_whole(
    tmp_path: Path, arena_dir: Path, faults: FaultyCalls
) -> None:
    root = tmp_path / "run"
    with Lives(root, seed=61) as lives:
        lives.start(2, 100_000, storage=4, pause_s=0.02, rows=ROWS)
        lives.wait_restored(2)
        wait_durable(root, -1, "before")
        for what, (rule, reason) in BROKEN.items():
            told = len(reasons(root, 0))
            number = faults.add(rule)
            wait_met(faults, number, what)
            lives.wait_progress(2, read_progress(lives.directory, 2) + 12)
            assert any(reason in one for one in reasons(root, told)), (what, reasons(root, told))
            faults.remove(number)
            wait_durable(root, read_progress(lives.directory, 2), what)
        for what, rule in STRAINED.items():
            number = faults.add(rule)
            wait_met(faults, number, what)
            wait_durable(root, read_progress(lives.directory, 2), what)
            faults.remove(number)
        lives.end(2)
        assert keeper_pids(arena_dir), "the keeper ended"
        newest = check_and_forget(root, arena_dir)
        lives.start(2, 20, storage=4, rows=ROWS)
        step, source = lives.wait_restored(2)  # which looks at every element
        assert (step, source) == (newest, "storage")
        lives.wait_end()


KILLING = [
    (Call.OPEN, IMAGES, 2),
    (Call.ALLOCATE, IMAGES, 2),
    (Call.WRITE, IMAGES, 3),
    (Call.SYNC, IMAGES, 1),
    (Call.SYNC, IMAGES, 3),
    (Call.LINK, PUBLICATION, 1),
    (Call.SYNC, PUBLICATION, 1),
    (Call.SYNC, PUBLICATION, 2),
    (Call.REMOVE, "/run/", 1),
    (Call.REMOVE, "/run/", 4),
]


@pytest.mark.slow
@pytest.mark.parametrize("at", KILLING, ids=lambda at: f"{at[0].name}-{at[2]}")
def test_a_keeper_killed_at_a_call_leaves_what_was_told(
    tmp_path: Path, arena_dir: Path, faults: FaultyCalls, at: tuple[Call, str, int]
) -> None:
    call, path, first = at
    root = tmp_path / "run"
    with Lives(root, seed=62) as lives:
        lives.start(2, 100_000, storage=4, pause_s=0.02, rows=ROWS)
        lives.wait_restored(2)
        wait_durable(root, -1, "before")
        rule = CallRule((call,), path, Action.SIGNAL, signal.SIGKILL, first, first)
        number = faults.add(rule)
        wait_met(faults, number, call.name)
        told = newest_durable(root)
        reached = read_progress(lives.directory, 2)
        wait_durable(root, reached, "after")  # by the next keeper
        lives.end(2)
        newest = check_and_forget(root, arena_dir)
        assert told is not None and newest >= told.step
        lives.start(2, 20, storage=4, rows=ROWS)
        assert lives.wait_restored(2) == (newest, "storage")
        lives.wait_end()


def check_and_forget(root: Path, arena_dir: Path) -> int:
    """Ends the keepers and their memory; returns the newest step that storage has, all read."""
    for pid in keeper_pids(arena_dir):
        os.kill(pid, signal.SIGKILL)
    while keeper_pids(arena_dir):
        time.sleep(0.02)
    for slot in arena_dir.glob("*/*/*.slot"):
        slot.unlink()
    found = catalogue(LocalStore(root))
    told = newest_durable(root)
    assert found.latest is not None and told is not None and found.latest.step >= told.step
    check_storage(root, found.latest.step)
    return found.latest.step
