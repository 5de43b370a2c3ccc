"""Makes roll-ups over all hosts of a run, for the keeper that coordinates it.

What their hosts rolled up is joined, and given up behind that. Which of it is joined is read from
the files alone: whoever coordinates next goes on where they end.
"""

from __future__ import annotations

import errno
import gzip
import os
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from holdfast.observe.event_files import UNREADABLE, blocks_in, closed_files_in, open_file
from holdfast.observe.rollup_files import (
    ROLLUPS,
    Covered,
    decode_columns,
    decode_end,
    inflate_rollup,
)
from holdfast.observe.rollup_groups import FilePart, RunRollupHead, TrailParts
from holdfast.observe.rollup_joiner import KnownClocks, RollupJoiner
from holdfast.observe.run_rollups import (
    MOST_BYTES,
    Coverage,
    encode,
    joined_directory,
    joined_files,
    joined_name,
    read_head,
)
from holdfast.storage.files import link, sync_directory, write_file

#: The most of one host that goes into one, and its share where there are many, so that the saves in
#: it are the same ones for all.
PART_BYTES = 128 << 10
#: The most of all of them, of which one is made that can be read.
_JOINED_BYTES = MOST_BYTES // 4
_ABANDONED_S = 3600.0
#: For how long a report that began before a roll-up was there may read what that is of.
_READING_S = 300.0
_TORN = (msgspec.DecodeError, UnicodeDecodeError)
#: What is wrong with a file that will never be read; another error may be gone the next time.
_DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error, ValueError, *_TORN)
#: What a line of another version is of, which one that knows it may join: nothing covers that.
_FOREIGN = FilePart("", 0, 0)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class RunRollupWriter:
    """Joins what the hosts of a run rolled up. ``events``: returns the directory of its events.

    Used by one thread.
    """

    def __init__(
        self,
        events: Callable[[], Path],
        *,
        part_bytes: int = PART_BYTES,
        reading_s: float = _READING_S,
    ) -> None:
        self._events, self._part_bytes, self._reading_s = events, part_bytes, reading_s
        self._joined_s: dict[Path, float] = {}
        """Since when files are known to be joined that are to be given up."""
        self._coverage = Coverage()
        self._heads: set[int] = set()
        """Numbers of those of which it is known what they cover."""
        self._missing_s: dict[int, float] = {}
        """Since when one is missing that must have been made before others."""
        self._known = KnownClocks()
        self._full: dict[Path, list[FilePart]] = {}
        """What the lines of full files are of, which never change."""

    def join(self) -> bool:
        """Joins what is new of each host, at most so much; True if there was anything.

        Raises OSError where nothing can be written, or what was joined cannot be read.
        """
        self.look()
        events = self._events()
        joiner, heads, gone = RollupJoiner(self._known), list[TrailParts](), list[Path]()
        full = dict[Path, list[FilePart]]()
        left_bytes, trails = _JOINED_BYTES, closed_files_in(events / ROLLUPS)
        share_bytes = min(self._part_bytes, max(1, _JOINED_BYTES // max(1, len(trails))))
        for trail, closed in trails.items():
            time.sleep(0)  # other threads of the keeper come first
            most_bytes = min(share_bytes, left_bytes)
            of = _TrailJoin(self._coverage.of(trail), joiner, most_bytes)
            for path in closed:
                with suppress(*UNREADABLE):  # what cannot be read stays for reports to name
                    full[path] = of.take(path, self._full.get(path))
            # The newest says where to go on.
            gone += [path for path in closed[:-1] if path in full and of.is_joined(full[path])]
            with suppress(*UNREADABLE):
                of.take(trail)
            if of.parts:
                heads.append(TrailParts(trail.name, of.parts))
                left_bytes -= most_bytes - of.left_bytes
        self._full = full
        self._give_up(gone)
        if not heads:
            return False
        number = max(self._heads, default=0) + 1
        _publish(events, number, encode(RunRollupHead(number, heads), joiner.made()))
        return True

    def _give_up(self, joined: Iterable[Path]) -> None:
        now_s = time.monotonic()
        self._joined_s = {path: self._joined_s.get(path, now_s) for path in joined}
        for path, since_s in self._joined_s.items():
            if now_s - since_s >= self._reading_s:
                with suppress(OSError):
                    path.unlink()

    def look(self) -> None:
        """Learns what was joined, by any keeper.

        Raises OSError where one cannot be read that must be there; one that is still missing after
        minutes is lost, and covers nothing. Of several the minutes are the same ones.
        """
        missing: FileNotFoundError | None = None
        for number, path in joined_files(self._events()):
            if number in self._heads:
                continue
            try:
                self._coverage.take(read_head(path))
            except _DAMAGED:  # it covers nothing
                pass
            except FileNotFoundError as error:
                since_s = self._missing_s.setdefault(number, time.monotonic())
                if time.monotonic() - since_s < self._reading_s:
                    missing = missing or error
                    continue
            self._heads.add(number)
        if missing is not None:
            raise missing


class _TrailJoin:
    """What is joined of one host."""

    def __init__(self, covered: Covered, joiner: RollupJoiner, most_bytes: int) -> None:
        self._covered, self._joiner, self.left_bytes = covered, joiner, most_bytes
        self._taken = Covered()
        self.parts: list[FilePart] = []

    def is_joined(self, parts: Iterable[FilePart]) -> bool:
        """Returns True if all these parts were joined before."""
        return all(map(self._covered.touches, parts))

    def take(self, path: Path, known: list[FilePart] | None = None) -> list[FilePart]:
        """Joins what is new in a file; returns what its lines are of. ``known``: the same, if the
        file was read before and has not changed.
        """
        if known is not None and self.is_joined(known):
            return known
        with open_file(path) as file:
            lines = (line for block in blocks_in(file) for line in block.split(b"\n"))
            return [part for part in map(self._take_line, lines) if part]

    def _take_line(self, line: bytes) -> FilePart | None:
        """Joins a line, if it is new and there is room; None if it is torn."""
        try:
            end = decode_end(line)
            part = FilePart(end.file, end.start, end.end, end.is_end)
            is_new = not any(one.touches(part) for one in (self._covered, self._taken))
            if is_new and self.left_bytes > 0:
                data = inflate_rollup(line)
                rolled_up = decode_columns(data)
                if self._taken.take(part):
                    arrays = (array for one in rolled_up.columns for array in one.arrays)
                    self.left_bytes -= len(data) + sum(map(len, arrays))
                    self._joiner.take(rolled_up)
                    self.parts.append(part)
            return part
        except msgspec.ValidationError:
            return _FOREIGN
        except _TORN:  # the next keeper of the host rolls it up again
            return None


def _publish(events: Path, number: int, data: bytes) -> None:
    """Gives a roll-up its number; where another keeper was faster, nothing is published."""
    directory = joined_directory(events)
    directory.mkdir(exist_ok=True)
    sync_directory(str(directory.parent))
    _remove_abandoned(directory.glob(".*.new"))
    target = directory / joined_name(number)
    temporary = directory / f".{number}-{os.getpid()}.new"
    try:
        write_file(str(temporary), data)
        try:
            link(str(temporary), str(target))
        except OSError as error:
            if error.errno not in _NO_LINKS or target.exists():
                raise
            temporary.rename(target)
        sync_directory(str(directory))
    finally:
        temporary.unlink(missing_ok=True)


def _remove_abandoned(files: Iterable[Path]) -> None:
    for path in files:
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                path.unlink()
