"""A start on a known layout sends hashes alone; whoever lacks the bytes asks for them."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.coordinator.layouts import agreement_id
from holdfast.protocol import messages as m
from holdfast.protocol.arena import read_layout
from holdfast.testing.faults import Hosts
from support.runs.host_pairs import Run
from support.runs.keepers import (
    arena_of,
    begin,
    capture,
    connect,
    end,
    hear,
    join,
    kill_keeper,
)


def test_a_table_is_asked_for_once_and_in_no_later_start_or_by_another_keeper(
    tmp_path: Path, arena_dir: Path
) -> None:
    heard: queue.SimpleQueue[m.Message] = queue.SimpleQueue()
    asked: list[int] = []

    def listen(message: m.Message) -> None:
        if isinstance(message, m.RequestTable):
            asked.append(step)
        heard.put(message)

    step = 1
    line = connect(tmp_path, listener=listen)
    begin(line)
    capture(line, heard, step)
    assert asked == [1]
    for step in (2, 3):
        n = begin(line)
        capture(line, heard, step)
    kill_keeper(arena_dir)
    line.close()
    step = 4
    line = connect(tmp_path, listener=listen)
    join(line, n)
    capture(line, heard, step)
    assert asked == [1]
    for path in (arena_of(arena_dir) / "layouts").glob("*.agreed"):
        path.unlink()
    step = 5
    begin(line)
    capture(line, heard, step)
    assert asked == [1, 5]
    end(line)


def test_of_several_hosts_one_rank_is_asked_and_whoever_coordinates_next_asks_nobody(
    tmp_path: Path, arena_dir: Path
) -> None:
    run = Run(tmp_path, "a", "b")
    run.begin()
    run.capture(1)
    assert [rank.tables_sent for rank in run.ranks] == [1, 0]
    arenas = sorted(arena_dir.glob("*/*@?"))
    here, there = [sorted(path.name for path in arena.glob("layouts/*")) for arena in arenas]
    assert here == there and len(here) == 2
    assert start_again(run, arena_dir) == [0, 0]


def start_again(run: Run, arena_dir: Path) -> list[int]:
    """A start that the other host coordinates; how many tables each rank was asked for."""
    for rank in run.ranks:
        rank.line.close()
    again = Run(run.ranks[0].root, "b", "a")
    again.begin()
    again.capture(2)
    documents = [path.read_bytes() for path in arena_dir.glob("*/*@?/layouts/*.json")]
    assert len(documents) == 2 and len({*documents}) == 1
    again.end()
    return [rank.tables_sent for rank in again.ranks]


@pytest.mark.parametrize("damage", ["gone", "changed"])
@pytest.mark.parametrize("host", ["a", "b"])
def test_a_host_that_has_a_layout_no_more_asks_for_it_and_the_save_goes_on(
    tmp_path: Path, arena_dir: Path, host: str, damage: str
) -> None:
    """Of the other host, whether it is the next coordinator or not."""
    run = Run(tmp_path, "a", "b")
    run.begin()
    run.capture(1)
    (path,) = arena_dir.glob(f"*/*@{host}/layouts/*.json")
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] + b" ")
    assert start_again(run, arena_dir) == [0, 0]


def test_the_keeper_of_a_host_that_lost_its_memory_has_the_layout_before_its_ranks_copy(
    tmp_path: Path, arena_dir: Path
) -> None:
    run = Run(tmp_path, "a", "b")
    run.begin()
    run.capture(1)
    Hosts(arena_dir).kill_keeper("b")
    for path in arena_dir.glob("*/*@b/layouts/*"):
        path.unlink()
    run.ranks[1].line.close()
    run.ranks[1].connect()
    run.ranks[1].take_part(run.n, run.table)
    run.ranks[1].join(run.n)
    for rank in run.ranks:
        rank.ask(2)
    grant = hear(run.ranks[1].heard, m.Grant)
    assert read_layout(Path(grant.slot).parent, grant.layout)
    for rank in run.ranks:
        rank.line.send(m.AbortCapture(attempt=grant.attempt, reason="enough"))
    run.end()


@pytest.mark.promise
def test_a_rank_captures_nothing_under_a_layout_that_is_not_that_of_its_state(
    tmp_path: Path, arena_dir: Path
) -> None:
    """A keeper that takes a layout for one of other tables, however that may come about."""
    state = {"w": torch.arange(8.0).reshape(2, 4)}
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        checkpointer.save(1).wait_captured(60)
        (path,) = (arena_of(arena_dir) / "layouts").glob("*.json")
        state["w"] = torch.arange(8.0).reshape(4, 2)
        tables = (checkpointer._saver.describer.describe().table_hash,)
        path.with_suffix(".agreed").write_text(agreement_id(tables, path.stem))
        with pytest.raises(holdfast.SnapshotSkipped, match="is not that of this state"):
            checkpointer.save(2).wait_captured(60)
