"""Runs work beside the loop of the keeper: images that other hosts write, calls that block."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from holdfast.coordinator.layouts import Agreement, Tables, agree_layout
from holdfast.errors import HoldfastError, PersistFailed, StorageError
from holdfast.format.manifest import Manifest
from holdfast.geometry.layout import Layout
from holdfast.persist.frozen_parts import StoredPart
from holdfast.protocol.image_plan import ImageSizes, plan_sizes
from holdfast.storage.base import Store, free_bytes

# Stands for the images of an attempt that another host's keeper writes, toward the persister.


T = TypeVar("T")
STALL_S = 7200.0
"""Timeout without a receipt or progress of a ring or drain: a large image takes its time."""
END_S = 60.0
"""Timeout for ending after cancellation."""
_LOOK_S = 0.5


class RemoteImages:
    """The images of one attempt on one other host. ``begin`` and ``stop`` are called on the
    loop.
    """

    def __init__(
        self,
        host: str,
        ranks: Set[int],
        begin: Callable[[], None],
        stop: Callable[[str], None],
        *,
        stall_s: float = STALL_S,
        end_s: float = END_S,
    ) -> None:
        self.host, self.ranks = host, ranks
        self.stored: dict[int, StoredPart] = {}
        self.values = b""
        """Values of rank 0's image, if it is among them."""
        self._begin, self._stop = begin, stop
        self._stall_s, self._end_s = stall_s, end_s
        self.must_have_all = True
        """Without a receipt for each of ``ranks`` the write has failed."""
        self.is_lost = False
        """True if no other try can succeed."""
        self._moved_s = time.monotonic()
        self._is_aborted = self.has_ended = False
        self._why_aborted = ""
        self._ended: Callable[[RemoteImages], None] = lambda _: None
        self._failure = ""

    def write(self, ended: Callable[[RemoteImages], None]) -> None:
        """Have the images written; ``ended`` is called with this object when that is over. On a
        thread of the persister.
        """
        self._ended = ended
        self.progressed()
        if self._is_aborted:
            self.end(self._why_aborted)
        else:
            self._begin()
            if self._is_aborted:  # meanwhile: the order may have been sent after that to stop
                self._stop(self._why_aborted)

    def failure(self) -> str:
        """Return why the write that ended is incomplete, "" if it is complete."""
        is_enough = not self.must_have_all or self.stored.keys() == self.ranks
        if self._failure or is_enough:
            return self._failure
        return (
            f"host {self.host} gave no receipt for ranks {sorted(self.ranks - self.stored.keys())}"
        )

    def stalled(self) -> str:
        """Return why this host is waited for no longer, "" while it is: a keeper may live and yet
        hang.
        """
        quiet_s = time.monotonic() - self._moved_s
        if quiet_s <= (self._end_s if self._is_aborted else self._stall_s):
            return ""
        self._stop("nothing was heard of it for too long")
        return (
            f"host {self.host} has written nothing for {quiet_s:.0f} s: look at its keeper and at "
            "its way to storage"
        )

    def progressed(self) -> None:
        """Record progress."""
        self._moved_s = time.monotonic()

    def abort(self, reason: str) -> None:
        """Cancel the write; see ``write_all``."""
        if not self.has_ended:
            if not self._is_aborted:
                self._is_aborted, self._why_aborted = True, reason
                self.progressed()  # restarts the timeout: a short time remains to end
            self._stop(reason)

    def receive(self, stored: StoredPart, values: bytes) -> None:
        """Handle the receipt for one image."""
        self.progressed()
        if stored.image.rank in self.ranks:
            self.stored[stored.image.rank] = stored
            self.values = self.values or values

    def end(self, reason: str = "", *, is_lost: bool = False) -> None:
        """Handle the end of the write; ``reason``: why it is incomplete, "" if it is complete."""
        if not self.has_ended:
            self.is_lost = is_lost
            self._failure = f"host {self.host}: {reason}" if reason else ""
            self.has_ended = True
            self._ended(self)


