"""What the coordinator and the keepers of the other hosts, its hands, say to each other.

Facts only, as between trainers and keeper; the line they go over is sealed (``peers.control``).
Slots go by their numbers on their own host, trainers by the numbers of their connections there.
"""

from __future__ import annotations

import msgspec

from holdfast.errors import FormatError
from holdfast.format.manifest import ImageRef
from holdfast.keeper import parity_facts
from holdfast.keeper.facts import Fact
from holdfast.snapshot.arena import SlotRecord
from holdfast.snapshot.attempts import Attempt
from holdfast.snapshot.slots import Slot, Writer, slot_id_of


class FoundSlot(msgspec.Struct, frozen=True, kw_only=True):
    """A slot as its keeper finds it, and what its record says of the image in it."""

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


class ImageOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One image to be written; without checksums while it is not sealed."""

    rank: int
    slot: int
    image_bytes: int
    ring_bytes: int
    header_xxh3: str = ""
    table_xxh3: str = ""


# ── hand to coordinator ──────────────────────────────────────────────────────────────────


class Holds(Fact, frozen=True, kw_only=True):
    """The first thing a hand says: what is in its memory."""

    arena: str
    slots: tuple[FoundSlot, ...]
    next_number: int
    rows: tuple[parity_facts.HeldRows, ...] = ()
    port: int = 0
    """Where it gives images to others: not where the start agreed on, if that was taken."""


class Came(Fact, frozen=True, kw_only=True):
    """A trainer connected; the hand has seen that it is this process."""

    line: int
    pid: int
    start: int


class Said(Fact, frozen=True, kw_only=True):
    """What a trainer said, as it came."""

    line: int
    body: bytes


class Left(Fact, frozen=True, kw_only=True):
    """A trainer's connection broke."""

    line: int


class Made(Fact, frozen=True, kw_only=True):
    """A slot exists."""

    slot: int


class NotMade(Fact, frozen=True, kw_only=True):
    """There is no memory for a slot."""

    slot: int
    reason: str


class RingsMade(Fact, frozen=True, kw_only=True):
    """(capacity, of it the ring) by slot."""

    made: dict[int, tuple[int, int]]


class RingsNotMade(Fact, frozen=True, kw_only=True):
    """There is not even memory for rings."""

    slots: tuple[int, ...]
    reason: str


class WriterGone(Fact, frozen=True, kw_only=True):
    """Nobody writes any more to a slot that was watched."""

    slot: int
    attempt: str


class LayoutNotKept(Fact, frozen=True, kw_only=True):
    """The arena has no room for a layout."""

    hash: str
    reason: str


class Written(Fact, frozen=True, kw_only=True):
    """The receipt for an image: it is durable, and equal to what was sealed."""

    directory: str
    image: ImageRef
    part: ImageRef | None = None
    is_reused: bool = False
    values: bytes = b""
    """Of rank 0's image."""


class WritingEnded(Fact, frozen=True, kw_only=True):
    """Nothing is written there any more. ``reason``: why not all of it was, "" when it was."""

    directory: str
    reason: str


class RingFreed(Fact, frozen=True, kw_only=True):
    """The beginning of an image that passes through a ring is stored."""

    attempt: str
    rank: int
    size_bytes: int


class LayoutTold(Fact, frozen=True, kw_only=True):
    """A layout that the coordinator asked for."""

    hash: str
    data: bytes


class IncarnationTold(Fact, frozen=True, kw_only=True):
    """An incarnation that the coordinator asked for; a document."""

    data: bytes


class Superseded(Fact, frozen=True, kw_only=True):
    """A newer incarnation has begun elsewhere: this coordinator's time is over."""

    incarnation: int


class Stopping(Fact, frozen=True, kw_only=True):
    """The hand was told to stop: it awaits ``MayStop``, and the newest snapshot is to be saved."""


# ── coordinator to hand ──────────────────────────────────────────────────────────────────


class Attached(Fact, frozen=True, kw_only=True):
    """What the hand holds is known: it may speak for its ranks, once it has told these."""

    tell_layouts: tuple[str, ...] = ()
    tell_incarnations: tuple[int, ...] = ()


class Tell(Fact, frozen=True, kw_only=True):
    """A frame for a trainer, as it goes out."""

    line: int
    frame: bytes


class HangUp(Fact, frozen=True, kw_only=True):
    """End the connection of a trainer."""

    line: int


class Make(Fact, frozen=True, kw_only=True):
    """Make a slot, leaving so much room besides."""

    slot: int
    capacity_bytes: int
    leave_bytes: int


class MakeRings(Fact, frozen=True, kw_only=True):
    """Make these rings: (slot, bytes for the header, bytes of data) of each."""

    needs: tuple[tuple[int, int, int], ...]


