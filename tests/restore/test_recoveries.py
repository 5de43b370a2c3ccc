"""All ranks try the same, in turn, and are told why something newer cannot be had."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast import events
from holdfast.errors import PeerError, StorageError
from holdfast.format.manifest import Generation
from holdfast.load.choose import Candidate
from holdfast.load.gathering import Gathering
from holdfast.load.records import Record
from holdfast.load.recoveries import Known, Recoveries
from holdfast.load.source import Checkpoint
from lost_hosts import Hosts, set_sizes
from peering import close_pullers

HERE = ("h0", "h3", "new")


class Ranks:
    """What ranks that are threads tell each other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=30)
        self.said: dict[int, bytes] = {}


class ThreadWorld:
    nonce = "n"

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank, self.size = ranks, rank, ranks.size

    def gather(self, phase: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        self.ranks.said[self.rank] = payload
        self.ranks.barrier.wait()
        found = [self.ranks.said[rank] for rank in range(self.size)]
        self.ranks.barrier.wait()
        return found


@pytest.fixture
def hosts(arena_dir: Path) -> Iterator[Hosts]:
    with pytest.MonkeyPatch.context() as patch:
        set_sizes(patch, 1024, 4096)
        with Hosts(arena_dir / "hosts", 4, 2) as made:
            yield made
    close_pullers()


class Restore:
    """A restore by three ranks, on two of the hosts and on a new one."""

    def __init__(self, hosts: Hosts, *lost: str, stored: tuple[Candidate, ...] = ()) -> None:
        self.hosts, self.lost, self.stored, ranks = hosts, lost, stored, Ranks(len(HERE))
        self.asked: list[str] = []
        self.ranks = [
            Recoveries(
                ThreadWorld(ranks, rank), hosts.reach(here), self.ask, self.open_stored,
                wanted=None, timeout_s=30,
            )
            for rank, here in enumerate(HERE)
        ]  # fmt: skip

    def ask(self) -> Known:
        self.asked.append("all")
        reach = self.hosts.reach("h0")

        def fetch(host: str, attempt: str, generation: Generation, stripe: int, row: int) -> Record:
            self.asked.append(host)
            return reach.record(host, attempt, generation, stripe, row)

        gathering = Gathering(self.hosts.told(*self.lost), fetch)
        known = self.hosts.known(lost=self.lost)
        return Known(type(known)(gathering.holdings, self.stored), gathering)

    def open_stored(self, candidate: Candidate) -> Checkpoint:
        raise StorageError(f"no storage for {candidate.generation}")

    def first(self) -> list[list[Candidate]]:
        with ThreadPoolExecutor(len(HERE)) as pool:
            return list(pool.map(lambda one: one.first(), self.ranks))

    def again(self, candidate: Candidate, error: PeerError | StorageError) -> list[list[Candidate]]:
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
