"""Leases keep a checkpoint from removal while it is read; a killed reader's lease expires.

A lease is a small document below ``readers/`` that names a checkpoint's directories. Its reader
renews it every 20 seconds. A remover watches leases by its own clock: a lease that did not change
for two minutes is over, whatever time is written in it. So clocks that differ between hosts do not
matter, and the lease of a reader that was killed, or whose host was lost, expires.

For one checkpoint, the two sides do

    reader   A  read the manifest   P  publish the lease       C  does the manifest stand?
    remover  R  read the leases     W  remove the manifest     S  read the leases, then sweep

A reader for which C finds the manifest reads on undisturbed: W comes after C, hence S after P, and
files that a lease names are not swept at S. A reader for which C finds none lists again: there is a
newer checkpoint. R only makes that rare, because a checkpoint being read keeps its manifest too.
tests/persist/test_leases.py interleaves both sides at every step.

Where no lease can be written, as below a root that is mounted read-only, reading goes on without
one. A lease that cannot be read protects nothing, and no lease lasts longer than a day.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.catalogue import LEASES, ROOT, layout_path, lease_path, manifest_path, read_bounded
from holdfast.errors import HoldfastError, NotFound
from holdfast.format.manifest import Generation, Lease, Manifest, seal, unseal
from holdfast.storage.base import Store, publish_transient, remove_transient

RENEW_S = 20.0
#: Seconds for which a lease holds that is not renewed.
LEASE_S = 120.0
#: The longest that any lease holds: a checkpoint read for longer must be pinned.
LONGEST_S = 24 * 3600.0
#: Storage that hangs must not block a reader that has finished.
_LAST_RENEWAL_S = 5.0
#: More readers than these are not watched.
MAX_LEASES = 1024
MAX_LEASE_BYTES = 1 << 20
#: Of the longest names they take less than that.
MAX_DIRECTORIES = 5000
_PAUSE_S = 0.5
_NAME = re.compile(r"([0-9a-f]{32})\.json")


class ReadLease:
    """The lease of one reader, on one checkpoint after the other until ``end``. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store, self._path = store, lease_path(uuid.uuid4().hex)
        self._process = os.getpid()
        self._turn = threading.Lock()
        self._ended = threading.Event()
        self._lease: Lease | None = None
        self._renewing: threading.Thread | None = None

    def take(self, manifest: Manifest, others: Iterable[Manifest] = ()) -> bool:
        """Lease the directories of ``manifest``, and none from before; True if the manifest still
        exists.

        True: all of it stays until ``end``, if a lease can be written there. ``others``: the files
        of these are leased too, as far as they go into one lease.
        """
        directories = set(manifest.directories)
        for other in others:
            if len(directories) + len(other.directories) > MAX_DIRECTORIES:
                break
            directories |= other.directories
        lease = Lease(
            run_id=manifest.run_id,
            incarnation=manifest.incarnation,
            step=manifest.step,
            directories=tuple(sorted(directories)),
            layout=manifest.layout,
            reader=f"process {self._process} on {socket.gethostname()}",
            created_s=time.time(),
        )
        with self._turn:
            self._lease = lease
            with suppress(HoldfastError):  # read-only, full: then without
                publish_transient(self._store, self._path, seal(lease))
                if self._renewing is None:
                    self._renewing = self._begin_renewing()
        return self._store.exists(manifest_path(manifest.generation))

    def end(self) -> None:
        """End the lease. Never raises; a second call does nothing."""
        if self._ended.is_set() or self._process != os.getpid():
            return
        self._ended.set()
        if self._lease is None or not self._turn.acquire(timeout=_LAST_RENEWAL_S):
            return  # it ends by itself
        try:
            with suppress(HoldfastError):
                remove_transient(self._store, self._path)
        finally:
            self._turn.release()

    def end_with(self, owner: object) -> None:
        """End when ``owner`` is collected, at the latest when the process exits."""
        weakref.finalize(owner, self.end)

    def renew(self) -> bool:
        """Renew the lease; False once that is no longer needed."""
        with self._turn:
            if self._lease is None or self._ended.is_set():
                return False
            self._lease = replace(self._lease, renewals=self._lease.renewals + 1)
            with suppress(HoldfastError):
                # Never where the root has gone: publishing would make a directory there.
                if self._store.exists(self._path) or self._store.exists(ROOT):
                    publish_transient(self._store, self._path, seal(self._lease))
        return True

    def _begin_renewing(self) -> threading.Thread:
        arguments = weakref.ref(self), self._ended, time.monotonic() + LONGEST_S
        thread = threading.Thread(
            target=_keep_renewing, args=arguments, name="holdfast-lease", daemon=True
        )
        thread.start()
        return thread


