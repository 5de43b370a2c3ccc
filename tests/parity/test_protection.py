"""What was protected is whole on all hosts that are left, whatever is lost at whatever moment.

A model of hosts, slots and rows is played through all its states by a search, and further at
random. What must not be left out of the rules is left out of them, one by one, and the search then
finds what is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from holdfast.format.manifest import Generation
from holdfast.parity.planning.protection import (
    CaptureDone,
    Cover,
    HeldSnapshot,
    HostShards,
    Protection,
    Takeover,
    take_over,
)

TORN = CaptureDone(Generation(0, 0), "")
Slots = tuple[CaptureDone, ...]
Row = tuple[Cover, int] | None  # which turn filled it


class Lost(AssertionError):
    """What had been protected is not there any more."""


@dataclass(frozen=True)
class Host:
    """Its slots, and the two halves of its parity memory: None where there is no seal."""

    slots: Slots
    rows: tuple[Row, Row] = (None, None)


def captured(generation: Generation, hosts: Iterable[str]) -> CaptureDone:
    """The name of an attempt says here on which hosts its images were."""
    return CaptureDone(generation, f"{generation}:{','.join(sorted(hosts))}")


def holders(one: CaptureDone) -> frozenset[str]:
    return frozenset(one.attempt.partition(":")[2].split(","))


def ranks(cover: Cover) -> frozenset[int]:
    """Those whose images are on the members, numbered by the names of their hosts."""
    names = enumerate(sorted(holders(cover.captured)))
    return frozenset(rank for rank, name in names if name in cover.members)


@dataclass(frozen=True)
class World:
    """Hosts by name, what the coordinator knows, and what is on its way to it."""

    hosts: tuple[tuple[str, Host], ...]
    mind: Protection
    next_step: int
    losses: int
    """How many hosts may still be lost."""
    restarts: int
    """How often the run may still be started anew besides, with a further host or without."""
    parity: int
    taken: Callable[..., Takeover] = take_over
    lives_on: bool = False
    """Whether its coordinator never dies."""
    incarnation: int = 1
    parent: CaptureDone = TORN
    """What this incarnation went on from."""
    pin: CaptureDone = TORN
    """The same, until something is protected."""
    best: Cover | None = None
    """The newest of which it was said that it is protected."""
    capturing: CaptureDone = TORN
    slot: int = -1
    told: frozenset[tuple[int, str]] = frozenset()
    """Seals that the coordinator has not heard of yet."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.hosts)

    def checked(self) -> World:
        """What was protected, or something newer, can be restored from what is there."""
        if self.best is not None and self.newest() < self.best.captured:
            raise Lost(f"{self.best} was protected, and there is {self.newest()}, of {self.hosts}")
        return self

    def newest(self) -> CaptureDone:
        """What a start restores from: whole, or rebuilt from one half of the rows."""
        there = {one for _, host in self.hosts for one in host.slots if one != TORN}
        return max((one for one in there if self.can_restore(one)), default=TORN)

    def can_restore(self, one: CaptureDone) -> bool:
        return self.is_whole(one) or any(
            row and row[0].captured == one and self.gone(row[0], half) <= self.parity
            for _, host in self.hosts
            for half, row in enumerate(host.rows)
        )

    def having(self, one: CaptureDone) -> frozenset[str]:
        return frozenset(name for name, host in self.hosts if one in host.slots)

    def is_whole(self, one: CaptureDone) -> bool:
        return holders(one) <= self.having(one)

    def gone(self, cover: Cover, half: int) -> int:
        """How many members have not all that is needed of them."""
        keep = {name for name, host in self.hosts if (row := host.rows[half]) and row[0] == cover}
        return len(cover.members - keep | holders(cover.captured) - self.having(cover.captured))

    def change(self, name: str, **fields: Any) -> World:
        hosts = tuple((n, replace(h, **fields) if n == name else h) for n, h in self.hosts)
        return replace(self, hosts=hosts)

    def all_slots(self, slot: int, content: CaptureDone) -> World:
        return replace(
            self,
            hosts=tuple(
                (name, replace(host, slots=(*host.slots[:slot], content, *host.slots[slot + 1 :])))
                for name, host in self.hosts
            ),
        )

    def renumbered(self) -> World:
        """This turn is 1, all earlier ones 0: else no world would ever come again."""
        now = self.mind.round_id

        def again(turn: int) -> int:
            return int(turn == now and now > 0)

        def rows(host: Host) -> tuple[Row, Row]:
            first, second = (row and (row[0], again(row[1])) for row in host.rows)
            return first, second

        hosts = tuple((name, replace(host, rows=rows(host))) for name, host in self.hosts)
        told = frozenset((again(turn), name) for turn, name in self.told)
        return replace(
            self, hosts=hosts, told=told, mind=structs.replace(self.mind, round_id=again(now))
        )

    # ── what can happen ──────────────────────────────────────────────────────────────────

    def after(self, steps: int) -> Iterator[World]:
        """All worlds that may come next, when so many generations are captured."""
        yield from self.captures(steps)
        yield from self.codes()
        for turn, name in self.told:
            yield replace(self, told=self.told - {(turn, name)}).heard(turn, name)
        if self.losses and len(self.hosts) > 1:
            yield from (self.without(name) for name in self.names if self.may_lose(name))
        if self.restarts:
            fewer = replace(self, restarts=self.restarts - 1)
            yield fewer.restarted()
            host = Host((TORN,) * len(self.hosts[0][1].slots))
            yield replace(fewer, hosts=(*self.hosts, (f"new{self.restarts}", host))).restarted()
        if not self.lives_on:
            yield self.taken_over(self.parent)

    def may_lose(self, name: str) -> bool:
        """Whether no more of those that protected it are gone then than was said."""
        left = self.names - {name}
        return self.best is None or len(self.best.members - left) <= self.parity

    def captures(self, steps: int) -> Iterator[World]:
        if self.capturing != TORN:
            yield replace(self, capturing=TORN, slot=-1)  # abandoned: the slot stays torn
            done = self.all_slots(self.slot, self.capturing)
            mind = self.mind.has_captured(self.capturing)
            yield replace(done, mind=mind, capturing=TORN, slot=-1)
        elif self.next_step <= steps and (free := self.free_slots()):
            # The slots of all ranks that hold nothing which must stay are written over.
            name = captured(Generation(self.incarnation, self.next_step), self.names)
            torn = self.all_slots(free[0], TORN)
            yield replace(torn, capturing=name, slot=free[0], next_step=self.next_step + 1)

    def free_slots(self) -> list[int]:
        """The one with the oldest first."""
        stay = {*self.mind.slots_stay, self.pin} - {TORN}
        held = [{host.slots[n] for _, host in self.hosts} for n in range(self.slots)]
        found = [n for n, contents in enumerate(held) if not contents & stay]
        return sorted(found, key=lambda n: max(held[n]))

    @property
    def slots(self) -> int:
        return len(self.hosts[0][1].slots)

    def codes(self) -> Iterator[World]:
        mind = self.mind
        if mind.coding is None:
            begun = mind.begin()
            if begun.coding is not None and self.is_whole(begun.coding.captured):
                yield replace(self, mind=begun)
            return
        yield replace(self, mind=mind.has_failed(mind.round_id))
        row = (mind.coding, mind.round_id)
        for name, host in self.hosts:
            # Each host begins, and ends, when it comes to it.
            if host.rows[mind.coding_half] not in (None, row):
                yield self.with_row(name, None)
            elif host.rows[mind.coding_half] is None and self.can_code(mind.coding):
                yield replace(self.with_row(name, row), told=self.told | {(mind.round_id, name)})

    def with_row(self, name: str, row: Row) -> World:
        """What it has in the half that is written now."""
        rows = list(dict(self.hosts)[name].rows)
        rows[self.mind.coding_half] = row
        return self.change(name, rows=tuple(rows))

    def can_code(self, cover: Cover) -> bool:
        """Every pulled block is compared with the seals of that generation."""
        return cover.members <= self.names and self.is_whole(cover.captured)

    def heard(self, turn: int, name: str) -> World:
        mind = self.mind.has_sealed(turn, name)
        if self.mind.coding is None or mind.coding is not None:
            return replace(self, mind=mind)
        assert mind.protected is not None
        told = replace(self, mind=mind, pin=TORN, best=mind.protected)
        return told.dropped(mind.protected.captured, 1 - mind.half)

    def dropped(self, captured: CaptureDone, half: int) -> World:
        """Earlier rows of the same are given up before it is told that it is protected."""
        now = self
        for name, host in self.hosts:
            row = host.rows[half]
            if row is not None and row[0].captured == captured:
                rows = list(host.rows)
                rows[half] = None
                now = now.change(name, rows=tuple(rows))
        return now

    def without(self, name: str) -> World:
        """A host is lost; the run is started on the others."""
        hosts = tuple(one for one in self.hosts if one[0] != name)
        return replace(self, hosts=hosts, losses=self.losses - 1).restarted()

    def restarted(self) -> World:
        """The ranks restore from the newest that there is."""
        newest = self.newest()
        began = replace(self, parent=newest, incarnation=self.incarnation + 1)
        return began.taken_over(newest)

    def taken_over(self, pin: CaptureDone) -> World:
        """Another coordinator, which knows what the hosts say of themselves."""
        there = sorted({one for _, host in self.hosts for one in host.slots if one != TORN})
        presents = [HeldSnapshot(one, len(holders(one)), self.is_whole(one)) for one in there]
        rows = [
            HostShards(
                name, half, row[0].captured.attempt, self.parity, row[0].members, ranks(row[0])
            )
            for name, host in self.hosts
            for half, row in enumerate(host.rows)
            if row
            for _ in range(self.parity)
        ]
        mind = self.taken(
            self.names,
            presents,
            rows,
            restored=pin.attempt,
            incarnation=self.incarnation,
            round_id=self.mind.round_id,
        ).state
        mind = type(self.mind)(
            mind.members, None, mind.protected, mind.half, round_id=mind.round_id
        )
        whole = [one for one in there if self.is_whole(one)]
        own = [one for one in whole if one.generation.incarnation == self.incarnation]
        if newest := max(own, default=pin if pin in whole else None):
            mind = mind.has_captured(newest)
        now = replace(self, mind=mind, pin=pin, capturing=TORN, slot=-1, told=frozenset())
        if mind.protected is None or mind.protected.members != self.names:
            return now
        return now.dropped(mind.protected.captured, 1 - mind.half)


