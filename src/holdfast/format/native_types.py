"""Converts values of numpy, torch, enums and registered classes to JSON and back.

Reading a checkpoint imports and executes nothing: numpy and torch are used where the program has
loaded them, and enums and classes are looked up among those it registered.
"""

from __future__ import annotations

import base64
import math
import re
import sys
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, TypeVar

import msgspec

from holdfast.errors import UnsupportedState, UsageError
from holdfast.geometry.leaves import MAX_DIMS, MAX_LEAF_BYTES

#: Python refuses to parse longer decimal numbers; longer ones are written in hexadecimal.
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


class _ArrayBody(msgspec.Struct, frozen=True):
    """The body of a ``$numpy``; no shape for a scalar."""

    dtype: str
    shape: tuple[int, ...] | None
    data: str


class _EnumBody(msgspec.Struct, frozen=True):
    """The body of a ``$enum``: a member's name, or the digits of combined flags."""

    type: str
    member: str | msgspec.UnsetType = msgspec.UNSET
    value: str | msgspec.UnsetType = msgspec.UNSET


class EnumMember(msgspec.Struct, frozen=True):
    """A member of an enum that this program did not register."""

    type: str
    member: str | int


def register_enum(kind: type[Enum], *, name: str | None = None) -> type[Enum]:
    """Let members of ``kind`` be stored, and found again by the name of enum and member.

    ``kind``: the enum. ``name``: the enum's name in checkpoints, by default the class's own: keep
    it when the class is renamed.

    Also a decorator. Raises UsageError when another enum has the name.
    """
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise UsageError(f"{kind!r} is not an enum")
    known_as = kind.__qualname__ if name is None else name
    there = _enums.get(known_as, kind)
    if (there.__module__, there.__qualname__) != (kind.__module__, kind.__qualname__):
        raise UsageError(f"two enums are registered as {known_as!r}: give one another name=")
    _enums[known_as] = kind  # a module that was reloaded has new members
    return kind


class StoredObject(msgspec.Struct, frozen=True):
    """An object of a registered class as it is stored: the name of the class, and its data."""

    type: str
    value: Any

    def __hash__(self) -> int:
        """As a key, which earlier versions stored, it is hashed by itself: its data may be a
        dict.
        """
        return object.__hash__(self)


class _ObjectBody(msgspec.Struct, frozen=True):
    """The body of a ``$object``."""

    type: str
    value: Any


class RegisteredClass(NamedTuple):
    """A class whose objects are stored as data."""

    name: str
    kind: type
    take: Callable[[Any], Any]
    give: Callable[[Any], Any]


_classes: dict[type, RegisteredClass] = {}


def register_value(
    kind: type[T],
    take: Callable[[T], Any],
    give: Callable[[Any], T],
    *,
    name: str | None = None,
) -> type[T]:
    """Let objects of the class ``kind`` be stored as data, in values and in an optimizer's state.

    ``kind``: the class; objects of classes derived from it are not included. ``take``: a function;
    ``take(object)`` returns all that the object is made of, as plain values and tensors: a dict of
    its attributes, for example. ``give``: the opposite; ``give(data)`` returns a new object made of
    what ``take`` gave, with the restored tensors in it. A restore calls it once before it changes
    anything, with zeros for the larger tensors, so that what it raises is reported then. ``name``:
    the name of the class in checkpoints, by default the class's own: keep it when the class is
    renamed.

    A checkpoint holds the name and the data. Reading it imports nothing: the class is looked up
    among those that the program registered, and one that is not registered is a UsageError.
    Raises UsageError for what is no class or no function, and when another class has the name.
    """
    if not isinstance(kind, type):
        raise UsageError(f"{kind!r:.100} is not a class: register the class of the objects")
    for what, function in (("take", take), ("give", give)):
        if not callable(function):
            raise UsageError(
                f"register_value({kind.__qualname__}): {what}={function!r:.100} is not a function"
            )
    known_as = kind.__qualname__ if name is None else name
    there = _class_called(known_as)
    if there is not None and not _are_one(there.kind, kind):
        raise UsageError(f"two classes are registered as {known_as!r}: give one another name=")
    if there is not None:
        _classes.pop(there.kind)  # a module that was reloaded has a new class
    _classes[kind] = RegisteredClass(known_as, kind, take, give)
    return kind


def registered_class(kind: type) -> RegisteredClass | None:
    """Returns what was registered for exactly this class."""
    return _classes.get(kind)


def taken(known: RegisteredClass, value: Any, where: str) -> Any:
    """Returns what ``take`` gives; UnsupportedState names the object where it raises."""
    try:
        return known.take(value)
    except Exception as error:  # whatever the program's own function raises
        raise UnsupportedState(
            f"{where}: the take= of holdfast.register_value for {known.name} raised "
            f"{type(error).__name__}: {error}",
            where=where,
        ) from error


def _class_called(name: str) -> RegisteredClass | None:
    return next((known for known in _classes.values() if known.name == name), None)


def _are_one(one: type, other: type) -> bool:
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


