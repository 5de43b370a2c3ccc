"""Messages between trainers and keeper: small structs, never bytes of the state.

A frame is a 4-byte little-endian length and one MessagePack object, on a unix socket. Every
connection starts with ``Hello``. ``seq`` pairs a request with its answer; all other messages are
notifications.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from types import GenericAlias
from typing import Any

import msgspec

from holdfast.errors import FormatError
from holdfast.format.manifest import AttemptId, ImageId

PROTOCOL = 14
MAX_FRAME_BYTES = 256 << 20
LENGTH_BYTES = 4
"""Bytes of a frame before its body."""

NOTHING_TO_SAY = -2
"""``Captured.same_since`` of a rank without parameters, or without an optimizer step since its last
capture.
"""
CHANGED = -1
"""``Captured.same_since`` of a rank whose parameters differ from those of its last capture."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base class of all messages between trainer and keeper."""


# ── trainer to keeper ────────────────────────────────────────────────────────────────────


class Hello(Message, frozen=True, kw_only=True):
    """First message on a connection: identifies the run. The process id comes from the socket, not
    from here.
    """

    protocol: int = PROTOCOL
    run_id: str
    root: str
    """Path by which the sender reaches the root."""
    root_id: str = ""
    """Identity of the root (``Store.identity``): a copied root has the same run id."""
    cache: str = ""
    """Directory of the run's cache on this host; "" for none."""


class HostEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One host of the run in this incarnation. The first host of a table is the coordinator's."""

    id: str
    ranks: tuple[int, ...]
    address: str = ""
    domain: str = ""
    """Failure domain of the host (its HOLDFAST_FAILURE_DOMAIN)."""
    parity_rate: int = 0
    """Upper limit in bytes per second for parity traffic (HOLDFAST_PARITY_RATE); 0: no limit."""
    port: int = 0
    """Port where the host's keeper serves its peers."""
    control_port: int = 0
    """Port where the coordinator accepts the keepers of other hosts; 0 on other hosts."""


class Begin(Message, frozen=True, kw_only=True):
    """Rank 0 starts a new incarnation; all older ones are fenced off."""

    nonce: str
    world: int
    hosts: tuple[HostEntry, ...] = ()
    """The hosts of the ranks; empty for a run on one host."""
    after: int = 0
    """Newest incarnation that the keeper of any other host knows."""


class ProbeHost(Message, frozen=True, kw_only=True):
    """One rank of each host asks its keeper, before an incarnation begins, for what it knows and
    its ports.

    Sent in a run on several hosts, whose keepers will reach each other at ``address``.
    """

    secret: bytes
    address: str
    is_coordinator: bool


class AssignRole(Message, frozen=True, kw_only=True):
    """Assigns this host's keeper its role in an incarnation of several hosts: host ``host`` of the
    table.

    Host 0 coordinates. The keepers of the other hosts follow it, and forward messages for their
    ranks.
    """

    incarnation: int
    nonce: str
    hosts: tuple[HostEntry, ...]
    host: int
    secret: bytes
    within_s: float = 0.0
    """Timeout in seconds for reaching the coordinator."""


class StandingOrder(msgspec.Struct, frozen=True):
    """A standing order: each step that was to be durable, ``first`` to ``last``, or a later one.

    Steps between the two may be in it or not; -1: nothing is ordered. Any complete generation that
    is durable pays it up to its own step.
    """

    first: int = -1
    last: int = -1

    def join(self, other: StandingOrder) -> StandingOrder:
        """Return the order of both."""
        if min(self.last, other.last) < 0:
            return max(self, other, key=lambda order: order.last)
        return StandingOrder(min(self.first, other.first), max(self.last, other.last))

    def pay(self, step: int) -> StandingOrder:
        """Return what stands when ``step`` is durable."""
        return (
            NO_ORDER if step >= self.last else StandingOrder(max(self.first, step + 1), self.last)
        )


NO_ORDER = StandingOrder()


class KeepTerms(msgspec.Struct, frozen=True):
    """A retention, as ``Keep`` has it."""

    last: int | None = None
    every: int | None = None
    best: int | None = None
    by: str = ""
    largest: bool = False


class Join(Message, frozen=True, kw_only=True):
    """A rank joins the incarnation."""

    incarnation: int
    nonce: str
    rank: int
    keep: KeepTerms = KeepTerms()
    cache_keep: KeepTerms = KeepTerms()
    """What stays in the cache of what the root has."""
    persist_at_end: bool = True
    is_copying: bool = True
    """True if the rank may write to any slot. False only if its copier is known to have stopped."""
    order: StandingOrder = NO_ORDER
    """What this rank was to have durable, and what no durable step that it was told of pays."""
    compare_replicas: int | None = None
    """Number of saves over which all replicas are compared; 0: never, None: as many as keep it
    cheap.
    """
    parity: int = 0
    """Number of hosts per group that may be lost together with their memory."""


