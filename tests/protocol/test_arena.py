"""The arena: slots allocated whole, nobody else's files, and one keeper at a time."""

from __future__ import annotations

import errno
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.errors import ArenaError
from holdfast.protocol.arena import (
    IMAGE_START,
    PAGE_BYTES,
    SlotFile,
    arena_dir,
    boot_id,
    is_running,
    lock_dir,
    make_private_dir,
    process_start,
    remove_arena,
)
from support.checkpoints.slots import record

# ── memory ───────────────────────────────────────────────────────────────────────────────────


def test_a_slot_is_allocated_whole_when_it_is_made(tmp_path: Path) -> None:
    slot = SlotFile.create(tmp_path / "1.slot", 1 << 20)
    found = slot.path.stat()
    assert found.st_size == IMAGE_START + (1 << 20)
    assert found.st_blocks * 512 >= found.st_size
    assert stat.S_IMODE(found.st_mode) == 0o600


def test_too_little_memory_is_an_arena_error_that_says_how_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = SimpleNamespace(f_bavail=256, f_frsize=4096, f_blocks=1000)
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    SlotFile.create(tmp_path / "1.slot", (1 << 20) - IMAGE_START)
    with pytest.raises(ArenaError, match=r"needs 4 MiB in .* 1 MiB are free") as caught:
        SlotFile.create(tmp_path / "2.slot", 4 << 20)
    assert caught.value.fields == {"needed_bytes": (4 << 20) + IMAGE_START, "free_bytes": 1 << 20}
    assert not (tmp_path / "2.slot").exists()


def test_memory_that_goes_away_while_it_is_taken_is_an_arena_error_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ArenaError, match="shared memory too small"):
        SlotFile.create(tmp_path / "1.slot", 4096)
    assert not (tmp_path / "1.slot").exists()


def test_populating_changes_nothing(slot: SlotFile) -> None:
    slot.write_record(record(1))
    slot.image[:3] = b"abc"
    slot.populate()
    assert slot.read_record() == record(1)
    assert bytes(slot.image[:3]) == b"abc"


# ── whose files they are ─────────────────────────────────────────────────────────────────────


def test_an_arena_directory_is_ours_alone(tmp_path: Path) -> None:
    made = tmp_path / "home" / "run@host"
    for _ in range(2):  # it may be there already
        make_private_dir(made)
        assert stat.S_IMODE(made.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o777])
def test_an_arena_directory_that_others_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    foreign = tmp_path / "arena"
    foreign.mkdir()
    foreign.chmod(mode)
    with pytest.raises(ArenaError, match="only this user"):
        make_private_dir(foreign)
    assert stat.S_IMODE(foreign.stat().st_mode) == mode


def test_an_arena_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "arena").mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ArenaError, match="owner"):
        make_private_dir(tmp_path / "arena")


@pytest.mark.parametrize("leads_to", ["a directory", "a file", "nothing"])
def test_a_link_in_place_of_an_arena_directory_is_refused(tmp_path: Path, leads_to: str) -> None:
    target = tmp_path / "target"
    if leads_to == "a directory":
        target.mkdir(mode=0o700)
    elif leads_to == "a file":
        target.touch()
    (tmp_path / "arena").symlink_to(target)
    with pytest.raises(ArenaError):
        make_private_dir(tmp_path / "arena")


def test_a_file_in_place_of_an_arena_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "arena").touch()
    with pytest.raises(ArenaError):
        make_private_dir(tmp_path / "arena")


@pytest.mark.parametrize("writable", [False, True])
def test_a_link_in_place_of_a_slot_is_not_opened(slot: SlotFile, writable: bool) -> None:
    link = slot.path.with_name("00002.slot")
    link.symlink_to(slot.path)
    with pytest.raises(ArenaError, match="cannot open slot"):
        SlotFile.open(link, writable=writable)


def test_a_slot_is_never_made_over_a_link_or_a_file(slot: SlotFile) -> None:
    slot.write_record(record(1))
    link = slot.path.with_name("00002.slot")
    link.symlink_to(slot.path)
    for taken in (link, slot.path):
        with pytest.raises((ArenaError, FileExistsError)):
            SlotFile.create(taken, PAGE_BYTES)
    assert slot.path.stat().st_size == IMAGE_START + 3 * PAGE_BYTES
    assert slot.read_record() == record(1)