def stored_object(
    body: Any, decode: Callable[[Any], Any], *, strict: bool, makes_objects: bool
) -> Any:
    """Returns the StoredObject of a ``$object``; with ``makes_objects`` the object itself.

    ``decode`` decodes the data. ``strict``: a class that is not registered is a UsageError.
    """
    form = msgspec.convert(body, _ObjectBody)
    if strict:
        _class_of(form.type)
    found = StoredObject(form.type, decode(form.value))
    return make_object(found) if makes_objects else found


def make_object(stored: StoredObject) -> Any:
    """Returns a new object of a registered class, made of its data.

    Raises UsageError for a class that is not registered, and where ``give`` fails.
    """
    known = _class_of(stored.type)
    try:
        return known.give(stored.value)
    except Exception as error:  # whatever the program's own function raises
        raise UsageError(
            f"the give= of holdfast.register_value for {stored.type} could not make an object of "
            f"what is stored: {type(error).__name__}: {error}"
        ) from error


def _class_of(name: str) -> RegisteredClass:
    known = _class_called(name)
    if known is None:
        raise UsageError(
            f"the checkpoint holds an object of {name}, a class that is not registered: call "
            "holdfast.register_value before the restore"
        )
    return known


def encode_foreign(value: Any, where: str) -> Any:
    """Encodes ``value`` in JSON's own types. Raises UnsupportedState for a value of no known
    type.
    """
    kind = type(value)
    if isinstance(value, Enum):
        return {"$enum": _encode_enum(value, where)}
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device"):
        return {f"${kind.__name__}": str(value).removeprefix("torch.")}
    np = sys.modules.get("numpy")
    # Only plain arrays: a masked array or a matrix is more than its elements.
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
        "dicts, sets, arrays, tensors), wrap it in an object with state_dict and "
        "load_state_dict, or say by holdfast.register_value how its class is stored.",
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
    """Returns the member a ``$enum`` names; as EnumMember where this program has no such member.

    With ``strict`` that is a UsageError: a program never gets a value that it does not expect.
    """
    form = msgspec.convert(body, _EnumBody)
    known_as, member = form.type, _member(form)
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
        if not strict:
            return EnumMember(known_as, member)
        raise UsageError(f"the checkpoint holds {known_as}.{member}, which {kind} has not got")
    return kind[member]


def _member(form: _EnumBody) -> str | int:
    if form.member is not msgspec.UNSET:
        return form.member
    if form.value is msgspec.UNSET:
        raise ValueError("it has neither a member nor a value")
    return whole(form.value)


def torch_dtype(name: str) -> Any:
    """Returns the dtype of this name, or its name where torch is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None:
        return DtypeName(name)
    found = vars(torch).get(name)  # getattr would import what torch loads by its names
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no torch dtype is called {name!r}")
    return found


def torch_device(name: str) -> Any:
    """Returns the device of this name, or its name where torch is not loaded."""
    if not _DEVICE.fullmatch(name):
        raise ValueError(f"{name!r:.50} is no device")
    torch = sys.modules.get("torch")
    try:
        return DeviceName(name) if torch is None else torch.device(name)
    except RuntimeError as error:
        raise ValueError(str(error).splitlines()[0]) from None


def numpy_value(body: Any) -> Any:
    """Returns an array that can be written to, or a scalar."""
    import numpy as np

    form = msgspec.convert(body, _ArrayBody)
    dtype = np.dtype(form.dtype)
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"numpy dtype {dtype} is not stored")
    data = base64.b64decode(form.data, validate=True)
    shape = form.shape or ()
    refuse_shape(shape, dtype.itemsize, len(data))
    array = np.ndarray(shape, dtype, bytearray(data))
    if dtype.kind == "U" and dtype.itemsize and array.size:
        points = array.reshape(-1).view(np.dtype("u4").newbyteorder(dtype.byteorder))
        if points.max() > sys.maxunicode:
            raise ValueError("its characters are none of Unicode")
    return array[()] if form.shape is None else array


def refuse_shape(shape: tuple[int, ...], itemsize: int, data_bytes: int) -> None:
    """Raises ValueError unless so many bytes are the elements of a tensor, or array, of this
    shape.
    """
    if len(shape) > MAX_DIMS or min(shape, default=0) < 0:
        raise ValueError(f"nothing has the shape {shape!s:.80}")
    # Also of an empty one: sizes beside a 0 are not bounded by any data.
    if math.prod(max(1, size) for size in shape) * max(1, itemsize) > MAX_LEAF_BYTES:
        raise ValueError(f"the shape {shape!s:.80} is more than can be addressed")
    if data_bytes != math.prod(shape) * itemsize:
        raise ValueError(f"{data_bytes} bytes of data do not make {shape!s:.80} of {itemsize} each")


def digits(value: int) -> str:
    """Formats a whole number, however long."""
    return str(value) if value.bit_length() <= MAX_DECIMAL_BITS else hex(value)


def whole(text: str) -> int:
    """Parses the whole number that ``digits`` wrote."""
    if _HEX_INT.fullmatch(text):
        return int(text, 16)
    if not _INT.fullmatch(text):
        raise ValueError(f"{text!r:.50} is no whole number")
    return int(text)


def a(kind: type[T], body: Any) -> T:
    """Returns ``body`` if it has exactly this type; TypeError otherwise."""
    if type(body) is not kind:
        raise TypeError(f"a {kind.__name__} is expected, not {body!r:.50}")
    return body
