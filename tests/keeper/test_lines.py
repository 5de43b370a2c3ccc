"""Whatever is full, lost, damaged or pruned, nothing durable is out of reach without a word.

Hosts with real memory and records, a real persister, real restores and prunes over a store that can
be full, against a model that knows what every start really went on from.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from holdfast.catalogue import INCARNATIONS, catalogue
from holdfast.coordinator.attempts import Attempt
from holdfast.coordinator.coordinator import Coordinator
from holdfast.errors import FormatError, NotFound, RestoreError, StorageError
from holdfast.format.manifest import AttemptId, Generation, ImageId, Incarnation, Lineage, unseal
from holdfast.keeper import arena_files as memory_module
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.hosts import host_messages
from holdfast.keeper.hosts.handover import StateHandover, answer_handover
from holdfast.keeper.incarnations import Incarnations, RootAccess
from holdfast.keeper.persister import Persister
from holdfast.persist import commit, removal
from holdfast.policy.when import Keep
from holdfast.protocol import messages as m
from holdfast.restore.planning.candidates import parse_generation
from holdfast.restore.reading.stored import run_id_of
from holdfast.restore.sources import RestoreSources
from holdfast.storage.base import os_failure
from holdfast.storage.memory import MemoryStore
from holdfast.testing.faults import PassingStore
from holdfast.world import World
from support.runs.keeper_jobs import job_of

RUN = "r"
IMAGE = ImageId(0, 1, "h", "t")
#: How many publications storage has room for.
ROOMS = st.sampled_from([None, None, None, 0, 0, 1, 2, 4])


class FullStore(PassingStore):
    """Has room for so many more publications; None: for all."""

    room: int | None = None

    def publish(self, path: str, data: bytes, *, replace: bool = False) -> None:
        if self.room == 0:
            cause = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise os_failure("publish", path, self.url, cause)
        if self.room is not None:
            self.room -= 1
        super().publish(path, data, replace=replace)


class Inline:
    """A keeper's background without threads."""

    async def in_thread(self, function: Any, *arguments: object) -> Any:
        return function(*arguments)


@dataclass
class Root:
    """As much of a keeper's ``RootAccess`` as records need."""

    store: FullStore
    persister: None = None

    def cache_numbers(self) -> list[str]:
        return []


class Host:
    """A host's keeper: its arena, and what it knows of the starts. A new one for each life."""

    def __init__(self, directory: Path, store: FullStore) -> None:
        self.memory = ArenaFiles(directory, RUN)
        self.coordinator = Coordinator(keeper="k", grant_deadline_s=1.0, capture_deadline_s=1.0)
        background = cast("Any", Inline())
        root = cast("RootAccess", Root(store))
        self.incarnations = Incarnations(self.memory, self.coordinator, root, background)
        self.learning = StateHandover(self.memory, self.coordinator, self.incarnations, background)

    def welcome(self, other: Host) -> None:
        """Another host's keeper takes part in the start that this one coordinates."""
        recorded = tuple(one.n for one in other.memory.incarnations())
        for fact in answer_handover(other.memory, self.learning.attach_reply([], recorded)):
            assert isinstance(fact, host_messages.IncarnationReply)
            self.learning.store_reply("other", fact)

    def newest(self) -> int:
        return max(self.incarnations.known_here(), default=0)

    def remember(self, fact: host_messages.RecordIncarnation | None) -> None:
        """What a hand does when it hears of a start."""
        assert fact is not None
        self.memory.store_incarnation(unseal(Incarnation, fact.data, "a fact"))
        if fact.parent:
            self.memory.store_incarnation(unseal(Incarnation, fact.parent, "a fact"))
        if fact.is_recorded:
            self.memory.forget_incarnations(fact.held)


