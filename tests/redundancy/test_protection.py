"""What was protected is whole on all hosts that are left, whatever is lost at whatever moment.

A model of hosts, slots and rows is played through all its states by a search, and further at
random. What must not be left out of the rules is left out of them, one by one, and the search then
finds what is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.format.manifest import Generation
from holdfast.redundancy.protection import Cover, Protection

TORN = Generation(0, 0)
Slots = tuple[Generation, ...]
Row = tuple[Cover, int] | None  # which turn filled it


class Lost(AssertionError):
    """What had been protected is not there any more."""


@dataclass(frozen=True)
class Host:
    """Its slots, and the two halves of its parity memory: None where there is no seal."""

    slots: Slots
    rows: tuple[Row, Row] = (None, None)


@dataclass(frozen=True)
class World:
    """Hosts by name, what the coordinator knows, and what is on its way to it."""

    hosts: tuple[tuple[str, Host], ...]
    mind: Protection
    next_step: int
    losses: int
    """How many hosts may still be lost."""
    parity: int
    best: Cover | None = None
    """The newest that was ever protected."""
    capturing: Generation = TORN
    slot: int = -1
    told: frozenset[tuple[int, str]] = frozenset()
    """Seals that the coordinator has not heard of yet."""

    def checked(self) -> World:
        """What was protected can be rebuilt: all hosts that are left have their part of it."""
        cover, best = self.mind.protected, self.best
        if cover is None:
            if best is not None:
                raise Lost(f"{best} was protected, and nothing is")
            return self
        if best is not None and cover.generation < best.generation:
            raise Lost(f"{best} was protected, and only {cover} is")
        for name, host in self.hosts:
            row = host.rows[self.mind.half]
            if name in cover.members and (
                row is None or row[0] != cover or cover.generation not in host.slots
            ):
                raise Lost(f"{name} has {host}, {cover} was protected")
        return replace(self, best=cover)

    def change(self, name: str, **fields: Any) -> World:
        hosts = tuple((n, replace(h, **fields) if n == name else h) for n, h in self.hosts)
        return replace(self, hosts=hosts)

    def all_slots(self, slot: int, content: Generation) -> World:
        return replace(self, hosts=tuple(
            (name, replace(host, slots=(*host.slots[:slot], content, *host.slots[slot + 1 :])))
            for name, host in self.hosts
        ))  # fmt: skip

    def renumbered(self) -> World:
        """This turn is 1, all earlier ones 0: else no world would ever come again."""
        now = self.mind.turn

        def again(turn: int) -> int:
            return int(turn == now and now > 0)

        def rows(host: Host) -> tuple[Row, Row]:
            first, second = (row and (row[0], again(row[1])) for row in host.rows)
            return first, second

        hosts = tuple((name, replace(host, rows=rows(host))) for name, host in self.hosts)
        told = frozenset((again(turn), name) for turn, name in self.told)
        return replace(self, hosts=hosts, told=told, mind=replace(self.mind, turn=again(now)))

    # ── what can happen ──────────────────────────────────────────────────────────────────

    def after(self, steps: int) -> Iterator[World]:
        """All worlds that may come next, when so many generations are captured."""
        yield from self.captures(steps)
        yield from self.codes()
        for turn, name in self.told:
            heard = replace(self, told=self.told - {(turn, name)})
            yield replace(heard, mind=self.mind.has_sealed(turn, name))
        if self.losses and self.may_lose():
            yield from (self.without(name) for name, _ in self.hosts)
        yield self.taken_over()

    def captures(self, steps: int) -> Iterator[World]:
        if self.capturing != TORN:
            yield replace(self, capturing=TORN, slot=-1)  # abandoned: the slot stays torn
            done = self.all_slots(self.slot, self.capturing)
            mind = self.mind.has_captured(self.capturing)
            yield replace(done, mind=mind, capturing=TORN, slot=-1)
        elif self.next_step <= steps:
            yield from self.granted()

    def granted(self) -> Iterator[World]:
        """The slots of all ranks that hold nothing which must stay are written over."""
        free = self.free_slots()
        if free:
            torn = self.all_slots(free[0], TORN)
            generation = Generation(1, self.next_step)
            yield replace(torn, capturing=generation, slot=free[0], next_step=self.next_step + 1)

    def free_slots(self) -> list[int]:
        """The one with the oldest first."""
        stay = self.mind.slots_stay
        slots = self.hosts[0][1].slots
        found = [n for n, content in enumerate(slots) if content not in stay]
        return sorted(found, key=lambda n: slots[n])

    def codes(self) -> Iterator[World]:
        mind = self.mind
        if mind.coding is None:
            begun = mind.begin()
            if begun is not mind:
                yield replace(self, mind=begun).torn_rows()
            return
        yield replace(self, mind=mind.has_failed(mind.turn))
        for name, host in self.hosts:
            row = (mind.coding, mind.turn)
            if host.rows[mind.coding_half] == row or not self.can_code(mind.coding):
                continue
            rows = list(host.rows)
            rows[mind.coding_half] = row
            sealed = self.change(name, rows=tuple(rows))
            yield replace(sealed, told=self.told | {(mind.turn, name)})

    def can_code(self, cover: Cover) -> bool:
        """Every pulled block is compared with the seals of that generation."""
        names = {name for name, _ in self.hosts}
        return cover.members <= names and all(cover.generation in h.slots for _, h in self.hosts)

    def torn_rows(self) -> World:
        """All members write into the half that is said to be free."""
        world, half = self, self.mind.coding_half
        for name, host in self.hosts:
            rows = list(host.rows)
            rows[half] = None
            world = world.change(name, rows=tuple(rows))
        return world

    def without(self, name: str) -> World:
        """A host is lost; the others go on as a group of their own."""
        hosts = tuple(one for one in self.hosts if one[0] != name)
        mind = self.mind.regroup(frozenset(n for n, _ in hosts))
        return replace(
            self, hosts=hosts, mind=mind, losses=self.losses - 1, capturing=TORN, slot=-1,
            told=frozenset(one for one in self.told if one[1] != name),
        )  # fmt: skip

    def taken_over(self) -> World:
        """Another coordinator, which knows what the hosts say of themselves."""
        mind = self.mind
        found = [
            (row[0], half)
            for _, host in self.hosts[:1]
            for half, row in enumerate(host.rows)
            if row and self.is_whole(row[0], half)
        ]
        protected, half = max(found, key=lambda one: one[0].generation, default=(None, 1))
        whole = [
            g
            for g in self.hosts[0][1].slots
            if g != TORN and all(g in host.slots for _, host in self.hosts)
        ]
        fresh = type(mind)(mind.members, max(whole, default=None), protected, half, turn=mind.turn)
        return replace(self, mind=fresh, capturing=TORN, slot=-1, told=frozenset())

    def may_lose(self) -> bool:
        """Whether one host more is no more than the parity of what is protected."""
        names = {name for name, _ in self.hosts}
        cover = self.mind.protected
        return len(names) > 1 and (cover is None or len(cover.members - names) < self.parity)

    def is_whole(self, cover: Cover, half: int) -> bool:
        """Whether all its members that are left have sealed it, and have the images still.

        Without the images it is nothing: they may go as soon as its turn has failed.
        """
        left = [host for name, host in self.hosts if name in cover.members]
        return bool(left) and all(
            (row := host.rows[half]) and row[0] == cover and cover.generation in host.slots
            for host in left
        )


def world(
    kind: type[Protection], hosts: int, *, slots: int = 4, parity: int = 1, losses: int = 0
) -> World:
    names = [f"h{n}" for n in range(hosts)]
    return World(
        tuple((name, Host((TORN,) * slots)) for name in names),
        kind(frozenset(names)), next_step=1, losses=losses, parity=parity,
    )  # fmt: skip


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
    ("hosts", "slots", "parity", "losses", "steps"),
    [(2, 4, 1, 0, 4), (2, 3, 1, 1, 4), (3, 4, 1, 0, 3), (3, 3, 1, 1, 2), (3, 4, 2, 2, 2)],
)
def test_nothing_that_was_protected_is_lost_in_any_order_of_events(
    hosts: int, slots: int, parity: int, losses: int, steps: int
) -> None:
    first = world(Protection, hosts, slots=slots, parity=parity, losses=losses)
    worlds = reached(first, steps)
    newest = Generation(1, steps)
    assert any(w.best is not None and w.best.generation == newest for w in worlds), "and it goes on"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "parity", "losses", "steps"), [(3, 1, 1, 3), (4, 1, 1, 2), (4, 2, 2, 2), (3, 2, 2, 3)]
)
def test_nothing_is_lost_in_larger_groups_either(
    hosts: int, parity: int, losses: int, steps: int
) -> None:
    reached(world(Protection, hosts, parity=parity, losses=losses), steps)


def test_with_four_slots_no_capture_waits_and_with_three_only_while_something_is_coded() -> None:
    for slots in (3, 4):
        waiting = [
            w for w in reached(world(Protection, 2, slots=slots), 4)
            if w.capturing == TORN and not w.free_slots()
        ]  # fmt: skip
        assert bool(waiting) == (slots == 3)
        assert all(w.mind.coding is not None for w in waiting)


# ── every rule is needed ─────────────────────────────────────────────────────────────────────


class SlotsGo(Protection):
    """The images of what is protected are written over."""

    @property
    def slots_stay(self) -> frozenset[Generation]:
        return frozenset({self.captured} if self.captured else ())


class OneHalf(Protection):
    """Rows are written where those that are needed lie."""

    @property
    def coding_half(self) -> int:
        return self.half


class Hasty(Protection):
    """The first seal is taken for all."""

    def has_sealed(self, turn: int, member: str) -> Protection:
        if self.coding is None or turn != self.turn:
            return self
        return replace(self, protected=self.coding, half=self.coding_half, coding=None)


class Forgetful(Protection):
    """A seal of rows that were given up counts for those that are made now."""

    def has_sealed(self, turn: int, member: str) -> Protection:
        return super().has_sealed(self.turn, member)


class Fresh(Protection):
    """Other hosts: what was protected is thrown away at once."""

    def regroup(self, members: frozenset[str]) -> Protection:
        return replace(super().regroup(members), protected=None)


@pytest.mark.parametrize("kind", [SlotsGo, OneHalf, Hasty, Forgetful, Fresh])
def test_without_any_one_of_the_rules_something_is_lost(kind: type[Protection]) -> None:
    with pytest.raises(Lost, match="was protected"):
        reached(world(kind, 2, slots=2, losses=1), 3)


# ── and further, at random ───────────────────────────────────────────────────────────────────


@settings(max_examples=200)
@given(st.integers(2, 6), st.integers(3, 4), st.integers(1, 3), st.data())
def test_nothing_is_lost_in_a_long_life(
    hosts: int, slots: int, parity: int, data: st.DataObject
) -> None:
    parity = min(parity, hosts - 1)
    one = world(Protection, hosts, slots=slots, parity=parity, losses=hosts - 2)
    for _ in range(data.draw(st.integers(1, 80))):
        choices = list(one.after(20))
        one = choices[data.draw(st.integers(0, len(choices) - 1))].checked()


# ── one by one ───────────────────────────────────────────────────────────────────────────────

ONE, TWO, THREE = (Generation(1, step) for step in (1, 2, 3))
BOTH = frozenset({"a", "b"})


def test_a_generation_is_protected_when_the_last_member_has_sealed_it() -> None:
    mind = Protection(BOTH).has_captured(ONE).begin()
    assert mind.coding == Cover(ONE, BOTH) and mind.next is None
    mind = mind.has_sealed(1, "a").has_sealed(1, "a").has_sealed(1, "stranger")
    assert mind.protected is None
    mind = mind.has_sealed(1, "b")
    assert mind.protected == Cover(ONE, BOTH)
    assert (mind.coding, mind.next, mind.half, mind.coding_half) == (None, None, 0, 1)
    assert mind.begin() is mind


def test_only_the_newest_is_coded_next_and_an_older_one_never_counts() -> None:
    mind = Protection(BOTH).has_captured(ONE).begin().has_captured(TWO).has_captured(THREE)
    assert mind.has_captured(TWO) == mind
    assert mind.slots_stay == {ONE, THREE}
    mind = mind.has_failed(1).begin()
    assert mind.coding == Cover(THREE, BOTH)
    assert mind.has_failed(1) == mind.has_sealed(1, "a") == mind, "that turn is over"


def test_other_hosts_code_anew_what_is_protected_and_it_stays_meanwhile() -> None:
    mind = Protection(frozenset("abc"), protected=Cover(ONE, frozenset("abc")), half=0)
    assert mind.next is None
    mind = mind.regroup(BOTH)
    assert mind.next == Cover(ONE, BOTH)
    mind = mind.begin()
    assert mind.coding_half == 1 and mind.slots_stay == {ONE}
    assert mind.protected == Cover(ONE, frozenset("abc"))
    assert mind.has_sealed(1, "a").has_sealed(1, "b").protected == Cover(ONE, BOTH)


def test_a_host_alone_codes_nothing() -> None:
    mind = Protection(frozenset("a")).has_captured(ONE)
    assert mind.next is None and mind.begin() == mind
    assert Protection(BOTH).next is None
