"""Defines the journal that each rank of the demo writes, and reads it: one JSON object a line.

Each line is one write to the operating system, so that a killed rank leaves every line it had
written and no part of another. Losses are written as hexadecimal floats: exactly.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec


class JournalRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="what", tag=True):
    """The fields of every line. ``time_s`` is the monotonic clock all processes of a host share."""

    incarnation: int
    time_s: float = msgspec.field(default_factory=time.monotonic)


class StartRecord(JournalRecord, frozen=True, kw_only=True):
    """A rank is in the process group and joined the run."""

    world: int
    pid: int


class RestoredRecord(JournalRecord, frozen=True, kw_only=True):
    """A rank has restored the state of ``step``."""

    step: int
    source: str
    elapsed_s: float


class HashRecord(JournalRecord, frozen=True, kw_only=True):
    """The checksum of the whole state, gathered from all ranks, after ``step``."""

    step: int
    state: str
    elapsed_s: float


class UpdateRecord(JournalRecord, frozen=True, kw_only=True):
    """The update of ``step`` is made; ``loss`` is that of the whole batch before it."""

    step: int
    loss: str


class HandoverRecord(JournalRecord, frozen=True, kw_only=True):
    """``Checkpointer.step`` returned: the step is over for this rank."""

    step: int


class FinishRecord(JournalRecord, frozen=True, kw_only=True):
    """The last step is made, and the checkpointer closed."""


AnyRecord = StartRecord | RestoredRecord | HashRecord | UpdateRecord | HandoverRecord | FinishRecord
_decoder = msgspec.json.Decoder(AnyRecord)


class Journal:
    """One rank's file. Several incarnations append to it."""

    def __init__(self, directory: Path, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / f"rank-{rank}.jsonl").open("ab", buffering=0)

    def write(self, record: AnyRecord) -> None:
        """Writes one whole line to the operating system."""
        self._file.write(msgspec.json.encode(record) + b"\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


@dataclass(slots=True)
class DemoIncarnation:
    """The events of one start of the training processes, from the journals of its ranks."""

    n: int
    world: int = 0
    restored: RestoredRecord | None = None
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
        """The time when all ranks had finished their first step."""
        done = self.first_done_s
        return max(done.values()) if self.world and len(done) == self.world else None

    @property
    def step_s(self) -> float:
        """The time a step takes, by rank 0's last ones; 0 before there are two."""
        times = self.recent_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0

    @property
    def is_finished(self) -> bool:
        """True if every rank has finished."""
        return self.world > 0 and len(self.finished) == self.world

    def _last(self, steps: dict[int, int]) -> int | None:
        return min(steps.values()) if self.world and len(steps) == self.world else None

    def add(self, rank: int, record: AnyRecord) -> None:
        """Adds one line of ``rank``'s journal."""
        match record:
            case StartRecord(world=world, pid=pid):
                self.world = world
                self.pids[rank] = pid
            case RestoredRecord():
                self.restored = record
            case HashRecord(step=step, state=state, elapsed_s=elapsed_s):
                self.states[step] = state
                if rank not in self.first_done_s:
                    self.checking_s = max(self.checking_s, elapsed_s)
            case UpdateRecord(step=step, loss=text, time_s=time_s):
                if rank == 0:
                    self.recent_s = [*self.recent_s[-8:], time_s]
                loss = float.fromhex(text)
                if self.losses.setdefault(step, loss) != loss:
                    self.disagreements.append(step)
                self.updated[rank] = step
            case HandoverRecord(step=step, time_s=time_s):
                self.handed_over[rank] = step
                self.first_done_s.setdefault(rank, time_s)
            case FinishRecord():
                self.finished.add(rank)


class Journals:
    """Everything the ranks of one run have written so far, by incarnation."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[int, int] = {}
        self.incarnations: dict[int, DemoIncarnation] = {}
        self.lines = 0

    def poll(self) -> None:
        """Reads the lines that came since the last call."""
        for path in self._directory.glob("rank-*.jsonl"):
            rank = int(path.stem.removeprefix("rank-"))
            for record in self._new_lines(path, rank):
                n, self.lines = record.incarnation, self.lines + 1
                self.incarnations.setdefault(n, DemoIncarnation(n)).add(rank, record)

    def newest(self) -> DemoIncarnation:
        """Returns the newest incarnation; an empty one before the first."""
        return (
            self.incarnations[max(self.incarnations)] if self.incarnations else DemoIncarnation(0)
        )

    def first_going_after(self, n: int) -> DemoIncarnation | None:
        """Returns the oldest incarnation after ``n`` whose ranks all finished a step."""
        later = (self.incarnations[m] for m in sorted(self.incarnations) if m > n)
        return next((one for one in later if one.going_since_s is not None), None)

    def _new_lines(self, path: Path, rank: int) -> list[AnyRecord]:
        with path.open("rb") as file:
            file.seek(self._offsets.get(rank, 0))
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[rank] = self._offsets.get(rank, 0) + len(whole)
        return [_decoder.decode(line) for line in whole.splitlines()]
