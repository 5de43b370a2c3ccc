"""Facts around a coordinator: processes, what they were told, what slots hold and say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from holdfast.coordinator.slots import SlotWriter
from holdfast.protocol.messages import NO_ORDER, StandingOrder

Generation = tuple[int, int]


@dataclass(frozen=True)
class Save:
    """One save that every rank makes; they are counted by their steps."""

    durable: bool
    exact: bool
    values_bytes: int


@dataclass
class Process:
    """One start of one rank, as it is: what it hears, and what it writes to."""

    pid: int
    rank: int
    incarnation: int
    alive: bool = True
    connected: bool = True
    done: int = 0
    """How many of the saves it has begun."""
    order: StandingOrder = NO_ORDER
    """What it wanted durable, and what no step that it was told to be durable pays."""
    updates: int = 0
    """How many updates it had behind it when it asked last."""
    is_ahead: bool = False
    """Whether its next save is asked for an update later than by the others, by a signal say."""
    waits_for: int | None = None
    writes: str | None = None
    """The attempt it copies for, in the slot ``slot``."""
    slot: int = -1
    inbox: list[Any] = field(default_factory=list)

    @property
    def writer(self) -> SlotWriter:
        return SlotWriter(self.pid, 1)


def is_idle(process: Process) -> bool:
    """Whether it may make its next save."""
    return process.writes is None and process.waits_for is None


@dataclass(frozen=True)
class Grant:
    """What the keeper sends for GiveSlot."""

    step: int
    attempt: str
    slot: int


@dataclass
class Content:
    """What a slot really holds."""

    attempt: str
    rank: int
    generation: Generation
    whole: bool = False
    updates: int = field(default=0, compare=False)
    """Of what update it is."""


@dataclass
class Record:
    """What a slot says of itself to a keeper that starts later."""

    state: str
    attempt: str
    rank: int
    generation: Generation
    world: int
    writer: SlotWriter
    image_bytes: int
    is_ring: bool = False
    layout: str = "layout"
    updates: int = 0
