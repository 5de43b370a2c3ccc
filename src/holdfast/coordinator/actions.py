"""Actions that the coordinator returns: plain values, which the keeper executes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from holdfast.geometry.layout import Layout
from holdfast.protocol import messages as m
from holdfast.protocol.facts import ToFollower
from holdfast.protocol.image_plan import RingNeed

if TYPE_CHECKING:
    from holdfast.coordinator.layouts import Tables


class SendMessage(msgspec.Struct, frozen=True):
    """Send ``message`` to ``rank`` (None: to all ranks)."""

    message: m.Message
    rank: int | None = None


class AllocateSlots(ToFollower, frozen=True):
    """Orders a slot with room for an image of this size to be created, and the result reported."""

    slot: int
    capacity_bytes: int
    leave_bytes: int = 0
    """Free bytes that must remain after creation; otherwise the slot is not created."""


class AllocateRings(ToFollower, frozen=True):
    """Orders these rings of one host to be created from the available memory, all or none."""

    needs: tuple[RingNeed, ...]


class RemoveSlot(ToFollower, frozen=True):
    """Orders a slot's memory to be freed: nothing refers to it any more."""

    slot: int


class GrantSlot(msgspec.Struct, frozen=True):
    """Write the slot's record with state "writing" for this attempt, then send the grant."""

    slot: int
    rank: int
    attempt: str


class StoreLayout(msgspec.Struct, frozen=True):
    """Store the bytes of this layout beside the slots, on each host: ranks read them there."""

    hash: str
    data: bytes
    deflated: bytes = b""
    tables: Tables = ()
    """The tables that it was agreed from, for which it is remembered."""


class AgreeLayout(msgspec.Struct, frozen=True):
    """Find or merge the layout of these tables, of which some are ``held``, off the loop
    (``layouts.agree_layout``), and report it.
    """

    tables: Tables
    held: Mapping[str, bytes]


class PlanImages(msgspec.Struct, frozen=True):
    """Have this host plan the images of its ranks, off the loop, and report their sizes."""

    host: int
    layout: Layout
    ranks: tuple[int, ...]


class StartPersist(msgspec.Struct, frozen=True):
    """Start making the attempt durable; images that are not captured yet follow later."""

    attempt: str


class AbortPersist(msgspec.Struct, frozen=True):
    """Cancel the attempt's write and remove everything written for it from storage."""

    attempt: str


class ReportOutcome(msgspec.Struct, frozen=True):
    """Report the outcome of a generation as an event: complete or missed."""

    attempt: str
    step: int
    what: str  # "complete" | "missed"
    reason: str = ""
    overtaken: bool = False
    leaf: str = ""
    elapsed_s: float = 0.0
    wait_s: float = 0.0
    late_hosts: tuple[str, ...] = ()


class ReportReplicasDiffer(msgspec.Struct, frozen=True):
    """Report as an event that replicas differ."""

    message: m.ReplicaDifferences


class Warn(msgspec.Struct, frozen=True):
    """Report a warning that a person should see; nothing was lost."""

    text: str


Action = (
    SendMessage
    | AllocateSlots
    | AllocateRings
    | RemoveSlot
    | GrantSlot
    | StoreLayout
    | AgreeLayout
    | PlanImages
    | StartPersist
    | AbortPersist
    | ReportOutcome
    | ReportReplicasDiffer
    | Warn
)


def skip(
    step: int,
    reason: str,
    *,
    is_passing: bool = True,
    rank: int | None = None,
    late_hosts: tuple[str, ...] = (),
) -> list[Action]:
    """Tell all ranks that none captures ``step``; ``is_passing``: a durable save moves to the next
    step. ``rank``: the only one that waits for it. ``late_hosts``: waited for in vain.
    """
    told = m.Skip(step=step, reason=reason, is_passing=is_passing)
    return [
        SendMessage(told, rank),
        ReportOutcome("", step, "missed", reason, late_hosts=late_hosts),
    ]


def skip_all(missed: Iterable[tuple[int, str]]) -> list[Action]:
    """Skip several steps, each with its reason."""
    return [action for step, reason in missed for action in skip(step, reason)]


def abort(
    attempt: str, step: int, reason: str, leaf: str, *, is_lost: bool = False
) -> list[Action]:
    """Tell all ranks to discard what they captured of an attempt."""
    told = m.Aborted(
        step=step, attempt=attempt, reason=reason, leaf=leaf, overtaken=bool(leaf), is_lost=is_lost
    )
    return [SendMessage(told), ReportOutcome(attempt, step, "missed", reason, bool(leaf), leaf)]
