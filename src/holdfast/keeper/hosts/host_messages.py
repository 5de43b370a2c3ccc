"""Messages between the coordinator's keeper and its followers on other hosts.

Small structs only, as between trainers and keeper; the connection is authenticated
(``transport.channel``). Slots are named by their numbers on their own host, trainers by the numbers
of their connections there.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TypeVar

import msgspec

from holdfast.coordinator import actions  # noqa: F401 (orders, too)
from holdfast.coordinator.slots import SlotWriter
from holdfast.errors import FormatError
from holdfast.format.manifest import AttemptId, ImageId
from holdfast.keeper.hosts import cache_messages, clock_exchange  # noqa: F401 (messages, too)
from holdfast.persist.frozen_parts import StoredPart
from holdfast.protocol import messages as m
from holdfast.protocol.arena import SlotRecord, StoredSlot
from holdfast.protocol.facts import Column, Fact, ToCoordinator, ToFollower
from holdfast.protocol.image_plan import ImageSizes


class ImageOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Orders one image to be written; while it is not sealed, its checksums mean nothing."""

    slot: int
    image: ImageId
    ring_bytes: int
    is_sealed: bool


# ── follower to coordinator ──────────────────────────────────────────────────────────────────────


class HostInventory(ToCoordinator, frozen=True, kw_only=True):
    """First message of a follower: the content of its memory."""

    arena: str
    slots: tuple[StoredSlot, ...]
    next_number: int
    shards: tuple[ParityShards, ...] = ()
    incarnations: tuple[int, ...] = ()
    """Incarnations whose records it has."""
    port: int = 0
    """Port where it serves images, if that is not the port agreed on at the start; else 0."""
    order: m.StandingOrder = m.NO_ORDER
    """The standing order of this incarnation, as its arena has it."""


class TrainerConnected(ToCoordinator, frozen=True, kw_only=True):
    """A trainer connected; the follower has verified its process."""

    line: int
    process: SlotWriter


class TrainerMessage(ToCoordinator, frozen=True, kw_only=True):
    """A message of a trainer, forwarded unchanged."""

    line: int
    body: bytes


class HostRequests(ToCoordinator, frozen=True, kw_only=True, tag="asks"):
    """Capture requests for one step of several trainers, in columns; see ``host_reports``."""

    lines: tuple[int, ...]
    step: int
    table: Column[str]
    values_bytes: Column[int]
    durable: Column[bool]
    exact: Column[bool]
    request_number: Column[int]
    updates: Column[tuple[tuple[str, int], ...]]
    is_copying: Column[bool]
    spare_ms: Column[int]


class HostCaptured(ToCoordinator, frozen=True, kw_only=True, tag="captured"):
    """Images of one attempt that several trainers captured, in columns; see ``host_reports``."""

    lines: tuple[int, ...]
    attempt: str
    image_bytes: Column[int]
    seals: bytes
    """Checksums of header and block table, 8 bytes each, of one image after the other."""
    sums: Column[tuple[bytes, ...]]
    same_since: Column[int]


class TrainerGone(ToCoordinator, frozen=True, kw_only=True):
    """A trainer's connection broke."""

    line: int


class SlotsCreated(ToCoordinator, frozen=True, kw_only=True):
    """A slot was created, or the rings of one order: (capacity, ring bytes) by slot."""

    made: dict[int, tuple[int, int]]


class SlotsFailed(ToCoordinator, frozen=True, kw_only=True):
    """A slot, or the rings of one order, could not be created: not enough memory."""

    slots: tuple[int, ...]
    reason: str


class WriterGone(ToCoordinator, frozen=True, kw_only=True):
    """Nobody writes to a watched slot any more."""

    slot: int
    attempt: str


class ImagesPlanned(ToCoordinator, frozen=True, kw_only=True):
    """The sizes of this host's images, or why they are not known."""

    layout: str
    sizes: ImageSizes


class LayoutMissing(ToCoordinator, frozen=True, kw_only=True):
    """The arena has not the layout that ``RecordLayout`` named: asks for its bytes."""

    hash: str


class LayoutFailed(ToCoordinator, frozen=True, kw_only=True):
    """The arena has no room for a layout."""

    hash: str
    reason: str


class ImageWritten(ToCoordinator, frozen=True, kw_only=True):
    """One image is durable, and equal to what was sealed."""

    directory: str
    stored: StoredPart
    values: bytes = b""
    """Values of the image, if it is that of rank 0."""


class WriteEnded(ToCoordinator, frozen=True, kw_only=True):
    """The write of an attempt ended. ``reason``: why it is incomplete, "" if it is complete."""

    directory: str
    reason: str
    is_lost: bool = False
    """The cache has its bytes no more as the manifest names them: no other try can succeed."""


class WriteProgressed(ToCoordinator, frozen=True, kw_only=True):
    """The write into this directory goes on: a part of an image was stored."""

    directory: str


