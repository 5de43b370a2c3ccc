"""Show events to people, on stderr: all that HOLDFAST_LOG asks for, or else what nobody may miss.

Unasked, training says nothing while all is well. A save that came to nothing, a keeper that was
lost or a source that was bad is one plain line, and one that comes again and again is one a minute.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

import msgspec

from holdfast import events
from holdfast.errors import UsageError
from holdfast.events import Event, Sink
from holdfast.observe.units import (
    counts_text,
    ranks_text,
    rate_text,
    seconds_text,
    shared_text,
    size_text,
)

#: How long the same trouble is only counted after it was shown.
QUIET_S = 60.0
_KINDS_AT_MOST = 256
_VARIABLE_WORD = re.compile(r"\w*\d\w*")


class LogSink:
    """Print short lines to stderr for a person who watches: ``info`` or ``debug`` (everything)."""

    def __init__(self, level: str = "info", *, stream: TextIO | None = None) -> None:
        if level not in ("info", "debug"):
            raise UsageError(
                f"HOLDFAST_LOG is {level!r}: say info, debug or off, or leave it unset"
            )
        self._shows_all = level == "debug"
        self._stream = stream

    def __call__(self, event: Event, time_s: float) -> None:
        phrase = _INFO.get(type(event))
        if (phrase is None and not self._shows_all) or _is_echo(self):
            return
        said = phrase(event) if phrase else _facts(event)
        clock = time.strftime("%H:%M:%S", time.localtime(time_s))
        _print(f"{clock} holdfast{_whose(event)}: {said}", self._stream)


@dataclass(frozen=True, slots=True)
class _Shown:
    """One kind of trouble: when it was shown last, and how often it came since."""

    at_s: float
    since: int = 0


class NoticeSink:
    """Print what a person must see, when nothing else was asked for: the same once a minute.

    Rank 0 speaks for all, since every rank hears of a snapshot that was missed or of a lost
    keeper; of what only one rank knows, that rank speaks.
    """

    def __init__(self, rank: int, *, stream: TextIO | None = None) -> None:
        self._is_first = rank == 0
        self._stream = stream
        self._shown: dict[tuple[type[Event], str], _Shown] = {}

    def __call__(self, event: Event, time_s: float) -> None:
        if not (isinstance(event, _OF_ONE_RANK) or (self._is_first and isinstance(event, _OF_ALL))):
            return
        if _is_echo(self):
            return
        said = _INFO[type(event)](event)
        # Steps, sizes and names of files differ each time; what happened is the same.
        kind = (type(event), _VARIABLE_WORD.sub("#", said))
        before = self._shown.pop(kind, _Shown(-math.inf))
        if abs(time_s - before.at_s) < QUIET_S:  # a clock set back makes nothing silent for long
            self._shown[kind] = _Shown(before.at_s, before.since + 1)
            return
        again = f" ({before.since} more since this was last said)" if before.since else ""
        self._shown[kind] = _Shown(time_s)
        if len(self._shown) > _KINDS_AT_MOST:
            del self._shown[next(iter(self._shown))]
        _print(f"holdfast{_whose(event)}: {said}{again}", self._stream)


def _is_echo(sink: Sink) -> bool:
    """Whether another of its kind hears the same events: with two runs in one process, one says it.

    When the first of them ends, the next one speaks.
    """
    alike = [other for other in events.subscribed() if type(other) is type(sink)]
    return sink in alike and alike[0] is not sink


def _whose(event: Event) -> str:
    who = f" rank {event.rank}" if event.rank >= 0 else ""
    return who + (f" {event.incarnation}-{event.step}" if event.step >= 0 else "")


def _print(text: str, stream: TextIO | None) -> None:
    # sys.stderr is looked up late: whoever redirects it later means us too.
    print(" ".join(text.split()), file=stream or sys.stderr, flush=True)


def log_sink_from_environment(rank: int) -> Sink | None:
    """The sink that ``HOLDFAST_LOG`` asks for; by default that of notices, for ``off`` none.

    UsageError for a level unknown.
    """
    level = os.environ.get("HOLDFAST_LOG", "").strip().lower()
    if level == "off":
        return None
    return LogSink(level) if level else NoticeSink(rank)


def _facts(event: Event) -> str:
    """Name and fields of any event, the identity aside: what ``debug`` shows."""
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
    )


def _differ(event: Any) -> str:
    box, ranks = f"[{event.box}]" if event.box else "", ranks_text(event.ranks)
    what = (
        f"{event.leaf}{box} on {ranks} is not what most of its {event.replicas} replicas hold"
        if event.is_known_which
        else f"{event.leaf}{box} is not the same on {ranks}; which of them is right cannot be told"
    )
    others = f"; {event.others} more leaves differ" if event.others else ""
    return f"replicas differ: {what}{others}"


#: What ``info`` shows, and in which words.
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
    events.CheckpointPublished: _published,
    events.PersistBroke: lambda e: f"not durable: {e.reason}",
    events.Restored: _restored,
    events.SourceDropped: lambda e: f"source {e.source} dropped: {e.reason}",
    events.KeeperStarted: lambda e: f"keeper {e.pid} answers after {seconds_text(e.elapsed_s)}",
    events.KeeperLost: lambda e: f"keeper lost: {e.reason}",
    events.KeeperStopped: lambda e: f"keeper stopped: {e.reason}",
    events.RequestsRefused: lambda e: f"refused at {e.door} of {e.host}: {counts_text(e.counts)}",
    events.ValuesDiffer: lambda e: f"values differed between ranks: {', '.join(e.names)}",
    events.SinkFailed: lambda e: f"sink {e.sink} failed and was removed: {e.reason}",
    events.Warned: lambda e: f"warning: {e.message}",
}

#: What nobody may miss: of these every rank hears, so that rank 0 speaks for all.
_OF_ALL = (
    events.SnapshotMissed, events.PersistBroke, events.KeeperLost, events.SourceDropped,
    events.ReplicasDiffer, events.SnapshotNotProtected,
)  # fmt: skip
#: Of these only the rank knows that says so.
_OF_ONE_RANK = (events.Warned,)
