"""What trainers and keeper say to each other: small facts, never bytes of the state.

A frame is a 4-byte little-endian length and one MessagePack object, on a unix socket. Every
conversation starts with ``Hello``. ``seq`` pairs a request with its answer; everything else
is told as it happens.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.errors import FormatError

PROTOCOL = 6
MAX_FRAME_BYTES = 256 << 20


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The common ancestor."""


# ── trainer to keeper ────────────────────────────────────────────────────────────────────


class Hello(Message, frozen=True, kw_only=True):
    """Who calls. The keeper takes the process id from the socket, not from here."""

    protocol: int = PROTOCOL
    run_id: str
    root: str


class HostPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A host of the run in this incarnation. The first in a table is the coordinator's."""

    id: str
    ranks: tuple[int, ...]
    address: str = ""
    domain: str = ""
    """What it fails together with: HOLDFAST_FAILURE_DOMAIN there."""
    parity_rate: int = 0
    """Bytes a second, at most, that it takes for parity (HOLDFAST_PARITY_RATE); 0: no bound."""
    port: int = 0
    """Where its keeper serves its peers."""
    control_port: int = 0
    """Where the coordinator listens for the keepers of the other hosts; 0 elsewhere."""


class Begin(Message, frozen=True, kw_only=True):
    """Rank 0: a new incarnation starts; all older ones are fenced off."""

    nonce: str
    world: int
    hosts: tuple[HostPlace, ...] = ()
    """Where its ranks are; none for a run on one host."""
    after: int = 0
    """The newest incarnation that the keeper of any other host knows."""


class Survey(Message, frozen=True, kw_only=True):
    """One rank of each host, before an incarnation begins: what do you know, where do you listen?

    For a run on several hosts, whose keepers are to reach each other at ``address``.
    """

    secret: bytes
    address: str
    is_coordinator: bool


class TakePart(Message, frozen=True, kw_only=True):
    """This host's keeper is one of several in an incarnation: number ``host`` of the table.

    Number 0 coordinates. The others do its bidding, and have its word for their ranks.
    """

    incarnation: int
    nonce: str
    hosts: tuple[HostPlace, ...]
    host: int
    secret: bytes
    within_s: float = 0.0
    """How long the coordinator is waited for."""


class Join(Message, frozen=True, kw_only=True):
    """A rank takes its place in the incarnation."""

    incarnation: int
    nonce: str
    rank: int
    keep_last: int | None = None
    keep_every: int | None = None
    persist_at_end: bool = True
    is_copying: bool = True
    """Whether it may write to any slot. False only when its copier is known to have stopped."""
    owes_durable: bool = False
    """Whether a durable save it was promised by an earlier keeper was never told to be durable."""
    compare_replicas: int | None = None
    """In how many saves all replicas are compared; 0: never, None: as is cheap."""
    parity: int = 0
    """How many hosts of a group may be lost with what they have in memory."""


class ListInventory(Message, frozen=True, kw_only=True):
    """What generations are in memory, and what incarnations are known?"""


class Pin(Message, frozen=True, kw_only=True):
    """Rank 0: keep the slots of this attempt until a new generation is complete."""

    attempt: str


class Adopt(Message, frozen=True, kw_only=True):
    """Rank 0: this incarnation goes on from ``parent`` (None: from nothing)."""

    parent: tuple[int, int] | None


class Table(Message, frozen=True, kw_only=True):
    """The leaves this rank holds, for the layout to be agreed on."""

    hash: str
    data: bytes


class Ask(Message, frozen=True, kw_only=True):
    """May this rank capture ``step``? Answered when all ranks have asked.

    ``durable`` with ``exact``: this very step. Without: a later one will do, when storage is
    still busy with an earlier one.
    """

    step: int
    table: str
    values_bytes: int
    durable: bool
    exact: bool = False
    turn: int = 0
    """Which of this rank's requests it is: a step that was given up can be asked for again."""


class Progress(Message, frozen=True, kw_only=True):
    """The first ``size_bytes`` of the image are copied (for a durable attempt)."""

    attempt: str
    size_bytes: int


