"""Where every byte of a group's images and of their parity lies: arithmetic that all keepers share.

A group has n members, in order, m of which can be lost. Every image is cut into d = n - m segments
of whole blocks. There are n stripes; each takes one segment from d members and has its m rows of
parity on the other m:

    segment t of member h   is column t of stripe  (h + 1 + t) mod n
    row r of stripe s       lies on member         (s + r) mod n

So parity rotates: every member keeps row r of one stripe for each r, m/d of the largest member's
bytes, and never parity of its own data. Segments of several images of a host stand behind each
other in the stripe, each at the same place in all stripes. **These rules are part of what keepers
send each other**; see docs/design/0006-redundancy.md.

Member s makes the parity of stripe s: it receives d segments, column t from member s - 1 - t, and
hands on m - 1 rows. So all members send and receive at all times.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from holdfast.errors import TooManyLost, UsageError
from holdfast.format.checksum import BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes ``start`` to ``stop`` of an image, or of the parity that a member keeps of a stripe.

    ``at`` is where they belong: in the stripe, or in the range that is asked for.
    """

    image: int | None  # None: parity
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class Source:
    """What to read from one member; ``number`` is its number in the stripe's code.

    Without parts, the member has no bytes there and counts as zeros, which the code must know.
    """

    member: int
    number: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Stripe:
    """Data, one source for each column, and the members that keep its parity, by row."""

    number: int
    size_bytes: int
    data: tuple[Source, ...]
    parity: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """The parity of one stripe that a member keeps."""

    stripe: int
    row: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Bytes ``start`` to ``stop`` of what is lost: member ``wanted`` of the code of ``stripe``.

    ``sources`` are as many as the code has data members; their parts are placed from ``start`` on.
    """

    start: int
    stop: int
    stripe: int
    wanted: int
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """For each member, in the group's order, the bytes of its images; and the group's parity.

    What is coded of an image is its data, from block 0 on: its header is kept by all members.
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
        """How many members there are, and stripes, if any."""
        return len(self.image_bytes)

    @property
    def columns(self) -> int:
        """How many segments an image has."""
        return self.members - self.parity

    def number(self, member: int, stripe: int) -> int:
        """The number of ``member`` in the code of ``stripe``: data by column, then parity."""
        column = (stripe - 1 - member) % self.members
        return column if column < self.columns else self.columns + self.members - 1 - column

    def segment_bytes(self, size_bytes: int) -> int:
        """The length of all segments of an image of this size but the last."""
        blocks = -(-size_bytes // self.block_bytes)
        return -(-blocks // self.columns) * self.block_bytes


def stripes(placement: Placement) -> tuple[Stripe, ...]:
    """All stripes; none where nothing is protected."""
    count = placement.members if placement.parity else 0
    return tuple(_stripe(placement, number) for number in range(count))


def stored_by(placement: Placement, member: int) -> tuple[Kept, ...]:
    """The parity that ``member`` keeps, the stripe that it encodes itself first."""
    found = []
    for row in range(placement.parity):
        stripe = _stripe(placement, (member - row) % placement.members)
        found.append(Kept(stripe.number, row, stripe.size_bytes))
    return tuple(found)


def needed_for(
    placement: Placement, member: int, image: int, start: int, stop: int,
    lost: Collection[int],
) -> tuple[Rebuild, ...]:  # fmt: skip
    """What gives bytes ``start`` to ``stop`` of an image of a lost member, in order.

    ``lost``: the members that are not to be read, ``member`` or not. Data is taken before parity
    and lower rows before higher. TooManyLost where too few members are left.
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
    found = []
    while start < stop:
        column, within = divmod(start, length)
        end = min(stop, start - within + length)
        stripe = (member + 1 + column) % placement.members
        sources = _sources(placement, stripe, offset + within, offset + within + end - start, away)
        found.append(Rebuild(start, end, stripe, column, sources))
        start = end
    return tuple(found)


def needed_for_parity(
    placement: Placement, member: int, stripe: int, start: int, stop: int, lost: Collection[int]
) -> Rebuild:
    """The same for bytes ``start`` to ``stop`` of what ``member`` keeps of ``stripe``."""
    away = {member, *lost}
    kept = {one.stripe: one.size_bytes for one in stored_by(placement, member)}
    if stripe not in kept or not 0 <= start <= stop <= kept[stripe]:
        raise UsageError(
            f"member {member} keeps no parity from {start} to {stop} of stripe {stripe}; what it "
            f"keeps, in bytes by stripe, is {kept}"
        )
    _check_lost(placement, away)
    sources = _sources(placement, stripe, start, stop, away)
    return Rebuild(start, stop, stripe, placement.number(member, stripe), sources)


def _check_lost(placement: Placement, away: set[int]) -> None:
    if len(away) > placement.parity:
        raise TooManyLost(
            f"members {sorted(away)} of a group of {placement.members} cannot be read, and its "
            f"parity replaces {placement.parity}: use another source, storage in the end",
            missing=sorted(away), parity=placement.parity,
        )  # fmt: skip


def _sources(
    placement: Placement, stripe: int, start: int, stop: int, away: set[int]
) -> tuple[Source, ...]:
    """As many members as are needed, the cheapest first, and what they have of the stripe there."""
    numbers = {
        placement.number(member, stripe): member
        for member in range(placement.members)
        if member not in away
    }
    return tuple(
        _source(placement, numbers[number], stripe, start, stop)
        for number in sorted(numbers)[: placement.columns]
    )


def _stripe(placement: Placement, number: int) -> Stripe:
    members = {placement.number(member, number): member for member in range(placement.members)}
    data = tuple(
        _data(placement, members[column], number, 0, None) for column in range(placement.columns)
    )
    parts = [part for source in data for part in source.parts]
    size = max((part.at + part.stop - part.start for part in parts), default=0)
    rows = (members[placement.columns + row] for row in range(placement.parity))
    return Stripe(number, size, data, tuple(rows))


def _source(placement: Placement, member: int, stripe: int, start: int, stop: int) -> Source:
    """What a member has of bytes ``start`` to ``stop`` of a stripe, data or parity."""
    number = placement.number(member, stripe)
    if number < placement.columns:
        return _data(placement, member, stripe, start, stop)
    return Source(member, number, (Part(None, start, stop, 0),))


def _data(placement: Placement, member: int, stripe: int, start: int, stop: int | None) -> Source:
    """What a data member has of bytes ``start`` to ``stop`` of a stripe."""
    column, offset, parts = placement.number(member, stripe), 0, []
    for image, size in enumerate(placement.image_bytes[member]):
        length = placement.segment_bytes(size)
        begin = column * length + max(0, start - offset)
        end = min(size, (column + 1) * length)
        if stop is not None:
            end = min(end, column * length + stop - offset)
        if begin < end:
            parts.append(Part(image, begin, end, offset + begin - column * length - start))
        offset += length
    return Source(member, column, tuple(parts))
