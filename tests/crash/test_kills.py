"""Trainers are killed at random moments of every phase; what comes back is one whole step."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from holdfast.observe.report_builder import read_report
from support.runs.evidence import check_storage, slot_records
from support.runs.lives import PHASES, Lives, read_signpost

#: How long after a rank came to a phase it is killed at most: longer than most phases last.
LATEST_S = 0.01
WORLDS = [(1, "plain"), (1, "fsdp"), (2, "plain"), (2, "fsdp")]


def kill_trainers(tmp_path: Path, arena_dir: Path, world: int, layout: str, kills: int) -> None:
    """Lives that end by a kill of one rank, each going on from where the one before was killed."""
    died_in: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    half_captured = 0
    victims, all_victims = set[int](), set[int]()
    with Lives(tmp_path / "run", seed=world * 10 + len(layout)) as lives:
        completed = -1
        for number in range(kills):
            aim = PHASES[number % len(PHASES)]
            # The last phase comes by itself: such a life is short.
            steps = lives.random.randrange(1, 6) if aim == "close" else 100_000
            lives.start(world, steps, layout=layout)
            if aim not in ("construct", "restore"):
                step, source = lives.wait_restored(world)
                assert step in (completed, completed - 1), f"completed {completed}, got {step}"
                sources[source] += 1
                if aim != "close":
                    lives.wait_progress(world, step + lives.random.randrange(1, 12))
            victim = lives.random.randrange(world)
            lives.wait_phase(victim, (aim,))
            time.sleep(lives.random.random() * LATEST_S)
            lives.kill([victim])
            lives.join_rank(victim)
            died_in[read_signpost(lives.directory, victim)[1]] += 1
            dead = lives.pids[victim]
            if aim not in ("construct", "restore", "close"):
                victims.add(dead)
            all_victims.add(dead)
            records = slot_records(arena_dir)
            half_captured += any(r.writer_pid == dead and r.state == "writing" for r in records)
            time.sleep(lives.random.random() * LATEST_S)  # what the others do until the launcher
            completed = max(completed, lives.end(world))  # ends them
            lives.check_restored(world)
        lives.start(world, 3, layout=layout)
        step, _ = lives.wait_restored(world)
        assert step in (completed, completed - 1)
        lives.wait_end()
    print(f"killed in {dict(died_in)}, {half_captured} in a capture; resumed from {dict(sources)}")
    assert sum(died_in[phase] > 0 for phase in PHASES) >= min(kills // 3, len(PHASES)), died_in
    assert sources["memory"] > kills // 4  # where a life closed in time, storage has its last step
    check_storage(tmp_path / "run", step + 3)
    first_lost = {start.lost[0].pid for start in read_report(tmp_path / "run").starts if start.lost}
    assert victims <= first_lost <= all_victims, "who died first is told wrongly"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world", "layout"), [(1, "plain"), (2, "fsdp")])
def test_a_killed_trainer_resumes_at_the_last_completed_step_or_the_one_before(
    world: int, layout: str, tmp_path: Path, arena_dir: Path
) -> None:
    kill_trainers(tmp_path, arena_dir, world, layout, kills=12)


@pytest.mark.timeout(120)
def test_a_rank_killed_right_after_an_update_has_handed_over_the_step_before(
    tmp_path: Path,
) -> None:
    with Lives(tmp_path / "run", seed=3) as lives:
        completed = -1
        for _ in range(3):
            lives.start(1, 100_000, layout="plain", report_s=0.2)
            step, _ = lives.wait_restored(1)
            assert step in (completed, completed - 1), f"completed {completed}, got {step}"
            lives.wait_progress(1, step + 2, pause_s=0.0005)
            completed = lives.end(1)
        lives.start(1, 1, layout="plain")
        step, _ = lives.wait_restored(1)
        assert step in (completed, completed - 1), f"completed {completed}, got {step}"
        lives.wait_end()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world", "layout"), WORLDS)
def test_of_a_hundred_kills_in_every_phase_none_loses_more(
    world: int, layout: str, tmp_path: Path, arena_dir: Path
) -> None:
    kill_trainers(tmp_path, arena_dir, world, layout, kills=100)
