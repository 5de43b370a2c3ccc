"""The caches of several hosts beside one root: each is judged by its own record of a start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from holdfast.catalogue import manifest_path, read_incarnation
from holdfast.errors import NotFound
from holdfast.format.manifest import Generation, seal
from holdfast.persist import commit
from holdfast.restore.cluster.peer_caches import CacheListings, PeerCaches
from holdfast.storage.base import Store
from holdfast.storage.memory import MemoryStore
from holdfast.storage.tiered import TieredStore
from holdfast.transport.client import WantedRange
from holdfast.transport.client_connection import Peer
from holdfast.transport.wire.http import cache_path
from support.checkpoints.keeper_roots import paths_in, save_steps

N = 3


class Hosts:
    """Answers for the keepers of these hosts, as a Puller."""

    def __init__(self, stores: dict[str, Store]) -> None:
        self.stores = stores
        self.peers = [Peer(name, "127.0.0.1", 1) for name in stores]

    def document(self, peer: Peer, _: str) -> bytes:
        store = self.stores[peer.name]
        return msgspec.msgpack.encode({path: store.size_bytes(path) for path in paths_in(store)})

    def pull(self, wanted: Sequence[WantedRange]) -> None:
        for one in wanted:
            store = self.stores[one.peer.name]
            (path,) = (path for path in paths_in(store) if cache_path(path) == one.path)
            store.read_into(path, one.start, one.into)

    def beside(self, cache: Store, root: Store) -> TieredStore:
        listings = CacheListings(lambda: cast(Any, self))
        tiered = TieredStore(cache, root)
        none = PeerCaches(listings, lambda _: (), "the caches of these ranks' hosts")
        tiered.read_also(none, PeerCaches(listings, lambda _: self.peers, "the caches of others"))
        return tiered


def cache_of(*steps: int, nonce: str = "") -> MemoryStore:
    """A cache with these steps of one start, and its record: of another start under ``nonce``."""
    store = MemoryStore("cache")
    save_steps(store, steps, N)
    if nonce:
        record = replace(read_incarnation(store, N), nonce=nonce)
        store.publish(f"incarnations/{N}.json", seal(record), replace=True)
    return store


@pytest.mark.promise
@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_what_a_host_has_of_another_start_of_a_number_is_not_offered(first: str) -> None:
    stores: dict[str, Store] = {"ours": cache_of(50, 70), "theirs": cache_of(70, 100, nonce="y")}
    both, theirs = manifest_path(Generation(N, 70)), manifest_path(Generation(N, 100))
    stores["theirs"].publish(both, b"of another start", replace=True)
    root, own = MemoryStore("root"), MemoryStore("own")
    for store in (root, own):
        commit.open_root(store, "r")
    commit.record_incarnation(root, read_incarnation(stores["ours"], N))
    hosts = Hosts({first: stores.pop(first), **stores})
    tiered = hosts.beside(own, root)
    assert tiered.list("manifests") == ["3-50.json", "3-70.json"]
    assert tiered.read(both) == hosts.stores["ours"].read(both)
    assert not tiered.exists(theirs)
    with pytest.raises(NotFound):
        tiered.read(theirs)


@pytest.mark.promise
def test_a_manifest_of_another_start_in_the_own_cache_is_not_read() -> None:
    hosts, own = Hosts({"ours": cache_of(70)}), cache_of(70, nonce="y")
    path = manifest_path(Generation(N, 70))
    own.publish(path, b"of another start", replace=True)
    root = MemoryStore("root")
    commit.open_root(root, "r")
    commit.record_incarnation(root, read_incarnation(hosts.stores["ours"], N))
    tiered = hosts.beside(own, root)
    assert tiered.list("manifests") == ["3-70.json"]
    assert tiered.read(path) == hosts.stores["ours"].read(path)
