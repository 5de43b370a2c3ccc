"""Two starts take one number: the one that storage has counts, and the other hides none of it.

A start while storage takes no records is known by its host alone. The next one, on another host,
counts on from what storage has; then the first host is back, with its memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import events
from holdfast.catalogue import INCARNATIONS, ROOT, catalogue, read_document
from holdfast.errors import Fenced
from holdfast.format.manifest import Incarnation, Root
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.persist import commit
from holdfast.storage.local import LocalStore
from holdfast.testing.runs.processes import kill as end_processes
from support.runs.keepers import arena_of, kill_keeper
from support.runs.launch import run_ranks
from support.runs.leftovers import keeper_pids
from support.runs.mishaps import listening


@pytest.fixture(autouse=True)
def no_keepers_left(arena_dir: Path) -> Iterator[None]:
    """They would wait an hour for the next start."""
    yield
    end_processes(keeper_pids(arena_dir))


@contextmanager
def no_records(root: Path) -> Iterator[None]:
    """Storage takes no record of a start, and no checkpoint of it."""
    there, away = root / INCARNATIONS, root / "away"
    there.rename(away)
    there.touch()
    try:
        yield
    finally:
        there.unlink()
        away.rename(there)


def crash(checkpointer: holdfast.Checkpointer) -> None:
    error = RuntimeError("a crash")
    checkpointer.__exit__(type(error), error, None)


Life = tuple[tuple[str, str], float, list[str]]


def live(
    rank: int, world: int, root: str, host: str, steps: list[int], durable: bool, value: float
) -> Life:
    """What is restored, the value in it, and what is said; then these steps with ``value``."""
    os.environ["HOLDFAST_HOST_ID"] = f"{host}-{rank}"
    state = {"w": torch.zeros(64)}
    with listening() as heard:
        checkpointer = holdfast.Checkpointer(root, state, storage=None)
        found = checkpointer.restore()
    was = float(state["w"][0])
    for step in steps:
        state["w"].fill_(value)
        handle = checkpointer.save(step, durable=durable)
        handle.wait_captured(60)
        if durable:
            handle.wait_durable(60)
    crash(checkpointer)
    said = [one.message for one in heard if isinstance(one, events.Warned)]
    return ("", "") if found is None else (str(found.generation), found.source), was, said


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("step", [40, 60], ids=["fewer steps", "as many steps"])
def test_what_another_start_of_its_number_made_durable_is_restored_and_not_what_memory_has(
    tmp_path: Path, arena_dir: Path, hosts: int, step: int
) -> None:
    root = tmp_path / "root"

    def lives(host: str, steps: list[int], value: float, *, durable: bool = False) -> Life:
        found = run_ranks(hosts, live, str(root), host, steps, durable, value)
        end_processes(keeper_pids(arena_dir))
        assert len({one[:2] for one in found}) == 1
        return found[0]

    lives("x", [10], 1.0, durable=True)
    with no_records(root):
        assert lives("x", [59, 60], 2.0)[:2] == (("1-10", "memory"), 1.0)
    assert lives("y", [step], 3.0, durable=True)[:2] == (("1-10", "storage"), 1.0)
    restored, value, said = lives("x", [61], 4.0, durable=True)
    assert (restored, value) == ((f"2-{step}", "storage"), 3.0)
    (told,) = [text for text in said if "another start has taken its number" in text]
    assert "incarnation 2 in memory" in told
    found = catalogue(LocalStore(root))
    assert [str(one) for one in found.lineage] == ["1-10", f"2-{step}", "3-61"]
    assert lives("x", [], 5.0)[:2] == (("3-61", "memory"), 4.0)


def test_starts_that_go_on_from_one_whose_number_is_anothers_are_none_of_the_line(
    tmp_path: Path, arena_dir: Path
) -> None:
    """The first host was started twice while storage was full."""
    root = str(tmp_path)

    def lives(host: str, step: int, value: float, *, durable: bool = False) -> Life:
        (found,) = run_ranks(1, live, root, host, [step], durable, value)
        end_processes(keeper_pids(arena_dir))
        return found

    lives("x", 10, 1.0, durable=True)
    with no_records(tmp_path):
        lives("x", 60, 2.0)
        assert lives("x", 70, 3.0)[:2] == (("2-60", "memory"), 2.0)
    lives("y", 40, 4.0, durable=True)
    assert lives("x", 80, 5.0, durable=True)[:2] == (("2-40", "storage"), 4.0)
    found = catalogue(LocalStore(tmp_path))
    assert [str(one) for one in found.lineage] == ["1-10", "2-40", "4-80"]


def test_a_start_whose_number_was_taken_is_fenced_before_it_trains(
    tmp_path: Path, arena_dir: Path
) -> None:
    state = {"w": torch.zeros(8)}
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=None)
    store = LocalStore(tmp_path)
    run_id = read_document(store, Root, ROOT).run_id
    n = checkpointer.incarnation
    commit.record_incarnation(store, Incarnation(run_id=run_id, n=n, nonce="of another host"))
    with pytest.raises(Fenced, match=f"incarnation {n} cannot be recorded.*start the run again"):
        checkpointer.restore()
    crash(checkpointer)
    assert not ArenaFiles(arena_of(arena_dir), run_id).incarnations()
    with holdfast.Checkpointer(tmp_path, state, storage=None) as again:
        assert again.restore() is None and again.incarnation == n + 1
        again.save(0, durable=True).wait_durable(60)


def test_the_second_restore_of_a_start_counts_where_storage_could_not_record_it(
    tmp_path: Path, arena_dir: Path
) -> None:
    def fill(value: float) -> None:
        state["w"].fill_(value)

    state = {"w": torch.zeros(8)}
    with holdfast.Checkpointer(tmp_path, state, storage=None) as first:
        for step in (50, 100):
            fill(step)
            first.save(step, durable=True).wait_durable(60)
    second = holdfast.Checkpointer(tmp_path, state, storage=None)
    assert second.restore() is not None
    with no_records(tmp_path):
        assert second.restore(step=50) is not None
        fill(51)
        second.save(51).wait_captured(60)
        crash(second)
        kill_keeper(arena_dir)
    third = holdfast.Checkpointer(tmp_path, state, storage=None)
    restored = third.restore()
    crash(third)
    assert restored is not None and (restored.generation, restored.source) == ((2, 51), "memory")
    assert float(state["w"][0]) == 51
    assert catalogue(LocalStore(tmp_path)).parents[2] == (1, 50)
