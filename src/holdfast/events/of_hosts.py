"""Defines the events about a host and its keeper."""

from __future__ import annotations

import msgspec

from holdfast.events.fields import Bytes, Count, Difference, Event, PartOrNone, Seconds


class KeeperStarted(Event, frozen=True, kw_only=True):
    """A keeper answers on this host.

    ``pid``: its process. ``found_generations``: the number of whole generations that an earlier
    keeper left in memory. ``elapsed_s``: the time that taking them over took.
    """

    pid: Count
    found_generations: Count
    elapsed_s: Seconds


class KeeperLost(Event, frozen=True, kw_only=True):
    """The keeper of this host went away; another is started at the next save.

    ``reason``: what showed it, in words.
    """

    reason: str


class KeeperStopped(Event, frozen=True, kw_only=True):
    """A keeper ended in order.

    ``reason``: why, in words.
    """

    reason: str


class RequestsRefused(Event, frozen=True, kw_only=True):
    """The keeper of ``host`` turned requests or connections away; ``counts``: how many, by kind.

    ``door``: "socket", where its trainers come, "peers", where other hosts fetch images, or
    "control", where their keepers call. Counted since the last of these events.
    """

    host: str
    door: str
    counts: dict[str, Count]


class LoopHeld(Event, frozen=True, kw_only=True):
    """A keeper's loop was held for more than 50 ms: meanwhile it answered nobody. Nothing was lost.

    ``host``: the keeper's. ``times``: how often since the last report. ``longest_s``: the longest,
    in seconds, without the time for which the keeper waited for a processor.
    """

    host: str
    times: Count
    longest_s: Seconds


class HostSampled(Event, frozen=True, kw_only=True):
    """What the keeper of ``host`` and its memory were like at one moment, told every 10 s.

    ``slots``: how many slots there are in each state. ``arena_bytes``: what slots and rings take of
    shared memory. ``parity_bytes``: what parity takes of it. ``free_bytes``: what more slots may
    take. ``queued_jobs``: the saves that wait to be written to storage from this host, or are being
    written. ``queued_bytes``: the size of their images here. ``writing_bytes``: of these, the ones
    whose writing has begun. ``queued_s``: for how long the oldest of them waits. ``finish_s``: the
    longest that storage took to make an image durable at its end, since the sample before.
    ``trainers``: the processes of the run on this host that are connected.
    ``trainers_bytes``: their resident memory, shared memory aside. ``keeper_bytes``: the same
    of the keeper. ``keeper_cpu_s``: the processor time of the keeper since it started.
    ``cpu_pressure``, ``io_pressure``, ``memory_pressure``: the part of the last 10 s in which some
    process of the host waited for it (PSI); -1 where the kernel does not tell. ``doing``: how many
    trainers of the host are in each phase: "training", "saving", "restoring", or one that the
    program declared; empty where it is not known.
    """

    host: str
    slots: dict[str, Count]
    arena_bytes: Bytes
    parity_bytes: Bytes
    free_bytes: Bytes
    queued_jobs: Count
    queued_bytes: Bytes
    writing_bytes: Bytes
    queued_s: Seconds
    finish_s: Seconds
    trainers: Count
    trainers_bytes: Bytes
    keeper_bytes: Bytes
    keeper_cpu_s: Seconds
    cpu_pressure: PartOrNone = -1.0
    io_pressure: PartOrNone = -1.0
    memory_pressure: PartOrNone = -1.0
    doing: dict[str, Count] = msgspec.field(default_factory=dict)


class ClocksCompared(Event, frozen=True, kw_only=True):
    """The keeper of ``host`` compared its monotonic clock with that of the coordinating keeper.

    ``other``, ``other_boot``: the coordinator's host, and the boot that its clock counts from.
    ``ahead_s``: how far the clock of ``host`` is ahead, by four moments: a request sent, received,
    answered, and the answer received. ``error_s``: the most that this can be wrong: half of what
    request and answer were under way. ``round_trip_s``: all of that. Of several exchanges, the
    quickest counts.
    """

    host: str
    other: str
    other_boot: str
    ahead_s: Difference
    error_s: Seconds
    round_trip_s: Seconds
