"""The coordinator's part in protecting: which slots stay, and what a failed turn costs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.coordinator.attempts import Attempt, Attempts
from holdfast.coordinator.slots import Slot, Slots, number_of, slot_id_of
from holdfast.events import Event, subscribe
from holdfast.format.manifest import AttemptId, ImageId
from holdfast.keeper.hosts import host_messages
from holdfast.keeper.parity import rebuild as replacing
from holdfast.keeper.parity.scheduler import ParityScheduler
from holdfast.keeper.parity.worker import ParityWorker
from holdfast.protocol import messages as m
from holdfast.protocol.facts import Fact

HOSTS = tuple(m.HostEntry(id=f"h{n}", ranks=(n,)) for n in range(3))
IMAGES = dict.fromkeys(range(3), 8192)


class FakeParity:
    """Tells its heads at once; makes nothing until it is told to."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.orders: list[host_messages.MakeParity] = []
        self.begun: list[int] = []
        self.given_up: list[str] = []
        self.dropped: list[int] = []
        self.tell: Any = None
        self.port = 0
        self.is_dropped = False
        self.groups: list[host_messages.JoinGroup] = []

    def shards(self) -> list[Any]:
        return self.kept

    def join(self, group: host_messages.JoinGroup, _: Any) -> None:
        self.groups.append(group)

    def make(self, order: host_messages.MakeParity, tell: Any) -> None:
        self.orders.append(order)
        self.tell = tell

    def begin(self, turn: int) -> None:
        self.begun.append(turn)

    def cancel(self, why: str) -> None:
        self.given_up.append(why)

    def drop(self) -> None:
        self.is_dropped = True

    def drop_buffer(self, half: int) -> None:
        self.dropped.append(half)

    def do(self, fact: Fact, hosts: Any, tell: Any) -> None:
        own: Any = self
        ParityWorker.do(own, fact, hosts, tell)

    def keep(self, attempt: str, half: int, *members: str) -> None:
        record = SimpleNamespace(attempt=attempt, parity=1)
        self.kept.append(SimpleNamespace(half=half, members=members, record=record, images=IMAGES))