class Remove(Fact, frozen=True, kw_only=True):
    """Give a slot's memory back."""

    slot: int


class Stamp(Fact, frozen=True, kw_only=True):
    """Say in the slot itself what it is for, before anybody writes to it."""

    slot: int
    record: SlotRecord


class KeepLayout(Fact, frozen=True, kw_only=True):
    """Remember a layout, and forget those not ``used``."""

    hash: str
    data: bytes
    used: tuple[str, ...]


class KeepIncarnation(Fact, frozen=True, kw_only=True):
    """Remember an incarnation and its parent; a document."""

    n: int
    data: bytes
    held: tuple[int, ...]


class Sealed(Fact, frozen=True, kw_only=True):
    """An image in this slot is captured, or has passed through it."""

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


class Write(Fact, frozen=True, kw_only=True):
    """Write these images into an attempt's directory."""

    directory: str
    attempt: str
    incarnation: int
    step: int
    layout: str
    images: tuple[ImageOrder, ...]


class StopWriting(Fact, frozen=True, kw_only=True):
    """They are not wanted any more."""

    directory: str
    reason: str


class Watch(Fact, frozen=True, kw_only=True):
    """Tell when nobody can write any more to this slot, which was given for this attempt."""

    slot: int
    attempt: str
    pid: int
    start: int


class MayStop(Fact, frozen=True, kw_only=True):
    """What was to be saved before a hand stops is, or cannot be."""


class End(Fact, frozen=True, kw_only=True):
    """The run has ended. ``keep_arena``: something in memory could not be made durable."""

    keep_arena: bool


ToCoordinator = (
    Holds | Came | Said | Left | Made | NotMade | RingsMade | RingsNotMade | WriterGone
    | LayoutNotKept | LayoutTold | IncarnationTold | Written | WritingEnded | RingFreed
    | Superseded | Stopping | parity_facts.ToCoordinator
)  # fmt: skip
ToHand = (
    Attached | Tell | HangUp | Make | MakeRings | Remove | Stamp | KeepLayout | KeepIncarnation
    | Sealed | Write | StopWriting | Watch | MayStop | End | parity_facts.ToHand
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_to_coordinator = msgspec.msgpack.Decoder(ToCoordinator)
_to_hand = msgspec.msgpack.Decoder(ToHand)


def pack(fact: Fact) -> bytes:
    """As it goes over the line."""
    return _encoder.encode(fact)


def from_hand(body: bytes) -> ToCoordinator:
    """What a hand said. FormatError when it makes no sense."""
    try:
        fact: ToCoordinator = _to_coordinator.decode(body)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"what a keeper said makes no sense: {error}") from None
    return fact


def from_coordinator(body: bytes) -> ToHand:
    """What the coordinator said. FormatError when it makes no sense."""
    try:
        fact: ToHand = _to_hand.decode(body)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"what the coordinator said makes no sense: {error}") from None
    return fact


def describe(slots: list[Slot], attempts: list[Attempt]) -> tuple[FoundSlot, ...]:
    """What was found in an arena, for whoever coordinates."""
    by_id = {attempt.id: attempt for attempt in attempts}
    found = []
    for slot in slots:
        attempt = by_id.get(slot.attempt)
        writer = slot.writer or Writer(0, 0)
        found.append(FoundSlot(
            number=slot.id, capacity_bytes=slot.capacity_bytes, state=slot.state,
            attempt=slot.attempt, rank=slot.rank, image_bytes=slot.image_bytes,
            header_xxh3=slot.header_xxh3, table_xxh3=slot.table_xxh3,
            writer_pid=writer.pid, writer_start=writer.start,
            incarnation=attempt.incarnation if attempt else slot.incarnation,
            step=attempt.step if attempt else -1, world=attempt.world if attempt else 0,
            layout=attempt.layout if attempt else "",
            is_ring=slot.is_ring, ring_bytes=slot.ring_bytes,
        ))  # fmt: skip
    return tuple(found)


def take(host: int, found: tuple[FoundSlot, ...]) -> tuple[list[Slot], list[Attempt]]:
    """What the hand of this host holds, under the numbers of this incarnation."""
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
                Writer(one.writer_pid, one.writer_start),
                one.incarnation,
            )
            continue
        slot.image_bytes = one.image_bytes
        slot.header_xxh3, slot.table_xxh3 = one.header_xxh3, one.table_xxh3
        said = Attempt(one.attempt, one.incarnation, one.step, one.world, one.layout)
        attempts.setdefault(one.attempt, said).slots.setdefault(one.rank, slot.id)
    return slots, list(attempts.values())
