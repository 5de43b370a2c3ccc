"""Bytes that change in an arena, as bad memory or a torn write would change them.

Everything is written through the files, which are the same memory that keeper and trainers have
mapped: they see it at once, and are not told.
"""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdfast.errors import ArenaError, FormatError, UsageError
from holdfast.format.image import header_size
from holdfast.redundancy.records import ParityRecord, unseal
from holdfast.snapshot.arena import IMAGE_START, PAGE_BYTES, SLOT_SUFFIX, SlotFile, SlotRecord

Region = Literal["header", "data", "table"]
_SEQUENCE = slice(8, 16)


@dataclass(frozen=True, slots=True)
class Held:
    """A slot that holds a whole image."""

    path: Path
    record: SlotRecord
    data_start: int
    """Of the image: its header ends there."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of parity with its record: where in which file it lies."""

    path: Path
    offset_bytes: int
    record: ParityRecord
    record_path: Path


# ── what is there ────────────────────────────────────────────────────────────────────────────


def held(arena: Path) -> list[Held]:
    """Every whole image in the slots of an arena, the newest generation last."""
    found = []
    for path in sorted(arena.glob(f"*{SLOT_SUFFIX}")):
        with (
            suppress(ArenaError, FormatError),
            closing(SlotFile.open(path, writable=False)) as slot,
        ):
            record = slot.read_record()
            if record is not None and record.state == "captured":
                start = header_size(bytes(slot.image[:8]), str(path), record.image_bytes)
                found.append(Held(path, record, start))
    return sorted(found, key=lambda one: (one.record.incarnation, one.record.step))


def rows(arena: Path) -> list[Row]:
    """Every row of parity that is kept in an arena, the newest generation last."""
    found = []
    for path in sorted((arena / "parity").glob("*.record")):
        with suppress(FormatError, OSError):  # it may go while we look
            record = unseal(path.read_bytes(), str(path))
            half, _, offset = path.stem.partition("-")
            file = path.with_name(f"{half}.rows")
            found.append(Row(file, IMAGE_START + int(offset), record, path))
    return sorted(found, key=lambda one: (one.record.generation, one.record.stripe, one.record.row))


# ── what happens to it ───────────────────────────────────────────────────────────────────────


def flip(path: Path, at: int, *, bit: int = 0) -> None:
    """Change one bit of the byte ``at`` of a file; from its end when negative."""
    with path.open("r+b", buffering=0) as file:
        place = at if at >= 0 else path.stat().st_size + at
        file.seek(place)
        byte = file.read(1)
        if not byte:
            raise UsageError(f"{path} has no byte {at}")
        file.seek(place)
        file.write(bytes([byte[0] ^ (1 << bit)]))


def flip_image(one: Held, region: Region = "data", *, at: int = 0, bit: int = 0) -> None:
    """Change one bit of an image: of its header, its data, or its table of checksums.

    ``at``: which byte of that region; beyond its length it begins again.
    """
    size, start = one.record.image_bytes, one.data_start
    table = size - PAGE_BYTES  # its last page at least is table
    begin, end = {"header": (0, start), "data": (start, table), "table": (table, size)}[region]
    flip(one.path, IMAGE_START + begin + at % (end - begin), bit=bit)


def flip_row(row: Row, *, at: int = 0, bit: int = 0) -> None:
    """Change one bit of a row of parity; ``at`` begins again beyond its length."""
    if not row.record.size_bytes:
        raise UsageError(f"row {row.record.row} of stripe {row.record.stripe} has no bytes")
    flip(row.path, row.offset_bytes + at % row.record.size_bytes, bit=bit)


def tear_image(one: Held) -> None:
    """The second half of its data is not there, as if its copy had stopped in the middle."""
    middle = (one.data_start + one.record.image_bytes) // 2
    with one.path.open("r+b", buffering=0) as file:
        file.seek(IMAGE_START + middle)
        file.write(bytes(one.record.image_bytes - PAGE_BYTES - middle))


def tear_record(slot: Path) -> None:
    """Of a slot's newest record only the first half arrived, as of a writer that was killed."""
    with slot.open("r+b", buffering=0) as file:
        pages = [file.read(PAGE_BYTES) for _ in range(2)]
        sequences = [int.from_bytes(page[_SEQUENCE], "little") for page in pages]
        newest = sequences.index(max(sequences))
        used = len(pages[newest].rstrip(b"\0"))
        file.seek(newest * PAGE_BYTES + used // 2)
        file.write(bytes(used - used // 2))


def tear_row_record(row: Row) -> None:
    """Of the record of a row only the first half arrived."""
    data = row.record_path.read_bytes()
    row.record_path.write_bytes(data[: len(data) // 2])
