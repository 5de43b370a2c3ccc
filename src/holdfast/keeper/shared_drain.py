"""Drains one checkpoint from the caches of several hosts together: each copies what it has.

A drain that is closed ends on all hosts, and is not published.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from holdfast.errors import PersistFailed
from holdfast.events import warn
from holdfast.format.manifest import Manifest
from holdfast.keeper.jobs import RemoteImages, write_all

NOWHERE = "are in no cache of the hosts that are here"
CLOSED = "its cache was closed: who opens it next goes on with it"


class SharedDrain:
    """The drain under way of all hosts. One thread runs it; any thread closes it, for good."""

    def __init__(self) -> None:
        self._lock, self.is_closed = threading.Lock(), False
        self._shares: Sequence[RemoteImages] = ()
        self._absent = ""
        """What was told last of a host that did not take part."""

    def close(self) -> None:
        """Have the drain under way end soon on all hosts, and every later one at once."""
        with self._lock:
            self.is_closed, shares = True, self._shares
        for share in shares:
            share.abort(CLOSED)

    def require_open(self) -> None:
        """Raise PersistFailed once it is closed."""
        if self.is_closed:
            raise PersistFailed(CLOSED)

    def run(
        self, others: Callable[[], Sequence[RemoteImages]], copy_own: Callable[[], None]
    ) -> tuple[Sequence[RemoteImages], BaseException | None]:
        """Copy this host's images while the others copy theirs; return their shares, and why one
        of them failed.
        """
        self.require_open()
        shares = others()
        with self._lock:
            self.require_open()
            self._shares = shares
        try:
            return shares, _copy_beside(shares, copy_own)
        finally:
            self._shares = ()

    def tell_absent(self, manifest: Manifest, failure: BaseException | None) -> None:
        """Warn of a host that did not take part where all was there without it: once for each
        reason.
        """
        reason = "" if failure is None else str(failure)
        if reason and reason != self._absent:
            text = f"{manifest.generation} was drained without the part of a host: {reason}"
            warn(text)
        self._absent = reason


def _copy_beside(
    shares: Sequence[RemoteImages], copy_own: Callable[[], None]
) -> BaseException | None:
    with ThreadPoolExecutor(1, thread_name_prefix="holdfast-drain") as pool:
        there = pool.submit(write_all, shares)
        try:
            copy_own()
        except BaseException as error:
            for share in shares:
                share.abort(str(error))
            raise
        return there.exception()
