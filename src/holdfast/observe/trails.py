"""Manages the files of a writer's events: the first part, the newest two, and no more.

A writer, which is a rank or the keeper of a host, appends to ``<name>.jsonl``. Once that is full
it becomes ``<name>.0.jsonl`` and stays, for it says how the run began; the next ones become
``<name>.1.jsonl``, each in place of the one before. So a writer has three files at most.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

#: A run that saves at every step writes about 0.7 kB a save: some 23,000 saves fill one.
PART_BYTES = 16 << 20
_FULL = re.compile(r"\.[01]\.jsonl$")


def parts_of(path: Path) -> tuple[Path, Path, Path]:
    """Returns the first part, the one before the newest, and the newest, which is ``path``
    itself.
    """
    return path.with_suffix(".0.jsonl"), path.with_suffix(".1.jsonl"), path


def set_aside(path: Path) -> bool:
    """Makes room for a new part at ``path``; True if an older one was given up for it."""
    first, before, _ = parts_of(path)
    if not first.exists():
        path.rename(first)
        return False
    is_lost = before.exists()
    path.replace(before)
    return is_lost


def trails(root: str | Path) -> list[Path]:
    """Returns the newest part of every writer below ``root``; it need not exist yet."""
    found = Path(root, "events").glob("*.jsonl")
    return sorted({path.with_name(_FULL.sub(".jsonl", path.name)) for path in found})


def size_bytes(path: Path) -> int:
    """Returns the bytes of all parts of a writer."""
    found = 0
    for part in parts_of(path):
        with suppress(OSError):
            found += part.stat().st_size
    return found


def open_parts(path: Path) -> Iterator[BinaryIO]:
    """Yields each part of a writer, oldest first; none twice, also while it makes a new one.

    Raises OSError for a part that exists and cannot be read.
    """
    with ExitStack() as opened:
        files: dict[int, BinaryIO] = {}
        # Newest first: a part set aside meanwhile is met again under its next name, never missed.
        for part in reversed(parts_of(path)):
            with suppress(FileNotFoundError):
                file = opened.enter_context(part.open("rb"))
                files.setdefault(os.fstat(file.fileno()).st_ino, file)
        yield from reversed(files.values())
