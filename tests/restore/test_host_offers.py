"""What hosts do not say they hold is not known; that they hold nothing is not said by it."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import overview
from holdfast.catalogue import INCARNATIONS, LEASES, ROOT, manifest_path
from holdfast.errors import NotFound, PeerError, RestoreError
from holdfast.format.manifest import Generation, Incarnation, seal
from holdfast.hosts import HostTable
from holdfast.persist import commit
from holdfast.protocol import messages as m
from holdfast.restore.cluster_sources import ClusterSources
from holdfast.restore.sources import RestoreSources
from holdfast.storage.memory import MemoryStore
from holdfast.transport.client_connection import Peer
from holdfast.world import World
from support.checkpoints.roots import save
from support.peers.peering import SECRET


@pytest.fixture
def store() -> MemoryStore:
    found = MemoryStore()
    commit.open_root(found, "r")
    return found


def offers_of(store: MemoryStore, arena: Path, incarnation: int = 2) -> ClusterSources:
    """Those of a start one of whose hosts is out of reach."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
    place = m.HostEntry(id="gone", ranks=(0,), address="127.0.0.1", port=port)

    def ask(*_: Any) -> Any:
        raise AssertionError("nothing is asked of the keeper here")

    offers = ClusterSources(store, 0, arena, ask, HostTable((place,), 0, SECRET))
    offers.incarnation = incarnation
    return offers


def is_there_any(offers: RestoreSources) -> bool:
    """What a start finds now; a restore after it does not know of it."""
    found: tuple[bool, bytes | None] = msgspec.msgpack.decode(offers.survey())
    return found[0]


def test_a_run_does_not_begin_anew_while_a_host_does_not_say_what_it_holds(
    store: MemoryStore, arena_dir: Path
) -> None:
    offers = offers_of(store, arena_dir)
    with pytest.raises(RestoreError, match="memory of gone is not known"):
        offers.first(World(), None, timeout_s=5)
    assert is_there_any(offers)
    save(store, Generation(1, 10))
    (found,) = offers.first(World(), None, timeout_s=5)
    assert found.generation == (1, 10)
    offers.close()


def test_at_the_first_start_of_all_nobody_has_anything_to_say(
    store: MemoryStore, arena_dir: Path
) -> None:
    offers = offers_of(store, arena_dir, incarnation=1)
    assert offers.first(World(), None, timeout_s=5) == []
    assert not is_there_any(offers)
    offers.close()


def test_hosts_take_nothing_past_a_lost_record_but_by_its_name(
    store: MemoryStore, arena_dir: Path
) -> None:
    save(store, Generation(1, 10))
    record = Incarnation(run_id="r", n=3, nonce="c", parent=(2, 25))
    commit.record_incarnation(store, record)
    offers = offers_of(store, arena_dir)
    for step in (None, 10):
        with pytest.raises(RestoreError, match=r"incarnations/2\.json"):
            offers.first(World(), step, timeout_s=5)
    assert is_there_any(offers)
    (found,) = offers.first(World(), "1-10", timeout_s=5)
    assert found.generation == (1, 10)
    offers.close()


@pytest.mark.parametrize("incarnation", [1, 2])
def test_a_root_that_has_gone_since_the_start_is_not_taken_for_an_empty_one(
    store: MemoryStore, arena_dir: Path, incarnation: int
) -> None:
    offers = offers_of(store, arena_dir, incarnation)
    store.remove(ROOT)
    assert is_there_any(offers)
    with pytest.raises(RestoreError, match="not there any more"):
        offers.first(World(), None, timeout_s=5)
    offers.close()


