"""Converts plain values to JSON and back, exactly: everything in the state beside tensors.

JSON has no bytes, tuples, infinities, large integers, enums or dictionaries with other than
string keys; such a value is written as an object with one key that begins with ``$``:

    {"$float": "nan" | "inf" | "-inf" | "0x<16 hex digits>"}
    {"$int": "digits" or "0x<hex>"}     {"$bytes": "base64"}      {"$bytearray": "base64"}
    {"$tuple": [...]}                   {"$dict": [[key, value], ...]}
    {"$ordered": [[key, value], ...]}   {"$counter": [[key, count], ...]}
    {"$default": ["int", [[key, value], ...]]}
    {"$set": [...]}                     {"$frozenset": [...]}
    {"$dtype": "float32"}               {"$device": "cuda:0"}
    {"$numpy": {"dtype", "shape", "data"}}
    {"$enum": {"type", "member"}} or, for flags combined, {"$enum": {"type", "value"}}
    {"$object": {"type", "value"}}      an object of a registered class: its name, and its data
    {"$tensor": {"name", "dtype", "shape", "data"}}    a small tensor, of this rank alone
    {"$leaf": "name"}                   a tensor: a leaf of its own, or the $tensor of this name

Any other value is refused by name, and so are values nested deeper than MAX_DEPTH, and sets and
dictionaries with too many equal hashes. Reading executes nothing: enums and classes are looked up
among those the program registered.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import methodcaller
from typing import Any

import msgspec

from holdfast.errors import FormatError, UnsupportedState
from holdfast.format.checksum import Buffer
from holdfast.format.native_types import (
    a,
    digits,
    encode_foreign,
    enum_member,
    numpy_value,
    refuse_shape,
    registered_class,
    stored_object,
    taken,
    torch_device,
    torch_dtype,
    whole,
)
from holdfast.geometry.box import ITEMSIZE
from holdfast.geometry.codec import refuse_twice

#: The limit of nested containers: written values must be readable on any stack (and a list that
#: contains itself has no end).
MAX_DEPTH = 64
#: Nested objects and lists of JSON: a container takes four at most.
_MAX_LEVELS = 4 * MAX_DEPTH + 8
#: The limit of keys of a dictionary, or items of a set, that have one hash. Each is compared with
#: all of these, so the limit bounds the time that reading takes: 25,000 multiples of 2**61 - 1 took
#: 8.5 s. Floats of 35 powers of two have the most equal hashes met in practice.
MAX_ALIKE = 64
_NESTING = frozenset({dict, list})
_PLAIN_INT = 1 << 53
_NUMBERS, _WORDS = frozenset({int, float}), frozenset({str, bool, type(None)})
_TEXT, _is_tag = frozenset({str}), methodcaller("startswith", "$")
_FLOATS = ("nan", "inf", "-inf")
_HEX_FLOAT = re.compile(r"0x[0-9a-f]{16}")
_COMMON_NAN = struct.pack("<d", math.nan)
_FACTORIES: dict[str, Any] = {
    "None": None,
    "int": int,
    "float": float,
    "str": str,
    "list": list,
    "dict": dict,
    "set": set,
}


class SmallTensor(msgspec.Struct, frozen=True):
    """A tensor that is stored among the values: its elements, row by row, as bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


#: Called with a value and its path: returns the leaf it is stored as, the small tensor it is, or
#: None when it is no tensor.
FindTensor = Callable[[Any, str], "str | SmallTensor | None"]


