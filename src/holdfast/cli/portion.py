"""The options by which ``import`` and ``export`` choose, rename and convert leaves."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace

from holdfast.errors import UsageError
from holdfast.interop.writing.chosen_leaves import CONVERTED, convert
from holdfast.interop.writing.saved_state import choose_only, map_state, read_rules
from holdfast.interop.writing.state_tree import SavedState
from holdfast.restore.reading.images import Checkpoint
from holdfast.rules.patterns import Pattern

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_SIZE = re.compile(r"([0-9]{1,18})([kmg]i?)?b?", re.IGNORECASE)


def add_portion(command: argparse.ArgumentParser) -> None:
    """Declares the options."""
    command.add_argument(
        "--only",
        metavar="PATTERN",
        action="append",
        help="leaves with such names and the values beside them, as 'model.**'; may be repeated",
    )
    command.add_argument(
        "--rules",
        metavar="FILE",
        help="a Python file that defines `rules`, which the names there are mapped by; it is run",
    )
    command.add_argument(
        "--cast",
        metavar="[PATTERN=]TYPE",
        action="append",
        help=f"convert floating point leaves to {', '.join(CONVERTED)}, and an optimizer's `step` "
        "only where the pattern ends so; may be repeated",
    )
    command.add_argument(
        "--memory", metavar="BYTES", help="the most memory to take for data, as 512MiB"
    )
    command.add_argument("--dry-run", action="store_true", help="show what would be written")
    command.add_argument(
        "--ranks",
        action="store_true",
        help="share the work with the other processes that torchrun starts of this command",
    )


def memory_bytes(option: str, given: str | None, default: int) -> int:
    """A number of bytes as people write it. UsageError for anything else."""
    if given is None:
        return default
    matched = _SIZE.fullmatch(given.strip())
    if matched is None or not int(matched[1]):
        raise UsageError(f"{option} {given}: give a number of bytes, such as 536870912 or 512MiB")
    return int(matched[1]) * _UNITS[(matched[2] or "").lower()]


def portion(args: argparse.Namespace, saved: SavedState, checkpoint: Checkpoint) -> SavedState:
    """What the options choose of a state: first a part, which rules map, then conversions."""
    if args.only:
        saved = choose_only(saved, args.only)
    if args.rules:
        saved = map_state(saved, read_rules(args.rules), checkpoint)
    if args.cast:
        casts = [_cast(text) for text in args.cast]
        leaves = convert(saved.leaves, casts, kept=_steps_of(saved))
        saved = replace(saved, leaves=leaves)
    return saved


def _steps_of(saved: SavedState) -> set[str]:
    """The leaves by which optimizers count their steps: a type with few digits counts no further
    than 256.
    """
    keys = tuple(f"{key}." for key in saved.optimizers)
    return {name for name in saved.leaves if name.startswith(keys) and name.endswith(".step")}


def _cast(text: str) -> tuple[Pattern, str]:
    pattern, _, dtype = text.rpartition("=")
    return Pattern(pattern or "**"), dtype.upper()