def world(
    kind: type[Protection],
    hosts: int,
    *,
    slots: int = 4,
    parity: int = 1,
    losses: int = 0,
    restarts: int = 0,
    taken: Callable[..., Takeover] = take_over,
) -> World:
    names = [f"h{n}" for n in range(hosts)]
    return World(
        tuple((name, Host((TORN,) * slots)) for name in names),
        kind(frozenset(names)),
        next_step=1,
        losses=losses,
        restarts=restarts,
        parity=parity,
        taken=taken,
    )


def reached(first: World, steps: int) -> set[World]:
    """All worlds that can come to be; Lost when something is in any of them."""
    found, todo = {first}, [first]
    while todo:
        for one in todo.pop().after(steps):
            checked = one.checked().renumbered()
            if checked not in found:
                found.add(checked)
                todo.append(checked)
    return found


@pytest.mark.parametrize(
    ("hosts", "slots", "parity", "losses", "restarts", "steps"),
    [
        (2, 3, 1, 1, 0, 2),
        (2, 4, 1, 0, 1, 1),
        (3, 4, 1, 1, 0, 1),
    ],
)
def test_nothing_that_was_protected_is_lost_in_any_order_of_events(
    hosts: int, slots: int, parity: int, losses: int, restarts: int, steps: int
) -> None:
    first = world(Protection, hosts, slots=slots, parity=parity, losses=losses, restarts=restarts)
    worlds = reached(first, steps)
    assert any(w.best is not None and w.best.captured.generation.step == steps for w in worlds), (
        "and it goes on"
    )


