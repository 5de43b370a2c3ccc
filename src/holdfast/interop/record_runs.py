"""Reads the records of DCP's metadata by columns: all alike at once, no object for each of them.

Metadata of many ranks are records of three classes, each written by the same opcodes as the one
before. Where these very opcodes stand, one part after the other of all records is read into arrays.
The machine goes over a run of them in one step and has ``Rows`` in their place. Whatever needs one
of them by itself is ``Unlike`` metadata: then ``interop.pickles`` reads all opcode by opcode.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from holdfast.interop.pickle_records import DCP_FILES, DCP_METADATA, GlobalName, Record

Numbers: TypeAlias = NDArray[np.int64]


class Varying(Enum):
    """What differs between records of one form; ``value``: how one looks."""

    NUMBER = rb"(?:K.|M..|J.{4}|\x8a\x05.{5}|\x8a\x06.{6})"
    SIZES = (
        rb"(?:\)|\(?(?:K.|M..|J.{4}){1,8}[\x85-\x87t]\x94)\x85\x94R\x94"  # torch.Size of a tuple
    )
    TEXT = rb"(?:\x8c.[^\x94]*\x94|h.|j.{4})"  # spelled out, or a place of the memo


_NEW, _SET = b")\x81\x94}\x94(", b"ub"
#: The opcode that makes a record: few bytes are like it.
_RARE = 0x81
#: Records are looked for in so many bytes at once, and so many are read: what that takes stays in
#: the cache.
_WINDOW_BYTES, _ROWS_AT_ONCE = 1 << 19, 1 << 13
_SIZE = GlobalName("torch", "Size")
_CHUNK = GlobalName(DCP_METADATA, "ChunkStorageMetadata")
_INDEX = GlobalName(DCP_METADATA, "MetadataIndex")
_INFO = GlobalName(DCP_FILES, "_StorageInfo")
#: The opcodes of records in turn; what is no part of one is a name that the memo has.
_CHUNK_FORM = (_CHUNK, _NEW, "offsets", _SIZE, Varying.SIZES, "sizes", _SIZE, Varying.SIZES, _SET)
_PAIR_FORM = (
    *(
        _INDEX,
        _NEW,
        "fqn",
        Varying.TEXT,
        "index",
        Varying.NUMBER,
        "offset",
        _SIZE,
        Varying.SIZES,
        _SET,
    ),
    *(
        _INFO,
        _NEW,
        "relative_path",
        Varying.TEXT,
        "offset",
        Varying.NUMBER,
        "length",
        Varying.NUMBER,
        _SET,
    ),
)
#: More records than the metadata of any checkpoint have; dimensions that columns are made for.
MAX_RECORDS = 2_000_000
MAX_COLUMNS = 8
#: At most what is needed for a record while columns are read, without its dimensions.
_ROW_BYTES, _DIM_BYTES = 320, 16
_TEXT_BYTES = 200
#: Texts come again after so many others at most: the tensors of a rank in turn.
_MAX_LAG = 1 << 14
#: Metadata from so many bytes on are read by columns.
MANY_BYTES = 1 << 16


class Unlike(Exception):
    """These metadata have a record of a run in another place than DCP puts it."""


class Machine(Protocol):
    """What a run of records changes of an interpreter: it is as if each had been interpreted."""

    data: memoryview
    at: int
    stack: list[Any]
    memo: list[Any]
    room_bytes: int

    def charge(self, cost_bytes: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of many records: ``values`` has 0 behind the ``ndim`` numbers of each."""

    ndim: Numbers
    values: Numbers


@dataclass(frozen=True, slots=True)
class Texts:
    """A text of many records, as a number in ``Columns.texts``.

    ``named``: the place of the memo that has it, or -1; ``order``: which object of its record it
    is, where it is spelled out.
    """

    number: Numbers
    named: Numbers
    order: Numbers


@dataclass(slots=True)
class Columns:
    """All records of one form, one row for each: where it ends, and what it adds to the memo."""

    is_pair: bool
    begin: Numbers
    end: Numbers
    parts: list[Any]
    memo: Numbers
    """How many objects the records before a row have added to the memo."""
    last: Numbers
    """Behind the last row of the run that a row is in; the row itself where it is no record."""
    texts: list[str]
    numbers: dict[str, int]

    @property
    def offsets(self) -> Sizes:
        """Where the boxes begin."""
        found: Sizes = self.parts[2 if self.is_pair else 0]
        return found


