"""A flag that is set wakes all who wait, wherever one of them was interrupted."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

from holdfast.capture import task as flag
from holdfast.capture.task import SignalSafeEvent


class Interrupt(Exception):
    """As a signal's handler raises it."""


def interrupted(act: Callable[[], object], at: int) -> bool:
    """Raise at the ``at``-th line or call within the flag; whether there were so many."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != flag.__file__:
            return None
        count += 1
        if count == at:
            raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("is_set", [False, True])
@pytest.mark.parametrize("what", ["wait", "set"])
def test_it_is_sound_wherever_it_was_interrupted(what: str, is_set: bool) -> None:
    at = 1
    while True:
        one = SignalSafeEvent()
        if is_set:
            one.set()
        waiting = threading.Thread(target=one.wait, args=(20.0,), daemon=True)
        waiting.start()
        if not interrupted(one.set if what == "set" else partial(one.wait, 0.01), at):
            break
        one.set()
        assert one.wait(5.0)
        waiting.join(5.0)
        assert not waiting.is_alive()
        at += 1
    assert at > 3


def test_it_wakes_all_who_wait_at_once_and_is_waited_for_no_longer_than_asked() -> None:
    one = SignalSafeEvent()
    woken: list[bool] = []
    threads = [
        threading.Thread(target=lambda: woken.append(one.wait(20.0)), daemon=True) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    began_s = time.monotonic()
    assert not one.wait(0.05)
    assert time.monotonic() - began_s >= 0.05
    assert not one.wait(0.0)
    assert not one.wait(-1.0)
    assert not one.is_set()
    one.set()
    one.set()
    for thread in threads:
        thread.join(5.0)
    assert woken == [True] * 8
    assert one.is_set()
    assert one.wait(0.0)
