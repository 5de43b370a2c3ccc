"""Interprets pickles without executing them: no import and no call, whatever the bytes say.

This is no ``pickle.Unpickler`` with a filter. Each opcode of the protocols 2 to 5 is carried out
here on plain values; a name is text until ``interop.pickle_records`` has a record for it, and never
more than that. What a pickle may cost is bounded: opcodes, memory, the length of texts and numbers.
"""

from __future__ import annotations

import struct
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.errors import ForeignFormatError
from holdfast.format.checksum import Buffer
from holdfast.geometry.leaves import MAX_DIMS
from holdfast.interop.pickle_records import (
    MAX_KEY,
    GlobalName,
    Opaque,
    Record,
    TorchDtype,
    as_key,
    build,
    call,
    constant,
    new,
    refuses,
    storage,
)
from holdfast.interop.record_runs import RecordRuns, Rows, Unlike

#: Some 7 s of processor time. Metadata of many ranks have more, and are read by columns.
MAX_OPCODES = 10_000_000
#: Memory that the values of any pickle may take, and how much more for each of its bytes.
BASE_BYTES = 16 << 20
FACTOR = 20
MAX_TEXT_BYTES = 64 << 20
MAX_NAME_BYTES = 1024
#: Of an integer: torch's seeds and states have at most a few words.
MAX_INTEGER_BYTES = 1024
MAX_GAP = 1024
MAX_EQUAL_HASHES = 100
#: The first bytes of a pickle of protocol 2 to 5.
FIRST = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


@dataclass(frozen=True, slots=True)
class Pickled:
    """The value of a pickle, and all objects in it that are not known."""

    value: Any
    opaque: tuple[Opaque, ...]
    stop: int
    """The offset behind its last opcode."""


def interpret(
    data: Buffer,
    where: str,
    *,
    size_bytes: int = 0,
    as_rows: bool = False,
) -> Pickled:
    """Return what a pickle says. ForeignFormatError names ``where`` and the offset.

    ``size_bytes``: the size of all that the pickle describes; its values may take twice as much.
    ``as_rows``: lists and dictionaries may have ``Rows`` in place of records of DCP that are alike.
    """
    room_bytes = BASE_BYTES + max(2 * size_bytes, FACTOR * len(data))
    machine = _Machine(memoryview(data), where, room_bytes, as_rows)
    is_unlike = False
    try:
        value = machine.run()
    except Unlike:
        is_unlike = True
    if is_unlike:  # out here, where no error keeps the memory of the first one
        machine = _Machine(memoryview(data), where, room_bytes)
        value = machine.run()
    if machine.at != len(machine.data):
        raise machine.error(f"{len(machine.data) - machine.at} bytes follow behind its end")
    return Pickled(value, tuple(machine.opaque), machine.at)


_NOTHING = object()
#: What the key takes that a record becomes: a tuple of four, and its place.
_KEY_BYTES = sys.getsizeof((None,) * 4) + 64
_KEYS = frozenset({str, int, float, bool, bytes, type(None), TorchDtype})


