"""Reads what the caches of other hosts have, file by file, from their keepers.

A file has one name and the same bytes in every tier. A host that does not answer has nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec

from holdfast.errors import HoldfastError, NotFound, PeerError, StorageError
from holdfast.events import Warned, emit
from holdfast.storage.base import short_read
from holdfast.transport.client import Puller, WantedRange
from holdfast.transport.client_connection import Peer
from holdfast.transport.resources import NO_GENERATION
from holdfast.transport.wire.http import CACHE, cache_path

#: How many keepers are asked at the same time.
_AT_ONCE = 256
_files = msgspec.msgpack.Decoder(dict[str, int])


class PeerCaches:
    """The caches of other hosts as one place to read from; asked when something is first read.

    ``puller`` and ``peers`` return the client and the keepers, by host. Thread-safe.
    """

    url = "the caches of other hosts"

    def __init__(
        self, puller: Callable[[], Puller], peers: Callable[[], Mapping[str, Peer]]
    ) -> None:
        self._puller, self._peers = puller, peers
        self._lock = threading.Lock()
        self._found: dict[str, tuple[Peer, int]] | None = None

    def forget(self) -> None:
        """Ask again at the next read."""
        with self._lock:
            self._found = None

    def _files(self) -> dict[str, tuple[Peer, int]]:
        with self._lock:
            if self._found is None:
                self._found = self._ask()
            return self._found

    def _ask(self) -> dict[str, tuple[Peer, int]]:
        peers = list(self._peers().values())
        found: dict[str, tuple[Peer, int]] = {}
        if peers:
            with ThreadPoolExecutor(min(len(peers), _AT_ONCE)) as pool:
                for peer, files in zip(peers, pool.map(self._ask_host, peers), strict=True):
                    found |= {path: (peer, size_bytes) for path, size_bytes in files.items()}
        return found

    def _ask_host(self, peer: Peer) -> dict[str, int]:
        try:
            return _files.decode(self._puller().document(peer, CACHE))
        except (HoldfastError, msgspec.MsgspecError) as error:
            emit(Warned(message=f"the cache of {peer.name} cannot be read: {error}"))
            return {}

    def _find(self, path: str) -> tuple[Peer, int]:
        found = self._files().get(path)
        if found is None:
            raise NotFound(f"no other host's cache has {path}", path=path)
        return found

    def exists(self, path: str) -> bool:
        """See ``Store``."""
        return path in self._files()

    def size_bytes(self, path: str) -> int:
        """See ``Store``."""
        return self._find(path)[1]

    def list(self, prefix: str) -> list[str]:
        """See ``Store``."""
        below = f"{prefix}/" if prefix else ""
        inside = (path[len(below) :] for path in self._files() if path.startswith(below))
        return sorted({path.partition("/")[0] for path in inside})

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
            self._puller().pull([wanted])
        except PeerError as error:
            self._drop(peer)
            raise StorageError(
                f"{path} cannot be read from the cache of {peer.name}: {error}", path=path
            ) from error

    def _drop(self, peer: Peer) -> None:
        """Read nothing more from this host: each read would wait for it anew."""
        with self._lock:
            left = (self._found or {}).items()
            self._found = {path: found for path, found in left if found[0] != peer}
