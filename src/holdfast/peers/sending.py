"""The bytes of a file go out by ``sendfile`` on a few threads, none of which waits for a peer.

A thread sends while the connection takes bytes, and gives the turn back when it does not: the
event loop waits for the peer then, and a slow peer holds no thread. What the
same does to a loop that sends by itself is in docs/log.md.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from holdfast.peers.rate import TokenBucket
from holdfast.peers.resources import Resource

SLICE_BYTES = 8 << 20
"""As much is sent between two looks at whether it may still be."""
TURN_S = 0.02
PATIENCE_MS = 2
"""How long a thread waits for a peer that reads: it comes back sooner than a turn is handed on."""
NAP_S = 0.1
"""How long a sender without tokens sleeps at most: rates change, and connections end."""


class Interrupted(OSError):
    """What was being sent is offered no longer, or is no longer there."""


class Sender:
    """Sends what connections ask for, all together no faster than ``set_rate`` said last."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="holdfast-send")
        self._bucket = TokenBucket(None, time.monotonic())

    def set_rate(self, rate_bytes_s: int | None) -> None:
        """At most so many bytes a second from now on; None: as many as there are."""
        self._bucket.set_rate(rate_bytes_s, time.monotonic())

    async def send(
        self, to: socket.socket, resource: Resource, start: int, stop: int, *,
        progress_s: float, is_over: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Send bytes ``start`` to ``stop`` of a file, unless it is withdrawn, or all is over.

        Interrupted then; TimeoutError when the peer takes nothing for ``progress_s``.
        """
        at = start
        while at < stop:
            if resource.is_withdrawn or is_over():
                raise Interrupted(f"{resource.path} was withdrawn, or the server closed")
            count = min(SLICE_BYTES, stop - at)
            granted, wait_s = self._bucket.take(count, time.monotonic())
            if not granted:
                await asyncio.sleep(min(wait_s, NAP_S))
                continue
            sent = await self._turn(to, resource, at, granted)
            self._bucket.give_back(granted - sent)
            at += sent
            if sent < granted:
                await writable(to, progress_s)

    async def _turn(self, to: socket.socket, resource: Resource, at: int, count: int) -> int:
        loop = asyncio.get_running_loop()
        turn = loop.run_in_executor(self._threads, _push, to.fileno(), resource, at, count)
        try:
            return await asyncio.shield(turn)
        except asyncio.CancelledError:
            # The thread has the numbers of two descriptors: they must not be closed under it.
            await asyncio.wait([turn])
            raise

    def close(self) -> None:
        """Let the threads go; nothing may be under way."""
        self._threads.shutdown(wait=True)


def _push(to: int, resource: Resource, at: int, count: int) -> int:
    """How many bytes went out until all had, or the turn was over, or the peer took no more."""
    sent, over_s = 0, time.monotonic() + TURN_S
    room = select.poll()
    room.register(to, select.POLLOUT)
    while sent < count and not resource.is_withdrawn and time.monotonic() < over_s:
        try:
            moved = os.sendfile(
                to, resource.descriptor, resource.offset_bytes + at + sent, count - sent
            )
        except BlockingIOError:
            if not room.poll(PATIENCE_MS):
                break
            continue
        if not moved:
            raise Interrupted(f"the file behind {resource.path} became shorter")
        sent += moved
    return sent


async def writable(to: socket.socket, within_s: float) -> None:
    """Wait until the socket takes bytes, or is broken. TimeoutError after ``within_s``."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_writer(to.fileno(), _tell, ready)
    try:
        async with asyncio.timeout(within_s):
            await ready
    finally:
        loop.remove_writer(to.fileno())


def _tell(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
