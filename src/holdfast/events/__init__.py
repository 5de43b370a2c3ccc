"""Typed records of what happened: the only way a module reports anything.

``emit`` hands a record to every subscribed sink and returns at once. A sink that fails is
removed and the failure is reported to the others: no report can stop training. Times are
seconds, sizes are bytes; ``time_s`` is the wall clock, stamped by ``emit``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.events.fields import Bytes as Bytes
from holdfast.events.fields import Count as Count
from holdfast.events.fields import Event as Event
from holdfast.events.fields import Rate as Rate
from holdfast.events.fields import Seconds as Seconds
from holdfast.events.fields import parent_in_run
from holdfast.events.of_hosts import ClocksCompared as ClocksCompared
from holdfast.events.of_hosts import HostSampled as HostSampled
from holdfast.events.of_hosts import KeeperLost as KeeperLost
from holdfast.events.of_hosts import KeeperStarted as KeeperStarted
from holdfast.events.of_hosts import KeeperStopped as KeeperStopped
from holdfast.events.of_hosts import LoopHeld as LoopHeld
from holdfast.events.of_hosts import RequestsRefused as RequestsRefused


class RunStarted(Event, frozen=True, kw_only=True):
    """A trainer joined a run.

    ``run_id``: the identity of the run, as in its root. ``world``: the number of ranks. ``host``:
    the host of this rank. ``pid``: its process.
    """

    run_id: str
    world: Count
    host: str
    pid: Count
    process_s: Seconds = 0.0
    """Since the process began; 0 where that is not known."""
    joined_s: Seconds = 0.0
    """The part of it that joining the run took. The last rank to come waits for nobody in it."""


class RunEnded(Event, frozen=True, kw_only=True):
    """A trainer let go of its run by its own will: whoever left none was killed, or still trains.

    ``outcome``: "closed", or "failed" where an error ended the ``with`` block. ``closing_s``: how
    long ``close`` waited for what was promised. ``reason``: the error, in a line.
    """

    outcome: str
    closing_s: Seconds = 0.0
    reason: str = ""


class StepsDone(Event, frozen=True, kw_only=True):
    """Training steps ended, ``step`` the newest: all since the last such record of this rank.

    One rank of each host reports them, at most once a second, and at once the first of a start and
    one that took much longer than those before.

    ``steps``: how many. ``elapsed_s``: the time from the end of the step before to the end of the
    newest; of the first, since the restore. ``longest_s``: the longest of them. ``tokens``: those
    that were given to ``step``, of this rank. ``is_first``: no step of this start was before.
    """

    steps: Count
    elapsed_s: Seconds
    longest_s: Seconds
    tokens: Count = 0
    is_first: bool = False


class PhaseEnded(Event, frozen=True, kw_only=True):
    """A phase that the program declared with ``Checkpointer.phase`` has ended.

    Of phases of less than 0.1 s the sum since the last record of steps is reported.

    ``name``: what the program calls it. ``elapsed_s``: the time it took. ``times``: how many there
    were in that time.
    """

    name: str
    elapsed_s: Seconds
    times: Count = 1


class TrainerDied(Event, frozen=True, kw_only=True):
    """The process of ``rank`` is gone and let go of nothing: ``step`` is the last that it ended.

    Reported by whoever reads what the process left in shared memory, which may be much later.

    ``host``: its host. ``phase``: what it was doing: "restoring", "training" (the first step, too),
    "saving", or a phase that the program declared. ``quiet_s``: the time since it began to.
    ``reason``: what it left in the error file that torchrun gave it, in a line. ``pid``: its number
    on the host; 0: an earlier version did not leave it. ``alive_s``: the part of ``quiet_s`` before
    its end; 0: nobody saw the end.
    """

    host: str
    phase: str
    quiet_s: Seconds
    reason: str = ""
    pid: int = 0
    alive_s: Seconds = 0.0


class SaveReturned(Event, frozen=True, kw_only=True):
    """``save`` gave the training thread back.

    ``held_s``: the time that the thread was held. ``describe_s``: the part of it that describing
    the state took. ``volatile_s``: the part that copying took of leaves that cannot wait.
    ``wait_previous_s``: the part that waiting for the save before took. ``leaves``: the number of
    leaves. ``size_bytes``: the size of what this rank holds of them. ``durable``: the save is to be
    published in storage.
    """

    held_s: Seconds
    describe_s: Seconds
    volatile_s: Seconds
    wait_previous_s: Seconds
    leaves: Count
    size_bytes: Bytes
    durable: bool


class MeshUsed(Event, frozen=True, kw_only=True):
    """The tensors of the state lie on a device mesh: the largest of rank 0's, at its first save.

    ``names``: of its dimensions, the last running fastest. ``sizes``: how many ranks each has.
    ``ranks``: those on it in this order; empty where that is the order of their numbers.
    """

    names: tuple[str, ...]
    sizes: tuple[Count, ...]
    ranks: tuple[Count, ...] = ()


class FenceWaited(Event, frozen=True, kw_only=True):
    """An optimizer step was held until the copies it would overwrite were made.

    ``held_s``: the time that it was held.
    """

    held_s: Seconds


class ImageCaptured(Event, frozen=True, kw_only=True):
    """This rank's image is complete and sealed in its host's memory.

    ``elapsed_s``: the time since the save was asked for. ``copy_s``: the time that copying took.
    ``size_bytes``: the size of the image.
    """

    elapsed_s: Seconds
    copy_s: Seconds
    size_bytes: Bytes
    compared_bytes: Bytes = 0
    """What was summed to be compared with what other ranks hold."""
    grant_s: Seconds = 0.0
    """What passed before that, until the keeper had given the image its place."""


class MemoryPinned(Event, frozen=True, kw_only=True):
    """Shared memory was pinned for the device of this rank, beside training.

    ``size_bytes``: the size of a slot. ``pinned_bytes``: what of it was pinned. ``elapsed_s``: the
    time that this took. ``gb_per_s``: the speed of it.
    """

    size_bytes: Bytes
    pinned_bytes: Bytes
    elapsed_s: Seconds
    gb_per_s: Rate


class ImagePassed(Event, frozen=True, kw_only=True):
    """This rank's image was handed to storage through a ring: no memory keeps it.

    Memory had no room for whole images; the save is durable or nothing.

    ``elapsed_s``: the time since the save was asked for. ``copy_s``: the time that copying took.
    ``size_bytes``: the size of the image. ``ring_bytes``: the size of the ring. ``compared_bytes``,
    ``grant_s``: as in ``ImageCaptured``.
    """

    elapsed_s: Seconds
    copy_s: Seconds
    size_bytes: Bytes
    ring_bytes: Bytes
    compared_bytes: Bytes = 0
    grant_s: Seconds = 0.0


class SnapshotCaptured(Event, frozen=True, kw_only=True):
    """All ranks captured this generation.

    ``elapsed_s``: the time since the attempt began. ``world``: the number of ranks.
    """

    elapsed_s: Seconds
    world: Count
    wait_s: Seconds = 0.0
    """Of it, what the first rank to be done waited for the last."""


class SnapshotProtected(Event, frozen=True, kw_only=True):
    """This generation survives the loss of hosts; ``survives``: of which, in words."""

    survives: str
    elapsed_s: Seconds
    """Since parity of it was begun."""
    encode_s: Seconds = 0.0
    """Of it, what hosts took to read from each other and to encode, until the last was done."""


class SnapshotNotProtected(Event, frozen=True, kw_only=True):
    """Parity of this generation could not be made; what was protected before stays so.

    ``reason``: why, in words.
    """

    reason: str


class ImageRebuilt(Event, frozen=True, kw_only=True):
    """An image that a lost host had was decoded; ``host`` keeps it now, to be protected anew.

    ``elapsed_s``: the time that decoding took. ``size_bytes``: the size of the image.
    """

    host: str
    elapsed_s: Seconds
    size_bytes: Bytes


class ProtectionPlanned(Event, frozen=True, kw_only=True):
    """How the hosts of this start protect each other's snapshots.

    ``survives``: in words, the losses of hosts that every protected snapshot survives. ``missing``:
    what was asked for and is not reached, a sentence each.

    ``parity``: how many hosts of each group can be lost. ``hosts``: the number of hosts.
    """

    parity: Count
    hosts: Count
    survives: str
    missing: tuple[str, ...] = ()


class SnapshotMissed(Event, frozen=True, kw_only=True):
    """No generation came of a save: it was skipped or abandoned on all ranks.

    ``reason``: why, in words. ``overtaken``: the state changed while it was copied. ``leaf``: the
    first leaf found changed, where that is known. ``late_hosts``: the hosts that the others waited
    for in vain.
    """

    reason: str
    overtaken: bool = False
    leaf: str = ""
    late_hosts: tuple[str, ...] = ()


class ReplicasDiffer(Event, frozen=True, kw_only=True):
    """A leaf that several ranks hold was not the same on all of them when it was captured.

    ``ranks``: those that do not hold what more than half of the ``replicas`` hold, at most 64 of
    them; where nothing is held by that many (``is_known_which`` False), all. ``box``: a part of the
    leaf that differs, as in the names of pieces. ``others``: how many more leaves differ, at least.
    The image holds of each part what the rank had that stored it.

    ``leaf``: the first leaf that differs. ``replicas``: how many ranks hold that part.
    ``is_known_which``: more than half of them hold the same.
    """

    leaf: str
    box: str
    ranks: tuple[Count, ...]
    replicas: Count
    is_known_which: bool
    others: Count = 0


class ImageDurable(Event, frozen=True, kw_only=True):
    """One image lies fsynced in storage.

    ``elapsed_s``: the time that writing took. ``size_bytes``: the size of the image. ``image``: its
    path below the root.
    """

    elapsed_s: Seconds
    size_bytes: Bytes
    image: str
    finish_s: Seconds = 0.0
    """Of ``elapsed_s``, what storage took at its end to make it durable: the fsync of a file."""
    queue_s: Seconds = 0.0
    """What passed before writing began, since this host was told to write the image."""


class CheckpointCached(Event, frozen=True, kw_only=True):
    """The caches of all hosts together have this generation whole: it survives processes, not yet
    the loss of a host.

    ``elapsed_s``: the time since writing began. ``size_bytes``: the size of all images. ``images``:
    the number of ranks whose images it has.
    """

    elapsed_s: Seconds
    size_bytes: Bytes
    images: Count


class CheckpointPublished(Event, frozen=True, kw_only=True):
    """A manifest names this generation: it is durable.

    ``elapsed_s``: the time since writing began. ``size_bytes``: the size of all images. ``images``:
    the number of ranks whose images it has.
    """

    elapsed_s: Seconds
    size_bytes: Bytes
    images: Count
    reused_bytes: Bytes = 0
    """Of ``size_bytes``, those that an earlier checkpoint wrote: frozen and unchanged."""
    receipt_s: Seconds = 0.0
    """Of ``elapsed_s``, until every host had told that its images are durable."""
    publish_s: Seconds = 0.0
    """Of ``elapsed_s``, what writing the manifest took at its end."""


class PersistBroke(Event, frozen=True, kw_only=True):
    """A snapshot could not be made durable; it will be tried again with the next one.

    ``reason``: why, in words.
    """

    reason: str


class CheckpointPruned(Event, frozen=True, kw_only=True):
    """A checkpoint left storage by the retention policy.

    ``pruned_step``: its step. ``pruned_incarnation``: the start of the run that saved it.
    """

    pruned_step: Count
    pruned_incarnation: Count
    elapsed_s: Seconds = 0.0
    """The time that removing it took; of several that went together, its part of that."""


class Restored(Event, frozen=True, kw_only=True):
    """This rank's objects hold a restored generation, verified.

    ``read_bytes`` it read from the source, ``received_bytes`` it had from ranks that did.

    ``source``: "memory" or "storage". ``elapsed_s``: the time that the restore took on this rank.
    ``size_bytes``: the size of what was restored here. ``saved_world``: the number of ranks that
    saved it. ``world``: the number of ranks now. ``parent_incarnation``: the start of the run that
    saved it. ``origin``: where in memory that was for this rank: "memory" of its own host, "peers"
    where that had none of it, "decoded" where images of lost hosts were; "start_from" for another
    root, whose generations are none of this run; else "".

    What the thread that restores spent, in seconds; each moment counts for one of them, and what is
    left of ``elapsed_s`` for none. ``inventory_s``: rank 0 asked what hosts and storage hold.
    ``choose_s``: rank 0 chose from it, and took a lease. ``plan_s``: images were opened, and the
    state was compared with what they hold. ``allocate_s``: room was made in the state. ``read_s``:
    bytes were read. ``decode_s``: they were decoded from what is left of the group of a lost host.
    ``verify_s``: they were compared with their checksums; what lies in memory is read by that.
    ``copy_s``: they were copied into the state. ``exchange_s``: they were passed on between ranks.
    ``device_s``: copies to devices were awaited. ``set_s``: what is no tensor was set, and the
    keeper was told. ``dropped_s``: all that was done with sources that failed or did not verify.
    ``meet_s``: other ranks were waited for.
    """

    source: str
    elapsed_s: Seconds
    size_bytes: Bytes
    saved_world: Count
    world: Count
    parent_incarnation: Count
    read_bytes: Bytes = 0
    received_bytes: Bytes = 0
    origin: str = ""
    inventory_s: Seconds = 0.0
    choose_s: Seconds = 0.0
    plan_s: Seconds = 0.0
    allocate_s: Seconds = 0.0
    read_s: Seconds = 0.0
    decode_s: Seconds = 0.0
    verify_s: Seconds = 0.0
    copy_s: Seconds = 0.0
    exchange_s: Seconds = 0.0
    device_s: Seconds = 0.0
    set_s: Seconds = 0.0
    dropped_s: Seconds = 0.0
    meet_s: Seconds = 0.0

    @property
    def parent(self) -> tuple[int, int] | None:
        """Returns the generation that it goes on from, None for one of another root."""
        return parent_in_run(self.incarnation, (self.parent_incarnation, self.step), (self.origin,))


class SourceDropped(Event, frozen=True, kw_only=True):
    """A source of a restore failed or did not verify; all ranks planned again without it.

    ``source``: the source and its generation. ``reason``: why, in words.
    """

    source: str
    reason: str


class DamageFound(Event, frozen=True, kw_only=True):
    """Bytes that lay sealed in the memory of ``host`` changed by themselves, and were found.

    ``what``: "image" or "parity"; ``name``: which of the generation. ``outcome``: "repaired" from
    peers, or "dropped", for this ``reason``: it is neither restored from nor made durable then.

    ``size_bytes``: the size of the blocks that were found changed. ``reason``: why it was
    dropped, in words.
    """

    host: str
    what: str
    name: str
    size_bytes: Bytes
    outcome: str
    reason: str = ""


class TrainerLost(Event, frozen=True, kw_only=True):
    """The trainer of ``rank`` went away without a goodbye: it died, was killed, or hung up.

    Reported by the keeper of the coordinating host, whose clock says which rank was the first.

    ``host``: the host of the rank. ``pid``: its process there.
    """

    host: str
    pid: Count


class ValuesDiffer(Event, frozen=True, kw_only=True):
    """Plain values differed between the saved ranks and the world changed; says what was taken.

    ``names``: the places of the values in the state.
    """

    names: tuple[str, ...]


class SinkFailed(Event, frozen=True, kw_only=True):
    """A sink raised and was removed.

    ``sink``: the sink. ``reason``: the error that it raised.
    """

    sink: str
    reason: str


class Warned(Event, frozen=True, kw_only=True):
    """Something a person should look at; nothing was lost.

    ``message``: the situation, and what to do.
    """

    message: str


AnyEvent = (
    RunStarted
    | RunEnded
    | StepsDone
    | PhaseEnded
    | TrainerDied
    | SaveReturned
    | MeshUsed
    | FenceWaited
    | ImageCaptured
    | ImagePassed
    | MemoryPinned
    | SnapshotCaptured
    | SnapshotProtected
    | SnapshotNotProtected
    | ImageRebuilt
    | ProtectionPlanned
    | SnapshotMissed
    | ReplicasDiffer
    | ImageDurable
    | CheckpointCached
    | CheckpointPublished
    | PersistBroke
    | CheckpointPruned
    | Restored
    | SourceDropped
    | DamageFound
    | TrainerLost
    | KeeperStarted
    | KeeperLost
    | KeeperStopped
    | RequestsRefused
    | LoopHeld
    | HostSampled
    | ClocksCompared
    | ValuesDiffer
    | SinkFailed
    | Warned
)

Sink = Callable[[Event, float], None]

#: Changed by single calls only, and under no lock: the collector may end a subscription while its
#: own thread begins another, and a forked child would never see a lock released.
_sinks: list[Sink] = []


def subscribe(sink: Sink) -> Callable[[], None]:
    """Call ``sink(event, time_s)`` for every event from now on; returns how to stop it.

    ``sink``: called on the thread that reports, with one of the classes of ``holdfast.events`` and
    the wall clock in seconds. A sink that raises is removed.
    """
    _sinks.append(sink)

    def unsubscribe() -> None:
        _remove(sink)

    return unsubscribe


def subscribed() -> tuple[Sink, ...]:
    """Every sink that hears events now, in the order in which they began."""
    return tuple(_sinks)


def _remove(sink: Sink) -> None:
    with contextlib.suppress(ValueError):  # it was removed already
        _sinks.remove(sink)


def emit(event: Event) -> None:
    """Hand ``event`` to every sink. Never raises."""
    time_s = time.time()
    for sink in subscribed():
        try:
            sink(event, time_s)
        except Exception as error:  # a report must never stop training
            _remove(sink)
            emit(SinkFailed(sink=repr(sink), reason=repr(error)))


def warn(message: str) -> None:
    """Report something that a person should look at; nothing was lost."""
    emit(Warned(message=message))


def to_record(event: Event, time_s: float) -> dict[str, Any]:
    """The event as one flat JSON-able record, with its name in ``event`` and ``time_s``."""
    record: dict[str, Any] = msgspec.to_builtins(event)
    record["time_s"] = round(time_s, 6)
    return record
