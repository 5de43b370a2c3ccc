"""Values that are not Python's own, to JSON and back: numpy's, torch's names, enums.

Nothing is imported because of what a checkpoint says, and nothing executed: numpy and torch are
used where the program has loaded them, and an enum is looked up among those it registered.
"""

from __future__ import annotations

import base64
import math
import re
import sys
from enum import Enum
from typing import Any, TypeVar

import msgspec

from holdfast.errors import UnsupportedState, UsageError

#: Python reads no longer numbers from decimal text; longer ones are written in hexadecimal.
MAX_DECIMAL_BITS = 8192
T = TypeVar("T")
_NUMPY_KINDS = "biufcSU"
_INT = re.compile(r"-?[0-9]{1,2500}")
_HEX_INT = re.compile(r"-?0x[0-9a-f]+")
_DEVICE = re.compile(r"[a-z_0-9]+(:[0-9]+)?")
_enums: dict[str, type[Enum]] = {}


class DtypeName(msgspec.Struct, frozen=True):
    """A torch dtype read back by a process that has not loaded torch."""

    name: str


class DeviceName(msgspec.Struct, frozen=True):
    """A torch device read back by a process that has not loaded torch."""

    name: str


class EnumMember(msgspec.Struct, frozen=True):
    """A member of an enum that this program did not register."""

    type: str
    member: str | int


def register_enum(kind: type[Enum], *, name: str | None = None) -> type[Enum]:
    """Let members of ``kind`` be stored, and found again by the name of enum and member.

    ``name`` (the class's own without it) is what checkpoints call the enum: keep it when the class
    is renamed. Also a decorator. UsageError when another enum has the name.
    """
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise UsageError(f"{kind!r} is not an enum")
    known_as = kind.__qualname__ if name is None else name
    there = _enums.get(known_as, kind)
    if (there.__module__, there.__qualname__) != (kind.__module__, kind.__qualname__):
        raise UsageError(f"two enums are registered as {known_as!r}: give one another name=")
    _enums[known_as] = kind  # a module that was reloaded has new members
    return kind


def encode_foreign(value: Any, where: str) -> Any:
    """``value`` in JSON's own types. UnsupportedState for what is known to nobody."""
    kind = type(value)
    if isinstance(value, Enum):
        return {"$enum": _encode_enum(value, where)}
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device"):
        return {f"${kind.__name__}": str(value).removeprefix("torch.")}
    np = sys.modules.get("numpy")
    # Only arrays proper: a masked array or a matrix is more than its elements.
    is_proper = np is not None and (kind is np.ndarray or isinstance(value, np.generic))
    if np is not None and is_proper and value.dtype.kind in _NUMPY_KINDS:
        array = np.asarray(value)  # an empty numpy string says it has no bytes, and has some
        if kind is not np.ndarray and array.dtype.kind in "SU" and array[()] != value:
            raise UnsupportedState(f"{where} ends in null characters, which numpy drops: use bytes")
        data = base64.b64encode(array.tobytes()).decode()
        shape = list(value.shape) if kind is np.ndarray else None
        return {"$numpy": {"dtype": array.dtype.str, "shape": shape, "data": data}}
    raise UnsupportedState(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which cannot be stored without "
        "executing code on reading. Store its parts (numbers, strings, bytes, lists, tuples, "
        "dicts, sets, arrays, tensors), or wrap it in an object with state_dict and "
        "load_state_dict.",
        where=where,
    )


def _encode_enum(value: Enum, where: str) -> dict[str, str]:
    kind = type(value)
    known_as = next((name for name, known in _enums.items() if known is kind), None)
    if known_as is None:
        raise UnsupportedState(
            f"{where} is {value!r}, of an enum that is not registered: call "
            f"holdfast.register_enum({kind.__qualname__}) where the class is defined",
            where=where,
        )
    if value.name in kind.__members__:
        return {"type": known_as, "member": value.name}
    return {"type": known_as, "value": digits(int(value.value))}  # flags combined


def enum_member(body: Any, *, strict: bool) -> Any:
    """The member a ``$enum`` names; as EnumMember where its enum is not registered.

    UsageError, if ``strict``, for one that is not: nothing is given to a program that does not
    expect it.
    """
    known_as = a(str, a(dict, body)["type"])
    member = a(str, body["member"]) if "member" in body else whole(a(str, body["value"]))
    kind = _enums.get(known_as)
    if kind is None:
        if strict:
            raise UsageError(
                f"the checkpoint holds {known_as}.{member}, of an enum that is not registered: "
                "call holdfast.register_enum before the restore"
            )
        return EnumMember(known_as, member)
    if isinstance(member, int):
        return kind(member)
    if member not in kind.__members__:
        raise UsageError(f"the checkpoint holds {known_as}.{member}, which {kind} has not got")
    return kind[member]


def torch_dtype(name: str) -> Any:
    """The dtype of this name, or its name where torch is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None:
        return DtypeName(name)
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no torch dtype is called {name!r}")
    return found


def torch_device(name: str) -> Any:
    """The device of this name, or its name where torch is not loaded."""
    if not _DEVICE.fullmatch(name):
        raise ValueError(f"{name!r:.50} is no device")
    torch = sys.modules.get("torch")
    try:
        return DeviceName(name) if torch is None else torch.device(name)
    except RuntimeError as error:
        raise ValueError(str(error).splitlines()[0]) from None


def numpy_value(body: dict[str, Any]) -> Any:
    """An array that can be written to, or a scalar."""
    import numpy as np

    dtype = np.dtype(a(str, body["dtype"]))
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"numpy dtype {dtype} is not stored")
    data = base64.b64decode(a(str, body["data"]), validate=True)
    shape = () if body["shape"] is None else tuple(a(int, size) for size in body["shape"])
    if any(size < 0 for size in shape) or len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes of data do not make {shape} of {dtype}")
    array = np.ndarray(shape, dtype, bytearray(data))
    return array[()] if body["shape"] is None else array


def digits(value: int) -> str:
    """A whole number as text, however long."""
    return str(value) if value.bit_length() <= MAX_DECIMAL_BITS else hex(value)


def whole(text: str) -> int:
    """The whole number that ``digits`` wrote."""
    if _HEX_INT.fullmatch(text):
        return int(text, 16)
    if not _INT.fullmatch(text):
        raise ValueError(f"{text!r:.50} is no whole number")
    return int(text)


def a(kind: type[T], body: Any) -> T:
    """``body``, of exactly this type; TypeError otherwise."""
    if type(body) is not kind:
        raise TypeError(f"a {kind.__name__} is expected, not {body!r:.50}")
    return body
