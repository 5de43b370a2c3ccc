"""A root that is copied is another root; one that is renamed, linked or mounted elsewhere is not.

Each history is walked over memory and storage: the run trains beyond its newest checkpoint, is
killed, with its keeper or without, and starts again at what is there then.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import events
from holdfast.catalogue import ROOT, read_document
from holdfast.errors import KeeperError
from holdfast.format.manifest import Root
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.meeting import host_id
from holdfast.protocol.arena import SlotFile, arena_home, parse_arena_name
from holdfast.protocol.arena import arena_dir as arena_path
from holdfast.storage.local import LocalStore
from holdfast.testing.faults import held
from holdfast.testing.runs.processes import kill as end_processes
from support.runs.keepers import connect_to, kill_keeper
from support.runs.launch import run_ranks
from support.runs.leftovers import keeper_pids
from support.runs.mishaps import build, content, files, listening, train

Content = dict[str, bytes]


def crash(checkpointer: holdfast.Checkpointer) -> None:
    """As a process that is killed: nothing is said, and nothing is saved."""
    error = RuntimeError("a crash")
    checkpointer.__exit__(type(error), error, None)


def go_on(root: Path, step: int, *, durable: bool = False) -> Content:
    """Start, restore what there is, save this step and be killed; the state that was saved."""
    state = build()
    checkpointer = holdfast.Checkpointer(root, state, storage=None)
    checkpointer.restore()
    train(state, step)
    handle = checkpointer.save(step, durable=durable)
    handle.wait_captured(60)
    if durable:
        handle.wait_durable(60)
    crash(checkpointer)
    return content(state)


def restored(root: Path) -> tuple[int, str, Content, list[str]]:
    """What a start finds: step, source and state, and what it says."""
    state = build(seed=9)
    with listening() as heard:
        checkpointer = holdfast.Checkpointer(root, state, storage=None)
        found = checkpointer.restore()
    assert found is not None
    crash(checkpointer)
    said = [event.message for event in heard if isinstance(event, events.Warned)]
    return found.step, found.source, content(state), said


@pytest.fixture(autouse=True)
def no_keepers_left(arena_dir: Path) -> Iterator[None]:
    """They would wait an hour for the next start."""
    yield
    end_processes(keeper_pids(arena_dir))


@pytest.fixture(params=["the keeper lives", "the keeper is dead"])
def after_a_crash(request: Any, arena_dir: Path) -> Callable[[], None]:
    return (lambda: None) if "lives" in request.param else (lambda: kill_keeper(arena_dir))


def test_a_copied_root_restores_its_own_checkpoints_and_never_the_others_memory(
    tmp_path: Path, after_a_crash: Callable[[], None]
) -> None:
    original, copy = tmp_path / "original", tmp_path / "copy"
    stored = go_on(original, 0, durable=True)
    shutil.copytree(original, copy)
    newer = go_on(original, 1)
    after_a_crash()
    step, source, state, said = restored(copy)
    assert (step, source) == (0, "storage") and state == stored
    (told,) = [text for text in said if "more than one root" in text]
    assert str(original) in told and str(copy) in told, "a start on a copy says so"
    step, source, state, _ = restored(original)
    assert (step, source) == (1, "memory") and state == newer


def test_what_a_copy_trains_is_not_the_originals_either(tmp_path: Path, arena_dir: Path) -> None:
    original, copy = tmp_path / "original", tmp_path / "copy"
    go_on(original, 0, durable=True)
    shutil.copytree(original, copy)
    ours, theirs = go_on(original, 5), go_on(copy, 7)  # at the same time: both keepers live
    assert len(keeper_pids(arena_dir)) == 2
    for root, expected, at in ((copy, theirs, 7), (original, ours, 5)):
        step, source, state, _ = restored(root)
        assert (step, source) == (at, "memory") and state == expected
    for root in (original, copy):
        after = go_on(root, 9, durable=True)
        state = build(seed=3)
        assert holdfast.load(root, state).step == 9 and content(state) == after


def test_a_copy_that_takes_the_place_of_its_original_has_nothing_of_its_memory(
    tmp_path: Path, after_a_crash: Callable[[], None]
) -> None:
    """The path is the same, and so may be the inode: its birth is another."""
    root, backup = tmp_path / "root", tmp_path / "backup"
    stored = go_on(root, 0, durable=True)
    shutil.copytree(root, backup)
    go_on(root, 1)
    after_a_crash()
    shutil.rmtree(root)
    shutil.copytree(backup, root)
    step, source, state, _ = restored(root)
    assert (step, source) == (0, "storage") and state == stored


def test_slots_of_another_root_are_never_taken_whatever_directory_they_lie_in(
    tmp_path: Path, arena_dir: Path
) -> None:
    original, copy = tmp_path / "original", tmp_path / "copy"
    stored = go_on(original, 0, durable=True)
    shutil.copytree(original, copy)
    go_on(original, 1)
    kill_keeper(arena_dir)
    (arena,) = arena_home().iterdir()
    run_id, _, host = parse_arena_name(arena.name)
    arena.rename(arena.with_name(f"{run_id}@{host}"))  # as an older version named it
    step, source, state, said = restored(original)
    assert (step, source) == (0, "storage") and state == stored
    assert any("an older version" in text for text in said)
    stray = next(arena_home().glob(f"{run_id}@*"))
    kill_keeper(arena_dir)
    own = arena_dir_of(copy)
    shutil.copytree(stray, own, ignore=shutil.ignore_patterns("keeper.sock"))
    step, source, state, _ = restored(copy)
    assert (step, source) == (0, "storage") and state == stored


def arena_dir_of(root: Path) -> Path:
    store = LocalStore(root)
    return arena_path(read_document(store, Root, ROOT).run_id, host_id(), store.identity())


def test_every_slot_says_of_which_root_it_is(tmp_path: Path, arena_dir: Path) -> None:
    go_on(tmp_path / "root", 0)
    (arena,) = arena_home().iterdir()
    assert arena == arena_dir_of(tmp_path / "root")
    assert {one.record.root_id for one in held(arena)} == {LocalStore(tmp_path / "root").identity()}
    other = ArenaFiles(tmp_path, held(arena)[0].record.run_id, root_id="inode 1")
    file = SlotFile.open(held(arena)[0].path, writable=False)
    record = file.read_record()
    file.close()
    assert record is not None and not other.is_ours(record)


# ── the same root by another name ────────────────────────────────────────────────────────────


@contextmanager
def renamed(root: Path, how: str) -> Iterator[Path]:
    """Another name of this root."""
    other = root.with_name("another name")
    if how == "bind mount":
        other.mkdir()
        done = subprocess.run(["mount", "--bind", root, other], capture_output=True)
        if done.returncode:
            pytest.skip("nothing can be mounted here")
        try:
            yield other
        finally:
            subprocess.run(["umount", "-l", other], check=True)
        return
    if how == "link":
        other.symlink_to(root)
    if how == "link that was moved to":
        root.rename(other)
        root.symlink_to(other)
    if how == "rename":
        root.rename(other)
    if how == "rename of a directory above":
        above = root.parent.with_name("moved")
        root.parent.rename(above)
        other = above / root.name
    if how == "two renames":
        root.rename(root.with_name("between"))
        root.with_name("between").rename(other)
    yield other


NAMES = (
    "link",
    "link that was moved to",
    "rename",
    "rename of a directory above",
    "two renames",
    "bind mount",
)


@pytest.mark.parametrize("how", NAMES)
def test_a_root_by_another_name_is_the_same_root_and_is_served(
    how: str, tmp_path: Path, after_a_crash: Callable[[], None], arena_dir: Path
) -> None:
    root = tmp_path / "above" / "root"
    go_on(root, 0, durable=True)
    newer = go_on(root, 1)
    after_a_crash()
    pids = keeper_pids(arena_dir)
    with renamed(root, how) as other:
        step, source, state, said = restored(other)
        assert (step, source) == (1, "memory") and state == newer
        assert not any("more than one root" in text for text in said)
        newest = go_on(other, 2, durable=True)
        state = build(seed=3)
        assert holdfast.load(other, state).step == 2 and content(state) == newest
        assert root.exists() == (how.startswith("link") or how == "bind mount"), "no second root"
        assert not pids or keeper_pids(arena_dir) == pids, "by the keeper that lived"
        back = go_on(other, 3)
        assert (arena_dir_of(other) / "root").read_text() == str(
            other if "rename" in how or not pids else root
        )
    assert back != newest


def test_a_moved_root_is_itself_and_the_copy_in_its_place_is_not(
    tmp_path: Path, after_a_crash: Callable[[], None]
) -> None:
    root, moved = tmp_path / "root", tmp_path / "moved"
    stored = go_on(root, 0, durable=True)
    newer = go_on(root, 1)
    after_a_crash()
    root.rename(moved)
    shutil.copytree(moved, root)
    step, source, state, _ = restored(root)
    assert (step, source) == (0, "storage") and state == stored
    step, source, state, _ = restored(moved)
    assert (step, source) == (1, "memory") and state == newer
    go_on(moved, 2, durable=True)
    assert holdfast.load(moved, build()).step == 2 and holdfast.load(root, build()).step == 0


def test_saves_while_the_root_is_moved_fail_by_name_and_make_no_second_one(
    tmp_path: Path, arena_dir: Path
) -> None:
    root, moved = tmp_path / "root", tmp_path / "moved"
    state = build()
    checkpointer = holdfast.Checkpointer(root, state, storage=None)
    train(state, 0)
    checkpointer.save(0, durable=True).wait_durable(60)
    root.rename(moved)
    there = files(moved)
    for step in (1, 2):
        train(state, step)
        handle = checkpointer.save(step, durable=True)
        with pytest.raises(holdfast.PersistFailed, match="it was moved"):
            handle.wait_durable(60)
    newest = content(state)
    assert not root.exists() and files(moved) == there
    crash(checkpointer)
    step, source, found, _ = restored(moved)
    assert (step, source) == (2, "memory") and found == newest
    go_on(moved, 3, durable=True)
    assert not root.exists()
    assert holdfast.load(moved, build()).step == 3


def test_a_trainer_that_lives_goes_on_saving_once_its_root_was_moved_back(
    tmp_path: Path, arena_dir: Path
) -> None:
    root, moved = tmp_path / "root", tmp_path / "moved"
    state = build()
    with holdfast.Checkpointer(root, state, storage=None) as checkpointer:
        train(state, 0)
        checkpointer.save(0, durable=True).wait_durable(60)
        root.rename(moved)
        with pytest.raises(holdfast.PersistFailed):
            checkpointer.save(1, durable=True).wait_durable(60)
        moved.rename(root)
        checkpointer.save(2, durable=True).wait_durable(60)
    assert holdfast.load(root, build()).step == 2


def test_a_keeper_that_finds_the_root_by_no_name_says_both(tmp_path: Path, arena_dir: Path) -> None:
    root, moved, copy = (tmp_path / name for name in ("root", "moved", "copy"))
    go_on(root, 0, durable=True)
    root.rename(moved)
    shutil.copytree(moved, copy)
    with pytest.raises(KeeperError, match=f"neither at {root} nor at {copy}"):
        connect_to(moved, by=copy)


# ── several ranks, several hosts ─────────────────────────────────────────────────────────────


def _start(rank: int, world: int, root: str, step: int, hosts: int) -> tuple[int, str, float]:
    os.environ["HOLDFAST_HOST_ID"] = f"host-{rank % hosts}"
    state = {"w": torch.zeros(64)}
    checkpointer = holdfast.Checkpointer(root, state, storage=None)
    found = checkpointer.restore()
    was = float(state["w"][0])
    state["w"].fill_(step)
    handle = checkpointer.save(step, durable=step == 1)
    handle.wait_captured(60)
    if step == 1:
        handle.wait_durable(60)
    crash(checkpointer)
    return (-1, "", was) if found is None else (found.step, found.source, was)


def test_on_several_hosts_a_copy_is_another_root_and_a_moved_one_the_same(
    tmp_path: Path, arena_dir: Path
) -> None:
    root, copy, moved = (str(tmp_path / name) for name in ("root", "copy", "moved"))
    run_ranks(2, _start, root, 1, 2)
    shutil.copytree(root, copy)
    run_ranks(2, _start, root, 2, 2)
    assert run_ranks(2, _start, copy, 7, 2) == [(1, "storage", 1.0)] * 2
    os.rename(root, moved)
    assert run_ranks(2, _start, moved, 3, 2) == [(2, "memory", 2.0)] * 2
    assert not Path(root).exists()


def _look(rank: int, world: int, directory: str) -> str:
    try:
        holdfast.Checkpointer(Path(directory, "own"), {"w": torch.zeros(2)}, storage=None)
    except holdfast.UsageError as error:
        return str(error)
    return ""


def _own_disks(rank: int, world: int, directory: str) -> str:
    """The same path leads each rank to a directory of its own."""
    make = LocalStore.__init__

    def elsewhere(self: LocalStore, root: str | os.PathLike[str]) -> None:
        make(self, os.fspath(root).replace("/own", f"/disk-{rank}"))

    LocalStore.__init__ = elsewhere  # type: ignore[method-assign]
    return _look(rank, world, directory)


def test_ranks_that_see_roots_of_two_runs_are_named_at_the_start(tmp_path: Path) -> None:
    for rank in range(2):
        holdfast.save(tmp_path / f"disk-{rank}", {"n": rank})
    for told in run_ranks(2, _own_disks, str(tmp_path)):
        assert "the ranks see different directories" in told and "on rank 1 that of run" in told


def _differing(rank: int, world: int, root: str, step: int) -> tuple[int, str, float]:
    """As hosts see a network directory of which one is told no time of birth."""
    told = LocalStore.identity

    def identity(self: LocalStore) -> str:
        return told(self).partition(" born ")[0] if rank else told(self)

    LocalStore.identity = identity  # type: ignore[method-assign]
    return _start(rank, world, root, step, 2)


def test_hosts_of_which_one_sees_no_time_of_birth_share_a_root_all_the_same(
    tmp_path: Path, arena_dir: Path
) -> None:
    root = str(tmp_path / "root")
    run_ranks(2, _differing, root, 1)
    assert run_ranks(2, _differing, root, 2) == [(1, "memory", 1.0)] * 2


def _alone(rank: int, world: int, root: str, step: int) -> tuple[int, str, float]:
    """The host that is told the time of birth, without the other."""
    return _start(rank, world, root, step, 1)


@pytest.mark.parametrize("dies", [False, True], ids=["the keepers live", "the keepers die"])
def test_memory_is_found_again_by_a_start_with_more_hosts_or_fewer(
    dies: bool, tmp_path: Path, arena_dir: Path
) -> None:
    """Of hosts that see one root differently each knows it as it sees it itself."""
    root = str(tmp_path / "root")

    def start(step: int, *, alone: bool) -> list[tuple[int, str, float]]:
        if dies:
            end_processes(keeper_pids(arena_dir))
        return run_ranks(1, _alone, root, step) if alone else run_ranks(2, _differing, root, step)

    start(1, alone=True)
    start(2, alone=True)
    assert start(3, alone=False) == [(2, "memory", 2.0)] * 2
    ((step, _, _),) = start(4, alone=True)  # what was on both hosts is not all here
    assert step > 0
    assert start(5, alone=True) == [(4, "memory", 4.0)]
