"""Processes of simulated hosts: found by what they were started with, and ended for certain.

Whoever is to be killed later is known by a descriptor until then, and whoever is killed until it
has ended, so that its number cannot pass to another one meanwhile.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ARENA, HOST = "HOLDFAST_ARENA_DIR", "HOLDFAST_HOST_ID"


@dataclass(frozen=True, slots=True)
class Found:
    """A process as /proc shows it."""

    pid: int
    words: tuple[str, ...]
    settings: dict[str, str]

    def is_keeper(self, arena_dir: Path) -> bool:
        """Whether it keeps an arena that lies below this directory."""
        arena = self._option("--arena")
        return "holdfast.keeper" in self.words and Path(arena).is_relative_to(arena_dir)

    def is_of(self, host: str, arena_dir: Path) -> bool:
        """Whether it was started on this host: with its name, and with this arena directory."""
        if self.is_keeper(arena_dir):
            return self._option("--host-id") == host
        return (self.settings.get(HOST), self.settings.get(ARENA)) == (host, str(arena_dir))

    def _option(self, name: str) -> str:
        found = [b for a, b in zip(self.words, self.words[1:], strict=False) if a == name]
        return found[0] if found else ""


def processes(is_wanted: Callable[[Found], bool]) -> list[int]:
    """The numbers of all processes but this one that run and are wanted."""
    return [one.pid for one in _running() if one.pid != os.getpid() and is_wanted(one)]


def _running() -> Iterator[Found]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (words := _words(name, "cmdline")):  # a zombie has none any more
            pairs = (word.partition("=") for word in _words(name, "environ"))
            yield Found(int(name), words, {key: value for key, _, value in pairs})


def _words(pid: str, name: str) -> tuple[str, ...]:
    """Of a file of the process in /proc; () when it has ended, or is another user's."""
    try:
        data = Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return ()
    return tuple(data.decode(errors="replace").rstrip("\0").split("\0")) if data else ()


def started(pid: int) -> str:
    """When a process was started: another one of the same number was at another time."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


def send(pids: Iterable[int], number: int) -> None:
    """A signal to each that still runs."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def kill(pids: Iterable[int], *, within_s: float = 10.0) -> None:
    """SIGKILL to all of them at once; returns when no thread of any runs.

    By then their sockets, locks and mappings are gone too. TimeoutError names those that stay.
    """
    Opened(pids).kill(within_s=within_s)


class Opened:
    """Processes by descriptors, to be killed once: whoever has their numbers later is not meant."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pidfds: dict[int, int] = {}
        for pid in set(pids):
            with suppress(OSError):  # it has ended
                self._pidfds[pid] = os.pidfd_open(pid)

    def keep(self, pids: Iterable[int]) -> None:
        """These only; the others are not meant, as was seen after they were opened."""
        for pid in self._pidfds.keys() - set(pids):
            os.close(self._pidfds.pop(pid))

    def kill(self, *, within_s: float = 10.0) -> None:
        """See ``kill``."""
        for pidfd in self._pidfds.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        deadline_s = time.monotonic() + within_s
        stay = [pid for pid, pidfd in self._pidfds.items() if not _ends_by(pidfd, deadline_s)]
        self.close()
        if stay:
            raise TimeoutError(f"processes {stay} were killed and still run after {within_s:g} s")

    def close(self) -> None:
        """Give the descriptors back."""
        self.keep(())

    def __del__(self) -> None:
        self.close()  # they were aimed at, and never fired at


def _ends_by(pidfd: int, deadline_s: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000))