class RingFreed(ToCoordinator, frozen=True, kw_only=True):
    """The beginning of an image that passes through a ring is stored."""

    attempt: str
    rank: int
    size_bytes: int


WriteReport = ImageWritten | WriteEnded | WriteProgressed | RingFreed


class LayoutReply(ToCoordinator, frozen=True, kw_only=True):
    """A layout that the coordinator requested."""

    hash: str
    deflated: bytes


class IncarnationReply(ToCoordinator, frozen=True, kw_only=True):
    """An incarnation record that the coordinator requested."""

    data: bytes


class Superseded(ToCoordinator, frozen=True, kw_only=True):
    """A newer incarnation has begun elsewhere: the coordinator must stop."""

    incarnation: int


class Stopping(ToCoordinator, frozen=True, kw_only=True):
    """The follower was told to stop: the newest snapshot must be saved before ``StopAllowed``."""


# ── coordinator to follower ──────────────────────────────────────────────────────────────────────


class HostAttached(ToFollower, frozen=True, kw_only=True):
    """The coordinator has accepted the inventory; the follower must send these records first."""

    tell_layouts: tuple[str, ...] = ()
    tell_incarnations: tuple[int, ...] = ()


class ForwardMessage(ToFollower, frozen=True, kw_only=True, tag="say"):
    """A packed frame for each of these trainers."""

    lines: tuple[int, ...]
    frame: bytes


class HangUp(ToFollower, frozen=True, kw_only=True):
    """Orders to close a trainer's connection."""

    line: int


class GrantSlots(ToFollower, frozen=True, kw_only=True, tag="grant"):
    """Orders the records of these slots to be written, then each trainer to be sent its grant."""

    record: SlotRecord
    """What the records have in common."""
    lines: tuple[int, ...]
    ranks: tuple[int, ...]
    slots: tuple[int, ...]
    ring_bytes: Column[int]
    request_number: Column[int]
    durable: bool
    compare: tuple[int, int | None] | None


class RecordLayout(ToFollower, frozen=True, kw_only=True):
    """Orders a layout to be stored, and all not ``used`` to be deleted."""

    hash: str
    tables: str
    """Identifies the tables that it was agreed from, see ``layouts.agreement_id``."""
    used: tuple[str, ...]
    deflated: bytes = b""
    """Sent only to a host that asked for it with ``LayoutMissing``."""


class RecordOrder(ToFollower, frozen=True, kw_only=True):
    """Orders the standing order of this incarnation to be recorded."""

    order: m.StandingOrder


class SizeImages(ToFollower, frozen=True, kw_only=True):
    """Orders the images of these ranks to be planned under a layout recorded before."""

    layout: str
    ranks: tuple[int, ...]


class RecordIncarnation(ToFollower, frozen=True, kw_only=True):
    """Orders an incarnation and its parent to be recorded."""

    n: int
    data: bytes
    held: tuple[int, ...]
    """Incarnations whose records must stay."""
    is_recorded: bool = False
    """True if storage has the record, and older ones may be forgotten."""
    parent: bytes = b""
    """Record of the parent, if known: the host may have another start's of the same number."""


class SlotsSealed(ToFollower, frozen=True, kw_only=True, tag="sealed"):
    """The images in these slots, which this host reported, are captured, or have passed through
    their rings.
    """

    slots: tuple[int, ...]
    ranks: tuple[int, ...]
    is_ring: bool
    attempt_id: AttemptId


class WriteImage(ToFollower, frozen=True, kw_only=True):
    """Orders images to be written into an attempt's directory."""

    directory: str
    attempt_id: AttemptId
    images: tuple[ImageOrder, ...]
    to_cache: bool = False
    """Into this host's cache, not into the root."""


class CancelWrite(ToFollower, frozen=True, kw_only=True):
    """Cancels the write of an attempt's images."""

    directory: str
    reason: str


class WatchWriter(ToFollower, frozen=True, kw_only=True):
    """Orders a report when nobody can write to this slot, granted for this attempt, any more."""

    slot: int
    attempt: str
    writer: SlotWriter


class StopAllowed(ToFollower, frozen=True, kw_only=True):
    """Everything that must be saved before a follower stops is saved, or cannot be."""


class EndKeeper(ToFollower, frozen=True, kw_only=True):
    """The run has ended. ``keep_arena``: something in memory could not be made durable."""

    keep_arena: bool


# ── parity: follower to coordinator ──────────────────────────────────────────────────────────────


class ParityShards(msgspec.Struct, frozen=True, kw_only=True):
    """A complete parity shard."""

    half: int
    attempt: str
    members: tuple[str, ...]
    """Hosts from whose images the shard was made."""
    parity: int
    """Number of parity shards per member."""
    images: dict[int, int] = {}
    """Sizes of these images, by rank."""


