"""A coordinator with memory and ranks that do what they are told, for tests of its transitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from holdfast.coordinator.actions import (
    Action,
    AgreeLayout,
    AllocateSlots,
    GrantSlot,
    PlanImages,
    SendMessage,
)
from holdfast.coordinator.coordinator import Coordinator
from holdfast.coordinator.layouts import Tables, agree_layout
from holdfast.coordinator.slots import SlotWriter
from holdfast.geometry.layout import (
    REPLICATE,
    Instance,
    LeafEntry,
    Mesh,
    deflate,
    table_hash,
    table_to_json,
)
from holdfast.protocol import messages as m
from holdfast.protocol.image_plan import plan_sizes

M = TypeVar("M", bound=m.Message)
A = TypeVar("A", bound=Action)
Actions = Sequence[Action]
GRANT_S, CAPTURE_S = 30.0, 600.0


def told(actions: Actions, kind: type[M]) -> list[M]:
    """What is said to the ranks, of one kind."""
    return [
        a.message for a in actions if isinstance(a, SendMessage) and isinstance(a.message, kind)
    ]


def of(actions: Actions, kind: type[A]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


#: What ranks say when they are asked for their tables, by hash.
TABLES: dict[str, bytes] = {}


def table(world: int, dtype: str = "F32", shape: tuple[int, ...] = (8,)) -> bytes:
    mesh = Mesh((world,), tuple(range(world)))
    return declared([LeafEntry("w", dtype, shape, "split", Instance(mesh, (REPLICATE,)))])


def declared(entries: Sequence[LeafEntry]) -> bytes:
    """The table of these leaves, which any rank that is asked for it has."""
    data = table_to_json(entries)
    TABLES[table_hash(data)] = data
    return data


def remembers_nothing(_: Tables) -> None:
    """An arena without layouts."""


class Keeper:
    """A coordinator, with its memory always at hand and all ranks of one mind."""

    def __init__(self, world: int = 2, *, adopted: bool = True) -> None:
        self.c = Coordinator(keeper="k", grant_deadline_s=GRANT_S, capture_deadline_s=CAPTURE_S)
        self.has_memory = True
        self.remembered: Callable[[Tables], bytes | None] = remembers_nothing
        self.begin(1, world)
        if adopted:
            self.c.adopt(0.0)

    def begin(self, incarnation: int, world: int) -> Actions:
        self.world = world
        actions = self.c.begin(incarnation, f"{incarnation:08x}", world)
        for rank in range(world):
            self.c.join(rank, self.writer(rank))
        return actions

    def writer(self, rank: int) -> SlotWriter:
        return SlotWriter(1000 * self.c.incarnation + rank, 7)

    def ask(
        self,
        rank: int,
        step: int,
        *,
        durable: bool = False,
        exact: bool = False,
        values: int = 10,
        dtype: str = "F32",
        now_s: float = 0.0,
        updates: dict[str, int] | None = None,
        is_copying: bool = True,
        spare_ms: int = 0,
    ) -> list[Action]:
        data = table(self.world, dtype)
        ask = m.RequestCapture(
            step=step,
            table=table_hash(data),
            values_bytes=values,
            durable=durable,
            exact=exact,
            updates=tuple((updates or {}).items()),
            is_copying=is_copying,
            spare_ms=spare_ms,
        )
        return self.with_memory(self.c.request_capture(rank, ask, now_s))

    def with_memory(self, actions: list[Action]) -> list[Action]:
        found = list(actions)
        for action in of(actions, AllocateSlots) if self.has_memory else []:
            found += self.with_memory(self.c.lifecycle.allocated(action.slot))
        for order in of(actions, AgreeLayout):
            agreement = agree_layout(self.remembered, order.tables, order.held)
            ended = self.c.layout_agreed(order.tables, agreement, self.c.lifecycle.now_s)
            found += self.with_memory(ended)
        for wanted in told(actions, m.RequestTable):
            said = deflate(TABLES[wanted.hash])
            found += self.with_memory(self.c.table(wanted.hash, said, self.c.lifecycle.now_s))
        for plan in of(actions, PlanImages):
            sizes = plan_sizes(plan.layout, plan.ranks)
            found += self.with_memory(
                self.c.images_planned(plan.layout.hash, sizes, self.c.lifecycle.now_s)
            )
        return found

    def ask_all(
        self,
        step: int,
        *,
        durable: bool = False,
        exact: bool = False,
        values: int = 10,
        now_s: float = 0.0,
    ) -> list[Action]:
        actions: list[Action] = []
        for rank in range(self.world):
            actions += self.ask(
                rank, step, durable=durable, exact=exact, values=values, now_s=now_s
            )
        return actions

    def seal(self, rank: int, attempt: str, now_s: float = 0.0) -> list[Action]:
        size = self.c.slots[self.c.attempts[attempt].slots[rank]].image_bytes
        seal = m.Captured(attempt=attempt, image_bytes=size, header_xxh3="h", table_xxh3="t")
        return self.with_memory(self.c.lifecycle.captured(rank, seal, now_s))

    def capture(
        self, step: int, *, durable: bool = False, exact: bool = False, values: int = 10
    ) -> str:
        """A whole save; the name of its attempt."""
        actions = self.ask_all(step, durable=durable, exact=exact, values=values)
        attempt = granted(actions)
        for rank in range(self.world):
            self.seal(rank, attempt)
        return attempt

    def slots(self, attempt: str) -> set[int]:
        return set(self.c.attempts[attempt].slots.values())

    def states(self) -> list[str]:
        return sorted(slot.state for slot in self.c.slots.values())


def granted(actions: Actions) -> str:
    (attempt,) = {give.attempt for give in of(actions, GrantSlot)}
    return attempt
