"""Reads the roll-ups of event files, which say what these said after they were given up.

The keeper of a host appends them to ``events/rollups/<name>.jsonl`` while ``events/<name>.jsonl``
grows. They are never given up; one that was torn covers nothing, and what it was of is read where
it still is.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec
import xxhash

from holdfast.observe.event_files import (
    UNREADABLE,
    Refused,
    blocks_in,
    open_parts,
    trails_in,
)
from holdfast.observe.rollup_groups import FilePart, Rollup

ROLLUPS = "rollups"
#: The most that a writer's name has, so that those of its full files are short enough, too.
_NAME_BYTES = 240
#: The most that the first line of a file has; a record has less.
_FIRST_BYTES = 64 << 10

#: The most that a roll-up has when it is inflated; one of 256 KiB of records has less than half of
#: that.
_INFLATED_BYTES = 4 << 20
_decode = msgspec.json.Decoder(Rollup).decode


def decode_columns(data: bytes) -> Rollup:
    """Returns a roll-up. Raises msgspec.DecodeError or UnicodeDecodeError."""
    found = _decode(data)
    if found.columns or found.packed:
        from holdfast.observe.rollup_columns import arrays_of, unpack  # a start would wait for it

        try:
            found.columns += [unpack(one, _INFLATED_BYTES) for one in found.packed]
            found.packed = []
            for one in found.columns:
                arrays_of(one).check()
        except ValueError as error:
            raise msgspec.ValidationError(str(error)) from error
    return found


def decode_rollup(data: bytes) -> Rollup:
    """Returns a roll-up with all of its saves apart. Raises as ``decode_columns`` does."""
    found = decode_columns(data)
    if found.columns:
        from holdfast.observe.rollup_columns import saves_of

        found.saves += [save for one in found.columns for save in saves_of(one)]
        found.columns = []
    return found


class _InColumns(msgspec.Struct):
    """A roll-up with its saves in columns, deflated."""

    columns: bytes


class _DeflatedRollup(msgspec.Struct):
    """A line of a host's roll-ups: the roll-up, deflated, stands in the place of its saves, so that
    older versions take the line for one of another version, and leave it as it is. Those of some
    have it there without columns.
    """

    file: str
    start: int
    end: int
    is_end: bool
    saves: _InColumns | bytes


_decode_deflated = msgspec.json.Decoder(_DeflatedRollup).decode


def encode_rollup(of: Rollup) -> bytes:
    """Returns the line of a host's roll-up."""
    from holdfast.observe.rollup_columns import pack

    columns = [pack(one) for one in of.columns]
    of = msgspec.structs.replace(of, columns=[], packed=columns)
    deflated = _InColumns(zlib.compress(msgspec.json.encode(of)))
    line = _DeflatedRollup(of.file, of.start, of.end, of.is_end, deflated)
    return msgspec.json.encode(line) + b"\n"


def inflate_rollup(line: bytes) -> bytes:
    """Returns the roll-up of a line as JSON, which it is itself in older versions.

    Raises msgspec.DecodeError or UnicodeDecodeError.
    """
    try:
        saves = _decode_deflated(line).saves
    except msgspec.ValidationError:
        return line
    inflater = zlib.decompressobj()
    try:
        deflated = saves if isinstance(saves, bytes) else saves.columns
        data = inflater.decompress(deflated, _INFLATED_BYTES)
    except zlib.error as error:
        raise msgspec.DecodeError(str(error)) from error
    if not inflater.eof:
        raise msgspec.DecodeError("is not whole when it is inflated")
    return data


class TornCounter(Protocol):
    """Counts lines that could not be read: ``holdfast.observe.records.LineDecoder``."""

    torn: int


class FileEnd(msgspec.Struct):
    """How far an event file was rolled up; ``is_end``: nothing comes behind that."""

    file: str
    start: int
    end: int
    is_end: bool = False


decode_end = msgspec.json.Decoder(FileEnd).decode


def rollup_path(trail: Path) -> Path:
    """Returns the file of the roll-ups of a writer's files."""
    return trail.parent / ROLLUPS / trail.name


