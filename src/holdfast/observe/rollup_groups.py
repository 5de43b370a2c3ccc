"""PURE. Defines a roll-up: what a report says of a part of an event file, in far less room.

Records that every rank makes of every save are one entry for each save in it; all others, and those
of rank 0, stand in it as they were. ``docs/format/events-v1.md`` describes it.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Annotated

import msgspec

from holdfast.events import Bytes, Count, HostSampled, Seconds
from holdfast.events.fields import Difference, StepOrNone
from holdfast.geometry.mesh import MAX_RANKS

Rank = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
Wall = Annotated[float, msgspec.Meta(ge=0, le=253402300799)]


#: Seconds, or seconds a GiB of few bytes; the bucket of a sketch that they are in.
_Value = Annotated[float, msgspec.Meta(ge=0, le=1e30)]
_Bucket = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=4000)]


#: The quantities of a save that add up over hosts, but for the size of a ring: the largest counts.
COUNTED = "asked_bytes", "image_bytes", "images", "written_bytes", "written", "ring_bytes"
#: What ``SaveColumns`` have of each save beside its phases. ``copied_s``: -1 where no rank of the
#: host began a copy.
COUNT_ROWS = "step", "last_by", *COUNTED
MOMENT_ROWS = "first_s", "last_s", "copied_s", "blocked_s"
_MOST_OF_ROW = 2.0**63
#: What there is of each rank in a ``StartRollup``: when it began, its ages then, when it ended in
#: order, and how long ``close`` took; and in a ``RestoreRollup``: when it ended, how long it took,
#: and the bytes that were restored, read and received.
START_ROWS = "began_s", "process_s", "joined_s", "ended_s", "closing_s"
RESTORE_ROWS = "restored_s", "elapsed_s", "size_bytes", "read_bytes", "received_bytes"


class PhaseValues(msgspec.Struct, array_like=True, omit_defaults=True, forbid_unknown_fields=True):
    """A roll-up as it is kept in files: the slowest ranks with their seconds, and of all others how
    many are in which bucket of the sketch, and the least.
    """

    ranks: list[Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]]
    seconds: list[_Value]
    others: list[tuple[_Bucket, Count]] = []
    least_s: _Value = 0.0


class SaveRollup(msgspec.Struct, array_like=True, omit_defaults=True, forbid_unknown_fields=True):
    """One save over the ranks of a host but 0.

    ``calls``: clock, first call, last call, and the rank that made it. ``copies``: clock, and when
    the first rank began to copy. ``blocked_s``: what held
    these ranks together. ``asked``, ``copied``, ``stored``: the ranks that returned from it, and
    those whose image was copied, and written, from a first to a last one. ``left_out``: clocks of
    which nothing is in ``calls``, as they were neither among the first nor among the last.
    """

    incarnation: Count
    step: StepOrNone
    phases: dict[str, PhaseValues]
    even: dict[str, PhaseValues]
    calls: list[tuple[Count, float, float, int]]
    copies: list[tuple[Count, float]]
    blocked_s: Seconds = 0.0
    asked_bytes: Bytes = 0
    image_bytes: Bytes = 0
    images: Count = 0
    written_bytes: Bytes = 0
    written: Count = 0
    ring_bytes: Bytes = 0
    asked_durable: bool = False
    asked: list[tuple[Rank, Rank]] = []
    copied: list[tuple[Rank, Rank]] = []
    stored: list[tuple[Rank, Rank]] = []
    left_out: Count = 0


class ColumnsHead(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What saves of one start, by one clock, of the same ranks of a host have in common."""

    incarnation: Count
    clock: Count
    ranks: list[Rank]
    asked_durable: bool
    asked: list[tuple[Rank, Rank]]
    copied: list[tuple[Rank, Rank]]
    stored: list[tuple[Rank, Rank]]
    phases: list[str]
    even: list[str]

    def sizes(self, saves: int) -> tuple[int, int, int]:
        """Returns the bytes of the arrays of so many saves."""
        of_ranks = len(self.ranks) * (len(self.phases) + len(self.even))
        rows = 8 * len(COUNT_ROWS), 8 * len(MOMENT_ROWS), 4 * of_ranks
        return rows[0] * saves, rows[1] * saves, rows[2] * saves


