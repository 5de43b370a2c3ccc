"""Threads that share work stop together, and leave nothing behind."""

from __future__ import annotations

import signal
import threading

import pytest

from holdfast.restore.reading.read import in_parallel


def ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("crew")]


def test_all_work_is_done_once_and_summed() -> None:
    done: list[int] = []

    def act(one: int) -> int:
        done.append(one)
        return one

    assert in_parallel(act, range(1000), threads=4, name="crew") == sum(range(1000))
    assert sorted(done) == list(range(1000))
    assert ours() == []


def test_the_first_error_stops_the_others_and_is_raised() -> None:
    begun: list[int] = []
    has_failed = threading.Event()

    def act(one: int) -> int:
        begun.append(one)
        if one == 3:
            has_failed.set()
            raise KeyError(one)
        if one > 3:
            assert has_failed.wait(30)
        return 1

    with pytest.raises(KeyError):
        in_parallel(act, range(100_000), threads=4, name="crew")
    assert len(begun) < 50_000
    assert ours() == []


def test_an_interruption_ends_what_was_begun_and_begins_nothing_more() -> None:
    begun: list[int] = []
    interrupted = threading.Event()

    def act(one: int) -> int:
        begun.append(one)
        if one == 5:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            interrupted.set()
        elif one > 5:
            assert interrupted.wait(30)
            threading.Event().wait(0.001)  # so that all of them would take minutes
        return 1

    with pytest.raises(KeyboardInterrupt):
        in_parallel(act, range(200_000), threads=2, name="crew")
    assert len(begun) < 100_000
    assert ours() == []
