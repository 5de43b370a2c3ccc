"""A keeper says when its loop was held, and does not call a busy machine its own fault."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.events import Event, LoopHeld, subscribe
from holdfast.keeper.__main__ import SWITCH_S
from holdfast.keeper.loop_watch import MOST_S, LoopWatch


def reports(
    act: Callable[[], None],
    pauses: int,
    *,
    report_s: float = 60.0,
    waits_s: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
) -> list[LoopHeld]:
    """What is reported when ``act`` runs on the loop in each of these pauses."""
    found: list[Event] = []
    waited_s = 0.0

    async def play() -> None:
        nonlocal waited_s
        watch = LoopWatch("a", clock=clock, report_s=report_s)
        if waits_s:
            watch._waited_s = lambda: waited_s  # type: ignore[method-assign]
        for _ in range(pauses):
            waiting = asyncio.create_task(watch.pause(0.01))
            await asyncio.sleep(0)
            asyncio.get_running_loop().call_soon(act)
            waited_s += waits_s
            await waiting
        watch.close()
        watch.close()

    unsubscribe = subscribe(lambda event, _: found.append(event))
    try:
        asyncio.run(play())
    finally:
        unsubscribe()
    return [event for event in found if isinstance(event, LoopHeld)]


def compute() -> None:
    end_s = time.thread_time() + 4 * MOST_S
    while time.thread_time() < end_s:
        pass


@pytest.mark.parametrize("hold", [compute, lambda: time.sleep(4 * MOST_S)])
def test_a_held_loop_is_reported(hold: Callable[[], None]) -> None:
    """By work, and by a call that blocks."""
    (report,) = reports(hold, 1)
    assert (report.host, report.times) == ("a", 1)
    assert report.longest_s > MOST_S


def test_reports_are_few_and_tell_of_what_came_between() -> None:
    (report,) = reports(compute, 3)
    assert report.times == 1
    first, second, third = reports(compute, 3, report_s=0.0)
    assert first.times == second.times == third.times == 1


def test_time_in_which_the_thread_waited_for_a_processor_does_not_count() -> None:
    assert not reports(lambda: time.sleep(4 * MOST_S), 2, waits_s=60.0)


@pytest.mark.parametrize(("late_s", "reported"), [(0.9 * MOST_S, 0), (1.1 * MOST_S, 1)])
def test_a_loop_that_nothing_holds_for_long_is_not_reported(late_s: float, reported: int) -> None:
    """By a clock of its own: on a busy machine any loop may be late."""
    ticks = itertools.count(0.0, 0.01 + late_s)
    found = reports(lambda: None, 5, waits_s=1e-9, clock=lambda: next(ticks))
    assert len(found) == reported


def test_a_kernel_that_does_not_count_waits_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise FileNotFoundError

    monkeypatch.setattr("holdfast.keeper.loop_watch.os.open", refuse)
    assert LoopWatch("a")._waited_s() == 0.0


SHOWS_ITS_INTERVAL = """
import sys
from holdfast.keeper import __main__, process
class Keeper:
    def __init__(self, *_, **__):
        print(sys.getswitchinterval(), flush=True)
    async def run(self):
        pass
process.Keeper = Keeper
__main__.main(sys.argv[1:])
"""


def test_threads_that_compute_let_the_loop_of_a_keeper_go_on_soon(arena_dir: Path) -> None:
    assert 20 * SWITCH_S < MOST_S, "of many threads each may hold it once"
    options = f"--arena {arena_dir}/run --run-id run --root {arena_dir} --host-id a".split()
    command = [sys.executable, "-c", SHOWS_ITS_INTERVAL, *options]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert float(shown.stdout) == pytest.approx(SWITCH_S)
