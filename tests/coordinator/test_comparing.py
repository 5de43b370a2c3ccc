"""What ranks hold alike is compared when all have captured it, and never otherwise."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.coordinator.actions import ReportOutcome, ReportReplicasDiffer, SendMessage, Warn
from holdfast.events import ReplicasDiffer
from holdfast.geometry.layout import Layout
from holdfast.geometry.replicas import Replicas
from holdfast.protocol import messages as m
from holdfast.protocol.replica_events import difference_events
from support.coordinator.coordinators import Actions, Keeper, granted, of, told

ALIKE = struct.pack("<I", 7)


def seal(keeper: Keeper, rank: int, attempt: str, *sums: bytes) -> Actions:
    size = keeper.c.slots[keeper.c.attempts[attempt].slots[rank]].image_bytes
    message = m.Captured(
        attempt=attempt, image_bytes=size, header_xxh3="h", table_xxh3="t", sums=sums
    )
    return keeper.c.lifecycle.captured(rank, message, 0.0)


def capture(keeper: Keeper, step: int, told_by: Sequence[Sequence[bytes]]) -> Actions:
    """One save of all ranks; what came of the last seal."""
    attempt = granted(keeper.ask_all(step))
    actions: Actions = []
    for rank, sums in enumerate(told_by):
        actions = seal(keeper, rank, attempt, *sums)
    return actions


def part(keeper: Keeper, step: int) -> tuple[int, int | None] | None:
    """Which part the ranks are to compare; the attempt comes to nothing."""
    attempt = granted(keeper.ask_all(step))
    found = keeper.c.replica_check.part(attempt)
    keeper.c.lifecycle.abort_capture(0, m.AbortCapture(attempt=attempt, reason="only asked"))
    return found


def test_what_differs_is_told_before_the_generation_is_complete() -> None:
    keeper = Keeper(3)
    actions = capture(keeper, 5, [[ALIKE], [b"else"], [ALIKE]])
    (message,) = told(actions, m.ReplicaDifferences)
    unlike = m.ReplicaDifference(leaf="w", box="", ranks=(1,), replicas=3, is_known_which=True)
    assert (message.step, message.leaves, message.others) == (5, (unlike,), 0)
    assert of(actions, ReportReplicasDiffer) == [ReportReplicasDiffer(message)]
    kinds = [type(a.message) for a in actions if isinstance(a, SendMessage)]
    assert kinds == [m.ReplicaDifferences, m.Complete]


def test_nothing_is_said_while_all_is_well() -> None:
    actions = capture(Keeper(2), 5, [[ALIKE], [ALIKE]])
    assert not told(actions, m.ReplicaDifferences) and not of(actions, ReportReplicasDiffer)
    assert told(actions, m.Complete)


def test_a_rank_that_could_not_sum_costs_only_the_comparing() -> None:
    actions = capture(Keeper(2), 5, [[ALIKE], []])
    assert not told(actions, m.ReplicaDifferences)
    assert told(actions, m.Complete)


def test_an_attempt_that_came_to_nothing_is_not_compared() -> None:
    keeper = Keeper(2)
    attempt = granted(keeper.ask_all(5))
    seal(keeper, 0, attempt, ALIKE)
    aborted = keeper.c.lifecycle.abort_capture(
        1, m.AbortCapture(attempt=attempt, reason="overtaken", leaf="w")
    )
    assert not told(aborted, m.ReplicaDifferences)
    assert keeper.c.replica_check.part(attempt) is None  # nor is it kept
    assert keeper.c.lifecycle.captured(1, _late(attempt), 0.0) == []
    # Neither is what it told compared with the next attempt at the same step.
    assert not told(capture(keeper, 5, [[b"else"], [b"else"]]), m.ReplicaDifferences)


def _late(attempt: str) -> m.Captured:
    return m.Captured(
        attempt=attempt, image_bytes=1, header_xxh3="h", table_xxh3="t", sums=(b"else",)
    )


def test_a_rank_that_is_lost_takes_what_it_told_along() -> None:
    keeper = Keeper(2)
    attempt = granted(keeper.ask_all(5))
    seal(keeper, 0, attempt, b"else")
    keeper.c.lost(1)
    keeper.c.join(1, keeper.writer(1))
    assert not told(capture(keeper, 6, [[ALIKE], [ALIKE]]), m.ReplicaDifferences)


def test_another_incarnation_is_compared_with_itself_alone() -> None:
    keeper = Keeper(2)
    attempt = granted(keeper.ask_all(5))
    seal(keeper, 0, attempt, b"else")
    keeper.begin(2, 2)
    keeper.c.adopt(0.0)
    assert not told(capture(keeper, 5, [[ALIKE], [ALIKE]]), m.ReplicaDifferences)


def test_the_turn_passes_when_all_captured_it_and_not_before() -> None:
    keeper = Keeper(2)
    first = part(keeper, 1)
    assert first is not None
    assert part(keeper, 2) == first  # that came to nothing
    capture(keeper, 3, [[ALIKE], [ALIKE]])
    assert part(keeper, 4) == (first[0] + 1, first[1])


def test_each_incarnation_begins_with_another_part() -> None:
    starts = set()
    for incarnation in range(1, 9):
        keeper = Keeper(2)
        keeper.begin(incarnation, 2)
        keeper.c.adopt(0.0)
        found = part(keeper, 1)
        assert found is not None
        starts.add(found[0] % 100)
    assert len(starts) > 5


def test_nothing_is_to_be_summed_where_nothing_is_shared_or_it_is_not_wanted() -> None:
    assert part(Keeper(1), 1) is None
    keeper = Keeper(2)
    assert (part(keeper, 5) or (0, 0))[1] is None  # in as many as are cheap
    keeper.c.replica_check.wanted = 0
    assert part(keeper, 6) is None
    keeper.c.replica_check.wanted = 7
    assert (part(keeper, 7) or (0, 0))[1] == 7


def test_what_goes_through_rings_is_compared_too() -> None:
    keeper = Keeper(2)
    attempt = granted(keeper.ask_all(5))
    keeper.c.attempts[attempt].is_ring = True
    seal(keeper, 0, attempt, ALIKE)
    actions = seal(keeper, 1, attempt, b"else")
    assert told(actions, m.ReplicaDifferences)
    assert keeper.c.attempts[attempt].phase == "draining"


def test_a_fault_in_comparing_is_said_and_costs_no_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fault(*_: object) -> Any:
        raise IndexError("a fault")

    monkeypatch.setattr(Replicas, "differences", fault)
    actions = capture(Keeper(2), 5, [[ALIKE], [b"else"]])
    assert [note.what for note in of(actions, ReportOutcome)] == ["complete"]
    (warned,) = of(actions, Warn)
    assert "step 5" in warned.text and "a fault" in warned.text


@pytest.mark.parametrize("fault", [MemoryError(), ImportError("no numpy"), IndexError("a fault")])
def test_where_it_is_not_known_who_holds_alike_the_save_is_made_and_why_is_said_once(
    fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Layout) -> Any:
        raise fault

    keeper = Keeper(2)
    with monkeypatch.context() as patched:
        patched.setattr(Layout, "replicas", property(fail))
        actions = keeper.ask_all(5)
        (warned,) = of(actions, Warn)
        assert "step 5" in warned.text and type(fault).__name__ in warned.text
        assert str(fault) in warned.text and not warned.text.endswith(": ")
        attempt = granted(actions)
        assert keeper.c.replica_check.part(attempt) is None
        seal(keeper, 0, attempt)
        assert told(seal(keeper, 1, attempt), m.Complete)
        assert not of(keeper.ask_all(6), Warn)  # the same at every save
        keeper.begin(2, 2)
        keeper.c.adopt(0.0)
        assert of(keeper.ask_all(7), Warn)
        keeper.c.lifecycle.abort_capture(
            0, m.AbortCapture(attempt=next(iter(keeper.c.attempts)), reason="enough")
        )
    assert part(keeper, 8) is not None
    monkeypatch.setattr(Layout, "replicas", property(fail))
    assert of(keeper.ask_all(9), Warn)  # again


def test_each_leaf_is_an_event_of_its_own() -> None:
    unlike = [
        m.ReplicaDifference(leaf=f"w{n}", box="0:4", ranks=(n,), replicas=4, is_known_which=True)
        for n in range(2)
    ]
    message = m.ReplicaDifferences(step=5, attempt="a", leaves=tuple(unlike), others=3)
    assert list(difference_events(message, 2, -1)) == [
        ReplicasDiffer(
            incarnation=2,
            step=5,
            rank=-1,
            leaf=f"w{n}",
            box="0:4",
            ranks=(n,),
            replicas=4,
            is_known_which=True,
            others=3,
        )
        for n in range(2)
    ]
