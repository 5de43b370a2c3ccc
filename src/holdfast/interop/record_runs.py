"""Interprets runs of like records of DCP's metadata at once: the same values, in less time.

Metadata of many ranks are records of three classes, each written by the same opcodes as the one
before. Their bytes are matched against these very opcodes, whose effect is known: a record, and
what it adds to the memo. Whatever does not match is left to ``interop.pickles``, opcode by opcode.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, Protocol

from holdfast.interop.pickle_records import DCP_FILES, DCP_METADATA, GlobalName, Record

#: Parts of records: a place of the memo, a number, sizes (``torch.Size`` of a tuple), a new object.
_REF = rb"(?:h.|j.{4})"
_DIM = rb"(?:K.|M..|J.{4})"
_NUMBER = rb"(K.|M..|J.{4}|\x8a\x05.{5}|\x8a\x06.{6})"
_SIZES = rb"(%b\x85|%b{2}\x86|%b{3}\x87|\(%b{4,64}t)\x94\x85\x94R\x94" % (_DIM, _DIM, _DIM, _DIM)
#: A text that the memo takes, with its length first, or one that it has.
_TEXT = rb"(?:\x8c(.[^\x94]*)\x94|(%b))" % _REF
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
_PAIR_BYTES = 2 * _RECORD_BYTES + 3 * _NUMBER_BYTES
#: Memory of records is counted for so many bytes of them together.
_CHARGED_BYTES = 1 << 16
#: How often forms are learned anew: a writer never takes a place of the memo twice.
MAX_LEARNED = 100
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


class Sizes(NamedTuple):
    """Sizes as they were read; ``cost_bytes``: below 0 for such as are none."""

    value: tuple[int, ...]
    as_arguments: tuple[tuple[int, ...]]
    cost_bytes: int


class RecordRuns:
    """The runs of one pickle."""

    def __init__(self) -> None:
        self._learned: dict[str, re.Pattern[bytes]] = {}
        self._sizes: dict[bytes, Sizes] = {}
        self._numbers: dict[bytes, int] = {}
        self._texts: dict[bytes, tuple[str, int]] = {}
        self._left, self._may_learn = MAX_RECORDS, MAX_LEARNED
        #: The sizes that are kept, by their id: each is a tuple of a few numbers.
        self.known: set[int] = set()

    def forget(self) -> None:
        """Another object has taken a place of the memo: it may be one that a record names."""
        if self._learned:
            self._learned.clear()
            self._may_learn -= 1

    def follow(self, record: Record, machine: Machine) -> None:
        """Interpret what is like ``record``, which was the last, as far as that reaches."""
        if self._may_learn <= 0:  # to compile forms takes longer than to go by opcodes
            return
        if record.kind == _CHUNK.name:
            self._follow_chunks(machine)
        elif record.kind == _INFO.name:
            self._follow_items(machine)

    def _follow_chunks(self, machine: Machine) -> None:
        pattern = self._learn("chunk", machine, machine.at)
        if pattern is None:
            return
        data, memo, stack, at = machine.data, machine.memo, machine.stack, machine.at
        sizes, kind, cost_bytes = self._sizes, _CHUNK.name, 0
        while self._left:
            matched = pattern.match(data, at)
            if matched is None:
                break
            raw_start, raw_sizes = matched.groups()
            start, of_start, start_bytes = sizes.get(raw_start) or self._read_sizes(raw_start)
            shape, of_shape, shape_bytes = sizes.get(raw_sizes) or self._read_sizes(raw_sizes)
            if start_bytes < 0 or shape_bytes < 0:
                break
            fields = {"offsets": start, "sizes": shape}
            record = Record(kind, fields)
            memo += (record, fields, start, of_start, start, shape, of_shape, shape)
            stack.append(record)
            at = machine.at = matched.end()
            self._left -= 1
            cost_bytes += _RECORD_BYTES + start_bytes + shape_bytes
            if cost_bytes > _CHARGED_BYTES:
                machine.charge(cost_bytes)
                cost_bytes = 0
        machine.charge(cost_bytes)

    def _follow_items(self, machine: Machine) -> None:
        """Interpret pairs of the index of an item and the place where it lies."""
        pattern = self._learn_items(machine)
        if pattern is None:
            return
        data, memo, stack, at = machine.data, machine.memo, machine.stack, machine.at
        sizes, numbers, texts = self._sizes, self._numbers, self._texts
        index_kind, info_kind, cost_bytes = _INDEX.name, _INFO.name, 0
        while self._left:
            matched = pattern.match(data, at)
            if matched is None:
                break
            raw_name, name_ref, number, raw, raw_file, file_ref, offset, size = matched.groups()
            if raw_name is None:
                name, name_bytes = _in_memo(machine, name_ref), 0
            else:
                name, name_bytes = texts.get(raw_name) or self._read_text(raw_name)
            start, arguments, start_bytes = sizes.get(raw) or self._read_sizes(raw)
            if type(name) is not str or start_bytes < 0:
                break
            index = numbers.get(number)
            key_fields = {
                "fqn": name,
                "index": self._number(number) if index is None else index,
                "offset": start,
            }
            key, before = Record(index_kind, key_fields), len(memo)
            named = () if raw_name is None else (name,)
            memo += (key, key_fields, *named, start, arguments, start)
            # The name of the file may be one that the memo has since this very record.
            if raw_file is None:
                file, file_bytes = _in_memo(machine, file_ref), 0
            else:
                file, file_bytes = texts.get(raw_file) or self._read_text(raw_file)
            if type(file) is not str:
                del memo[before:]
                break
            begin, length = numbers.get(offset), numbers.get(size)
            fields = {
                "relative_path": file,
                "offset": self._number(offset) if begin is None else begin,
                "length": self._number(size) if length is None else length,
            }
            value = Record(info_kind, fields)
            memo += (value, fields) if raw_file is None else (value, fields, file)
            stack += (key, value)
            at = machine.at = matched.end()
            self._left -= 1
            cost_bytes += _PAIR_BYTES + start_bytes + name_bytes + file_bytes
            if cost_bytes > _CHARGED_BYTES:
                machine.charge(cost_bytes)
                cost_bytes = 0
        machine.charge(cost_bytes)

    def _learn_items(self, machine: Machine) -> re.Pattern[bytes] | None:
        """Learn the form of a pair from the one that follows; None where none does."""
        if "pair" in self._learned:
            return self._learned["pair"]
        parts, at = [], machine.at
        for kind in ("index", "place", "info"):
            part = self._learn(kind, machine, at)
            if part is None:
                return None
            parts.append(part.pattern)
            matched = re.compile(_TEXT.join(parts) + _TEXT, re.DOTALL).match(
                machine.data, machine.at
            )
            if matched is None and kind != "info":
                return None
            at = matched.end() if matched else at
        return self._learned.setdefault("pair", re.compile(_TEXT.join(parts), re.DOTALL))

    def _read_text(self, raw: bytes) -> tuple[str | None, int]:
        """The text that is spelled out, its length first, and what it costs: Python may take 4
        bytes for each of it. None for what is no text.
        """
        if raw[0] != len(raw) - 1:
            return None, 0
        try:
            text = raw[1:].decode()
        except UnicodeDecodeError:
            return None, 0
        read = text, _TEXT_BYTES + (len(raw) - 1) * (1 if text.isascii() else 4)
        if len(self._texts) < _MAX_KEPT:
            self._texts[raw] = read
        return read

    def _number(self, raw: bytes) -> int:
        number = _integer(raw)
        if len(self._numbers) < _MAX_KEPT:
            self._numbers[raw] = number
        return number

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

    def _read_sizes(self, raw: bytes) -> Sizes:
        """Sizes by their opcodes, and what they cost."""
        found: list[int] = []
        cost_bytes, at, stop = _SIZES_BYTES, int(raw[0] == 0x28), len(raw) - 1
        while at < stop:
            size = _DIM_SIZES[raw[at]]
            found.append(_integer(raw[at : at + size]))
            cost_bytes += _DIM_BYTES + (_NUMBER_BYTES if size > 2 else 0)
            at += size
        value = tuple(found)
        read = Sizes(value, (value,), -1 if min(found) < 0 else cost_bytes)
        if len(self._sizes) < _MAX_KEPT:
            self._sizes[raw] = read
            if read.cost_bytes >= 0:
                self.known.add(id(value))
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
