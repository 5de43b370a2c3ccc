"""Hosts are lost, and what the others hold has changed, or they are lost one after the other."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.testing.faults import (
    Hosts,
    events_of,
    flip_row,
    held,
    newest_durable,
    rows,
    tear_record,
    tear_row_record,
)
from support.runs.leftovers import keeper_pids
from support.runs.lives import Lives
from support.runs.losing import lose, protected, wait_protected


@pytest.fixture(autouse=True)
def ending_keepers(arena_dir: Path) -> Iterator[None]:
    yield
    for pid in keeper_pids(arena_dir):
        os.kill(pid, signal.SIGTERM)


def flip_all_rows(arena: Path) -> None:
    """A bit of every row of parity that is there."""
    found = rows(arena)
    assert found
    for row in found:
        flip_row(row, at=row.record.size_bytes // 2)


@pytest.mark.timeout(200)
def test_parity_that_changed_is_never_decoded_from(tmp_path: Path, arena_dir: Path) -> None:
    """With parity for one host there are no other rows: storage is what is left, and is right."""
    root, hosts = tmp_path / "run", ("a", "b", "c")
    simulated = Hosts(arena_dir)
    with Lives(root, seed=41) as lives:
        # Slow steps: what is protected when the host is lost is still newer than what is stored.
        lives.start(3, 100_000, storage=60, hosts=hosts, options={"parity": 1}, pause_s=0.1)
        lives.wait_restored(3)
        reached = 0
        while reached < 60 or not 10 <= reached % 60 <= 40:  # what is in storage is older
            reached = wait_protected(lives, root, 1, more=1, after=reached)
        lose(lives, arena_dir, hosts, "c")
        lives.end(3)
        for host in "ab":
            flip_all_rows(simulated.arena(host))
        lives.start(3, 3, storage=60, hosts=("a", "b", "d"), options={"parity": 1})
        step, source = lives.wait_restored(3)  # which looks at every element
        newest = newest_durable(root)
        assert source == "storage" and newest is not None
        lives.wait_end()
    told = [e["reason"] for e in events_of(root, "SourceDropped")]
    assert any("/parity/" in reason and "stored" in reason for reason in told), told
    assert step <= newest.step


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_is_damaged_and_who_is_lost_meanwhile_is_gone_round(
    tmp_path: Path, arena_dir: Path
) -> None:
    """Parity for two hosts: what is wrong on one counts as that one, and no more."""
    root, options, draw = tmp_path / "run", {"parity": 2}, random.Random(42)
    simulated = Hosts(arena_dir)
    with Lives(root, seed=42) as lives:

        def start(n: int, *hosts: str) -> None:
            lives.start(4, 100_000, storage=100_000, hosts=hosts, options=options)
            step, source = lives.wait_restored(4)
            assert source == ("memory" if n > 1 else "")
            assert least <= step <= completed
            wait_protected(lives, root, n)

        least = completed = -1
        start(1, "a", "b", "c", "d")
        least = protected(root)[1]
        lose(lives, arena_dir, ("a", "b", "c", "d"), "d")
        completed = lives.end(4)
        flip_all_rows(simulated.arena("a"))
        # What is decoded is decoded from the rows of b and c.
        start(2, "a", "b", "c", "e")
        least = protected(root)[1]
        lose(lives, arena_dir, ("a", "b", "c", "e"), "e")
        completed = lives.end(4)
        simulated.kill_keeper("b")  # the next one believes what it finds, as far as it is whole
        arena = simulated.arena("b")
        for row in rows(arena):
            tear_row_record(row)
        tear_record(held(arena)[-1].path)
        start(3, "b", "a", "f", "c")
        least = protected(root)[1]
        lose(lives, arena_dir, ("b", "a", "f", "c"), "f")
        completed = lives.end(4)
        # Another host is lost while the ranks restore what the first one had.
        lives.start(4, 100_000, storage=100_000, hosts=("a", "b", "c", "g"), options=options)
        for rank in range(4):
            lives.wait_phase(rank, ("restore", "meet", "update", "save"))
        time.sleep(draw.random() * 0.05)
        lose(lives, arena_dir, ("a", "b", "c", "g"), "a")
        completed = max(completed, lives.end(4))
        start(5, "h", "b", "c", "g")
