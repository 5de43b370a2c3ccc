"""What the coordinator and its hands say to each other of parity: made, lost and made anew.

See ``control``, over whose line it goes.
"""

from __future__ import annotations

import msgspec

from holdfast.keeper.facts import Fact
from holdfast.redundancy.records import MemberFact

# ── hand to coordinator ──────────────────────────────────────────────────────────────────


class HeldRows(msgspec.Struct, frozen=True, kw_only=True):
    """A row of parity that is whole."""

    half: int
    attempt: str
    members: tuple[str, ...]
    """The hosts of whose images they are made."""
    parity: int
    """Each of them keeps so many."""
    images: dict[int, int] = {}
    """The sizes of these images, by rank."""


class Heads(Fact, frozen=True, kw_only=True):
    """The images of this host that parity is to be made of; ``reason``: why they are not told."""

    turn: int
    member: MemberFact | None
    reason: str = ""


class ParityReady(Fact, frozen=True, kw_only=True):
    """The memory for the rows of this host is there; it waits for ``BeginParity``."""

    turn: int


class ParityMade(Fact, frozen=True, kw_only=True):
    """All rows that this host keeps are whole and sealed."""

    turn: int


class ParityNotMade(Fact, frozen=True, kw_only=True):
    """Some row of this host came to nothing."""

    turn: int
    reason: str


class ImageLost(Fact, frozen=True, kw_only=True):
    """An image in a slot was damaged, and could not be repaired: it is worth nothing."""

    slot: int
    attempt: str


class RowLost(Fact, frozen=True, kw_only=True):
    """A row of parity was damaged, and could not be made again: that of an attempt is not whole."""

    attempt: str


class Rebuilt(Fact, frozen=True, kw_only=True):
    """An image that no host had is whole in this slot: decoded, checked, and offered."""

    slot: int
    attempt: str
    rank: int
    image_bytes: int
    header_xxh3: str
    table_xxh3: str


class NotRebuilt(Fact, frozen=True, kw_only=True):
    """It could not be decoded; nothing is written to the slot any more."""

    slot: int
    attempt: str
    reason: str


class RowsDropped(Fact, frozen=True, kw_only=True):
    """What is offered here of the turn's images are its own rows, and no earlier ones."""

    turn: int


# ── coordinator to hand ──────────────────────────────────────────────────────────────────


class TellHeads(Fact, frozen=True, kw_only=True):
    """What images of this attempt are there, and what are their headers?"""

    turn: int
    attempt: str


class MakeParity(Fact, frozen=True, kw_only=True):
    """Have memory for the rows that this host keeps; they are to go into this half of it."""

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
    """Of the keepers of these members, where they give images now; 0 where that is as agreed."""
    rate_bytes_s: int | None = None
    """What each host of the group may pull in a second, and send; None: no bound."""


class DropParity(Fact, frozen=True, kw_only=True):
    """Nothing can be rebuilt any more from what is kept: its memory is free."""


class BeginParity(Fact, frozen=True, kw_only=True):
    """All hosts have the memory: make the rows."""

    turn: int


class GiveUpParity(Fact, frozen=True, kw_only=True):
    """They are not wanted any more."""

    turn: int
    reason: str


class DropRows(Fact, frozen=True, kw_only=True):
    """All hosts have rows of this turn's images in the other half: those in this one may go."""

    turn: int
    half: int


class Rebuild(Fact, frozen=True, kw_only=True):
    """Decode the image of ``rank`` into this slot, which nobody else writes to.

    ``half``: that of the rows which are complete. ``places``: the hosts that have images of the
    attempt, by rank.
    """

    slot: int
    attempt: str
    rank: int
    half: int
    places: dict[int, str]
    ports: dict[str, int] = msgspec.field(default_factory=dict)
    """Where hosts give images now, if that is not where the start agreed on."""


class GiveUpRebuild(Fact, frozen=True, kw_only=True):
    """Nothing more is to be decoded, and written to a slot that was given for it."""

    reason: str


ToCoordinator = (
    Heads | ParityReady | ParityMade | ParityNotMade | RowsDropped | Rebuilt | NotRebuilt
    | ImageLost | RowLost
)  # fmt: skip
ToHand = (
    TellHeads | MakeParity | BeginParity | GiveUpParity | DropParity | DropRows | Rebuild
    | GiveUpRebuild
)  # fmt: skip
