"""Reads the events of one kind from a run's files, without folding all the others.

Files are searched in large pieces for the kind's name, and only lines that have it are decoded: a
long run leaves gigabytes of events, most of them of other kinds.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeVar

import msgspec

from holdfast import events
from holdfast.errors import UsageError
from holdfast.events import AnyEvent, Event, ReplicasDiffer, Sink
from holdfast.geometry.rank_ranges import ranks_text
from holdfast.observe.event_files import LINE_BYTES, UNREADABLE, open_parts, trails
from holdfast.observe.phases import BY_EVENT
from holdfast.observe.text import (
    count_text,
    counts_text,
    printable,
    rate_text,
    seconds_text,
    shared_text,
    size_text,
)

E = TypeVar("E", bound=Event)

_PIECE_BYTES = 8 << 20
_decode = msgspec.json.Decoder(AnyEvent).decode


def read_events(root: str | Path, kind: type[E]) -> Iterator[E]:
    """Yields all events of this kind below ``root``, file by file; lines cut off by a kill are left
    out.

    Yields nothing where there are no events, or none that this process may read.
    """
    name = f'"{kind.__name__}"'.encode()
    for path in trails(root):
        for line in _lines_with(path, name):
            try:
                event = _decode(line)
            except (msgspec.DecodeError, RecursionError):
                continue
            if isinstance(event, kind):
                yield event


def _lines_with(path: Path, name: bytes) -> Iterator[bytes]:
    """Yields the whole lines of a writer's files that have ``name`` in them."""
    for file in open_parts(path, lambda *_: None):
        with suppress(*UNREADABLE):  # the others are read
            yield from _lines_in(file, name)


def _lines_in(file: BinaryIO, name: bytes) -> Iterator[bytes]:
    rest = b""
    while piece := file.read(_PIECE_BYTES):
        data = rest + piece
        end = data.rfind(b"\n") + 1
        at = data.find(name, 0, end)
        while at >= 0:
            stop = data.index(b"\n", at)
            yield data[data.rfind(b"\n", 0, at) + 1 : stop]
            at = data.find(name, stop, end)
        rest = data[end:] if len(data) - end <= LINE_BYTES else b""  # longer than any record


# Summarizes the replicas that differed in a run: which leaves, where, and since when.


#: The number of leaves that are named where all have drifted apart.
_MOST_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Divergence:
    """A leaf whose replicas differed in ``saves`` saves.

    ``ranks``: those that differed from the majority in any of them; ``first`` and ``last`` are
    generations. ``is_known_which``: True if each time more than half of the ``replicas`` held the
    same.
    """

    leaf: str
    ranks: tuple[int, ...]
    replicas: int
    is_known_which: bool
    saves: int
    first: tuple[int, int]
    last: tuple[int, int]


def divergence_of(leaf: str, records: Sequence[ReplicasDiffer]) -> Divergence:
    """Returns one leaf's, from all records of it: the keeper and several ranks report the same."""
    generations = sorted({(event.incarnation, event.step) for event in records})
    return Divergence(
        leaf=leaf,
        ranks=tuple(sorted({rank for event in records for rank in event.ranks})),
        replicas=max(event.replicas for event in records),
        is_known_which=all(event.is_known_which for event in records),
        saves=len(generations),
        first=generations[0],
        last=generations[-1],
    )


def lines_of(divergences: Sequence[Divergence]) -> list[str]:
    """Formats the report's lines."""
    lines = []
    for each in divergences[:_MOST_SHOWN]:
        who = (
            f"{ranks_text(each.ranks)} not as most of {each.replicas} replicas"
            if each.is_known_which
            else f"{ranks_text(each.ranks)} not alike, and which is right is not known"
        )
        first, last = ("-".join(map(str, generation)) for generation in (each.first, each.last))
        when = f"at {first}" if first == last else f"from {first} to {last}"
        lines.append(
            f"replicas differ: {each.leaf}: {who}; seen {when}, in {count_text(each.saves, 'save')}"
        )
    if len(divergences) > len(lines):
        lines.append(f"replicas differ: {len(divergences) - len(lines)} leaves more")
    return lines


# Shows events to people on stderr: those that HOLDFAST_LOG asks for, or only notices of trouble.
#
# By default training prints nothing while all is well. A failed save, a lost keeper or a bad source
# is one plain line, and repeated trouble is one line a minute.


