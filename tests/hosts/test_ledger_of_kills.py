"""The ledger of a real run on four hosts that is killed twenty times, against who killed it.

The witness are the killer's own clock and the journals of the ranks, which know nothing of events.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.observe.report_builder import read_report
from holdfast.testing.runs.journals import JournalLine
from holdfast.testing.runs.simulated_hosts import Hosts
from observe.test_witness import began_s, is_there, lines_of, show
from support.runs.leftovers import keeper_pids
from support.runs.lives import Lives

HOSTS = ("a", "b", "c", "d")
RANKS = range(len(HOSTS))
KILLS = 20
#: Of so many kills one takes the keeper and the memory of the host, too.
EACH_LOST = 4


class Kill(NamedTuple):
    """What the killer did, by the clock of the journals."""

    rank: int
    is_host: bool
    at_s: float
    gone_s: float
    """When all ranks were gone."""


@pytest.fixture(autouse=True)
def ending_keepers(arena_dir: Path) -> Iterator[None]:
    yield
    for pid in keeper_pids(arena_dir):
        os.kill(pid, signal.SIGTERM)


def kill(lives: Lives, arena_dir: Path, chance: random.Random, *, is_host: bool) -> Kill:
    """Kills one rank, or its host, and after a while what is left, as a launcher does."""
    rank, pids = chance.choice(RANKS), lives.pids
    at_s = time.monotonic()
    lives.kill([rank])
    if is_host:
        Hosts(arena_dir).lose(HOSTS[rank])
    until_s = at_s + chance.uniform(0.2, 0.8)
    while any(map(is_there, pids)):  # most end by themselves when they miss one
        time.sleep(0.001)
        if time.monotonic() > until_s:
            lives.kill(list(RANKS))
    gone_s = time.monotonic()
    lives.join()
    return Kill(rank, is_host, at_s, gone_s)


def run_and_kill(root: Path, journals: Path, arena_dir: Path) -> tuple[list[float], list[Kill]]:
    """Returns when the first process of each start began, and the kills."""
    chance, starts, kills = random.Random(2211), [], []
    with Lives(root, seed=2211) as lives:
        for number in range(KILLS + 1):
            how = {"storage": 5, "hosts": HOSTS, "pause_s": 0.15, "journals": str(journals)}
            how["leaves_errors"] = True  # of who failed for want of another
            lives.start(len(HOSTS), 100_000 if number < KILLS else 20, options={"parity": 1}, **how)
            starts.append(min(map(began_s, lives.pids)))
            if number == KILLS:
                lives.wait_end(timeout_s=120)
                break
            step, _ = lives.wait_restored(len(HOSTS), timeout_s=120)
            lives.wait_progress(len(HOSTS), step + chance.randint(4, 25), timeout_s=120)
            time.sleep(chance.uniform(0.0, 0.3))
            is_host = number % EACH_LOST == EACH_LOST - 1
            kills.append(kill(lives, arena_dir, chance, is_host=is_host))
            time.sleep(chance.uniform(0.0, 0.5))
    return starts, kills


class Seen:
    """What the journals say of each start, by its number from 1 on."""

    def __init__(self, journals: Path) -> None:
        self.lines = {rank: lines_of(journals, rank) for rank in RANKS}
        self.back = {one.incarnation: one for one in self.lines[0] if one.what == "restored"}
        """What rank 0 restored."""
        self.joined = {one.incarnation: one for one in self.lines[0] if one.what == "start"}
        self.end_s = next(one.time_s for one in self.lines[0] if one.what == "end")

    def kept_steps(self) -> dict[int, int]:
        """The newest step of each start that is in the ancestry of the last state; -1: none is."""
        kept, n = dict.fromkeys(self.joined, -1), max(self.joined)
        limit = 1 << 60
        while n:
            kept[n] = limit
            if n not in self.back:
                break
            parent = self.back[n].parent
            assert parent is not None
            n, limit = parent
        return kept

    def begun_s(self, n: int) -> float:
        """When training began, or went on, in a start."""
        return (self.back.get(n) or self.joined[n]).time_s

    def kept_until_s(self, n: int, limit: int) -> float:
        """When the last of the kept steps of a start was over."""
        over = [one.time_s for one in self._of(0, "over", n) if one.step <= limit]
        return max(over, default=self.begun_s(n))

    def newest_step(self, n: int) -> int:
        """The newest step that any rank made in a start."""
        return max(one.step for rank in RANKS for one in self._of(rank, "update", n))

    def _of(self, rank: int, what: str, n: int) -> list[JournalLine]:
        return [one for one in self.lines[rank] if one.what == what and one.incarnation == n]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_part_and_every_victim_is_what_the_killer_saw(
    tmp_path: Path, arena_dir: Path
) -> None:
    journals = tmp_path / "journals"
    journals.mkdir()
    starts, kills = run_and_kill(tmp_path / "run", journals, arena_dir)
    seen = Seen(journals)
    assert len(seen.joined) == KILLS + 1
    kept = seen.kept_steps()
    restore_s = {n: one.elapsed_s for n, one in seen.back.items()}
    expected = {
        "detection": sum(one.gone_s - one.at_s for one in kills),
        "restart": sum(starts[n] - one.gone_s for n, one in enumerate(kills, 1)),
        "restore": sum(restore_s.values()),
        "lost_work": sum(
            one.at_s - seen.kept_until_s(n, kept[n]) for n, one in enumerate(kills, 1)
        ),
        "start_up": sum(
            seen.begun_s(n) - restore_s.get(n, 0.0) - began for n, began in enumerate(starts, 1)
        ),
    }
    elapsed_s = seen.end_s - starts[0]
    expected["work"] = elapsed_s - sum(expected.values())

    report = read_report(tmp_path / "run")
    assert report.ledger is not None and report.reliability is not None
    found = dict(report.ledger.seconds)
    found["work"] = sum(found[name] for name in ("productive", "blocking", "first_step", "stall"))
    found["start_up"] += found["waiting"]
    show(expected, found, elapsed_s)
    print(f"unknown: {found['unknown']:.3f} s; {elapsed_s:.1f} s in all")
    lost = [one.lost_steps for one in report.reliability.interruptions]
    expected_lost = [seen.newest_step(n) - seen.back[n + 1].step for n in range(1, KILLS + 1)]
    who = [(one.rank, one.host) for one in report.reliability.interruptions]
    killed = [(one.rank, HOSTS[one.rank]) for one in kills]
    for at, one in enumerate(kills):
        print(
            at + 1,
            "host" if one.is_host else "rank",
            killed[at],
            who[at],
            expected_lost[at],
            lost[at],
        )

    allowed_s = 0.01 * elapsed_s
    assert report.ledger.elapsed_s == pytest.approx(elapsed_s, abs=allowed_s)
    for name, seconds in expected.items():
        assert found[name] == pytest.approx(seconds, abs=allowed_s), name
    assert found["unknown"] <= allowed_s
    assert lost == expected_lost
    assert who == killed
