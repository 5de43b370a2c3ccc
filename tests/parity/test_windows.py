"""A window is written again when all have taken what is in it, and not sooner."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast.errors import DeadlineExceeded
from holdfast.format.manifest import Generation
from holdfast.parity.exchange.windows import (
    BudgetedPuller,
    CancelScope,
    ExchangeEnded,
    Outbox,
    RateBudget,
)
from holdfast.parity.planning.budget import WINDOW_BYTES, passing_bytes
from holdfast.parity.planning.record import MemberFact, RecordTerms
from holdfast.transport.server import ThreadSafeServer
from support.peers.exchanging import fact_of, make_image
from support.peers.peering import close_pullers, puller


class Noted(ThreadSafeServer):
    """What is offered, and whom to tell when it was taken."""

    def __init__(self) -> None:
        self.offered: dict[str, Callable[[], None] | None] = {}

    def offer_file(self, path: str, *_: Any, on_confirmed: Any = None, **__: Any) -> None:
        self.offered[path] = on_confirmed

    def offer_document(self, path: str, *_: Any, **__: Any) -> None:
        self.offered[path] = None

    def withdraw(self, path: str) -> bool:
        return self.offered.pop(path, self) is not self

    def take(self, window: int, row: int) -> None:
        taken = self.offered[f"/windows/a0/1/0/{row}/{window}"]
        assert taken is not None
        taken()


@pytest.fixture
def made() -> Iterator[tuple[Outbox, Noted, CancelScope]]:
    members = tuple(MemberFact(f"host-{n}", (fact_of(n, make_image(n, 0)),)) for n in range(4))
    terms = RecordTerms("run", Generation(3, 1200), "a0", 4, "0" * 32, 3, members, 1)
    offers, scope = Noted(), CancelScope()
    outbox = Outbox(
        terms,
        0,
        memory=memoryview(bytearray(passing_bytes(3))),
        file=-1,
        offset_bytes=0,
        offers=offers,
        budgeted=BudgetedPuller(puller(), RateBudget(), scope, patience_s=0.2),
    )
    outbox.begin()
    yield outbox, offers, scope
    close_pullers()


def fill(outbox: Outbox, window: int) -> list[memoryview]:
    rows = outbox.room(window, WINDOW_BYTES)
    outbox.offer(window, WINDOW_BYTES, [b"", b""])
    return rows


def test_a_window_is_written_again_when_all_rows_of_it_were_taken(
    made: tuple[Outbox, Noted, CancelScope],
) -> None:
    outbox, offers, _ = made
    for window in (0, 1):
        for row in fill(outbox, window):
            row[:] = bytes([window + 1]) * len(row)
    offers.take(0, row=1)
    offers.take(1, row=1)
    offers.take(1, row=2)
    with pytest.raises(DeadlineExceeded, match="host-2 did not take window 0 of row 2 of stripe 0"):
        outbox.room(2, WINDOW_BYTES)
    assert "/windows/a0/1/0/2/0" in offers.offered
    threading.Timer(0.05, offers.take, (0, 2)).start()
    rows = outbox.room(2, WINDOW_BYTES)
    assert [row[0] for row in rows] == [1, 1], "the place of window 0"
    assert not [path for path in offers.offered if path.endswith("/0") and path.count("/") == 6]
    outbox.finish()
    outbox.close()
    assert not offers.offered


def test_who_waits_for_a_window_ends_with_all_others(
    made: tuple[Outbox, Noted, CancelScope],
) -> None:
    outbox, offers, scope = made
    fill(outbox, 0)
    threading.Timer(0.05, scope.stop, (ValueError("over"),)).start()
    with pytest.raises(ExchangeEnded):
        outbox.finish()
    outbox.close()
    assert not offers.offered and str(scope.reason) == "over"