class Lines(RuleBasedStateMachine):
    """``parents`` is what really happened, as far as anything is left of it."""

    @initialize()
    def begin(self) -> None:
        self.store = FullStore(MemoryStore())
        commit.open_root(self.store, RUN)
        self.home = Path(tempfile.mkdtemp(prefix="hf-test-", dir="/dev/shm"))
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(memory_module, "INCARNATIONS_REMEMBERED", 2)
        self.hosts = [self.home / "h0", self.home / "h1"]
        for host in self.hosts:
            host.mkdir()
        self.parents: dict[int, tuple[int, int] | None] = {}
        self.images: dict[Generation, Path] = {}
        self.recorded: set[int] = set()
        """The starts that storage had a record of."""
        self.taken: set[int] = set()
        """The numbers that starts elsewhere took from starts that only memory knew."""
        self.strays: list[Generation] = []
        """What such starts left in memory."""
        self.lead: Host | None = None
        self.persister: Persister | None = None
        self.n = self.step = 0
        self.made = 2

    def teardown(self) -> None:
        if hasattr(self, "home"):
            self.stop()
            self.patch.undo()
            shutil.rmtree(self.home)

    def stop(self) -> None:
        """The run ends, however it does; its keepers are new ones the next time."""
        if self.persister is not None:
            self.persister.stop()
        self.persister = self.lead = None

    # ── what there is ────────────────────────────────────────────────────────────────────

    def durable(self) -> list[Generation]:
        return [one.generation for one in catalogue(self.store).manifests]

    def spoilt(self) -> list[int]:
        there = {one.n for one in catalogue(self.store).incarnations}
        return sorted(self.recorded - there)

    def best(self, wanted: int | None) -> Generation | None:
        """What a restore is to give: by the truth."""
        line = Lineage(self.parents)
        fit = [g for g in {*self.durable(), *self.images} if g in line and wanted in (None, g.step)]
        return max(fit, key=lambda g: (g.step, g.incarnation), default=None)

    def pick(self, data: st.DataObject) -> Generation | None:
        some = sorted({*self.durable(), *self.images})
        return data.draw(st.sampled_from(some), "which") if some else None

    # ── starts ───────────────────────────────────────────────────────────────────────────

    @rule(
        data=st.data(),
        how=st.sampled_from(["newest", "newest", "newest", "step", "name"]),
        rooms=st.tuples(ROOMS, ROOMS),
        saves=st.lists(st.booleans(), max_size=3),
    )
    def live(
        self,
        data: st.DataObject,
        how: str,
        rooms: tuple[int | None, int | None],
        saves: list[bool],
    ) -> None:
        """A life of the run: what room storage has at its start and then, and its saves."""
        self.store.room, later = rooms
        self.start(data, how)
        self.store.room = later
        for is_durable in saves if self.lead is not None else ():
            self.capture()
            if is_durable:
                self.publish()

    def start(self, data: st.DataObject, how: str) -> None:
        """On all hosts there are, whichever coordinates."""
        self.stop()
        order = data.draw(st.permutations(self.hosts), "hosts")
        lead, *hands = (Host(directory, self.store) for directory in order)
        n = max(asyncio.run(lead.incarnations.next_number()), *(h.newest() + 1 for h in hands))
        assert n not in self.parents
        lead.coordinator.begin(n, f"nonce{n}", 1)
        lead.incarnations.begin(n)
        for hand in hands:
            lead.welcome(hand)
        lead.coordinator.attempts.add_discovered(
            Attempt(str(one), *one, 1, "l", slots={0: 0}) for one in self.images
        )
        one = None if how == "newest" else self.pick(data)
        wanted = one and (one.step if how == "step" else str(one))
        try:
            parent = self.restore(lead, order[0], wanted)
        except NotFound:
            return  # and nothing was saved
        self.parents[n] = parent
        asyncio.run(lead.incarnations.adopt(parent))
        for hand in hands:
            hand.remember(lead.learning.current())
        self.lead, self.n, self.step = lead, n, parent.step if parent else -1
        self.persister = Persister(
            self.store,
            data.draw(st.sampled_from([Keep(), Keep(last=2)]), "keep"),
            lambda _, reason: self.outcomes.append(reason),
            remembered=lead.memory.incarnations,
        )

    @precondition(lambda self: not self.spoilt())
    @rule()
    def live_elsewhere(self) -> None:
        """On a host that knows storage alone, makes a step durable there, and is lost."""
        self.stop()
        self.store.room = None
        directory = self.home / f"h{self.made}"
        directory.mkdir()
        self.made += 1
        host, parent = Host(directory, self.store), catalogue(self.store).latest
        n = asyncio.run(host.incarnations.next_number())
        host.coordinator.begin(n, f"elsewhere{n}", 1)
        asyncio.run(host.incarnations.adopt(parent))
        one = Generation(n, parent.step + 1 if parent else 0)
        (record,) = host.memory.incarnations()
        outcomes: list[str | None] = []
        persister = Persister(self.store, Keep(), lambda _, reason: outcomes.append(reason))
        persister.work_one(job_of(one, record))
        persister.stop()
        assert outcomes == [None]
        gone = {n} & self.parents.keys()
        for later, its in sorted(self.parents.items()):
            if later not in self.listed() and its is not None and its[0] in gone:
                gone.add(later)
        if gone:
            event("a number that another start has")
            self.taken.add(n)
        self.strays += [stray for stray in self.images if stray.incarnation in gone]
        self.images = {g: where for g, where in self.images.items() if g not in self.strays}
        self.parents = {k: its for k, its in self.parents.items() if k not in gone} | {n: parent}

    def restore(self, lead: Host, arena: Path, wanted: int | str | None) -> Generation | None:
        """What it goes on from, checked against the truth."""

        def ask(_: m.Message, __: Any) -> Any:
            held = tuple(
                m.HoldingPart(
                    AttemptId(*g, f"a{g.incarnation}x{g.step}", 1, "l"),
                    (IMAGE,),
                    nonce=f"nonce{g.incarnation}",
                )
                for g in [*self.images, *self.strays]
            )
            records = lead.memory.incarnations()
            parents = {one.n: one.parent for one in records}
            starts = {one.n: (one.nonce, one.created_s) for one in records}
            return m.Inventory("", held, parents, starts)

        offers = RestoreSources(self.store, 0, arena, ask)
        world = World()
        best = parse_generation(wanted) if isinstance(wanted, str) else self.best(wanted)
        is_told = offers.learn(offers.survey())
        refused = ""
        try:
            found = offers.first(world, wanted, timeout_s=1)
        except NotFound:
            event("a step that is not there")
            if best is not None:
                raise AssertionError(f"{best} is not found") from None
            raise
        except RestoreError as error:
            event("a record is missing")
            refused = str(error)
            by_name = str(best or max({*self.durable(), *self.images}))
            found = offers.first(world, by_name, timeout_s=1)
        named = [n for n in self.spoilt() if f"{INCARNATIONS}/{n}.json" in refused]
        assert bool(named) == bool(refused), f"{refused} names none of {self.spoilt()}"
        first = found[0].generation if found else None
        assert first == best or (refused and best is None)
        assert not found or found[0].where == "storage" or first in self.images, "of another start"
        assert is_told or not found or isinstance(wanted, str)  # what was abandoned has its name
        event("from memory" if first in self.images else "from storage" if first else "anew")
        return first

    # ── saves ────────────────────────────────────────────────────────────────────────────

    def capture(self) -> None:
        assert self.lead is not None
        self.step += 1
        self.images[Generation(self.n, self.step)] = self.lead.memory.directory
        for old in sorted(self.images)[:-2]:
            del self.images[old]

    @precondition(lambda self: self.lead is not None and self.images)
    @rule()
    def end(self) -> None:
        """The keeper makes durable what is newest, there being room or not."""
        self.publish()

    def publish(self) -> None:
        """The newest in memory, of this start or an earlier one."""
        assert self.lead is not None and self.persister is not None
        newest = max(self.images)
        attempt = Attempt(str(newest), *newest, 1, "l", nonce=f"nonce{newest.incarnation}")
        record = self.lead.incarnations.of(attempt)
        assert record is not None, f"it is not known how {newest} began"
        self.outcomes: list[str | None] = []
        before = self.durable()
        self.persister.work_one(job_of(newest, record))
        assert self.outcomes == [None] or self.store.room is not None, self.outcomes
        assert self.outcomes != [None] or newest in self.durable()
        self.check_gone(before, self.persister.keep)

    # ── what goes wrong ──────────────────────────────────────────────────────────────────

    @rule(which=st.integers(0, 1))
    def lose_host(self, which: int) -> None:
        """With its memory; another comes in its place. What only it knew never happened."""
        self.stop()
        lost, new = self.hosts[which], self.home / f"h{self.made}"
        shutil.rmtree(lost)
        new.mkdir()
        self.hosts[which], self.made = new, self.made + 1
        self.images = {g: host for g, host in self.images.items() if host != lost}
        known = set(self.recorded)
        for host in self.hosts:
            known |= {one.n for one in ArenaFiles(host, RUN).incarnations()}
        self.parents = {n: parent for n, parent in self.parents.items() if n in known}

    @precondition(lambda self: len(self.recorded - self.taken) > 1)
    @rule(data=st.data(), is_deleted=st.booleans())
    def spoil(self, data: st.DataObject, is_deleted: bool) -> None:
        """A record in storage, but that of the newest start there does not go without a trace."""
        n = data.draw(st.sampled_from(sorted(self.recorded - self.taken)), "record")
        if is_deleted and n != max(self.recorded):
            self.store.inner.remove(f"{INCARNATIONS}/{n}.json")
        else:
            self.store.inner.publish(f"{INCARNATIONS}/{n}.json", b"damaged", replace=True)

    @rule(last=st.none() | st.integers(1, 2), abandoned=st.booleans())
    def prune(self, last: int | None, abandoned: bool) -> None:
        found, before, keep = catalogue(self.store), self.durable(), Keep(last=last)
        try:
            removal.remove(self.store, removal.plan(self.store, keep, abandoned=abandoned))
        except FormatError:
            assert found.broken or (abandoned and found.gap)
        self.check_gone(before, keep)

    def check_gone(self, before: list[Generation], keep: Keep) -> None:
        """Only what was abandoned, as far as storage was ever told, and what the policy lets go."""
        line = Lineage({n: self.parents[n] for n in self.recorded | self.listed()})
        there = sorted({*before, *self.durable()})
        kept = [one for one in there if one in line][-keep.last if keep.last else None :]
        gone = set(before) - set(self.durable())
        assert not gone & set(kept), f"{gone} of {there} went, {kept} were to stay"

    # ── always ───────────────────────────────────────────────────────────────────────────

    def listed(self) -> set[int]:
        names = self.store.list(INCARNATIONS) if hasattr(self, "store") else []
        return {int(name.partition(".")[0]) for name in names}

    @invariant()
    def no_child_is_recorded_before_its_parent(self) -> None:
        if not hasattr(self, "store"):
            return
        self.recorded |= self.listed()
        for n in self.recorded:
            parent = self.parents[n]
            assert parent is None or parent[0] in self.recorded, f"{n} is there, {parent} is not"