class ListInventory(Message, frozen=True, kw_only=True):
    """Asks for the generations in memory and the known incarnations."""


class PinAttempt(Message, frozen=True, kw_only=True):
    """Rank 0 pins the slots of this attempt until a new generation is complete."""

    attempt: str


class Adopt(Message, frozen=True, kw_only=True):
    """Rank 0 sets the parent that this incarnation continues from (None: it starts fresh)."""

    parent: tuple[int, int] | None


class LeafTable(Message, frozen=True, kw_only=True):
    """Answers ``RequestTable``: the leaves of this rank, from which the layout is agreed."""

    hash: str
    deflated: bytes


class RequestCapture(Message, frozen=True, kw_only=True):
    """Requests a slot to capture ``step``. Answered when all ranks have requested it.

    ``durable`` with ``exact``: exactly this step. Without ``exact``: a later step may be written
    instead if storage is still busy with an earlier one.
    """

    step: int
    table: str
    values_bytes: int
    durable: bool
    exact: bool = False
    request_number: int = 0
    """Number of the request of this rank: an abandoned step can be requested again."""
    updates: tuple[tuple[str, int], ...] = ()
    """Number of whole updates by each optimizer since the start or the restore."""
    is_copying: bool = True
    """False only if no copy of an earlier capture of this rank can still run."""
    spare_ms: int = 0
    """How long the grant may take until the copy would hold an update of this rank; 0: unknown."""


class Progress(Message, frozen=True, kw_only=True):
    """Reports that the first ``size_bytes`` of the image are copied (for a durable attempt)."""

    attempt: str
    size_bytes: int


class Captured(Message, frozen=True, kw_only=True):
    """Reports that this rank's image is sealed in its slot."""

    attempt: str
    image_bytes: int
    header_xxh3: str
    table_xxh3: str
    sums: tuple[bytes, ...] = ()
    """Checksums of the sampled tiles of replicated data, for each replica group of this rank."""
    same_since: int = NOTHING_TO_SAY
    """The earlier step whose parameters equal these, although they were trained."""


class AbortCapture(Message, frozen=True, kw_only=True):
    """Reports that this rank will not seal its image; the attempt is void for all ranks."""

    attempt: str
    reason: str
    leaf: str = ""
    has_stopped: bool = True
    """True if the rank is known to have stopped writing to the slot."""


class CancelRequest(Message, frozen=True, kw_only=True):
    """Withdraws this rank's ``RequestCapture`` of ``step``."""

    step: int


class DeclineStep(Message, frozen=True, kw_only=True):
    """Reports that this rank cannot save ``step``; other ranks need not wait for it."""

    step: int
    reason: str
    is_passing: bool = False
    """True if the rank may still save the step: when it requests it again."""


class MakeDurable(Message, frozen=True, kw_only=True):
    """Requests that the captured ``step`` be made durable; ``newest``: the newest generation
    instead.
    """

    step: int
    newest: bool = False


#: Values of ``Announce.which`` beside policy names: a last step, and a repeated durable save.
PREEMPTED, MISSED = "preempted", "missed"


class Announce(Message, frozen=True, kw_only=True):
    """Announces that a save is due: all ranks save at ``step``. ``which`` is the policy's name or a
    reason.
    """

    step: int
    which: str


class Explain(Message, frozen=True, kw_only=True):
    """Asks for the reason why the save of ``step`` is still waiting."""

    step: int


class TakeSample(Message, frozen=True, kw_only=True):
    """Asks what the keeper's host is like now. Who asks watches the run, and is no part of it."""


class Goodbye(Message, frozen=True, kw_only=True):
    """Reports that this rank ends in order."""


# ── keeper to trainer ────────────────────────────────────────────────────────────────────


class Welcome(Message, frozen=True, kw_only=True):
    """Answer to ``Hello``."""

    pid: int


class HostProbed(Message, frozen=True, kw_only=True):
    """Answer to ``ProbeHost``: the newest incarnation the keeper knows, and its ports."""

    newest: int
    port: int
    control_port: int = 0


class Begun(Message, frozen=True, kw_only=True):
    """Answer to ``Begin``: the number of the new incarnation."""

    incarnation: int


class Done(Message, frozen=True, kw_only=True):
    """Answer to a request that was carried out."""


class Refused(Message, frozen=True, kw_only=True):
    """Answer to a request that was not carried out; ``kind`` is the error's class name."""

    kind: str
    reason: str
    fields: dict[str, Any] = {}


class HoldingPart(msgspec.Struct, frozen=True):
    """What one host holds of an attempt."""

    attempt_id: AttemptId
    images: tuple[ImageId, ...] = ()
    parity: tuple[tuple[int, int], ...] = ()
    """(stripe, row) of each row of parity."""
    nonce: str = ""
    """Of the start that captured it; "" where only parity is left."""


