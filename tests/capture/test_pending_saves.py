"""The saves of the end: what was missed for a passing reason is repeated until it is durable."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.capture.handles import DURABLE, SaveHandle
from holdfast.capture.pending_saves import PendingSaves
from holdfast.errors import SnapshotSkipped
from holdfast.policy.when import Pace


class Saver:
    """Stands for a rank whose first ``losses`` saves are lost with their keeper."""

    updates = 0
    previous_was_lost = False

    def __init__(self, losses: int, *, is_lost: bool = True) -> None:
        self.losses, self._is_lost, self.taken = losses, is_lost, 0

    def save(self, step: int, *, durable: bool, **_: object) -> SaveHandle:
        handle = SaveHandle(step, durable=durable, explain=str, parity=0)
        self.taken += 1
        self.previous_was_lost = self.taken <= self.losses and self._is_lost
        if self.taken <= self.losses:
            handle.fail(SnapshotSkipped("the keeper of a is out of reach"), captured=False)
        else:
            handle.reach(DURABLE)
        return handle

    def previous_was_skipped(self) -> bool:
        return False

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