class _Machine:
    """One run: a stack, a memo, and how much may still be used."""

    def __init__(
        self, data: memoryview, where: str, room_bytes: int, as_rows: bool = False
    ) -> None:
        self.data, self.where, self.at, self.begin = data, where, 0, 0
        self.room_bytes = room_bytes
        self.stack: list[Any] = []
        self.memo: list[Any] = []
        self.marks: list[int] = []
        self.opaque: list[Opaque] = []
        self.runs = RecordRuns() if as_rows else None
        self.names: dict[tuple[str, str], GlobalName] = {}
        self.hashes: dict[int, tuple[Any, ...]] = {}
        self.equal_hashes = 0

    def error(self, why: str) -> ForeignFormatError:
        text = f"{self.where}, byte {self.begin} of its pickle: {why}"
        return ForeignFormatError(text, path=self.where, offset=self.begin)

    def run(self) -> Any:
        data, actions = self.data, _ACTIONS
        if bytes(data[:2]) not in FIRST:
            raise self.error("no pickle of the protocols 2 to 5 begins here")
        try:
            for _ in range(MAX_OPCODES):
                self.begin = self.at
                opcode = data[self.at]
                self.at += 1
                if opcode == 0x2E:  # STOP
                    return self._end()
                action = actions[opcode]
                if action is None:
                    name = _REFUSED.get(opcode, f"the opcode {opcode:#04x}")
                    raise self.error(f"{name} is never used by torch, and not read")
                action(self)
                if self.room_bytes < 0:
                    raise self.error("its values take too much memory for its size")
        except IndexError:
            raise self.error("it is cut short, or takes from an empty stack") from None
        except struct.error:
            raise self.error("it is cut short") from None
        except ForeignFormatError:
            raise
        except RecursionError:
            raise self.error("it is nested too deep") from None
        except (TypeError, ValueError, OverflowError, SyntaxError) as error:
            raise self.error(str(error)[:300]) from None
        raise self.error(f"it has more than {MAX_OPCODES} opcodes")

    def _end(self) -> Any:
        if len(self.stack) != 1 or self.marks:
            raise self.error(f"it ends with {len(self.stack)} values and not with one")
        return self.stack.pop()

    # ── what the opcodes need ────────────────────────────────────────────────────────────

    def take(self, count: int) -> memoryview:
        found = self.data[self.at : self.at + count]
        if len(found) < count:
            raise self.error(f"it is cut short: {count} bytes are to follow, {len(found)} do")
        self.at += count
        return found

    def number(self, form: struct.Struct) -> int:
        value: int = form.unpack_from(self.data, self.at)[0]
        self.at += form.size
        return value

    def charge(self, cost_bytes: int) -> None:
        """Take memory before it is used; ForeignFormatError if there is not as much."""
        self.room_bytes -= cost_bytes
        if self.room_bytes < 0:
            raise self.error("its values take too much memory for its size")

    def push(self, value: Any, cost_bytes: int) -> None:
        """``cost_bytes``: of a new value. Its place on the stack is given back when it is taken."""
        self.room_bytes -= cost_bytes + 8
        self.stack.append(value)

    def pop(self) -> Any:
        if self.marks and self.marks[-1] >= len(self.stack):
            raise self.error("it takes from an empty stack")
        self.room_bytes += 8
        value = self.stack.pop()
        if type(value) is Rows:
            raise Unlike
        return value

    def top(self) -> Any:
        if self.marks and self.marks[-1] >= len(self.stack):
            raise self.error("it takes from an empty stack")
        if type(self.stack[-1]) is Rows:
            raise Unlike
        return self.stack[-1]

    def items(self, *, may_be_rows: bool = False) -> list[Any]:
        if not self.marks:
            raise self.error("there is no mark on its stack")
        mark = self.marks.pop()
        found = self.stack[mark:]
        del self.stack[mark:]
        self.room_bytes += 8 + 8 * len(found)
        if self.runs is not None and not may_be_rows and Rows in map(type, found):
            raise Unlike
        return found

    def text(self, size_bytes: int) -> None:
        if size_bytes > MAX_TEXT_BYTES:
            raise self.error(f"a text of {size_bytes} bytes, more than {MAX_TEXT_BYTES}")
        raw = self.take(size_bytes)
        # Python may take 4 bytes for each character: know before it is made.
        self.charge(size_bytes if _is_ascii(raw) else 4 * size_bytes)
        try:
            self.push(str(raw, "utf-8"), 56)
        except UnicodeDecodeError as error:
            raise self.error(f"a text that is none: {error.reason}") from None

    def binary(self, size_bytes: int, kind: Callable[[memoryview], Any] = bytes) -> None:
        if size_bytes > MAX_TEXT_BYTES:
            raise self.error(f"{size_bytes} bytes in one value, more than {MAX_TEXT_BYTES}")
        raw = self.take(size_bytes)
        self.charge(size_bytes)
        self.push(kind(raw), 48)

    def global_name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise self.error("a name that is no text")
        if len(module) + len(name) > MAX_NAME_BYTES:
            raise self.error(f"a name of {len(module) + len(name)} characters")
        known = self.names.get((module, name))
        if known is None:
            known = self.names[module, name] = GlobalName(module, name, self.begin)
            self.room_bytes -= 400
            if refuses(known):
                raise self.error(
                    f"it names {str(known)!r:.100}, which no checkpoint needs. Nothing was called; "
                    "the file may have been made to run code"
                )
        self.push(constant(known), 0)

    def apply(self, function: Any, arguments: Any, act: Callable[..., Any]) -> None:
        if not isinstance(arguments, tuple):
            raise self.error("a call whose arguments are no tuple")
        if isinstance(function, GlobalName):
            self.charge(sum(map(_cost, arguments)))
            made = act(function, arguments)
        elif isinstance(function, Opaque):
            made = Opaque(f"call of {function.what}"[:200], self.begin)
        else:
            raise self.error(f"a call of a {type(function).__name__}")
        if isinstance(made, Opaque):
            made.offset = self.begin
            self.opaque.append(made)
        self.push(made, sys.getsizeof(made) + (64 if isinstance(made, (Record, Opaque)) else 0))

    def put(self, number: int) -> None:
        """Writers count from 0 or 1 and leave out nothing."""
        new = number + 1 - len(self.memo)
        if new > MAX_GAP:
            raise self.error(f"value {number} of a memo that has {len(self.memo)}")
        if new > 0:
            self.charge(9 * new)
            self.memo.extend([_NOTHING] * new)
        elif self.runs is not None:
            self.runs.forget()
        self.memo[number] = self.top()

    def get(self, number: int) -> None:
        if number >= len(self.memo) or self.memo[number] is _NOTHING:
            raise self.error(f"it takes value {number} from its memo, which is not there")
        value = self.memo[number]
        self.push(value.text(number, value.stop) if type(value) is Rows else value, 0)

    def set_items(self, target: Any, items: list[Any]) -> None:
        if len(items) % 2:
            raise self.error("a key without a value")
        if isinstance(target, Opaque):
            return
        if not isinstance(target, dict):
            raise self.error(f"items for a {type(target).__name__}")
        keys = [self.key(key) for key in items[::2]]
        for key, value in zip(keys, items[1::2], strict=True):
            if (type(key) is Rows or type(value) is Rows) and key is not value:
                raise Unlike
        before_bytes, count = sys.getsizeof(target), len(target) + len(keys)
        kind = dict if type(target) is Counter else type(target)  # which would count the pairs
        kind.update(target, zip(keys, items[1::2], strict=True))
        if len(target) < count:
            raise self.error("a dictionary has a key twice, which no writer gives it")
        self.room_bytes -= sys.getsizeof(target) - before_bytes

    def key(self, key: Any) -> Any:
        """Refuse what has no hash, or of which so many may have one that reading takes hours."""
        if isinstance(key, Record):
            key = as_key(key)
            self.charge(_KEY_BYTES)
            _, name, offset, index = key
            self.check_parts((name, index))
            self.check_parts(offset if type(offset) is tuple else (offset,))
            self.check_hash(key)
        elif type(key) is tuple:
            self.check_parts(key)
            self.check_hash(key)
        elif type(key) is not Rows:
            self.check_parts((key,))
        return key

    def check_parts(self, parts: tuple[Any, ...]) -> None:
        if len(parts) > MAX_DIMS:
            raise self.error(f"a key of {len(parts)} parts")
        for one in parts:
            if type(one) is int:
                if -MAX_KEY < one < MAX_KEY:
                    continue
            elif type(one) in _KEYS:
                continue
            raise self.error(f"a key that is a {type(one).__name__}, or too large")

    def check_hash(self, key: tuple[Any, ...]) -> None:
        """Anyone can make numbers whose tuples have one hash: a dictionary would compare all."""
        self.charge(100)
        first = self.hashes.setdefault(hash(key), key)
        if first is not key and first != key:
            self.equal_hashes += 1
            if self.equal_hashes > MAX_EQUAL_HASHES:
                raise self.error(f"more than {MAX_EQUAL_HASHES} keys that have the hash of another")

    def append(self, target: Any, items: list[Any]) -> None:
        if isinstance(target, Opaque):
            return
        if not isinstance(target, list):
            raise self.error(f"items for a {type(target).__name__}")
        if any(type(one) is Rows and one.columns.is_pair for one in items):
            raise Unlike
        before_bytes = sys.getsizeof(target)
        target.extend(items)
        self.room_bytes -= sys.getsizeof(target) - before_bytes


