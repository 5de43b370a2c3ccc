"""Shows the plain values of a checkpoint as a tree, and finds the places where two of them differ.

Values are looked at as they are stored (see ``format.values``), so nothing needs to be decoded,
``1`` is not ``1.0``, and NaN is NaN. Places are written as Python would:
``optimizer.groups[0].options.lr``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.errors import FormatError
from holdfast.format import values as codec

#: Longer values are cut in tables; ``--json`` has them whole.
VALUE_WIDTH = 60
MAX_KEY = 1 << 16
ABSENT: Any = object()


@dataclass(frozen=True, slots=True)
class Change:
    """A place where two trees differ; ``a`` or ``b`` is ABSENT where there is nothing."""

    path: str
    a: Any
    b: Any


def changes(a: Any, b: Any, path: str = "") -> Iterator[Change]:
    """The smallest places in which two stored values differ; lists of numbers are one place."""
    if codec.to_bytes(a) == codec.to_bytes(b):
        return
    parts_a, parts_b = _parts(a), _parts(b)
    if parts_a is None or parts_b is None or (_kind(a), _class(a)) != (_kind(b), _class(b)):
        yield Change(path, a, b)
        return
    if _kind(a) == "$ordered" and list(parts_a) != list(parts_b):
        yield Change(path, a, b)  # the order is part of what it is
        return
    for segment in [*parts_a, *(s for s in parts_b if s not in parts_a)]:
        one, other = parts_a.get(segment, ABSENT), parts_b.get(segment, ABSENT)
        where = (path + segment).removeprefix(".")
        if one is ABSENT or other is ABSENT:
            yield Change(where, one, other)
        else:
            yield from changes(one, other, where)


def find(value: Any, path: str) -> Any:
    """The stored value at ``path``; ABSENT when there is none."""
    if not path:
        return value
    path = path if path.startswith((".", "[")) else f".{path}"
    for segment, part in (_parts(value) or {}).items():
        rest = path.removeprefix(segment)
        if rest != path and (not rest or rest.startswith((".", "["))):
            found = find(part, rest)
            if found is not ABSENT:
                return found
    return ABSENT


def count(value: Any) -> int:
    """How many places there are."""
    parts = _parts(value)
    return 1 if parts is None else sum(count(part) for part in parts.values())


def text(value: Any, width: int = VALUE_WIDTH) -> str:
    """A stored value on one line, as Python writes it."""
    try:
        said = repr(codec.decode(value))
    except (FormatError, ValueError):
        # What only a newer Holdfast can read, and a number of too many digits, is still shown.
        said = codec.to_bytes(value).decode()
    return said if len(said) <= width else said[: width - 3] + "..."


def _kind(value: Any) -> str:
    """What a stored value is: its tag, or the name of JSON's own type."""
    tag = next(iter(value)) if isinstance(value, dict) and len(value) == 1 else ""
    return tag if tag.startswith("$") else type(value).__name__


def _class(value: Any) -> Any:
    """The name of an object's class; None for what is no object."""
    body = value["$object"] if _kind(value) == "$object" else None
    return body.get("type") if isinstance(body, dict) else None


def _parts(value: Any) -> dict[str, Any] | None:
    """What a container holds, by how each is reached; None for what is one value."""
    kind = _kind(value)
    try:
        if kind == "$object":
            return _parts(value[kind]["value"])
        if kind == "$tuple":
            return _items(value[kind])
        if kind in ("$dict", "$ordered"):
            return {f"[{text(key, MAX_KEY)}]": item for key, item in value[kind]}
    except (TypeError, ValueError, KeyError):  # not as it should be: then it is shown as it is
        return None
    if kind == "dict":
        return {f".{key}": item for key, item in value.items()}
    return _items(value) if kind == "list" else None


def _items(items: list[Any]) -> dict[str, Any] | None:
    if not any(isinstance(item, (dict, list)) for item in items):
        return None
    return {f"[{number}]": item for number, item in enumerate(items)}
