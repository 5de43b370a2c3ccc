"""Memory for this host's parity, in files of the arena that a keeper started later finds.

Two halves, each for the rows of one generation, and memory for what is handed on. Beside each half
lie the records of its rows: without one a row is nothing. So records are removed before their
half is written, and written when all of it is whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import ArenaError, FormatError
from holdfast.keeper.memory import Memory
from holdfast.redundancy.capacity import capacity, check_room
from holdfast.redundancy.groups import Division, Group, Host
from holdfast.redundancy.records import MAX_RECORD_BYTES, ParityRecord, Terms, unseal
from holdfast.redundancy.stripes import Kept
from holdfast.snapshot.arena import IMAGE_START, SlotFile, may_pass

HALVES = (0, 1)
_PASSING = "passing"
_RECORD = ".record"
_UNKNOWN_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class KeptRow:
    """A row that is whole: where in its half it lies, and its record."""

    half: int
    offset_bytes: int
    record: ParityRecord
    data: bytes
    """The record, sealed."""

    @property
    def members(self) -> tuple[str, ...]:
        """The hosts whose images it is made of."""
        return tuple(member.host for member in self.record.members)

    @property
    def images(self) -> dict[int, int]:
        """The sizes of these images, by rank."""
        of = (image for member in self.record.members for image in member.images)
        return {image.rank: image.image_bytes for image in of}


def row_path(arena: Path, name: str) -> Path:
    """Where a half of the rows in an arena lies, or what is handed on."""
    return arena / "parity" / f"{name}.rows"


class RowMemory:
    """The files; ``memory`` says how much room there is. Not for two threads at once.

    ArenaError when what an earlier keeper left cannot be opened now: it stays as it is.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.directory = memory.directory / "parity"
        self.directory.mkdir(mode=0o700, exist_ok=True)
        self._files: dict[str, SlotFile] = {}
        for name in (*map(str, HALVES), _PASSING):
            try:
                self._files[name] = SlotFile.open(self.path(name), writable=True)
            except ArenaError as error:
                if may_pass(error):
                    raise  # rows may be in it that the run needs
                # There is none, or it is half-made.
                self.path(name).unlink(missing_ok=True)
        self._count()

    def path(self, name: str) -> Path:
        """Where a half lies, or what is handed on."""
        return row_path(self._memory.directory, name)

    def _count(self) -> None:
        sizes = (IMAGE_START + file.capacity_bytes for file in self._files.values())
        self._memory.parity_bytes = sum(sizes)

    # ── what is there ────────────────────────────────────────────────────────────────────

    def scan(self) -> list[KeptRow]:
        """All rows that an earlier keeper left whole. ArenaError when one cannot be read now."""
        found = []
        for path in sorted(self.directory.glob(f"*{_RECORD}")):
            half, _, offset = path.name.removesuffix(_RECORD).partition("-")
            try:
                if path.lstat().st_size > MAX_RECORD_BYTES:
                    raise FormatError(f"{path} is no record of parity")
                data = path.read_bytes()
                row = KeptRow(int(half), int(offset), unseal(data, str(path)), data)
                if self._is_there(row):
                    found.append(row)
                    continue
            except OSError as error:  # too many open files, say: the row may be whole
                raise ArenaError(f"cannot read the record {path}: {error.strerror}") from error
            except (ValueError, FormatError):  # half-written, or not ours
                pass
            path.unlink(missing_ok=True)
        return found

    def _is_there(self, row: KeptRow) -> bool:
        file = self._files.get(str(row.half))
        is_ours = row.record.run_id == self._memory.run_id
        return (
            is_ours
            and file is not None
            and 0 <= row.offset_bytes <= file.capacity_bytes - row.record.size_bytes
        )

    # ── what is made ─────────────────────────────────────────────────────────────────────

    def forget(self, half: int) -> None:
        """The rows of this half are nothing any more: it may be written."""
        for path in self.directory.glob(f"{half}-*{_RECORD}"):
            path.unlink(missing_ok=True)

    def drop(self) -> None:
        """Give all of the memory back."""
        for file in self._files.values():
            file.path.unlink(missing_ok=True)
            file.close()
        self._files.clear()
        self._count()

    def make(self, terms: Terms, own: str, half: int) -> None:
        """Have room for both generations of such rows; slow. ArenaError says how much it takes."""
        division = division_of(terms)
        needed = capacity(division)
        there = self._memory.parity_bytes
        free = {member.host: _UNKNOWN_BYTES for member in terms.members}
        check_room(division, free | {own: self._memory.room_bytes() + there})
        passing = needed.shared - 2 * needed.rows
        self._make(str(half), needed.rows, is_free=True)
        self._make(str(1 - half), needed.rows, is_free=False)
        if passing:
            self._make(_PASSING, passing, is_free=True)

    def _make(self, name: str, size: int, *, is_free: bool) -> None:
        """``is_free``: whether what is in there may go, where it is too small."""
        file = self._files.get(name)
        if file is not None and (file.capacity_bytes >= size or not is_free):
            return
        if file is not None:
            del self._files[name]
            file.path.unlink(missing_ok=True)
            file.close()
            self._count()
        free = self._memory.room_bytes()
        self._files[name] = SlotFile.create(self.path(name), max(size, 1), free_bytes=free)
        self._count()

    def place(self, half: int, kept: Iterable[Kept]) -> dict[Kept, tuple[int, memoryview]]:
        """Where each of these rows goes: its offset, and the memory itself."""
        image, at = self._files[str(half)].image, 0
        found = {}
        for one in kept:
            found[one] = at, image[at : at + one.size_bytes]
            at += one.size_bytes
        return found

    def passing(self) -> tuple[Path, memoryview] | None:
        """What is handed on lies there, from ``IMAGE_START`` on; None while there is none."""
        file = self._files.get(_PASSING)
        return None if file is None else (file.path, file.image)

    def disbelieve(self, row: KeptRow) -> None:
        """A row is nothing any more."""
        self._record_path(row.half, row.offset_bytes).unlink(missing_ok=True)

    def patch(self, row: KeptRow, data: Mapping[int, bytes]) -> None:
        """Write these bytes into a row, by where they belong in it."""
        image = self._files[str(row.half)].image
        for start, piece in data.items():
            image[row.offset_bytes + start : row.offset_bytes + start + len(piece)] = piece

    def _record_path(self, half: int, offset: int) -> Path:
        return self.directory / f"{half}-{offset}{_RECORD}"

    def keep(self, half: int, rows: Iterable[tuple[int, bytes]]) -> list[KeptRow]:
        """All rows of a generation are whole: (offset, sealed record) of each. OSError."""
        found = []
        for offset, data in rows:
            path = self._record_path(half, offset)
            temporary = path.with_suffix(f".{os.getpid()}")
            try:
                temporary.write_bytes(data)
                temporary.rename(path)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
            found.append(KeptRow(half, offset, unseal(data, str(path)), data))
        return found


def division_of(terms: Terms) -> Division:
    """The group of these members alone, with what is coded of each."""
    hosts = (
        Host(member.host, image_bytes=tuple(image.coded_bytes for image in member.images))
        for member in terms.members
    )
    return Division((Group(tuple(hosts), terms.parity),), terms.parity)