def test_nothing_durable_is_out_of_reach_without_an_error_that_names_what_is_missing() -> None:
    run_state_machine_as_test(Lines, settings=settings(max_examples=150, stateful_step_count=20))


def test_a_rank_is_not_sent_away_while_storage_that_may_know_its_start_is_out_of_reach(
    arena_dir: Path,
) -> None:
    store = FullStore(MemoryStore())
    host = Host(arena_dir, store)
    join = m.Join(incarnation=1, nonce="n", rank=0, persist_at_end=False)
    with pytest.raises(StorageError, match="not mounted"):
        asyncio.run(host.incarnations.resumable(join))
    commit.open_root(store, RUN)
    assert asyncio.run(host.incarnations.resumable(join)) is None
    record = Incarnation(run_id=RUN, n=1, nonce="n")
    commit.record_incarnation(store, record)
    assert asyncio.run(host.incarnations.resumable(join)) == record


def test_a_rank_is_sent_away_whose_number_storage_gave_to_another_start(arena_dir: Path) -> None:
    """Its keeper died, and another host had the root meanwhile."""
    store = FullStore(MemoryStore())
    commit.open_root(store, RUN)
    host = Host(arena_dir, store)
    host.memory.store_incarnation(Incarnation(run_id=RUN, n=1, nonce="n"))
    join = m.Join(incarnation=1, nonce="n", rank=0, persist_at_end=False)
    assert asyncio.run(host.incarnations.resumable(join)) is not None
    commit.record_incarnation(store, Incarnation(run_id=RUN, n=1, nonce="another"))
    assert asyncio.run(host.incarnations.resumable(join)) is None


