"""Writes spans as a trace of Perfetto: a process per host, tracks per rank and keeper, flows.

A flow leads from the ``save`` of each rank over its copy and its writing to the publication. Needs
the package ``perfetto`` (``holdfast[trace]``), which is imported only here.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import IO, Any, NamedTuple

import xxhash

from holdfast.errors import UsageError
from holdfast.observe.log import facts_text
from holdfast.observe.spans import Instant, RunSpans, Span
from holdfast.observe.text import printable

#: Where the flow of an image passes, from the save to its publication.
_IN_FLOW = frozenset({"held", "copy", "pass", "write"})
#: Counters out of samples: field and unit.
_COUNTERS = (
    ("arena_bytes", "bytes"),
    ("free_bytes", "bytes"),
    ("queued_bytes", "bytes"),
    ("queued_s", "s"),
    ("trainers_bytes", "bytes"),
    ("keeper_bytes", "bytes"),
    ("cpu_pressure", "part"),
    ("io_pressure", "part"),
)
_SEQUENCE = 1
#: Clocks of Perfetto: moments here are of the first, its own time is the second.
_REALTIME, _BOOTTIME = 1, 6


def write_trace(found: RunSpans, file: IO[bytes]) -> int:
    """Writes the trace; returns how many spans it has. Raises UsageError without the package."""
    _TraceWriter(file).write(found)
    return len(found.spans)


def require_perfetto() -> None:
    """Raises UsageError where the package is not installed."""
    try:
        import perfetto.trace_builder.proto_builder  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "traces are written by the package perfetto, which is not installed: "
            "pip install 'holdfast[trace]'"
        ) from error


class _Published(NamedTuple):
    """The end of a publication, where the flows of all ranks end."""

    span: Span
    time_ns: int


class _Edge(NamedTuple):
    """A beginning (1) or end (0) of a slice: ends come first, the inner before the outer one."""

    time_ns: int
    kind: int
    depth: int
    order_ns: int
    of: Span | _Published | None
    track: int


class _TraceWriter:
    def __init__(self, file: IO[bytes]) -> None:
        require_perfetto()
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos
        from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

        self._builder: Any = StreamingTraceProtoBuilder(file)
        self._event: Any = protos.TrackEvent
        self._packets: Any = protos.TracePacket
        self._tracks: dict[tuple[str, ...], int] = {}
        self._lanes: dict[tuple[str, ...], list[float]] = {}
        self._numbers = itertools.count(1)
        self._ranks: dict[tuple[int, int], set[int]] = {}

    def write(self, found: RunSpans) -> None:
        every: list[Span | Instant] = [*found.spans, *found.instants, *found.samples]
        first_s = min(_start_s(one) for one in every) if every else 0.0
        packet = self._packet()
        packet.sequence_flags = self._packets.SEQ_INCREMENTAL_STATE_CLEARED
        packet.clock_snapshot.primary_trace_clock = _REALTIME
        for clock in (_REALTIME, _BOOTTIME):
            packet.clock_snapshot.clocks.add(clock_id=clock, timestamp=_ns(first_s))
        self._builder.write_packet(packet)
        self._ranks = _ranks_of(found.spans)
        for edge in sorted(self._edges(found.spans), key=lambda edge: edge[:4]):
            self._write_edge(edge)
        for instant in found.instants:
            self._write_instant(instant)
        for sample in found.samples:
            self._write_sample(sample)

    def _edges(self, spans: Iterable[Span]) -> Iterator[_Edge]:
        """Yields the beginnings and ends of slices."""
        for outer in spans:
            track = self._track_of(outer)
            for depth, span in ((0, outer), *((1, each) for each in outer.inner)):
                start_ns = _ns(span.start_s)
                end_ns = max(_ns(span.end_s), start_ns + 1)
                yield _Edge(start_ns, 1, depth, start_ns, span, track)
                yield _Edge(end_ns, 0, -depth, -start_ns, None, track)
            if outer.name == "persist":
                published = _Published(outer, _ns(outer.end_s))
                yield _Edge(_ns(outer.end_s), 2, 0, 0, published, track)

    def _write_edge(self, edge: _Edge) -> None:
        packet = self._packet(edge.time_ns)
        event = packet.track_event
        event.track_uuid = edge.track
        match edge.of:
            case None:
                event.type = self._event.TYPE_SLICE_END
            case _Published(span):
                event.type = self._event.TYPE_INSTANT
                event.name = "published"
                ranks = self._ranks.get((span.incarnation, span.step), ())
                flows = [flow_of(span.incarnation, span.step, rank) for rank in ranks]
                event.terminating_flow_ids.extend(flows)
            case Span() as span:
                event.type = self._event.TYPE_SLICE_BEGIN
                event.name = span.name
                event.categories.append("restore" if span.name == "restore" else "save")
                where = {"generation": f"{span.incarnation}-{span.step}", "rank": span.rank}
                for name, value in (where | span.facts).items():
                    self._annotate(event, name, value)
                if span.name in _IN_FLOW:
                    event.flow_ids.append(flow_of(span.incarnation, span.step, span.rank))
        self._builder.write_packet(packet)

    def _write_instant(self, one: Instant) -> None:
        packet = self._packet(_ns(one.time_s))
        event = packet.track_event
        event.type = self._event.TYPE_INSTANT
        event.track_uuid = self._track(one.host, _who(one.event.rank), "events")
        event.name = type(one.event).__name__
        event.categories.append("event")
        self._annotate(event, "text", facts_text(one.event))
        self._builder.write_packet(packet)

    def _write_sample(self, one: Instant) -> None:
        for name, unit in _COUNTERS:
            packet = self._packet(_ns(one.time_s))
            event = packet.track_event
            event.type = self._event.TYPE_COUNTER
            event.track_uuid = self._counter(one.host, name, unit)
            event.double_counter_value = float(getattr(one.event, name))
            self._builder.write_packet(packet)

    def _annotate(self, event: Any, name: str, value: Any) -> None:
        note = event.debug_annotations.add()
        note.name = name
        match value:
            case bool():
                note.bool_value = value
            case int():
                note.int_value = value
            case float():
                note.double_value = value
            case _:
                note.string_value = printable(str(value))

    # ── tracks ───────────────────────────────────────────────────────────────────────────────────

    def _track_of(self, span: Span) -> int:
        """Returns the track of a span; one that overlaps the span before gets a lane below it."""
        key = (span.host, _who(span.rank), span.phase.track)
        lanes = self._lanes.setdefault(key, [])
        free = (number for number, free_s in enumerate(lanes) if free_s <= span.start_s)
        if (number := next(free, len(lanes))) == len(lanes):
            lanes.append(0.0)
        lanes[number] = span.end_s
        return self._track(*key, *([str(number)] if number else []))

    def _track(self, *path: str) -> int:
        """Returns the id of a track (host, who, what, lane), announced with all above it."""
        if path not in self._tracks:
            self._tracks[path] = next(self._numbers)
            above = self._track(*path[:-1]) if len(path) > 1 else None
            packet = self._packet()
            descriptor = packet.track_descriptor
            descriptor.uuid = self._tracks[path]
            descriptor.name = printable(path[-1] if len(path) < 4 else path[2])
            if above is None:
                descriptor.process.pid = self._tracks[path]
                descriptor.process.process_name = printable(f"host {path[0] or '?'}")
            else:
                descriptor.parent_uuid = above
            self._builder.write_packet(packet)
        return self._tracks[path]

    def _counter(self, host: str, name: str, unit: str) -> int:
        path = (host, "counter", name)
        if path not in self._tracks:
            above = self._track(host)
            self._tracks[path] = next(self._numbers)
            packet = self._packet()
            descriptor = packet.track_descriptor
            descriptor.uuid, descriptor.name = self._tracks[path], name
            descriptor.parent_uuid = above
            descriptor.counter.unit_name = unit
            self._builder.write_packet(packet)
        return self._tracks[path]

    def _packet(self, time_ns: int | None = None) -> Any:
        packet = self._builder.create_packet()
        packet.trusted_packet_sequence_id = _SEQUENCE
        if time_ns is not None:
            packet.timestamp, packet.timestamp_clock_id = time_ns, _REALTIME
        return packet


def _who(rank: int) -> str:
    return f"rank {rank}" if rank >= 0 else "keeper"


def _start_s(one: Span | Instant) -> float:
    return one.start_s if isinstance(one, Span) else one.time_s


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)


def _ranks_of(spans: Iterable[Span]) -> dict[tuple[int, int], set[int]]:
    """Returns the ranks of each generation that have a flow."""
    ranks = defaultdict[tuple[int, int], set[int]](set)
    for span in spans:
        if span.name in _IN_FLOW:
            ranks[span.incarnation, span.step].add(span.rank)
    return ranks


def flow_of(incarnation: int, step: int, rank: int) -> int:
    """Returns the id of the flow of one rank's image, the same in every trace."""
    return xxhash.xxh3_64_intdigest(f"{incarnation}-{step} {rank}".encode()) or 1