class Captured(Message, frozen=True, kw_only=True):
    """This rank's image is sealed in its slot."""

    attempt: str
    image_bytes: int
    header_xxh3: str
    table_xxh3: str
    sums: tuple[bytes, ...] = ()
    """Of what is held alike by others: for each group this rank is in, the sums of its tiles."""
    same_since: int = -2
    """The earlier step whose parameters are these, though they were trained; see ``standing``."""


class Abandon(Message, frozen=True, kw_only=True):
    """This rank will not seal its image; nobody may use the attempt."""

    attempt: str
    reason: str
    leaf: str = ""
    has_stopped: bool = True
    """Whether it is known that nothing more is written to the slot."""


class Withdraw(Message, frozen=True, kw_only=True):
    """This rank no longer waits for the answer to its ``Ask`` of ``step``."""

    step: int


class Decline(Message, frozen=True, kw_only=True):
    """This rank cannot save ``step`` at all; the others need not wait for it."""

    step: int
    reason: str
    is_passing: bool = False
    """Whether it may save it yet: when it asks for it again."""


class MakeDurable(Message, frozen=True, kw_only=True):
    """The captured ``step`` is to be made durable after all; ``newest``: whatever is newest."""

    step: int
    newest: bool = False


#: What ranks announce beside their policies' names: a last step, and a durable save once more.
PREEMPTED, MISSED = "preempted", "missed"


class Announce(Message, frozen=True, kw_only=True):
    """A save is due; all ranks act on it at ``step``. ``which`` policy: its name, or why."""

    step: int
    which: str


class Explain(Message, frozen=True, kw_only=True):
    """Who or what does the save of ``step`` wait for?"""

    step: int


class Goodbye(Message, frozen=True, kw_only=True):
    """This rank ends in order."""


# ── keeper to trainer ────────────────────────────────────────────────────────────────────


class Welcome(Message, frozen=True, kw_only=True):
    """The answer to ``Hello``."""

    pid: int


class Surveyed(Message, frozen=True, kw_only=True):
    """The answer to ``Survey``: the newest incarnation it knows, and its ports."""

    newest: int
    port: int
    control_port: int = 0


class Begun(Message, frozen=True, kw_only=True):
    """The number of the new incarnation."""

    incarnation: int


class Done(Message, frozen=True, kw_only=True):
    """The request was carried out."""


class Refused(Message, frozen=True, kw_only=True):
    """The request was not carried out; ``kind`` is the error's class name."""

    kind: str
    reason: str
    fields: dict[str, Any] = {}


class SlotInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One image in memory."""

    rank: int
    path: str
    image_bytes: int
    header_xxh3: str
    table_xxh3: str
    host: str = ""
    """Whose memory it is in; "" for the asker's own."""
    port: int = 0
    """Where that host's keeper gives it to others; 0: where the start agreed on."""


class HeldGeneration(msgspec.Struct, frozen=True, kw_only=True):
    """A generation all of whose images are in memory."""

    incarnation: int
    step: int
    attempt: str
    world: int
    layout: str
    slots: tuple[SlotInfo, ...]


class Inventory(Message, frozen=True, kw_only=True):
    """The answer to ``ListInventory``: generations, and parents of known incarnations."""

    generations: tuple[HeldGeneration, ...]
    parents: dict[int, tuple[int, int] | None]


# ── keeper to keeper ─────────────────────────────────────────────────────────────────────


class HeldImage(msgspec.Struct, frozen=True, kw_only=True):
    """One image in a host's memory."""

    rank: int
    image_bytes: int
    header_xxh3: str
    table_xxh3: str


class HeldPart(msgspec.Struct, frozen=True, kw_only=True):
    """What one host holds of an attempt."""

    incarnation: int
    step: int
    attempt: str
    world: int
    layout: str
    images: tuple[HeldImage, ...]
    parity: tuple[tuple[int, int], ...] = ()
    """(stripe, row) of each row of parity."""


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """One host's whole inventory, as its keeper offers it to its peers."""

    host: str
    address: str
    port: int
    parts: tuple[HeldPart, ...]
    parents: dict[int, tuple[int, int] | None]
    newest_incarnation: int


class Grant(Message, frozen=True, kw_only=True):
    """Capture ``step`` into this slot. ``layout`` is what all ranks agreed on."""

    step: int
    attempt: str
    slot: str
    durable: bool
    layout: str
    ring_bytes: int = 0
    """The image passes through the last so many bytes of the slot; 0: it is kept there whole."""
    compare: tuple[int, int | None] | None = None
    """(turn, of so many, None: as is cheap): which part of what ranks hold alike is summed."""
    turn: int = 0
    """The request that it answers."""
    hosts: int = 1
    """On how many hosts the ranks are."""


