"""PURE. The names under which keepers offer each other what they have: a contract.

Keepers of one run may be of two versions, so these never change.
"""

from __future__ import annotations

from holdfast.format.manifest import Generation

INVENTORY = "/inventory"
"""A document: ``snapshot.messages.Holding``, as MessagePack."""


def generation_name(generation: Generation) -> str:
    """The generation as requests name it."""
    return f"{generation.incarnation}-{generation.step}"


def image_path(attempt: str, rank: int) -> str:
    """A rank's image, from its first byte to its last."""
    return f"/images/{attempt}/{rank}"


def layout_path(hash_: str) -> str:
    """A document: the bytes of a layout."""
    return f"/layouts/{hash_}"


def parity_path(attempt: str, stripe: int, row: int) -> str:
    """The bytes of a row, once it is sealed. A row without bytes is not offered."""
    return f"/parity/{attempt}/{stripe}/{row}"


def record_path(attempt: str, stripe: int, row: int) -> str:
    """A document: the sealed record of the row."""
    return f"/records/{attempt}/{stripe}/{row}"


def note_path(attempt: str, turn: int, stripe: int, row: int) -> str:
    """A document: which windows of a row that is being made can be fetched now.

    ``turn``: which try it is. What was withdrawn in an earlier one is not what is waited for now.
    """
    return f"/windows/{attempt}/{turn}/{stripe}/{row}"


def window_path(attempt: str, turn: int, stripe: int, row: int, window: int) -> str:
    """One of these windows."""
    return f"{note_path(attempt, turn, stripe, row)}/{window}"