def test_what_another_start_of_a_number_captured_is_not_made_durable_as_if_it_were_this_ones(
    arena_dir: Path,
) -> None:
    store = FullStore(MemoryStore())
    host = Host(arena_dir, store)
    mine = Incarnation(run_id=RUN, n=2, nonce="n", parent=(1, 10))
    theirs = Incarnation(run_id=RUN, n=2, nonce="another", parent=(1, 10))
    captured = Attempt("a", 2, 60, 1, "l", nonce="n")
    host.memory.store_incarnation(mine)
    assert host.incarnations.of(captured) == mine
    for record in (Incarnation(run_id=RUN, n=1, nonce="first"), theirs):
        commit.record_incarnation(store, record)
    host.coordinator.begin(3, "third", 1)
    asyncio.run(host.incarnations.adopt((2, 40)))
    assert host.incarnations.remembered(2) == theirs, "as storage, from which it was restored"
    assert host.incarnations.of(captured) is None
    assert host.incarnations.is_recorded


@pytest.mark.parametrize("clock_s", [5.0, 1e12], ids=["a clock set back", "a clock that goes on"])
def test_the_second_record_of_a_start_is_the_later_one_whatever_the_clock_says(
    arena_dir: Path, monkeypatch: pytest.MonkeyPatch, clock_s: float
) -> None:
    host = Host(arena_dir, FullStore(MemoryStore()))
    host.coordinator.begin(1, "n", 1)
    asyncio.run(host.incarnations.adopt(None))
    (first,) = host.memory.incarnations()
    monkeypatch.setattr("time.time", lambda: clock_s)
    asyncio.run(host.incarnations.adopt(None))
    (second,) = host.memory.incarnations()
    assert second.created_s > first.created_s


def test_a_root_that_lost_its_name_is_of_the_run_that_its_records_are_of() -> None:
    store = MemoryStore()
    assert run_id_of(catalogue(store)) == ""
    commit.record_incarnation(store, Incarnation(run_id=RUN, n=1, nonce="n"))
    assert run_id_of(catalogue(store)) == RUN
