"""Reads the parity shards that lie in an arena: their records, and their bytes in shared memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import ArenaError, HoldfastError
from holdfast.parity.planning.record import MAX_RECORD_BYTES, ParityRecord, unseal
from holdfast.protocol.arena import IMAGE_START

RECORD_SUFFIX = ".record"


def shard_path(arena: Path, name: str) -> Path:
    """Return the path of a parity buffer in an arena, or of the transit buffer."""
    return arena / "parity" / f"{name}.rows"


class ArenaShard(NamedTuple):
    """A parity shard in an arena: the buffer that it lies in, where in it, and its record."""

    arena: Path
    half: str
    offset_bytes: int
    record: ParityRecord

    def map(self) -> MappedRanges:
        """Map its bytes. Raises ArenaError if they cannot be mapped."""
        record, path = self.record, shard_path(self.arena, self.half)
        name = f"row {record.row} of stripe {record.stripe} of {record.attempt}"
        return MappedRanges(path, IMAGE_START + self.offset_bytes, record.size_bytes, name)


def shards_in(arena: Path) -> Iterator[ArenaShard]:
    """Yield the shards of an arena; those whose record is partly written, or unreadable, are none.

    A keeper may write others in their place meanwhile: who decodes from them checks the result.
    """
    for path in sorted((arena / "parity").glob(f"*{RECORD_SUFFIX}")):
        half, _, offset = path.name.removesuffix(RECORD_SUFFIX).partition("-")
        with suppress(OSError, ValueError, HoldfastError):
            if path.lstat().st_size <= MAX_RECORD_BYTES:
                yield ArenaShard(arena, half, int(offset), unseal(path.read_bytes(), str(path)))


class MappedRanges:
    """A parity shard in this host's shared memory, read like a file."""

    is_mapped = True

    def __init__(self, path: Path, offset_bytes: int, size_bytes: int, name: str) -> None:
        self.name, self.size_bytes = name, size_bytes
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                found = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise ArenaError(f"cannot map {name}: {error}") from error
        self._view = memoryview(found)[offset_bytes : offset_bytes + size_bytes]
        if len(self._view) < size_bytes:
            raise ArenaError(f"{name} has {len(self._view)} bytes, not {size_bytes}")

    def view(
        self, start: int, stop: int, staging: bytearray | memoryview, *, is_shared: bool = False
    ) -> memoryview:
        """Return the shared memory itself; see ``ImageFile``."""
        return self._view[start:stop]