@pytest.mark.promise
def test_what_the_start_found_is_restored_first_without_asking_again_and_leased_when_it_is_opened(
    store: MemoryStore, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20):
        save(store, Generation(1, step))

    def empty(*_: Any) -> Any:
        return m.Inventory(host="here")

    offers = RestoreSources(store, 0, arena_dir, empty)
    assert offers.learn(offers.survey())
    gather = offers.gather
    monkeypatch.setattr(offers, "gather", never)
    for _ in range(2):  # also when the first restore did not come so far on all ranks
        (found,) = offers.first(World(), None, timeout_s=5)
        assert found.generation == (1, 20) and store.list(LEASES) == []
    offers.open(found)
    assert len(store.list(LEASES)) == 1
    offers.let_go()
    assert store.list(LEASES) == []
    monkeypatch.setattr(offers, "gather", gather)
    (found,) = offers.first(World(), 10, timeout_s=5)
    assert found.generation == (1, 10)
    offers.let_go()

    (found,) = offers.first(World(), None, timeout_s=5)
    assert found.generation == (1, 20)
    store.remove(manifest_path(found.generation))  # retention comes before the lease
    with pytest.raises(NotFound, match="removed after the start found it") as gone:
        offers.open(found)
    (found,) = offers.plan_again(found, gone.value)
    assert found.generation == (1, 10) and len(store.list(LEASES)) == 1
    offers.let_go()
    offers.forget()  # it was restored: what is newest now may be another
    save(store, Generation(1, 25))
    (found,) = offers.first(World(), None, timeout_s=5)
    assert found.generation == (1, 25)
    offers.let_go()


def never(*_: Any) -> Any:
    raise AssertionError("nothing is asked again")


@pytest.mark.promise
@pytest.mark.parametrize("record", [b"damaged", None])
def test_checkpoints_that_a_lost_record_leaves_undecided_are_something_to_continue_from(
    record: bytes | None, store: MemoryStore, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a bucket, where a start reads no manifest of a line that is not known."""
    monkeypatch.setattr(overview, "_MOST_READ", 1)
    for step in (10, 20):
        save(store, Generation(1, step))
    later = 3 if record is None else 2
    if record is not None:
        store.publish(f"{INCARNATIONS}/2.json", record)
    else:
        third = Incarnation(run_id="r", n=later, nonce="n3", parent=(2, 50))
        store.publish(f"{INCARNATIONS}/3.json", seal(third))
    assert is_there_any(offers_of(store, arena_dir, incarnation=1))


def test_a_start_that_found_nothing_or_not_all_leaves_the_choice_to_the_restore(
    store: MemoryStore, arena_dir: Path
) -> None:
    offers = offers_of(store, arena_dir, incarnation=1)
    assert not offers.learn(offers.survey())
    store.remove(ROOT)
    with pytest.raises(RestoreError, match="not there any more"):
        offers.first(World(), None, timeout_s=5)
    commit.open_root(store, "r")
    save(store, Generation(1, 10))
    offers = offers_of(store, arena_dir, incarnation=2)  # a host did not say what it holds
    assert offers.learn(offers.survey())
    save(store, Generation(1, 20))
    (found,) = offers.first(World(), None, timeout_s=5)
    assert found.generation == (1, 20)
    offers.close()


class Silent:
    """Asks hosts that all wait for each other before they answer; some never do."""

    def __init__(self, *silent: str, count: int) -> None:
        self.silent, self.asked = silent, list[str]()
        self.together = threading.Barrier(count)

    def document(self, peer: Peer, path: str, **_: Any) -> bytes:
        self.asked.append(peer.name)
        self.together.wait(20)  # raises where they are asked one after the other
        if peer.name in self.silent:
            raise PeerError("no answer", peer=peer.name)
        return msgspec.msgpack.encode(m.Inventory(peer.name))

    def close(self) -> None: ...


def test_all_hosts_are_asked_at_once_and_those_that_answered_only_once(
    store: MemoryStore, arena_dir: Path
) -> None:
    names = [f"h{n}" for n in range(20)]
    table = tuple(m.HostEntry(id=one, ranks=(0,), address="h", port=1) for one in names)
    hosts = HostTable(table, 0, SECRET)

    def ask(*_: Any) -> Any:
        raise AssertionError("nothing is asked of the keeper here")

    offers = ClusterSources(store, 0, arena_dir, ask, hosts)
    offers.incarnation = 2
    puller = offers.__dict__["_puller"] = Silent("h3", "h7", count=20)
    assert is_there_any(offers)
    assert sorted(puller.asked) == sorted(names)
    puller.asked, puller.together = [], threading.Barrier(2)
    save(store, Generation(1, 10))
    (found,) = offers.first(World(), None, timeout_s=5)
    assert found.generation == (1, 10)
    assert sorted(puller.asked) == ["h3", "h7"]
    puller.asked, puller.together = [], threading.Barrier(20)
    offers.first(World(), None, timeout_s=5)
    assert sorted(puller.asked) == sorted(names)  # later than that anything may have changed
    offers.close()
