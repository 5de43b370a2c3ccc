"""JSON in which no key is there twice: readers differ in which of the two they take.

A file that two readers read differently is one that a checksum cannot vouch for.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import msgspec


def refuse_twice(data: bytes | bytearray | memoryview, decoded: Any) -> None:
    """ValueError for an object with a key twice. ``decoded`` is what msgspec reads ``data`` as."""
    # Decoding drops one of two; so what encodes to the same bytes again had none. That is how
    # all documents are written here, and looking at every key takes ten times as long.
    if msgspec.json.encode(decoded) != data:
        json.loads(bytes(data), object_pairs_hook=unique)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object from its keys and values, for ``json.loads``; ValueError for a key twice."""
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise ValueError(f"{name!r} is there twice")
    return dict(pairs)