@dataclass(eq=False, slots=True)
class Rows:
    """The records in the rows ``first`` up to ``stop``; ``place``: of the first in the memo."""

    columns: Columns
    first: int
    stop: int
    place: int

    def text(self, place: int, before: int, order: int = 0) -> str:
        """The text that a place of the memo has when ``order`` objects of row ``before`` are there.

        Unlike where it has none, or none yet.
        """
        columns = self.columns
        inside = place - self.place + int(columns.memo[self.first])
        row = int(np.searchsorted(columns.memo, inside, "right")) - 1
        order_there = inside - int(columns.memo[row])
        if columns.is_pair and (row, order_there) < (before, order):
            for texts in (columns.parts[0], columns.parts[3]):
                if texts.named[row] < 0 and texts.order[row] == order_there:
                    return columns.texts[int(texts.number[row])]
        raise Unlike


class RecordRuns:
    """The runs of one pickle."""

    def __init__(self) -> None:
        self._forms: dict[bool, Columns] = {}

    def forget(self) -> None:
        """Another object has taken a place of the memo: it may be one that a record names."""
        if self._forms:
            raise Unlike

    def follow(self, record: Record, machine: Machine) -> None:
        """Take what is like ``record``, which was the last, as far as that reaches."""
        is_pair = record.kind == _INFO.name
        if not is_pair and record.kind != _CHUNK.name:
            return
        columns = self._forms.get(is_pair) or self._learn(is_pair, machine)
        if columns is None:
            return
        first = int(columns.begin.searchsorted(machine.at))
        stop = int(columns.last[first])
        if columns.begin[first] != machine.at or stop == first:
            return
        rows = Rows(columns, first, stop, len(machine.memo))
        count = int(columns.memo[stop] - columns.memo[first])
        machine.charge(8 * count)
        if is_pair:
            self._name(rows, machine.memo)
        machine.memo += [rows] * count
        machine.stack += [rows, rows] if is_pair else [rows]
        machine.at = int(columns.end[stop - 1])

    def _name(self, rows: Rows, memo: list[Any]) -> None:
        """Find the texts that records take from the memo, each place once."""
        columns = rows.columns
        for texts in (columns.parts[0], columns.parts[3]):
            named = texts.named[rows.first : rows.stop]
            if named.max() < 0:
                continue
            places, firsts, which = np.unique(named, return_index=True, return_inverse=True)
            found = texts.number[rows.first : rows.stop][firsts]
            for number, (place, first) in enumerate(
                zip(places.tolist(), firsts.tolist(), strict=True)
            ):
                if place >= 0:
                    row = rows.first + first
                    text = _text_at(memo, rows, place, row, int(texts.order[row]))
                    found[number] = columns.numbers.setdefault(text, len(columns.texts))
                    if found[number] == len(columns.texts):
                        columns.texts.append(text)
            here = texts.number[rows.first : rows.stop]
            here[:] = np.where(named < 0, here, found[which.reshape(-1)])

    def _learn(self, is_pair: bool, machine: Machine) -> Columns | None:
        """Read the columns of a form, as the record that follows has it; None where none does."""
        form = _PAIR_FORM if is_pair else _CHUNK_FORM
        searched = b"".join(b"(%b)" % _look(part) for part in form)
        matched = re.compile(searched, re.DOTALL).match(machine.data, machine.at)
        if matched is None:
            return None
        parts: list[bytes | Varying] = []
        for part, there in zip(form, matched.groups(), strict=True):
            if isinstance(part, Varying):
                parts.append(part)
                continue
            if not isinstance(part, bytes):
                place = int.from_bytes(there[1:], "little")
                known = machine.memo[place] if place < len(machine.memo) else None
                if type(known) is not type(part) or known != part:
                    return None
            before = parts[-1] if parts else None
            if isinstance(before, bytes):
                parts[-1] = before + there
            else:
                parts.append(there)
        return self._forms.setdefault(is_pair, _read(is_pair, parts, machine))


