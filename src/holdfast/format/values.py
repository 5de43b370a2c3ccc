"""Plain values to JSON and back, exactly: what the state holds beside tensors.

JSON has no bytes, tuples, infinities, large integers or dictionaries with other than string
keys; such a value is written as an object with one key that begins with ``$``:

    {"$float": "nan" | "inf" | "-inf"}    {"$int": "digits"}       {"$bytes": "base64"}
    {"$tuple": [...]}                     {"$dict": [[key, value], ...]}
    {"$dtype": "float32"}                 {"$numpy": {"dtype", "shape", "data"}}
    {"$leaf": "name"}                     a tensor, stored as a leaf of its own

Anything else is refused by name. Nothing here executes anything on reading.
"""

from __future__ import annotations

import base64
import math
import sys
from typing import Any

import msgspec

from holdfast.errors import FormatError, UnsupportedState
from holdfast.format.checksum import Buffer

_PLAIN_INT = 1 << 53
_NUMPY_KINDS = "biufcSU"


class LeafRef(msgspec.Struct, frozen=True):
    """Stands in a value for a tensor that is stored as the leaf ``name``."""

    name: str


def encode(value: Any, where: str = "value") -> Any:
    """``value`` in JSON's own types; UnsupportedState names the place of what cannot be kept."""
    if value is None or isinstance(value, bool):
        return value
    kind = type(value)
    if kind is int:
        return value if -_PLAIN_INT < value < _PLAIN_INT else {"$int": str(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is str:
        return value
    if kind in (bytes, bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is list:
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if kind is tuple:
        return {"$tuple": [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, dict):
        return _encode_dict(value, where)
    if kind is LeafRef:
        return {"$leaf": value.name}
    return _encode_foreign(value, where)


def _encode_dict(value: dict[Any, Any], where: str) -> Any:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
    return {
        "$dict": [
            [encode(key, f"a key of {where}"), encode(item, f"{where}[{key!r}]")]
            for key, item in value.items()
        ]
    }


def _encode_foreign(value: Any, where: str) -> Any:
    kind = type(value)
    origin = kind.__module__.partition(".")[0]
    if origin == "torch" and kind.__name__ == "dtype":
        return {"$dtype": str(value).removeprefix("torch.")}
    if origin == "numpy" and hasattr(value, "dtype") and value.dtype.kind in _NUMPY_KINDS:
        data = base64.b64encode(value.tobytes()).decode()
        scalar = kind.__name__ != "ndarray"
        shape = None if scalar else list(value.shape)
        return {"$numpy": {"dtype": value.dtype.str, "shape": shape, "data": data}}
    raise UnsupportedState(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which cannot be stored without "
        "executing code on reading. Store its parts (numbers, strings, bytes, lists, tuples, "
        "dicts, arrays, tensors), or wrap it in an object with state_dict and load_state_dict.",
        where=where,
    )


def decode(value: Any) -> Any:
    """The value that ``encode`` was given. FormatError when it is not of that form."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, body),) = value.items()
        if tag.startswith("$"):
            return _decode_tagged(tag, body)
    return {key: decode(item) for key, item in value.items()}


def _decode_tagged(tag: str, body: Any) -> Any:
    try:
        match tag:
            case "$float":
                return float(body)
            case "$int":
                return int(body)
            case "$bytes":
                return base64.b64decode(body, validate=True)
            case "$tuple":
                return tuple(decode(item) for item in body)
            case "$dict":
                return {decode(key): decode(item) for key, item in body}
            case "$leaf":
                return LeafRef(str(body))
            case "$dtype":
                return _torch_dtype(body)
            case "$numpy":
                return _numpy_value(body)
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError(f"a stored value tagged {tag} is malformed: {error}") from None
    raise FormatError(f"a stored value has the unknown tag {tag}; a newer Holdfast wrote it")


class DtypeName(msgspec.Struct, frozen=True):
    """A torch dtype read back by a process that has not loaded torch."""

    name: str


def _torch_dtype(name: str) -> Any:
    torch = sys.modules.get("torch")
    if torch is None:
        return DtypeName(str(name))
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no torch dtype is called {name!r}")
    return found


def _numpy_value(body: dict[str, Any]) -> Any:
    import numpy as np

    dtype = np.dtype(body["dtype"])
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"numpy dtype {dtype} is not stored")
    flat = np.frombuffer(base64.b64decode(body["data"], validate=True), dtype=dtype)
    return flat[0] if body["shape"] is None else flat.reshape(body["shape"]).copy()


def to_bytes(document: Any) -> bytes:
    """An encoded value as JSON text."""
    return msgspec.json.encode(document)


def from_bytes(data: Buffer, where: str) -> Any:
    """The encoded value in JSON text; FormatError names ``where``."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{where}: the stored values are not JSON: {error}") from None
