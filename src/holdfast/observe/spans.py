"""Makes the spans of saves and restores from records: who did what, from when to when, for which
generation.

All moments are on one clock, that of the run's first host, to which those of the others are brought
(``observe.clocks``); of a host that was compared with none the wall clock is believed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast import events
from holdfast.errors import NotFound, UsageError
from holdfast.events import AnyEvent, Event
from holdfast.observe.clocks import ClockOffset, CommonClock, HostClocks, HostMoment
from holdfast.observe.phases import BY_EVENT, Phase
from holdfast.observe.records import Progress, RecordHead, RecordReader
from holdfast.observe.since import moment_of

_GENERATION = re.compile(r"(?:(\d+)-)?(\d+)")
#: What a record says of its place; all else of it is said of a span.
_PLACE = frozenset({"incarnation", "step", "rank", "host"})


class SaveName(NamedTuple):
    """Names a save by incarnation and step; incarnation None stands for every one."""

    incarnation: int | None
    step: int


@dataclass(frozen=True, slots=True)
class Span:
    """One phase of one rank, or of a keeper (rank -1), by the clock that is common to all hosts."""

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
    ``clocks``: how far the clocks of hosts were ahead, which is taken out.
    """

    spans: list[Span] = field(default_factory=list)
    instants: list[Instant] = field(default_factory=list)
    samples: list[Instant] = field(default_factory=list)
    run_id: str = ""
    clocks: tuple[ClockOffset, ...] = ()

    def every_span(self) -> Iterator[Span]:
        """Yields each span, and behind it those within it."""
        for span in self.spans:
            yield span
            yield from span.inner


class RecordClock:
    """The moments of records on one clock for all hosts; to be asked when all were taken."""

    def __init__(self, records: Iterable[tuple[AnyEvent, RecordHead]] = ()) -> None:
        self._clocks = HostClocks()
        self._last: dict[int, HostMoment] = {}
        self._common: CommonClock | None = None
        for event, head in records:
            self.take(event, head)

    def take(self, event: AnyEvent, head: RecordHead) -> None:
        """Takes a record, for its moment and for what it says of clocks."""
        at = self._clocks.take(head.by_host, head.boot, head.time_s, head.mono_s)
        self._last[at.clock] = max(at, self._last.get(at.clock, at))
        self._clocks.note(event, at)

    @property
    def common(self) -> CommonClock:
        """Returns the one clock."""
        if self._common is None:
            self._common = self._clocks.solve()
        return self._common

    def place(self, head: RecordHead) -> float:
        """Returns the moment of a record in seconds since 1970."""
        at = self._clocks.take(head.by_host, head.boot, head.time_s, head.mono_s)
        is_known = at.clock in self._last
        return self.common.exact(at) if is_known else head.time_s

    @property
    def last_s(self) -> float:
        """Returns the moment of the newest record."""
        return max(map(self.common.exact, self._last.values()), default=0.0)


class RecordChoice(NamedTuple):
    """Which records are taken: of one save, or those from a moment on, by ``clock``."""

    generation: SaveName | None = None
    since_s: float = 0.0
    clock: RecordClock | None = None

    def takes(self, event: Event, head: RecordHead) -> bool:
        """Returns True if a record is among them."""
        if self.generation is None:
            at_s = head.time_s if self.clock is None else self.clock.place(head)
            return at_s >= self.since_s
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
    moment_of(since, 0.0)  # it means something, before all is read
    clock = RecordClock(RecordReader(root, progress))
    return RecordChoice(None, moment_of(since, clock.last_s), clock)


def read_spans(
    root: str | Path, chosen: RecordChoice, progress: Progress | None = None
) -> RunSpans:
    """Returns the spans of the records that are chosen. Raises NotFound if there are none."""
    taken, run_id = [], ""
    clock = RecordClock()
    for event, head in RecordReader(root, progress):
        if isinstance(event, events.RunStarted):
            run_id = event.run_id
        clock.take(event, head)
        if chosen.takes(event, head):
            taken.append((event, head))
    if not taken:
        what = "no records of it" if chosen.generation is None else "no records of this save"
        raise NotFound(
            f"{root}: {what}; `holdfast report {root}` shows the saves of the run", root=str(root)
        )
    found = spans_of(taken, clock)
    found.run_id = run_id
    return found


def spans_of(
    records: Iterable[tuple[AnyEvent, RecordHead]], clock: RecordClock | None = None
) -> RunSpans:
    """Returns the spans of these records; ``clock``: has taken them, and more where there are."""
    records = list(records)
    if clock is None:
        clock = RecordClock(records)
    found = RunSpans(clocks=clock.common.offsets)
    for event, head in records:
        host, time_s = _host_of(event, head), clock.place(head)
        spans = _spans(event, host, time_s)
        if spans:
            found.spans += spans
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


def _spans(event: Event, host: str, end_s: float) -> list[Span]:
    """Returns the phase that a record ends, with those within it, and those before it; none where
    it ends none.
    """
    phases = BY_EVENT.get(type(event).__name__)
    if phases is None:
        return []
    fields = msgspec.structs.asdict(event)
    facts = {name: value for name, value in fields.items() if name not in _PLACE}
    of = (host, event.incarnation, event.step, event.rank)
    outer, *others = phases
    length_s = float(fields[outer.field])
    first_s = start_s = end_s - length_s
    inner, before = list[Span](), list[Span]()
    for phase in others:
        own_s = float(fields[phase.field])
        if phase.place == "before" and own_s > 0:
            before.append(Span(phase, *of, first_s - own_s, own_s, {}))
        elif phase.within and (own_s := min(own_s, end_s - start_s)) > 0:
            is_last = phase.place == "end"
            inner.append(Span(phase, *of, end_s - own_s if is_last else start_s, own_s, {}))
            start_s += 0 if is_last else own_s
    return [*before, Span(outer, *of, first_s, length_s, facts, tuple(inner))]
