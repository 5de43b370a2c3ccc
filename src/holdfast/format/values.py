"""Plain values to JSON and back, exactly: what the state holds beside tensors.

JSON has no bytes, tuples, infinities, large integers or dictionaries with other than string
keys; such a value is written as an object with one key that begins with ``$``:

    {"$float": "nan" | "inf" | "-inf"}    {"$int": "digits"}       {"$bytes": "base64"}
    {"$tuple": [...]}                     {"$dict": [[key, value], ...]}
    {"$dtype": "float32"}                 {"$numpy": {"dtype", "shape", "data"}}
    {"$leaf": "name"}                     a tensor, stored as a leaf of its own

Anything else is refused by name, and so is what nests deeper than MAX_DEPTH. Nothing here
executes anything on reading.
"""

from __future__ import annotations

import base64
import math
import re
import sys
from typing import Any, TypeVar

import msgspec

from holdfast.errors import FormatError, UnsupportedState
from holdfast.format.checksum import Buffer

#: Containers in containers: what is written must be readable on any stack (and a list that
#: contains itself has no end).
MAX_DEPTH = 64
#: Python reads no longer numbers from text.
MAX_INT_BITS = 8192
T = TypeVar("T")
_PLAIN_INT = 1 << 53
_NUMPY_KINDS = "biufcSU"
_INT = re.compile(r"-?[0-9]+")
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class LeafRef(msgspec.Struct, frozen=True):
    """Stands in a value for a tensor that is stored as the leaf ``name``."""

    name: str


def encode(value: Any, where: str = "value", *, depth: int = 0) -> Any:
    """``value`` in JSON's own types; UnsupportedState names the place of what cannot be kept."""
    if value is None or isinstance(value, bool):
        return value
    kind = type(value)
    if kind is int:
        return value if -_PLAIN_INT < value < _PLAIN_INT else _encode_large(value, where)
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is str:
        return value
    if kind in (bytes, bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if depth >= MAX_DEPTH:
        raise UnsupportedState(
            f"{where} is nested more than {MAX_DEPTH} deep, or contains itself", where=where
        )
    if kind is list:
        return [encode(item, f"{where}[{i}]", depth=depth + 1) for i, item in enumerate(value)]
    if kind is tuple:
        items = [encode(item, f"{where}[{i}]", depth=depth + 1) for i, item in enumerate(value)]
        return {"$tuple": items}
    if isinstance(value, dict):
        return _encode_dict(value, where, depth + 1)
    if kind is LeafRef:
        return {"$leaf": value.name}
    return _encode_foreign(value, where)


def _encode_large(value: int, where: str) -> Any:
    if value.bit_length() > MAX_INT_BITS:
        raise UnsupportedState(
            f"{where} is an integer of more than {MAX_INT_BITS} bits: store it as bytes",
            where=where,
        )
    return {"$int": str(value)}


def _encode_dict(value: dict[Any, Any], where: str, depth: int) -> Any:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(item, f"{where}.{key}", depth=depth) for key, item in value.items()}
    return {
        "$dict": [
            [
                encode(key, f"a key of {where}", depth=depth),
                encode(item, f"{where}[{key!r}]", depth=depth),
            ]
            for key, item in value.items()
        ]
    }


def _encode_foreign(value: Any, where: str) -> Any:
    kind = type(value)
    origin = kind.__module__.partition(".")[0]
    if origin == "torch" and kind.__name__ == "dtype":
        return {"$dtype": str(value).removeprefix("torch.")}
    np = sys.modules.get("numpy")
    # Only arrays proper: a masked array or a matrix is more than its elements.
    is_proper = np is not None and (kind is np.ndarray or isinstance(value, np.generic))
    if np is not None and is_proper and value.dtype.kind in _NUMPY_KINDS:
        array = np.asarray(value)  # an empty numpy string says it has no bytes, and has some
        data = base64.b64encode(array.tobytes()).decode()
        shape = list(value.shape) if kind is np.ndarray else None
        return {"$numpy": {"dtype": array.dtype.str, "shape": shape, "data": data}}
    raise UnsupportedState(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which cannot be stored without "
        "executing code on reading. Store its parts (numbers, strings, bytes, lists, tuples, "
        "dicts, arrays, tensors), or wrap it in an object with state_dict and load_state_dict.",
        where=where,
    )


def decode(value: Any) -> Any:
    """The value that ``encode`` was given. FormatError when it is not of that form."""
    try:
        return _decode(value)
    except RecursionError:
        raise FormatError("a stored value is nested too deep to be one of ours") from None


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, body),) = value.items()
        if tag.startswith("$"):
            return _decode_tagged(tag, body)
    return {key: _decode(item) for key, item in value.items()}


def _decode_tagged(tag: str, body: Any) -> Any:
    try:
        match tag:
            case "$float":
                return _FLOATS[body]
            case "$int":
                return _large(_a(str, body))
            case "$bytes":
                return base64.b64decode(_a(str, body), validate=True)
            case "$tuple":
                return tuple(_decode(item) for item in _a(list, body))
            case "$dict":
                return {_decode(key): _decode(item) for key, item in map(_pair, _a(list, body))}
            case "$leaf":
                return LeafRef(_a(str, body))
            case "$dtype":
                return _torch_dtype(_a(str, body))
            case "$numpy":
                return _numpy_value(_a(dict, body))
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError(f"a stored value tagged {tag} is malformed: {error}") from None
    raise FormatError(f"a stored value has the unknown tag {tag}; a newer Holdfast wrote it")


def _a(kind: type[T], body: Any) -> T:
    if type(body) is not kind:
        raise TypeError(f"a {kind.__name__} is expected, not {body!r:.50}")
    return body


def _pair(body: Any) -> tuple[Any, Any]:
    key, item = _a(list, body)
    return key, item


def _large(digits: str) -> int:
    if not _INT.fullmatch(digits):
        raise ValueError(f"{digits!r:.50} is no whole number")
    return int(digits)


class DtypeName(msgspec.Struct, frozen=True):
    """A torch dtype read back by a process that has not loaded torch."""

    name: str


def _torch_dtype(name: str) -> Any:
    torch = sys.modules.get("torch")
    if torch is None:
        return DtypeName(name)
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no torch dtype is called {name!r}")
    return found


def _numpy_value(body: dict[str, Any]) -> Any:
    import numpy as np

    dtype = np.dtype(_a(str, body["dtype"]))
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"numpy dtype {dtype} is not stored")
    data = base64.b64decode(_a(str, body["data"]), validate=True)
    shape = () if body["shape"] is None else tuple(_a(int, size) for size in body["shape"])
    if any(size < 0 for size in shape) or len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes of data do not make {shape} of {dtype}")
    array = np.ndarray(shape, dtype, bytearray(data))
    return array[()] if body["shape"] is None else array


def to_bytes(document: Any) -> bytes:
    """An encoded value as JSON text. UnsupportedState for text that is not Unicode."""
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError as error:
        raise UnsupportedState(
            f"the text {error.object!r:.100} in the state has half a character (a lone surrogate) "
            "and cannot be stored: encode it to bytes"
        ) from None


def from_bytes(data: Buffer, where: str) -> Any:
    """The encoded value in JSON text; FormatError names ``where``."""
    try:
        return msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: the stored values are not JSON: {error}") from None
