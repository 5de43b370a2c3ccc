"""PURE. What keepers offer to their peers is called so, and nothing else."""

from __future__ import annotations

INVENTORY = "/inventory"
"""A document: ``messages.Holding``, as MessagePack."""


def image_path(attempt: str, rank: int) -> str:
    """An image, from its first byte to its last."""
    return f"/images/{attempt}/{rank}"


def layout_path(hash_: str) -> str:
    """A document: the bytes of a layout."""
    return f"/layouts/{hash_}"


def generation_name(incarnation: int, step: int) -> str:
    """As what an image is asked for."""
    return f"{incarnation}-{step}"
