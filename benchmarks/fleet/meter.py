"""Read what one keeper uses: processor time of its loop and of all its threads, and memory."""

from __future__ import annotations

import math
import struct
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.kit import processes
from holdfast.observe.log import trails

#: Has keepers report each time that their loop was held, and not once a minute; and note each tick.
IN_KEEPER = """
import os, struct, sys
if "holdfast.keeper" in sys.orig_argv:
    import time
    from holdfast.keeper import loop_watch
    watch = loop_watch.LoopWatch
    watch.__init__.__kwdefaults__["report_s"] = 0.0
    ticks = open(f"{os.path.dirname(__file__)}/{os.getpid()}.ticks", "wb", buffering=0)
    async def noted(self, seconds, pause=watch.pause):
        began_s, waited_s, used_s = time.monotonic(), self._waited_s(), time.process_time()
        await pause(self, seconds)
        held_s = time.monotonic() - began_s - seconds - (self._waited_s() - waited_s)
        ticks.write(struct.pack("ddd", time.time(), held_s, time.process_time() - used_s))
    watch.pause = noted
"""


#: What a coordinator's keeper may have of memory, and for each host.
MOST_BYTES, MOST_OF_HOST_BYTES = 150_000_000, 16_000


def most_memory(hosts: int) -> int:
    """What the coordinator of so many hosts may have of memory, without the arena."""
    return MOST_BYTES + MOST_OF_HOST_BYTES * hosts


@dataclass(slots=True)
class Usage:
    """What the coordinator's keeper used in one phase."""

    phase: str
    loop_s: float = 0.0
    """Processor time of the thread that its loop runs on."""
    all_s: float = 0.0
    wall_s: float = 0.0
    memory_bytes: int = 0
    """Memory at the end of the phase, without the arena."""
    ended_s: float = 0.0
    """When it ended, by the clock of the wall."""


class Meter:
    """Reads a keeper's use phase by phase; ``pid`` is that of the keeper now."""

    def __init__(self) -> None:
        self.pid = 0
        self.found: list[Usage] = []
        self.keepers: list[int] = []
        """Memory of all real keepers at the end, without the arena; the coordinator's first."""

    @contextmanager
    def phase(self, name: str) -> Iterator[Usage]:
        """What is used meanwhile; of a keeper that is started meanwhile, all."""
        usage = Usage(name)
        began, began_s = {self.pid: self._used()}, time.monotonic()
        yield usage
        loop_s, all_s = self._used()
        before = began.get(self.pid, (0.0, 0.0))
        usage.wall_s = time.monotonic() - began_s
        usage.loop_s, usage.all_s = loop_s - before[0], all_s - before[1]
        usage.memory_bytes = processes.own_memory(self.pid)
        usage.ended_s = time.time()
        self.found.append(usage)
        print(f"{name}: {usage.loop_s:.3f} s", file=sys.stderr, flush=True)

    def _used(self) -> tuple[float, float]:
        return self.loop_s(), processes.processor_s({self.pid})

    def over_memory(self, hosts: int) -> list[str]:
        """The phases after which a coordinator of so many hosts has more memory than it may."""
        most = most_memory(hosts)
        return [
            f"{one.phase}: the coordinator has {one.memory_bytes / 1e6:.0f} MB, more than "
            f"{most / 1e6:.0f}"
            for one in self.found
            if one.memory_bytes > most
        ]

    def loop_s(self) -> float:
        """Processor time of the loop's thread so far; 0 of a keeper that is gone."""
        try:
            schedule = Path(f"/proc/{self.pid}/task/{self.pid}/schedstat").read_text()
        except OSError:
            return 0.0
        return int(schedule.split()[0]) / 1e9


@dataclass(frozen=True, slots=True)
class Hold:
    """A time for which the loop of a keeper answered nobody."""

    host: str
    ended_s: float
    held_s: float


@dataclass(frozen=True, slots=True)
class Tick:
    """One pause of a keeper's loop."""

    ended_s: float
    held_s: float
    """By how much longer it was than asked for, without the wait for a processor."""
    used_s: float
    """Processor time of all threads of the keeper meanwhile: on a machine with a processor for
    each keeper nothing holds a loop for longer.
    """


def ticks_in(directory: Path) -> list[Tick]:
    """All ticks of the keepers that were started with this directory."""
    files = [path.read_bytes() for path in directory.glob("*.ticks")]
    whole = (data[: len(data) // 24 * 24] for data in files)
    return sorted(
        (Tick(*one) for data in whole for one in struct.iter_unpack("ddd", data)),
        key=lambda tick: tick.ended_s,
    )


def percentile(values: Iterable[float], share: float) -> float:
    """The value that this share of them does not exceed; 0 of none."""
    there = sorted(values)
    return there[math.ceil(share * len(there)) - 1] if there else 0.0


def holds_in(root: Path) -> list[Hold]:
    """All that keepers reported, in the order of time."""
    found = []
    for path in trails(root):
        for line in path.read_bytes().splitlines():
            if b'"LoopHeld"' in line:
                record = msgspec.json.decode(line)
                found.append(Hold(record["host"], record["time_s"], record["longest_s"]))
    return sorted(found, key=lambda hold: hold.ended_s)


def report_all_holds(directory: Path, change: str = "") -> str:
    """A directory for PYTHONPATH: keepers started with it report each time their loop is held.

    ``change``: what else is different in them.
    """
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(IN_KEEPER + change)
    return str(directory)
