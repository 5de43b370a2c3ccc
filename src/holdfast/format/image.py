"""Lays out an image, one rank's share of the state at one step: a valid safetensors file.

The header is known before any byte is copied, so an image can be assembled in place in
shared memory, and the same bytes are then encoded, written, sent and read back. Its parts:

    8 bytes    header length, little-endian
    header     JSON, padded with spaces so that the data starts on a page
    frozen     tensors that hardly ever change, and ``__holdfast_gap__``: to the next block; only
               where there are enough of them to be stored in a file of their own
    tensors    by falling item size, so that each is aligned without gaps
    values     ``__holdfast_values__``: the plain values, JSON
    padding    ``__holdfast_pad__``: to the next page
    table      ``__holdfast_blocks__``: xxh3-64 of every 1 MiB block of all data before it

See docs/format/v1.md.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct

from holdfast.errors import ChecksumMismatch, FormatError, NewerFormat, UsageError
from holdfast.format.checksum import BLOCK_BYTES, Buffer, block_count, checksum, text, unpack_table
from holdfast.format.manifest import PARTS, unknown_features
from holdfast.geometry.box import ITEMSIZE, STORED_AS_BYTES, Box
from holdfast.geometry.codec import unique
from holdfast.geometry.leaves import MAX_DIMS

PAGE_BYTES = 4096
FORMAT_VERSION = "1"
VALUES, PAD, TABLE = "__holdfast_values__", "__holdfast_pad__", "__holdfast_blocks__"
GAP = "__holdfast_gap__"
RESERVED, METADATA = "__holdfast_", "__metadata__"
MAX_HEADER_BYTES = 100_000_000
#: Values are read at once; larger data belongs into tensors.
MAX_VALUES_BYTES = 1 << 30
#: Room in every header for the metadata, so that a longer step number never moves the data.
METADATA_ROOM_BYTES = 1024


def round_up(value: int, unit: int) -> int:
    """Returns the smallest multiple of ``unit`` that is not below ``value``."""
    return -(-value // unit) * unit


def volume(shape: Sequence[int]) -> int:
    """Returns the number of elements of ``shape``; 1 for a scalar."""
    count = 1
    for size in shape:
        count *= size
    return count


def piece_name(leaf: str, shape: Sequence[int], box: Box) -> str:
    """Returns the name of a piece in an image: the leaf's, and its box unless it is the whole
    leaf.
    """
    if box.start == (0,) * len(shape) and box.stop == tuple(shape):
        return leaf
    return leaf + "@" + ",".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True))


class Entry(msgspec.Struct, frozen=True):
    """One tensor in an image: ``offset`` counts bytes from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int

    @property
    def stop(self) -> int:
        """The offset behind its last byte."""
        return self.offset + self.size_bytes