def test_whoever_takes_over_believes_in_no_row_that_is_missing() -> None:
    torn = 0
    for one in reached(world(Protection, 2), 2):
        mind = one.taken_over(one.parent).mind
        if mind.protected is not None and mind.protected.members == one.names:
            assert not one.gone(mind.protected, mind.half)
        torn += mind.protected is not None and not mind.protected.members
    assert torn, "and some are"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("hosts", "parity", "losses", "restarts", "steps"),
    [
        (2, 1, 0, 0, 3),
        (2, 1, 0, 1, 2),
        (2, 1, 1, 1, 1),
        (3, 1, 0, 0, 2),
        (3, 1, 1, 1, 1),
        (3, 2, 2, 0, 1),
    ],
)
def test_nothing_is_lost_in_larger_groups_either(
    hosts: int, parity: int, losses: int, restarts: int, steps: int
) -> None:
    reached(world(Protection, hosts, parity=parity, losses=losses, restarts=restarts), steps)


def test_with_four_slots_no_capture_waits_and_with_three_only_while_something_is_coded() -> None:
    for slots in (3, 4):
        first = replace(world(Protection, 2, slots=slots), lives_on=True)
        waiting = [w for w in reached(first, 4) if w.capturing == TORN and not w.free_slots()]
        assert bool(waiting) == (slots == 3)
        assert all(w.mind.coding is not None for w in waiting)


