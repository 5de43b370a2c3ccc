"""A few threads that share one list of work, and stop together when one of them fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def in_parallel(act: Callable[[T], int], work: Iterable[T], *, threads: int, name: str) -> int:
    """Do ``act`` on all of ``work``, in order, by ``threads`` threads; the sum of what it returns.

    The first error is raised, and an interruption of the caller too, as soon as every thread has
    ended what it was at; no further work is begun then. On return no thread is left.
    """
    crew = _Crew(act, work)
    threads_ = [
        threading.Thread(target=crew.run, name=f"{name}-{number}", daemon=True)
        for number in range(threads)
    ]
    try:
        for thread in threads_:
            thread.start()
        for thread in threads_:
            thread.join()
    finally:
        # Nothing is written to a destination any more when its reading has ended.
        crew.is_stopped = True
        _end_all(thread for thread in threads_ if thread.ident is not None)
    if crew.errors:
        raise crew.errors[0]
    return crew.total


def _end_all(threads: Iterable[threading.Thread]) -> None:
    """Wait until they have ended, however often the caller is interrupted meanwhile."""
    interruption: KeyboardInterrupt | None = None
    for thread in threads:
        while thread.is_alive():
            try:
                thread.join()
            except KeyboardInterrupt as again:
                interruption = again
    if interruption is not None:
        raise interruption


class _Crew:
    def __init__(self, act: Callable[[T], int], work: Iterable[T]) -> None:
        self._act: Callable[[T], int] = act
        self._work = iter(work)
        self._lock = threading.Lock()
        self.is_stopped = False
        self.errors: list[BaseException] = []
        self.total = 0

    def run(self) -> None:
        done = 0
        try:
            while not self.is_stopped:
                with self._lock:
                    some = list(islice(self._work, 1))
                if not some:
                    break
                done += self._act(some[0])
        except BaseException as error:  # whatever it is, the caller is the one to hear of it
            self.errors.append(error)
            self.is_stopped = True
        finally:
            with self._lock:
                self.total += done
