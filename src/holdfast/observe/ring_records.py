"""PURE. Packs events into records of a fixed size, and unpacks them by a table that goes with them.

A ring holds records of two sizes: events of numbers alone, which are the frequent ones, and events
with texts, which are cut where they do not fit. Each record has its checksum and its position, so
that one that was torn, or left by an earlier round of the ring, is never taken for a good one.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_type_hints

import xxhash

from holdfast.events import AnyEvent, Event

#: field -> how it is packed: a number of ``struct``, or a kind of text of ``_TEXTS``.
Schema = list[tuple[str, list[tuple[str, str]]]]

_NUMBERS: dict[Any, str] = {float: "d", int: "q", bool: "?"}
_TEXTS: dict[Any, str] = {
    str: "text",
    tuple[str, ...]: "texts",
    tuple[int, ...]: "integers",
    dict[str, int]: "counts",
}
_SUM = struct.Struct("<Q")
#: Length of what follows the checksum, position, number, both clocks, kind.
_HEAD = "<HQQddB"
_HEAD_STRUCT = struct.Struct(_HEAD)
_COUNT = struct.Struct("<I")
_CUT = " ... (cut)"
_CUT_ROOM = 64


class Moment(NamedTuple):
    """What is recorded of every event: its place in the ring, its number, both clocks."""

    position: int
    number: int
    time_s: float
    mono_s: float


class _Kind(NamedTuple):
    pack: Callable[..., bytes]
    numbers: Callable[[Event], tuple[Any, ...]]
    texts: list[tuple[str, str]]
    number: int
    size_bytes: int


def _fields(kind: type[Event]) -> list[tuple[str, str]]:
    hints = get_type_hints(kind)
    names = kind.__struct_fields__
    coded = [(name, _NUMBERS.get(hints[name]) or _TEXTS[hints[name]]) for name in names]
    return sorted(coded, key=lambda field: len(field[1]) > 1)  # the numbers first


SCHEMA: Schema = [(kind.__name__, _fields(kind)) for kind in AnyEvent.__args__]


def _kind(index: int) -> _Kind:
    numbers = [(name, code) for name, code in SCHEMA[index][1] if len(code) == 1]
    packed = struct.Struct(_HEAD + "".join(code for _, code in numbers))
    return _Kind(
        packed.pack,
        operator.attrgetter(*(name for name, _ in numbers)),
        [field for field in SCHEMA[index][1] if len(field[1]) > 1],
        index,
        packed.size,
    )


_KINDS = {kind: _kind(index) for index, kind in enumerate(AnyEvent.__args__)}
#: Kinds of numbers alone: how one is packed, its values, and what stands before these.
SHORT = {
    kind: (k.pack, k.numbers, k.number, k.size_bytes) for kind, k in _KINDS.items() if not k.texts
}
checksum_of = xxhash.xxh3_64_intdigest


def pack_long(event: Event, at: Moment, limit_bytes: int) -> bytes:
    """Packs any event into at most ``limit_bytes``; texts that do not fit are cut."""
    kind = _KINDS[type(event)]
    room = limit_bytes - _SUM.size - kind.size_bytes - 2 * _COUNT.size * len(kind.texts)
    tail = bytearray()
    for name, code in kind.texts:
        added = _pack_text(code, getattr(event, name), room - _CUT_ROOM)
        room -= len(added)
        tail += added
    body = kind.pack(kind.size_bytes + len(tail), *at, kind.number, *kind.numbers(event)) + tail
    return checksum_of(body).to_bytes(8, "little") + body


def _pack_text(code: str, value: Any, room: int) -> bytes:
    match code:
        case "text":
            return _one_text(value, room)
        case "integers":
            kept = value[: max(0, room // 8)]
            return _COUNT.pack(len(kept)) + struct.pack(f"<{len(kept)}q", *kept)
        case "texts":
            kept = _fitting([_one_text(item, room) for item in value], room)
        case _:
            packed = [_one_text(name, room) + struct.pack("<q", n) for name, n in value.items()]
            kept = _fitting(packed, room)
    return _COUNT.pack(len(kept)) + b"".join(kept)


def _fitting(items: list[bytes], room: int) -> list[bytes]:
    kept = []
    for item in items:
        room -= len(item)
        if room < 0:
            break
        kept.append(item)
    return kept


def _one_text(value: str, room: int) -> bytes:
    data = value.encode(errors="surrogatepass")
    if len(data) > max(0, room):
        data = data[: max(0, room - len(_CUT))].decode(errors="ignore").encode() + _CUT.encode()
    return _COUNT.pack(len(data)) + data


def read_moment(record: bytes | memoryview) -> Moment | None:
    """Returns the moment of a record; None where there is none, or not a whole one."""
    head_bytes = _SUM.size + _HEAD_STRUCT.size
    length, *moment, _ = _HEAD_STRUCT.unpack_from(record, _SUM.size)
    if not head_bytes <= _SUM.size + length <= len(record):
        return None
    body = record[_SUM.size : _SUM.size + length]
    return Moment(*moment) if checksum_of(body) == _SUM.unpack_from(record)[0] else None


def unpack(
    record: bytes, schema: Sequence[tuple[str, Sequence[tuple[str, str]]]]
) -> dict[str, Any]:
    """Returns the event of a whole record as plain values, with its name in ``event``.

    ``schema``: that of the process that packed it, which may be of another version. Raises
    ValueError, IndexError or struct.error where the two do not go together.
    """
    kind = _HEAD_STRUCT.unpack_from(record, _SUM.size)[-1]
    name, fields = schema[kind]
    found: dict[str, Any] = {"event": name}
    at = _SUM.size + _HEAD_STRUCT.size
    for field, code in fields:
        if len(code) == 1:
            number = struct.Struct("<" + code)
            (found[field],) = number.unpack_from(record, at)
            at += number.size
        else:
            found[field], at = _unpack_text(code, record, at)
    return found


def _unpack_text(code: str, record: bytes, at: int) -> tuple[Any, int]:
    (count,) = _COUNT.unpack_from(record, at)
    at += _COUNT.size
    match code:
        case "text":
            return record[at : at + count].decode(errors="replace"), at + count
        case "integers":
            return list(struct.unpack_from(f"<{count}q", record, at)), at + 8 * count
        case "texts":
            texts = []
            for _ in range(count):
                text, at = _unpack_text("text", record, at)
                texts.append(text)
            return texts, at
        case "counts":
            counts = {}
            for _ in range(count):
                text, at = _unpack_text("text", record, at)
                (counts[text],) = struct.unpack_from("<q", record, at)
                at += 8
            return counts, at
        case _:
            raise ValueError(f"no field is packed as {code!r}")