# ── every rule is needed ─────────────────────────────────────────────────────────────────────


class SlotsGo(Protection, frozen=True):
    """The images of what is protected are written over."""

    @property
    def slots_stay(self) -> frozenset[CaptureDone]:
        return frozenset({self.captured} if self.captured else ())


class OneHalf(Protection, frozen=True):
    """Rows are written where those that are needed lie."""

    @property
    def coding_half(self) -> int:
        return self.half


class Hasty(Protection, frozen=True):
    """The first seal is taken for all."""

    def has_sealed(self, turn: int, member: str) -> Protection:
        if self.coding is None or turn != self.round_id:
            return self
        return structs.replace(self, protected=self.coding, half=self.coding_half, coding=None)


class Forgetful(Protection, frozen=True):
    """A seal of rows that were given up counts for those that are made now."""

    def has_sealed(self, turn: int, member: str) -> Protection:
        return super().has_sealed(self.round_id, member)


@pytest.mark.parametrize("kind", [SlotsGo, OneHalf, Hasty, Forgetful])
def test_without_any_one_of_the_rules_something_is_lost(kind: type[Protection]) -> None:
    with pytest.raises(Lost, match="was protected"):
        reached(world(kind, 2, slots=2, losses=1), 3)


def newest_first(
    members: frozenset[str],
    presents: Sequence[HeldSnapshot],
    rows: Iterable[HostShards],
    **told: Any,
) -> Takeover:
    """Whatever else there is, rows of the newest stay, complete or not."""
    newest = max(presents, key=lambda one: one.captured.generation, default=None)
    return take_over(members, [] if newest is None else [newest], rows, **told)


def images_alone(
    members: frozenset[str], presents: Sequence[HeldSnapshot], _: Iterable[HostShards], **told: Any
) -> Takeover:
    """What lies in which half is forgotten."""
    return take_over(members, presents, (), **told)


@pytest.mark.parametrize("taken", [newest_first, images_alone])
def test_whoever_takes_over_otherwise_loses_something(taken: Callable[..., Takeover]) -> None:
    with pytest.raises(Lost, match="was protected"):
        reached(world(Protection, 2, losses=1, taken=taken), 2)


# ── and further, at random ───────────────────────────────────────────────────────────────────


