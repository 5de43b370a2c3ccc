"""The coordinator's part in protecting: which slots stay, and what a failed turn costs."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from holdfast.events import Event, subscribe
from holdfast.keeper import control
from holdfast.keeper.protecting import Protecting
from holdfast.redundancy.records import ImageFact, MemberFact
from holdfast.snapshot import messages as m
from holdfast.snapshot.attempts import Attempt, Attempts
from holdfast.snapshot.slots import slot_id_of

HOSTS = tuple(m.HostPlace(id=f"h{n}", ranks=(n,)) for n in range(3))


class FakeParity:
    """Tells its heads at once; makes nothing until it is told to."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.orders: list[control.MakeParity] = []
        self.begun: list[int] = []
        self.given_up: list[str] = []
        self.tell: Any = None
        self.port = 0
        self.is_dropped = False

    def rows(self) -> list[Any]:
        return self.kept

    def member(self, attempt: str) -> MemberFact:
        return member(0)

    def make(self, order: control.MakeParity, _: Any, tell: Any) -> None:
        self.orders.append(order)
        self.tell = tell

    def begin(self, turn: int) -> None:
        self.begun.append(turn)

    def give_up(self, why: str) -> None:
        self.given_up.append(why)

    def drop(self) -> None:
        self.is_dropped = True

    def keep(self, attempt: str, half: int, *members: str) -> None:
        record = SimpleNamespace(attempt=attempt, parity=1)
        self.kept.append(SimpleNamespace(half=half, members=members, record=record))


def member(number: int) -> MemberFact:
    fact = ImageFact(number, 8192, 4096, "0" * 16, "0" * 16, b"")
    return MemberFact(f"h{number}", (fact,))


class Play:
    """One coordinator of three hosts, of which this is the first."""

    def __init__(self) -> None:
        self.attempts = Attempts()
        self.coordinator = SimpleNamespace(
            attempts=self.attempts, away={}, adopted=True, incarnation=2, pin_again=lambda: None
        )
        self.said: list[tuple[int, control.Fact]] = []
        self.told: list[m.Message] = []
        self.parity = FakeParity()
        hands: Any = SimpleNamespace(
            say_host=lambda host, fact: self.said.append((host, fact)), port_of=lambda host: host
        )
        ranks: Any = SimpleNamespace(tell=lambda message, _: self.told.append(message))
        parity: Any = self.parity
        coordinator: Any = self.coordinator
        self.protecting = Protecting(coordinator, ranks, hands, parity)
        self.protecting.begin(HOSTS)

    def hold(self, id_: str, step: int, *, incarnation: int = 2, lost: int = 0) -> None:
        """An attempt is whole in memory, but for so many lost images."""
        attempt = Attempt(id_, incarnation, step, 3, "l", phase="complete")
        attempt.slots = {rank: slot_id_of(rank, step) for rank in range(lost, 3)}
        self.attempts[id_] = attempt

    def capture(self, id_: str, step: int) -> None:
        self.hold(id_, step)
        self.attempts.captured(id_)
        self.protecting.captured(id_)

    @property
    def turn(self) -> int:
        """The last that was begun."""
        asked = [fact for _, fact in self.said if isinstance(fact, control.TellHeads)]
        return asked[-1].turn

    def tell_heads(self) -> None:
        for number in (1, 2):
            self.protecting.hear(f"h{number}", control.Heads(turn=self.turn, member=member(number)))

    def ready(self, *numbers: int, turn: int | None = None) -> None:
        for number in numbers:
            fact = control.ParityReady(turn=self.turn if turn is None else turn)
            self.protecting.hear(f"h{number}", fact)

    def make(self, *numbers: int, turn: int | None = None) -> None:
        for number in numbers:
            self.protecting.hear(
                f"h{number}", control.ParityMade(turn=self.turn if turn is None else turn)
            )


@pytest.fixture
def play() -> Play:
    return Play()


@pytest.fixture
def events() -> Iterator[list[Event]]:
    heard: list[Event] = []
    stop = subscribe(lambda event, _: heard.append(event))
    yield heard
    stop()


def named(events: list[Event], name: str) -> list[Any]:
    return [event for event in events if type(event).__name__ == name]


def test_a_generation_is_protected_with_the_last_seal_and_stays_until_the_next_one_is(
    play: Play, events: list[Event]
) -> None:
    play.protecting.ask(1)
    assert [e.survives for e in named(events, "ProtectionPlanned")] == ["any 1 of 3 hosts"]
    play.capture("a", 1)
    play.tell_heads()
    assert [order.attempt for order in play.parity.orders] == ["a"]
    play.capture("b", 2)  # while a is coded: that turn goes on
    play.make(0, 1)
    assert not play.told and play.attempts.kept == {"a", "b"}
    play.make(2)
    assert play.told == [m.Protected(step=1, attempt="a")]
    assert [e.step for e in named(events, "SnapshotProtected")] == [1]
    play.tell_heads()  # b is begun by itself
    first, second = play.parity.orders
    assert second.attempt == "b" and second.half == 1 - first.half
    play.capture("c", 3)
    assert play.attempts.kept == {"a", "b", "c"}
    play.make(0, 1, 2)
    assert play.attempts.kept == {"b", "c"}
    assert not play.attempts.must_stay(play.attempts["a"])