class SaveColumns(ColumnsHead, array_like=True, forbid_unknown_fields=True):
    """Saves as ``rollup_columns`` makes them of ``SaveRollup``, oldest first.

    What differs from save to save stands in arrays (little-endian), for each name a row with a
    value for each save. ``counts``: ``COUNT_ROWS``, of 64-bit integers. ``moments``:
    ``MOMENT_ROWS``, of 64-bit floats. ``seconds``: ``phases``, then ``even``, of 32-bit floats, for
    each save and rank one, -1 where there is none.
    """

    counts: bytes
    moments: bytes
    seconds: bytes

    @property
    def arrays(self) -> tuple[bytes, bytes, bytes]:
        """Returns the three arrays."""
        return self.counts, self.moments, self.seconds

    def __post_init__(self) -> None:
        saves = len(self.counts) // (8 * len(COUNT_ROWS))
        if not saves or tuple(map(len, self.arrays)) != self.sizes(saves):
            raise ValueError("columns have a value for each save, and phases for each rank, too")
        if any(len({*some}) < len(some) for some in (self.phases, self.even, self.ranks)):
            raise ValueError("columns name each phase and each rank once")


class PackedColumns(ColumnsHead, array_like=True, forbid_unknown_fields=True):
    """``SaveColumns`` of so many ``saves`` in a roll-up's line. ``packed``: the arrays, deflated:
    of each the first bytes of all its numbers, then the second, and so on.
    """

    saves: Count
    packed: bytes