class _TensorBody(msgspec.Struct, frozen=True):
    """The body of a ``$tensor``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: str


class _RankValues(msgspec.Struct, frozen=True):
    """The structure of the values of one image, before any of them is checked."""

    shared: dict[str, Any] = {}
    own: dict[str, Any] = {}
    aliases: dict[str, str] = {}


class LeafRef(msgspec.Struct, frozen=True):
    """A placeholder in a value for a tensor that is stored as the leaf ``name``."""

    name: str


def encode(
    value: Any, where: str = "value", *, tensor: FindTensor | None = None, depth: int = 0
) -> Any:
    """Encodes ``value`` in JSON's own types; UnsupportedState names the place of a value that
    cannot be stored.

    ``tensor`` is called for every value that is not plain, and decides how a tensor is stored.
    ``depth``: the number of containers around it.
    """
    return _Encoder(tensor).encode(value, where, depth)


class _Encoder:
    """One walk over a value; every method returns JSON's own types."""

    def __init__(self, tensor: FindTensor | None, *, is_key: bool = False) -> None:
        self._tensor, self._is_key = tensor, is_key

    def encode(self, value: Any, where: str, depth: int) -> Any:
        kind = type(value)
        if kind in _WORDS:
            return value
        if kind is int:
            return value if -_PLAIN_INT < value < _PLAIN_INT else {"$int": digits(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": _float_text(value)}
        if kind in (bytes, bytearray):
            return {f"${kind.__name__}": base64.b64encode(value).decode()}
        container = _CONTAINERS.get(kind)
        if container is not None:
            if depth >= MAX_DEPTH:
                raise UnsupportedState(
                    f"{where} is nested more than {MAX_DEPTH} deep, or contains itself", where=where
                )
            return container(self, value, where, depth + 1)
        if kind is LeafRef:
            return {"$leaf": value.name}
        found = None if self._tensor is None else self._tensor(value, where)
        if isinstance(found, SmallTensor):
            data = base64.b64encode(found.data).decode()
            body = {"name": found.name, "dtype": found.dtype, "shape": list(found.shape)}
            return {"$tensor": body | {"data": data}}
        if found is not None:
            return {"$leaf": found}
        return self._object(value, where, depth)

    def _object(self, value: Any, where: str, depth: int) -> Any:
        """Encodes an object of a registered class, or a value of numpy, torch or an enum."""
        known = registered_class(type(value))
        if known is None:
            return encode_foreign(value, where)
        if self._is_key:
            raise UnsupportedState(
                f"{where} is an object of {known.name}, which is no key and no item of a set in a "
                "checkpoint, because it is made anew at a restore: use a text or a number",
                where=where,
            )
        if depth >= MAX_DEPTH:
            raise UnsupportedState(
                f"{where} is nested more than {MAX_DEPTH} deep, or contains itself", where=where
            )
        data = self.encode(taken(known, value, where), where, depth + 1)
        return {"$object": {"type": known.name, "value": data}}

    def key(self, value: Any, where: str, depth: int) -> Any:
        """Encodes a key or an item of a set; a tensor and an object of a registered class are
        refused, because their content changes.
        """
        return _Encoder(None, is_key=True).encode(value, where, depth)

    def items(self, value: Sequence[Any], where: str, depth: int) -> list[Any]:
        if _are_as_in_json(value):
            return list(value)
        return [self.encode(item, f"{where}.{i}", depth) for i, item in enumerate(value)]

    def unordered(self, value: Collection[Any], where: str, depth: int) -> list[Any]:
        """Encodes the items sorted, because a set's order differs from process to process."""
        _refuse_alike(value, where)
        found = [self.key(item, f"an item of {where}", depth) for item in value]
        return sorted(found, key=msgspec.json.encode)

    def pairs(self, value: dict[Any, Any], where: str, depth: int) -> list[Any]:
        _refuse_alike(value, where)
        return [
            [
                self.key(key, f"a key of {where}", depth),
                self.encode(item, f"{where}.{key}", depth),
            ]
            for key, item in value.items()
        ]

    def mapping(self, value: dict[Any, Any], where: str, depth: int) -> Any:
        if not value:
            return {}
        if not _TEXT.issuperset(map(type, value)) or any(map(_is_tag, value)):
            return {"$dict": self.pairs(value, where, depth)}
        found = value.copy()
        for key, item in found.items():
            kind = type(item)
            # Most values are words and counts, which need no call of their own.
            if not (kind in _WORDS or (kind is int and -_PLAIN_INT < item < _PLAIN_INT)):
                found[key] = self.encode(item, f"{where}.{key}", depth)
        return found

    def default(self, value: defaultdict[Any, Any], where: str, depth: int) -> Any:
        for name, factory in _FACTORIES.items():
            if value.default_factory is factory:
                return {"$default": [name, self.pairs(value, where, depth)]}
        raise UnsupportedState(
            f"{where} is a defaultdict made by {value.default_factory!r}; stored are those made by "
            f"{', '.join(_FACTORIES)}: use one of these, or a dict",
            where=where,
        )


def _refuse_alike(value: Collection[Any], where: str) -> None:
    """Raises UnsupportedState for a set or dictionary with so many equal hashes that reading would
    take too long.
    """
    if _hash_alike(value):
        raise UnsupportedState(
            f"more than {MAX_ALIKE} keys or items of {where} have the same hash, which would take "
            "a time that grows with the square of their number to read: use other keys, or a list",
            where=where,
        )


def _hash_alike(items: Collection[Any]) -> bool:
    if len(items) <= MAX_ALIKE:
        return False
    return max(Counter(map(hash, items)).values()) > MAX_ALIKE


def _are_as_in_json(value: Sequence[Any]) -> bool:
    """True if a list has only text, or only numbers that need no tag.

    Generators and histories are long, and this checks no item in Python code.
    """
    kinds = set(map(type, value))
    if not kinds <= _NUMBERS:
        return kinds <= _WORDS
    if int in kinds and not (min(value) > -_PLAIN_INT and max(value) < _PLAIN_INT):
        return False
    return float not in kinds or all(map(math.isfinite, value))


_CONTAINERS: dict[type, Callable[[_Encoder, Any, str, int], Any]] = {
    list: _Encoder.items,
    dict: _Encoder.mapping,
    tuple: lambda self, *what: {"$tuple": self.items(*what)},
    OrderedDict: lambda self, *what: {"$ordered": self.pairs(*what)},
    Counter: lambda self, *what: {"$counter": self.pairs(*what)},
    defaultdict: _Encoder.default,
    set: lambda self, *what: {"$set": self.unordered(*what)},
    frozenset: lambda self, *what: {"$frozenset": self.unordered(*what)},
}


def decode(
    value: Any,
    *,
    leaf: Callable[[str], Any] = LeafRef,
    tensor: Callable[[SmallTensor], Any] = lambda small: small,
    strict: bool = False,
    makes_objects: bool = False,
) -> Any:
    """Returns the value that ``encode`` was given. Raises FormatError when the input is not of that
    form.

    ``leaf`` returns the tensor of a leaf's name, ``tensor`` that of a small one. ``strict``: an
    enum or a class that is not registered is a UsageError; otherwise a member reads as an
    EnumMember. ``makes_objects``: makes the objects of registered classes, which takes their
    tensors; otherwise each reads as a StoredObject.
    """
    try:
        return _Decoder(leaf, tensor, strict, makes_objects).decode(value)
    except RecursionError:
        raise FormatError("a stored value is nested too deep to be one of ours") from None


class _Decoder:
    """One walk over JSON."""

    def __init__(
        self,
        leaf: Callable[[str], Any],
        tensor: Callable[[SmallTensor], Any],
        strict: bool,
        makes_objects: bool,
    ) -> None:
        self.leaf, self.tensor, self.strict = leaf, tensor, strict
        self.makes_objects = makes_objects

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        if len(value) == 1:
            ((tag, body),) = value.items()
            if tag.startswith("$"):
                return self._tagged(tag, body)
        return {key: self.decode(item) for key, item in value.items()}

    def _tagged(self, tag: str, body: Any) -> Any:
        read = _TAGS.get(tag)
        if read is None:
            raise FormatError(
                f"a stored value has the unknown tag {tag}; a newer Holdfast wrote it"
            )
        try:
            return read(self, body)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise FormatError(f"a stored value tagged {tag} is malformed: {error}") from None

    def items(self, body: Any) -> list[Any]:
        return [self.decode(item) for item in a(list, body)]

    def pairs(self, body: Any) -> dict[Any, Any]:
        body = [_pair(one) for one in a(list, body)]
        keys = self._hashed([key for key, _ in body])
        found = dict(zip(keys, (self.decode(item) for _, item in body), strict=True))
        if len(found) != len(keys):
            raise ValueError("a key is there twice")
        return found

    def unordered(self, body: Any) -> set[Any]:
        items = self._hashed(a(list, body))
        found = set(items)
        if len(found) != len(items):
            raise ValueError("an item is there twice")
        return found

    def _hashed(self, body: list[Any]) -> list[Any]:
        """Decodes keys, or items of a set: none may be a tensor, and not too many may have equal
        hashes.
        """
        inner = _Decoder(_no_tensor, _no_tensor, self.strict, self.makes_objects)
        found = [inner.decode(item) for item in body]
        if _hash_alike(found):
            raise ValueError(f"more than {MAX_ALIKE} keys or items have the same hash")
        return found

    def object(self, body: Any) -> Any:
        return stored_object(
            body, self.decode, strict=self.strict, makes_objects=self.makes_objects
        )

    def default(self, body: Any) -> Any:
        name, pairs = _pair(body)
        return defaultdict(_FACTORIES[a(str, name)], self.pairs(pairs))


_TAGS: dict[str, Callable[[_Decoder, Any], Any]] = {
    "$float": lambda _, body: _float(a(str, body)),
    "$int": lambda _, body: whole(a(str, body)),
    "$bytes": lambda _, body: base64.b64decode(a(str, body), validate=True),
    "$bytearray": lambda _, body: bytearray(base64.b64decode(a(str, body), validate=True)),
    "$tuple": lambda self, body: tuple(self.items(body)),
    "$dict": _Decoder.pairs,
    "$ordered": lambda self, body: OrderedDict(self.pairs(body)),
    "$counter": lambda self, body: Counter(self.pairs(body)),
    "$default": _Decoder.default,
    "$set": _Decoder.unordered,
    "$frozenset": lambda self, body: frozenset(self.unordered(body)),
    "$leaf": lambda self, body: self.leaf(a(str, body)),
    "$tensor": lambda self, body: self.tensor(_small_tensor(body)),
    "$dtype": lambda _, body: torch_dtype(a(str, body)),
    "$device": lambda _, body: torch_device(a(str, body)),
    "$numpy": lambda _, body: numpy_value(body),
    "$enum": lambda self, body: enum_member(body, strict=self.strict),
    "$object": _Decoder.object,
}


def objects_in(value: Any) -> Iterator[Any]:
    """Yields the encoded objects of registered classes in an encoded value, the outermost ones."""
    if type(value) is dict and "$object" in value:
        yield value
    elif type(value) in _NESTING:
        for item in value.values() if type(value) is dict else value:
            if type(item) in _NESTING:
                yield from objects_in(item)


def _pair(body: Any) -> tuple[Any, Any]:
    key, item = a(list, body)
    return key, item


def _no_tensor(found: str | SmallTensor) -> Any:
    raise ValueError(f"a tensor is no key, and no item of a set: {found!r:.100}")


def _small_tensor(body: Any) -> SmallTensor:
    form = msgspec.convert(body, _TensorBody)
    data = base64.b64decode(form.data, validate=True)
    refuse_shape(form.shape, ITEMSIZE[form.dtype], len(data))
    return SmallTensor(form.name, form.dtype, form.shape, data)


def _float_text(value: float) -> str:
    raw = struct.pack("<d", value)
    is_rare = math.isnan(value) and raw != _COMMON_NAN
    return f"0x{int.from_bytes(raw, 'little'):016x}" if is_rare else repr(value)


def _float(text: str) -> float:
    if _HEX_FLOAT.fullmatch(text):
        found: float = struct.unpack("<d", int(text, 16).to_bytes(8, "little"))[0]
        return found
    if text not in _FLOATS:
        raise ValueError(f"{text!r:.50} is no float that needs a tag")
    return float(text)


def to_bytes(document: Any) -> bytes:
    """Returns an encoded value as JSON text. Raises UnsupportedState for text that is not
    Unicode.
    """
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError as error:
        raise UnsupportedState(
            f"the text {error.object!r:.100} in the state has half a character (a lone surrogate) "
            "and cannot be stored: encode it to bytes"
        ) from None


def from_bytes(data: Buffer, where: str) -> Any:
    """Returns the encoded value in JSON text; FormatError names ``where``."""
    try:
        document = msgspec.json.decode(data)
        refuse_twice(data, document)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: the stored values are not JSON: {error}") from None
    if nests_too_deep(document):
        raise FormatError(f"{where}: the stored values are nested too deep to be ours")
    return document


def values_of(data: Buffer, where: str) -> dict[str, Any]:
    """Returns the values in an image, as encoded: ``shared``, ``own`` and ``aliases``, each an
    object.
    """
    document = from_bytes(data, where)
    try:
        form = msgspec.convert(document, _RankValues)
    except msgspec.ValidationError as error:
        raise FormatError(f"{where}: its values are not those of a rank: {error}") from None
    return {**document, **msgspec.structs.asdict(form)}


def nests_too_deep(document: Any) -> bool:
    """True if JSON text is nested deeper than ``encode`` ever makes it. Checked without
    recursion.
    """
    level = [document] if type(document) in _NESTING else []
    for _ in range(_MAX_LEVELS):
        inside = (one.values() if type(one) is dict else one for one in level)
        level = [item for items in inside for item in items if type(item) in _NESTING]
        if not level:
            return False
    return True
