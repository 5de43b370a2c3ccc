"""The kernel takes the keeper's memory away: killed for it, or refused more; training goes on.

The first needs a memory controller that this user may write to, the second only ``prlimit``.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import holdfast
from support.runs.evidence import check_storage, newest_sealed, read_events
from support.runs.leftovers import keeper_pids
from support.runs.lives import Lives, read_progress

CONTROLLER = Path("/sys/fs/cgroup/memory")
MIB = 1 << 20
#: 80 MB of state.
ROWS = 610
#: The first slot is made some steps after the keeper's start: time to take its memory away.
LATER = {"memory": holdfast.Every(steps=20)}


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A control group of this size for one test; skipped where none can be made."""
    group = CONTROLLER / f"holdfast-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"no memory controller to write to at {CONTROLLER}: {error}")
    try:
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)  # only what the test put there
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "an empty group")
        group.rmdir()


def kills_in(group: Path) -> int:
    """How often the kernel killed somebody in this group for want of memory."""
    lines = (group / "memory.oom_control").read_text().splitlines()
    return int(next((line.split()[1] for line in lines if line.startswith("oom_kill ")), "0"))


def wait_until(found: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Wait for something other processes do."""
    deadline = time.monotonic() + timeout_s
    while not found():
        assert time.monotonic() < deadline, f"{what} did not come in {timeout_s:g} s"
        time.sleep(0.01)


def wait_sealed(lives: Lives, step: int) -> None:
    """Wait until ``step`` or a later one is sealed."""

    def is_sealed() -> bool:
        lives.raise_errors()
        return newest_sealed(lives.root, 1) >= step

    wait_until(is_sealed, f"a snapshot of step {step} or later")


def wait_keeper(arena_dir: Path) -> int:
    """The keeper, as soon as there is one."""
    wait_until(lambda: bool(keeper_pids(arena_dir)), "a keeper")
    return keeper_pids(arena_dir)[0]


def end_and_resume(lives: Lives) -> None:
    """Kill the trainer; the next one has what was sealed, from memory."""
    sealed, completed = newest_sealed(lives.root, 1), lives.end(1)
    lives.start(1, 3, layout="plain", rows=ROWS)
    step, source = lives.wait_restored(1)
    assert sealed <= step <= completed and source == "memory"
    lives.wait_end()
    check_storage(lives.root, step + 3)


@pytest.mark.timeout(300)
def test_training_goes_on_when_the_kernel_kills_the_keeper_for_its_memory(
    tmp_path: Path, arena_dir: Path
) -> None:
    # Room for the keeper and one slot, not for the second: the kernel kills it over that.
    with memory_group(128 * MIB) as group, Lives(tmp_path / "run", seed=1) as lives:
        lives.start(1, 100_000, layout="plain", rows=ROWS, options=LATER)
        keeper = wait_keeper(arena_dir)
        (group / "cgroup.procs").write_text(str(keeper))
        wait_until(lambda: kills_in(group) > 0, "a kill by the kernel")
        wait_until(lambda: keeper not in keeper_pids(arena_dir), "the keeper's end")
        wait_sealed(lives, read_progress(lives.directory, 1) + 5)
        lost = read_events(lives.root, "rank-*", "KeeperLost")
        assert len(lost) == 1
        end_and_resume(lives)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_keeper_that_is_refused_memory_says_so_and_training_goes_on(
    tmp_path: Path, arena_dir: Path
) -> None:
    with Lives(tmp_path / "run", seed=2) as lives:
        lives.start(1, 100_000, layout="plain", rows=ROWS, options=LATER)
        lives.wait_restored(1)
        keeper = wait_keeper(arena_dir)
        maps = Path(f"/proc/{keeper}/maps")
        wait_until(lambda: "numpy" in maps.read_text(), "all that the keeper loads")
        has_bytes = 4096 * int(Path(f"/proc/{keeper}/statm").read_text().split()[0])
        before = resource.prlimit(keeper, resource.RLIMIT_AS, (has_bytes + 40 * MIB, -1))

        def reasons() -> set[str]:
            lives.raise_errors()
            told = read_events(lives.root, "rank-*", "SnapshotMissed")
            return {event["reason"] for event in told}

        wait_until(lambda: len(read_events(lives.root, "keeper", "SnapshotMissed")) > 3, "skips")
        # A slot that cannot be mapped, or a thread that would write what passes through a ring.
        short = ("Cannot allocate memory", "can't start new thread")
        assert any(one in reason for reason in reasons() for one in short), reasons()
        left = {str(path) for path in arena_dir.glob("*/*/*.slot")}
        unmapped = {path for path in left if path not in maps.read_text()}
        assert not unmapped, "what could not be mapped was left behind"
        assert keeper_pids(arena_dir) == [keeper]
        resource.prlimit(keeper, resource.RLIMIT_AS, before)
        wait_sealed(lives, read_progress(lives.directory, 1) + 5)
        assert keeper_pids(arena_dir) == [keeper]
        end_and_resume(lives)