def test_what_is_no_slot_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArenaError, match="cannot open slot"):
        SlotFile.open(tmp_path / "missing.slot", writable=True)
    (tmp_path / "short.slot").write_bytes(bytes(IMAGE_START))
    with pytest.raises(ArenaError, match="not a slot of ours"):
        SlotFile.open(tmp_path / "short.slot", writable=True)
    with pytest.raises(ArenaError):
        SlotFile.open(tmp_path, writable=False)
    good = SlotFile.create(tmp_path / "good.slot", PAGE_BYTES)
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ArenaError, match="not a slot of ours"):
        SlotFile.open(good.path, writable=False)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_slot_that_others_can_open_is_refused(slot: SlotFile, mode: int) -> None:
    slot.path.chmod(mode)
    with pytest.raises(ArenaError, match="not a slot of ours"):
        SlotFile.open(slot.path, writable=True)


def test_a_pipe_in_place_of_a_slot_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "1.slot", 0o600)
    with pytest.raises(ArenaError, match="not a slot of ours"):
        SlotFile.open(tmp_path / "1.slot", writable=True)


def test_a_slot_opened_to_read_cannot_be_written(slot: SlotFile) -> None:
    reader = SlotFile.open(slot.path, writable=False)
    with pytest.raises(TypeError):
        reader.image[0] = 1
    with pytest.raises(TypeError):
        reader.write_record(record(1))


def test_opening_keeps_no_descriptor(slot: SlotFile) -> None:
    before = len(os.listdir("/proc/self/fd"))
    kept = [SlotFile.open(slot.path, writable=True) for _ in range(3)]
    with pytest.raises(ArenaError):
        SlotFile.open(Path("/dev/null"), writable=False)
    # A mapping has a descriptor of its own (mmap duplicates it), and closing gives it back.
    for one in kept:
        one.close()
    assert len(os.listdir("/proc/self/fd")) == before


# ── the arena as a whole ─────────────────────────────────────────────────────────────────────


def test_one_keeper_at_a_time_holds_the_lock(tmp_path: Path) -> None:
    first = lock_dir(tmp_path)
    assert first is not None
    assert lock_dir(tmp_path) is None
    os.close(first)
    second = lock_dir(tmp_path)
    assert second is not None
    os.close(second)


def test_an_arena_is_removed_with_all_it_holds(arena_dir: Path) -> None:
    arena = arena_dir / "run@host"
    make_private_dir(arena)
    SlotFile.create(arena / "1.slot", PAGE_BYTES).close()
    (arena / "layouts").mkdir()
    remove_arena(arena)
    remove_arena(arena)  # missing is fine
    assert list(arena_dir.iterdir()) == []


def test_runs_and_hosts_have_arenas_of_their_own() -> None:
    names = {arena_dir(run, host) for run in ("r", "s") for host in ("g", "h")}
    assert len(names) == 4
    assert len({name.parent for name in names}) == 1


# ── processes ────────────────────────────────────────────────────────────────────────────────


def test_a_process_is_known_by_its_pid_and_its_start() -> None:
    pid, start = os.getpid(), process_start(os.getpid())
    assert start > 0
    assert is_running(pid, start)
    assert not is_running(pid, start + 1)  # the pid was used again
    assert is_running(0, 0)  # of another pid namespace: nobody here can tell


def test_a_process_that_ended_is_not_running_even_before_it_is_waited_for() -> None:
    command = [sys.executable, "-SIc", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        start = process_start(child.pid)
        assert is_running(child.pid, start)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
        assert not is_running(child.pid, start)
    assert not is_running(child.pid, start)
    assert process_start(child.pid) == 0


def test_the_boot_is_known() -> None:
    assert len(boot_id()) == 36
    assert boot_id() == boot_id()


def test_a_process_that_lives_is_not_taken_for_dead_when_no_descriptor_is_left() -> None:
    """A keeper would give the slot that it copies into to another rank."""
    pid, start = os.getpid(), process_start(os.getpid())
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        running = is_running(pid, start)
        with pytest.raises(OSError, match="Too many open files"):
            process_start(pid)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert running
