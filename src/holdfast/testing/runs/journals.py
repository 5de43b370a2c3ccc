"""Defines the journal that each rank of a run writes, and reads it: one JSON object a line.

Each line is one write to the operating system, so that a killed rank leaves every line it had
written and no part of another. Losses are written as hexadecimal floats: exactly.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

Kind = Literal["start", "restored", "state", "update", "over", "end"]


class JournalLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a rank.

    start: it is in the process group and joined the run. restored: it has the state of ``step``.
    state: the ``state`` after ``step`` as a checksum, gathered from all ranks. update: that of
    ``step`` is made. over: ``Checkpointer.step`` returned. end: the checkpointer is closed.
    """

    what: Kind
    incarnation: int = 0
    time_s: float = msgspec.field(default_factory=time.monotonic)
    """Of the monotonic clock, which all processes of a host share."""
    world: int = 0
    pid: int = 0
    step: int = -1
    source: str = ""
    parent: tuple[int, int] | None = None
    """The generation that was restored."""
    elapsed_s: float = 0.0
    loss: str = ""
    """That of the whole batch, before the update."""
    state: str = ""
    share: int = 0
    """What this rank adds to the sum over the state, where that is how states are compared."""
    drawn: int = 0
    """What this rank's generators are at."""


_decoder = msgspec.json.Decoder(JournalLine)


class Journal:
    """One rank's file. Several incarnations append to it."""

    def __init__(self, directory: Path, rank: int, *, incarnation: int = 0) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / f"rank-{rank}.jsonl").open("ab", buffering=0)
        self._incarnation = incarnation

    def write(self, what: Kind, **facts: Any) -> None:
        """Writes one whole line to the operating system."""
        line = JournalLine(what=what, incarnation=self._incarnation, **facts)
        self._file.write(msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


@dataclass(slots=True)
class RunIncarnation:
    """What the ranks of one start have written; ``lines`` is the last of each kind, by rank."""

    n: int
    world: int = 0
    lines: dict[Kind, dict[int, JournalLine]] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)
    shares: dict[int, dict[int, int]] = field(default_factory=dict)  # step -> rank -> its share
    drawn: dict[tuple[int, int], int] = field(default_factory=dict)  # by step and rank
    first_over_s: dict[int, float] = field(default_factory=dict)  # rank -> end of its first step
    checking_s: float = 0.0  # what checksums took before the first step
    recent_s: list[float] = field(default_factory=list)  # when rank 0 made its last updates
    disagreements: list[int] = field(default_factory=list)  # steps whose loss ranks report apart

    def of_all(self, what: Kind) -> dict[int, JournalLine] | None:
        """Returns the last lines of this kind by rank, once every rank has written one."""
        found = self.lines.get(what, {})
        return found if self.world and len(found) == self.world else None

    def last(self, what: Kind) -> int | None:
        """Returns the last step for which all ranks have written a line of this kind."""
        found = self.of_all(what)
        return min(line.step for line in found.values()) if found else None

    @property
    def restored(self) -> JournalLine | None:
        """What a rank has restored; None when nothing, or not yet."""
        return next(iter(self.lines.get("restored", {}).values()), None)

    @property
    def going_since_s(self) -> float | None:
        """The time when all ranks had finished their first step."""
        return max(self.first_over_s.values()) if self.of_all("over") else None

    @property
    def step_s(self) -> float:
        """The time a step takes, by rank 0's last ones; 0 before there are two."""
        times = self.recent_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0

    def add(self, rank: int, line: JournalLine) -> None:
        """Adds one line of ``rank``'s journal."""
        self.lines.setdefault(line.what, {})[rank] = line
        self.world = line.world or self.world
        if line.drawn:
            self.drawn[line.step, rank] = line.drawn
        match line.what:
            case "state":
                self.states[line.step] = line.state
                if rank not in self.first_over_s:
                    self.checking_s = max(self.checking_s, line.elapsed_s)
            case "update":
                self.shares.setdefault(line.step, {})[rank] = line.share
                if rank == 0:
                    self.recent_s = [*self.recent_s[-8:], line.time_s]
                loss = float.fromhex(line.loss or "nan")
                if line.loss and self.losses.setdefault(line.step, loss) != loss:
                    self.disagreements.append(line.step)
            case "over":
                self.first_over_s.setdefault(rank, line.time_s)


class Journals:
    """Everything the ranks of one run have written so far, by incarnation."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}
        self.incarnations: dict[int, RunIncarnation] = {}
        self.lines = 0

    def poll(self) -> None:
        """Reads the lines that came since the last call."""
        for path in self._directory.glob("rank-*.jsonl"):
            rank = int(path.stem.removeprefix("rank-"))
            for line in self._new_lines(path):
                n, self.lines = line.incarnation, self.lines + 1
                self.incarnations.setdefault(n, RunIncarnation(n)).add(rank, line)

    def newest(self) -> RunIncarnation:
        """Returns the newest incarnation; an empty one before the first."""
        n = max(self.incarnations, default=0)
        return self.incarnations.get(n) or RunIncarnation(n)

    def first_going_after(self, n: int) -> RunIncarnation | None:
        """Returns the oldest incarnation after ``n`` whose ranks all finished a step."""
        later = (self.incarnations[m] for m in sorted(self.incarnations) if m > n)
        return next((one for one in later if one.going_since_s is not None), None)

    def _new_lines(self, path: Path) -> list[JournalLine]:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[path] = self._offsets.get(path, 0) + len(whole)
        return [_decoder.decode(line) for line in whole.splitlines()]