@settings(max_examples=200)
@given(st.integers(2, 6), st.integers(3, 4), st.integers(1, 3), st.data())
def test_nothing_is_lost_in_a_long_life(
    hosts: int, slots: int, parity: int, data: st.DataObject
) -> None:
    parity = min(parity, hosts - 1)
    one = world(Protection, hosts, slots=slots, parity=parity, losses=hosts - 2, restarts=2)
    for _ in range(data.draw(st.integers(1, 80))):
        choices = list(one.after(20))
        one = choices[data.draw(st.integers(0, len(choices) - 1))].checked()


# ── one by one ───────────────────────────────────────────────────────────────────────────────

ONE, TWO, THREE = (CaptureDone(Generation(1, step), f"a{step}") for step in (1, 2, 3))
BOTH = frozenset({"a", "b"})


@pytest.mark.promise
def test_a_generation_is_protected_when_the_last_member_has_sealed_it() -> None:
    mind = Protection(BOTH).has_captured(ONE).begin()
    assert mind.coding == Cover(ONE, BOTH) and mind.next is None
    mind = mind.has_sealed(1, "a").has_sealed(1, "a").has_sealed(1, "stranger")
    assert mind.protected is None
    mind = mind.has_sealed(1, "b")
    assert mind.protected == Cover(ONE, BOTH)
    assert (mind.coding, mind.next, mind.half, mind.coding_half) == (None, None, 0, 1)
    assert mind.begin() is mind


@pytest.mark.promise
def test_only_the_newest_is_coded_next_and_an_older_one_never_counts() -> None:
    mind = Protection(BOTH).has_captured(ONE).begin().has_captured(TWO).has_captured(THREE)
    assert mind.has_captured(TWO) == mind
    assert mind.slots_stay == {ONE, THREE}
    mind = mind.has_failed(1).begin()
    assert mind.coding == Cover(THREE, BOTH)
    assert mind.has_failed(1) == mind.has_sealed(1, "a") == mind, "that turn is over"


def test_other_hosts_code_anew_what_is_protected_and_it_stays_meanwhile() -> None:
    mind = Protection(BOTH, protected=Cover(ONE, frozenset("abc")), half=0)
    assert mind.next == Cover(ONE, BOTH)
    mind = mind.begin()
    assert mind.coding_half == 1 and mind.slots_stay == {ONE}
    assert mind.protected == Cover(ONE, frozenset("abc"))
    assert mind.has_sealed(1, "a").has_sealed(1, "b").protected == Cover(ONE, BOTH)


def test_a_generation_that_is_captured_again_is_newer() -> None:
    again = CaptureDone(ONE.generation, "b1")
    mind = Protection(BOTH).has_captured(ONE).begin().has_captured(again)
    assert mind.slots_stay == {ONE, again}
    mind = mind.has_sealed(1, "a").has_sealed(1, "b")
    assert mind.protected == Cover(ONE, BOTH) and mind.next == Cover(again, BOTH)


def test_a_host_alone_codes_nothing() -> None:
    mind = Protection(frozenset("a")).has_captured(ONE)
    assert mind.next is None and mind.begin() == mind
    assert Protection(BOTH).next is None


def test_what_lost_rows_is_coded_again_by_the_same_hosts_and_stays_meanwhile() -> None:
    mind = Protection(BOTH).has_captured(ONE).begin().has_sealed(1, "a").has_sealed(1, "b")
    assert mind.next is None
    assert mind.has_lost_shards(TWO) == mind, "no rows are of it"
    assert Protection(BOTH).has_lost_shards(ONE) == Protection(BOTH)
    mind = mind.has_lost_shards(ONE)
    assert mind.next == Cover(ONE, BOTH)
    assert mind.has_captured(TWO).slots_stay == {ONE, TWO}
    mind = mind.begin()
    assert (mind.coding, mind.coding_half) == (Cover(ONE, BOTH), 1), "the rows left are not touched"
    assert mind.has_sealed(2, "a").has_sealed(2, "b").protected == Cover(ONE, BOTH)
