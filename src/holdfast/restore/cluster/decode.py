"""Ranges of what a group lost, made of the data and the parity that are left, and of nothing wrong.

Sources are not checked while they are read: what they give is, against the lost image's own table,
and only when it is wrong each source is looked at. One that is wrong, or does not answer, counts as
lost from then on, and the range is made of others as long as the parity suffices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from holdfast.errors import (
    ArenaError,
    FormatError,
    NotFound,
    PeerError,
    StorageError,
    TooManyLost,
)
from holdfast.events import SourceDropped, emit
from holdfast.format.checksum import BLOCK_BYTES, block_count, blocks, checksum
from holdfast.load.peer_ranges import Ranges
from holdfast.load.plan import BATCH_BYTES
from holdfast.load.source import ImageFile
from holdfast.redundancy.backends import chosen
from holdfast.redundancy.erasure import Coder
from holdfast.redundancy.stripes import Part, Placement, Rebuild, needed_for, needed_for_parity
from holdfast.storage.past_cache import aligned_memory

#: What speaks against one source of a group, not against all of them.
BROKEN = (PeerError, ArenaError, StorageError, FormatError, NotFound)
#: How often a range is read when it comes out wrong and no source is to blame.
_TRIES = 2
K = TypeVar("K")
_thread = threading.local()


class CodedImage(NamedTuple):
    """An image that is there: what is coded of it begins at ``data_start``."""

    file: ImageFile
    data_start: int
    identity: Mapping[str, str]
    """What its header says; see ``ImageFile.open``."""


class ParityRow(NamedTuple):
    """A row that is there; ``sums`` gives the checksums of its blocks, or raises why it cannot."""

    ranges: Ranges
    sums: Callable[[], Sequence[int]]


class SourceGone(Exception):
    """A member was found not to answer: ask again what to read."""


class GroupReader:
    """One group of an attempt, as far as it is there. For any number of threads.

    ``images`` by member and number, ``rows`` by stripe and row; ``hosts`` are the members' names.
    """

    def __init__(
        self, placement: Placement, hosts: Sequence[str],
        images: Mapping[tuple[int, int], CodedImage], rows: Mapping[tuple[int, int], ParityRow],
    ) -> None:  # fmt: skip
        self.placement, self.hosts = placement, hosts
        self._images, self._rows = images, rows
        self._coder = Coder(placement.columns, placement.parity, chosen().backend)
        self._lock = threading.Lock()
        self._factors: dict[tuple[int, ...], dict[int, bytes]] = {}
        self._gone: dict[int, str] = {}
        """Members that did not answer, and why."""
        self._wrong: dict[tuple[int, int], str] = {}
        """What of a stripe a member has wrongly, by stripe and member."""

    def steps(self, member: int, image: int, start: int, stop: int) -> list[Rebuild]:
        """What to read for bytes of a lost image's coded part, at most a batch in each step.

        TooManyLost names who is missing.
        """
        found: list[Rebuild] = []
        for one in needed_for(self.placement, member, image, start, stop, ()):
            away = {member: "lost", **self._away(one.stripe)}
            if len(away) > self.placement.parity:
                raise self._too_many(away)
            for begin in range(one.start, one.stop, BATCH_BYTES):
                end = min(one.stop, begin + BATCH_BYTES)
                found += needed_for(self.placement, member, image, begin, end, away)
        return found

    def parity_steps(self, member: int, stripe: int, start: int, stop: int) -> list[Rebuild]:
        """The same for bytes of the row of ``stripe`` that a member keeps; one step."""
        away = {member: "lost", **self._away(stripe)}
        if len(away) > self.placement.parity:
            raise self._too_many(away)
        return [needed_for_parity(self.placement, member, stripe, start, stop, away)]

    def decode(
        self, steps: Callable[[], list[Rebuild]], start: int, into: memoryview,
        is_right: Callable[[], bool],
    ) -> bool:  # fmt: skip
        """Fill ``into``, from byte ``start`` on, out of sources that give what is right.

        False when it is wrong though no source is to blame; TooManyLost when too few are left.
        """
        tries = 0
        while tries < _TRIES:
            asked = steps()
            try:
                for step in asked:
                    self.fill(step, into[step.start - start : step.stop - start])
            except SourceGone:
                continue
            if is_right():
                return True
            # Nothing found: it was wrong on the way only, perhaps.
            tries += not self.blame(asked)
        return False

    def _away(self, stripe: int) -> dict[int, str]:
        """The members that cannot be read in a stripe, and why."""
        with self._lock:
            found = dict(self._gone)
            found |= {n: why for (of, n), why in self._wrong.items() if of == stripe}
        for member in range(self.placement.members):
            if not self._is_there(member, stripe):
                found.setdefault(member, "lost")
        return found

    def _is_there(self, member: int, stripe: int) -> bool:
        column = self.placement.number(member, stripe)
        if column >= self.placement.columns:
            return (stripe, column - self.placement.columns) in self._rows
        images = range(len(self.placement.image_bytes[member]))
        return all((member, image) in self._images for image in images)

    def _too_many(self, away: Mapping[int, str]) -> TooManyLost:
        named = ", ".join(f"{self.hosts[n]} ({why})" for n, why in sorted(away.items()))
        return TooManyLost(
            f"of the group {', '.join(self.hosts)}, {len(away)} cannot be read: {named}. Its "
            f"parity replaces {self.placement.parity}. Another source is used, storage in the end.",
            missing=sorted(away), parity=self.placement.parity,
        )  # fmt: skip

    # ── reading ──────────────────────────────────────────────────────────────────────────

    def fill(self, step: Rebuild, into: memoryview) -> None:
        """Decode one step; SourceGone when a member does not answer."""
        factors = self._factors_of(step)
        np.frombuffer(into, np.uint8).fill(0)
        for source in step.sources:
            for part in source.parts:
                data = self._read(source.member, step.stripe, part)
                target = into[part.at : part.at + part.stop - part.start]
                self._coder.accumulate(factors[source.number], data, [target])

    def _factors_of(self, step: Rebuild) -> dict[int, bytes]:
        """By what each source is multiplied: found once, it takes longer than a block."""
        key = (step.wanted, *(source.number for source in step.sources))
        if key not in self._factors:
            self._factors[key] = self._coder.solve(key[1:], [step.wanted])
        return self._factors[key]

    def _read(self, member: int, stripe: int, part: Part) -> memoryview:
        ranges, before = self._ranges(member, stripe, part)
        start, stop = before + part.start, before + part.stop
        size = 0 if ranges.is_mapped else stop - start
        try:
            try:
                return ranges.view(start, stop, scratch("source", size))
            except PeerError as error:
                if error.fields.get("status"):
                    raise  # that was an answer
            return ranges.view(start, stop, scratch("source", size))  # a connection broke, say
        except BROKEN as error:
            self._lose(self._gone, member, member, str(error))
            raise SourceGone from error

    def _lose(self, known: dict[K, str], key: K, member: int, why: str) -> None:
        """From now on it is not read; told once."""
        with self._lock:
            if key in known:
                return
            known[key] = why
        emit(SourceDropped(source=f"{self.hosts[member]}, for what its group lost", reason=why))

    def _ranges(self, member: int, stripe: int, part: Part) -> tuple[Ranges, int]:
        """Where a part is read, and what stands there before the first coded byte."""
        if part.image is None:
            return self._row(member, stripe).ranges, 0
        coded = self._images[member, part.image]
        return coded.file, coded.data_start

    def _row(self, member: int, stripe: int) -> ParityRow:
        row = self.placement.number(member, stripe) - self.placement.columns
        return self._rows[stripe, row]

    # ── when what was decoded is wrong ───────────────────────────────────────────────────

    def blame(self, steps: Sequence[Rebuild]) -> bool:
        """Look at all that these steps read; whether something of it is wrong, and lost by that."""
        is_found = False
        for step in steps:
            for source in step.sources:
                for part in source.parts:
                    if why := self._fault_of(source.member, step.stripe, part):
                        is_found = True
                        at = step.stripe, source.member
                        self._lose(self._wrong, at, source.member, why)
        return is_found

    def _fault_of(self, member: int, stripe: int, part: Part) -> str:
        ranges, before = self._ranges(member, stripe, part)
        try:
            if part.image is None:
                sums, stop = self._row(member, stripe).sums(), ranges.size_bytes
            else:
                coded = self._images[member, part.image]
                header, sums = coded.file.open(coded.identity)  # with its table, read anew
                stop = header.table.offset
            return _fault(ranges, before, part, sums, stop)
        except BROKEN as error:
            return str(error)


def _fault(ranges: Ranges, before: int, part: Part, sums: Sequence[int], end: int) -> str:
    """What is wrong in the blocks of a part, which end at ``end``."""
    first, last = part.start // BLOCK_BYTES, block_count(min(part.stop, end))
    for number, start, stop in blocks(first, last, end):
        size = 0 if ranges.is_mapped else stop - start
        found = checksum(ranges.view(before + start, before + stop, scratch("source", size)))
        if found != sums[number]:
            return f"block {number} of {ranges.name}: stored {sums[number]:016x}, read {found:016x}"
    return ""


def scratch(purpose: str, size_bytes: int) -> memoryview:
    """Memory of this thread for one purpose, valid until its next call for the same.

    As much as a batch of reads at most: what is kept is bounded.
    """
    assert size_bytes <= BATCH_BYTES
    found: memoryview = getattr(_thread, purpose, memoryview(b""))
    if len(found) < size_bytes:
        found = memoryview(aligned_memory(size_bytes))
        setattr(_thread, purpose, found)
    return found[:size_bytes]
