"""Sends saves and recoveries to OpenTelemetry: one trace of each, over OTLP/HTTP.

Ids of traces and spans are derived from the run, the generation and the phase: whatever is sent
twice, or of one host each, joins. Needs ``opentelemetry-sdk`` and its OTLP/HTTP exporter
(``holdfast[otel]``), which are imported only here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import xxhash

from holdfast import events
from holdfast.errors import UsageError
from holdfast.observe.spans import Instant, RunSpans, Span

#: Spans that are sent with one request.
_BATCH = 512
_TIMEOUT_S = 10.0
_PATH = "/v1/traces"


class SentTraces(NamedTuple):
    """How many traces and spans were sent."""

    traces: int
    spans: int


class TelemetrySpan(NamedTuple):
    """One span as OpenTelemetry takes it. ``parent``: its span id; 0 for the first of a trace."""

    trace_id: int
    span_id: int
    parent: int
    name: str
    host: str
    start_ns: int
    end_ns: int
    facts: dict[str, Any]


def require_telemetry() -> None:
    """Raises UsageError where the packages are not installed."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "spans are sent by opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http, which "
            "are not installed: pip install 'holdfast[otel]'"
        ) from error


def trace_id_of(run_id: str, what: str, *numbers: int) -> int:
    """Returns the id of the trace of a save (incarnation, step) or recovery (incarnation)."""
    key = " ".join([run_id, what, *map(str, numbers)])
    return xxhash.xxh3_128_intdigest(key.encode()) or 1


def telemetry_of(found: RunSpans) -> Iterator[TelemetrySpan]:
    """Yields the spans of all traces: of each the first, which all others lie in, comes first."""
    saves = defaultdict[tuple[int, int], list[Span]](list)
    restores = defaultdict[int, list[Span]](list)
    for span in found.spans:
        if span.name == "restore":
            restores[span.incarnation].append(span)
        else:
            saves[span.incarnation, span.step].append(span)
    for (incarnation, step), spans in sorted(saves.items()):
        facts = {"holdfast.incarnation": incarnation, "holdfast.step": step}
        trace = trace_id_of(found.run_id, "save", incarnation, step)
        yield from _trace(trace, "save", spans, facts, ())
    for incarnation, spans in sorted(restores.items()):
        trace = trace_id_of(found.run_id, "recovery", incarnation)
        facts = {"holdfast.incarnation": incarnation, "holdfast.step": spans[0].step}
        yield from _trace(trace, "recovery", spans, facts, _before(incarnation, found.instants))


def _before(incarnation: int, instants: Iterable[Instant]) -> Iterator[tuple[str, Instant, float]]:
    """Yields the time without trainers before a start, if its beginning and end were recorded."""
    lost = [
        one
        for one in instants
        if isinstance(one.event, events.TrainerLost) and one.event.incarnation < incarnation
    ]
    newest = max((one.event.incarnation for one in lost), default=0)
    began = [
        one
        for one in instants
        if isinstance(one.event, events.RunStarted) and one.event.incarnation == incarnation
    ]
    first = next((one for one in lost if one.event.incarnation == newest), None)
    if first is not None and began and began[0].time_s > first.time_s:
        yield "down", first, began[0].time_s


def _trace(
    trace: int,
    name: str,
    spans: list[Span],
    facts: dict[str, Any],
    before: Iterable[tuple[str, Instant, float]],
) -> Iterator[TelemetrySpan]:
    own = _span_id(trace, name, "")
    earlier = [
        TelemetrySpan(
            trace,
            _span_id(trace, what, one.host),
            own,
            what,
            one.host,
            _ns(one.time_s),
            _ns(end_s),
            {},
        )
        for what, one, end_s in before
    ]
    start_ns = min([_ns(span.start_s) for span in spans] + [one.start_ns for one in earlier])
    end_ns = max(_ns(span.end_s) for span in spans)
    yield TelemetrySpan(trace, own, 0, name, spans[0].host, start_ns, end_ns, facts)
    yield from earlier
    counts = defaultdict[tuple[str, int, str], int](int)
    for outer in spans:
        counts[outer.name, outer.rank, outer.host] += 1
        place = f"{outer.host} {outer.rank} {counts[outer.name, outer.rank, outer.host]}"
        parent = _span_id(trace, outer.name, place)
        yield _child(trace, parent, own, outer)
        for inner in outer.inner:
            yield _child(trace, _span_id(trace, inner.name, place), parent, inner)


def _child(trace: int, own: int, parent: int, span: Span) -> TelemetrySpan:
    facts = {f"holdfast.{name}": value for name, value in span.facts.items()}
    if span.rank >= 0:
        facts["holdfast.rank"] = span.rank
    times = _ns(span.start_s), _ns(span.end_s)
    return TelemetrySpan(trace, own, parent, span.name, span.host, *times, facts)


def _span_id(trace: int, name: str, place: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{trace} {name} {place}".encode()) or 1


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)


class TelemetrySender:
    """Sends spans to one receiver of OTLP over HTTP; what it takes is imported at the first."""

    def __init__(self, endpoint: str) -> None:
        self.url = endpoint if endpoint.endswith(_PATH) else endpoint.rstrip("/") + _PATH
        self._exporter: Any = None
        self._resources: dict[str, Any] = {}

    def send(self, spans: Iterable[TelemetrySpan], run_id: str) -> bool:
        """Sends spans of a run; returns False if the receiver does not take them."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import SpanExportResult

        if self._exporter is None:
            self._exporter = OTLPSpanExporter(self.url, timeout=_TIMEOUT_S)
        ready = [_readable(span, run_id, self._resources) for span in spans]
        return bool(self._exporter.export(ready) is SpanExportResult.SUCCESS)

    def close(self) -> None:
        """Lets the receiver go."""
        if self._exporter is not None:
            self._exporter.shutdown()


def send_traces(found: RunSpans, endpoint: str) -> SentTraces:
    """Sends all traces to the receiver; raises UsageError if it does not take them."""
    require_telemetry()
    sender, left = TelemetrySender(endpoint), telemetry_of(found)
    traces, count = set[int](), 0
    try:
        while batch := list(islice(left, _BATCH)):
            if not sender.send(batch, found.run_id):
                raise UsageError(
                    f"{sender.url} did not take the spans: is a receiver of OTLP over HTTP there?"
                )
            traces.update(span.trace_id for span in batch)
            count += len(batch)
    finally:
        sender.close()
    return SentTraces(len(traces), count)


def _readable(span: TelemetrySpan, run_id: str, resources: dict[str, Any]) -> Any:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, TraceFlags

    if span.host not in resources:
        names = {"service.name": "holdfast", "host.name": span.host, "holdfast.run_id": run_id}
        resources[span.host] = Resource(names)

    def context(span_id: int) -> Any:
        sampled = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(span.trace_id, span_id, is_remote=False, trace_flags=sampled)

    return ReadableSpan(
        span.name,
        context=context(span.span_id),
        parent=context(span.parent) if span.parent else None,
        resource=resources[span.host],
        attributes=_attributes(span.facts),
        start_time=span.start_ns,
        end_time=max(span.end_ns, span.start_ns),
        instrumentation_scope=InstrumentationScope("holdfast"),
    )


def _attributes(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value if isinstance(value, (bool, int, float, str)) else str(value)
        for name, value in facts.items()
    }