def test_a_turn_that_fails_is_given_up_by_all_and_costs_nothing_that_was_protected(
    play: Play, events: list[Event]
) -> None:
    play.protecting.ask(1)
    play.capture("a", 1)
    play.tell_heads()
    play.make(0, 1, 2)
    play.capture("b", 2)
    play.tell_heads()
    failed, half = play.turn, play.parity.orders[-1].half
    play.make(0)
    play.protecting.hear("h1", control.ParityNotMade(turn=failed, reason="no network"))
    assert [e.reason for e in named(events, "SnapshotNotProtected")] == ["on h1: no network"]
    assert isinstance(play.told[-1], m.Unprotected) and play.parity.given_up
    assert {"a", "b"} <= play.attempts.kept
    play.make(1, 2, turn=failed)  # too late
    assert len(named(events, "SnapshotProtected")) == 1
    play.capture("c", 3)  # tried at once
    play.tell_heads()
    assert (play.parity.orders[-1].attempt, play.parity.orders[-1].half) == ("c", half)
    assert "a" in play.attempts.kept


def test_a_host_out_of_reach_ends_its_turn_and_nothing_begins_until_it_is_back(play: Play) -> None:
    play.protecting.ask(1)
    play.capture("a", 1)
    begun = play.turn
    play.coordinator.away[2] = "h2"
    play.protecting.detached("h2")
    assert play.attempts.kept == {"a"} and len(play.told) == 1
    play.capture("b", 2)
    assert play.turn == begun
    play.coordinator.away.clear()
    play.protecting.attached("h2", ())
    assert play.turn > begun
    play.tell_heads()
    assert play.parity.orders[-1].attempt == "b"


def rows(attempt: str, half: int) -> tuple[control.HeldRows, ...]:
    return (held(attempt, half, "h0", "h1", "h2"),)


def held(attempt: str, half: int, *members: str) -> control.HeldRows:
    return control.HeldRows(half=half, attempt=attempt, members=members, parity=1)


@pytest.mark.parametrize("half", [0, 1])
def test_a_coordinator_that_takes_over_keeps_what_all_hosts_have_sealed(
    play: Play, half: int
) -> None:
    play.hold("old", 7, incarnation=1)
    play.hold("new", 8, incarnation=1)  # rows of it are on one host only: its turn was cut short
    play.attempts.recount()
    play.attempts.pinned = "new"
    play.parity.keep("old", half, "h0", "h1", "h2")
    play.protecting.attached("h1", rows("old", half))
    play.protecting.attached("h2", (*rows("old", half), *rows("new", 1 - half)))
    play.protecting.ask(1)
    assert play.attempts.kept == {"old", "new"}
    play.tell_heads()  # protected anew before anything is captured
    assert (play.parity.orders[-1].attempt, play.parity.orders[-1].half) == ("new", 1 - half)
    play.make(0, 1, 2)
    assert play.attempts.kept == {"new"}


@pytest.mark.parametrize("half", [0, 1])
def test_what_was_restored_from_with_a_host_missing_stays_until_something_is_protected(
    play: Play, half: int
) -> None:
    play.hold("restored", 7, incarnation=1, lost=1)
    play.attempts.pinned = "restored"
    play.protecting.attached("h1", rows("restored", half))
    play.protecting.attached("h2", rows("restored", half))
    play.protecting.ask(1)
    assert not play.said  # there is nothing whole to code
    play.capture("a", 8)
    play.tell_heads()
    assert play.parity.orders[-1].half == 1 - half
    assert play.attempts.must_stay(play.attempts["restored"])
    play.make(0, 1, 2)
    assert not play.attempts.must_stay(play.attempts["restored"])


@pytest.mark.parametrize("whole", [0, 1])
def test_rows_of_a_turn_that_was_cut_short_are_not_taken_for_those_that_are_complete(
    play: Play, whole: int
) -> None:
    play.hold("old", 7, incarnation=1)
    play.attempts.recount()
    play.attempts.pinned = "old"
    wider = ("h0", "h1", "h2", "h3")  # one more was there, and is lost
    play.parity.keep("old", whole, "h0", "h1", "h2")
    play.parity.keep("old", 1 - whole, *wider)
    play.protecting.attached("h1", (held("old", 1 - whole, *wider), *rows("old", whole)))
    play.protecting.attached("h2", rows("old", whole))
    play.protecting.ask(1)
    assert not play.said, "it is protected: nothing is coded"
    play.capture("a", 8)
    play.tell_heads()
    assert play.parity.orders[-1].half == 1 - whole
    assert play.attempts.kept == {"old", "a"}


