"""What takes time runs beside the keeper's event loop and comes back to it as one more event."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Background:
    """Two helping threads, and tasks nobody waits for. Made on the loop it serves."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._helpers = ThreadPoolExecutor(2, thread_name_prefix="holdfast-keeper")

    async def in_thread(self, function: Callable[..., Any], *arguments: object) -> Any:
        """The result of a function that may block, run on a helping thread."""
        return await self._loop.run_in_executor(self._helpers, function, *arguments)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it on the loop; its failure is printed to the keeper's log."""
        task = self._loop.create_task(coroutine)
        task.add_done_callback(_complain)

    def from_thread(self, function: Callable[[], None]) -> None:
        """Have the loop call ``function``; for other threads."""
        self._loop.call_soon_threadsafe(function)


def _complain(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        traceback.print_exception(task.exception(), file=sys.stderr)
