"""Messages between the coordinator's keeper and its followers on other hosts.

Small structs only, as between trainers and keeper; the connection is authenticated
(``transport.channel``). Slots are named by their numbers on their own host, trainers by the numbers
of their connections there.
"""

from __future__ import annotations

import msgspec

from holdfast.coordinator.attempts import Attempt
from holdfast.coordinator.slots import Slot, SlotWriter, slot_id_of
from holdfast.errors import FormatError
from holdfast.format.manifest import ImageRef
from holdfast.keeper.hosts import parity_messages
from holdfast.keeper.hosts.parity_messages import Fact
from holdfast.protocol.arena import SlotRecord


class SlotInventory(msgspec.Struct, frozen=True, kw_only=True):
    """A slot as its keeper discovered it, with the metadata of its image."""

    number: int
    capacity_bytes: int
    state: str
    attempt: str = ""
    rank: int = -1
    image_bytes: int = 0
    header_xxh3: str = ""
    table_xxh3: str = ""
    writer_pid: int = 0
    writer_start: int = 0
    incarnation: int = 0
    step: int = -1
    world: int = 0
    layout: str = ""
    is_ring: bool = False
    ring_bytes: int = 0
    nonce: str = ""


class ImageOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Orders one image to be written; without checksums while it is not sealed."""

    rank: int
    slot: int
    image_bytes: int
    ring_bytes: int
    header_xxh3: str = ""
    table_xxh3: str = ""


# ── follower to coordinator ──────────────────────────────────────────────────────────────────────


class HostInventory(Fact, frozen=True, kw_only=True):
    """First message of a follower: the content of its memory."""

    arena: str
    slots: tuple[SlotInventory, ...]
    next_number: int
    rows: tuple[parity_messages.ParityShards, ...] = ()
    incarnations: tuple[int, ...] = ()
    """Incarnations whose records it has."""
    port: int = 0
    """Port where it serves images, if that is not the port agreed on at the start; else 0."""


class TrainerConnected(Fact, frozen=True, kw_only=True):
    """A trainer connected; the follower has verified its process."""

    line: int
    pid: int
    start: int


class TrainerMessage(Fact, frozen=True, kw_only=True):
    """A message of a trainer, forwarded unchanged."""

    line: int
    body: bytes


class TrainerGone(Fact, frozen=True, kw_only=True):
    """A trainer's connection broke."""

    line: int


class SlotCreated(Fact, frozen=True, kw_only=True):
    """A slot was created."""

    slot: int


class SlotFailed(Fact, frozen=True, kw_only=True):
    """A slot could not be created: not enough memory."""

    slot: int
    reason: str


class RingsCreated(Fact, frozen=True, kw_only=True):
    """Rings were created: (capacity, ring bytes) by slot."""

    made: dict[int, tuple[int, int]]


class RingsFailed(Fact, frozen=True, kw_only=True):
    """Rings could not be created: not enough memory."""

    slots: tuple[int, ...]
    reason: str


class WriterGone(Fact, frozen=True, kw_only=True):
    """Nobody writes to a watched slot any more."""

    slot: int
    attempt: str


class ImagesPlanned(Fact, frozen=True, kw_only=True):
    """The sizes of this host's images, see ``image_plan.ImageSizes``."""

    layout: str
    sizes: dict[int, tuple[int, int]]
    reason: str = ""
    is_passing: bool = True


class LayoutFailed(Fact, frozen=True, kw_only=True):
    """The arena has no room for a layout."""

    hash: str
    reason: str


class ImageWritten(Fact, frozen=True, kw_only=True):
    """One image is durable, and equal to what was sealed."""

    directory: str
    image: ImageRef
    part: ImageRef | None = None
    is_reused: bool = False
    values: bytes = b""
    """Values of the image, if it is that of rank 0."""


class WriteEnded(Fact, frozen=True, kw_only=True):
    """The write of an attempt ended. ``reason``: why it is incomplete, "" if it is complete."""

    directory: str
    reason: str


class RingFreed(Fact, frozen=True, kw_only=True):
    """The beginning of an image that passes through a ring is stored."""

    attempt: str
    rank: int
    size_bytes: int