class Freed(Message, frozen=True, kw_only=True):
    """The first ``size_bytes`` of the image are written: their room in the ring is free again."""

    attempt: str
    size_bytes: int


class LayoutAgreed(Message, frozen=True, kw_only=True):
    """The layout with this hash, sent before the first grant that names it."""

    hash: str
    data: bytes


class Skip(Message, frozen=True, kw_only=True):
    """No rank captures ``step``. ``is_passing``: a later step may well be captured."""

    step: int
    reason: str
    is_passing: bool = True


class Unlike(msgspec.Struct, frozen=True, kw_only=True):
    """A leaf that is not the same on all ranks that hold it; see ``events.ReplicasDiffer``."""

    leaf: str
    box: str
    ranks: tuple[int, ...]
    replicas: int
    is_known_which: bool


class ReplicasDiffer(Message, frozen=True, kw_only=True):
    """What all ranks captured is not the same where it should be; ``others``: leaves not listed."""

    step: int
    attempt: str
    leaves: tuple[Unlike, ...]
    others: int


class Complete(Message, frozen=True, kw_only=True):
    """All ranks captured this generation."""

    step: int
    attempt: str
    durable: bool


class Protected(Message, frozen=True, kw_only=True):
    """This generation survives the loss of hosts: its parity is whole on all of them."""

    step: int
    attempt: str


class Unprotected(Message, frozen=True, kw_only=True):
    """Parity of this generation could not be made; the next one is tried."""

    step: int
    attempt: str
    reason: str
    host: str = ""
    """Whose keeper says so; "" where none is to blame."""


class Aborted(Message, frozen=True, kw_only=True):
    """The attempt is thrown away on all ranks."""

    step: int
    attempt: str
    reason: str
    overtaken: bool = False
    leaf: str = ""
    is_lost: bool = False
    """Whether a rank or a keeper was lost, and it may well be taken again."""


class Durable(Message, frozen=True, kw_only=True):
    """A manifest names this generation; it also stands for the earlier steps in ``fulfils``."""

    step: int
    attempt: str
    fulfils: tuple[int, ...] = ()


class NotDurable(Message, frozen=True, kw_only=True):
    """Making this generation durable failed; the next one is made durable instead."""

    step: int
    attempt: str
    reason: str
    fulfils: tuple[int, ...] = ()
    in_memory: bool = True
    """Whether it is at least a snapshot; what passed through a ring is nothing then."""


class Announced(Message, frozen=True, kw_only=True):
    """The policy ``which`` is due at ``step`` on all ranks."""

    step: int
    which: str


class Explanation(Message, frozen=True, kw_only=True):
    """The answer to ``Explain``. ``is_whole``: all of it is in memory."""

    text: str
    is_whole: bool = False


class FencedOff(Message, frozen=True, kw_only=True):
    """A newer incarnation has begun; stop."""

    incarnation: int


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    seq: int
    message: (
        Hello | Begin | Survey | TakePart | Join | ListInventory | Pin | Adopt | Table | Ask
        | Progress | Captured | Abandon | Withdraw | Decline | MakeDurable | Announce | Explain
        | Goodbye | Surveyed | Welcome | Begun | Done | Refused | Inventory | Grant
        | LayoutAgreed | Skip | Complete | ReplicasDiffer | Aborted | Freed | Durable
        | NotDurable | Protected | Unprotected | Announced | Explanation | FencedOff
    )  # fmt: skip


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Frame)


def pack(message: Message, seq: int = 0) -> bytes:
    """One frame. ``seq`` 0: not part of a request."""
    body = _encoder.encode((seq, message))
    return len(body).to_bytes(4, "little") + body


def unpack(body: bytes) -> tuple[int, Message]:
    """(seq, message) of a frame's body; FormatError when it is none of ours."""
    try:
        frame = _decoder.decode(body)
    except (ValueError, RecursionError) as error:  # of msgspec's and of text not UTF-8
        raise FormatError(f"a message between trainer and keeper is malformed: {error}") from None
    return frame.seq, frame.message