class LifeRollup(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The signs of life of the ranks of a host but 0 in one start, by one clock.

    ``first``, ``last``: wall clock and own clock. ``newest_step``: -1 for none. ``ranks``: each
    rank, its last moment, and the newest save that it returned from (-1: none).
    """

    incarnation: Count
    clock: Count
    first: tuple[Wall, Seconds]
    last: tuple[Wall, Seconds]
    newest_step: StepOrNone
    ranks: list[tuple[Rank, Seconds, StepOrNone]]


class StartRollup(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The beginnings and orderly ends of the ranks of a host but 0 in one start, by one clock.

    ``moments``: ``START_ROWS``, of 64-bit floats (little-endian), for each name a value for each
    rank, -1 where there is none. ``world``: 0 where no beginning is in it.
    """

    incarnation: Count
    clock: Count
    world: Count
    ranks: list[Rank]
    moments: bytes

    def __post_init__(self) -> None:
        _check_rows(self.ranks, self.moments, len(START_ROWS))

    def rows(self) -> Iterator[tuple[int, tuple[float, ...]]]:
        """Returns each rank with its values."""
        return _rows(self.ranks, self.moments)


class RestoreRollup(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The restores of the ranks of a host but 0 in one start, from one source, by one clock.

    ``moments``: ``RESTORE_ROWS``, as those of ``StartRollup``.
    """

    incarnation: Count
    clock: Count
    parent_incarnation: Count
    step: StepOrNone
    source: str
    origin: str
    saved_world: Count
    world: Count
    ranks: list[Rank]
    moments: bytes
    phases: dict[str, PhaseValues]

    def __post_init__(self) -> None:
        _check_rows(self.ranks, self.moments, len(RESTORE_ROWS))

    def rows(self) -> Iterator[tuple[int, tuple[float, ...]]]:
        """Returns each rank with its values."""
        return _rows(self.ranks, self.moments)


def packed_rows(rows: Mapping[int, Sequence[float]]) -> tuple[list[int], bytes]:
    """Returns ranks and ``moments`` of the values of each rank."""
    ranks = sorted(rows)
    moments = array("d", chain.from_iterable(zip(*(rows[rank] for rank in ranks), strict=True)))
    if sys.byteorder == "big":
        moments.byteswap()
    return ranks, moments.tobytes()


def _check_rows(ranks: Sequence[int], moments: bytes, count: int) -> None:
    if not ranks or len(moments) != 8 * count * len(ranks) or len({*ranks}) < len(ranks):
        raise ValueError("rows have a value for each rank, and name it once")
    values = _unpacked(moments)
    # The sum tells of what is no number.
    if not (min(values) >= -1.0 and max(values) <= _MOST_OF_ROW and math.isfinite(sum(values))):
        raise ValueError("rows have a number that cannot be")


def _rows(ranks: Sequence[int], moments: bytes) -> Iterator[tuple[int, tuple[float, ...]]]:
    """Returns each rank with its values."""
    values, size = _unpacked(moments), len(ranks)
    every = (values[at : at + size] for at in range(0, len(values), size))
    return zip(ranks, zip(*every, strict=True), strict=True)


def _unpacked(moments: bytes) -> array[float]:
    values = array("d")
    values.frombytes(moments)
    if sys.byteorder == "big":
        values.byteswap()
    return values


class ClockRollup(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A clock, with its first and last moment: wall clock and own clock."""

    host: str
    boot: str
    first: tuple[Wall, Seconds]
    last: tuple[Wall, Seconds]


class LinkRollup(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What the keeper of a host measured by messages to another one, with the clock of its host.

    ``trips_s``: the newest round trips. ``compared``: wall clock and own clock, how far this was
    ahead of that of ``other``, and the most that this can be wrong; of many the best.
    """

    clock: Count
    host: str
    other: str
    other_boot: str
    count: Count
    largest_s: Seconds
    trips_s: list[Seconds]
    compared: list[tuple[Wall, Seconds, Difference, Seconds]]


class SampleRollup(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The samples of a host: how many, the sums of the pressure that was told and how often it was,
    and the extremes as one sample.
    """

    samples: Count
    cpu: Seconds
    io: Seconds
    told: Count
    extreme: HostSampled


class Rollup(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """What the bytes ``start`` to ``end`` of an event file say.

    ``file``: the checksum of its first line, as it has several names in its life. ``is_end``:
    nothing comes behind them. ``numbers``: how many records of a writer, and the highest number.
    """

    file: str
    start: Count
    end: Count
    is_end: bool = False
    saves: list[SaveRollup] = []
    lives: list[LifeRollup] = []
    clocks: list[ClockRollup] = []
    hosts: dict[str, SampleRollup] = {}
    numbers: dict[str, tuple[Count, Count]] = {}
    torn: Count = 0
    unknown: Count = 0
    invalid: Count = 0
    links: list[LinkRollup] = []
    kept: list[msgspec.Raw] = []
    columns: list[SaveColumns] = []
    starts: list[StartRollup] = []
    restores: list[RestoreRollup] = []
    packed: list[PackedColumns] = []

    def __post_init__(self) -> None:
        clocks = [life.clock for life in self.lives] + [link.clock for link in self.links]
        clocks += [one.clock for some in (self.starts, self.restores) for one in some]
        heads: list[ColumnsHead] = [*self.columns, *self.packed]
        clocks += [one.clock for one in heads]
        every: list[SaveRollup | ColumnsHead] = [*self.saves, *heads]
        for each in every:
            for first, last in (*each.asked, *each.copied, *each.stored):
                if not 0 <= last - first < MAX_RANKS:
                    raise ValueError("ranks are from a first to a last one")
        for save in self.saves:
            clocks += [call[0] for call in save.calls]
            clocks += [copy[0] for copy in save.copies]
            for some in (*save.phases.values(), *save.even.values()):
                if len(some.ranks) != len(some.seconds):
                    raise ValueError("a phase has as many ranks as seconds")
        if clocks and max(clocks) >= len(self.clocks):
            raise ValueError("a moment is by a clock that is known")


class FilePart(msgspec.Struct, array_like=True, omit_defaults=True, forbid_unknown_fields=True):
    """Bytes of an event file that are rolled up, as a ``Rollup`` names them."""

    file: str
    start: Count
    end: Count
    is_end: bool = False


class TrailParts(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What of the event files of a writer, by the name of the newest, is rolled up."""

    trail: str
    parts: list[FilePart]


class RunRollupHead(msgspec.Struct, forbid_unknown_fields=True):
    """The first line of a roll-up of all hosts: which one it is, and what it is of."""

    number: Count
    trails: list[TrailParts]


#: The most that a file may have of what adds up over ranks: as much as one record of it.
_MOST_COUNTED, _MOST_BLOCKED_S = 1 << 62, 1e11


def bound_sums(of: SaveRollup) -> SaveRollup:
    """Sets sums that nothing can have, as of damaged records, to the most that a file may have:
    all else that was rolled up with them can be read then.
    """
    of.blocked_s = min(of.blocked_s, _MOST_BLOCKED_S)
    for name in COUNTED:
        if getattr(of, name) > _MOST_COUNTED:
            setattr(of, name, _MOST_COUNTED)
    return of


def own_clock(at: tuple[float, float]) -> float:
    """Returns the own clock of a moment by wall clock and own clock."""
    return at[1]


def sampled(one: HostSampled) -> SampleRollup:
    """Returns a sample of a host."""
    is_told = one.cpu_pressure >= 0 and one.io_pressure >= 0
    pressure = (one.cpu_pressure, one.io_pressure, 1) if is_told else (0.0, 0.0, 0)
    return SampleRollup(1, *pressure, extremes(one, None))


def joined_samples(one: SampleRollup, other: SampleRollup | None) -> SampleRollup:
    """Returns the samples of both; ``one`` is the newer."""
    if other is None:
        return one
    return SampleRollup(
        one.samples + other.samples,
        one.cpu + other.cpu,
        one.io + other.io,
        one.told + other.told,
        extremes(one.extreme, other.extreme),
    )


def extremes(one: HostSampled, other: HostSampled | None) -> HostSampled:
    """Returns the extremes of two samples, else like the first, the newer."""
    before = other or one
    values = {name: getattr(one, name) for name in HostSampled.__struct_fields__}
    for name in ("queued_s", "finish_s", "keeper_bytes"):
        values[name] = max(values[name], getattr(before, name))
    values["free_bytes"] = min(one.free_bytes, before.free_bytes)
    return HostSampled(**values)