def _look(part: Any) -> bytes:
    """The expression of a part of a form."""
    if isinstance(part, Varying):
        return part.value
    return re.escape(part) if isinstance(part, bytes) else b"h.|j.{4}"


def _text_at(memo: list[Any], rows: Rows, place: int, row: int, order: int) -> str:
    if place >= rows.place:
        return rows.text(place, row, order)
    found = memo[place]
    if isinstance(found, Rows):
        return found.text(place, found.stop)
    if type(found) is not str:
        raise Unlike
    return found


def _read(is_pair: bool, parts: list[bytes | Varying], machine: Machine) -> Columns:
    """Read every record of a form from here on; Unlike where that takes too much memory."""
    data, first = machine.data, parts[0]
    assert isinstance(first, bytes)
    begin = _places(data, machine.at, first)
    cost_bytes = len(begin) * (_ROW_BYTES + 2 * MAX_COLUMNS * _DIM_BYTES)
    if cost_bytes > machine.room_bytes:
        raise Unlike
    machine.charge(cost_bytes)
    cursors = [
        _Lockstep(data, begin[at : at + _ROWS_AT_ONCE], first)
        for at in range(0, max(1, len(begin)), _ROWS_AT_ONCE)
    ]
    read = [[cursor.take(part) for part in parts[1:]] for cursor in cursors]
    columns = [_joined(some) for some in zip(*read, strict=True) if some[0] is not None]
    end, is_like, added = (
        np.concatenate([getattr(cursor, name) for cursor in cursors])
        for name in ("at", "is_like", "memo")
    )
    is_record = is_like & (end + 8 <= len(data))
    texts: list[str] = []
    numbers: dict[str, int] = {}
    if is_pair:
        for number in (0, 3):
            columns[number] = _decode(
                cursors[0].words, columns[number], is_record, texts, numbers, machine
            )
    memo = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.where(is_record, added, 0))])
    # A run ends behind a record that no other follows at once.
    rows = np.arange(len(begin))
    follows = is_record[:-1] & is_record[1:] & (end[:-1] == begin[1:])
    ends = np.append(np.where(follows, len(begin), rows[:-1] + 1), len(begin))
    last = np.where(is_record, np.minimum.accumulate(ends[::-1])[::-1], rows)
    begin, last = np.append(begin, len(data)), np.append(last, len(begin))  # where none begins
    return Columns(is_pair, begin, end, columns, memo, last, texts, numbers)


def _joined(some: tuple[Any, ...]) -> Any:
    """One column of those of several runs of rows."""
    if isinstance(some[0], Sizes):
        ndim = np.concatenate([one.ndim for one in some])
        values = np.zeros((len(ndim), max(one.values.shape[1] for one in some)), np.int64)
        at = 0
        for one in some:
            rows, width = one.values.shape
            values[at : at + rows, :width] = one.values
            at += rows
        return Sizes(ndim, values)
    if isinstance(some[0], tuple):
        return tuple(map(np.concatenate, zip(*some, strict=True)))
    return np.concatenate(some)


def _places(data: memoryview, start: int, text: bytes) -> Numbers:
    """Where ``text`` stands from ``start`` on, with more than it where the data end: the first few
    million places. It is looked for by its rarest byte.
    """
    octets, words, rare = np.frombuffer(data, np.uint8), _words(data), text.index(_RARE)
    found, count = [np.zeros(0, np.int64)], 0
    for begin in range(start + rare, len(data), _WINDOW_BYTES):
        places = np.flatnonzero(octets[begin : begin + _WINDOW_BYTES] == _RARE) + (begin - rare)
        for ahead, mask, word in _words_of(text):
            there = words[np.minimum(places + ahead, len(words) - 1)]
            places = places[(there & mask) == word]
        found.append(places)
        count += len(places)
        if count >= MAX_RECORDS:
            break
    return np.concatenate(found)[:MAX_RECORDS]


def _words(data: memoryview) -> NDArray[np.uint64]:
    """The eight bytes from every byte on."""
    return np.ndarray((max(1, len(data) - 7),), "<u8", data, 0, (1,))


