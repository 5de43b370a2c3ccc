"""Serves a keeper's metrics to Prometheus: GET /metrics, and nothing else.

Off unless ``HOLDFAST_METRICS`` names a port. It serves numbers of the metric table and the version
alone: no path, no name of a host or a leaf, no text out of a record. Whoever connects can delay
other readers of this port and nothing else: it has a thread and an event loop of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import ipaddress
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.errors import UsageError
from holdfast.observe.host_metrics import Histogram, HostMetrics, series
from holdfast.observe.metric_table import BUCKETS_S, BY_NAME

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

LOOPBACK = "127.0.0.1"
METRICS_PATH = "/metrics"
#: The most bytes of a request, the most requests at once, and the most seconds that one may take:
#: less where there are more.
MOST_HEAD_BYTES, MOST_AT_ONCE, REQUEST_S, CROWDED_S = 8192, 16, 5.0, 0.5
_SETTING = "HOLDFAST_METRICS"
_LINE = re.compile(rb"([A-Z]+) (\S+) HTTP/1\.[01]")


@dataclass(frozen=True, slots=True)
class MetricsAddress:
    """Where metrics are served."""

    host: str
    port: int

    @property
    def is_local(self) -> bool:
        """True if only processes of this machine reach it."""
        return ipaddress.ip_address(self.host).is_loopback


def metrics_address() -> MetricsAddress | None:
    """Returns where the keepers of this machine serve metrics; None where they serve none.

    Raises UsageError for a bad setting.
    """
    said = os.environ.get(_SETTING, "").strip()
    if not said:
        return None
    host, _, port = said.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or LOOPBACK
    with contextlib.suppress(ValueError):
        if port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16:
            return MetricsAddress(str(ipaddress.ip_address(host)), int(port))
    raise UsageError(
        f"{_SETTING} is {said!r}: give a port, such as 9464, or an IP address of this machine "
        "that others reach and a port, such as 10.0.0.7:9464, or leave it unset"
    )


def require_metrics() -> None:
    """Raises UsageError if metrics are to be served and cannot be."""
    if metrics_address() is not None and importlib.util.find_spec("prometheus_client") is None:
        raise UsageError(
            f"{_SETTING} is set, and prometheus-client is not installed: install holdfast[metrics] "
            f"(pip install 'holdfast[metrics]'), or unset {_SETTING}"
        )


class HoldfastCollector:
    """Shows the metrics of a keeper to ``prometheus_client``, at each scrape anew."""

    def __init__(self, metrics: HostMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Family]:
        """Yields a family for each metric that has a value."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        families = {
            "counter": CounterMetricFamily,
            "gauge": GaugeMetricFamily,
            "histogram": HistogramMetricFamily,
        }
        found: dict[str, Family] = {}
        for name, label, value in series(self._metrics):
            metric = BY_NAME[name]
            if name not in found:
                labels = [of for of, _ in metric.labels]
                found[name] = families[metric.kind](name, metric.text, labels=labels)
            _add(found[name], [label] if metric.labels else [], value)
        yield from found.values()


def _add(family: Any, labels: list[str], value: float | Histogram) -> None:
    if not isinstance(value, Histogram):
        family.add_metric(labels, value)
        return
    buckets, below = [], 0
    for bound, count in zip([*map(str, BUCKETS_S), "+Inf"], value.counts, strict=True):
        below += count
        buckets.append((bound, below))
    family.add_metric(labels, buckets, value.total)


Render = Callable[[str], tuple[bytes, str]]


def render_metrics(metrics: HostMetrics, accept: str) -> tuple[bytes, str]:
    """Returns the metrics in a format that ``accept`` (a header of HTTP) allows, and its name."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry(auto_describe=False)
    registry.register(HoldfastCollector(metrics))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class MetricsPort:
    """Serves metrics on a thread of its own until ``close``."""

    def __init__(self, address: MetricsAddress, render: Render) -> None:
        """Raises OSError if the address cannot be listened at."""
        self.address, self._render = address, render
        self._open = 0
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._listener = socket.create_server((address.host, address.port), family=family)
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._work, name="holdfast-metrics", daemon=True)
        self._thread.start()

    def close(self, *, deadline_s: float = 2.0) -> None:
        """Stops serving."""
        with contextlib.suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(deadline_s)

    def _work(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._listen())

    async def _listen(self) -> None:
        server = await asyncio.start_server(self._serve, sock=self._listener, limit=MOST_HEAD_BYTES)
        async with server:
            await self._end.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            is_crowded = self._open > MOST_AT_ONCE
            async with asyncio.timeout(CROWDED_S if is_crowded else REQUEST_S):
                answer = await self._answer_of(reader)
                writer.write(_answer("503 Service Unavailable") if is_crowded else answer)
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # whoever asked is gone, or says nothing; or the port closes
        finally:
            self._open -= 1
            writer.close()

    async def _answer_of(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _answer("431 Request Header Fields Too Large")
        line, _, fields = head.partition(b"\r\n")
        parsed = _LINE.fullmatch(line)
        if parsed is None:
            return _answer("400 Bad Request")
        if parsed[1] != b"GET":
            return _answer("405 Method Not Allowed", fields="Allow: GET\r\n")
        if parsed[2] != METRICS_PATH.encode():
            return _answer("404 Not Found")
        headers = _headers(fields)
        # A page in a browser of this machine must not read it by a name that it has made up.
        if self.address.is_local and not _is_own_name(headers.get("host", LOOPBACK)):
            return _answer("403 Forbidden")
        body, content_type = self._render(headers.get("accept", ""))
        return _answer("200 OK", body, fields=f"Content-Type: {content_type}\r\n")


def _headers(fields: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in fields.decode("latin-1").split("\r\n"))
    return {name.strip().lower(): value.strip() for name, _, value in lines if name}


def _is_own_name(host: str) -> bool:
    name = re.sub(r":\d+\Z", "", host).removeprefix("[").removesuffix("]")
    try:
        return name.lower() == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _answer(status: str, body: bytes = b"", *, fields: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\n{fields}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode("latin-1") + body


def serve_metrics(
    warn: Callable[[str], object],
) -> tuple[HostMetrics, Callable[[], None]] | None:
    """Serves the metrics of this keeper where a setting asks for it, until the returned function is
    called; None where none does, or that is not possible, which ``warn`` is told.
    """
    try:
        require_metrics()
        address = metrics_address()
        if address is None:
            return None
        # By name: the package itself is above this one.
        metrics = HostMetrics(importlib.import_module("holdfast").__version__)
        port = MetricsPort(address, partial(render_metrics, metrics))
    except (UsageError, OSError) as error:
        warn(f"metrics are not served: {error}; the run goes on without")
        return None
    if not address.is_local:
        warn(
            f"metrics are served at {address.host}:{address.port} to everybody who reaches it, "
            "without TLS: see SECURITY.md, or set HOLDFAST_METRICS to the port alone"
        )
    return metrics, port.close
