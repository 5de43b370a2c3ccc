"""Read what one keeper uses: processor time of its loop and of all its threads, and memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kit import processes

#: Has keepers report each time that their loop was held, and not once a minute.
IN_KEEPER = """
import sys
if "holdfast.keeper" in sys.orig_argv:
    from holdfast.keeper import loop_watch
    loop_watch.LoopWatch.__init__.__kwdefaults__["report_s"] = 0.0
"""


@dataclass(slots=True)
class Usage:
    """What the coordinator's keeper used in one phase."""

    phase: str
    loop_s: float = 0.0
    """Processor time of the thread that its loop runs on."""
    all_s: float = 0.0
    wall_s: float = 0.0
    memory_bytes: int = 0
    """Private memory at the end of the phase."""


class Meter:
    """Reads a keeper's use phase by phase; ``pid`` is that of the keeper now."""

    def __init__(self) -> None:
        self.pid = 0
        self.found: list[Usage] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[Usage]:
        """What is used meanwhile."""
        usage = Usage(name)
        began = time.monotonic(), self.loop_s(), processes.processor_s({self.pid})
        yield usage
        usage.wall_s = time.monotonic() - began[0]
        usage.loop_s = self.loop_s() - began[1]
        usage.all_s = processes.processor_s({self.pid}) - began[2]
        usage.memory_bytes = processes.memory(self.pid).get("private", 0)
        self.found.append(usage)
        print(f"{name}: {usage.loop_s:.3f} s", file=sys.stderr, flush=True)

    def loop_s(self) -> float:
        """Processor time of the loop's thread so far."""
        schedule = Path(f"/proc/{self.pid}/task/{self.pid}/schedstat")
        return int(schedule.read_text().split()[0]) / 1e9


def report_all_holds(directory: Path) -> str:
    """A directory for PYTHONPATH: keepers started with it report each time their loop is held."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(IN_KEEPER)
    return str(directory)
