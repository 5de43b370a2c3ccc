"""Reads the roll-ups over all hosts of a run, which the keeper that coordinates makes.

One is a file of its own, ``events/rollups/joined/00000001.jsonl.gz`` and so on: which bytes of
whose event files it is of, and a roll-up of these. Each begins where those before it end, and its
name is given to one alone: whatever two keepers do, nothing is in two of them. One that cannot be
read covers nothing, and what it was of is read where it still is.
"""

from __future__ import annotations

import gzip
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import msgspec

from holdfast.observe.event_files import UNREADABLE, Refused, open_file
from holdfast.observe.rollup_files import ROLLUPS, Covered, decode_rollup
from holdfast.observe.rollup_groups import Rollup, RunRollupHead

_JOINED = "joined"
_NAME = re.compile(r"(\d{8})\.jsonl\.gz", re.ASCII).fullmatch
#: The most that a line of one has; those of 16,384 ranks have a thirtieth of it.
MOST_BYTES = 256 << 20
#: The most that are looked for though no listing has them.
_MOST_UNLISTED = 16

_decode_head = msgspec.json.Decoder(RunRollupHead).decode
#: What is wrong with a file that has something else in it.
_DAMAGED = (*UNREADABLE, ValueError, msgspec.DecodeError, UnicodeDecodeError)


class Coverage:
    """What of the event files of each writer is rolled up, by the name of its newest file."""

    def __init__(self) -> None:
        self._trails: dict[str, Covered] = defaultdict(Covered)

    def __iter__(self) -> Iterator[str]:
        return iter(self._trails)

    def of(self, trail: Path) -> Covered:
        """Returns what is covered of a writer's files, to be added to."""
        return self._trails[trail.name]

    def take(self, head: RunRollupHead) -> bool:
        """Takes what a roll-up is of; False, and nothing of it, where some is covered already."""
        ends = [(one.trail, part) for one in head.trails for part in one.parts]
        if any(self._trails[trail].touches(part) for trail, part in ends if trail in self._trails):
            return False
        return all(self._trails[trail].take(part) for trail, part in ends)


def joined_directory(events: Path) -> Path:
    """Returns where those of a run are, in the directory of its events."""
    return events / ROLLUPS / _JOINED


def joined_name(number: int) -> str:
    """Returns the name of one."""
    return f"{number:08d}.jsonl.gz"


def joined_files(events: Path) -> list[tuple[int, Path]]:
    """Returns those that there are, each with its number, in their order; also some that are not
    listed and must have been made before others: of a directory that another host has changed a
    listing may lack what can be opened by its name.

    Raises OSError where the directory cannot be listed.
    """
    directory = joined_directory(events)
    try:
        names = [_NAME(path.name) for path in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    numbers = {int(name[1]) for name in names if name}
    before = (number for number in range(1, max(numbers, default=0)) if number not in numbers)
    numbers.update(islice(before, _MOST_UNLISTED))
    return [(number, directory / joined_name(number)) for number in sorted(numbers)]


def read_head(path: Path) -> RunRollupHead:
    """Returns what a roll-up is of.

    Raises OSError, EOFError, zlib.error or ValueError where that cannot be read.
    """
    with open_file(path) as file:
        return _decode_head(_line(file))


def read_run_rollups(events: Path, coverage: Coverage, refused: Refused) -> Iterator[Rollup]:
    """Yields the roll-ups of all hosts, oldest first, and notes what they cover. ``refused``:
    called for a file that cannot be read, or says what another one said.
    """
    try:
        files = joined_files(events)
    except OSError as error:
        refused(joined_directory(events), error)
        return
    for _, path in files:
        try:
            with open_file(path) as file:
                head, rolled_up = _decode_head(_line(file)), decode_rollup(_line(file))
            if not coverage.take(head):
                raise ValueError("says again what another one says")
        except _DAMAGED as error:
            refused(path, error)
        else:
            yield rolled_up


def _line(file: BinaryIO) -> bytes:
    line = file.readline(MOST_BYTES)
    if not line.endswith(b"\n"):
        raise EOFError("ends in the middle of a line")
    return line


def encode(head: RunRollupHead, rolled_up: Rollup) -> bytes:
    """Returns the content of a file."""
    lines = msgspec.json.encode(head) + b"\n" + msgspec.json.encode(rolled_up) + b"\n"
    return gzip.compress(lines, compresslevel=3, mtime=0)
