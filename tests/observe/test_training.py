"""What is recorded of training: sums of steps, declared phases, and where a process died."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import holdfast
from holdfast import events
from holdfast.observe.event_files import EventFile
from holdfast.observe.event_ring import PHASES, RINGS, EventRing
from holdfast.observe.report_builder import read_report
from holdfast.observe.ring_drain import RingDrain, RingDrainer
from holdfast.observe.training import DECLARED, SAVING, TRAINING, TrainingRecorder


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def told() -> Iterator[list[Any]]:
    found: list[Any] = []
    stop = events.subscribe(lambda event, _: found.append(event))
    yield found
    stop()


def recorder(clock: Clock, **options: Any) -> TrainingRecorder:
    return TrainingRecorder(0, 1, **{"is_reporting": True, "ring": None, **options}, clock=clock)


def test_steps_are_summed_over_a_second_and_no_time_is_counted_twice(told: list[Any]) -> None:
    clock = Clock()
    training = recorder(clock)
    for step in range(100):
        clock.now_s += 0.05
        training.step(step, tokens=10)
    training.report()
    assert len(told) == 6 and all(isinstance(one, events.StepsDone) for one in told)
    assert [one.is_first for one in told] == [True] + [False] * 5
    assert sum(one.steps for one in told) == 100 and sum(one.tokens for one in told) == 1000
    assert sum(one.elapsed_s for one in told) == pytest.approx(5.0)
    assert told[-1].step == 99


def test_a_step_that_hangs_is_told_at_once_and_alone_is_the_longest(told: list[Any]) -> None:
    clock = Clock()
    training = recorder(clock)
    for step in range(5):
        clock.now_s += 0.1
        training.step(step)
    clock.now_s += 0.6
    training.step(5)
    assert (told[-1].step, told[-1].longest_s) == (5, pytest.approx(0.6))


def test_a_rank_that_does_not_report_records_no_steps(told: list[Any]) -> None:
    clock = Clock()
    training = recorder(clock, is_reporting=False)
    for step in range(50):
        clock.now_s += 1.0
        training.step(step)
        with training.phase("data"):
            clock.now_s += 0.01
    training.report()
    assert told == []


def test_short_phases_are_summed_and_long_ones_told_one_by_one(told: list[Any]) -> None:
    clock = Clock()
    training = recorder(clock)
    for step in range(10):
        with training.phase("data"):
            clock.now_s += 0.02
        training.step(step)
    with suppress(KeyError), training.phase("evaluation"):
        clock.now_s += 3.0
        raise KeyError
    training.report()
    phases = [one for one in told if isinstance(one, events.PhaseEnded)]
    long = next(one for one in phases if one.name == "evaluation")
    assert (long.elapsed_s, long.times, long.step) == (3.0, 1, 9)
    data = [one for one in phases if one.name == "data"]
    assert sum(one.times for one in data) == 10
    assert sum(one.elapsed_s for one in data) == pytest.approx(0.2)


def test_the_end_says_how_long_close_waited(told: list[Any]) -> None:
    clock = Clock()
    training = recorder(clock)
    clock.now_s += 1.0
    training.step(0)
    training.enter(SAVING)
    clock.now_s += 2.5
    assert training.ended("closed").closing_s == 2.5
    training.enter(TRAINING)
    assert training.ended("failed").closing_s == 0.0


DYING = """
import os, signal, sys
from pathlib import Path
from holdfast.observe.event_ring import EventRing
from holdfast.observe.training import TrainingRecorder, ENDED
ring = EventRing(Path(sys.argv[1], 'events'), 'rank-00003', rank=3, host='c', boot='b')
training = TrainingRecorder(3, 2, is_reporting=False, ring=ring)
training.step(41)
training.enter(3)
if sys.argv[2] == 'phase':
    context = training.phase('evaluation of the whole test set')
    context.__enter__()
if sys.argv[2] == 'ended':
    training.enter(ENDED)