def _keep_renewing(
    to_lease: weakref.ref[ReadLease], ended: threading.Event, until_s: float
) -> None:
    while not ended.wait(RENEW_S) and time.monotonic() < until_s:
        lease = to_lease()
        if lease is None or not lease.renew():
            return
        del lease


class _Seen(msgspec.Struct):
    data: bytes
    first_s: float
    changed_s: float


class LeaseWatch(Struct):
    """Tracks which files readers lease, for a remover that holds the root's lock.

    A lease that it sees for the first time holds, and from then on as long as it is seen to change.
    """

    store: Store
    clock: Callable[[], float] = time.monotonic
    _seen: dict[str, _Seen] = field(default_factory=dict)

    def held(self) -> tuple[Lease, ...]:
        """Returns the leases that hold now. Those that are over are removed."""
        now_s = self.clock()
        there = {
            name: data or self._last_read(name)
            for name in self._names()
            if (data := self._read(name)) is not None
        }
        self._seen = {name: self._look(name, data, now_s) for name, data in there.items()}
        for name in [name for name in there if self._is_over(name, now_s)]:
            with suppress(HoldfastError):  # another user's: it stays, and holds nothing
                self.store.remove(f"{LEASES}/{name}")
        holding = (
            data
            for name, data in there.items()
            if not self._is_over(name, now_s) and now_s - self._seen[name].first_s < LONGEST_S
        )
        return tuple(one for one in map(_lease_of, holding) if one is not None)

    def generations(self) -> frozenset[Generation]:
        """Returns the checkpoints that are being read."""
        return frozenset(one.generation for one in self.held())

    def paths(self) -> frozenset[str]:
        """Returns the paths that must not be swept now, layouts too; call it when no manifest names
        them.
        """
        return leased_paths(self.held())

    def settle(self, sleep: Callable[[float], None] = time.sleep) -> None:
        """Wait until each present lease has changed or is over: two minutes at most."""
        self.held()
        waiting = {name: seen.data for name, seen in self._seen.items()}
        until_s = self.clock() + LEASE_S
        while waiting and self.clock() < until_s:
            sleep(_PAUSE_S)
            self.held()
            waiting = {
                name: data
                for name, data in waiting.items()
                if (seen := self._seen.get(name)) is not None and seen.data == data
            }
        self.held()

    def _last_read(self, name: str) -> bytes:
        """A lease that cannot be read now may be replaced at this moment: it is what it was."""
        return self._seen[name].data if name in self._seen else b""

    def _names(self) -> list[str]:
        return [name for name in self.store.list(LEASES) if _NAME.fullmatch(name)][:MAX_LEASES]

    def _read(self, name: str) -> bytes | None:
        """Reads a lease's content; None when it has gone, empty when it cannot be read."""
        try:
            return read_bounded(self.store, f"{LEASES}/{name}", MAX_LEASE_BYTES)
        except NotFound:
            return None
        except HoldfastError:
            return b""

    def _look(self, name: str, data: bytes, now_s: float) -> _Seen:
        before = self._seen.get(name)
        if before is None:
            return _Seen(data, now_s, now_s)
        changed_s = before.changed_s if before.data == data else now_s
        return _Seen(data, before.first_s, changed_s)

    def _is_over(self, name: str, now_s: float) -> bool:
        return now_s - self._seen[name].changed_s >= LEASE_S


def leased_paths(held: Iterable[Lease]) -> frozenset[str]:
    """Returns the paths that these leases hold, layouts too."""
    held = list(held)
    layouts = (layout_path(one.layout) for one in held)
    return frozenset(path for one in held for path in one.directories).union(layouts)


def _lease_of(data: bytes) -> Lease | None:
    try:
        return unseal(Lease, data, "a lease")
    except HoldfastError:
        return None