class LayoutReply(Fact, frozen=True, kw_only=True):
    """A layout that the coordinator requested."""

    hash: str
    data: bytes


class IncarnationReply(Fact, frozen=True, kw_only=True):
    """An incarnation record that the coordinator requested."""

    data: bytes


class Superseded(Fact, frozen=True, kw_only=True):
    """A newer incarnation has begun elsewhere: the coordinator must stop."""

    incarnation: int


class Stopping(Fact, frozen=True, kw_only=True):
    """The follower was told to stop: the newest snapshot must be saved, then ``StopAllowed``
    sent.
    """


# ── coordinator to follower ──────────────────────────────────────────────────────────────────────


class HostAttached(Fact, frozen=True, kw_only=True):
    """The coordinator has accepted the inventory; the follower must send these records first."""

    tell_layouts: tuple[str, ...] = ()
    tell_incarnations: tuple[int, ...] = ()


class ForwardMessage(Fact, frozen=True, kw_only=True):
    """A packed frame for a trainer."""

    line: int
    frame: bytes


class HangUp(Fact, frozen=True, kw_only=True):
    """Orders to close a trainer's connection."""

    line: int


class CreateSlot(Fact, frozen=True, kw_only=True):
    """Orders a slot to be created, with this much memory left free."""

    slot: int
    capacity_bytes: int
    leave_bytes: int


class CreateRings(Fact, frozen=True, kw_only=True):
    """Orders rings to be created: (slot, header bytes, data bytes) of each."""

    needs: tuple[tuple[int, int, int], ...]


class DeleteSlot(Fact, frozen=True, kw_only=True):
    """Orders a slot's memory to be freed."""

    slot: int


class StampSlot(Fact, frozen=True, kw_only=True):
    """Orders the slot's record to be written, before any rank writes to it."""

    slot: int
    record: SlotRecord


class RecordLayout(Fact, frozen=True, kw_only=True):
    """Orders a layout to be stored and sent to all trainers, and all not ``used`` to be deleted."""

    hash: str
    deflated: bytes
    """By zlib: a tenth of the document."""
    used: tuple[str, ...]


class SizeImages(Fact, frozen=True, kw_only=True):
    """Orders the images of these ranks to be planned under a layout recorded before."""

    layout: str
    ranks: tuple[int, ...]


class RecordIncarnation(Fact, frozen=True, kw_only=True):
    """Orders an incarnation and its parent to be recorded.

    ``is_recorded``: storage has its line, and older ones may be forgotten, but for those ``held``.
    ``parent``: the record of the start it went on from, if it is known: a hand may have that of
    another start of the same number.
    """

    n: int
    data: bytes
    held: tuple[int, ...]
    is_recorded: bool = False
    parent: bytes = b""


class SlotSealed(Fact, frozen=True, kw_only=True):
    """The image in this slot is captured, or has passed through its ring."""

    slot: int
    is_ring: bool
    attempt: str
    rank: int
    incarnation: int
    step: int
    layout: str
    image_bytes: int
    header_xxh3: str
    table_xxh3: str


class WriteImage(Fact, frozen=True, kw_only=True):
    """Orders images to be written into an attempt's directory."""

    directory: str
    attempt: str
    incarnation: int
    step: int
    layout: str
    images: tuple[ImageOrder, ...]


class CancelWrite(Fact, frozen=True, kw_only=True):
    """Cancels the write of an attempt's images."""

    directory: str
    reason: str


class WatchWriter(Fact, frozen=True, kw_only=True):
    """Orders a report when nobody can write to this slot, granted for this attempt, any more."""

    slot: int
    attempt: str
    pid: int
    start: int


class StopAllowed(Fact, frozen=True, kw_only=True):
    """Everything that must be saved before a follower stops is saved, or cannot be."""


class EndKeeper(Fact, frozen=True, kw_only=True):
    """The run has ended. ``keep_arena``: something in memory could not be made durable."""

    keep_arena: bool


