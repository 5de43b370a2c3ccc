"""A keeper or a trainer is stopped, as by a debugger or a swapping host: nobody hangs on it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import events
from holdfast.capture.task import Timeouts
from support.runs.evidence import check_storage, newest_sealed, read_events
from support.runs.leftovers import keeper_pids
from support.runs.lives import Lives, build, read_progress, take_step

#: What bounds how long a step may be held by a keeper that does not answer.
PATIENCE = {"grant_s": 1.0, "durable_grant_s": 1.0, "first_grant_s": 60.0}


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP for as long as this lasts."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def wait_sealed(lives: Lives, world: int, step: int) -> None:
    """Wait until all ranks have sealed ``step`` or a later one."""
    deadline = time.monotonic() + 60
    while newest_sealed(lives.root, world) < step:
        lives.raise_errors()
        assert time.monotonic() < deadline, f"no snapshot since step {step} was made"
        time.sleep(0.02)


def missed(root: Path, writer: str = "rank-*") -> list[dict[str, Any]]:
    """The snapshots that came to nothing, with their reasons."""
    return read_events(root, writer, "SnapshotMissed")


def train_through_a_stop(lives: Lives, arena_dir: Path, stop_s: float) -> None:
    """Two ranks train while their keeper is stopped: only the first step is held at all."""
    lives.start(2, 100_000, patience=PATIENCE)
    lives.wait_restored(2)
    wait_sealed(lives, 2, 5)
    (keeper,) = keeper_pids(arena_dir)
    with stopped(keeper):
        stopped_at = read_progress(lives.directory, 2)
        until = time.monotonic() + stop_s
        while time.monotonic() < until or read_progress(lives.directory, 2) < stopped_at + 50:
            lives.raise_errors()
            assert keeper_pids(arena_dir) == [keeper], "a second keeper beside a living one"
            assert time.monotonic() < until + 60, "training hangs on the stopped keeper"
            time.sleep(0.05)
        went_on = read_progress(lives.directory, 2)
    assert went_on >= stopped_at + 50
    wait_sealed(lives, 2, went_on)


@pytest.mark.timeout(300)
def test_a_stopped_keeper_holds_one_step_and_its_deadline_not_the_run(
    tmp_path: Path, arena_dir: Path
) -> None:
    with Lives(tmp_path / "run", seed=1) as lives:
        train_through_a_stop(lives, arena_dir, stop_s=3.0)
        reasons = {event["reason"] for event in missed(lives.root)}
        assert any("no answer to the request for a slot within 1 s" in r for r in reasons), reasons
        assert any("is it stopped?" in reason for reason in reasons), reasons
        # Stopped and then killed: the next keeper is started as after any other death.
        (keeper,) = keeper_pids(arena_dir)
        os.kill(keeper, signal.SIGSTOP)
        stopped_at = read_progress(lives.directory, 2)
        lives.wait_progress(2, stopped_at + 20)
        os.kill(keeper, signal.SIGKILL)
        wait_sealed(lives, 2, read_progress(lives.directory, 2) + 5)
        assert keeper not in keeper_pids(arena_dir)
        completed = lives.end(2)
        lives.start(2, 3)
        step, source = lives.wait_restored(2)
        assert (step in (completed, completed - 1)) and source == "memory"
        lives.wait_end()
    check_storage(tmp_path / "run", step + 3)


@pytest.mark.timeout(300)
def test_a_start_under_a_stopped_keeper_ends_at_its_deadline_and_starts_no_second_one(
    tmp_path: Path, arena_dir: Path
) -> None:
    with Lives(tmp_path / "run", seed=5) as lives:
        lives.start(1, 100_000, layout="plain")
        lives.wait_restored(1)
        lives.wait_progress(1, 5)
        (keeper,) = keeper_pids(arena_dir)
        with stopped(keeper):
            completed = lives.end(1)
            lives.start(1, 3, layout="plain", options={"timeout_s": 1.0})
            with pytest.raises(AssertionError, match="the keeper did not answer"):
                lives.wait_restored(1)
            assert keeper_pids(arena_dir) == [keeper]
        lives.start(1, 3, layout="plain")
        step, source = lives.wait_restored(1)
        assert (step in (completed, completed - 1)) and source == "memory"
        lives.wait_end()


def _save_again(
    checkpointer: holdfast.Checkpointer, model: Any, state: dict[str, Any], step: int
) -> int:
    """Train until a step is captured again; which."""
    while True:
        take_step(model, state, step)
        try:
            checkpointer.save(step).wait_captured(30)
            return step
        except holdfast.SnapshotSkipped:
            step += 1


@pytest.mark.timeout(60)
def test_what_is_asked_for_while_the_keeper_is_stopped_is_kept_or_refused_never_forgotten(
    tmp_path: Path, arena_dir: Path
) -> None:
    model, state = build("plain")
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=None)
    checkpointer._saver.timeouts = Timeouts(**PATIENCE)
    reasons: list[str] = []  # as they are made: a stopped keeper writes no events

    def note(event: events.Event, _: float) -> None:
        if isinstance(event, events.SnapshotMissed):
            reasons.append(event.reason)

    forget = events.subscribe(note)
    take_step(model, state, 0)
    checkpointer.save(0).wait_captured(30)
    (keeper,) = keeper_pids(arena_dir)
    with stopped(keeper):
        take_step(model, state, 1)
        asked = checkpointer.save(1, durable=True)
        for step in range(2, 5):
            take_step(model, state, step)
            checkpointer.step(step)
    step = _save_again(checkpointer, model, state, 5)
    with stopped(keeper):
        # A leaf that was not there before: the keeper has to be told of it first.
        state["late"] = torch.full((5,), 7.0)
        before = len(reasons)
        while not any("no answer" in reason for reason in reasons[before:]):
            step += 1
            take_step(model, state, step)
            checkpointer.step(step)
    _save_again(checkpointer, model, state, step + 1)
    while asked.state == "pending":
        time.sleep(0.01)
    if asked.state == "failed":
        with pytest.raises(holdfast.SaveError):
            asked.wait_durable(0)
    else:
        asked.wait_durable(30)
        assert asked.step >= 1
    checkpointer.close()
    forget()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_training_goes_on_past_a_keeper_stopped_for_thirty_seconds(
    tmp_path: Path, arena_dir: Path
) -> None:
    with Lives(tmp_path / "run", seed=2) as lives:
        train_through_a_stop(lives, arena_dir, stop_s=30.0)
        completed = lives.end(2)
        lives.start(2, 3)
        step, source = lives.wait_restored(2)
        assert (step in (completed, completed - 1)) and source == "memory"
        lives.wait_end()


@pytest.mark.timeout(300)
def test_a_stopped_rank_costs_the_others_snapshots_never_their_steps(tmp_path: Path) -> None:
    with Lives(tmp_path / "run", seed=3) as lives:
        # Ranks that do not meet: nothing but Holdfast could hold the one for the other.
        lives.start(2, 100_000, layout="plain", meets=False, pause_s=0.02, patience=PATIENCE)
        lives.wait_restored(2)
        wait_sealed(lives, 2, 3)
        with stopped(lives.pids[1]):
            stopped_at = read_progress(lives.directory, 1)
            lives.wait_progress(1, stopped_at + 40)  # of rank 0
        reasons = [event["reason"] for event in missed(lives.root, "rank-00000")]
        waits = [reason for reason in reasons if "no answer to the request" in reason]
        (wait,) = waits  # one patience, whatever else the keeper said meanwhile
        assert "within 1 s: ranks [1] have not asked to capture it" in wait
        skips = [reason for reason in reasons if "ranks [1] let the others wait in vain" in reason]
        assert len(skips) >= 30, reasons
        assert not any("keeper" in reason for reason in reasons), "the keeper is blamed"
        # They catch up with each other, and are saved together again.
        reached = max(newest_sealed(lives.root, 2), stopped_at + 40)
        wait_sealed(lives, 2, reached + 5)
        lives.end(2)
        lives.start(2, 1, layout="plain")
        assert lives.wait_restored(2)[0] >= reached + 5
        lives.wait_end()


@pytest.mark.timeout(300)
def test_a_dead_rank_costs_the_others_snapshots_and_not_one_wait(tmp_path: Path) -> None:
    with Lives(tmp_path / "run", seed=6) as lives:
        lives.start(2, 100_000, layout="plain", meets=False, pause_s=0.02, patience=PATIENCE)
        lives.wait_restored(2)
        wait_sealed(lives, 2, 3)
        os.kill(lives.pids[1], signal.SIGKILL)
        lives.wait_progress(1, read_progress(lives.directory, 1) + 40)  # of rank 0
        reasons = [event["reason"] for event in missed(lives.root, "rank-00000")]
        assert not any("no answer to the request" in reason for reason in reasons), reasons
        assert sum("ranks [1] went away" in reason for reason in reasons) >= 30, reasons
        lives.end(2)
        lives.start(2, 1, layout="plain")
        assert lives.wait_restored(2)[0] >= 3
        lives.wait_end()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_stopped_past_the_keepers_deadline_is_named(tmp_path: Path) -> None:
    with Lives(tmp_path / "run", seed=4) as lives:
        lives.start(2, 100_000)  # they meet: rank 0 waits in its own collective, as it would
        lives.wait_restored(2)
        wait_sealed(lives, 2, 3)
        with stopped(lives.pids[1]):
            deadline = time.monotonic() + 60
            while not any("did not ask within 30 s" in e["reason"] for e in missed(lives.root)):
                assert time.monotonic() < deadline, missed(lives.root)[-3:]
                time.sleep(0.2)
        wait_sealed(lives, 2, read_progress(lives.directory, 2) + 5)
        completed = lives.end(2)
        lives.start(2, 3)
        step, source = lives.wait_restored(2)
        assert (step in (completed, completed - 1)) and source == "memory"
        lives.wait_end()
