"""What a host is doing right now, seen from outside, so that a fault can be aimed at it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from holdfast.catalogue import MANIFESTS, STEPS
from holdfast.errors import ArenaError
from holdfast.snapshot.arena import SLOT_SUFFIX, SlotFile

_HALVES = ("0", "1")


def is_capturing(arena: Path) -> bool:
    """Whether an image is being copied into a slot of this arena."""
    for path in arena.glob(f"*{SLOT_SUFFIX}"):
        with suppress(ArenaError), closing(SlotFile.open(path, writable=False)) as slot:
            record = slot.read_record()
            if record is not None and record.state == "writing":
                return True
    return False


def is_encoding(arena: Path) -> bool:
    """Whether its keeper is making parity: one half of the rows has no records, the other has.

    So not for the very first generation of a run that is protected.
    """
    names = [path.name for path in (arena / "parity").glob("*.record")]
    return sum(any(name.startswith(f"{half}-") for name in names) for half in _HALVES) == 1


def is_persisting(root: Path | str) -> bool:
    """Whether images lie in storage that no manifest names (yet)."""
    steps, manifests = Path(root) / STEPS, Path(root) / MANIFESTS
    if not steps.is_dir():
        return False
    named = {path.stem for path in manifests.glob("*.json")}
    return any(path.name.rpartition("-")[0] not in named for path in steps.iterdir())


def wait_until(
    is_so: Callable[[], object], *, timeout_s: float, what: Callable[[], str] | str = "",
    pause_s: float = 0.01,
) -> None:  # fmt: skip
    """Look every ``pause_s`` seconds until it is so; TimeoutError says ``what`` did not come."""
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline_s:
            said = what() if callable(what) else what
            raise TimeoutError(f"{said or 'what was waited for'} did not come in {timeout_s:g} s")
        time.sleep(pause_s)