#: The time for which repeated trouble is only counted after it was shown.
QUIET_S = 60.0
_KINDS_AT_MOST = 256
_PHASES_SHOWN = 3
_VARIABLE_WORD = re.compile(r"\w*\d\w*")


class LogSink:
    """Prints short lines to stderr for a person who watches: ``info`` or ``debug`` (everything)."""

    def __init__(self, level: str = "info", *, stream: TextIO | None = None) -> None:
        if level not in ("info", "debug"):
            raise UsageError(
                f"HOLDFAST_LOG is {level!r}: say info, debug or off, or leave it unset"
            )
        self._shows_all = level == "debug"
        self._stream = stream

    def __call__(self, event: Event, time_s: float) -> None:
        if (type(event) not in _INFO and not self._shows_all) or _is_echo(self):
            return
        said = phrase_of(event)
        clock = time.strftime("%H:%M:%S", time.localtime(time_s))
        _print(f"{clock} holdfast{_whose(event)}: {said}", self._stream)


@dataclass(frozen=True, slots=True)
class _ShownNotices:
    """One kind of trouble: when it was shown last, and how often it came since."""

    at_s: float
    since: int = 0


class NoticeSink:
    """Prints the events a person must see, when nothing else was asked for: the same once a minute.

    Rank 0 prints for all, since every rank receives a missed snapshot or a lost keeper; an event
    that only one rank knows is printed by that rank.
    """

    def __init__(self, rank: int, *, stream: TextIO | None = None) -> None:
        self._is_first = rank == 0
        self._stream = stream
        self._shown: dict[tuple[type[Event], str], _ShownNotices] = {}

    def __call__(self, event: Event, time_s: float) -> None:
        if not (isinstance(event, _OF_ONE_RANK) or (self._is_first and isinstance(event, _OF_ALL))):
            return
        if _is_echo(self):
            return
        said = _INFO[type(event)](event)
        # Steps, sizes and names of files differ each time; the kind of event is the same.
        kind = (type(event), _VARIABLE_WORD.sub("#", said))
        before = self._shown.pop(kind, _ShownNotices(-math.inf))
        if abs(time_s - before.at_s) < QUIET_S:  # a clock set back makes nothing silent for long
            self._shown[kind] = _ShownNotices(before.at_s, before.since + 1)
            return
        again = f" ({before.since} more since this was last said)" if before.since else ""
        self._shown[kind] = _ShownNotices(time_s)
        if len(self._shown) > _KINDS_AT_MOST:
            del self._shown[next(iter(self._shown))]
        _print(f"holdfast{_whose(event)}: {said}{again}", self._stream)


def _is_echo(sink: Sink) -> bool:
    """True if another sink of its kind receives the same events: with two runs in one process, one
    prints.

    When the first of them ends, the next one prints.
    """
    alike = [other for other in events.subscribed() if type(other) is type(sink)]
    return sink in alike and alike[0] is not sink


def _whose(event: Event) -> str:
    who = f" rank {event.rank}" if event.rank >= 0 else ""
    return who + (f" {event.incarnation}-{event.step}" if event.step >= 0 else "")


def _print(text: str, stream: TextIO | None) -> None:
    # sys.stderr is looked up late, so that a later redirection applies here too.
    print(printable(" ".join(text.split())), file=stream or sys.stderr, flush=True)


def log_sink_from_environment(rank: int) -> Sink | None:
    """Returns the sink that ``HOLDFAST_LOG`` asks for; by default that of notices, for ``off``
    none.

    Raises UsageError for an unknown level.
    """
    level = os.environ.get("HOLDFAST_LOG", "").strip().lower()
    if level == "off":
        return None
    return LogSink(level) if level else NoticeSink(rank)


@contextmanager
def shown_events(rank: int) -> Iterator[None]:
    """Shows the events of a call on stderr, as ``HOLDFAST_LOG`` says."""
    sink = log_sink_from_environment(rank)
    with ExitStack() as stack:
        if sink is not None:
            stack.callback(events.subscribe(sink))
        yield


def phrase_of(event: Event) -> str:
    """Formats an event for people; what has no words of its own, as ``facts_text``."""
    phrase = _INFO.get(type(event))
    return phrase(event) if phrase else facts_text(event)


def facts_text(event: Event) -> str:
    """Formats name and fields of any event, the identity aside: the line of ``debug``."""
    hidden = {"incarnation", "step", "rank"}
    facts = (
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in msgspec.structs.asdict(event).items()
        if name not in hidden
    )
    return " ".join((type(event).__name__, *facts))


