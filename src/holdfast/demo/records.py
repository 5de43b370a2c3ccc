"""What the ranks of the demo write down, and how it is read back: one JSON object a line.

Each line is one write to the operating system, so that a killed rank leaves every line it had
written and no part of another. Losses are written as hexadecimal floats: exactly.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="what", tag=True):
    """What every line carries. ``time_s`` is the monotonic clock all processes of a host share."""

    incarnation: int
    time_s: float = msgspec.field(default_factory=time.monotonic)


class Started(Record, frozen=True, kw_only=True):
    """A rank is in the process group and joined the run."""

    world: int
    pid: int


class Restored(Record, frozen=True, kw_only=True):
    """A rank's state is that of ``step``."""

    step: int
    source: str
    elapsed_s: float


class Hashed(Record, frozen=True, kw_only=True):
    """The checksum of the whole state, gathered from all ranks, after ``step``."""

    step: int
    state: str
    elapsed_s: float


class Updated(Record, frozen=True, kw_only=True):
    """The update of ``step`` is made; ``loss`` is that of the whole batch before it."""

    step: int
    loss: str


class HandedOver(Record, frozen=True, kw_only=True):
    """``Checkpointer.step`` returned: the step is over for this rank."""

    step: int


class Finished(Record, frozen=True, kw_only=True):
    """The last step is made, and the checkpointer closed."""


AnyRecord = Started | Restored | Hashed | Updated | HandedOver | Finished
_decoder = msgspec.json.Decoder(AnyRecord)


class Journal:
    """One rank's file. Several incarnations append to it."""

    def __init__(self, directory: Path, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / f"rank-{rank}.jsonl").open("ab", buffering=0)

    def write(self, record: AnyRecord) -> None:
        """Hand one line to the operating system, whole."""
        self._file.write(msgspec.json.encode(record) + b"\n")

    def close(self) -> None:
        """Nothing more will come."""
        self._file.close()


@dataclass(slots=True)
class Incarnation:
    """What one start of the training processes did, by the journals of its ranks."""

    n: int
    world: int = 0
    restored: Restored | None = None
    losses: dict[int, float] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    updated: dict[int, int] = field(default_factory=dict)  # rank -> last step
    handed_over: dict[int, int] = field(default_factory=dict)  # rank -> last step
    first_done_s: dict[int, float] = field(default_factory=dict)  # rank -> end of its first step
    checking_s: float = 0.0  # what checksums took before the first step
    recent_s: list[float] = field(default_factory=list)  # when rank 0 made its last updates
    finished: set[int] = field(default_factory=set)
    disagreements: list[int] = field(default_factory=list)  # steps whose loss ranks report apart

    @property
    def last_updated(self) -> int | None:
        """The last step whose update all ranks made."""
        return self._last(self.updated)

    @property
    def last_over(self) -> int | None:
        """The last step that was over on all ranks."""
        return self._last(self.handed_over)

    @property
    def going_since_s(self) -> float | None:
        """When all ranks had finished their first step."""
        done = self.first_done_s
        return max(done.values()) if self.world and len(done) == self.world else None

    @property
    def step_s(self) -> float:
        """How long a step takes, by rank 0's last ones; 0 before there are two."""
        times = self.recent_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0

    @property
    def is_finished(self) -> bool:
        """Whether every rank came to its end."""
        return self.world > 0 and len(self.finished) == self.world

    def _last(self, steps: dict[int, int]) -> int | None:
        return min(steps.values()) if self.world and len(steps) == self.world else None

    def take(self, rank: int, record: AnyRecord) -> None:
        """Add one line of ``rank``'s journal."""
        match record:
            case Started(world=world, pid=pid):
                self.world = world
                self.pids[rank] = pid
            case Restored():
                self.restored = record
            case Hashed(step=step, state=state, elapsed_s=elapsed_s):
                self.states[step] = state
                if rank not in self.first_done_s:
                    self.checking_s = max(self.checking_s, elapsed_s)
            case Updated(step=step, loss=text, time_s=time_s):
                if rank == 0:
                    self.recent_s = [*self.recent_s[-8:], time_s]
                loss = float.fromhex(text)
                if self.losses.setdefault(step, loss) != loss:
                    self.disagreements.append(step)
                self.updated[rank] = step
            case HandedOver(step=step, time_s=time_s):
                self.handed_over[rank] = step
                self.first_done_s.setdefault(rank, time_s)
            case Finished():
                self.finished.add(rank)


class Journals:
    """Everything the ranks of one run have written so far, by incarnation."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[int, int] = {}
        self.incarnations: dict[int, Incarnation] = {}
        self.lines = 0

    def look(self) -> None:
        """Take in the lines that came since the last look."""
        for path in self._directory.glob("rank-*.jsonl"):
            rank = int(path.stem.removeprefix("rank-"))
            for record in self._new_lines(path, rank):
                n, self.lines = record.incarnation, self.lines + 1
                self.incarnations.setdefault(n, Incarnation(n)).take(rank, record)

    def newest(self) -> Incarnation:
        """The newest incarnation; an empty one before the first."""
        return self.incarnations[max(self.incarnations)] if self.incarnations else Incarnation(0)

    def first_going_after(self, n: int) -> Incarnation | None:
        """The oldest incarnation after ``n`` whose ranks all finished a step."""
        later = (self.incarnations[m] for m in sorted(self.incarnations) if m > n)
        return next((one for one in later if one.going_since_s is not None), None)

    def _new_lines(self, path: Path, rank: int) -> list[AnyRecord]:
        with path.open("rb") as file:
            file.seek(self._offsets.get(rank, 0))
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[rank] = self._offsets.get(rank, 0) + len(whole)
        return [_decoder.decode(line) for line in whole.splitlines()]
