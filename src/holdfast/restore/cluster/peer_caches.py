"""Reads what the caches of other hosts have, file by file, from their keepers.

A file has one name and the same bytes in every tier. A host that does not answer has nothing.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from holdfast.errors import HoldfastError, NotFound, PeerError, StorageError
from holdfast.events import warn
from holdfast.storage.base import short_read
from holdfast.transport.client import Puller, WantedRange
from holdfast.transport.client_connection import Peer
from holdfast.transport.resources import NO_GENERATION
from holdfast.transport.wire.http import CACHE, cache_path

_OF_RANK = re.compile(r"-([0-9]+)\.safetensors$")
#: How many keepers are asked at the same time.
_AT_ONCE = 256
_files = msgspec.msgpack.Decoder(dict[str, int])


class CacheListings:
    """What the caches of other hosts have; each keeper is asked once. Thread-safe."""

    def __init__(self, puller: Callable[[], Puller]) -> None:
        self.puller = puller
        self._lock = threading.Lock()
        self._files: dict[Peer, dict[str, int]] = {}

    def forget(self) -> None:
        """Ask all anew at the next read."""
        with self._lock:
            self._files.clear()

    def drop(self, peer: Peer) -> None:
        """Read nothing more from this host: each read would wait for it anew."""
        with self._lock:
            self._files[peer] = {}

    def of(self, peers: Collection[Peer]) -> Mapping[Peer, dict[str, int]]:
        """Return paths and sizes of the files of each, asking all at once that were not yet."""
        with self._lock:
            new = [peer for peer in peers if peer not in self._files]
            if new:
                with ThreadPoolExecutor(min(len(new), _AT_ONCE)) as pool:
                    self._files |= zip(new, pool.map(self._ask, new), strict=True)
            return {peer: self._files[peer] for peer in peers}

    def _ask(self, peer: Peer) -> dict[str, int]:
        try:
            return _files.decode(self.puller().document(peer, CACHE))
        except (HoldfastError, msgspec.MsgspecError) as error:
            warn(f"the cache of {peer.name} cannot be read: {error}")
            return {}


class PeerCaches:
    """The caches of other hosts as one place to read from.

    ``peers_of`` returns the keepers that are asked for a path, and for "" those whose files are
    listed.
    """

    def __init__(
        self, listings: CacheListings, peers_of: Callable[[str], Collection[Peer]], url: str
    ) -> None:
        self._listings, self._peers_of, self.url = listings, peers_of, url

    def hosts(self) -> list[PeerCaches]:
        """Return the cache of each host that has anything, as a place of its own."""
        return [
            PeerCaches(self._listings, partial(_only, peer), f"the cache of {peer.name}")
            for peer, files in self._listings.of(self._peers_of("")).items()
            if files
        ]

    def _find(self, path: str) -> tuple[Peer, int]:
        for peer, files in self._listings.of(self._peers_of(path)).items():
            if path in files:
                return peer, files[path]
        raise NotFound(f"{self.url} have no {path}", path=path)

    def exists(self, path: str) -> bool:
        """See ``Store``."""
        try:
            return self._find(path)[1] >= 0
        except NotFound:
            return False

    def size_bytes(self, path: str) -> int:
        """See ``Store``."""
        return self._find(path)[1]

    def list(self, prefix: str) -> list[str]:
        """See ``Store``."""
        below = f"{prefix}/" if prefix else ""
        listings = self._listings.of(self._peers_of(""))
        paths = (path for files in listings.values() for path in files if path.startswith(below))
        return sorted({path[len(below) :].partition("/")[0] for path in paths})

    def read(self, path: str, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        """See ``Store``."""
        whole = self._find(path)[1]
        data = bytearray(whole - offset_bytes if size_bytes is None else size_bytes)
        self.read_into(path, offset_bytes, memoryview(data))
        return bytes(data)

    def read_into(
        self, path: str, offset_bytes: int, buffer: memoryview, *, is_shared: bool = False
    ) -> None:
        """See ``Store``."""
        peer, whole = self._find(path)
        if offset_bytes + len(buffer) > whole:
            raise short_read(path, self.url, offset_bytes, len(buffer), whole)
        wanted = WantedRange(peer, cache_path(path), NO_GENERATION, offset_bytes, buffer)
        try:
            self._listings.puller().pull([wanted])
        except PeerError as error:
            self._listings.drop(peer)
            raise StorageError(
                f"{path} cannot be read from the cache of {peer.name}: {error}", path=path
            ) from error


def _only(peer: Peer, _: str) -> Collection[Peer]:
    return (peer,)


def rank_in(path: str) -> int | None:
    """Return the rank whose image or frozen part has this path; None for other files."""
    found = _OF_RANK.search(path)
    return None if found is None else int(found[1])
