"""Wraps any real store so that it stops, tears, fails or lags on demand.

A test counts the changes an operation makes, then repeats it once for each of them with a stop
exactly there, and examines the inner store: that is the state a crash would have left.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Literal, TypeVar

from holdfast.errors import HoldfastError
from holdfast.storage.base import ImageSink, Lock, Store, flat, os_failure

T = TypeVar("T")
Mode = Literal["stop", "torn", "error", "lost", "late", "twice"]


class Stopped(BaseException):
    """Raised where the process dies. Not an Exception, so that no handler for errors survives
    it.
    """


class PassingStore:
    """Passes every call to ``inner``; subclasses change some of them."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @property
    def url(self) -> str:
        return self.inner.url

    def identity(self) -> str:
        return self._reach().identity()

    def read(self, path: str, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        return self._reach().read(path, offset_bytes, size_bytes)

    def read_into(
        self, path: str, offset_bytes: int, buffer: memoryview, *, is_shared: bool = False
    ) -> None:
        self._reach().read_into(path, offset_bytes, buffer, is_shared=is_shared)

    def size_bytes(self, path: str) -> int:
        return self._reach().size_bytes(path)

    def exists(self, path: str) -> bool:
        return self._reach().exists(path)

    def list(self, prefix: str) -> list[str]:
        return self._reach().list(prefix)

    def publish(self, path: str, data: bytes, *, replace: bool = False) -> None:
        self.inner.publish(path, data, replace=replace)

    def create(self, path: str, size_bytes: int, *, aside: str = "") -> ImageSink:
        return self.inner.create(path, size_bytes, aside=aside)

    def remove(self, path: str) -> None:
        self.inner.remove(path)

    def remove_tree(self, prefix: str) -> None:
        self.inner.remove_tree(prefix)

    def lock(self, name: str, owner: str) -> Lock:
        return self._reach().lock(name, owner)

    def _reach(self) -> Store:
        """Returns the inner store, for one call that changes nothing."""
        return self.inner


class PassingSink:
    """Passes every call to ``inner``."""

    def __init__(self, inner: ImageSink) -> None:
        self.inner = inner

    def write(self, offset_bytes: int, data: memoryview) -> None:
        self.inner.write(offset_bytes, data)

    def finish(self) -> None:
        self.inner.finish()

    def abort(self) -> None:
        self.inner.abort()


class FaultyStore(PassingStore):
    """Lets the first ``fail_at - 1`` changes through and spoils the next (None: only counts).

    A change is a ``publish``, ``create``, ``remove``, ``remove_tree``, or a sink's ``write`` or
    ``finish``; ``changes`` lists them as (operation, path), the spoilt one included. Modes:

    - "stop": Stopped is raised before the change, and by every later call on store and sinks.
    - "torn": the same, but half of the change was made: half the bytes of a write, the first half
      of a tree's names. A publication is atomic and leaves nothing.
    - "error": StorageError (no space left) instead of the change, once; then all is well again.
    - "lost": the change is made, and its answer is lost: StorageError (timed out).
    - "late": the same error, and the change is made when ``late_by`` other changes were, or at
      ``land``; what it cannot do by then, it does not.
    - "twice": the change is made twice, and the second answer is given, as by a client that tried
      again.

    A stop releases the locks taken through this store, as the death of their process would.
    ``abort`` and ``release`` do nothing after it: a dead process cleans nothing up.
    """

    def __init__(
        self, inner: Store, *, fail_at: int | None = None, mode: Mode = "stop", late_by: int = 1
    ) -> None:
        super().__init__(inner)
        self._late: Callable[[], object] | None = None
        self._late_by = late_by
        self.changes: list[tuple[str, str]] = []
        self._fail_at = fail_at
        self._mode = mode
        self._is_stopped = False
        self._locks: list[Lock] = []
        self._mutex = threading.Lock()

    @property
    def is_stopped(self) -> bool:
        """True if the stop has happened."""
        return self._is_stopped

    @property
    def is_late(self) -> bool:
        """True if changes may be made after they were reported as failed."""
        return self._mode == "late"

    def _reach(self) -> Store:
        self._require_alive()
        return super()._reach()

    def publish(self, path: str, data: bytes, *, replace: bool = False) -> None:
        do = partial(self.inner.publish, path, data, replace=replace)
        self.change("publish", path, do)

    def create(self, path: str, size_bytes: int, *, aside: str = "") -> ImageSink:
        do = partial(self.inner.create, path, size_bytes, aside=aside)
        return _FaultySink(self.change("create", path, do, half=do), self, path)

    def remove(self, path: str) -> None:
        self.change("remove", path, partial(self.inner.remove, path))

    def remove_tree(self, prefix: str) -> None:
        do = partial(self.inner.remove_tree, prefix)
        self.change("remove_tree", prefix, do, half=lambda: _remove_half(self.inner, prefix))

    def lock(self, name: str, owner: str) -> Lock:
        lock = super().lock(name, owner)
        self._locks.append(lock)
        return _FaultyLock(lock, self)

    def land(self) -> None:
        """Make the change that was reported as failed and is late, as far as it can be made now."""
        with self._mutex:
            do, self._late = self._late, None
        if do is not None:
            with suppress(HoldfastError):
                do()

    def change(
        self,
        operation: str,
        path: str,
        do: Callable[[], T],
        half: Callable[[], object] = lambda: None,
    ) -> T:
        """Makes one change, or spoils it when it is the chosen one; ``half`` makes half of it."""
        with self._mutex:
            self._require_alive()
            self.changes.append((operation, path))
            number = len(self.changes)
            is_chosen = number == self._fail_at
            if is_chosen and self._mode in ("stop", "torn"):
                self._stop(half)
        if self._fail_at is not None and number > self._fail_at + self._late_by - 1:
            self.land()
        return self._spoil(operation, path, do) if is_chosen else do()

    def _spoil(self, operation: str, path: str, do: Callable[[], T]) -> T:
        if self._mode == "twice":
            if operation != "finish":  # which a store refuses for reasons of its own
                do()
            return do()
        if self._mode == "lost":
            do()
        if self._mode == "late":
            self._late = do
        code = errno.ENOSPC if self._mode == "error" else errno.ETIMEDOUT
        cause = OSError(code, os.strerror(code))
        raise os_failure(operation, path, self.url, cause) from cause

    def _stop(self, half: Callable[[], object]) -> None:
        self._is_stopped = True
        if self._mode == "torn":
            half()
        for lock in self._locks:
            lock.release()
        self._require_alive()

    def _require_alive(self) -> None:
        if self._is_stopped:
            operation, path = self.changes[-1]
            raise Stopped(f"stopped at change {len(self.changes)}: {operation} of {path}")


class _FaultySink(PassingSink):
    def __init__(self, inner: ImageSink, store: FaultyStore, path: str) -> None:
        super().__init__(inner)
        self._store = store
        self._path = path

    def write(self, offset_bytes: int, data: memoryview) -> None:
        half = flat(data)[: data.nbytes // 2]
        # A late write has its own copy: the caller may use its memory again.
        taken = memoryview(bytes(flat(data))) if self._store.is_late else data
        do = partial(self.inner.write, offset_bytes, taken)
        self._store.change("write", self._path, do, lambda: self.inner.write(offset_bytes, half))

    def finish(self) -> None:
        self._store.change("finish", self._path, self.inner.finish)

    def abort(self) -> None:
        if not self._store.is_stopped:
            super().abort()


class _FaultyLock:
    def __init__(self, inner: Lock, store: FaultyStore) -> None:
        self._inner = inner
        self._store = store

    def release(self) -> None:
        if not self._store.is_stopped:
            self._inner.release()

    def __enter__(self) -> _FaultyLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class SlowStore(PassingStore):
    """A disk of ``bytes_per_s``, shared by all its writers and readers.

    ``clock`` and ``sleep`` can be a test's own, so that no test waits.
    """

    def __init__(
        self,
        inner: Store,
        bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._free_at_s = 0.0
        self._mutex = threading.Lock()

    def read(self, path: str, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        data = super().read(path, offset_bytes, size_bytes)
        self.move(len(data))
        return data

    def read_into(
        self, path: str, offset_bytes: int, buffer: memoryview, *, is_shared: bool = False
    ) -> None:
        super().read_into(path, offset_bytes, buffer, is_shared=is_shared)
        self.move(buffer.nbytes)

    def publish(self, path: str, data: bytes, *, replace: bool = False) -> None:
        self.move(len(data))
        super().publish(path, data, replace=replace)

    def create(self, path: str, size_bytes: int, *, aside: str = "") -> ImageSink:
        return _SlowSink(super().create(path, size_bytes, aside=aside), self)

    def move(self, size_bytes: int) -> None:
        """Wait until the disk has moved these bytes after all earlier ones."""
        with self._mutex:
            now_s = self._clock()
            self._free_at_s = max(self._free_at_s, now_s) + size_bytes / self._bytes_per_s
            wait_s = self._free_at_s - now_s
        self._sleep(wait_s)


class _SlowSink(PassingSink):
    def __init__(self, inner: ImageSink, store: SlowStore) -> None:
        super().__init__(inner)
        self._store = store

    def write(self, offset_bytes: int, data: memoryview) -> None:
        self._store.move(data.nbytes)
        super().write(offset_bytes, data)


class StaleListStore(PassingStore):
    """Lists what there was ``lag`` changes ago; all else is as it is now."""

    def __init__(self, inner: Store, lag: int) -> None:
        super().__init__(inner)
        self._lag = lag
        self._before: list[dict[str, list[str]]] = []
        """Of each of the last changes: the directories it changed, as they were listed before."""

    def list(self, prefix: str) -> list[str]:
        seen = (one[prefix] for one in self._before if prefix in one)
        found = next(seen, None)
        return super().list(prefix) if found is None else found

    def publish(self, path: str, data: bytes, *, replace: bool = False) -> None:
        self._note(path)
        super().publish(path, data, replace=replace)

    def create(self, path: str, size_bytes: int, *, aside: str = "") -> ImageSink:
        self._note(path)
        return super().create(path, size_bytes, aside=aside)

    def remove(self, path: str) -> None:
        self._note(path)
        super().remove(path)

    def remove_tree(self, prefix: str) -> None:
        self._note(prefix)
        super().remove_tree(prefix)

    def _note(self, path: str) -> None:
        parts = path.split("/")
        above = ["/".join(parts[:depth]) for depth in range(len(parts))]
        listed = {prefix: self.inner.list(prefix) for prefix in above}
        self._before = [*self._before, listed][-self._lag :] if self._lag else []


class LateFsyncStore(PassingStore):
    """Calls ``delay`` when the bytes are handed over and before anything is made durable."""

    def __init__(self, inner: Store, delay: Callable[[], None]) -> None:
        super().__init__(inner)
        self._delay = delay

    def publish(self, path: str, data: bytes, *, replace: bool = False) -> None:
        self._delay()
        super().publish(path, data, replace=replace)

    def create(self, path: str, size_bytes: int, *, aside: str = "") -> ImageSink:
        return _LateSink(super().create(path, size_bytes, aside=aside), self._delay)


class _LateSink(PassingSink):
    def __init__(self, inner: ImageSink, delay: Callable[[], None]) -> None:
        super().__init__(inner)
        self._delay = delay

    def finish(self) -> None:
        self._delay()
        super().finish()


def _remove_half(store: Store, prefix: str) -> None:
    names = store.list(prefix)
    for name in names[: (len(names) + 1) // 2]:
        path = f"{prefix}/{name}"
        if store.exists(path):
            store.remove(path)
        else:
            store.remove_tree(path)
