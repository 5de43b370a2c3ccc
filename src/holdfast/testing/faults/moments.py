"""What a host is doing right now, seen from outside, so that a fault can be aimed at it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from holdfast.catalogue import INCARNATIONS, MANIFESTS, STEPS, generation_of
from holdfast.errors import ArenaError
from holdfast.snapshot.arena import SLOT_SUFFIX, SlotFile

_ATTEMPT = re.compile("([0-9]+)-([0-9]+)-.+")


def is_capturing(arena: Path) -> bool:
    """Whether an image is being copied into a slot of this arena."""
    for path in arena.glob(f"*{SLOT_SUFFIX}"):
        with suppress(ArenaError), closing(SlotFile.open(path, writable=False)) as slot:
            record = slot.read_record()
            if record is not None and record.state == "writing":
                return True
    return False


class Encoding:
    """Whether a keeper makes parity, asked again and again: ``wait_until(Encoding(arena), ...)``.

    One half of its rows loses all records when it is to be written anew, and has others when that
    is done. That is to be seen happening, for an idle keeper may have an empty half too. So it is
    not so for the first two generations of a run, nor for what is under way at the first look. Rows
    that are given up since their images were protected once more, after a recovery, look the same.
    """

    def __init__(self, arena: Path) -> None:
        self._rows = arena / "parity"
        self._filled: set[str] = set()
        self._is_so = False

    def __call__(self) -> bool:
        """Look now."""
        before = self._filled
        self._filled = {path.name.partition("-")[0] for path in self._rows.glob("*.record")}
        if len(self._filled) != 1:
            self._is_so = False
        elif before - self._filled:
            self._is_so = True
        return self._is_so


def is_persisting(root: Path | str) -> bool:
    """Whether the newest start has images in storage of a step that it has not published (yet).

    What an earlier start left half-written does not count, nor what lies below a newer checkpoint.
    """
    starts = [name.removesuffix(".json") for name in _names(root, INCARNATIONS)]
    newest = max((int(name) for name in starts if name.isdecimal()), default=0)
    # In this order: what was published in between is seen to be.
    written = [one for name in _names(root, STEPS) if (one := _ATTEMPT.fullmatch(name))]
    published = [found for name in _names(root, MANIFESTS) if (found := generation_of(name))]
    done = max((one.step for one in published if one.incarnation == newest), default=-1)
    return any(int(one[1]) == newest and int(one[2]) > done for one in written)


def _names(root: Path | str, directory: str) -> list[str]:
    with suppress(OSError):  # there is none yet
        return os.listdir(Path(root) / directory)
    return []


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
