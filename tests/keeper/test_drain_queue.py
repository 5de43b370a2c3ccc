"""The queue of what is to be drained: its pauses, and what a new thread of the root begins with."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from holdfast.format.manifest import Generation
from holdfast.keeper.drain_queue import Drained, DrainQueue

REFUSED = Drained(Generation(1, 0), "a", "503")


@pytest.mark.promise
def test_a_new_thread_of_the_root_drains_at_once_what_an_earlier_one_could_not() -> None:
    outcomes: list[Drained | None] = [REFUSED, REFUSED, None]
    told: list[Drained] = []
    submitted: list[Callable[[], None]] = []
    queue = DrainQueue(
        submitted.append, lambda _: outcomes.pop(0), dict, told.append, lambda call: call()
    )
    for _ in range(2):
        queue.tick(time.monotonic() + 1000)
        submitted.pop()()
    assert told == [REFUSED, REFUSED] and queue.is_failing and not queue.is_busy
    queue.reset()
    assert queue.is_busy and not queue.is_failing  # a keeper that is to end waits for it
    queue.tick(time.monotonic())
    submitted.pop()()
    assert not queue.is_busy and told == [REFUSED, REFUSED]
