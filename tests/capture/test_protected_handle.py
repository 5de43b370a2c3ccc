"""What a save's handle says of its protection."""

from __future__ import annotations

import threading

import pytest

from holdfast.capture.handles import PendingHandles, SaveHandle
from holdfast.capture.session import KeeperNotifications
from holdfast.capture.task import RankIdentity
from holdfast.errors import NotProtected, SnapshotSkipped, UsageError
from holdfast.protocol import messages as m

PLACE = RankIdentity(run_id="r", incarnation=1, nonce="n", rank=0, world=1)


class Rank:
    """A rank of a run with this parity, and the handles of its saves."""

    def __init__(self, parity: int = 1) -> None:
        self.promises = PendingHandles()
        self.heard = KeeperNotifications(self.promises)
        self.parity = parity

    def save(self, step: int, *, durable: bool = False) -> SaveHandle:
        handle = SaveHandle(step, durable=durable, explain=str, parity=self.parity)
        self.promises.add(step, [handle])
        return handle

    def hear(self, *messages: m.Message) -> None:
        for message in messages:
            self.heard.handle(message, None, PLACE)


def complete(step: int) -> m.Complete:
    return m.Complete(step=step, attempt=f"a{step}", durable=False)


def protected(step: int) -> m.Protected:
    return m.Protected(step=step, attempt=f"a{step}")


def test_a_snapshot_is_captured_then_protected_and_one_passed_over_is_told_so() -> None:
    rank = Rank()
    first, second = rank.save(1), rank.save(2)
    rank.hear(complete(1), complete(2))
    assert first.state == "captured"
    rank.hear(protected(2))
    assert (first.state, second.state) == ("captured", "protected")
    second.wait_protected(1)
    with pytest.raises(NotProtected, match="step 2 was protected instead"):
        first.wait_protected(1)
    first.wait_captured(1)


def test_a_turn_that_failed_is_no_failed_save_and_may_be_made_good() -> None:
    rank = Rank()
    handle = rank.save(1)
    rank.hear(complete(1), m.Unprotected(step=1, attempt="a1", reason="no network"))
    assert handle.state == "captured"
    with pytest.raises(NotProtected, match="no network"):
        handle.wait_protected(1)
    rank.hear(protected(1))
    handle.wait_protected(1)
    assert handle.state == "protected"


def test_storage_survives_hosts_too_and_what_was_skipped_is_not_protected() -> None:
    rank = Rank()
    durable, skipped = rank.save(1, durable=True), rank.save(2)
    rank.hear(complete(1), m.Durable(step=1, attempt="a1"))
    durable.wait_protected(1)
    assert durable.state == "durable"
    rank.promises.fail(2, SnapshotSkipped("no slot"), captured=False)
    with pytest.raises(SnapshotSkipped):
        skipped.wait_protected(1)
    late = rank.save(3)
    rank.hear(complete(3))
    rank.heard.lost("it was killed", None)
    with pytest.raises(NotProtected, match="keeper went away"):
        late.wait_protected(1)


def test_without_parity_only_storage_protects() -> None:
    handle = Rank(parity=0).save(1)
    with pytest.raises(UsageError, match="this host's memory only"):
        handle.wait_protected(1)


def test_a_save_that_begins_while_the_keeper_is_heard_disturbs_nothing() -> None:
    rank = Rank()
    saves: list[threading.Thread] = []

    class Slow(SaveHandle):
        """A handle during whose news another thread begins a save."""

        def reach(self, what: str) -> None:
            saves.append(threading.Thread(target=rank.save, args=(9,)))
            saves[-1].start()
            saves[-1].join(0.2)
            super().reach(what)

    first = Slow(1, durable=False, explain=str, parity=1)
    rank.promises.add(1, [first])
    last = rank.save(2)
    rank.hear(protected(1), protected(2))
    for save in saves:
        save.join()
    assert (first.state, last.state) == ("protected", "protected")


def test_what_is_told_late_of_a_step_says_nothing_of_a_save_that_went_on_to_another() -> None:
    rank = Rank()
    missed = rank.save(1, durable=True)
    rank.hear(m.Aborted(step=1, attempt="a1", reason="the keeper went away", is_lost=True))
    assert missed.state == "failed"
    rank.promises.add(2, [missed])
    rank.hear(m.Aborted(step=1, attempt="a1", reason="its image was not reported"))
    assert missed.state == "pending"
    rank.hear(m.Durable(step=2, attempt="a2"))
    assert (missed.state, missed.step) == ("durable", 2)