def _cost(argument: Any) -> int:
    """At most what a call makes of an argument: a copy, at 100 bytes for each item of it."""
    if isinstance(argument, (str, bytes, bytearray)):
        return 2 * len(argument)
    is_long = isinstance(argument, (list, tuple)) and len(argument) > MAX_DIMS
    return 100 * len(argument) if is_long else 0


def _cost_of_state(state: Any) -> int:
    """Of attributes that are set: of many each time, because it takes time to look at them."""
    parts = (state, *state[:2]) if isinstance(state, tuple) else (state,)
    return sum(100 * len(one) for one in parts if isinstance(one, dict) and len(one) > MAX_DIMS)


def _is_ascii(raw: memoryview) -> bool:
    return len(raw) < 64 or bytes(raw).isascii()


_U8, _U16, _U32, _I32, _U64 = (struct.Struct(form) for form in ("<B", "<H", "<I", "<i", "<Q"))
_DOUBLE = struct.Struct(">d")


def _protocol(m: _Machine) -> None:
    version = m.number(_U8)
    if m.begin or not 2 <= version <= 5:
        raise m.error(f"the protocol {version}" + (" inside of a pickle" if m.begin else ""))


def _frame(m: _Machine) -> None:
    size = m.number(_U64)
    if size > len(m.data) - m.at:
        raise m.error(f"a frame of {size} bytes, {len(m.data) - m.at} follow")


