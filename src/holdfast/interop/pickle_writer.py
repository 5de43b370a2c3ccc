"""Writes pickles opcode by opcode, with the names that others will look up as plain text.

The counterpart of ``interop.pickles``: what it writes, that reads back. Neither pickle nor what it
names is imported. The protocol is 2, that of ``torch.save``; so torch's own ``weights_only`` reads
what it knows the names of.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from holdfast.errors import UnsupportedState
from holdfast.format.native_types import DeviceName, DtypeName, EnumMember, StoredObject
from holdfast.interop.pickle_records import GlobalName

_MARK, _REDUCE, _BUILD, _PERSISTENT, _NEW = b"(", b"R", b"b", b"Q", b"\x81"
_PROTOCOL, _STOP = b"\x80\x02", b"."
_EMPTY_TUPLE, _EMPTY_LIST, _EMPTY_DICT = b")", b"]", b"}"
_TUPLES = {1: b"\x85", 2: b"\x86", 3: b"\x87"}
_APPENDS, _SET_ITEMS, _TUPLE = b"e", b"u", b"t"
_BUILTIN, _CODECS = "__builtin__", "_codecs"
#: As pickle itself does: so many items between two marks.
_BATCH = 1000


@dataclass(frozen=True, slots=True, eq=False)
class PickledCall:
    """The result of a call of ``function``; with ``state``, an object whose attributes it sets."""

    function: GlobalName
    arguments: tuple[Any, ...] = ()
    state: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class PickledObject:
    """A new object of the class ``kind`` with these attributes, made without its constructor."""

    kind: GlobalName
    state: Any


@dataclass(frozen=True, slots=True, eq=False)
class PersistentId:
    """What stands outside of the pickle, such as a storage of torch."""

    value: tuple[Any, ...]


def write_pickle(value: Any, replace: Callable[[Any], Any] | None = None) -> bytes:
    """Returns the pickle of ``value``. Raises UnsupportedState for a value of another kind.

    ``replace``: called with each value that is not plain; returns what is written instead. One
    object that is met again is written as the same one.
    """
    writer = _PickleWriter(replace)
    writer.write(value)
    return b"".join((_PROTOCOL, *writer.parts, _STOP))


class _PickleWriter:
    """One pickle; ``memo`` has the number of each object by its id, and of texts and names."""

    def __init__(self, replace: Callable[[Any], Any] | None) -> None:
        self.parts: list[bytes] = []
        self._replace = replace
        self._memo: dict[Any, int] = {}
        self._alive: list[Any] = []

    def write(self, value: Any) -> None:
        plain = _PLAIN.get(type(value))
        if plain is not None:
            plain(self, value)
            return
        if self._get(id(value)):
            return
        container = _CONTAINERS.get(type(value))
        if container is not None:
            container(self, value)
        elif self._replace is not None and (other := self._replace(value)) is not value:
            self.write(other)
            self._put(id(value), value)
        else:
            raise UnsupportedState(f"a {type(value).__name__} has no form in a pickle")

    # ── the memo ─────────────────────────────────────────────────────────────────────────

    def _get(self, key: Any) -> bool:
        number = self._memo.get(key)
        if number is None:
            return False
        self.parts.append(b"h%c" % number if number < 256 else b"j" + struct.pack("<I", number))
        return True

    def _put(self, key: Any, value: Any = None) -> None:
        if key in self._memo:
            return
        number = self._memo[key] = len(self._memo)
        self._alive.append(value)  # an id is that of another object when this one is gone
        self.parts.append(b"q%c" % number if number < 256 else b"r" + struct.pack("<I", number))

    # ── plain values ─────────────────────────────────────────────────────────────────────

    def nothing(self, _: None) -> None:
        self.parts.append(b"N")

    def truth(self, value: bool) -> None:
        self.parts.append(b"\x88" if value else b"\x89")

    def integer(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self.parts.append(b"K%c" % value)
        elif -(1 << 31) <= value < 1 << 31:
            self.parts.append(b"J" + struct.pack("<i", value))
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            head = b"\x8a%c" % len(data) if len(data) < 256 else b"\x8b" + _length(data)
            self.parts.append(head + data)

    def real(self, value: float) -> None:
        self.parts.append(b"G" + struct.pack(">d", value))

    def complex_number(self, value: complex) -> None:
        self.name(GlobalName(_BUILTIN, "complex"))
        self.write((value.real, value.imag))
        self.parts.append(_REDUCE)

    def text(self, value: str) -> None:
        if not self._get(value):
            data = value.encode("utf-8", "surrogatepass")
            self.parts.append(b"X" + _length(data) + data)
            self._put(value)

    def raw(self, value: bytes) -> None:
        """Bytes as text, which protocol 2 has instead of them."""
        self.name(GlobalName(_CODECS, "encode"))
        self._tuple_of(value.decode("latin1"), "latin1")
        self.parts.append(_REDUCE)

    def raw_array(self, value: bytearray) -> None:
        self.name(GlobalName(_BUILTIN, "bytearray"))
        self._tuple_of(bytes(value))
        self.parts.append(_REDUCE)

    def name(self, value: GlobalName) -> None:
        key = ("global", value.module, value.name)
        if not self._get(key):
            self.parts.append(f"c{value.module}\n{value.name}\n".encode())
            self._put(key)

    # ── containers and objects ───────────────────────────────────────────────────────────

    def _tuple_of(self, *items: Any) -> None:
        """A tuple that no other value is the same object as."""
        if len(items) > 3:
            self.parts.append(_MARK)
        for item in items:
            self.write(item)
        self.parts.append(_TUPLES.get(len(items), _TUPLE) if items else _EMPTY_TUPLE)

    def row(self, value: tuple[Any, ...]) -> None:
        self._tuple_of(*value)
        if value:
            self._put(id(value), value)

    def items(self, value: list[Any]) -> None:
        self.parts.append(_EMPTY_LIST)
        self._put(id(value), value)
        self._batches(value, self.write, _APPENDS)

    def mapping(self, value: dict[Any, Any]) -> None:
        self.parts.append(_EMPTY_DICT)
        self._put(id(value), value)
        self._batches(value.items(), self._pair, _SET_ITEMS)

    def ordered(self, value: OrderedDict[Any, Any]) -> None:
        self._called_mapping("OrderedDict", (), value)

    def counter(self, value: Counter[Any]) -> None:
        self._called_mapping("Counter", (), value)

    def default(self, value: defaultdict[Any, Any]) -> None:
        factory = value.default_factory
        name = factory.__name__ if isinstance(factory, type) else None
        self._called_mapping(
            "defaultdict", () if name is None else (GlobalName(_BUILTIN, name),), value
        )

    def _called_mapping(self, name: str, arguments: tuple[Any, ...], value: dict[Any, Any]) -> None:
        self.name(GlobalName("collections", name))
        self._tuple_of(*arguments)
        self.parts.append(_REDUCE)
        self._put(id(value), value)
        self._batches(value.items(), self._pair, _SET_ITEMS)

    def unordered(self, value: set[Any] | frozenset[Any]) -> None:
        self.name(GlobalName(_BUILTIN, type(value).__name__))
        self._tuple_of(sorted(value, key=repr))
        self.parts.append(_REDUCE)
        self._put(id(value), value)

    def called(self, value: PickledCall) -> None:
        self.name(value.function)
        self._tuple_of(*value.arguments)
        self.parts.append(_REDUCE)
        self._put(id(value), value)
        if value.state is not None:
            self.write(value.state)
            self.parts.append(_BUILD)

    def made(self, value: PickledObject) -> None:
        self.name(value.kind)
        self.parts.append(_EMPTY_TUPLE + _NEW)
        self._put(id(value), value)
        self.write(value.state)
        self.parts.append(_BUILD)

    def outside(self, value: PersistentId) -> None:
        self._tuple_of(*value.value)
        self.parts.append(_PERSISTENT)

    def _pair(self, pair: tuple[Any, Any]) -> None:
        self.write(pair[0])
        self.write(pair[1])

    def _batches(self, items: Iterable[Any], write: Callable[[Any], None], end: bytes) -> None:
        left = iter(items)
        while some := list(islice(left, _BATCH)):
            self.parts.append(_MARK)
            for item in some:
                write(item)
            self.parts.append(end)


def _length(data: bytes) -> bytes:
    return struct.pack("<I", len(data))


_PLAIN: dict[type, Callable[[_PickleWriter, Any], None]] = {
    type(None): _PickleWriter.nothing,
    bool: _PickleWriter.truth,
    int: _PickleWriter.integer,
    float: _PickleWriter.real,
    complex: _PickleWriter.complex_number,
    str: _PickleWriter.text,
    bytes: _PickleWriter.raw,
    GlobalName: _PickleWriter.name,
}
_CONTAINERS: dict[type, Callable[[_PickleWriter, Any], None]] = {
    tuple: _PickleWriter.row,
    list: _PickleWriter.items,
    dict: _PickleWriter.mapping,
    OrderedDict: _PickleWriter.ordered,
    Counter: _PickleWriter.counter,
    defaultdict: _PickleWriter.default,
    set: _PickleWriter.unordered,
    frozenset: _PickleWriter.unordered,
    bytearray: _PickleWriter.raw_array,
    PickledCall: _PickleWriter.called,
    PickledObject: _PickleWriter.made,
    PersistentId: _PickleWriter.outside,
}


# The values of numpy and torch that a state may have, as torch writes them.

#: An array of numpy's; "_core" would be refused by numpy before 2.
_NUMPY = "numpy.core.multiarray"


def replace_native(value: Any) -> Any:
    """What is written for a value of numpy's, or the name of a dtype or device; else the value."""
    if isinstance(value, DtypeName):
        return GlobalName("torch", value.name)
    if isinstance(value, DeviceName):
        device, _, index = value.name.partition(":")
        return PickledCall(GlobalName("torch", "device"), (device, *map(int, index.split())))
    if isinstance(value, EnumMember):
        raise UnsupportedState(f"{value.type} is an enum, whose class is not known here")
    if isinstance(value, StoredObject):
        raise UnsupportedState(
            f"{value.type} is a registered class, whose objects this format cannot hold as data: "
            "leave what holds them out with --only"
        )
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ == "dtype":
        return GlobalName("torch", str(value).removeprefix("torch."))
    if kind.__module__ == "torch" and kind.__name__ == "device":
        return replace_native(DeviceName(str(value)))
    if kind.__module__ == "numpy":
        return _numpy(value)
    return value


def _numpy(value: Any) -> Any:
    text = value.dtype.str
    order = text[0] if text[0] in "<>" else "|"
    width = {"U": (value.dtype.itemsize, 4, 8), "S": (value.dtype.itemsize, 1, 0)}
    parts = (3, order, None, None, None, *width.get(value.dtype.kind, (-1, -1, 0)))
    dtype = PickledCall(GlobalName("numpy", "dtype"), (text[1:], False, True), parts)
    if value.shape == () and type(value).__name__ != "ndarray":
        return PickledCall(GlobalName(_NUMPY, "scalar"), (dtype, value.tobytes()))
    array = GlobalName("numpy", "ndarray")
    state = (1, tuple(value.shape), dtype, False, value.tobytes())
    return PickledCall(GlobalName(_NUMPY, "_reconstruct"), (array, (0,), b"b"), state)
