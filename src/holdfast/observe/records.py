"""Reads the records of a run: events with the moment, the host and the process that each is of.

Lines torn by a kill, values that cannot be, records that are missing and files that cannot be read
are counted and passed over. ``docs/format/events-v1.md`` describes a record.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Union

import msgspec

from holdfast import events
from holdfast.errors import NotFound
from holdfast.events import AnyEvent
from holdfast.observe.event_files import (
    UNREADABLE,
    blocks_in,
    open_parts,
    parts_of,
    size_bytes,
)
from holdfast.observe.event_place import event_place
from holdfast.observe.rank_sets import RankSet
from holdfast.observe.rollup_files import Covered, read_rollups, trails_with_rollups
from holdfast.observe.rollup_groups import Rollup
from holdfast.observe.run_rollups import Coverage, joined_directory, joined_files, read_run_rollups

Progress = Callable[[int, int], None]


class RecordHead(msgspec.Struct):
    """What a record says beside its event; an older one has the wall clock alone."""

    # Until the last second of the year 9999.
    time_s: Annotated[float, msgspec.Meta(ge=0, le=253402300799)] = 0.0
    mono_s: events.Seconds | None = None
    by_host: str = ""
    boot: str = ""
    version: events.Count = 1
    writer: str = ""
    number: events.Count | None = None


@cache
def _whole_decoder() -> msgspec.json.Decoder[Any]:
    """Returns the decoder of whole records: events that have the fields of their heads."""
    head = [(field.name, field.type, field.default) for field in msgspec.structs.fields(RecordHead)]
    kinds = tuple(
        msgspec.defstruct(
            kind.__name__,
            head,
            bases=(kind,),
            frozen=True,
            kw_only=True,
            tag=kind.__name__,
            gc=False,
        )
        for kind in AnyEvent.__args__
    )
    return msgspec.json.Decoder(Union[kinds])  # noqa: UP007 - of a tuple


class _Name(msgspec.Struct):
    event: str


_decode_event = msgspec.json.Decoder(AnyEvent).decode
_decode_head = msgspec.json.Decoder(RecordHead).decode
_decode_name = msgspec.json.Decoder(_Name).decode
_KNOWN = {kind.__name__ for kind in AnyEvent.__args__}
_TORN = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class LineDecoder:
    """Decodes lines one by one, and counts those that are no records: torn, of a newer version, or
    with a value that cannot be.
    """

    def __init__(self) -> None:
        self.torn = self.unknown = self.invalid = 0

    def decode(self, line: bytes) -> Any:
        """Returns the event of a line, which has the fields of its head, too; None without one."""
        try:
            return _whole_decoder().decode(line)
        except _TORN as error:
            self.count_refused(line, error)
        return None

    def count_refused(self, line: bytes, error: Exception) -> None:
        """Counts a line that could not be decoded."""
        if not isinstance(error, msgspec.ValidationError):
            self.torn += 1
            return
        try:
            is_known = _decode_name(line).event in _KNOWN
        except _TORN:
            is_known = False
        if is_known:
            self.invalid += 1
        else:
            self.unknown += 1


class RecordCounts(NamedTuple):
    """What was not read of a run, and from how many files the rest is."""

    files: int = 0
    torn_lines: int = 0
    unknown_lines: int = 0
    invalid_lines: int = 0
    lost_records: int = 0
    unreadable: tuple[str, ...] = ()


class RecordReader:
    """The records of a run, read once; its counts are whole after that."""

    def __init__(self, root: str | Path, progress: Progress | None = None) -> None:
        """Raises NotFound when the run left no events.

        ``progress(done_bytes, total_bytes)`` is called now and then.
        """
        self._progress = progress
        self._unreadable: list[str] = []
        self._events = event_place(root).read_from()
        self._writers = trails_with_rollups(self._events, (), self._refuse)
        if not self._writers and not self._is_any_joined():
            where = f"{root}/events{_why_none(root, self.unreadable)}"
            raise NotFound(
                f"no events in {where}: a run writes them as it trains; "
                "is this the directory given to Checkpointer?",
                root=str(root),
            )
        self._total_bytes, self._done_bytes = sum(map(size_bytes, self._writers)), 0
        self._decoder = LineDecoder()
        self._seen: Counter[str] = Counter()
        self._highest: dict[str, int] = {}
        self._numbers: dict[str, RankSet] = defaultdict(RankSet)
        """Of each process the records that were read one by one."""

    def __iter__(self) -> Iterator[tuple[AnyEvent, RecordHead]]:
        for block in self._blocks():
            for line in lines_in(block):
                try:
                    event, head = _decode_event(line), _decode_head(line)
                except _TORN as error:
                    self._decoder.count_refused(line, error)
                else:
                    if self._new([head]):
                        yield event, head

    def batches(self) -> Iterator[list[Any] | Rollup]:
        """Yields the same, many at a time: each is an event that has the fields of its head, too.
        Of what was rolled up the roll-ups are yielded in its place.

        Half as much work as to decode both.
        """
        coverage = Coverage()
        for rollup in read_run_rollups(self._events, coverage, self._refuse):
            yield from self._rolled_up(rollup)
        self._writers = trails_with_rollups(self._events, coverage, self._refuse)
        for trail in self._writers:
            covered = coverage.of(trail)
            for rollup in read_rollups(trail, covered, self._decoder, self._refuse):
                yield from self._rolled_up(rollup)
            for block in self._blocks((trail,), covered):
                yield self._new(self._decoded(block))

    def _is_any_joined(self) -> bool:
        try:
            return bool(joined_files(self._events))
        except OSError as error:
            self._refuse(joined_directory(self._events), error)
            return False

    def _decoded(self, block: bytes) -> list[Any]:
        with suppress(*_TORN):
            found: list[Any] = _whole_decoder().decode_lines(block)
            if len(found) == block.count(b"\n"):
                return found
        every = map(self._decoder.decode, lines_in(block))
        return [one for one in every if one is not None]

    def _rolled_up(self, rollup: Rollup) -> Iterator[list[Any] | Rollup]:
        """Yields a roll-up, and the records that stand in it as they were."""
        self._decoder.torn += rollup.torn
        self._decoder.unknown += rollup.unknown
        self._decoder.invalid += rollup.invalid
        for writer, (seen, highest) in rollup.numbers.items():
            self._seen[writer] += seen
            self._highest[writer] = max(self._highest.get(writer, -1), highest)
        yield rollup
        every = (self._decoder.decode(bytes(raw)) for raw in rollup.kept)
        yield [one for one in every if one is not None]

    @property
    def files(self) -> int:
        """Returns the number of files that there are."""
        return sum(part.is_file() for each in self._writers for part in parts_of(each))

    @property
    def unreadable(self) -> tuple[str, ...]:
        """Returns the files that could not be read, with the reason."""
        return tuple(dict.fromkeys(self._unreadable))

    @property
    def lost_records(self) -> int:
        """Returns how many numbers of records are in no file, of every process together."""
        missing = (self._highest[writer] + 1 - seen for writer, seen in self._seen.items())
        return sum(max(0, count) for count in missing)

    @property
    def counts(self) -> RecordCounts:
        """Returns all counts as they are now."""
        return RecordCounts(
            self.files,
            self._decoder.torn,
            self._decoder.unknown,
            self._decoder.invalid,
            self.lost_records,
            self.unreadable,
        )

    def _blocks(
        self, writers: Iterable[Path] | None = None, covered: Covered | None = None
    ) -> Iterator[bytes]:
        """Yields the lines of these writers, or of all, in blocks; not those that are covered."""
        for writer in self._writers if writers is None else writers:
            for file in open_parts(writer, self._refuse):
                try:
                    for block in blocks_in(file) if covered is None else covered.blocks(file):
                        self._advance(len(block))
                        yield block
                except UNREADABLE as error:  # the others are read
                    self._refuse(Path(file.name), error)

    def _advance(self, size: int) -> None:
        self._done_bytes += size
        if self._progress:
            self._progress(min(self._done_bytes, self._total_bytes), self._total_bytes)

    def _refuse(self, path: Path, error: Exception) -> None:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        self._unreadable.append(f"{path.name}: {why}")

    def _new(self, heads: list[Any]) -> list[Any]:
        """Counts records; returns those that were not read before, as nearly all are: of a bucket
        some may be in two objects, or be uploaded while they are read.
        """
        numbers = defaultdict[str, list[int]](list)
        for head in heads:
            if head.number is not None and head.writer:
                numbers[head.writer].append(head.number)
        some_are_again = False
        fresh = dict[str, set[int]]()
        for writer, some in numbers.items():
            known, highest = self._numbers[writer], self._highest.get(writer, -1)
            own = fresh[writer] = set(some)
            if min(some) <= highest:
                own.difference_update([number for number in own if number in known])
            known.add(own)
            self._seen[writer] += len(own)
            self._highest[writer] = max(highest, max(some))
            some_are_again = some_are_again or len(own) < len(some)
        return [one for one in heads if _take(one, fresh)] if some_are_again else heads


def _take(head: RecordHead, fresh: dict[str, set[int]]) -> bool:
    """Returns True for a record that is to be taken, the first of each number."""
    own = fresh.get(head.writer)
    if own is None or head.number is None:
        return True
    is_fresh = head.number in own
    own.discard(head.number)
    return is_fresh


def lines_in(block: bytes) -> Iterator[bytes]:
    """Yields the lines of a block that are not blank."""
    return (line for line in block.split(b"\n") if line.strip())


def _why_none(root: str | Path, refused: Sequence[str]) -> str:
    """Returns what keeps the directory, or one in it, from being read, in brackets, if anything
    does.
    """
    try:
        os.listdir(event_place(root).directory)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f" ({error.strerror})"
    return f" ({'; '.join(refused)})" if refused else ""
