"""What doctor sees: limits, file systems, torch, and arenas of living, stopped and dead runs."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.catalogue import ROOT
from holdfast.cli import main
from holdfast.cli.doctor import host as place_facts
from holdfast.cli.doctor import user_arenas as arena_facts
from holdfast.cli.doctor.accelerator import driver, probe_torch
from holdfast.cli.doctor.host import measure, probe_host, probe_place
from holdfast.cli.doctor.rules.probe_facts import Arena
from holdfast.cli.doctor.user_arenas import clear, probe_arenas
from holdfast.errors import NotFound
from holdfast.format import manifest as documents
from holdfast.format.manifest import seal
from holdfast.protocol.arena import (
    SlotFile,
    SlotRecord,
    arena_dir,
    arena_home,
    boot_id,
    lock_dir,
    make_private_dir,
    process_start,
)
from holdfast.protocol.client import find_or_start
from holdfast.protocol.control_groups import cores_quota, memory_bytes, memory_limit_bytes
from holdfast.storage.files import mounted_at
from holdfast.storage.local import LocalStore
from support.checkpoints.roots import fill
from support.runs.leftovers import keeper_pids

Out = pytest.CaptureFixture[str]


def tree(directory: Path, **files: str) -> Path:
    """Files by path, with ``__`` for "/" and ``_dot_`` for "."."""
    for name, text in files.items():
        path = directory / name.replace("_dot_", ".").replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


# ── limits ─────────────────────────────────────────────────────────────────────────────────────


def test_the_tightest_limit_of_nested_control_groups_counts(tmp_path: Path) -> None:
    proc = tree(tmp_path / "proc", self__cgroup="0::/pod/box\n")
    groups = tree(
        tmp_path / "cgroup",
        pod__cpu_dot_max="150000 100000",
        pod__box__cpu_dot_max="max 100000",
        pod__memory_dot_max="max",
        pod__box__memory_dot_max="8000000000",
        cpu_dot_max="400000 100000",
    )
    assert cores_quota(proc, groups) == 1.5
    assert memory_limit_bytes(proc, groups) == 8_000_000_000


def test_control_groups_of_version_1_are_read_too(tmp_path: Path) -> None:
    proc = tree(tmp_path / "proc", self__cgroup="4:memory:/a\n3:cpu,cpuacct:/a\n2:cpuset:/\n0::/\n")
    groups = tree(
        tmp_path / "cgroup",
        cpu__a__cpu_dot_cfs_quota_us="-1",
        cpu__a__cpu_dot_cfs_period_us="100000",
        cpu__cpu_dot_cfs_quota_us="250000",
        cpu__cpu_dot_cfs_period_us="100000",
        memory__a__memory_dot_limit_in_bytes="5000000000",
        memory__memory_dot_limit_in_bytes="9223372036854771712",
    )
    assert cores_quota(proc, groups) == 2.5
    assert memory_limit_bytes(proc, groups) == 5_000_000_000


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert cores_quota(tmp_path, tmp_path) is None
    assert memory_limit_bytes(tmp_path, tmp_path) is None
    assert memory_bytes(tmp_path) == 0


def test_this_machine_is_seen_as_it_is() -> None:
    host = probe_host()
    assert host.system == "Linux" and host.python == sys.version_info[:3]
    assert 0 < host.cores_usable <= host.cores_allowed <= host.cores
    assert host.memory_bytes > 1 << 28


# ── file systems ───────────────────────────────────────────────────────────────────────────────


def test_the_file_system_is_that_of_the_innermost_latest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/a rw\n"
        "2 1 8:2 / /mnt/two\\040words rw,noatime shared:1 - nfs4 server:/x rw\n"
        "3 1 8:3 / /mnt/b rw - xfs /dev/b rw\n"
        "4 3 8:4 / /mnt/b rw - tmpfs tmpfs rw\n"
    )
    assert mounted_at(Path("/mnt/two words/x"), mounts) == ("nfs4", "/mnt/two words")
    assert mounted_at(Path("/mnt/b"), mounts) == ("tmpfs", "/mnt/b")
    assert mounted_at(Path("/mnt/bc"), mounts) == ("ext4", "/")
    assert mounted_at(Path("/"), tmp_path / "none") == ("", "")


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """64 MiB of memory, as a container gets for /dev/shm."""
    directory = tmp_path / "shm"
    directory.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(directory)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def test_the_shared_memory_of_a_container_is_found_too_small(
    small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    place = probe_place(str(small_tmpfs))
    assert (place.kind, place.mount, place.size_bytes) == ("tmpfs", str(small_tmpfs), 64 << 20)
    monkeypatch.setenv("HOLDFAST_ARENA_DIR", str(small_tmpfs))
    assert main(["doctor", str(small_tmpfs / "run"), "--quick"]) == 11
    said = capsys.readouterr().out
    assert "--shm-size" in said
    assert "gone after a reboot" in said


def test_what_a_directory_can_do_is_tried_out_and_nothing_stays(tmp_path: Path) -> None:
    place = probe_place(str(tmp_path))
    assert (place.links, place.locks, place.fault) == (True, True, "")
    assert 0 < place.free_bytes < place.size_bytes
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_to_says_why() -> None:
    assert probe_place("/proc/self").fault != ""


def test_speed_is_measured_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place_facts, "BUDGET_S", 0.05)
    for is_direct in (False, probe_place(str(tmp_path)).is_direct):
        speeds = measure(replace(probe_place(str(tmp_path)), is_direct=is_direct))
        assert min(filter(None, (speeds.write, speeds.read, speeds.copy, speeds.checksum))) > 1000
        assert None not in (speeds.write, speeds.read)
    assert list(tmp_path.iterdir()) == []
    full = replace(probe_place(str(tmp_path)), free_bytes=1 << 20)
    assert measure(full).write is None, "a full disk is not filled up further"


# ── torch ──────────────────────────────────────────────────────────────────────────────────────


def test_torch_is_asked_in_a_process_of_its_own_that_may_fail_or_hang() -> None:
    said = {"built_for": "12.6", "cuda": True, "accelerator": "cuda", "devices": ["H200"]}
    says = f"print({json.dumps(said | {'pinning': None})!r})"
    assert probe_torch(ask=True, script=says).devices == ("H200",)
    assert probe_torch(ask=True, script="raise OSError('libcuda')").fault == "OSError: libcuda"
    assert probe_torch(ask=True, script="import os; os.abort()").fault == "it ended with -6"
    assert probe_torch(ask=True, script="print('hello')").fault != ""
    hangs = probe_torch(ask=True, script="import sys; sys.stdin.read(); input()", timeout_s=30)
    assert hangs.fault == "EOFError: EOF when reading a line"
    stuck = probe_torch(ask=True, script="import signal; signal.pause()", timeout_s=0.5)
    assert stuck.fault == "no answer within 0.5 s"
    assert probe_torch(ask=False).cuda is None


def test_doctor_itself_loads_no_torch() -> None:
    script = (
        "import sys; from holdfast.cli import main\n"
        "main(['doctor', '--quick', '--json']); assert 'torch' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_the_driver_is_read_from_the_kernel(tmp_path: Path) -> None:
    path = tmp_path / "version"
    assert driver(path) == ""
    path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 2024\n")
    assert driver(path) == "550.54.15"


# ── arenas ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def keepers(arena_dir: Path) -> Iterator[list[int]]:
    """Processes to be killed at the end."""
    pids: list[int] = []
    yield pids
    for pid in {*pids, *keeper_pids(arena_dir)}:
        kill(pid)


def kill(pid: int) -> None:
    """SIGKILL, and wait until the kernel has let go of what it held."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT)
    os.close(descriptor)


