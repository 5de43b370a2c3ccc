"""A run on one rank, followed: its events in a file below the root, and before people's eyes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from holdfast.catalogue import ROOT
from holdfast.events import subscribe
from holdfast.observe.log import log_sink_from_environment
from holdfast.observe.sinks import JsonlSink


def follow_run(root: str, rank: int) -> Callable[[float], None]:
    """Subscribe both; returns how to stop, given how many seconds to wait for what is not written.

    UsageError for a setting that means nothing.
    """
    log = log_sink_from_environment(rank)
    path = Path(root, "events", f"rank-{rank:05d}.jsonl")
    trace = JsonlSink(path, only_beside=Path(root, ROOT))
    stops = [subscribe(sink) for sink in (trace, log) if sink is not None]

    def stop(deadline_s: float) -> None:
        for unsubscribe in stops:
            unsubscribe()
        trace.close(deadline_s=deadline_s)

    return stop
