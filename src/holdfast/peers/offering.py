"""What a server offers, said from any thread: done when the call returns.

A ``PeerServer`` belongs to its event loop. Whoever works on threads beside it must know that bytes
are withdrawn before they are written, and so waits for the loop; never for long, for the loop never
waits itself. A loop that does not answer is an error.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from holdfast.errors import DeadlineExceeded
from holdfast.peers.resources import NO_GENERATION
from holdfast.peers.server import PeerServer

PATIENCE_S = 10.0
T = TypeVar("T")


class Offering:
    """The offers of ``server``, which runs on ``loop``. Not for that loop's own thread."""

    def __init__(
        self, server: PeerServer, loop: asyncio.AbstractEventLoop, *, patience_s: float = PATIENCE_S
    ) -> None:
        self._server, self._loop, self._patience_s = server, loop, patience_s

    def offer_file(
        self, path: str, file: Path | int, *, offset_bytes: int, length_bytes: int,
        generation: str, on_confirmed: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """See ``PeerServer.offer_file``."""
        self._do(lambda: self._server.offer_file(
            path, file, offset_bytes=offset_bytes, length_bytes=length_bytes,
            generation=generation, on_confirmed=on_confirmed,
        ))  # fmt: skip

    def offer_document(self, path: str, data: bytes, *, generation: str = NO_GENERATION) -> None:
        """See ``PeerServer.offer_document``."""
        self._do(lambda: self._server.offer_document(path, data, generation=generation))

    def withdraw(self, path: str) -> bool:
        """See ``PeerServer.withdraw``."""
        return self._do(lambda: self._server.withdraw(path))

    def _do(self, act: Callable[[], T]) -> T:
        """Do it on the loop; what it raises is raised here. DeadlineExceeded if the loop waits."""
        told: concurrent.futures.Future[T] = concurrent.futures.Future()
        try:
            self._loop.call_soon_threadsafe(_act, act, told)
        except RuntimeError as error:  # it is closed
            raise self._stuck() from error
        concurrent.futures.wait([told], self._patience_s)
        if told.cancel():  # and it never happens
            raise self._stuck()
        return told.result()

    def _stuck(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the server for peers did not take an offer in {self._patience_s:g} s: its event "
            "loop is closed, or something on it waits. Look at the keeper's log.",
            phase="offer",
        )


def _act(act: Callable[[], T], told: concurrent.futures.Future[T]) -> None:
    if not told.set_running_or_notify_cancel():
        return
    try:
        told.set_result(act())
    except Exception as error:
        told.set_exception(error)
