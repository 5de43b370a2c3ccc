"""Messages between coordinator and followers about parity: creation, loss, and rebuild.

They share the connection of ``messages``.
"""

from __future__ import annotations

import msgspec

from holdfast.parity.planning.record import MemberFact

# Messages between keepers of one run; every message carries its kind.


class Fact(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base class of all messages between keepers of one run."""


# ── follower to coordinator ──────────────────────────────────────────────────────────────────────


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


class ImagesListed(Fact, frozen=True, kw_only=True):
    """Lists the images of this host that parity is to be made of; ``reason``: why they are
    missing.
    """

    turn: int
    member: MemberFact | None
    reason: str = ""


class ParityReady(Fact, frozen=True, kw_only=True):
    """The memory for this host's shards is allocated; it waits for ``BeginParity``."""

    turn: int


class ParityComplete(Fact, frozen=True, kw_only=True):
    """All parity shards of this host are complete and sealed."""

    turn: int


class ParityFailed(Fact, frozen=True, kw_only=True):
    """A parity shard of this host failed."""

    turn: int
    reason: str


class ImageLost(Fact, frozen=True, kw_only=True):
    """The image in a slot was damaged, and could not be repaired: it is discarded."""

    slot: int
    attempt: str


class ShardLost(Fact, frozen=True, kw_only=True):
    """A parity shard was damaged, and could not be made again: the attempt's parity is
    incomplete.
    """

    attempt: str


class RebuildComplete(Fact, frozen=True, kw_only=True):
    """A lost image is rebuilt in this slot: decoded, verified, and served."""

    slot: int
    attempt: str
    rank: int
    image_bytes: int
    header_xxh3: str
    table_xxh3: str


class RebuildFailed(Fact, frozen=True, kw_only=True):
    """A lost image could not be decoded; nothing is written to the slot any more."""

    slot: int
    attempt: str
    reason: str


class ShardsDropped(Fact, frozen=True, kw_only=True):
    """This host now serves only this round's shards of the images, and no earlier ones."""

    turn: int


# ── coordinator to follower ──────────────────────────────────────────────────────────────────────


class ListImages(Fact, frozen=True, kw_only=True):
    """Asks for this attempt's images on the host, and for their headers."""

    turn: int
    attempt: str


class MakeParity(Fact, frozen=True, kw_only=True):
    """Orders memory for this host's parity shards, in this one of the two buffers."""

    turn: int
    half: int
    incarnation: int
    step: int
    attempt: str
    world: int
    layout: str
    parity: int
    members: tuple[MemberFact, ...]
    ports: tuple[int, ...]
    """Ports where the keepers of these members serve images now; 0: the port agreed on at the
    start.
    """
    rate_bytes_s: int | None = None
    """Limit in bytes per second that each host of the group pulls, and sends; None: no limit."""


class DropParity(Fact, frozen=True, kw_only=True):
    """Orders stored parity to be freed: nothing can be rebuilt from it any more."""


class BeginParity(Fact, frozen=True, kw_only=True):
    """All hosts have allocated their memory: orders the shards to be made."""

    turn: int


class CancelParity(Fact, frozen=True, kw_only=True):
    """Cancels the making of parity shards."""

    turn: int
    reason: str


class DropShards(Fact, frozen=True, kw_only=True):
    """All hosts have this round's shards in the other buffer: those in this one may be deleted."""

    turn: int
    half: int


class RebuildImage(Fact, frozen=True, kw_only=True):
    """Orders the image of ``rank`` to be decoded into this slot, which nobody else writes to.

    ``half``: the buffer with the complete shards. ``places``: the hosts that have the attempt's
    images, by rank.
    """

    slot: int
    attempt: str
    rank: int
    half: int
    places: dict[int, str]
    ports: dict[str, int] = msgspec.field(default_factory=dict)
    """Ports where hosts serve images now, if they differ from those agreed on at the start."""


class CancelRebuild(Fact, frozen=True, kw_only=True):
    """Cancels all decoding into slots of this host."""

    reason: str


ParityToCoordinator = (
    ImagesListed
    | ParityReady
    | ParityComplete
    | ParityFailed
    | ShardsDropped
    | RebuildComplete
    | RebuildFailed
    | ImageLost
    | ShardLost
)
ParityToHand = (
    ListImages
    | MakeParity
    | BeginParity
    | CancelParity
    | DropParity
    | DropShards
    | RebuildImage
    | CancelRebuild
)
