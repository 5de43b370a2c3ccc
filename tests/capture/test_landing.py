"""Jobs of landed copies when one of several threads fails: the error is raised, and none waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.capture import landing
from holdfast.capture.copy_plan import Segment
from holdfast.capture.landing import Landing, LandingJob
from holdfast.protocol import control_groups


def jobs(count: int) -> list[LandingJob]:
    return [LandingJob(Segment(0, 0, ()), is_summed=False) for _ in range(count)]


def in_time(work: Callable[[], object]) -> BaseException | None:
    """What ``work`` raises; it must end soon."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
            raised.append(None)
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10)
    assert raised, "it waits for ever"
    return raised[0]


class FailingBeforehand(threading.Condition):
    """Another thread's error comes right before this one is entered."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self._of = of

    def __enter__(self) -> bool:
        found = super().__enter__()
        self._of._error = RuntimeError("of another thread")
        return found


def test_no_job_is_left_that_was_added_while_another_thread_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(landing, "land_threads", lambda: 1)
    made: Any = Landing(memoryview(b""), 0, lambda: None)
    made._changed = FailingBeforehand(made)

    def work() -> None:
        made.add(jobs(2))
        made.finish()

    assert "another thread" in str(in_time(work))
    assert not made._jobs


def test_an_error_ends_the_wait_for_jobs_that_nobody_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing, "land_threads", lambda: 1)
    made: Any = Landing(memoryview(b""), 0, lambda: None)
    made.add(jobs(2))
    made._error = RuntimeError("of another thread")
    assert "another thread" in str(in_time(made.finish))


def test_threads_that_help_sleep_behind_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = Landing(memoryview(b""), 0, lambda: None)
    looked = 0

    def work_one() -> bool:
        nonlocal looked
        looked += 1
        return False

    made._jobs.extend(jobs(1))
    made._error = RuntimeError("of another thread")
    monkeypatch.setattr(made, "_work_one", work_one, raising=False)
    helper = threading.Thread(target=made._help, daemon=True)
    helper.start()
    helper.join(0.2)
    made.stop()
    helper.join(10)
    assert not helper.is_alive() and looked == 0


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"),
    [
        (1, 1, 1),
        (2, 1, 2),
        (4, 1, 4),
        (5, 1, 4),
        (8, 1, 6),
        (16, 1, 12),
        (128, 8, 12),
        (128, 32, 4),
    ],
)
def test_threads_that_land_copies_are_a_part_of_the_cores_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, threads: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(control_groups, "_own_quota", lambda: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert landing.land_threads() == threads


def test_a_quota_of_processor_time_limits_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(control_groups, "_own_quota", lambda: 4.5)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert landing.land_threads() == 4
