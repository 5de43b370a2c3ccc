"""The keeper's own events, beside the trainers', in the root's ``events`` directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from holdfast.catalogue import ROOT
from holdfast.events import Sink
from holdfast.observe.sinks import JsonlSink


def open_trace(root: str, host_id: str) -> tuple[Sink, Callable[[], None]]:
    """A sink for this host's keeper, and how to close it."""
    path = Path(root, "events", f"keeper-{host_id}.jsonl")
    sink = JsonlSink(path, only_beside=Path(root, ROOT))
    return sink, sink.close