def _long(m: _Machine, size_bytes: int) -> None:
    if not 0 <= size_bytes <= MAX_INTEGER_BYTES:
        raise m.error(f"an integer of {size_bytes} bytes, more than {MAX_INTEGER_BYTES}")
    m.push(int.from_bytes(m.take(size_bytes), "little", signed=True), 32 + size_bytes)


def _mark(m: _Machine) -> None:
    m.marks.append(len(m.stack))
    m.room_bytes -= 8


def _tuple(m: _Machine, count: int) -> None:
    items = tuple(reversed([m.pop() for _ in range(count)]))
    m.push(items, 48 + 8 * count)


def _tuple_of_mark(m: _Machine) -> None:
    items = m.items()
    m.push(tuple(items), 48 + 8 * len(items))


def _list_of_mark(m: _Machine) -> None:
    items = m.items()
    m.push(items, 64 + 8 * len(items))


def _dict_of_mark(m: _Machine) -> None:
    items = m.items()
    m.push({}, 64)
    m.set_items(m.top(), items)


def _set_item(m: _Machine) -> None:
    value, key = m.pop(), m.pop()
    m.set_items(m.top(), [key, value])


def _set_items(m: _Machine) -> None:
    items = m.items(may_be_rows=True)
    m.set_items(m.top(), items)


def _append(m: _Machine) -> None:
    value = m.pop()
    m.append(m.top(), [value])


def _appends(m: _Machine) -> None:
    items = m.items(may_be_rows=True)
    m.append(m.top(), items)


def _add_items(m: _Machine) -> None:
    items, target = m.items(), m.top()
    if isinstance(target, Opaque):
        return
    if not isinstance(target, set):
        raise m.error(f"items for a {type(target).__name__}")
    m.charge(80 * len(items))
    target.update([m.key(item) for item in items])


def _frozen_set(m: _Machine) -> None:
    items = m.items()
    m.charge(216 + 80 * len(items))
    m.push(frozenset([m.key(item) for item in items]), 0)


def _line(m: _Machine) -> str:
    raw = bytes(m.data[m.at : m.at + MAX_NAME_BYTES])
    stop = raw.find(b"\n")
    if stop < 0:
        raise m.error("a name without an end")
    m.at += stop + 1
    try:
        return raw[:stop].decode()
    except UnicodeDecodeError:
        raise m.error("a name that is no text") from None


def _stack_global(m: _Machine) -> None:
    name, module = m.pop(), m.pop()
    m.global_name(module, name)