def test_a_generation_that_is_captured_again_is_protected_as_what_it_is(play: Play) -> None:
    play.protecting.ask(1)
    play.capture("first", 7)
    play.tell_heads()
    play.capture("again", 7)
    assert play.attempts.kept == {"first", "again"}
    play.make(0, 1, 2)
    assert play.told == [m.Protected(step=7, attempt="first")]
    play.tell_heads()
    assert play.parity.orders[-1].attempt == "again"
    assert play.attempts.kept == {"first", "again"}
    play.make(0, 1, 2)
    assert play.told[-1] == m.Protected(step=7, attempt="again")
    assert play.attempts.kept == {"again"}


def test_hosts_hear_where_the_others_listen_now(play: Play) -> None:
    play.parity.port = 99
    play.protecting.ask(1)
    play.capture("a", 1)
    play.tell_heads()
    assert play.parity.orders[-1].ports == (99, 1, 2)


def test_without_parity_nothing_is_asked_and_nothing_more_is_kept(play: Play) -> None:
    play.protecting.ask(0)
    play.attempts.pinned = "old"
    play.capture("a", 1)
    assert {type(fact) for _, fact in play.said} == {control.DropParity}
    assert play.parity.is_dropped and len(play.said) == 2  # of the others
    play.capture("b", 2)
    assert len(play.said) == 2 and play.attempts.pinned is None and not play.attempts.kept


def begun(play: Play) -> list[tuple[int, int]]:
    """Which hosts were told to begin, and with which turn."""
    far = [(host, fact.turn) for host, fact in play.said if isinstance(fact, control.BeginParity)]
    return far + [(0, turn) for turn in play.parity.begun]


def test_nobody_begins_before_all_hosts_have_memory_for_their_rows(play: Play) -> None:
    play.protecting.ask(1)
    play.capture("a", 1)
    play.tell_heads()
    earlier = play.turn
    play.ready(0, 2)
    assert not begun(play)
    play.protecting.hear("h1", control.ParityNotMade(turn=earlier, reason="no memory"))
    play.capture("b", 2)
    play.tell_heads()
    play.ready(1, turn=earlier)  # too late
    play.ready(0, 2)
    assert not begun(play)
    play.ready(1)
    assert sorted(begun(play)) == [(n, play.turn) for n in range(3)]


def test_a_host_that_never_has_memory_ends_its_turn_and_is_named(
    play: Play, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("holdfast.keeper.protecting.time", clock)
    play.protecting.ask(1)
    play.capture("a", 1)
    play.tell_heads()
    play.ready(0, 2)
    now[0] += 299
    play.protecting.look()
    assert not named(events, "SnapshotNotProtected")
    now[0] += 2
    play.protecting.look()
    (event,) = named(events, "SnapshotNotProtected")
    assert event.reason.startswith("h1 had no memory for parity in 300 s")
    now[0] += 10
    play.protecting.look()  # the next turn, with all its time
    play.tell_heads()
    play.ready(0, 1, 2)
    now[0] += 1000
    play.protecting.look()
    assert len(begun(play)) == 3 and len(named(events, "SnapshotNotProtected")) == 1


def test_steps_that_parity_slows_down_make_the_next_turn_slower(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("holdfast.keeper.protecting.time", clock)
    monkeypatch.setattr("holdfast.keeper.pacer.time", clock)
    play.protecting.ask(1)

    def train(first: int, step_s: float) -> None:
        for step in range(first, first + 9):
            now[0] += step_s
            for rank in (2, 0, 1):
                now[0] += step_s * (rank == 1)
                play.protecting.stepped(rank, step)

    train(0, 0.5)
    play.capture("a", 9)
    play.tell_heads()
    assert play.parity.orders[-1].rate_bytes_s is None
    play.ready(0, 1, 2)
    train(9, 0.6)
    play.make(0, 1, 2)
    play.capture("b", 18)
    play.tell_heads()
    assert play.parity.orders[-1].rate_bytes_s == 4_000_000  # images are small: the least there is
    told = [fact for _, fact in play.said if isinstance(fact, control.MakeParity)]
    assert told[-1].rate_bytes_s == 4_000_000


def test_a_group_is_no_faster_than_the_slowest_of_its_hosts_allows(play: Play) -> None:
    rates = dict.fromkeys(("h0", "h1", "h2"), 0) | {"h1": 9_000_000, "h2": 8_000_000}
    play.protecting.begin([
        m.HostPlace(id=host.id, ranks=host.ranks, parity_rate=rates[host.id]) for host in HOSTS
    ])  # fmt: skip
    play.protecting.ask(1)
    play.capture("a", 1)
    play.tell_heads()
    assert play.parity.orders[-1].rate_bytes_s == 8_000_000


def test_whatever_keepers_say_to_each_other_is_understood_by_one_of_them() -> None:
    kinds = set(control.Fact.__subclasses__())
    assert kinds == {*get_args(control.ToHand), *get_args(control.ToCoordinator)}
    assert control.from_coordinator(control.pack(control.DropParity())) == control.DropParity()