def _is_writer(name: str) -> bool:
    """True for what may be the name of a writer's newest file: a roll-up may say anything."""
    is_name = name.endswith(".jsonl") and not {"/", "\0"} & set(name)
    return is_name and len(name.encode(errors="replace")) <= _NAME_BYTES


def trails_with_rollups(events: Path, joined: Iterable[str], refused: Refused) -> list[Path]:
    """Returns the newest file of every writer in a directory, also of those of which only roll-ups
    are left; ``joined``: the names of those of which roll-ups of all hosts are. ``refused``: called
    for a directory that cannot be listed.
    """
    names = {name for name in joined if _is_writer(name)}
    for directory in (events, events / ROLLUPS):
        try:
            names.update(one.name for one in trails_in(directory))
        except OSError as error:  # what is in the other one is read
            refused(directory, error)
    return sorted(events / name for name in names)


def name_of(file: BinaryIO) -> str:
    """Returns what names an event file for good, as files are renamed: the checksum of its first
    line; "" without one. Leaves the file behind that line.
    """
    first = file.readline(_FIRST_BYTES)
    return f"{xxhash.xxh3_64_intdigest(first):016x}" if first.endswith(b"\n") else ""


@dataclass(slots=True)
class Covered:
    """How far each event file of a writer is rolled up, by its ``name_of``, and what of it before
    that is not: its roll-up was torn.
    """

    ends: dict[str, FileEnd] = field(default_factory=dict)
    gaps: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def touches(self, one: Rollup | FileEnd | FilePart) -> bool:
        """Returns True if any of these bytes are taken already."""
        known = self.ends.get(one.file)
        if known is None:
            return False
        if one.start >= known.end:
            return known.is_end
        gaps = self.gaps.get(one.file, ())
        return not any(gap[0] <= one.start and one.end <= gap[1] for gap in gaps)

    def take(self, one: Rollup | FileEnd | FilePart) -> bool:
        """Takes that a part is rolled up; False if some of it was taken already."""
        known = self.ends.get(one.file) or FileEnd(one.file, 0, 0)
        if one.end < one.start:
            return False
        gaps = self.gaps.get(one.file, [])
        if one.start < known.end:
            around = next((gap for gap in gaps if gap[0] <= one.start and one.end <= gap[1]), None)
            if around is None:
                return False
            gaps.remove(around)
            gaps += (around[0], one.start), (one.end, around[1])
        elif known.is_end:
            return False
        else:
            gaps.append((known.end, one.start))
            self.ends[one.file] = FileEnd(one.file, one.start, one.end, one.is_end)
        self.gaps[one.file] = sorted(gap for gap in gaps if gap[0] < gap[1])
        return True

    def blocks(self, file: BinaryIO) -> Iterator[bytes]:
        """Yields what of a file is not rolled up, in blocks of whole lines."""
        name = name_of(file)
        for start, end in self.gaps.get(name, ()):
            file.seek(start)
            yield from blocks_in(file, end - start)
        last = self.ends.get(name) or FileEnd(name, 0, 0)
        if not last.is_end:
            file.seek(last.end)
            yield from blocks_in(file)


def read_rollups(
    trail: Path, covered: Covered, counter: TornCounter, refused: Refused
) -> Iterator[Rollup]:
    """Yields the roll-ups of a writer that say more than is covered, oldest first, and notes what
    they cover. ``refused``: called for a file that cannot be read.
    """
    for line in _lines(trail, refused):
        try:
            if covered.touches(decode_end(line)):
                continue
            found = decode_rollup(inflate_rollup(line))
        except (msgspec.DecodeError, UnicodeDecodeError):
            counter.torn += 1
            continue
        if covered.take(found):
            yield found


def read_ends(trail: Path) -> Covered:
    """Returns how far the files of a writer are rolled up."""
    covered = Covered()
    for line in _lines(trail, lambda *_: None):
        try:
            end = decode_end(line)
            inflate_rollup(line)  # of one that is damaged the records are rolled up again
            covered.take(end)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return covered


def _lines(trail: Path, refused: Refused) -> Iterator[bytes]:
    for file in open_parts(rollup_path(trail), refused):
        try:
            for block in blocks_in(file):
                yield from (line for line in block.split(b"\n") if line.strip())
        except UNREADABLE as error:  # the others are read
            refused(Path(file.name), error)