class Inventory(Message, frozen=True):
    """What a host holds. Its keeper answers ``ListInventory`` with all that is complete, and gives
    other hosts what lies in its own memory.
    """

    host: str
    parts: tuple[HoldingPart, ...] = ()
    parents: dict[int, tuple[int, int] | None] = {}
    """The parents of known incarnations."""
    starts: dict[int, tuple[str, float]] = {}
    """Of the records that tell the parents: the nonce of the start, and when they were made."""


class Grant(Message, frozen=True, kw_only=True):
    """Grants a slot for capturing ``step``. ``layout`` is the hash of the layout agreed by all
    ranks, which lies in the arena (``arena.read_layout``).
    """

    step: int
    attempt: str
    slot: str
    durable: bool
    layout: str
    ring_bytes: int = 0
    """Size of the ring at the end of the slot that the image passes through; 0: the slot keeps the
    whole image.
    """
    compare: tuple[int, int | None] | None = None
    """(index, number of parts; None: as many as keep it cheap): the part of replicated data to
    checksum.
    """
    request_number: int = 0
    """Number of the request that this grant answers."""
    hosts: int = 1
    """Number of hosts the ranks are on."""


class RingSpaceFreed(Message, frozen=True, kw_only=True):
    """Reports that the first ``size_bytes`` of the image are written: their space in the ring is
    free.
    """

    attempt: str
    size_bytes: int


class RequestTable(Message, frozen=True, kw_only=True):
    """Asks for the table with this hash, which this rank's capture request named."""

    hash: str


class Skip(Message, frozen=True, kw_only=True):
    """No rank captures ``step``. ``is_passing``: the reason is temporary."""

    step: int
    reason: str
    is_passing: bool = True


class ReplicaDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One leaf that differs between the ranks that hold it; see ``events.ReplicasDiffer``."""

    leaf: str
    box: str
    ranks: tuple[int, ...]
    replicas: int
    is_known_which: bool


class ReplicaDifferences(Message, frozen=True, kw_only=True):
    """Lists leaves whose captured replicas differ; ``others``: number of differing leaves not
    listed.
    """

    step: int
    attempt: str
    leaves: tuple[ReplicaDifference, ...]
    others: int


class Complete(Message, frozen=True, kw_only=True):
    """Reports that all ranks captured this generation."""

    step: int
    attempt: str
    durable: bool


class Protected(Message, frozen=True, kw_only=True):
    """Reports that this generation survives the loss of hosts: its parity is complete on all
    hosts.
    """

    step: int
    attempt: str


class Unprotected(Message, frozen=True, kw_only=True):
    """Reports that parity of this generation could not be made; the next generation is tried."""

    step: int
    attempt: str
    reason: str
    host: str = ""
    """Host whose keeper reported the failure; "" if no host is responsible."""


class Aborted(Message, frozen=True, kw_only=True):
    """Reports that the attempt is discarded on all ranks."""

    step: int
    attempt: str
    reason: str
    overtaken: bool = False
    leaf: str = ""
    is_lost: bool = False
    """True if a rank or a keeper was lost, so that the step may be captured again."""


class Cached(Message, frozen=True, kw_only=True):
    """Reports that the cache has this generation whole. It pays no order: only the root does."""

    step: int
    attempt: str


class Durable(Message, frozen=True, kw_only=True):
    """Reports that a manifest names this generation: it pays every order up to its step, but an
    exact one of another step.
    """

    step: int
    attempt: str


class NotDurable(Message, frozen=True, kw_only=True):
    """Reports that making this generation durable failed; the next one is made durable instead.

    It was to pay the orders of the steps after ``since`` too.
    """

    step: int
    since: int
    attempt: str
    reason: str
    in_memory: bool = True
    """True if the generation is still in memory as a snapshot; False if it passed through a
    ring.
    """


class Announced(Message, frozen=True, kw_only=True):
    """Tells all ranks that the policy ``which`` is due at ``step``."""

    step: int
    which: str


class Explanation(Message, frozen=True, kw_only=True):
    """Answer to ``Explain``. ``is_whole``: the whole generation is in memory."""

    text: str
    is_whole: bool = False


class SampleTaken(Message, frozen=True, kw_only=True):
    """Answer to ``TakeSample``: a ``HostSampled`` event in MessagePack."""

    event: bytes


class FencedOff(Message, frozen=True, kw_only=True):
    """Tells a rank that a newer incarnation has begun: the rank must stop."""

    incarnation: int


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[tuple[int, Message]] = msgspec.msgpack.Decoder(
    GenericAlias(tuple, (int, reduce(or_, Message.__subclasses__())))
)


def pack(message: Message, seq: int = 0) -> bytes:
    """Encode one frame. ``seq`` 0: not part of a request."""
    body = _encoder.encode((seq, message))
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def unpack(body: bytes) -> tuple[int, Message]:
    """Decode a frame's body into (seq, message); FormatError if it is not a known message."""
    try:
        return _decoder.decode(body)
    except (ValueError, RecursionError) as error:  # msgspec's own, or not UTF-8
        raise FormatError(f"a message between trainer and keeper is malformed: {error}") from None
