"""The saves of the end: what was missed for a passing reason is repeated until it is durable."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import holdfast
from holdfast import Every
from holdfast.capture.handles import DURABLE, PendingHandles, SaveHandle
from holdfast.capture.pending_saves import PendingSaves
from holdfast.capture.session import KeeperSession
from holdfast.errors import HoldfastError, KeeperError, SnapshotSkipped
from holdfast.policy.when import Pace
from holdfast.protocol import messages as m
from support.runs.leftovers import keeper_pids


class Saver:
    """Stands for a rank whose first ``losses`` saves are lost with their keeper."""

    updates = 0
    previous_was_lost = False

    def __init__(self, losses: int, *, is_lost: bool = True) -> None:
        self.losses, self._is_lost, self.taken = losses, is_lost, 0

    def save(self, step: int, *, durable: bool, **_: object) -> SaveHandle:
        self.last = handle = SaveHandle(step, durable=durable, explain=str, parity=0)
        self.taken += 1
        self.previous_was_lost = self.taken <= self.losses and self._is_lost
        if self.taken <= self.losses:
            handle.fail(SnapshotSkipped("the keeper of a is out of reach"), captured=False)
        else:
            handle.reach(DURABLE)
        return handle

    def previous_was_skipped(self) -> bool:
        return False

    def unpaid(self) -> list[SaveHandle]:
        return [self.last] if self.last.state != DURABLE else []

    def end_capture(self, *, timeout_s: float) -> bool:
        return True

    def is_whole(self, step: int, *, timeout_s: float) -> bool:
        return False


def close(saver: Any) -> SaveHandle:
    pending = PendingSaves(saver, Pace(), is_alone=False)
    handle = pending.save(20, durable=True, exact=True)
    pending.keep(
        lambda step, *, durable: pending.save(step, durable=durable, exact=True),
        timeout_s=60.0,
        is_newest_promised=False,
    )
    return handle


@pytest.mark.parametrize("losses", [1, 3])
def test_a_last_save_is_repeated_however_often_its_keeper_is_lost(losses: int) -> None:
    saver = Saver(losses)
    close(saver)
    assert saver.taken == losses + 1


def test_a_last_save_that_came_to_nothing_by_itself_is_told_and_not_repeated() -> None:
    saver = Saver(1, is_lost=False)
    with pytest.raises(SnapshotSkipped, match="out of reach"):
        close(saver)
    assert saver.taken == 1


class FoundWhole(Saver):
    """Its first save is missed, and the next keeper finds all of it and makes it durable."""

    def previous_was_skipped(self) -> bool:
        return self.taken == 1

    def unpaid(self) -> list[SaveHandle]:
        return []

    def decline(self, step: int, durable: bool, error: Exception, handle: object) -> SaveHandle:
        declined = SaveHandle(step, durable=durable, explain=str)
        declined.fail(SnapshotSkipped(str(error)), captured=False)
        return declined


@pytest.mark.parametrize("is_declined", [False, True])
def test_at_the_end_what_the_next_keeper_found_is_not_saved_again_but_a_later_step_that_was_due_is(
    is_declined: bool,
) -> None:
    saver: Any = FoundWhole(1)
    pending = PendingSaves(saver, Pace(), is_alone=True)
    pending.save(20, durable=True, exact=False)
    if is_declined:
        pending.decline(21, durable=True, error=ValueError("no state"))
    pending.keep(
        lambda step, *, durable: pending.save(step, durable=durable, exact=True),
        timeout_s=60.0,
        is_newest_promised=False,
    )
    assert saver.taken == (2 if is_declined else 1)


def test_a_save_that_repeats_a_missed_one_fulfils_all_that_the_missed_one_was_to_fulfil() -> None:
    handles = PendingHandles()
    due, asked, again = (SaveHandle(n, durable=True, explain=str) for n in (1, 2, 2))
    fleeting = SaveHandle(2, durable=False, explain=str)
    handles.add(1, [due])
    handles.add(2, [asked, *handles.unpaid(1)])
    handles.join(2, fleeting)
    handles.join(2, again)
    handles.fail(2, SnapshotSkipped("missed"), captured=False)
    last = SaveHandle(3, durable=True, explain=str)
    handles.add(3, [last, *handles.unpaid(2)])
    handles.durable(3)
    told = [(one.state, one.step) for one in (due, asked, again, last)]
    assert told == [("durable", 3)] * 4
    assert (fleeting.state, fleeting.step) == ("failed", 2)


@pytest.mark.parametrize("every", [1, 1000], ids=["due at each step", "due by itself"])
def test_a_durable_save_is_made_good_though_a_step_ended_before_its_keeper_was_reached(
    tmp_path: Path, arena_dir: Path, every: int
) -> None:
    memory = Every(steps=every)
    checkpointer = holdfast.Checkpointer(tmp_path, {"w": torch.ones(9)}, memory=memory)
    checkpointer.save(1).wait_captured(60)
    saver, is_there = checkpointer._saver, threading.Event()
    connect = saver._connect

    def connect_late(*given: Any) -> Any:
        is_there.wait(60)
        return connect(*given)

    saver._connect = connect_late
    usual = saver.timeouts
    saver.timeouts = replace(usual, grant_s=0.1, durable_grant_s=0.1)
    (keeper,) = keeper_pids(arena_dir)
    os.kill(keeper, signal.SIGKILL)
    while saver._session.is_open:
        time.sleep(0.01)
    owed = checkpointer.save(2, durable=True)
    checkpointer.before_update()  # waits for the keeper in vain
    during = checkpointer.step(3)
    assert (during is None) == (every > 1)
    checkpointer.before_update()
    is_there.set()
    saver.timeouts = usual
    step = 3
    while owed.state != "durable":  # the next keeper may still be making its memory
        assert saver.end_capture(timeout_s=60)
        step += 1
        checkpointer.step(step)
        assert saver.end_capture(timeout_s=60)
        with suppress(HoldfastError):
            owed.wait_durable(1)
    assert owed.step >= 4
    checkpointer.close(60)


def test_a_save_of_a_signals_handler_is_of_the_state_before_the_update_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.Checkpointer(tmp_path, {"w": torch.ones(9)}, storage=None) as checkpointer:
        with monkeypatch.context() as patch:
            # As a handler does that runs while this waits.
            patch.setattr(checkpointer._saver, "_await_reading", lambda: checkpointer.save(1))
            checkpointer.before_update()
        assert checkpointer._promised._step_of_state() is None


def test_a_durable_save_whose_image_could_not_be_reported_is_made_good_by_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, lost = KeeperSession.send, [KeeperError("the keeper went away: Broken pipe")]

    def breaks(session: KeeperSession, message: m.Message) -> None:
        if isinstance(message, m.Captured) and lost:
            raise lost.pop()  # before the listener has noticed that it is gone
        send(session, message)

    monkeypatch.setattr(KeeperSession, "send", breaks)
    with holdfast.Checkpointer(tmp_path, {"w": torch.ones(9)}, memory=None) as checkpointer:
        owed = checkpointer.save(1, durable=True)
        assert checkpointer._saver.end_capture(timeout_s=60)
        assert checkpointer.step(2) is not None
        owed.wait_durable(60)
        assert owed.step == 2