def _published(event: Any) -> str:
    written_bytes = event.size_bytes - event.reused_bytes
    rate = written_bytes / event.elapsed_s if event.elapsed_s > 0 else None
    size = shared_text(event.size_bytes, event.reused_bytes)
    return f"durable, {size} after {seconds_text(event.elapsed_s)} ({rate_text(rate)})"


def _restored(event: Any) -> str:
    passed_on = f" ({size_text(event.received_bytes)} of it read by other ranks)"
    return (
        f"restored from {event.source}, {size_text(event.size_bytes)}"
        f"{passed_on if event.received_bytes else ''}"
        f" in {seconds_text(event.elapsed_s)}, {event.saved_world} to {event.world} ranks"
        f"{_longest_of(event)}"
    )


def _longest_of(event: events.Restored) -> str:
    """Formats ``: read 11.0 s, verify 2.10 s``, the phases that took longest."""
    lengths = ((getattr(event, one.field), one) for one in BY_EVENT["Restored"] if one.within)
    longest = sorted(lengths, key=lambda each: -each[0])[:_PHASES_SHOWN]
    shown = [
        f"{one.name.removeprefix('restore_')} {seconds_text(s)}" for s, one in longest if s > 0
    ]
    return f": {', '.join(shown)}" if shown else ""


def _differ(event: Any) -> str:
    box, ranks = f"[{event.box}]" if event.box else "", ranks_text(event.ranks)
    what = (
        f"{event.leaf}{box} on {ranks} is not what most of its {event.replicas} replicas hold"
        if event.is_known_which
        else f"{event.leaf}{box} is not the same on {ranks}; which of them is right cannot be told"
    )
    others = f"; {event.others} more leaves differ" if event.others else ""
    return f"replicas differ: {what}{others}"


#: The events that ``info`` shows, and their words.
_INFO: dict[type[Event], Callable[[Any], str]] = {
    events.RunStarted: lambda e: f"joined run {e.run_id}, {e.world} ranks, pid {e.pid} on {e.host}",
    events.SnapshotMissed: lambda e: f"snapshot missed: {e.reason}",
    events.SnapshotNotProtected: lambda e: f"not protected: {e.reason}",
    events.ImageRebuilt: lambda e: (
        f"lost image decoded on {e.host} in {seconds_text(e.elapsed_s)}, to be protected again"
    ),
    events.DamageFound: lambda e: (
        f"damaged in the memory of {e.host}: {e.what} ({e.name}), {e.outcome}"
        + (f": {e.reason}" if e.reason else "")
    ),
    events.ProtectionPlanned: lambda e: " ".join(
        (f"protected snapshots survive {e.survives};", *e.missing)
    ).rstrip("; "),
    events.ReplicasDiffer: _differ,
    events.CheckpointCached: lambda e: (
        f"cached, {size_text(e.size_bytes)} after {seconds_text(e.elapsed_s)}"
    ),
    events.CheckpointPublished: _published,
    events.PersistBroke: lambda e: f"not durable: {e.reason}",
    events.Restored: _restored,
    events.SourceDropped: lambda e: f"source {e.source} dropped: {e.reason}",
    events.TrainerLost: lambda e: f"trainer {e.pid} on {e.host} went away without a goodbye",
    events.KeeperStarted: lambda e: f"keeper {e.pid} answers after {seconds_text(e.elapsed_s)}",
    events.KeeperLost: lambda e: f"keeper lost: {e.reason}",
    events.KeeperStopped: lambda e: f"keeper stopped: {e.reason}",
    events.LoopHeld: lambda e: (
        f"keeper of {e.host} answered nobody for up to {e.longest_s:.2f} s, {e.times} times"
    ),
    events.RequestsRefused: lambda e: f"refused at {e.door} of {e.host}: {counts_text(e.counts)}",
    events.ValuesDiffer: lambda e: f"values differed between ranks: {', '.join(e.names)}",
    events.SinkFailed: lambda e: f"sink {e.sink} failed and was removed: {e.reason}",
    events.Warned: lambda e: f"warning: {e.message}",
}

#: The events a person must see that every rank receives, so that rank 0 prints for all.
_OF_ALL = (
    events.SnapshotMissed,
    events.PersistBroke,
    events.KeeperLost,
    events.SourceDropped,
    events.ReplicasDiffer,
    events.SnapshotNotProtected,
)
#: The events that only the reporting rank knows.
_OF_ONE_RANK = (events.Warned,)