class ParityReady(ToCoordinator, frozen=True, kw_only=True, tag="ready"):
    """The memory for this host's shards is allocated; it waits for ``BeginParity``."""

    round_id: int
    terms: int
    """Checksum of what it read of all members' images: the members of a group must agree."""


class ParityComplete(ToCoordinator, frozen=True, kw_only=True, tag="made"):
    """All parity shards of this host are complete and sealed."""

    round_id: int


class ParityFailed(ToCoordinator, frozen=True, kw_only=True):
    """A parity shard of this host failed."""

    round_id: int
    reason: str


class ImageLost(ToCoordinator, frozen=True, kw_only=True):
    """The image in a slot was damaged, and could not be repaired: it is discarded."""

    slot: int
    attempt: str


class ShardLost(ToCoordinator, frozen=True, kw_only=True):
    """A parity shard was damaged and not made again: the attempt's parity is incomplete."""

    attempt: str


class RebuildComplete(ToCoordinator, frozen=True, kw_only=True):
    """A lost image is rebuilt in this slot: decoded, verified, and served."""

    slot: int
    attempt: str
    image: ImageId


class RebuildFailed(ToCoordinator, frozen=True, kw_only=True):
    """A lost image could not be decoded; nothing is written to the slot any more."""

    slot: int
    attempt: str
    reason: str


class ShardsDropped(ToCoordinator, frozen=True, kw_only=True):
    """This host now serves only this round's shards of the images, and no earlier ones."""

    round_id: int


# ── parity: coordinator to follower ──────────────────────────────────────────────────────────────


class JoinGroup(ToFollower, frozen=True, kw_only=True):
    """Tells a host its parity group: numbers in the table of hosts, in the order of their ids."""

    hosts: tuple[int, ...]
    ports: tuple[int, ...]
    """Ports where these keepers serve images now; 0: the port agreed on at the start."""
    parity: int


class MakeParity(ToFollower, frozen=True, kw_only=True, tag="make"):
    """Orders parity of an attempt, whose images the members of a group read from each other."""

    round_id: int
    half: int
    attempt: str
    ranks: tuple[tuple[int, int], ...]
    """Ranks whose images on this host count, as ranges (first, past the last)."""
    seals: int
    """Checksum of the seals of these images, as they were captured; see ``seals_of``."""
    rate_bytes_s: int | None = None
    """Limit in bytes per second that each host of the group pulls, and sends; None: no limit."""
    attempt_id: AttemptId | None = None
    """The attempt, for a host without an image of it."""


class DropParity(ToFollower, frozen=True, kw_only=True):
    """Orders stored parity to be freed: nothing can be rebuilt from it any more."""


class BeginParity(ToFollower, frozen=True, kw_only=True, tag="begin"):
    """All hosts have allocated their memory: orders the shards to be made."""

    round_id: int


class CancelParity(ToFollower, frozen=True, kw_only=True):
    """Cancels the making of parity shards."""

    round_id: int
    reason: str


class DropShards(ToFollower, frozen=True, kw_only=True):
    """All hosts have this round's shards in the other buffer: those in this one may be deleted."""

    round_id: int
    half: int


class RebuildImage(ToFollower, frozen=True, kw_only=True):
    """Orders the image of ``rank`` to be decoded into this slot, which nobody else writes to."""

    slot: int
    attempt: str
    rank: int
    half: int
    """The buffer with the complete shards."""
    places: dict[int, str]
    """Hosts that have the images of its group, by rank."""
    ports: dict[str, int] = msgspec.field(default_factory=dict)
    """Ports where hosts serve images now, if they differ from those agreed on at the start."""


class CancelRebuild(ToFollower, frozen=True, kw_only=True):
    """Cancels all decoding into slots of this host."""

    reason: str


T = TypeVar("T", bound=Fact)
_encoder = msgspec.msgpack.Encoder()
_to_coordinator: msgspec.msgpack.Decoder[ToCoordinator] = msgspec.msgpack.Decoder(
    reduce(or_, ToCoordinator.__subclasses__())
)
_to_follower: msgspec.msgpack.Decoder[ToFollower] = msgspec.msgpack.Decoder(
    reduce(or_, ToFollower.__subclasses__())
)


def pack(fact: Fact) -> bytes:
    """Encode a message for the connection."""
    return _encoder.encode(fact)


def from_follower(body: bytes) -> ToCoordinator:
    """Decode a follower's message. Raises FormatError if it is invalid."""
    return _decode(_to_coordinator, body, "a keeper")


def from_coordinator(body: bytes) -> ToFollower:
    """Decode a coordinator's message. Raises FormatError if it is invalid."""
    return _decode(_to_follower, body, "the coordinator")


def _decode(decoder: msgspec.msgpack.Decoder[T], body: bytes, who: str) -> T:
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"what {who} said makes no sense: {error}") from None
