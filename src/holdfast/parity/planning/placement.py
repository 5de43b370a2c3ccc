"""Computes where every byte of a group's images and of its parity lies; all keepers share this.

A group has n members, in order, m of which can be lost. Every image is cut into d = n - m segments
of whole blocks. There are n stripes; each takes one segment from d members and stores its m parity
shards (the rows of the stripe) on the other m:

    segment t of member h         is column t of stripe  (h + 1 + t) mod n
    parity shard r of stripe s    lies on member         (s + r) mod n

So parity rotates: every member stores shard r of one stripe for each r, m/d of the largest member's
bytes, and never parity of its own data. Segments of several images of a host stand behind each
other in the stripe, each at the same place in all stripes. **These rules are part of the protocol
between keepers**; see docs/design/0006-redundancy.md.

Member s makes the parity of stripe s: it receives d segments, column t from member s - 1 - t, and
sends m - 1 parity shards. So all members send and receive at all times.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from holdfast.errors import TooManyLost, UsageError
from holdfast.format.checksum import BLOCK_BYTES


class StripePart(msgspec.Struct, frozen=True):
    """Bytes ``start`` to ``stop`` of an image, or of the parity shard that a member stores of a
    stripe.

    ``at`` is their offset in the stripe, or in the requested range.
    """

    image: int | None  # None: parity
    start: int
    stop: int
    at: int


class StripeSource(msgspec.Struct, frozen=True):
    """The bytes to read from one member; ``number`` is its number in the stripe's code.

    A member without parts has no bytes there and counts as zeros, which the code must know.
    """

    member: int
    number: int
    parts: tuple[StripePart, ...]


class Stripe(msgspec.Struct, frozen=True):
    """Data, one source for each column, and the members that store its parity, by row."""

    number: int
    size_bytes: int
    data: tuple[StripeSource, ...]
    parity: tuple[int, ...]


class StoredShard(msgspec.Struct, frozen=True):
    """A parity shard that a member stores: row ``row`` of one stripe."""

    stripe: int
    row: int
    size_bytes: int


class RepairStep(msgspec.Struct, frozen=True):
    """Rebuilds bytes ``start`` to ``stop`` of lost data: member ``wanted`` of the code of
    ``stripe``.

    There are as many ``sources`` as the code has data members; their parts are placed from
    ``start``.
    """

    start: int
    stop: int
    stripe: int
    wanted: int
    sources: tuple[StripeSource, ...]


class StripePlacement(msgspec.Struct, frozen=True):
    """For each member, in the group's order, the bytes of its images; and the group's parity.

    The coded bytes of an image are its data, from block 0 on. All members keep its header.
    """

    image_bytes: tuple[tuple[int, ...], ...]
    parity: int
    block_bytes: int = BLOCK_BYTES

    def __post_init__(self) -> None:
        if not 0 <= self.parity < max(1, len(self.image_bytes)):
            raise UsageError(
                f"parity={self.parity} in a group of {len(self.image_bytes)}: a group needs more "
                "members than it can lose"
            )

    @property
    def members(self) -> int:
        """The number of members, which is the number of stripes if there are any."""
        return len(self.image_bytes)

    @property
    def columns(self) -> int:
        """The number of segments of an image."""
        return self.members - self.parity

    def number(self, member: int, stripe: int) -> int:
        """Return the number of ``member`` in the code of ``stripe``: data by column, then
        parity.
        """
        column = (stripe - 1 - member) % self.members
        return column if column < self.columns else self.columns + self.members - 1 - column

    def segment_bytes(self, size_bytes: int) -> int:
        """Return the length of every segment but the last of an image of this size."""
        blocks = -(-size_bytes // self.block_bytes)
        return -(-blocks // self.columns) * self.block_bytes


def stripes(placement: StripePlacement) -> tuple[Stripe, ...]:
    """Return all stripes; none where nothing is protected."""
    count = placement.members if placement.parity else 0
    return tuple(_stripe(placement, number) for number in range(count))


def stored_by(placement: StripePlacement, member: int) -> tuple[StoredShard, ...]:
    """Return the parity shards that ``member`` stores, first that of the stripe it encodes
    itself.
    """
    shards = []
    for row in range(placement.parity):
        stripe = _stripe(placement, (member - row) % placement.members)
        shards.append(StoredShard(stripe.number, row, stripe.size_bytes))
    return tuple(shards)


def needed_for(
    placement: StripePlacement,
    member: int,
    image: int,
    start: int,
    stop: int,
    lost: Collection[int],
) -> tuple[RepairStep, ...]:
    """Return the steps that rebuild bytes ``start`` to ``stop`` of an image of a lost member, in
    order.

    ``lost``: the members that must not be read, with or without ``member``. Data is preferred to
    parity, and lower rows to higher. TooManyLost where too few members are left.
    """
    images, away = placement.image_bytes[member], {member, *lost}
    if not 0 <= start <= stop <= images[image]:
        raise UsageError(
            f"image {image} of member {member} has bytes 0 to {images[image]}, not {start} to "
            f"{stop}"
        )
    _check_lost(placement, away)
    length = placement.segment_bytes(images[image])
    offset = sum(map(placement.segment_bytes, images[:image]))
    steps = []
    while start < stop:
        column, within = divmod(start, length)
        end = min(stop, start - within + length)
        stripe = (member + 1 + column) % placement.members
        sources = _sources(placement, stripe, offset + within, offset + within + end - start, away)
        steps.append(RepairStep(start, end, stripe, column, sources))
        start = end
    return tuple(steps)


def needed_for_parity(
    placement: StripePlacement,
    member: int,
    stripe: int,
    start: int,
    stop: int,
    lost: Collection[int],
) -> RepairStep:
    """Return the steps for bytes ``start`` to ``stop`` of the shard of ``stripe`` that ``member``
    stores.
    """
    away = {member, *lost}
    kept = {one.stripe: one.size_bytes for one in stored_by(placement, member)}
    if stripe not in kept or not 0 <= start <= stop <= kept[stripe]:
        raise UsageError(
            f"member {member} keeps no parity from {start} to {stop} of stripe {stripe}; what it "
            f"keeps, in bytes by stripe, is {kept}"
        )
    _check_lost(placement, away)
    sources = _sources(placement, stripe, start, stop, away)
    return RepairStep(start, stop, stripe, placement.number(member, stripe), sources)


def _check_lost(placement: StripePlacement, away: set[int]) -> None:
    if len(away) > placement.parity:
        raise TooManyLost(
            f"members {sorted(away)} of a group of {placement.members} cannot be read, and its "
            f"parity replaces {placement.parity}: use another source, storage in the end",
            missing=sorted(away),
            parity=placement.parity,
        )


def _sources(
    placement: StripePlacement, stripe: int, start: int, stop: int, away: set[int]
) -> tuple[StripeSource, ...]:
    """Choose as many members as needed, the cheapest first, and their bytes of the stripe range."""
    numbers = {
        placement.number(member, stripe): member
        for member in range(placement.members)
        if member not in away
    }
    return tuple(
        _source(placement, numbers[number], stripe, start, stop)
        for number in sorted(numbers)[: placement.columns]
    )


def _stripe(placement: StripePlacement, number: int) -> Stripe:
    members = {placement.number(member, number): member for member in range(placement.members)}
    data = tuple(
        _data(placement, members[column], number, 0, None) for column in range(placement.columns)
    )
    parts = [part for source in data for part in source.parts]
    size = max((part.at + part.stop - part.start for part in parts), default=0)
    rows = (members[placement.columns + row] for row in range(placement.parity))
    return Stripe(number, size, data, tuple(rows))


def _source(
    placement: StripePlacement, member: int, stripe: int, start: int, stop: int
) -> StripeSource:
    """Return the bytes, data or parity, that a member has in ``start`` to ``stop`` of a stripe."""
    number = placement.number(member, stripe)
    if number < placement.columns:
        return _data(placement, member, stripe, start, stop)
    return StripeSource(member, number, (StripePart(None, start, stop, 0),))


def _data(
    placement: StripePlacement, member: int, stripe: int, start: int, stop: int | None
) -> StripeSource:
    """Return the bytes that a data member has in ``start`` to ``stop`` of a stripe."""
    column, offset, parts = placement.number(member, stripe), 0, []
    for image, size in enumerate(placement.image_bytes[member]):
        length = placement.segment_bytes(size)
        begin = column * length + max(0, start - offset)
        end = min(size, (column + 1) * length)
        if stop is not None:
            end = min(end, column * length + stop - offset)
        if begin < end:
            parts.append(StripePart(image, begin, end, offset + begin - column * length - start))
        offset += length
    return StripeSource(member, column, tuple(parts))