def start_keeper(root: Path, keepers: list[int], run_id: str = "r") -> Path:
    """A keeper of ``root``, and its arena."""
    root_id = identity_of(root)
    arena = arena_dir(run_id, "here", root_id)
    find_or_start(
        arena, run_id=run_id, root=str(root), host_id="here", timeout_s=30, root_id=root_id
    ).close()
    keepers.extend(keeper_pids(arena))
    return arena


def identity_of(root: Path) -> str:
    """What arenas of this root are known by; "" where none is."""
    try:
        return LocalStore(root).identity()
    except NotFound:
        return ""


def put_snapshot(arena: Path, step: int, ranks: tuple[int, ...] = (0, 1), **change: Any) -> None:
    """Slots as two trainers leave them, captured."""
    said = arena / "root"
    root_id = identity_of(Path(said.read_text())) if said.exists() else ""
    for rank in ranks:
        slot_id = len(list(arena.glob("*.slot")))
        slot = SlotFile.create(arena / f"{slot_id:05d}.slot", 1 << 20)
        fields: dict[str, Any] = {
            "state": "captured",
            "boot_id": boot_id(),
            "run_id": "r",
            "incarnation": 2,
            "step": step,
            "attempt": f"a2x{step}",
            "rank": rank,
            "world": 2,
            "image_bytes": 1 << 20,
            "writer_pid": 4194303,
            "writer_start": 1,  # long gone
            "root_id": root_id,
        }
        slot.write_record(SlotRecord(**(fields | change)))
        slot.close()


