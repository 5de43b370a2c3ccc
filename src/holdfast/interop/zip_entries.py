"""Finds where the entries of a ``torch.save`` file lie: a zip whose entries are stored as they are.

What two readers of one zip could see differently is refused: entries of one name, entries that
overlap, local headers that contradict the directory, compressed and hidden ones.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.errors import ForeignFormatError

#: Each is looked at where it lies; a state has far fewer storages.
MAX_ENTRIES = 1 << 17
MAX_DIRECTORY_BYTES = 128 << 20
MAX_NAME_BYTES = 1024
#: Entries that are read whole: pickles and short texts.
MAX_WHOLE_BYTES = 256 << 20

_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_LONG = 0xFFFFFFFF
#: Sizes follow behind the data; the name is UTF-8. Whoever sets another hides something.
_SIZES_FOLLOW, _UTF8 = 0x8, 0x800

#: Reads bytes of a file: (offset, size).
ReadAt = Callable[[int, int], bytes]


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """One entry; ``offset`` is that of its data in the file, ``crc`` as the directory says."""

    name: str
    offset: int
    size_bytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class _Listed:
    name: bytes
    flags: int
    crc: int
    size_bytes: int
    header: int
    at: int
    """The offset of the entry in the directory."""


class ZipFile:
    """The entries of a zip that begins at ``begin`` in a file and has ``size_bytes``."""

    def __init__(self, read: ReadAt, begin: int, size_bytes: int, where: str) -> None:
        self._read, self._begin, self._size, self._where = read, begin, size_bytes, where
        directory, count, start = self._find_directory()
        listed = self._list(directory, count, start)
        self.entries = self._place(listed, start)
        #: False where the writer left no checksum of any entry, as torch may be told to.
        self.has_sums = any(entry.crc for entry in self.entries.values())

    def read(self, name: str) -> bytes:
        """A whole entry, compared with its checksum."""
        entry = self.entries[name]
        if entry.size_bytes > MAX_WHOLE_BYTES:
            raise self._error(f"{name} has {entry.size_bytes} bytes", entry.offset)
        data = self._read(entry.offset, entry.size_bytes)
        if self.has_sums and zlib.crc32(data) != entry.crc:
            raise self._error(
                f"{name} has the checksum {zlib.crc32(data):08x}, stored is {entry.crc:08x}: its "
                "bytes changed after they were written",
                entry.offset,
            )
        return data

    def _error(self, why: str, offset: int) -> ForeignFormatError:
        text = f"{self._where}, byte {offset}: {why}"
        return ForeignFormatError(text, path=self._where, offset=offset)

    def _at(self, offset: int, size_bytes: int) -> bytes:
        """Bytes of the zip, counted from its begin."""
        if offset < 0 or offset + size_bytes > self._size:
            raise self._error(
                f"a zip of {self._size} bytes names byte {offset + size_bytes} of itself",
                self._begin,
            )
        return self._read(self._begin + offset, size_bytes)

    def _find_directory(self) -> tuple[bytes, int, int]:
        """The directory, how many entries it has, and where in the zip it begins."""
        if self._size < _END.size:
            raise self._error(f"{self._size} bytes are no zip", self._begin)
        at = self._size - _END.size
        mark, disk, first, here, count, size, start, comment = _END.unpack(self._at(at, _END.size))
        if mark != b"PK\5\6" or comment:
            raise self._error(
                "no zip ends here: the file was cut short, or something follows behind it",
                self._begin + at,
            )
        stop = at
        if at >= _LOCATOR.size:
            mark, part, where, parts = _LOCATOR.unpack(self._at(at - _LOCATOR.size, _LOCATOR.size))
            if mark == b"PK\6\7":
                if part or parts > 1 or where + _END64.size + _LOCATOR.size != at:
                    raise self._error(
                        "the end of its directory is somewhere else", self._begin + at
                    )
                short = count, size, start
                mark, _, _, _, disk, first, here, count, size, start = _END64.unpack(
                    self._at(where, _END64.size)
                )
                stop = where
                is_same = all(
                    a in (b, limit)
                    for a, b, limit in zip(
                        short, (count, size, start), (0xFFFF, _LONG, _LONG), strict=True
                    )
                )
                if mark != b"PK\6\6" or not is_same:
                    raise self._error("it has two ends that differ", self._begin + where)
        if disk or first or here != count or start + size != stop:
            raise self._error("its directory is not its end", self._begin + at)
        if count > MAX_ENTRIES or size > MAX_DIRECTORY_BYTES or size < count * _CENTRAL.size:
            raise self._error(f"a directory of {count} entries in {size} bytes", self._begin + at)
        return self._at(start, size), count, start

    def _list(self, directory: bytes, count: int, start: int) -> list[_Listed]:
        found: list[_Listed] = []
        at = 0
        for _ in range(count):
            offset = self._begin + start + at
            if at + _CENTRAL.size > len(directory):
                raise self._error("its directory is cut short", offset)
            fields = _CENTRAL.unpack_from(directory, at)
            mark, _, _, flags, method, _, _, crc, packed, size = fields[:10]
            names, extras, comments, disk, _, _, header = fields[10:]
            at += _CENTRAL.size
            if mark != b"PK\1\2" or at + names + extras + comments > len(directory):
                raise self._error("its directory is cut short, or not one", offset)
            name, extra = directory[at : at + names], directory[at + names : at + names + extras]
            at += names + extras + comments
            self._refuse_form(name, flags, method, disk, offset)
            size, packed, header = self._long(extra, [size, packed, header], offset)
            if packed != size:
                raise self._error(f"{name!r:.100} is stored, with two sizes", offset)
            found.append(_Listed(name, flags, crc, size, header, offset))
        if at != len(directory):
            raise self._error("its directory has more than its entries", self._begin + start + at)
        return found

    def _refuse_form(self, name: bytes, flags: int, method: int, disk: int, offset: int) -> None:
        if method:
            raise self._error(f"{name!r:.100} is compressed, which torch never does", offset)
        if flags & ~(_SIZES_FOLLOW | _UTF8) or disk:
            raise self._error(f"{name!r:.100} has the flags {flags:#x}: it may be hidden", offset)
        parts = name.split(b"/")
        is_text = name.isascii() and name.decode("ascii").isprintable()
        if not is_text or len(name) > MAX_NAME_BYTES or b"\\" in name:
            raise self._error(f"an entry is called {name!r:.100}", offset)
        if any(part in (b"", b".", b"..") for part in parts):
            raise self._error(f"{name!r:.100} is no name below its file", offset)

    def _long(self, extra: bytes, values: list[int], offset: int) -> list[int]:
        """The values, those that do not fit into 32 bits from the field for them."""
        wanted = [number for number, value in enumerate(values) if value == _LONG]
        at = 0
        while at + 4 <= len(extra):
            kind, size = struct.unpack_from("<HH", extra, at)
            body = extra[at + 4 : at + 4 + size]
            at += 4 + size
            if kind == 1 and wanted:
                if len(body) < 8 * len(wanted):
                    raise self._error("a long size is cut short", offset)
                for place, number in enumerate(wanted):
                    values[number] = struct.unpack_from("<Q", body, 8 * place)[0]
                wanted = []
        if wanted:
            raise self._error("a long size is not there", offset)
        return values

    def _place(self, listed: list[_Listed], directory: int) -> dict[str, ZipEntry]:
        """Where the data of each entry are, after its local header was compared."""
        found: dict[str, ZipEntry] = {}
        end = 0
        for one in sorted(listed, key=lambda each: each.header):
            if one.header < end:
                raise self._error(f"{one.name!r:.100} overlaps another entry", one.at)
            offset = self._compare(one, directory)
            end = offset + one.size_bytes
            if end > directory:
                raise self._error(f"{one.name!r:.100} reaches into the directory", one.at)
            name = one.name.decode("ascii")
            if name in found:
                raise self._error(f"two entries are called {name!r:.100}", one.at)
            found[name] = ZipEntry(name, self._begin + offset, one.size_bytes, one.crc)
        folded = {name.casefold() for name in found}
        if len(folded) != len(found):
            raise self._error("two entries differ by capitals only", self._begin + directory)
        return found

    def _compare(self, one: _Listed, directory: int) -> int:
        if one.header + _LOCAL.size + len(one.name) > directory:
            raise self._error(f"{one.name!r:.100} lies outside of the file", one.at)
        raw = self._at(one.header, _LOCAL.size + len(one.name))
        mark, _, flags, method, _, _, crc, packed, size, names, extras = _LOCAL.unpack_from(raw)
        offset: int = one.header + _LOCAL.size + names + extras
        if mark != b"PK\3\4" or raw[_LOCAL.size :] != one.name or names != len(one.name):
            raise self._error(
                f"{one.name!r:.100} is called otherwise where it lies", self._begin + one.header
            )
        follow = bool(flags & _SIZES_FOLLOW)
        sizes = {(one.size_bytes, one.size_bytes, one.crc)}
        if follow:
            sizes |= {(0, 0, 0), (one.size_bytes, one.size_bytes, 0), (_LONG, _LONG, 0)}
        if (packed, size) == (_LONG, _LONG):
            extra = self._at(one.header + _LOCAL.size + names, extras)
            size, packed = self._long(extra, [size, packed], self._begin + one.header)
        if method or flags != one.flags or (packed, size, crc) not in sizes:
            raise self._error(
                f"{one.name!r:.100} has other sizes, flags or another checksum where it lies than "
                "in the directory",
                self._begin + one.header,
            )
        return offset
