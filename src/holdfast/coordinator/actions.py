"""What the coordinator wants done: values, which the keeper carries out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.snapshot import messages as m
from holdfast.snapshot.rings import RingNeed


@dataclass(frozen=True, slots=True)
class Tell:
    """Send ``message`` to ``rank`` (None: to all ranks)."""

    message: m.Message
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Allocate:
    """Make slot ``slot`` with room for an image of this size; report back."""

    slot: int
    capacity_bytes: int
    leave_bytes: int = 0
    """How much room must be left when it is made, or it is not made."""


@dataclass(frozen=True, slots=True)
class AllocateRings:
    """Make these rings out of what room there is, all or none; report back."""

    needs: tuple[RingNeed, ...]


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete slot ``slot``: nothing refers to it any more."""

    slot: int


@dataclass(frozen=True, slots=True)
class GiveSlot:
    """Stamp the slot's record as being written for this attempt, then send the grant."""

    slot: int
    rank: int
    attempt: str


@dataclass(frozen=True, slots=True)
class KeepLayout:
    """Remember the bytes of this layout beside the slots."""

    hash: str
    data: bytes


@dataclass(frozen=True, slots=True)
class StartPersist:
    """Make the attempt durable; parts of it that are not captured yet will follow."""

    attempt: str


@dataclass(frozen=True, slots=True)
class AbortPersist:
    """The attempt came to nothing; leave no trace of it in storage."""

    attempt: str


@dataclass(frozen=True, slots=True)
class Note:
    """Something for the report: a generation is complete, or came to nothing."""

    attempt: str
    step: int
    what: str  # "complete" | "missed"
    reason: str = ""
    overtaken: bool = False
    leaf: str = ""
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NoteUnlike:
    """For the report: replicas are not the same."""

    message: m.ReplicasDiffer


@dataclass(frozen=True, slots=True)
class Warn:
    """Something a person should look at; nothing was lost."""

    text: str


Action = (
    Tell | Allocate | AllocateRings | Remove | GiveSlot | KeepLayout | StartPersist
    | AbortPersist | Note | NoteUnlike | Warn
)  # fmt: skip


def skip(step: int, reason: str, *, is_passing: bool = True) -> list[Action]:
    """No rank captures ``step``; ``is_passing``: a durable save of it is due at the next one."""
    told = m.Skip(step=step, reason=reason, is_passing=is_passing)
    return [Tell(told), Note("", step, "missed", reason)]


def skip_all(missed: Iterable[tuple[int, str]]) -> list[Action]:
    """Several steps, each with its reason."""
    return [action for step, reason in missed for action in skip(step, reason)]


def abort(
    attempt: str, step: int, reason: str, leaf: str, *, is_lost: bool = False
) -> list[Action]:
    """What was captured of an attempt is thrown away on all ranks."""
    told = m.Aborted(
        step=step, attempt=attempt, reason=reason, leaf=leaf, overtaken=bool(leaf), is_lost=is_lost
    )
    return [Tell(told), Note(attempt, step, "missed", reason, bool(leaf), leaf)]
