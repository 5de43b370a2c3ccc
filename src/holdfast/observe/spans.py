"""Makes the spans of saves and restores from records: who did what, from when to when, for which
generation.

Within a host, moments are taken by its monotonic clock, which never goes back; hosts are put beside
each other by their wall clocks, and a difference between these shows.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast import events
from holdfast.errors import NotFound, UsageError
from holdfast.events import AnyEvent, Event
from holdfast.observe.phases import BY_EVENT, Phase
from holdfast.observe.records import Progress, RecordHead, RecordReader

_GENERATION = re.compile(r"(?:(\d+)-)?(\d+)")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
#: What a record says of its place; all else of it is said of a span.
_PLACE = frozenset({"incarnation", "step", "rank", "host"})


class SaveName(NamedTuple):
    """Names a save by incarnation and step; incarnation None stands for every one."""

    incarnation: int | None
    step: int


@dataclass(frozen=True, slots=True)
class Span:
    """One phase of one rank, or of a keeper (rank -1), by the wall clock of ``host``."""

    phase: Phase
    host: str
    incarnation: int
    step: int
    rank: int
    start_s: float
    length_s: float
    facts: dict[str, Any]
    inner: tuple[Span, ...] = ()
    """The phases within this one, behind each other."""

    @property
    def name(self) -> str:
        """Returns the name of its phase."""
        return self.phase.name

    @property
    def end_s(self) -> float:
        """Returns the moment at which it ended."""
        return self.start_s + self.length_s


@dataclass(frozen=True, slots=True)
class Instant:
    """A moment that something happened at: a missed save, a death, a warning."""

    event: Event
    host: str
    time_s: float


@dataclass(slots=True)
class RunSpans:
    """Spans and moments of a run, each in the order of time.

    ``samples``: what keepers told of their hosts. ``instants``: all other records without a length.
    """

    spans: list[Span] = field(default_factory=list)
    instants: list[Instant] = field(default_factory=list)
    samples: list[Instant] = field(default_factory=list)
    run_id: str = ""

    def every_span(self) -> Iterator[Span]:
        """Yields each span, and behind it those within it."""
        for span in self.spans:
            yield span
            yield from span.inner


class RecordChoice(NamedTuple):
    """Which records are taken: of one save, or those from a moment on."""

    generation: SaveName | None = None
    since_s: float = 0.0

    def takes(self, event: Event, head: RecordHead) -> bool:
        """Returns True if a record is among them."""
        if self.generation is None:
            return head.time_s >= self.since_s
        incarnation, step = self.generation
        return event.step == step and incarnation in (None, event.incarnation)


def parse_generation(text: str) -> SaveName:
    """Returns the generation of ``3-1200``, or of the step ``1200`` in every incarnation.

    Raises UsageError.
    """
    found = _GENERATION.fullmatch(text)
    if found is None:
        raise UsageError(f"{text!r} is no generation: give one as `holdfast ls` shows it, 3-1200")
    return SaveName(None if found[1] is None else int(found[1]), int(found[2]))


def parse_duration(text: str) -> float:
    """Returns the seconds of ``90s``, ``10m``, ``2h`` or ``1d``. Raises UsageError."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise UsageError(f"{text!r} is no duration: give one such as 90s, 10m, 2h or 1d")
    return float(found[1]) * _SECONDS[found[2]]


def select(
    root: str | Path, save: str | None, since: str | None, progress: Progress | None = None
) -> RecordChoice:
    """Returns what ``--save`` and ``--since`` ask for; since counts back from the last record.

    Raises UsageError for a text that means nothing, NotFound for a run without events.
    """
    if save is not None:
        return RecordChoice(parse_generation(save))
    if since is None:
        return RecordChoice()
    duration_s = parse_duration(since)
    last_s = max((head.time_s for _, head in RecordReader(root, progress)), default=0.0)
    return RecordChoice(None, last_s - duration_s)


def read_spans(
    root: str | Path, chosen: RecordChoice, progress: Progress | None = None
) -> RunSpans:
    """Returns the spans of the records that are chosen. Raises NotFound if there are none."""
    taken, run_id = [], ""
    for event, head in RecordReader(root, progress):
        if isinstance(event, events.RunStarted):
            run_id = event.run_id
        if chosen.takes(event, head):
            taken.append((event, head))
    if not taken:
        what = "no records of it" if chosen.generation is None else "no records of this save"
        raise NotFound(
            f"{root}: {what}; `holdfast report {root}` shows the saves of the run", root=str(root)
        )
    found = spans_of(taken)
    found.run_id = run_id
    return found


def spans_of(records: Iterable[tuple[AnyEvent, RecordHead]]) -> RunSpans:
    """Returns the spans of these records."""
    records = list(records)
    place = _clock(records)
    found = RunSpans()
    for event, head in records:
        host, time_s = _host_of(event, head), place(head)
        span = _span(event, host, time_s)
        if span is not None:
            found.spans.append(span)
        elif isinstance(event, events.HostSampled):
            found.samples.append(Instant(event, host, time_s))
        else:
            found.instants.append(Instant(event, host, time_s))
    found.spans.sort(key=lambda span: (span.start_s, -span.length_s))
    for moments in (found.instants, found.samples):
        moments.sort(key=lambda one: one.time_s)
    return found


def _host_of(event: Event, head: RecordHead) -> str:
    return head.by_host or getattr(event, "host", "")


def _clock(records: list[tuple[AnyEvent, RecordHead]]) -> Callable[[RecordHead], float]:
    """Returns what puts a record on the wall clock of its host, which a step of that clock in the
    middle of a run does not disturb.
    """
    ahead: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _, head in records:
        if head.mono_s is not None:
            ahead[head.by_host, head.boot].append(head.time_s - head.mono_s)
    ahead_s = {key: statistics.median(values) for key, values in ahead.items()}

    def place(head: RecordHead) -> float:
        if head.mono_s is None:
            return head.time_s
        return head.mono_s + ahead_s[head.by_host, head.boot]

    return place


def _span(event: Event, host: str, end_s: float) -> Span | None:
    """Returns the phase that a record ends, with those within it: they lie behind each other at its
    beginning, but what finishes it at its end.
    """
    phases = BY_EVENT.get(type(event).__name__)
    if phases is None:
        return None
    fields = msgspec.structs.asdict(event)
    facts = {name: value for name, value in fields.items() if name not in _PLACE}
    of = (host, event.incarnation, event.step, event.rank)
    outer, *within = phases
    length_s = float(fields[outer.field])
    start_s, inner = end_s - length_s, list[Span]()
    for phase in within:
        inner_s = min(float(fields[phase.field]), end_s - start_s)
        if inner_s > 0:
            is_last = phase.name == "finish"
            inner.append(Span(phase, *of, end_s - inner_s if is_last else start_s, inner_s, {}))
            start_s += 0 if is_last else inner_s
    return Span(outer, *of, end_s - length_s, length_s, facts, tuple(inner))
