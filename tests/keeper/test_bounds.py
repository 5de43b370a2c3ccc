"""A keeper that lives for weeks: what it holds is bounded, however many generations it saw."""

from __future__ import annotations

import itertools
import os
import queue
import re
from collections import Counter
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest

from holdfast.format.manifest import Incarnation
from holdfast.geometry.layout import table_hash
from holdfast.keeper.arena_files import INCARNATIONS_REMEMBERED, ArenaFiles
from holdfast.observe.rollup_files import rollup_path
from holdfast.protocol import messages as m
from holdfast.testing.runs.processes import wait_until
from support.runs.keepers import (
    HOST,
    arena_of,
    begin,
    capture,
    connect,
    end,
    memory_bytes,
    slots_of,
)
from support.runs.leftovers import keeper_pids


def descriptors(pid: int) -> Counter[str]:
    """What the open descriptors of a process are: files by their names, all else by its kind."""
    found = Counter[str]()
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found[re.sub(r":\[\d+\]$", "", os.readlink(one))] += 1
    return found


def holdings(pid: int, arena_home: Path) -> dict[str, int]:
    """What the keeper has: mappings, files."""
    arena = arena_of(arena_home)
    return {
        "mappings": Path(f"/proc/{pid}/maps").read_text().count(".slot"),
        "slots": len(slots_of(arena_home)),
        "layouts": len(list((arena / "layouts").iterdir())),
        "incarnations": len(list((arena / "incarnations").iterdir())),
    }


def test_two_thousand_generations_and_twenty_broken_lines_leave_nothing_in_the_keeper(
    tmp_path: Path, arena_dir: Path
) -> None:
    heard: queue.SimpleQueue[m.Message] = queue.SimpleQueue()
    line = connect(tmp_path, listener=heard.put)
    begin(line)
    (pid,) = keeper_pids(arena_dir)
    steps = itertools.count()
    # Its roll-ups are a file more from the first of them on, which takes so many records.
    rollups = rollup_path(tmp_path / "events" / f"host-{HOST}.jsonl")
    while not rollups.exists():
        capture(line, heard, next(steps))
    held = descriptors(pid)
    for step in islice(steps, 200):
        capture(line, heard, step)
        held &= descriptors(pid)  # what a thread of it reads for a moment is not held
    held[str(rollups)] = 1  # which it may have been about to open
    before, before_bytes = holdings(pid, arena_dir), memory_bytes(pid)
    assert before["slots"] == before["mappings"] == 3
    for step in islice(steps, 1800):
        capture(line, heard, step)
        if step % 90 == 0:
            connect(tmp_path).close()
    # The last of the closed lines may not have been noticed yet: it answers in order.
    line.request(m.Explain(step=1), m.Explanation, timeout_s=30)
    more = "descriptors beside those that were held are closed"
    wait_until(
        lambda: descriptors(pid) == held,
        timeout_s=30,
        what=lambda: f"{more}: {descriptors(pid) - held}",
    )
    assert holdings(pid, arena_dir) == before
    assert memory_bytes(pid) - before_bytes < 1 << 20
    end(line)


@pytest.fixture
def memory(arena_dir: Path) -> ArenaFiles:
    return ArenaFiles(arena_dir, "run")


def test_layouts_are_forgotten_when_no_generation_in_memory_has_them(memory: ArenaFiles) -> None:
    hashes = []
    for size in range(50):
        data = b"[" + b" " * size + b"]"
        hashes.append(table_hash(data))
        memory.store_layout(hashes[-1], data, used={hashes[0], hashes[-1]})
    kept = sorted(path.stem for path in (memory.directory / "layouts").iterdir())
    assert kept == sorted({hashes[0], hashes[-1]})
    assert memory.layout(hashes[0]) == b"[]"


def test_incarnations_of_a_run_that_starts_for_ever_are_forgotten_but_for_those_held(
    memory: ArenaFiles,
) -> None:
    for n in range(1, INCARNATIONS_REMEMBERED + 50):
        memory.store_incarnation(Incarnation(run_id="run", n=n, nonce="x"))
    assert len(memory.incarnations()) == INCARNATIONS_REMEMBERED + 49  # storage may lack them
    memory.forget_incarnations({3})
    found = sorted(incarnation.n for incarnation in memory.incarnations())
    assert found == [3, *range(50, INCARNATIONS_REMEMBERED + 50)]
