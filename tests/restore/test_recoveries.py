"""All ranks try the same, in turn, and are told why something newer cannot be had."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast import events
from holdfast.catalogue import LEASES, manifest_path
from holdfast.errors import HoldfastError, NotFound, PeerError, StorageError
from holdfast.format.manifest import Generation
from holdfast.geometry.layout import Layout
from holdfast.parity.planning.record import ParityRecord
from holdfast.restore.cluster.collect import InventoryCollector
from holdfast.restore.cluster.open import ClusterReach
from holdfast.restore.planning.candidates import Candidate
from holdfast.restore.reading.images import Checkpoint
from holdfast.restore.reading.stored import overview_of
from holdfast.restore.reading.stored import stored as stored_in
from holdfast.restore.sources import ClusterRestore, KnownRecoveries, RestoreSources
from holdfast.restore.storage_hold import StorageHold
from holdfast.storage.base import Store
from holdfast.storage.memory import MemoryStore
from support.checkpoints.roots import save
from support.peers.lost_hosts import Hosts, set_sizes
from support.peers.peering import close_pullers
from support.runs.thread_worlds import Ranks, ThreadWorld

HERE = ("h0", "h3", "new")


@pytest.fixture
def hosts(arena_dir: Path) -> Iterator[Hosts]:
    with pytest.MonkeyPatch.context() as patch:
        set_sizes(patch, 1024, 4096)
        with Hosts(arena_dir / "hosts", 4, 2) as made:
            yield made
    close_pullers()


class Failing(MemoryStore):
    """A store whose lists fail for a while."""

    is_failing = False

    def list(self, path: str) -> list[str]:
        if self.is_failing:
            raise StorageError("the disk fails")
        return super().list(path)


class UnreadHold(StorageHold):
    """Takes every candidate for one that is there."""

    def acquire(self, candidate: Candidate) -> bool:
        return True

    def should_list_again(self, candidate: Candidate) -> bool:
        return False


class Sources(RestoreSources):
    """What the hosts hold, and what is said to lie in storage; ``store``: where it is looked up."""

    def __init__(
        self, reach: ClusterReach, known: Callable[[], KnownRecoveries], store: Store | None
    ) -> None:
        super().__init__(store or MemoryStore(), 0, Path(), lambda *_: pytest.fail("no keeper"))
        self._reached, self._known = reach, known
        self.not_read: list[Generation] = []
        if store is None:
            self.hold = UnreadHold(self._store)

    def reach(self) -> ClusterReach:
        return self._reached

    def gather(self) -> KnownRecoveries:
        return self._known()

    def open_stored(self, candidate: Candidate, layout: Layout | None) -> Checkpoint:
        raise StorageError(f"no storage for {candidate.generation}")

    @property
    def unread(self) -> list[Generation]:
        return self.not_read

    def nothing(self, known: KnownRecoveries, step: int | str | None) -> None:
        """Nothing is explained."""

    def gone(self, step: int | str | None, candidate: Candidate, error: HoldfastError) -> None:
        """Nothing is explained."""


class Restore:
    """A restore by three ranks, on two of the hosts and on a new one."""

    def __init__(
        self,
        hosts: Hosts,
        *lost: str,
        stored: tuple[Candidate, ...] = (),
        store: Store | None = None,
    ) -> None:
        self.hosts, self.lost, self.stored, ranks = hosts, lost, stored, Ranks(len(HERE))
        self.asked: list[str] = []
        self.ranks = [
            ClusterRestore(
                Sources(hosts.reach(here), self.ask, store),
                ThreadWorld(ranks, rank),
                wanted=None,
                timeout_s=30,
            )
            for rank, here in enumerate(HERE)
        ]

    def ask(self) -> KnownRecoveries:
        self.asked.append("all")
        reach = self.hosts.reach("h0")

        def fetch(
            host: str, attempt: str, generation: Generation, stripe: int, row: int
        ) -> ParityRecord:
            self.asked.append(host)
            return reach.record(host, attempt, generation, stripe, row)

        gathering = InventoryCollector(self.hosts.told(*self.lost), fetch)
        known = self.hosts.known(lost=self.lost)
        return KnownRecoveries(type(known)(gathering.holdings, self.stored), gathering)

    def first(self) -> list[list[Candidate]]:
        with ThreadPoolExecutor(len(HERE)) as pool:
            return list(pool.map(lambda one: one.first(), self.ranks))

    def again(self, candidate: Candidate, error: HoldfastError) -> list[list[Candidate]]:
        with ThreadPoolExecutor(len(HERE)) as pool:
            return list(pool.map(lambda one: one.plan_again(candidate, error), self.ranks))


def dropped(hosts: Hosts, *lost: str) -> tuple[Restore, list[str], list[list[Candidate]]]:
    told: list[str] = []

    def hear(event: events.Event, _: float) -> None:
        if isinstance(event, events.SourceDropped):
            told.append(f"{event.source}: {event.reason}")

    unsubscribe = events.subscribe(hear)
    one = Restore(hosts, *lost, stored=(Candidate(3, 1100, "storage", "a0", "s"),))
    found = one.first()
    unsubscribe()
    return one, told, found


def test_every_rank_restores_the_same_and_only_one_asks(hosts: Hosts) -> None:
    one, told, found = dropped(hosts)
    assert found[0] == found[1] == found[2]
    ((candidate,), _, _) = found
    assert (candidate.step, candidate.where) == (1200, "memory")
    assert one.asked == ["all"]
    for rank in one.ranks:
        hosts.check_all(rank.open(candidate))
    assert not told


def test_when_a_host_is_lost_on_the_way_all_ranks_decode_what_it_had(hosts: Hosts) -> None:
    one, _, ((candidate,), _, _) = dropped(hosts, "h1")
    hosts.die("h2")
    found = one.again(candidate, PeerError("gone", peer="h2"))
    assert found[0] == found[1] == found[2]
    ((second,), _, _) = found
    assert second != candidate
    for rank in one.ranks:
        hosts.check_all(rank.open(second))
    assert set(one.asked) == {"all", "h0", "h2", "h3"}


def test_when_too_many_are_lost_storage_is_tried_and_the_reason_told(hosts: Hosts) -> None:
    one, told, ((candidate,), _, _) = dropped(hosts, "h1", "h2", "h3")
    assert (candidate.step, candidate.where) == (1100, "storage")
    (why,) = told
    assert why.startswith("memory 3-1200: the image of rank 1 was on h1; of its group (h0, h1, h2")
    with pytest.raises(StorageError):
        one.ranks[0].open(candidate)
    assert one.again(candidate, StorageError("gone")) == [[], [], []]


def test_what_retention_took_meanwhile_is_listed_again_and_the_newest_that_stands_is_held(
    hosts: Hosts,
) -> None:
    store = MemoryStore()
    for step in (10, 20):
        save(store, Generation(3, step))
    one = Restore(hosts, "h1", "h2", "h3", stored=tuple(stored_in(overview_of(store))), store=store)
    store.remove(manifest_path(Generation(3, 20)))  # since it was listed
    save(store, Generation(3, 25))
    ((first,), _, _) = one.first()
    assert first.step == 25
    assert len(store.list(LEASES)) == 1
    store.remove(manifest_path(Generation(3, 25)))  # by who knows no leases
    save(store, Generation(3, 28))
    found = one.again(first, NotFound("gone"))
    assert [[c.step for c in each] for each in found] == [[28], [28], [28]]
    damaged = one.again(found[0][0], StorageError("a block changed"))
    assert [[c.step for c in each] for each in damaged] == [[10], [10], [10]]
    assert one.again(damaged[0][0], StorageError("a block changed")) == [[], [], []]


def test_storage_that_cannot_be_listed_again_leaves_what_is_known(hosts: Hosts) -> None:
    store = Failing()
    for step in (10, 20):
        save(store, Generation(3, step))
    one = Restore(hosts, "h1", "h2", "h3", stored=tuple(stored_in(overview_of(store))), store=store)
    store.remove(manifest_path(Generation(3, 20)))  # since it was listed
    store.is_failing = True
    assert [[c.step for c in each] for each in one.first()] == [[10], [10], [10]]


@pytest.mark.promise
def test_a_run_does_not_begin_anew_because_storage_cannot_be_listed_again(hosts: Hosts) -> None:
    store = Failing()
    save(store, Generation(3, 20))
    one = Restore(hosts, "h1", "h2", "h3", stored=tuple(stored_in(overview_of(store))), store=store)
    store.remove(manifest_path(Generation(3, 20)))  # retention took it for a newer one
    save(store, Generation(3, 25))
    store.is_failing = True
    with pytest.raises(HoldfastError, match="the disk fails"):
        one.first()
    store.is_failing = False
    again = Restore(hosts, "h1", "h2", "h3", stored=one.stored, store=store)
    assert [[c.step for c in each] for each in again.first()] == [[25], [25], [25]]


@pytest.mark.promise
@pytest.mark.parametrize(
    ("unread", "is_taken"), [((3, 15), False), ((3, 5), True), ((2, 15), True)]
)
def test_an_older_one_is_not_taken_for_those_that_could_not_be_read(
    hosts: Hosts, unread: tuple[int, int], is_taken: bool
) -> None:
    store = Failing()
    for step in (10, 20):
        save(store, Generation(3, step))
    one = Restore(hosts, "h1", "h2", "h3", stored=tuple(stored_in(overview_of(store))), store=store)
    for rank in one.ranks:
        assert isinstance(rank._sources, Sources)
        rank._sources.not_read = [Generation(*unread)]
    ((first,), _, _) = one.first()
    assert first.step == 20
    store.is_failing = True
    if is_taken:
        found = one.again(first, StorageError("a block changed"))
        assert [[c.step for c in each] for each in found] == [[10], [10], [10]]
    else:
        with pytest.raises(HoldfastError, match="the disk fails"):
            one.again(first, StorageError("a block changed"))