print(os.getpid(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("how", "phase"), [("step", "training"), ("phase", "evaluation of the whole"), ("ended", "")]
)
def test_what_a_process_was_doing_is_found_after_its_sigkill(
    tmp_path: Path, how: str, phase: str
) -> None:
    arena = tmp_path / "arena"
    arena.mkdir(mode=0o700)
    ended = subprocess.run([sys.executable, "-c", DYING, str(arena), how], capture_output=True)
    assert ended.returncode == -signal.SIGKILL
    path = tmp_path / "host-c.jsonl"
    drain = RingDrain(arena, EventFile(path))
    for _ in range(25):  # whoever looks again finds nothing more
        drain.poll()
    drain.close()
    lines = path.read_bytes().splitlines() if path.exists() else []
    records = [msgspec.json.decode(line) for line in lines]
    if how == "ended":
        assert records == []
        return
    (died,) = records
    assert (died["event"], died["rank"], died["host"]) == ("TrainerDied", 3, "c")
    assert (died["incarnation"], died["step"], died["phase"]) == (2, 41, phase)
    assert 0 <= died["quiet_s"] < 60 and died["boot"] == "b"
    assert died["pid"] == int(ended.stdout)
    assert died["alive_s"] == 0, "nobody saw the end"


def test_who_died_first_is_known_of_ranks_that_never_joined(tmp_path: Path) -> None:
    """The one that came to its phase first died last."""
    arena = tmp_path / "arena"
    arena.mkdir(mode=0o700)
    living = DYING.replace("os.kill(os.getpid(), signal.SIGKILL)", "time.sleep(60)")
    living = "import time\n" + living
    ranks = []
    for rank in (0, 1):
        script = living.replace("rank=3", f"rank={rank}").replace("(3, 2,", f"({rank}, 2,")
        command = [sys.executable, "-c", script, str(arena), "step"]
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert ranks[-1].stdout is not None and ranks[-1].stdout.readline()
    path = tmp_path / "host-c.jsonl"
    drainer = RingDrainer(RingDrain(arena, EventFile(path)))
    try:
        while len(drainer.drain._rings) < 2:
            time.sleep(0.01)
        for one in reversed(ranks):
            one.kill()
            one.wait()
            time.sleep(0.005)
        while not path.exists() or len(path.read_bytes().splitlines()) < 2:
            time.sleep(0.01)
    finally:
        for one in ranks:
            one.kill()
            one.communicate()
        drainer.close()
    ends = {}
    for line in path.read_bytes().splitlines():
        died = msgspec.json.decode(line)
        ends[died["rank"]] = died["mono_s"] - died["quiet_s"] + died["alive_s"]
    assert ends[1] < ends[0]


def test_noting_what_one_does_makes_no_record_and_costs_microseconds(tmp_path: Path) -> None:
    ring = EventRing(tmp_path / RINGS, "rank-00000", rank=0, host="a", boot="b")
    training = TrainingRecorder(0, 1, is_reporting=False, ring=ring)
    assert ring.ring is not None
    times = []
    for step in range(2000):
        began = time.perf_counter_ns()
        training.step(step)
        times.append(time.perf_counter_ns() - began)
    assert sorted(times)[len(times) // 2] < 20_000
    assert ring.ring.is_drained()
    doing = ring.ring.doing()
    assert doing is not None and (doing.phase, doing.step) == ("saving", 1999)
    training.enter(DECLARED, "x")
    doing = ring.ring.doing()
    assert doing is not None and doing.phase == "x"
    ring.ring.note_doing(len(PHASES) + 7, 0, 1)  # of a later version
    assert ring.ring.doing() is None


def test_a_run_tells_its_steps_phases_and_tokens(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    ckpt = holdfast.Checkpointer(tmp_path, {"model": model}, storage=None)
    for step in range(3):
        with ckpt.phase("evaluation"):
            time.sleep(0.12)
        ckpt.step(step, tokens=7)
    ckpt.close()
    ledger = read_report(tmp_path).ledger
    assert ledger is not None
    assert 0.3 < ledger.declared_s["evaluation"] < 3
    text = b"".join(path.read_bytes() for path in (tmp_path / "events").glob("*.jsonl"))
    records = [msgspec.json.decode(line) for line in text.splitlines()]
    steps = [one for one in records if one["event"] == "StepsDone"]
    assert sum(one["steps"] for one in steps) == 3 and sum(one["tokens"] for one in steps) == 21
    started = next(one for one in records if one["event"] == "RunStarted")
    assert started["process_s"] > started["joined_s"] > 0


@pytest.mark.parametrize("tokens", [np.int64(7), torch.tensor(7)], ids=["numpy", "tensor"])
def test_a_count_of_tokens_of_any_library_is_recorded_and_silences_no_sink(
    tmp_path: Path, told: list[Any], tokens: Any
) -> None:
    records: list[dict[str, Any]] = []
    stop = events.subscribe(lambda event, time_s: records.append(events.to_record(event, time_s)))
    with holdfast.Checkpointer(tmp_path, {"at": 0}, memory=None, storage=None) as ckpt:
        ckpt.step(0, tokens=tokens)
    stop()
    assert not [one for one in told if isinstance(one, events.SinkFailed)]
    assert [one["tokens"] for one in records if one["event"] == "StepsDone"] == [7]


@pytest.mark.parametrize("tokens", [-1, 1.5, "7"], ids=repr)
def test_tokens_that_are_no_count_are_refused(tmp_path: Path, tokens: Any) -> None:
    ckpt = holdfast.Checkpointer(tmp_path, {"at": 0}, memory=None, storage=None)
    with pytest.raises(holdfast.UsageError, match=r"tokens=.*: a whole number from 0 on"):
        ckpt.step(0, tokens=tokens)
    ckpt.close()


class _Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def test_an_error_that_cannot_be_shown_is_named_by_its_class(told: list[Any]) -> None:
    training = recorder(Clock())
    try:
        raise _Unspeakable
    except _Unspeakable:
        ended = training.ended("failed")
    assert ended.reason == "_Unspeakable"
