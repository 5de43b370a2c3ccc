"""Reads one root that lies in two tiers: of each file, what the nearer one has, else the other.

A checkpoint has the same names and the same bytes in both. What is written goes to the root alone.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

from holdfast.errors import FormatError, HoldfastError, NotFound, StorageError
from holdfast.events import warn
from holdfast.format.checksum import checksum, text
from holdfast.format.manifest import Incarnation, unseal
from holdfast.storage.base import (
    ImageSink,
    Lock,
    ReadableStore,
    Store,
    publish_transient,
    read_at_most,
    remove_transient,
    settle_s,
)

R = TypeVar("R")
#: Directories of documents, of which the root's are asked for first.
_DOCUMENTS = frozenset({"manifests", "incarnations", "pins", "readers", "holdfast.json"})
_MANIFESTS, _INCARNATIONS = "manifests", "incarnations"


def cache_place(directory: str, run_id: str, root_id: str, host: str = "") -> str:
    """Returns the cache of one run on this host; ``root_id`` is the identity of its root.

    ``host``: the name that this host was given, where several hosts share a machine.
    """
    name = f"{run_id}+{text(checksum(root_id.encode()))}"
    return os.path.join(directory, f"{name}@{host}" if host else name)


def cache_places(directory: str, run_id: str, root_id: str) -> list[str]:
    """Returns the caches of one run on this machine: of several hosts, where they share it."""
    place = cache_place(directory, run_id, root_id)
    others = sorted(glob.glob(f"{glob.escape(place)}@*"))
    return [place, *others] if os.path.isdir(place) or not others else others


class TieredStore:
    """``root`` with ``cache`` before it, as one store; between them the caches of other hosts."""

    def __init__(self, cache: Store, root: Store) -> None:
        self._root = root
        self._caches: tuple[ReadableStore, ...] = (cache,)
        self._last: tuple[ReadableStore, ...] = ()
        self._distrusted: set[str] = set()
        self._foreign: dict[tuple[str, str], bool] = {}
        self._recorded: dict[tuple[str, str], Incarnation] = {}
        """The records of starts that were read, by tier and number."""
        self._warned: set[str] = set()
        self.settle_s = settle_s(root)

    def read_also(self, near: ReadableStore, far: ReadableStore) -> None:
        """Read these, too, the one before the root, the other after it: the caches of other hosts,
        which have the images of other ranks.
        """
        self._caches += (near,)
        self._last += (far,)

    @property
    def url(self) -> str:
        """See ``Store``: of the root."""
        return self._root.url

    def identity(self) -> str:
        """See ``Store``: of the root."""
        return self._root.identity()

    def distrust(self, path: str) -> bool:
        """Read what is beside ``path`` from the root, where the root has it; False if nothing
        changes by that.
        """
        directory = path.rpartition("/")[0]
        if directory in self._distrusted:
            return False
        self._distrusted.add(directory)
        try:
            is_cached = any(cache.exists(path) for cache in (*self._caches, *self._last))
            return is_cached and self._root.exists(path)
        except HoldfastError:
            return False

    def read(self, path: str, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        """See ``Store``."""
        return self._first(path, lambda store: store.read(path, offset_bytes, size_bytes))

    def read_into(
        self, path: str, offset_bytes: int, buffer: memoryview, *, is_shared: bool = False
    ) -> None:
        """See ``Store``."""
        self._first(
            path, lambda store: store.read_into(path, offset_bytes, buffer, is_shared=is_shared)
        )

    def size_bytes(self, path: str) -> int:
        """See ``Store``."""
        return self._first(path, lambda store: store.size_bytes(path))

    def read_at_most(self, path: str, limit_bytes: int) -> bytes | int:
        """See ``storage.base.read_at_most``: in as many requests as its tier takes for it."""
        return self._first(path, lambda store: read_at_most(store, path, limit_bytes))

    def exists(self, path: str) -> bool:
        """See ``Store``."""

        def look(store: ReadableStore) -> bool:
            if not store.exists(path):
                raise NotFound(f"{store.url} has no {path}", path=path)
            return True

        try:
            return self._first(path, look)
        except NotFound:
            return False

    def _first(self, path: str, read: Callable[[ReadableStore], R]) -> R:
        """Read from the first tier that has it; what one cannot read now, from the next. Of
        documents the root's word counts, or its error.
        """
        missing: HoldfastError | None = None
        failed: StorageError | None = None
        for store in self._order(path):
            try:
                found = read(store)
            except NotFound as error:
                missing = error if missing is None or store is self._root else missing
            except StorageError as error:
                if store is not self._root:
                    self._warn(store, error)
                elif path.partition("/")[0] in _DOCUMENTS:
                    raise
                else:
                    failed = error
            else:
                if not self._has_another(store, path):
                    return found
        raise failed or missing or NotFound(f"no tier has {path}", path=path)

    def _warn(self, store: ReadableStore, error: StorageError) -> None:
        if store.url not in self._warned:
            self._warned.add(store.url)
            text = f"the cache {store.url} cannot be read, the next tier is read instead: {error}"
            warn(text)

    def list(self, prefix: str) -> list[str]:
        """See ``Store``: the names of all; of manifests, none of another start in a cache, nor of
        one that descends from another.
        """
        found = set(self._root.list(prefix))
        for cache in (*self._caches, *self._last):
            for one in _hosts(cache) if prefix == _MANIFESTS else (cache,):
                found |= self._names_in(one, prefix, found)
        return sorted(found)

    def _names_in(self, cache: ReadableStore, prefix: str, known: set[str]) -> set[str]:
        if prefix in _DOCUMENTS and prefix not in (_MANIFESTS, _INCARNATIONS):
            return set()
        try:
            names = set(cache.list(prefix)) - known
        except StorageError as error:
            self._warn(cache, error)
            return set()
        if prefix == _MANIFESTS:
            names = {name for name in names if not self._is_foreign(cache, name.partition("-")[0])}
        return names

    def _order(self, path: str) -> Iterable[ReadableStore]:
        head = path.partition("/")[0]
        is_root_first = head in _DOCUMENTS or path.rpartition("/")[0] in self._distrusted
        if head == _MANIFESTS:
            return self._one_by_one()
        if is_root_first:
            return (self._root, *self._caches, *self._last)
        return (*self._caches, self._root, *self._last)

    def _one_by_one(self) -> Iterator[ReadableStore]:
        yield self._root  # no other host is asked for what it has
        for cache in (*self._caches, *self._last):
            yield from _hosts(cache)

    def _has_another(self, store: ReadableStore, path: str) -> bool:
        """Return True for a manifest in a cache that is of another start than the root's."""
        head, _, name = path.partition("/")
        is_cached = head == _MANIFESTS and store is not self._root
        return is_cached and self._is_foreign(store, name.partition("-")[0])

    def _is_foreign(self, cache: ReadableStore, n: str) -> bool:
        """Return True if the cache knows another start of this number than the root, or of an
        ancestor's. What the root has no record of is the start that the first cache knows.
        """
        line: list[str] = []
        while (is_another := self._foreign.get((cache.url, n))) is None:
            line.append(n)
            try:
                there = self._record(cache, n)
            except StorageError as error:  # whose it is cannot be told
                self._warn(cache, error)
                return True
            ours = self._ours(n)
            parent = None if there is None else there.parent
            is_another = there is not None and ours is not None and ours.nonce != there.nonce
            if is_another or parent is None or parent[0] >= int(n):
                break
            n = str(parent[0])
        self._foreign.update({(cache.url, one): is_another for one in line})
        return is_another

    def _ours(self, n: str) -> Incarnation | None:
        """Return the record of the start that has this number here."""
        found = self._record(self._root, n)
        for cache in (*self._caches, *self._last):
            for one in _hosts(cache) if found is None else ():
                with suppress(StorageError):  # then another one says it, or nobody
                    found = found or self._record(one, n)
        return found

    def _record(self, store: ReadableStore, n: str) -> Incarnation | None:
        path = f"{_INCARNATIONS}/{n}.json"
        if (store.url, n) not in self._recorded:
            try:
                self._recorded[store.url, n] = unseal(Incarnation, store.read(path), path)
            except (NotFound, FormatError):
                return None
        return self._recorded[store.url, n]

    # What is written, is the root's.

    def publish(self, path: str, data: bytes, *, replace: bool = False) -> None:
        """See ``Store``."""
        self._root.publish(path, data, replace=replace)

    def publish_transient(self, path: str, data: bytes) -> None:
        """See ``storage.base.publish_transient``."""
        publish_transient(self._root, path, data)

    def remove_transient(self, path: str) -> None:
        """See ``storage.base.remove_transient``."""
        remove_transient(self._root, path)

    def create(self, path: str, size_bytes: int, *, aside: str = "") -> ImageSink:
        """See ``Store``."""
        return self._root.create(path, size_bytes, aside=aside)

    def remove(self, path: str) -> None:
        """See ``Store``."""
        self._root.remove(path)

    def remove_tree(self, prefix: str) -> None:
        """See ``Store``."""
        self._root.remove_tree(prefix)

    def lock(self, name: str, owner: str) -> Lock:
        """See ``Store``."""
        return self._root.lock(name, owner)


def _hosts(cache: ReadableStore) -> tuple[ReadableStore, ...]:
    """Returns the caches of single hosts that this one stands for; each may know other starts."""
    hosts = getattr(cache, "hosts", None)
    return (cache,) if hosts is None else tuple(hosts())