class Play:
    """One coordinator of three hosts, of which this is the first."""

    def __init__(self) -> None:
        self.attempts = Attempts()
        self.coordinator = SimpleNamespace(
            attempts=self.attempts,
            away={},
            adopted=True,
            incarnation=2,
            pin_again=lambda: None,
            slots=Slots(self.attempts),
        )
        self.said: list[tuple[int, Fact]] = []
        self.groups: list[tuple[int, Fact]] = []
        self.told: list[m.Message] = []
        self.carried: list[Any] = []
        self.parity = FakeParity()
        hands: Any = SimpleNamespace(
            send_to_host=self.send,
            port_of=lambda host: host,
        )
        ranks: Any = SimpleNamespace(send=lambda message, _: self.told.append(message))
        parity: Any = self.parity
        coordinator: Any = self.coordinator
        self.protecting = ParityScheduler(coordinator, ranks, hands, parity, self.carried.extend)
        self.protecting.begin(HOSTS)

    def hold(self, id_: str, step: int, *, incarnation: int = 2, lost: int = 0) -> None:
        """An attempt is whole in memory, but for so many lost images."""
        attempt = Attempt(id_, incarnation, step, 3, "l", phase="complete")
        attempt.slots = {rank: slot_id_of(rank, step) for rank in range(lost, 3)}
        self.attempts[id_] = attempt
        for rank, number in attempt.slots.items():
            slot = Slot(number, 1 << 21, "captured", id_, rank, 8192)
            self.coordinator.slots[number] = slot

    def capture(self, id_: str, step: int) -> None:
        self.hold(id_, step)
        self.attempts.captured(id_)
        self.protecting.captured(id_)

    def send(self, host: int, fact: Fact) -> None:
        """What a host is told: this one does it at once, of another its group is kept apart."""
        if host == 0:
            self.parity.do(fact, HOSTS, lambda said: self.protecting.handle("h0", said))
            return
        (self.groups if isinstance(fact, host_messages.JoinGroup) else self.said).append(
            (host, fact)
        )

    def orders(self) -> list[tuple[int, host_messages.MakeParity]]:
        """All that were given to other hosts."""
        return [
            (host, fact) for host, fact in self.said if isinstance(fact, host_messages.MakeParity)
        ]

    @property
    def round_id(self) -> int:
        """The last that was begun."""
        return self.parity.orders[-1].round_id

    def ready(self, *numbers: int, round_id: int | None = None, terms: int = 9) -> None:
        for number in numbers:
            fact = host_messages.ParityReady(
                round_id=self.round_id if round_id is None else round_id, terms=terms
            )
            self.protecting.handle(f"h{number}", fact)

    def make(self, *numbers: int, round_id: int | None = None) -> None:
        """They have memory, all of them, and have made their shards."""
        self.ready(0, 1, 2, round_id=round_id)
        for number in numbers:
            self.protecting.handle(
                f"h{number}",
                host_messages.ParityComplete(
                    round_id=self.round_id if round_id is None else round_id
                ),
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
    play.protecting.configure(1)
    assert [e.survives for e in named(events, "ProtectionPlanned")] == ["any 1 of 3 hosts"]
    play.capture("a", 1)
    assert [order.attempt for order in play.parity.orders] == ["a"]
    play.capture("b", 2)  # while a is coded: that turn goes on
    play.make(0, 1)
    assert not play.told and play.attempts.pinned_by_parity == {"a", "b"}
    play.make(2)
    assert play.told == [m.Protected(step=1, attempt="a")]
    assert [e.step for e in named(events, "SnapshotProtected")] == [1]
    first, second = play.parity.orders
    assert second.attempt == "b" and second.half == 1 - first.half
    play.capture("c", 3)
    assert play.attempts.pinned_by_parity == {"a", "b", "c"}
    play.make(0, 1, 2)
    assert play.attempts.pinned_by_parity == {"b", "c"}
    assert not play.attempts.is_retained(play.attempts["a"])


def test_a_turn_that_fails_is_given_up_by_all_and_costs_nothing_that_was_protected(
    play: Play, events: list[Event]
) -> None:
    play.protecting.configure(1)
    play.capture("a", 1)
    play.make(0, 1, 2)
    play.capture("b", 2)
    failed, half = play.round_id, play.parity.orders[-1].half
    play.make(0)
    play.protecting.handle("h1", host_messages.ParityFailed(round_id=failed, reason="no network"))
    assert [e.reason for e in named(events, "SnapshotNotProtected")] == ["on h1: no network"]
    assert isinstance(play.told[-1], m.Unprotected) and play.parity.given_up
    assert {"a", "b"} <= play.attempts.pinned_by_parity
    play.make(1, 2, round_id=failed)  # too late
    assert len(named(events, "SnapshotProtected")) == 1
    play.capture("c", 3)  # tried at once
    assert (play.parity.orders[-1].attempt, play.parity.orders[-1].half) == ("c", half)
    assert "a" in play.attempts.pinned_by_parity


def test_a_host_out_of_reach_ends_its_turn_and_nothing_begins_until_it_is_back(play: Play) -> None:
    play.protecting.configure(1)
    play.capture("a", 1)
    begun = play.round_id
    play.coordinator.away[2] = "h2"
    play.protecting.detached("h2")
    assert play.attempts.pinned_by_parity == {"a"} and len(play.told) == 1
    play.capture("b", 2)
    assert play.round_id == begun
    play.coordinator.away.clear()
    play.protecting.attached("h2", ())
    assert play.round_id > begun
    assert play.parity.orders[-1].attempt == "b"


def rows(attempt: str, half: int) -> tuple[host_messages.ParityShards, ...]:
    return (held(attempt, half, "h0", "h1", "h2"),)


def held(attempt: str, half: int, *members: str) -> host_messages.ParityShards:
    return host_messages.ParityShards(
        half=half, attempt=attempt, members=members, parity=1, images=IMAGES
    )


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
    play.protecting.configure(1)
    assert play.attempts.pinned_by_parity == {"old", "new"}
    assert (play.parity.orders[-1].attempt, play.parity.orders[-1].half) == ("new", 1 - half)
    play.make(0, 1, 2)
    assert play.attempts.pinned_by_parity == {"new"}


@pytest.mark.parametrize("half", [0, 1])
def test_what_was_restored_from_with_a_host_missing_stays_until_something_is_protected(
    play: Play, half: int
) -> None:
    play.hold("restored", 7, incarnation=1, lost=1)
    play.attempts.pinned = "restored"
    play.protecting.attached("h1", rows("restored", half))
    play.protecting.attached("h2", rows("restored", half))
    play.protecting.configure(1)
    assert not play.said  # there is nothing whole to code
    play.capture("a", 8)
    assert play.parity.orders[-1].half == 1 - half
    assert play.attempts.is_retained(play.attempts["restored"])
    play.make(0, 1, 2)
    assert not play.attempts.is_retained(play.attempts["restored"])


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
    play.protecting.configure(1)
    # It is protected: nothing is coded, and what is left of the other turn is given up.
    assert {type(fact) for _, fact in play.said} == {host_messages.DropShards}
    assert play.parity.dropped == [1 - whole]
    play.capture("a", 8)
    assert play.parity.orders[-1].half == 1 - whole
    assert play.attempts.pinned_by_parity == {"old", "a"}


def test_a_generation_that_is_captured_again_is_protected_as_what_it_is(play: Play) -> None:
    play.protecting.configure(1)
    play.capture("first", 7)
    play.capture("again", 7)
    assert play.attempts.pinned_by_parity == {"first", "again"}
    play.make(0, 1, 2)
    assert play.told == [m.Protected(step=7, attempt="first")]
    assert play.parity.orders[-1].attempt == "again"
    assert play.attempts.pinned_by_parity == {"first", "again"}
    play.make(0, 1, 2)
    assert play.told[-1] == m.Protected(step=7, attempt="again")
    assert play.attempts.pinned_by_parity == {"again"}


def test_hosts_hear_their_group_and_where_it_listens_once_and_when_one_is_back(play: Play) -> None:
    play.parity.port = 99
    play.protecting.configure(1)
    group = host_messages.JoinGroup(hosts=(0, 1, 2), ports=(99, 1, 2), parity=1)
    assert play.groups == [(1, group), (2, group)] and play.parity.groups == [group]
    play.capture("a", 1)
    play.make(0, 1, 2)
    play.capture("b", 2)
    assert len(play.groups) == 2, "they know it"
    play.coordinator.away[2] = "h2"
    play.protecting.detached("h2")
    play.parity.port = 77
    play.coordinator.away.clear()
    play.protecting.attached("h2", ())
    moved = replace(group, ports=(77, 1, 2))
    assert play.groups[2:] == [(1, moved), (2, moved)] and play.parity.groups[1:] == [moved]


def test_nothing_is_made_unless_all_of_a_group_make_it_of_the_same(
    play: Play, events: list[Event]
) -> None:
    play.protecting.configure(1)
    play.capture("a", 1)
    play.ready(0, 2)
    play.ready(1, terms=8)
    (told,) = named(events, "SnapshotNotProtected")
    assert told.reason == "h0, h1, h2 do not make parity of the same images"
    assert not begun(play) and play.parity.given_up
    play.make(0, 1, 2)  # too late
    assert not named(events, "SnapshotProtected")


def test_what_is_told_twice_counts_once_and_out_of_order_not_at_all(
    play: Play, events: list[Event]
) -> None:
    play.protecting.configure(1)
    play.capture("a", 1)
    play.ready(0, 1, 1, 1)
    assert not begun(play)
    play.ready(2, 2, 0)
    assert sorted(begun(play)) == [(n, play.round_id) for n in range(3)], "once"
    play.make(1, 1, 1)
    assert not named(events, "SnapshotProtected")
    play.make(0, 2)
    assert [e.step for e in named(events, "SnapshotProtected")] == [1]
    play.capture("b", 2)
    play.ready(0, 1)
    early = host_messages.ParityComplete(round_id=play.round_id)
    play.protecting.handle("h1", early)  # before all had memory: of what did it make that?
    (told,) = named(events, "SnapshotNotProtected")
    assert told.reason == "h1 did not wait for the others"
    play.capture("c", 3)
    play.ready(1)
    play.ready(1, terms=8)
    assert named(events, "SnapshotNotProtected")[-1].reason.startswith("h1 is of two minds")
    assert len(named(events, "SnapshotProtected")) == 1


def test_without_parity_nothing_is_asked_and_nothing_more_is_kept(play: Play) -> None:
    play.protecting.configure(0)
    play.attempts.pinned = "old"
    play.capture("a", 1)
    assert {type(fact) for _, fact in play.said} == {host_messages.DropParity}
    assert play.parity.is_dropped and len(play.said) == 2  # of the others
    play.capture("b", 2)
    assert (
        len(play.said) == 2 and play.attempts.pinned is None and not play.attempts.pinned_by_parity
    )


def begun(play: Play) -> list[tuple[int, int]]:
    """Which hosts were told to begin, and with which turn."""
    far = [
        (host, fact.round_id)
        for host, fact in play.said
        if isinstance(fact, host_messages.BeginParity)
    ]
    return far + [(0, turn) for turn in play.parity.begun]


def test_nobody_begins_before_all_hosts_have_memory_for_their_rows(play: Play) -> None:
    play.protecting.configure(1)
    play.capture("a", 1)
    earlier = play.round_id
    play.ready(0, 2)
    assert not begun(play)
    play.protecting.handle("h1", host_messages.ParityFailed(round_id=earlier, reason="no memory"))
    play.capture("b", 2)
    play.ready(1, round_id=earlier)  # too late
    play.ready(0, 2)
    assert not begun(play)
    play.ready(1)
    assert sorted(begun(play)) == [(n, play.round_id) for n in range(3)]


def test_a_host_that_never_has_memory_ends_its_turn_and_is_named(
    play: Play, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("holdfast.keeper.parity.scheduler.time", clock)
    play.protecting.configure(1)
    play.capture("a", 1)
    play.ready(0, 2)
    now[0] += 299
    play.protecting.poll()
    assert not named(events, "SnapshotNotProtected")
    now[0] += 2
    play.protecting.poll()
    (event,) = named(events, "SnapshotNotProtected")
    assert event.reason.startswith("h1 had no memory for parity in 300 s")
    now[0] += 10
    play.protecting.poll()  # the next turn, with all its time
    play.ready(0, 1, 2)
    now[0] += 1000
    play.protecting.poll()
    assert len(begun(play)) == 3 and len(named(events, "SnapshotNotProtected")) == 1


def test_steps_that_parity_slows_down_make_the_next_turn_slower(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("holdfast.keeper.parity.scheduler.time", clock)
    monkeypatch.setattr("holdfast.keeper.parity.scheduler.time", clock)
    play.protecting.configure(1)

    def train(first: int, step_s: float) -> None:
        for step in range(first, first + 9):
            now[0] += step_s
            for rank in (2, 0, 1):
                now[0] += step_s * (rank == 1)
                play.protecting.on_step(rank, step)

    train(0, 0.5)
    play.capture("a", 9)
    assert play.parity.orders[-1].rate_bytes_s is None
    play.ready(0, 1, 2)
    train(9, 0.6)
    play.make(0, 1, 2)
    play.capture("b", 18)
    assert play.parity.orders[-1].rate_bytes_s == 4_000_000  # images are small: the least there is
    told = [fact for _, fact in play.said if isinstance(fact, host_messages.MakeParity)]
    assert told[-1].rate_bytes_s == 4_000_000


def test_a_group_is_no_faster_than_the_slowest_of_its_hosts_allows(play: Play) -> None:
    rates = dict.fromkeys(("h0", "h1", "h2"), 0) | {"h1": 9_000_000, "h2": 8_000_000}
    play.protecting.begin(
        [m.HostEntry(id=host.id, ranks=host.ranks, parity_rate=rates[host.id]) for host in HOSTS]
    )
    play.protecting.configure(1)
    play.capture("a", 1)
    assert play.parity.orders[-1].rate_bytes_s == 8_000_000


# ── what lost hosts had ──────────────────────────────────────────────────────────────────────


def restored(play: Play, *, size: int = 8192) -> None:
    """Generation 1-7 was restored from, whose image of rank 0 no host has; rank 0 is here now."""
    play.hold("restored", 7, incarnation=1, lost=1)
    play.attempts.pinned = "restored"
    images = dict.fromkeys(range(3), size)
    kept = host_messages.ParityShards(
        half=0, attempt="restored", members=("h0", "h1", "h2"), parity=1, images=images
    )
    play.protecting.attached("h1", (kept,))
    play.protecting.attached("h2", (kept,))


def orders(play: Play) -> list[tuple[int, host_messages.RebuildImage]]:
    return [
        (host, fact) for host, fact in play.said if isinstance(fact, host_messages.RebuildImage)
    ]


def rebuilt(order: host_messages.RebuildImage) -> host_messages.RebuildComplete:
    image = ImageId(order.rank, 8192, "a" * 16, "b" * 16)
    return host_messages.RebuildComplete(slot=order.slot, attempt=order.attempt, image=image)


def free_slot(play: Play, host: int, number: int = 99) -> Slot:
    slot = play.coordinator.slots[slot_id_of(host, number)] = Slot(
        slot_id_of(host, number), 1 << 21, "free"
    )
    return slot


def test_an_image_that_is_lost_is_decoded_and_what_was_restored_from_is_protected_at_once(
    play: Play,
) -> None:
    slot = free_slot(play, 1)
    restored(play)
    play.protecting.configure(1)
    ((host, order),) = orders(play)
    assert (host, order.slot, order.rank) == (1, 99, 0)
    assert order.places == {1: "h1", 2: "h2"}
    assert play.coordinator.slots.is_retained(slot) and slot.state == "granted"
    play.protecting.handle("h1", rebuilt(order))
    assert play.attempts["restored"].is_whole and slot.state == "captured"
    assert play.parity.orders[-1].attempt == "restored"
    # In the half that does not hold the rows it was decoded from.
    assert play.parity.orders[-1].half == 1


def test_earlier_rows_of_what_is_protected_anew_are_given_up_by_all_before_it_is_told(
    play: Play, events: list[Event]
) -> None:
    free_slot(play, 1)
    restored(play)
    play.protecting.configure(1)
    play.protecting.handle("h1", rebuilt(orders(play)[0][1]))
    play.make(0, 1, 2)
    dropped = [(host, f) for host, f in play.said if isinstance(f, host_messages.DropShards)]
    assert [(host, fact.half) for host, fact in dropped] == [(1, 0), (2, 0)]
    assert play.parity.dropped == [0]
    play.protecting.handle("h1", host_messages.ShardsDropped(round_id=play.round_id))
    assert not named(events, "SnapshotProtected") and play.attempts.pinned
    play.protecting.handle("h2", host_messages.ShardsDropped(round_id=play.round_id))
    (told,) = named(events, "SnapshotProtected")
    assert (told.incarnation, told.step) == (1, 7) and play.attempts.pinned is None


def test_a_lost_image_is_given_up_for_something_newer_and_its_slot_is_free_again(
    play: Play,
) -> None:
    slot = free_slot(play, 1)
    restored(play)
    play.protecting.configure(1)
    ((_, order),) = orders(play)
    play.capture("new", 8)
    assert slot.state == "free" and (1, give_up(play)) in play.said
    play.protecting.handle("h1", rebuilt(order))  # too late: its slot may be another's
    assert not play.attempts["restored"].is_whole and slot.state == "free"
    assert play.parity.orders[-1].attempt == "new"


def give_up(play: Play) -> host_messages.CancelRebuild:
    return next(fact for _, fact in play.said if isinstance(fact, host_messages.CancelRebuild))


def test_a_lost_image_that_cannot_be_decoded_is_told_and_tried_again_a_few_times(
    play: Play, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    free_slot(play, 1)
    restored(play)
    play.protecting.configure(1)
    for turn in range(1, replacing.TRIES + 1):
        assert len(orders(play)) == turn
        order = orders(play)[-1][1]
        failed = host_messages.RebuildFailed(
            slot=order.slot, attempt="restored", reason="h2 is silent"
        )
        play.protecting.handle("h1", failed)
        play.protecting.poll()
        now_s += 6.0
        play.protecting.poll()
    assert len(orders(play)) == replacing.TRIES
    told = named(events, "SnapshotNotProtected")
    assert len(told) == replacing.TRIES and "on h1: h2 is silent" in told[0].reason
    assert play.attempts.is_retained(play.attempts["restored"])


def test_a_slot_is_made_for_a_lost_image_where_none_is_free_and_none_is_taken_that_is_needed(
    play: Play, events: list[Event]
) -> None:
    restored(play, size=100 << 20)
    play.protecting.configure(1)
    assert not orders(play)
    (made,) = play.carried
    assert made.capacity_bytes >= 100 << 20
    slot = play.coordinator.slots[made.slot]
    slot.free()  # it is there
    play.protecting.poll()
    ((_, order),) = orders(play)
    assert order.slot == number_of(made.slot)


def test_without_memory_for_a_lost_image_it_is_told(play: Play, events: list[Event]) -> None:
    restored(play, size=100 << 20)
    play.protecting.configure(1)
    del play.coordinator.slots[play.carried[0].slot]  # it could not be made
    play.protecting.poll()
    (told,) = named(events, "SnapshotNotProtected")
    assert "h1 has no memory for the image of rank 0" in told.reason


def test_what_has_lost_a_row_is_protected_anew_in_the_other_half(
    play: Play, events: list[Event]
) -> None:
    play.protecting.configure(1)
    play.capture("a", 1)
    play.make(0, 1, 2)
    half = play.parity.orders[-1].half
    play.protecting.handle("h2", host_messages.ShardLost(attempt="old"))
    assert len(play.parity.orders) == 1
    play.protecting.handle("h2", host_messages.ShardLost(attempt="a"))
    assert play.attempts.is_retained(play.attempts["a"])
    assert (play.parity.orders[-1].attempt, play.parity.orders[-1].half) == ("a", 1 - half)
    play.make(0, 1, 2)
    assert play.parity.dropped == [half]
    for host in ("h1", "h2"):
        play.protecting.handle(host, host_messages.ShardsDropped(round_id=play.round_id))
    assert [e.step for e in named(events, "SnapshotProtected")] == [1, 1]


def test_a_row_that_is_lost_before_the_last_is_made_ends_its_turn(
    play: Play, events: list[Event]
) -> None:
    play.protecting.configure(1)
    play.capture("a", 1)
    play.make(1)
    play.protecting.handle("h1", host_messages.ShardLost(attempt="a"))
    play.make(0, 2)
    assert not named(events, "SnapshotProtected")
    (told,) = named(events, "SnapshotNotProtected")
    assert told.reason == "a row of it was damaged meanwhile"


# ── hosts that come back ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("where", [1, 2])
def test_an_image_that_two_hosts_have_is_coded_once_where_the_coordinator_looks_for_it(
    play: Play, where: int
) -> None:
    play.protecting.configure(1)
    play.hold("restored", 7, incarnation=1)
    decoded = slot_id_of(1, 9)  # it was decoded on h1, and h2 came back with its own
    play.coordinator.slots[decoded] = Slot(decoded, 1 << 21, "captured", "restored", 2, 8192)
    if where == 1:
        play.attempts["restored"].slots[2] = decoded
    play.attempts.captured("restored")
    play.protecting.captured("restored")
    ranks = {host: order.ranks for host, order in [(0, play.parity.orders[-1]), *play.orders()]}
    there = [((1, 3),), ()] if where == 1 else [((1, 2),), ((2, 3),)]
    assert [ranks[host] for host in range(3)] == [((0, 1),), *there]
    of_it = AttemptId(1, 7, "restored", 3, "l")
    subjects = {host for host, order in play.orders() if order.attempt_id == of_it}
    assert subjects == ({2} if where == 1 else set()), "who has no image is told of what it is"


def test_a_row_that_is_missing_where_a_coordinator_takes_over_is_made_anew(play: Play) -> None:
    play.hold("a", 7)
    play.attempts.recount()
    play.parity.keep("a", 0, "h0", "h1", "h2")
    play.protecting.attached("h1", rows("a", 0))
    play.protecting.attached("h2", ())  # its keeper was killed before it had sealed
    play.protecting.configure(1)
    assert (play.parity.orders[-1].attempt, play.parity.orders[-1].half) == ("a", 1)


def come_back(play: Play, host: str, held: tuple[host_messages.ParityShards, ...]) -> None:
    play.coordinator.away[int(host[1:])] = host
    play.protecting.detached(host)
    play.coordinator.away.clear()
    play.protecting.attached(host, held)


def test_a_host_that_comes_back_without_its_rows_has_what_is_protected_made_anew(
    play: Play,
) -> None:
    play.protecting.configure(1)
    play.capture("a", 1)
    play.make(0, 1, 2)
    turn, half = play.round_id, play.parity.orders[-1].half
    come_back(play, "h2", rows("a", half))
    assert play.round_id == turn, "nothing is missing"
    come_back(play, "h2", rows("a", 1 - half))
    assert play.round_id > turn
    assert (play.parity.orders[-1].attempt, play.parity.orders[-1].half) == ("a", 1 - half)


def test_of_two_rows_that_a_host_has_to_keep_both_are_looked_for_when_it_is_back(
    play: Play,
) -> None:
    play.protecting.configure(2)
    play.capture("a", 1)
    play.make(0, 1, 2)
    (row,) = rows("a", play.parity.orders[-1].half)
    two = (replace(row, parity=2),) * 2
    turn = play.round_id
    come_back(play, "h2", two)
    assert play.round_id == turn
    come_back(play, "h2", two[:1])
    assert play.round_id > turn


# ── earlier rows, given up while something newer is protected ────────────────────────────────


def protected_anew_while_more_was_captured(play: Play) -> int:
    """What was restored is coded, and a capture waits: the turn of the coding."""
    free_slot(play, 1)
    restored(play)
    play.protecting.configure(1)
    play.protecting.handle("h1", rebuilt(orders(play)[0][1]))
    turn = play.round_id
    play.capture("new", 8)
    play.make(0, 1, 2)
    return turn


def test_what_is_protected_anew_is_told_although_the_next_turn_has_begun(
    play: Play, events: list[Event]
) -> None:
    turn = protected_anew_while_more_was_captured(play)
    assert play.round_id > turn and play.attempts.pinned == "restored"
    for host in ("h1", "h2"):
        play.protecting.handle(host, host_messages.ShardsDropped(round_id=turn))
    assert [e.step for e in named(events, "SnapshotProtected")] == [7]
    assert play.attempts.pinned is None
    play.make(0, 1, 2)
    assert [e.step for e in named(events, "SnapshotProtected")] == [7, 8]


def test_a_host_that_was_away_is_asked_again_to_give_up_earlier_rows(
    play: Play, events: list[Event]
) -> None:
    free_slot(play, 1)
    restored(play)
    play.protecting.configure(1)
    play.protecting.handle("h1", rebuilt(orders(play)[0][1]))
    play.make(0, 1, 2)
    play.protecting.handle("h1", host_messages.ShardsDropped(round_id=play.round_id))
    come_back(play, "h2", rows("restored", 1))
    asked = [host for host, fact in play.said if isinstance(fact, host_messages.DropShards)]
    assert asked == [1, 2, 2]
    play.protecting.handle("h2", host_messages.ShardsDropped(round_id=play.round_id))
    assert [e.step for e in named(events, "SnapshotProtected")] == [7]


def test_earlier_rows_that_a_coordinator_had_no_time_to_drop_are_dropped_by_the_next(
    play: Play, events: list[Event]
) -> None:
    play.hold("old", 7, incarnation=1)
    play.attempts.recount()
    play.attempts.pinned = "old"
    wider = ("h0", "h1", "h2", "h3")
    for half, members in ((0, wider), (1, ("h0", "h1", "h2"))):
        play.parity.keep("old", half, *members)
    for host in ("h1", "h2"):
        play.protecting.attached(host, (held("old", 0, *wider), *rows("old", 1)))
    play.protecting.configure(1)
    (turn,) = {fact.round_id for _, fact in play.said if isinstance(fact, host_messages.DropShards)}
    assert play.parity.dropped == [0] and play.attempts.pinned == "old"
    for host in ("h1", "h2"):
        play.protecting.handle(host, host_messages.ShardsDropped(round_id=turn))
    assert [e.step for e in named(events, "SnapshotProtected")] == [7]
    assert play.attempts.pinned is None and play.attempts.pinned_by_parity == {"old"}


def test_what_is_newer_and_protected_meanwhile_stands_for_it(
    play: Play, events: list[Event]
) -> None:
    turn = protected_anew_while_more_was_captured(play)
    play.make(0, 1, 2)
    assert play.attempts.pinned is None
    for host in ("h1", "h2"):
        play.protecting.handle(host, host_messages.ShardsDropped(round_id=turn))
    assert [e.step for e in named(events, "SnapshotProtected")] == [8]


# ── orders that cannot be carried out ────────────────────────────────────────────────────────


def test_hosts_are_told_nothing_more_of_a_turn_that_one_has_refused(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    play.protecting.configure(1)

    def refuse(order: host_messages.MakeParity, tell: Any) -> None:
        tell(host_messages.ParityFailed(round_id=order.round_id, reason="these are no terms"))

    monkeypatch.setattr(play.parity, "make", refuse)
    play.capture("a", 1)
    assert not [fact for _, fact in play.said if isinstance(fact, host_messages.MakeParity)]
    assert play.parity.given_up == ["on h0: these are no terms"]


def test_lost_images_are_decoded_out_of_the_rows_that_are_complete(play: Play) -> None:
    free_slot(play, 1)
    play.hold("restored", 7, incarnation=1, lost=1)
    play.attempts.pinned = "restored"
    for host in ("h1", "h2"):
        torn = (held("restored", 1, "h0", "h1", "h3"),) if host == "h1" else ()
        play.protecting.attached(host, (*rows("restored", 0), *torn))
    play.protecting.configure(1)
    ((_, order),) = orders(play)
    assert order.half == 0
