"""Interprets runs of like records of DCP's metadata at once: the same values, in less time.

Metadata of many ranks are records of three classes, each written by the same opcodes as the one
before. Their bytes are matched against these very opcodes, whose effect is known: a record, and
what it adds to the memo. Whatever does not match is left to ``interop.pickles``, opcode by opcode.
"""

from __future__ import annotations

import re
from typing import Any, Protocol

from holdfast.interop.pickle_records import DCP_FILES, DCP_METADATA, GlobalName, Record

#: Parts of records: a place of the memo, a number, sizes (``torch.Size`` of a tuple), a new object.
_REF = rb"(?:h.|j.{4})"
_DIM = rb"(?:K.|M..|J.{4})"
_NUMBER = rb"(K.|M..|J.{4}|\x8a\x05.{5}|\x8a\x06.{6})"
_SIZES = rb"(%b\x85|%b{2}\x86|%b{3}\x87|\(%b{4,64}t)\x94\x85\x94R\x94" % (_DIM, _DIM, _DIM, _DIM)
_NEW, _SET = rb"\)\x81\x94\}\x94\(", b"ub"
_SIZE = GlobalName("torch", "Size")
_CHUNK = GlobalName(DCP_METADATA, "ChunkStorageMetadata")
_INDEX = GlobalName(DCP_METADATA, "MetadataIndex")
_INFO = GlobalName(DCP_FILES, "_StorageInfo")
#: The opcodes of records: expressions, and names that are taken from the memo.
_FORMS: dict[str, tuple[Any, ...]] = {
    "chunk": (_CHUNK, _NEW, "offsets", _SIZE, _SIZES, "sizes", _SIZE, _SIZES, _SET),
    "index": (_INDEX, _NEW, "fqn"),  # and the name of a tensor
    "place": ("index", _NUMBER, "offset", _SIZE, _SIZES, _SET, _INFO, _NEW, "relative_path"),
    "info": ("offset", _NUMBER, "length", _NUMBER, _SET),  # behind the name of a file
}

#: What parts of a record cost, at least as the interpreter counts them.
_RECORD_BYTES = 450
_SIZES_BYTES = 170
_DIM_BYTES = 16
_TEXT_BYTES = 73
_NUMBER_BYTES = 32
#: So many sizes are kept, to be taken again where they are the same.
_MAX_KEPT = 1 << 14
#: More than the metadata of any checkpoint have; they bound the time.
MAX_RECORDS = 2_000_000


class Machine(Protocol):
    """What a run of records changes of an interpreter: it is as if each had been interpreted."""

    data: memoryview
    at: int
    stack: list[Any]
    memo: list[Any]

    def charge(self, cost_bytes: int) -> None: ...


