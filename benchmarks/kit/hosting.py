"""Run a server of a measurement in a process of its own, or a benchmark through its door."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.kit import processes

Tell = Callable[[Any], None]


def door(name: str, *options: str) -> list[str]:
    """The command of a benchmark; it runs in ``results.PROJECT``."""
    return [sys.executable, "-m", "benchmarks", name, *options]


@contextmanager
def hosted(serve: Callable[..., object], *arguments: Any) -> Iterator[Any]:
    """Run ``serve(tell, *arguments)`` in a process; what it tells first, its port for example."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, serve, *arguments), daemon=True)
    process.start()
    there.close()
    try:
        yield here.recv()
    finally:
        process.kill()
        process.join()


def _serve(connection: Connection, serve: Callable[..., object], *arguments: Any) -> None:
    processes.end_with_parent()
    serve(connection.send, *arguments)