def stored_form(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Returns the dtype and shape that an image gives a piece: bytes for types that safetensors
    cannot name.
    """
    if dtype in STORED_AS_BYTES:
        return "U8", (volume(shape) * ITEMSIZE[dtype],)
    return dtype, shape


def _entry_text(name: str, dtype: str, shape: Sequence[int], start: int, stop: int) -> str:
    key, sizes = msgspec.json.encode(name).decode(), ",".join(map(str, shape))
    return f'{key}:{{"dtype":"{dtype}","shape":[{sizes}],"data_offsets":[{start},{stop}]}}'


def entry_start(dtype: str, shape: tuple[int, ...]) -> str:
    """Returns what a header says of a piece, from behind its name up to its offsets."""
    text = _entry_text("", *stored_form(dtype, shape), 0, 0)
    return text.removeprefix('""').removesuffix("0,0]}")


def may_collide(leaves: Iterable[str]) -> bool:
    """True unless no two pieces of leaves of these names can have one name, or a reserved one."""
    return any("@" in name or name.startswith("__") for name in leaves)


class ImagePlan(msgspec.Struct, frozen=True):
    """The place of each tensor in an image; the same at every save of one layout."""

    entries: tuple[Entry, ...]
    tensor_bytes: int
    header_text: str
    data_start: int
    gap: tuple[int, int] | None = None
    """Begin and end of the zeros after frozen tensors, if there are such tensors."""


#: (name, dtype, shape).
Item = tuple[str, str, tuple[int, ...]]


def plan_image(items: Iterable[Item], frozen: Iterable[Item] = ()) -> ImagePlan:
    """Places tensors by falling item size, else in the given order; the ``frozen`` ones before the
    gap.

    Raises UsageError for a reserved name, and when two have one name (a leaf can be called like the
    piece of another).
    """
    first = _place(frozen, 0)
    frozen_stop = first[-1].stop if first else 0
    gap = (frozen_stop, round_up(frozen_stop, BLOCK_BYTES)) if first else None
    entries = [*first, *_place(items, gap[1] if gap else 0)]
    counted = Counter(entry.name for entry in entries)
    if any(name == METADATA or name.startswith(RESERVED) for name in counted):
        raise UsageError(f"{METADATA!r} and names beginning with {RESERVED!r} are the format's own")
    twice = sorted(name for name, count in counted.items() if count > 1)
    if twice:
        raise UsageError(f"two tensors of an image are both called {twice[0]!r}: rename one")
    return plan_entries(entries, gap)


def _place(items: Iterable[Item], offset: int) -> list[Entry]:
    """Places the tensors one after the other from ``offset`` on."""
    entries = []
    for name, dtype, shape in sorted(items, key=lambda item: -ITEMSIZE[item[1]]):
        entries.append(Entry(name, dtype, shape, offset, volume(shape) * ITEMSIZE[dtype]))
        offset = entries[-1].stop
    return entries


def plan_entries(entries: Sequence[Entry], gap: tuple[int, int] | None) -> ImagePlan:
    """Returns the plan of tensors whose places are given."""
    texts = [
        _entry_text(entry.name, *stored_form(entry.dtype, entry.shape), entry.offset, entry.stop)
        for entry in entries
    ]
    if gap is not None:
        texts.append(_entry_text(GAP, "U8", (gap[1] - gap[0],), *gap))
    stop = max(entries[-1].stop if entries else 0, gap[1] if gap else 0)
    return plan_text("".join("," + text for text in texts), stop, tuple(entries), gap)


def plan_text(
    header_text: str,
    tensor_bytes: int,
    entries: tuple[Entry, ...] = (),
    gap: tuple[int, int] | None = None,
) -> ImagePlan:
    """Returns the plan of tensors of which the header says ``header_text``."""
    size = len(header_text) if header_text.isascii() else len(header_text.encode())
    data_start = round_up(8 + size + METADATA_ROOM_BYTES, PAGE_BYTES)
    return ImagePlan(entries, tensor_bytes, header_text, data_start, gap)


class Image(msgspec.Struct, frozen=True):
    """An image about to be filled: its header, and the places of everything else.

    ``data_start`` counts from the start of the image; the other offsets from ``data_start``.
    """

    header: bytes
    data_start: int
    values_offset: int
    values_bytes: int
    table_offset: int
    table_entries: int
    size_bytes: int
    gap: tuple[int, int] | None = None

    @property
    def blocks(self) -> int:
        """The number of blocks in the table."""
        return block_count(self.table_offset)


def image_bytes(plan: ImagePlan, values_bytes: int) -> int:
    """Returns the size of a whole image of ``plan`` with values of this many bytes."""
    table_offset = round_up(plan.tensor_bytes + values_bytes, PAGE_BYTES)
    return plan.data_start + table_offset + 8 * _table_entries(table_offset)


def _table_entries(table_offset: int) -> int:
    return round_up(max(1, block_count(table_offset)), PAGE_BYTES // 8)


def fill_in(plan: ImagePlan, metadata: Mapping[str, str], values_bytes: int) -> Image:
    """Returns the image of ``plan`` for one generation and values of this many bytes."""
    if values_bytes > MAX_VALUES_BYTES:
        raise UsageError(
            f"the plain values of the state take {values_bytes} bytes as JSON, more than "
            f"{MAX_VALUES_BYTES}: keep large arrays as tensors"
        )
    values_stop = plan.tensor_bytes + values_bytes
    table_offset = round_up(values_stop, PAGE_BYTES)
    entries = _table_entries(table_offset)
    stop = table_offset + 8 * entries
    needs = {} if plan.gap is None else {"requires": PARTS}
    described = msgspec.json.encode({"holdfast": FORMAT_VERSION, **metadata, **needs}).decode()
    padding = table_offset - values_stop
    body = "".join(
        [
            '{"__metadata__":',
            described,
            plan.header_text,
            ",",
            _entry_text(VALUES, "U8", (values_bytes,), plan.tensor_bytes, values_stop),
            ",",
            _entry_text(PAD, "U8", (padding,), values_stop, table_offset),
            ",",
            _entry_text(TABLE, "U64", (entries,), table_offset, stop),
            "}",
        ]
    ).encode()
    room = plan.data_start - 8
    if len(body) > room:
        raise FormatError(f"the image's metadata take more than {METADATA_ROOM_BYTES} bytes")
    header = room.to_bytes(8, "little") + body.ljust(room)
    return Image(
        header,
        plan.data_start,
        plan.tensor_bytes,
        values_bytes,
        table_offset,
        entries,
        plan.data_start + stop,
        plan.gap,
    )


class Header(Struct, frozen=True):
    """A parsed image header. Offsets of entries count from ``data_start``."""

    metadata: dict[str, str]
    entries: dict[str, Entry]
    data_start: int
    values: Entry
    table: Entry
    size_bytes: int
    gap: Entry | None = None

    @property
    def frozen_bytes(self) -> int:
        """Bytes of data up to the end of the gap: whole blocks of frozen tensors, or none."""
        return 0 if self.gap is None else self.gap.stop

    @property
    def blocks(self) -> int:
        """The number of blocks in the table."""
        return block_count(self.table.offset)

    def piece(self, name: str, dtype: str, shape: tuple[int, ...]) -> Entry | None:
        """Returns the entry of this piece; None when it is not there, or has another dtype or
        shape.
        """
        entry = self.entries.get(name)
        if entry is None or (entry.dtype, entry.shape) != stored_form(dtype, shape):
            return None
        return entry


class _RawEntry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def header_size(first_bytes: Buffer, where: str, file_bytes: int) -> int:
    """Returns the bytes from the start of the file to its data, from its first 8 bytes; bounded."""
    raw = bytes(first_bytes)[:8]
    if len(raw) < 8:
        raise FormatError(f"{where} is cut short: {len(raw)} bytes, at least 8 expected")
    size = 8 + int.from_bytes(raw, "little")
    if size > min(file_bytes, MAX_HEADER_BYTES):
        raise FormatError(
            f"{where}: its header claims {size} bytes, the file has {file_bytes}; "
            "it is cut short or not an image"
        )
    return size


def parse_header(raw: Buffer, where: str, file_bytes: int) -> Header:
    """Reads and checks a header; ``raw`` is the file's beginning up to its data.

    Raises FormatError for anything a valid image cannot contain, NewerFormat for a version this
    reader does not know.
    """
    view = memoryview(raw)
    data_start = len(view)
    document = _decode(view[8:], where)
    metadata = _metadata(document, where)
    if data_start % PAGE_BYTES:
        raise FormatError(f"{where}: its data begin at byte {data_start}, not on a page")
    entries = _entries(document, where, file_bytes - data_start)
    gap = _take_gap(entries, where, PARTS in metadata.get("requires", "").split())
    values, table = _take_own(entries, where, file_bytes - data_start)
    return Header(metadata, entries, data_start, values, table, file_bytes, gap)


def _take_gap(entries: dict[str, Entry], where: str, is_expected: bool) -> Entry | None:
    """Removes the gap's entry from ``entries``; an image has a gap exactly if it requires that
    feature.
    """
    gap = entries.pop(GAP, None)
    if (gap is not None) != is_expected:
        raise FormatError(
            f"{where} {'requires' if is_expected else 'does not require'} the feature {PARTS!r}, "
            f"and has {'no' if is_expected else 'a'} {GAP!r}"
        )
    if gap is None:
        return None
    if (gap.dtype, len(gap.shape)) != ("U8", 1):
        raise FormatError(f"{where}: {GAP!r} is not a row of U8")
    if gap.stop % BLOCK_BYTES or gap.size_bytes >= BLOCK_BYTES:
        raise FormatError(
            f"{where}: {GAP!r} from {gap.offset} to {gap.stop} does not fill up a block"
        )
    return gap


def _take_own(entries: dict[str, Entry], where: str, data_bytes: int) -> tuple[Entry, Entry]:
    """Removes the entries of values, padding and table from ``entries``: (values, table), where
    they must be.
    """
    own = {name: entries.pop(name) for name in [*entries] if name.startswith(RESERVED)}
    for name in (VALUES, PAD, TABLE):
        if name not in own:
            raise FormatError(f"{where} has no {name!r}: it is not a Holdfast image")
    values, pad, table = own.pop(VALUES), own.pop(PAD), own.pop(TABLE)
    if own:
        raise FormatError(f"{where} has {min(own)!r}, a name of the format's own that it has not")
    for entry, dtype in ((values, "U8"), (pad, "U8"), (table, "U64")):
        if (entry.dtype, len(entry.shape)) != (dtype, 1):
            raise FormatError(f"{where}: {entry.name!r} is not a row of {dtype}")
    if values.size_bytes > MAX_VALUES_BYTES:
        raise FormatError(
            f"{where}: its values claim {values.size_bytes} bytes, more than any have"
        )
    if (values.stop, pad.stop, table.stop) != (pad.offset, table.offset, data_bytes):
        raise FormatError(f"{where}: values, padding and block table are not its end, in order")
    if table.offset != round_up(values.stop, PAGE_BYTES):
        raise FormatError(f"{where}: its block table is not on the page behind its values")
    if table.shape != (_table_entries(table.offset),):
        raise FormatError(
            f"{where}: its block table has {table.shape[0]} entries, which is not "
            f"what {table.offset} bytes need"
        )
    return values, table


def _decode(raw: memoryview, where: str) -> dict[str, msgspec.Raw]:
    try:
        document = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        _refuse_twice(bytes(raw), sum(name != METADATA for name in document))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: the header is not the JSON of an image: {error}") from None
    return document


def _refuse_twice(raw: bytes, entries: int) -> None:
    """Raises ValueError for a name that occurs twice: readers differ in which of the two they take.

    Checking every name takes longer than all other parsing, so it is done only when a count shows
    that it is possible: without escapes, each entry has each of its keys exactly once.
    """
    counts = [raw.count(key) for key in (b'"dtype"', b'"shape"', b'"data_offsets"')]
    if counts != [entries] * 3 or raw.count(b'"__metadata__"') != 1 or b"\\u" in raw:
        json.loads(raw.decode(), object_pairs_hook=unique)


def _metadata(document: dict[str, msgspec.Raw], where: str) -> dict[str, str]:
    try:
        raw = bytes(document.pop(METADATA, b"{}"))
        metadata = msgspec.convert(json.loads(raw, object_pairs_hook=unique), dict[str, str])
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: the header's metadata are not strings: {error}") from None
    version = metadata.get("holdfast")
    if version is None:
        raise FormatError(f"{where} is a safetensors file, but not a Holdfast image")
    unknown = unknown_features(metadata.get("requires", "").split())
    if version != FORMAT_VERSION or unknown:
        features = f" with the features {unknown}" if unknown else ""
        raise NewerFormat(
            f"{where}: image format {version}{features}, this Holdfast reads {FORMAT_VERSION}; "
            "upgrade it"
        )
    return metadata


def _refuse_form(entry: _RawEntry, where: str) -> None:
    """Raises FormatError for an element type, shape or place that no tensor of an image has."""
    if entry.dtype not in ITEMSIZE or entry.dtype in STORED_AS_BYTES:
        raise FormatError(f"{where}: safetensors knows no dtype {entry.dtype!r:.50}")
    # The number of dimensions first: multiplying millions of them would take too long.
    if len(entry.shape) > MAX_DIMS or any(size < 0 for size in entry.shape):
        raise FormatError(f"{where}: no tensor has the shape {entry.shape!r:.50}")
    if entry.data_offsets[0] % ITEMSIZE[entry.dtype]:
        raise FormatError(f"{where}: {entry.dtype} at byte {entry.data_offsets[0]} is not aligned")


def _entries(document: dict[str, msgspec.Raw], where: str, data_bytes: int) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for name, raw in document.items():
        try:
            entry = msgspec.json.decode(raw, type=_RawEntry)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{where}: entry {name!r}: {error}") from None
        start, stop = entry.data_offsets
        _refuse_form(entry, f"{where}: entry {name!r}")
        size = volume(entry.shape) * ITEMSIZE[entry.dtype]
        if stop - start != size:
            raise FormatError(
                f"{where}: entry {name!r} has {stop - start} bytes, its shape needs {size}"
            )
        entries[name] = Entry(name, entry.dtype, tuple(entry.shape), start, size)
    expected = 0
    for placed in sorted(entries.values(), key=lambda e: (e.offset, e.size_bytes)):
        if placed.offset != expected:
            raise FormatError(f"{where}: entry {placed.name!r} leaves a gap or overlaps another")
        expected = placed.stop
    if expected != data_bytes:
        raise FormatError(f"{where}: {data_bytes} bytes of data, its entries need {expected}")
    return entries


# Splits an image in memory into two files in storage: frozen tensors apart from live ones.
#
# In an image with a gap the frozen tensors fill whole blocks in front of all others. So both files
# have blocks of the one image, with unchanged checksums; only headers are new. The live file equals
# the image of a state without these leaves. The frozen one contains nothing of the generation, so
# that the same content is always the same file, byte for byte.


#: The metadata of a frozen part, beside ``rank``.
PART_METADATA = {"part": "frozen"}


class Split(msgspec.Struct, frozen=True):
    """The two files that an image makes; ``frozen_blocks`` of its blocks are in ``part``."""

    live: Image
    part: Image
    frozen_blocks: int

    def tables(self, sums: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Returns the block checksums of (live, part), from those of the image."""
        return sums[self.frozen_blocks :], sums[: self.frozen_blocks]


def split(image: Header) -> Split | None:
    """Returns how ``image`` is stored in two files; None when it has no gap."""
    if image.gap is None:
        return None
    frozen_bytes = image.frozen_bytes
    in_order = sorted(image.entries.values(), key=lambda entry: (entry.offset, entry.size_bytes))
    frozen = [entry for entry in in_order if entry.offset < frozen_bytes]
    live = [_moved(entry, -frozen_bytes) for entry in in_order if entry.offset >= frozen_bytes]
    about = {key: value for key, value in image.metadata.items() if key != "requires"}
    gap = (image.gap.offset, image.gap.stop)
    part_about = {**PART_METADATA, "rank": about.get("rank", "0")}
    return Split(
        fill_in(plan_entries(live, None), about, image.values.size_bytes),
        fill_in(plan_entries(frozen, gap), part_about, 0),
        frozen_bytes // BLOCK_BYTES,
    )


def join(live: Header, part: Header, where: str) -> Header:
    """Returns the header of the one image that these two files are the parts of.

    Raises FormatError when they are not.
    """
    frozen_bytes = part.frozen_bytes
    if live.gap is not None or part.gap is None or part.table.offset != frozen_bytes:
        raise FormatError(f"{where} is not an image and the frozen part that belongs to it")
    twice = sorted(live.entries.keys() & part.entries.keys())
    if twice:
        raise FormatError(f"{where}: {twice[0]!r} is in the image and in its frozen part")
    moved = {name: _moved(entry, frozen_bytes) for name, entry in live.entries.items()}
    return Header(
        live.metadata | {"requires": PARTS},
        part.entries | moved,
        live.data_start,
        _moved(live.values, frozen_bytes),
        _moved(live.table, frozen_bytes),
        live.size_bytes + frozen_bytes,
        part.gap,
    )


def _moved(entry: Entry, by: int) -> Entry:
    return msgspec.structs.replace(entry, offset=entry.offset + by)


# Locates the block table of an image, and checks bytes of the image against it.
#
# Both work without the header: a peer that pulls a part of an image knows only its size and the
# checksum of its table, and uses no byte that was not checked. See docs/format/v1.md.


_COVERED_BYTES = PAGE_BYTES // 8 * BLOCK_BYTES  # by one page of a table


def table_offset(data_bytes: int) -> int:
    """Returns the offset of the block table in an image's data, given the size of all data.

    Raises FormatError for a size that no image has.
    """
    pages = max(1, -(-data_bytes // (_COVERED_BYTES + PAGE_BYTES)))
    offset = data_bytes - pages * PAGE_BYTES
    is_one = offset > (pages - 1) * _COVERED_BYTES or (offset, pages) == (0, 1)
    if offset % PAGE_BYTES or not is_one:
        raise FormatError(f"no image has {data_bytes} bytes of data with their block table")
    return offset


class BlockTable:
    """The block checksums of one image, trusted because the image's seal has the table's own
    checksum.

    ``data_bytes`` counts the data with the table, as offsets do: from the first block on.
    """

    def __init__(self, table: Buffer, *, data_bytes: int, table_xxh3: str, where: str) -> None:
        self.offset = table_offset(data_bytes)
        self._table, self._where = bytes(table), where
        found = text(checksum(self._table))
        if len(self._table) != data_bytes - self.offset or found != table_xxh3:
            raise ChecksumMismatch(
                f"the block table of {where}: stored checksum {table_xxh3}, read {found} of "
                f"{len(self._table)} bytes; its bytes changed after they were written",
                image=where,
            )
        self._sums = unpack_table(self._table, block_count(self.offset))

    def check(self, start: int, data: memoryview) -> None:
        """Raises ChecksumMismatch unless ``data``, from byte ``start`` on, equals the captured
        bytes.

        ``start`` is where a block begins, and ``data`` ends with one, or with the image.
        """
        stop = start + len(data)
        for number in range(start // BLOCK_BYTES, block_count(min(stop, self.offset))):
            first = number * BLOCK_BYTES
            last = min(first + BLOCK_BYTES, self.offset)
            found = checksum(data[first - start : last - start])
            if found != self._sums[number]:
                raise self._mismatch(f"block {number}", text(self._sums[number]), text(found))
        if stop > self.offset:
            first = max(start, self.offset)
            if data[first - start :] != self._table[first - self.offset : stop - self.offset]:
                raise self._mismatch("the block table", "one", "another")

    def _mismatch(self, what: str, stored: str, found: str) -> ChecksumMismatch:
        return ChecksumMismatch(
            f"{what} of {self._where}: stored {stored}, read {found}; its bytes changed after they "
            "were written, or on their way",
            image=self._where,
        )