def only_arena() -> Arena:
    (arena,) = probe_arenas(arena_home())
    return arena


def test_a_living_keeper_answers_and_its_root_is_known(tmp_path: Path, keepers: list[int]) -> None:
    arena = start_keeper(tmp_path, keepers)
    found = only_arena()
    assert (found.path, found.run_id, found.host_id) == (str(arena), "r", "here")
    assert [found.keeper_pid] == keepers
    assert found.answers is True
    assert (found.root, found.root_exists) == (str(tmp_path), True)
    assert not found.is_stale
    assert "a keeper has it" in clear(replace(found, keeper_pid=0, answers=None))
    assert arena.exists()


def test_a_keeper_is_found_by_its_socket_where_locks_are_not_shown(
    tmp_path: Path, keepers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_facts, "holders", lambda _: [])
    start_keeper(tmp_path, keepers)
    assert [only_arena().keeper_pid] == keepers


def test_a_stopped_keeper_is_named_with_its_process_and_state(
    tmp_path: Path, keepers: list[int], monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    monkeypatch.setattr(arena_facts, "ANSWER_TIMEOUT_S", 0.3)
    start_keeper(tmp_path, keepers)
    (pid,) = keepers
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    found = only_arena()
    assert (found.keeper_pid, found.keeper_state, found.answers) == (pid, "T", False)
    assert main(["doctor", "--quick"]) == 11
    said = capsys.readouterr().out
    assert f"process {pid}, is stopped (SIGSTOP)" in said
    assert f"-> kill -CONT {pid}" in said
    os.kill(pid, signal.SIGCONT)
    monkeypatch.setattr(arena_facts, "ANSWER_TIMEOUT_S", 30.0)
    assert only_arena().answers is True


def test_the_arena_of_a_killed_run_is_shown_and_cleared_only_when_asked(
    tmp_path: Path, keepers: list[int], capsys: Out
) -> None:
    root = tmp_path / "run"
    fill(LocalStore(root), [(2, 40)])
    arena = start_keeper(root, keepers)
    put_snapshot(arena, 40)
    put_snapshot(arena, 41)
    put_snapshot(arena, 42, ranks=(1,))  # rank 0 never captured it
    put_snapshot(arena, 43, state="writing")
    kill(keepers[0])
    found = only_arena()
    assert (found.newest, found.newest_is_durable) == ("2-41", False)
    assert found.is_stale and found.size_bytes > 7 << 20
    assert main(["doctor", "--quick"]) == 0
    said = capsys.readouterr().out
    assert f"snapshot 2-41 of {root}, which is nowhere else" in said
    assert f"rm -r {arena}" in said
    assert main(["doctor", "--clean", "--yes"]) == 0
    said = capsys.readouterr().out
    assert f"stays  {arena}" in said and "2-41, NOT in storage" in said
    assert "0 arenas cleared" in said and "1 arena left for the snapshots there" in said
    assert arena.exists()
    assert clear(found) == arena_facts.NEWS, "it is looked at again under the lock"
    assert main(["doctor", "--clean", "--lose-snapshots"]) == 2, "nobody to ask"
    assert f"goes   {arena}" in capsys.readouterr().out
    assert arena.exists()
    assert main(["doctor", "--clean", "--lose-snapshots", "--yes", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["cleared"] == [
        {"path": str(arena), "newest": "2-41", "size_bytes": found.size_bytes}
    ]
    assert list(arena_home().iterdir()) == []
    assert main(["doctor", "--clean", "--yes"]) == 0
    assert "nothing is stale" in capsys.readouterr().out
    assert (root / "manifests" / "2-40.json").exists()


def test_a_snapshot_that_storage_has_too_is_said_to_be_there(
    tmp_path: Path, keepers: list[int]
) -> None:
    fill(LocalStore(tmp_path), [(2, 40)])
    arena = start_keeper(tmp_path, keepers)
    put_snapshot(arena, 40)
    put_snapshot(arena, 50, boot_id="another boot")
    kill(keepers[0])
    assert (only_arena().newest, only_arena().newest_is_durable) == ("2-40", True)
    assert only_arena().has_news is False
    assert main(["doctor", "--clean", "--yes"]) == 0
    assert list(arena_home().iterdir()) == []


def test_an_arena_that_a_process_has_mapped_or_writes_to_is_never_cleared(arena_dir: Path) -> None:
    arena = arena_home() / "r@here"
    make_private_dir(arena)
    put_snapshot(arena, 40)
    mapped = SlotFile.open(arena / "00000.slot", writable=False)
    found = only_arena()
    assert found.users == (os.getpid(),) and not found.is_stale
    assert clear(found) == "it is in use"
    mapped.close()
    put_snapshot(
        arena, 41, state="writing", writer_pid=os.getpid(), writer_start=process_start(os.getpid())
    )
    found = only_arena()
    assert found.users == (os.getpid(),)
    assert clear(found) == "it is in use"
    assert arena.exists()


@pytest.mark.parametrize("is_made_anew", [True, False])
def test_an_arena_that_another_took_the_place_of_is_left_alone(
    arena_dir: Path, monkeypatch: pytest.MonkeyPatch, is_made_anew: bool
) -> None:
    arena = arena_home() / "r@here"
    make_private_dir(arena)
    put_snapshot(arena, 40)
    found = only_arena()

    def lock_the_old_one(path: Path) -> int | None:
        lock = lock_dir(path)
        path.rename(path.with_name(".gone"))  # its run had just ended, and begins again
        if is_made_anew:
            make_private_dir(path)
            put_snapshot(path, 50)
            (path / "lock").touch()
        return lock

    monkeypatch.setattr(arena_facts, "lock_dir", lock_the_old_one)
    assert clear(found, may_lose=True) == "it was removed or made anew meanwhile"
    assert bool(list(arena.glob("*.slot"))) == is_made_anew


def test_what_a_killed_removal_left_is_found_and_cleared(arena_dir: Path) -> None:
    grave = arena_home() / ".r@here.4711"
    make_private_dir(grave)
    put_snapshot(grave, 40)
    found = only_arena()
    assert found.is_grave
    assert clear(found) == ""
    assert probe_arenas(arena_home()) == ()


def test_before_anything_is_cleared_it_is_shown_and_a_person_is_asked(
    arena_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    for name in ("r@here", ".r@here.4711"):
        make_private_dir(arena_home() / name)
    assert main(["doctor", "--clean"]) == 0
    said = capsys.readouterr()
    assert "half removed" in said.out and "no whole snapshot" in said.out
    assert "Clear this?" in said.err
    assert len(list(arena_home().iterdir())) == 2


def test_what_came_back_to_life_meanwhile_is_left_alone(
    arena_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    arena = arena_home() / "r@here"
    make_private_dir(arena)

    class Slow(Terminal):
        def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
            assert lock_dir(arena) is not None  # a keeper has started; the lock stays held
            return "y\n"

    monkeypatch.setattr(sys, "stdin", Slow())
    assert main(["doctor", "--clean"]) == 0
    assert "was left alone: a keeper has it" in capsys.readouterr().out
    assert arena.exists()


class Terminal(io.StringIO):
    """Somebody sits there and types."""

    def isatty(self) -> bool:
        return True


def test_half_made_slots_and_foreign_directories_do_not_hide_the_rest(arena_dir: Path) -> None:
    arena = arena_home() / "r@here"
    make_private_dir(arena)
    (arena / "00000.slot").touch(mode=0o600)
    put_snapshot(arena, 7)
    (arena_home() / "readable by all").mkdir(mode=0o755)
    (arena_home() / "link").symlink_to(arena)
    whole, foreign = probe_arenas(arena_home())
    assert whole.newest == "2-7"
    assert "only this user" in foreign.fault and not foreign.is_stale


def make_arena(root: Path, **change: Any) -> Path:
    """The arena of a dead run of ``root``, with one image."""
    arena = arena_dir("r", "here", identity_of(root))
    make_private_dir(arena)
    (arena / "root").write_text(str(root))
    put_snapshot(arena, 41, ranks=(0,), **change)
    return arena


def test_a_hosts_part_of_what_several_hosts_hold_is_never_cleaned_away_unless_storage_is_newer(
    tmp_path: Path, arena_dir: Path, capsys: Out
) -> None:
    fill(LocalStore(tmp_path), [(2, 40)])
    arena = make_arena(tmp_path, hosts=2)
    found = only_arena()
    assert (found.newest, found.part, found.has_news) == ("", "2-41", True)
    assert main(["doctor", "--clean", "--yes"]) == 0
    said = capsys.readouterr().out
    assert "part of snapshot 2-41, NOT in storage" in said and arena.exists()
    fill(LocalStore(tmp_path), [(2, 60)])
    assert (only_arena().part, only_arena().has_news) == ("2-41", False)
    assert main(["doctor", "--clean", "--yes"]) == 0
    assert "not newer than storage" in capsys.readouterr().out and not arena.exists()


def test_an_arena_whose_storage_cannot_be_asked_stays(tmp_path: Path, arena_dir: Path) -> None:
    """Not mounted, perhaps."""
    arena = make_arena(tmp_path / "not mounted", hosts=2)
    assert only_arena().has_news is None
    assert main(["doctor", "--clean", "--yes"]) == 0
    assert arena.exists()
    (arena / "root").unlink()
    assert only_arena().has_news is None and clear(only_arena()) == arena_facts.NEWS


@pytest.mark.parametrize("now", ["another run", "a copy", "another run, and older"])
def test_a_snapshot_is_not_in_storage_because_another_root_has_one_of_its_number(
    now: str, tmp_path: Path, arena_dir: Path, capsys: Out
) -> None:
    root, away = tmp_path / "root", tmp_path / "away"
    fill(LocalStore(root), [(2, 40)])
    arena = make_arena(root, world=1)
    root.rename(away)
    if now == "a copy":
        shutil.copytree(away, root)
        fill(LocalStore(root), [(2, 60)])
    else:
        store = LocalStore(root)
        store.publish(ROOT, seal(documents.Root(run_id="another")))
        fill(store, [(2, 41)] if now == "another run" else [(2, 60)])
    found = only_arena()
    assert found.newest == "2-41" and found.newest_is_durable is not True
    assert found.has_news is None and not found.may_go
    assert main(["doctor", "--clean", "--yes"]) == 0
    assert "in storage too" not in capsys.readouterr().out and arena.exists()
    assert clear(found) == arena_facts.NEWS
    assert main(["doctor", "--quick"]) in (0, 11)
    if now != "a copy":
        assert "is another root by now" in capsys.readouterr().out


def test_a_snapshot_of_the_same_number_by_another_attempt_is_not_in_storage(
    tmp_path: Path, arena_dir: Path
) -> None:
    fill(LocalStore(tmp_path), [(2, 41)])
    arena = make_arena(tmp_path, world=1, attempt="another")
    assert (only_arena().newest_is_durable, only_arena().has_news) == (False, True)
    assert clear(only_arena()) == arena_facts.NEWS and arena.exists()


def test_an_older_snapshot_of_a_start_that_storage_knows_otherwise_is_news(
    tmp_path: Path, arena_dir: Path
) -> None:
    """The record of its start never reached storage, and its number was given again."""
    fill(LocalStore(tmp_path), [(2, 60)])
    make_arena(tmp_path, world=1, nonce="another start")
    assert (only_arena().newest_is_durable, only_arena().has_news) == (False, True)


def test_a_snapshot_whose_very_attempt_is_in_storage_may_go_whatever_root_it_was_of(
    tmp_path: Path, arena_dir: Path
) -> None:
    root, copy = tmp_path / "root", tmp_path / "copy"
    fill(LocalStore(root), [(2, 41)])
    arena = make_arena(root, world=1)
    shutil.copytree(root, copy)
    (arena / "root").write_text(str(copy))
    assert (only_arena().newest_is_durable, only_arena().has_news) == (True, False)


def test_what_an_older_version_left_is_said_to_be_of_no_use_and_goes_only_when_asked(
    tmp_path: Path, arena_dir: Path, capsys: Out
) -> None:
    fill(LocalStore(tmp_path), [(2, 60)])
    arena = arena_home() / "r@here"
    make_private_dir(arena)
    put_snapshot(arena, 41)
    (arena / "root").write_text(str(tmp_path))
    assert (only_arena().newest, only_arena().has_news) == ("2-41", None)
    assert main(["doctor", "--quick"]) in (0, 11)
    assert "an older version of Holdfast left it" in capsys.readouterr().out
    assert main(["doctor", "--clean", "--yes"]) == 0 and arena.exists()
    assert main(["doctor", "--clean", "--lose-snapshots", "--yes"]) == 0 and not arena.exists()
