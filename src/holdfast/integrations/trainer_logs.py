"""Turns what a Trainer logs, and what TRL counts for its next log, into parts of a state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_LEAST_LOG_BYTES = 4096


def padded(log: bytes) -> bytearray:
    """Returns the log with spaces before its last line's end, up to a power of two.

    A leaf of another shape costs a save as much as the first one: with this few saves have one.
    """
    size = max(_LEAST_LOG_BYTES, 1 << (len(log) - 1).bit_length())
    return bytearray(log[:-1].ljust(size - 1) + log[-1:])


def log_entries(log: bytes) -> list[Any]:
    """Returns what was logged: an entry a line, or, as the first version kept it, one list."""
    entries: list[Any] = []
    for line in log.splitlines():
        found = json.loads(line)
        entries += found if isinstance(found, list) else [found]
    return entries


def counts_of_trl(trainer: Any) -> dict[str, Any]:
    """Returns the values whose means a Trainer of TRL logs next, and its count of tokens.

    {} for other Trainers.
    """
    if not _is_trl(trainer):
        return {}
    found: dict[str, Any] = {"tokens": getattr(trainer, "_total_train_tokens", 0)}
    for mode, values in _means(trainer):
        found[mode] = {name: list(some) for name, some in values.items()}
    return found


def give_counts_of_trl(trainer: Any, found: Mapping[str, Any]) -> None:
    """Sets what ``counts_of_trl`` returned."""
    if not found or not _is_trl(trainer):
        return
    trainer._total_train_tokens = found["tokens"]
    for mode, values in _means(trainer):
        values.clear()
        values.update((name, list(some)) for name, some in found.get(mode, {}).items())


def _means(trainer: Any) -> list[tuple[str, Any]]:
    """Returns the lists by name, of each mode; none of a Trainer that has one for all modes."""
    found = getattr(trainer, "_metrics", {}).items()
    return [(mode, values) for mode, values in found if isinstance(values, Mapping)]


def _is_trl(trainer: Any) -> bool:
    return any(kind.__module__.startswith("trl.") for kind in type(trainer).__mro__)