ToCoordinator = (
    HostInventory
    | TrainerConnected
    | TrainerMessage
    | TrainerGone
    | SlotCreated
    | SlotFailed
    | RingsCreated
    | RingsFailed
    | WriterGone
    | LayoutFailed
    | ImagesPlanned
    | LayoutReply
    | IncarnationReply
    | ImageWritten
    | WriteEnded
    | RingFreed
    | Superseded
    | Stopping
    | parity_messages.ParityToCoordinator
)
ToFollower = (
    HostAttached
    | ForwardMessage
    | HangUp
    | CreateSlot
    | CreateRings
    | DeleteSlot
    | StampSlot
    | RecordLayout
    | SizeImages
    | RecordIncarnation
    | SlotSealed
    | WriteImage
    | CancelWrite
    | WatchWriter
    | StopAllowed
    | EndKeeper
    | parity_messages.ParityToHand
)

_encoder = msgspec.msgpack.Encoder()
_to_coordinator = msgspec.msgpack.Decoder(ToCoordinator)
_to_follower = msgspec.msgpack.Decoder(ToFollower)


def pack(fact: Fact) -> bytes:
    """Encode a message for the connection."""
    return _encoder.encode(fact)


def from_follower(body: bytes) -> ToCoordinator:
    """Decode a follower's message. Raises FormatError if it is invalid."""
    try:
        fact: ToCoordinator = _to_coordinator.decode(body)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"what a keeper said makes no sense: {error}") from None
    return fact


def from_coordinator(body: bytes) -> ToFollower:
    """Decode a coordinator's message. Raises FormatError if it is invalid."""
    try:
        fact: ToFollower = _to_follower.decode(body)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"what the coordinator said makes no sense: {error}") from None
    return fact


def describe(slots: list[Slot], attempts: list[Attempt]) -> tuple[SlotInventory, ...]:
    """Convert an arena's discovered slots into a message for the coordinator."""
    by_id = {attempt.id: attempt for attempt in attempts}
    found = []
    for slot in slots:
        attempt = by_id.get(slot.attempt)
        writer = slot.writer or SlotWriter(0, 0)
        found.append(
            SlotInventory(
                number=slot.id,
                capacity_bytes=slot.capacity_bytes,
                state=slot.state,
                attempt=slot.attempt,
                rank=slot.rank,
                image_bytes=slot.image_bytes,
                header_xxh3=slot.header_xxh3,
                table_xxh3=slot.table_xxh3,
                writer_pid=writer.pid,
                writer_start=writer.start,
                incarnation=attempt.incarnation if attempt else slot.incarnation,
                step=attempt.step if attempt else -1,
                world=attempt.world if attempt else 0,
                layout=attempt.layout if attempt else "",
                is_ring=slot.is_ring,
                ring_bytes=slot.ring_bytes,
                nonce=attempt.nonce if attempt else "",
            )
        )
    return tuple(found)


def from_inventory(host: int, found: tuple[SlotInventory, ...]) -> tuple[list[Slot], list[Attempt]]:
    """Convert a follower's inventory into slots and attempts with the ids of this incarnation."""
    slots: list[Slot] = []
    attempts: dict[str, Attempt] = {}
    for one in found:
        slot = Slot(slot_id_of(host, one.number), one.capacity_bytes, one.state)
        slot.is_ring, slot.ring_bytes = one.is_ring, one.ring_bytes
        slots.append(slot)
        if one.state not in ("captured", "quarantined"):
            slot.state = "free"
            continue
        slot.attempt, slot.rank = one.attempt, one.rank
        if one.state == "quarantined":
            slot.writer, slot.incarnation = (
                SlotWriter(one.writer_pid, one.writer_start),
                one.incarnation,
            )
            continue
        slot.image_bytes = one.image_bytes
        slot.header_xxh3, slot.table_xxh3 = one.header_xxh3, one.table_xxh3
        said = Attempt(one.attempt, one.incarnation, one.step, one.world, one.layout)
        said.nonce = one.nonce
        attempts.setdefault(one.attempt, said).slots.setdefault(one.rank, slot.id)
    return slots, list(attempts.values())
