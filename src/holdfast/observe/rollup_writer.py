"""Rolls up the event file of a host while it grows, for the keeper of the host.

What a roll-up covers is read from the file itself: whatever a keeper did not come to, the next one
does. A roll-up is a line that is appended by one call, so that a kill leaves it whole or torn.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from holdfast.observe.event_files import (
    LINE_BYTES,
    SEGMENT_BYTES,
    UNREADABLE,
    EventFile,
    closed_files,
    is_named,
    open_file,
    set_aside,
)
from holdfast.observe.rollup_files import Covered, encode_rollup, name_of, read_ends, rollup_path

#: What is rolled up at once, and after how many seconds less than that is: a roll-up has less bytes
#: than a line may, and takes a hundredth of a second.
CHUNK_BYTES, EVERY_S = 256 << 10, 60.0
#: Seconds between two looks for something to roll up.
_LOOK_S = 1.0
#: At which size the file of roll-ups is set aside: small ones are given up once they are joined.
#: Of more than so many none seems to be.
PART_BYTES, _PARTS = 16 << 10, 64
#: Roll-ups of all hosts of which it is read what they are of: some hours of them.
_NEWEST_JOINED = 16
#: Roll-ups are never given up for their size.
_NO_BUDGET = 1 << 62


@dataclass(slots=True)
class _OpenFile:
    """An event file, and how far it was rolled up."""

    file: BinaryIO
    name: str
    at: int
    since_s: float
    left: bytes = b""
    """What was read of a line that was not whole yet."""
    end: int | None = None
    """Where a gap ends that is rolled up, as what is behind it is already."""

    def is_waiting(self) -> bool:
        """True if something may have been appended; of a gap and a compressed file always."""
        if self.end is not None or self.file.name.endswith(".gz"):
            return True
        return os.fstat(self.file.fileno()).st_size > self.at + len(self.left)

    def take(self) -> bytes:
        """Returns the next whole lines; of one that is longer than any record, its beginning."""
        room = CHUNK_BYTES if self.end is None else self.end - self.at - len(self.left)
        data = self.left + self.file.read(min(CHUNK_BYTES, room))
        end = data.rfind(b"\n") + 1
        if not end and len(data) >= LINE_BYTES:
            end = len(data)
        self.left = data[end:]
        return data[:end]


def _read_known(trail: Path) -> Covered:
    """Returns how far the files of a writer are rolled up, also by what was joined at last: that is
    durable, and a host that lost its power may have lost what it rolled up. Of more that was joined
    than is read here: what is missing at the beginning of a file may be in that.
    """
    from holdfast.observe.run_rollups import joined_files, read_head  # a start would wait for it

    covered, is_all = read_ends(trail), False
    with suppress(OSError):
        joined = joined_files(trail.parent)
        newest = joined[-_NEWEST_JOINED:]
        is_all = [number for number, _ in newest] == [*range(1, len(joined) + 1)]
        for _, path in newest:
            try:
                trails = read_head(path).trails
            except (*UNREADABLE, ValueError):  # it covers nothing
                is_all = False
                continue
            for part in (part for one in trails if one.trail == trail.name for part in one.parts):
                covered.take(part)
    for gaps in covered.gaps.values():
        gaps[:] = [gap for gap in gaps if gap[0] or is_all]
    return covered


class RollupWriter:
    """Rolls up ``trail``, the event file of a host. Used by one thread, which holds its lock."""

    def __init__(
        self,
        trail: Path,
        *,
        only_beside: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trail, self._clock = trail, clock
        self._file = EventFile(
            rollup_path(trail),
            only_beside=only_beside,
            part_bytes=PART_BYTES,
            budget_bytes=_NO_BUDGET,
        )
        self._covered: Covered | None = None
        self._reading: _OpenFile | None = None
        self._refused: dict[str, float] = {}
        """Until when a file that could not be rolled up is left alone."""
        self._next_s = 0.0

    def begin(self) -> None:
        """Sets aside an event file that is shorter than what was rolled up of it, as a host that
        lost its power may leave it: what is appended there would be taken for rolled up.

        Raises OSError where there is none.
        """
        ends = _read_known(self._trail).ends  # before: the file grows
        with open_file(self._trail) as file:
            end = ends.get(name_of(file))
            is_cut = end is not None and os.fstat(file.fileno()).st_size < end.end
        if is_cut:
            set_aside(self._trail)

    def poll(self, *, is_last: bool = False) -> bool:
        """Rolls up a chunk, if one is due; True if more may be. ``is_last``: however little it is.

        Raises OSError, EOFError or zlib.error where a file cannot be read: the others come first
        then.
        """
        now_s = self._clock()
        if now_s < self._next_s and not is_last:
            return False
        one = self._reading = self._reading or self._open_next(now_s)
        if one is None:
            self._next_s = now_s + _LOOK_S
            return False
        try:
            return self._go_on(one, now_s, is_last=is_last)
        except Exception:  # what was read of it is read again
            self._refused[one.name] = now_s + EVERY_S
            self._close_reading()
            raise

    def _go_on(self, one: _OpenFile, now_s: float, *, is_last: bool) -> bool:
        # Before: what is appended later is elsewhere.
        is_over = one.end is not None or not is_named(one.file, self._trail)
        is_due = is_over or is_last or now_s >= one.since_s + EVERY_S or self._has_chunk(one)
        if not is_due or not (is_over or one.is_waiting()):
            self._next_s = now_s + _LOOK_S
            return False
        return self._roll_up(one, now_s, is_over=is_over)

    def _has_chunk(self, one: _OpenFile) -> bool:
        return os.fstat(one.file.fileno()).st_size >= one.at + CHUNK_BYTES

    def _roll_up(self, one: _OpenFile, now_s: float, *, is_over: bool) -> bool:
        data, is_read = one.take(), False
        if one.end is not None:
            is_read = not data or one.at + len(data) + len(one.left) >= one.end
        elif is_over:
            following = one.file.read(1)
            is_read, one.left = not following, one.left + following
        if is_read:  # what is left is torn for good
            data, one.left = data + one.left, b""
        if not data and not is_read:
            return False
        assert self._covered is not None
        if not data and one.end is not None:  # the file is shorter by now
            del self._covered.gaps[one.name]
            self._close_reading()
            return True
        from holdfast.observe.rollup_maker import roll_up  # a start would wait for it

        made = roll_up(data, one.name, one.at, is_end=is_read and one.end is None)
        is_joined = len(closed_files(self._file.path)) < _PARTS
        self._file.part_bytes = PART_BYTES if is_joined else SEGMENT_BYTES
        if self._file.append([encode_rollup(made)]) != 1:
            self.close()  # what could not be written is read again
            self._next_s = now_s + EVERY_S
            return False
        self._covered.take(made)
        one.at, one.since_s = one.at + len(data), now_s
        if is_read:
            self._close_reading()
        return True

    def _open_next(self, now_s: float) -> _OpenFile | None:
        """Opens the oldest file that is not wholly rolled up, at what was lost of its roll-ups."""
        if self._covered is None:
            self._covered = _read_known(self._trail)
        ends, names = self._covered.ends, dict[Path, str]()
        for path in [*closed_files(self._trail), self._trail]:
            with suppress(*UNREADABLE), open_file(path) as file:  # the others are rolled up
                names[path] = name_of(file)
        # What comes before one that was begun was rolled up before it: that roll-up was joined.
        begun = max((at for at, name in enumerate(names.values()) if name in ends), default=0)
        for at, (path, name) in enumerate(names.items()):
            end = ends.get(name)
            is_over = at < begun and end is None and name not in self._refused
            is_refused = self._refused.get(name, now_s) > now_s
            gap = next(iter(self._covered.gaps.get(name, ())), None)
            is_done = end is not None and end.is_end and gap is None
            if not name or is_over or is_refused or is_done:
                continue
            with suppress(*UNREADABLE):
                file = open_file(path)
                start, until = gap or (0 if end is None else end.end, None)
                file.seek(start)
                return _OpenFile(file, name, start, now_s, end=until)
        return None

    def finish(self, *, deadline_s: float) -> None:
        """Rolls up what is there; gives up after ``deadline_s``."""
        until_s = self._clock() + deadline_s
        more = True
        while more and self._clock() < until_s:
            with suppress(*UNREADABLE):  # the others are rolled up
                more = self.poll(is_last=True)
        self.close()

    def close(self) -> None:
        """Closes all files."""
        self._close_reading()
        self._file.close()

    def _close_reading(self) -> None:
        if self._reading is not None:
            self._reading.file.close()
            self._reading = None