def _words_of(text: bytes) -> Iterator[tuple[int, np.uint64, np.uint64]]:
    """Of each eight bytes of ``text``: where they are, which bits count, and what they are."""
    for begin in range(0, len(text), 8):
        part = text[begin : begin + 8]
        mask = np.uint64((1 << 8 * len(part)) - 1)
        yield begin, mask, np.uint64(int.from_bytes(part, "little"))


def _decode(
    words: NDArray[np.uint64],
    raw: tuple[Numbers, Numbers, Numbers, Numbers],
    is_record: NDArray[np.bool_],
    texts: list[str],
    numbers: dict[str, int],
    machine: Machine,
) -> Texts:
    """Make one text of all that are spelled alike. What is no text is no record."""
    data, (begin, end, named, order) = machine.data, raw
    spelled = np.flatnonzero(is_record & (named < 0))
    if not len(spelled):
        return Texts(np.full(len(begin), -1), named, order)
    starts, stops = begin[spelled], end[spelled]
    first = bytes(data[starts[0] : stops[0]])
    lag = next(
        (n for n in range(1, min(_MAX_LAG, len(starts))) if data[starts[n] : stops[n]] == first),
        len(starts),
    )
    new = np.flatnonzero(~_repeats(words, starts, stops, lag))
    known: dict[bytes, int] = {}
    keys = [
        bytes(data[a:b]) for a, b in zip(starts[new].tolist(), stops[new].tolist(), strict=True)
    ]
    for key in dict.fromkeys(keys):
        machine.charge(_TEXT_BYTES + 4 * len(key))
        try:
            text = key.decode()
        except UnicodeDecodeError:
            known[key] = -1
            continue
        known[key] = numbers.setdefault(text, len(texts))
        if known[key] == len(texts):
            texts.append(text)
    # What repeats has the number of the text before it, and that the one of the text before.
    origin = np.zeros(-(-len(starts) // lag) * lag, np.int64)
    origin[new] = new
    origin = np.maximum.accumulate(origin.reshape(-1, lag)).reshape(-1)[: len(starts)]
    of_new = np.zeros(len(starts), np.int64)
    of_new[new] = np.fromiter(map(known.__getitem__, keys), np.int64, len(keys))
    number = np.full(len(begin), -1)
    number[spelled] = of_new[origin]
    is_record &= (number >= 0) | (named >= 0)
    return Texts(number, named, order)


def _repeats(
    words: NDArray[np.uint64], starts: Numbers, stops: Numbers, lag: int
) -> NDArray[np.bool_]:
    """Which texts are the same as the one ``lag`` before."""
    sizes = stops - starts
    found = np.zeros(len(starts), np.bool_)
    found[lag:] = sizes[lag:] == sizes[:-lag]
    for at in range(0, int(sizes.max()), 8):
        left = np.clip(sizes - at, 0, 8).astype(np.uint64) * np.uint64(8)
        word = words[np.minimum(starts + at, len(words) - 1)] << (np.uint64(64) - left)
        found[lag:] &= (word[lag:] == word[:-lag]) | (left[lag:] == 0)
    return found


def _by_opcode(values: dict[int, int]) -> NDArray[np.uint64]:
    return np.array([values.get(opcode, 0) for opcode in range(256)], np.uint64)


#: How many bytes the opcode of a number takes with its argument, and the bits of that.
_DIM_SIZE = _by_opcode({0x4B: 2, 0x4D: 3, 0x4A: 5})
_DIM_MASK = _by_opcode({0x4B: 0xFF, 0x4D: 0xFFFF, 0x4A: 0xFFFFFFFF})
_NEGATIVE = np.uint64(1 << 31)
_BYTE = np.uint64(0xFF)
#: What follows the tuple of sizes, which is memoized unless it is empty.
_TAIL = np.uint64(int.from_bytes(b"\x94\x85\x94R\x94", "little"))
_TAIL_MASK, _LAST_MASK = np.uint64((1 << 40) - 1), np.uint64((1 << 32) - 1)


class _Lockstep:
    """Reads the same part of all records, each from where it is in its own."""

    def __init__(self, data: memoryview, begin: Numbers, first: bytes) -> None:
        """``first``: the bytes that are known to stand where each begins."""
        self.words = _words(data)
        self.at = begin + len(first)
        self.is_like = np.ones(len(begin), np.bool_)
        self.memo = np.full(len(begin), 2 * first.count(_NEW))

    def take(self, part: Any) -> Any:
        """The column of a part; None for bytes that all have."""
        if isinstance(part, bytes):
            return self._constant(part)
        return {Varying.NUMBER: self._number, Varying.SIZES: self._sizes, Varying.TEXT: self._text}[
            part
        ]()

    def _word(self, ahead: int = 0) -> NDArray[np.uint64]:
        # Of what reaches to the last bytes of the data nothing is taken.
        return self.words[np.minimum(self.at + ahead, len(self.words) - 1)]

    def _constant(self, text: bytes) -> None:
        for ahead, mask, word in _words_of(text):
            self.is_like &= (self._word(ahead) & mask) == word
        self.at += len(text)
        self.memo += 2 * text.count(_NEW)

    def _number(self) -> Numbers:
        word = self._word()
        opcode = (word & _BYTE).astype(np.intp)
        value, size = (word >> np.uint64(8)) & _DIM_MASK[opcode], _DIM_SIZE[opcode]
        is_negative = (opcode == 0x4A) & (value >= _NEGATIVE)
        for count in (5, 6) if (opcode == 0x8A).any() else ():
            head = np.uint64(0x8A | count << 8)
            is_long = (word & np.uint64(0xFFFF)) == head
            bits = np.uint64(8 * count)
            wide = (word >> np.uint64(16)) & ((np.uint64(1) << bits) - np.uint64(1))
            is_negative |= is_long & (wide >> (bits - np.uint64(1)) > 0)
            value, size = np.where(is_long, wide, value), np.where(is_long, count + 2, size)
        self.is_like &= (size > 0) & ~is_negative
        self.at += size.astype(np.int64)
        return value.astype(np.int64)

    def _sizes(self) -> Sizes:
        ndim, word = np.zeros(len(self.at), np.int64), self._word()
        is_long = (word & _BYTE) == 0x28
        if is_long.any():
            self.at += is_long
            word = self._word()
        columns: list[Numbers] = []
        while True:
            opcode = (word & _BYTE).astype(np.intp)
            size = _DIM_SIZE[opcode].astype(np.int64)
            if len(columns) == MAX_COLUMNS or not size.any():
                break
            value = (word >> np.uint64(8)) & _DIM_MASK[opcode]
            self.is_like &= value < _NEGATIVE
            columns.append(value.astype(np.int64))
            ndim += size > 0
            self.at += size
            word = self._word()
        is_empty = (opcode == 0x29) & (ndim == 0) & ~is_long  # which is not memoized
        is_short = (ndim > 0) & (ndim < 4) & (opcode == 0x84 + ndim)
        ends = np.where(is_long, (ndim > 3) & (opcode == 0x74), is_short)
        tail = (word >> np.uint64(8)) & np.where(is_empty, _LAST_MASK, _TAIL_MASK)
        self.is_like &= (ends & (tail == _TAIL)) | (is_empty & (tail == _TAIL >> np.uint64(8)))
        self.at += np.where(is_empty, 5, 6)
        self.memo += np.where(is_empty, 2, 3)
        values = np.stack(columns, 1) if columns else np.zeros((len(ndim), 0), np.int64)
        return Sizes(ndim, values)

    def _text(self) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        word, order = self._word(), self.memo.copy()
        opcode, rest = word & _BYTE, word >> np.uint64(8)
        is_spelled, is_near, is_far = opcode == 0x8C, opcode == 0x68, opcode == 0x6A
        self.is_like &= is_spelled | is_near | is_far
        place = rest & np.where(is_near, _BYTE, np.uint64(0xFFFFFFFF))
        named = np.where(is_spelled, -1, place.astype(np.int64))
        begin = self.at + 2
        end = begin + np.where(is_spelled, (rest & _BYTE).astype(np.int64), 0)
        self.at = np.where(is_spelled, end, self.at + np.where(is_near, 2, 5))
        self.is_like &= ~is_spelled | ((self._word() & _BYTE) == 0x94)
        self.at += is_spelled
        self.memo += is_spelled
        return begin, end, named, order