def _reduce(m: _Machine) -> None:
    arguments, function = m.pop(), m.pop()
    m.apply(function, arguments, call)


def _new(m: _Machine) -> None:
    arguments, kind = m.pop(), m.pop()
    m.apply(kind, arguments, new)


def _build(m: _Machine) -> None:
    state, target = m.pop(), m.top()
    if isinstance(target, Record):
        before_bytes = sys.getsizeof(target.fields)
        m.charge(_cost_of_state(state))
        build(target, state)
        m.charge(sys.getsizeof(target.fields) - before_bytes)
        if m.runs is not None:
            m.runs.follow(target, m)
    else:
        build(target, state)


def _persistent(m: _Machine) -> None:
    m.push(storage(m.pop()), 64)


def _pop(m: _Machine) -> None:
    if m.marks and m.marks[-1] == len(m.stack):
        m.marks.pop()
    else:
        m.pop()


def _duplicate(m: _Machine) -> None:
    m.push(m.top(), 0)


_BY_OPCODE: dict[bytes, Callable[[_Machine], None]] = {
    b"\x80": _protocol,
    b"\x95": _frame,
    b"(": _mark,
    b"0": _pop,
    b"1": lambda m: m.items().clear(),
    b"2": _duplicate,
    b"N": lambda m: m.push(None, 0),
    b"\x88": lambda m: m.push(True, 0),
    b"\x89": lambda m: m.push(False, 0),
    b"J": lambda m: m.push(m.number(_I32), 32),
    b"K": lambda m: m.push(m.number(_U8), 0),
    b"M": lambda m: m.push(m.number(_U16), 32),
    b"\x8a": lambda m: _long(m, m.number(_U8)),
    b"\x8b": lambda m: _long(m, m.number(_I32)),
    b"G": lambda m: m.push(_DOUBLE.unpack(m.take(8))[0], 24),
    b"X": lambda m: m.text(m.number(_U32)),
    b"\x8c": lambda m: m.text(m.number(_U8)),
    b"\x8d": lambda m: m.text(m.number(_U64)),
    b"B": lambda m: m.binary(m.number(_U32)),
    b"C": lambda m: m.binary(m.number(_U8)),
    b"\x8e": lambda m: m.binary(m.number(_U64)),
    b"\x96": lambda m: m.binary(m.number(_U64), bytearray),
    b"]": lambda m: m.push([], 56),
    b"}": lambda m: m.push({}, 64),
    b")": lambda m: m.push((), 0),
    b"\x8f": lambda m: m.push(set(), 216),
    b"\x85": lambda m: _tuple(m, 1),
    b"\x86": lambda m: _tuple(m, 2),
    b"\x87": lambda m: _tuple(m, 3),
    b"t": _tuple_of_mark,
    b"l": _list_of_mark,
    b"d": _dict_of_mark,
    b"a": _append,
    b"e": _appends,
    b"s": _set_item,
    b"u": _set_items,
    b"\x90": _add_items,
    b"\x91": _frozen_set,
    b"q": lambda m: m.put(m.number(_U8)),
    b"r": lambda m: m.put(m.number(_U32)),
    b"\x94": lambda m: m.put(len(m.memo)),
    b"h": lambda m: m.get(m.number(_U8)),
    b"j": lambda m: m.get(m.number(_U32)),
    b"c": lambda m: m.global_name(_line(m), _line(m)),
    b"\x93": _stack_global,
    b"R": _reduce,
    b"\x81": _new,
    b"b": _build,
    b"Q": _persistent,
}
_ACTIONS: list[Callable[[_Machine], None] | None] = [
    _BY_OPCODE.get(bytes((opcode,))) for opcode in range(256)
]
#: What others would execute, by the name it has in the documents of pickle.
_REFUSED = {
    ord("i"): "INST",
    ord("o"): "OBJ",
    ord("P"): "PERSID",
    0x92: "NEWOBJ_EX",
    0x82: "EXT1",
    0x83: "EXT2",
    0x84: "EXT4",
    0x97: "NEXT_BUFFER",
    0x98: "READONLY_BUFFER",
}