class RecordRuns:
    """The runs of one pickle."""

    def __init__(self) -> None:
        self._learned: dict[str, re.Pattern[bytes]] = {}
        self._sizes: dict[bytes, tuple[tuple[int, ...], int]] = {}
        self._left = MAX_RECORDS

    def forget(self) -> None:
        """Another object has taken a place of the memo: it may be one that a record names."""
        self._learned.clear()

    def follow(self, record: Record, machine: Machine) -> None:
        """Interpret what is like ``record``, which was the last, as far as that reaches."""
        if record.kind == _CHUNK.name:
            self._follow_chunks(machine)
        elif record.kind == _INFO.name:
            self._follow_items(machine)

    def _follow_chunks(self, machine: Machine) -> None:
        data, memo, stack = machine.data, machine.memo, machine.stack
        pattern = self._learn("chunk", machine, machine.at)
        while pattern is not None and self._left:
            matched = pattern.match(data, machine.at)
            if matched is None:
                return
            raw_start, raw_sizes = matched.groups()
            start, start_bytes = self._sizes.get(raw_start) or self._read_sizes(raw_start)
            sizes, sizes_bytes = self._sizes.get(raw_sizes) or self._read_sizes(raw_sizes)
            if start_bytes < 0 or sizes_bytes < 0:
                return
            machine.charge(_RECORD_BYTES + start_bytes + sizes_bytes)
            fields: dict[str, Any] = {"offsets": start, "sizes": sizes}
            record = Record(_CHUNK.name, fields)
            memo += (record, fields, start, (start,), start, sizes, (sizes,), sizes)
            stack.append(record)
            machine.at = matched.end()
            self._left -= 1

    def _follow_items(self, machine: Machine) -> None:
        """Interpret pairs of the index of an item and the place where it lies."""
        if not self._learn_items(machine):
            return
        data, memo, stack, sizes = machine.data, machine.memo, machine.stack, self._sizes
        head, place, info = (self._learned[kind] for kind in ("index", "place", "info"))
        while self._left:
            matched = head.match(data, machine.at)
            name = _read_text(machine, matched.end()) if matched else None
            found = place.match(data, name[1]) if name else None
            file = _read_text(machine, found.end()) if found else None
            ended = info.match(data, file[1]) if file else None
            if not (name and found and file and ended):
                return
            number, raw = found.groups()
            start, start_bytes = sizes.get(raw) or self._read_sizes(raw)
            if start_bytes < 0:
                return
            machine.charge(2 * _RECORD_BYTES + 3 * _NUMBER_BYTES + start_bytes + name[2] + file[2])
            index = {"fqn": name[0], "index": _integer(number), "offset": start}
            offset, size = ended.groups()
            where = {
                "relative_path": file[0],
                "offset": _integer(offset),
                "length": _integer(size),
            }
            key, value = Record(_INDEX.name, index), Record(_INFO.name, where)
            names = (name[0],) if name[2] else ()
            files = (file[0],) if file[2] else ()
            memo += (key, index, *names, start, (start,), start, value, where, *files)
            stack += (key, value)
            machine.at = ended.end()
            self._left -= 1

    def _learn_items(self, machine: Machine) -> bool:
        """Learn the forms of a pair from the one that follows; False where none does."""
        head = self._learn("index", machine, machine.at)
        matched = head and head.match(machine.data, machine.at)
        name = _read_text(machine, matched.end()) if matched else None
        place = self._learn("place", machine, name[1]) if name else None
        found = place.match(machine.data, name[1]) if place and name else None
        file = _read_text(machine, found.end()) if found else None
        return file is not None and self._learn("info", machine, file[1]) is not None

    def _learn(self, kind: str, machine: Machine, at: int) -> re.Pattern[bytes] | None:
        """The expression of a form, with the places that its names have in the memo; None where the
        bytes at ``at`` are not of this form.
        """
        if kind in self._learned:
            return self._learned[kind]
        form = _FORMS[kind]
        names = [part for part in form if not isinstance(part, bytes)]
        groups = iter(b"(?P<n%d>%b)" % (number, _REF) for number in range(len(names)))
        searched = b"".join(one if isinstance(one, bytes) else next(groups) for one in form)
        matched = re.compile(searched, re.DOTALL).match(machine.data, at)
        if matched is None:
            return None
        places = [matched[f"n{number}"] for number in range(len(names))]
        for name, place in zip(names, places, strict=True):
            found = _in_memo(machine, place)
            if type(found) is not type(name) or found != name:
                return None
        escaped = iter(map(re.escape, places))
        text = b"".join(one if isinstance(one, bytes) else next(escaped) for one in form)
        return self._learned.setdefault(kind, re.compile(text, re.DOTALL))

    def _read_sizes(self, raw: bytes) -> tuple[tuple[int, ...], int]:
        """Sizes by their opcodes, and what they cost; -1 for such as are none."""
        found: list[int] = []
        cost_bytes, at, stop = _SIZES_BYTES, int(raw[0] == 0x28), len(raw) - 1
        while at < stop:
            size = _DIM_SIZES[raw[at]]
            found.append(_integer(raw[at : at + size]))
            cost_bytes += _DIM_BYTES + (_NUMBER_BYTES if size > 2 else 0)
            at += size
        read = tuple(found), -1 if min(found) < 0 else cost_bytes
        if len(self._sizes) < _MAX_KEPT:
            self._sizes[raw] = read
        return read


_DIM_SIZES = {0x4B: 2, 0x4D: 3, 0x4A: 5}


def _integer(raw: bytes) -> int:
    """The number that an opcode with its argument puts on the stack."""
    if raw[0] == 0x4B:
        return raw[1]
    if raw[0] == 0x4D:
        return raw[1] | raw[2] << 8
    return int.from_bytes(raw[2:] if raw[0] == 0x8A else raw[1:], "little", signed=True)


def _in_memo(machine: Machine, ref: bytes) -> Any:
    place = int.from_bytes(ref[1:], "little")
    return machine.memo[place] if place < len(machine.memo) else None


def _read_text(machine: Machine, at: int) -> tuple[str, int, int] | None:
    """A text, the offset behind it, and what it costs: nothing for one that the memo has."""
    data = machine.data
    opcode = data[at]
    if opcode in b"hj":
        stop = at + (2 if opcode == 0x68 else 5)
        found = _in_memo(machine, bytes(data[at:stop]))
        return (found, stop, 0) if type(found) is str else None
    stop = at + 2 + data[at + 1]
    if opcode != 0x8C or data[stop] != 0x94:  # a short text that the memo takes
        return None
    raw = bytes(data[at + 2 : stop])
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return None
    return text, stop + 1, _TEXT_BYTES + len(raw) * (1 if raw.isascii() else 4)