def write_all(
    shares: Collection[RemoteImages], failed: Callable[[str], None] = lambda _: None
) -> list[StoredPart]:
    """Have the images of all these hosts written; blocks. One thread waits for thousands of hosts.

    The first failure is told to ``failed``, which aborts the others, and raised as PersistFailed
    when all have ended.
    """
    ended: queue.SimpleQueue[RemoteImages] = queue.SimpleQueue()
    waiting, reasons = dict.fromkeys(shares), list[str]()
    for share in shares:
        share.write(ended.put)
    while waiting:
        try:
            over = ended.get(timeout=_LOOK_S)
            found = {over: over.failure()}
        except queue.Empty:
            found = {share: why for share in waiting if (why := share.stalled())}
        for share, why in found.items():
            waiting.pop(share, None)
            reasons += [why] if why else []
            if why and len(reasons) == 1:
                failed(why)
    if reasons:
        raise PersistFailed(reasons[0])
    return [stored for share in shares for stored in share.stored.values()]


# Runs blocking work beside the keeper's event loop, and returns its results to the loop.


#: So many new objects are passed through in 10 ms.
_MANY_OBJECTS = 100_000


class Background:
    """Two helper threads, and background tasks. Created on the loop it serves."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._helpers = ThreadPoolExecutor(2, thread_name_prefix="holdfast-keeper")
        self._computing, self._lock = 0, threading.Lock()

    async def in_thread(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Run a function that may block on a helper thread, and return its result."""
        return await self._loop.run_in_executor(self._helpers, function, *arguments)

    async def agree_layout(
        self, find: Callable[[Tables], bytes | None], tables: Tables, held: Mapping[str, bytes]
    ) -> Agreement:
        """Agree the layout of these tables on a helper thread; the reason, where that is
        impossible.
        """
        try:
            found = await self.in_thread(self._compute, agree_layout, find, tables, held)
            return cast(Agreement, found)
        except RuntimeError as error:  # no thread can be started
            return Agreement(reason=f"its layout could not be agreed: {error}")

    async def plan_images(self, layout: Layout | bytes, ranks: Iterable[int]) -> ImageSizes:
        """Plan these ranks' images on a helper thread; the reason, where that is impossible."""
        try:
            return cast(ImageSizes, await self.in_thread(self._compute, plan_sizes, layout, ranks))
        except RuntimeError as error:  # no thread can be started
            return ImageSizes({}, f"its images could not be planned: {error}")

    def _compute(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Run a function that makes many objects, on a helper thread.

        The garbage collector holds all threads while it passes through objects, for 0.1 s if they
        are the leaves of a large layout: it waits until then, and passes through those no more.
        """
        with self._lock:
            self._computing += 1
            gc.disable()
        try:
            return function(*arguments)
        finally:
            with self._lock:
                self._computing -= 1
                if not self._computing:
                    if gc.get_count()[0] > _MANY_OBJECTS:
                        gc.freeze()
                    gc.enable()

    def run_beside(
        self, name: str, work: Callable[[], T], done: Callable[[T | None, str], None]
    ) -> None:
        """Run ``work`` on a thread of its own; call ``done`` on the loop with the result, or with
        None and the reason of its failure.
        """

        def run() -> None:
            result, why = None, ""
            try:
                result = work()
            except (HoldfastError, OSError) as error:
                why = str(error) or type(error).__name__
            except Exception as error:  # somebody waits for the result, whatever the error is
                why = f"{type(error).__name__}: {error}"
            self.from_thread(lambda: done(result, why))

        threading.Thread(target=run, name=name, daemon=True).start()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on the loop; its failure is printed to the keeper's log."""
        task = self._loop.create_task(coroutine)
        task.add_done_callback(_complain)

    def from_thread(self, function: Callable[[], None]) -> None:
        """Schedule a call of ``function`` on the loop, from another thread; none once it ended."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody hears of it any more
            self._loop.call_soon_threadsafe(function)


def _complain(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        traceback.print_exception(task.exception(), file=sys.stderr)


def is_full(error: BaseException, store: Store, like: Manifest) -> bool:
    """Return True if there was no room, here or for another host; ``like``: one of its size."""
    fields = error.fields if isinstance(error, StorageError) else {}
    free = free_bytes(store)
    is_told = fields.get("errno") in (errno.ENOSPC, errno.EDQUOT)
    return is_told or (free is not None and free < like.size_bytes)
