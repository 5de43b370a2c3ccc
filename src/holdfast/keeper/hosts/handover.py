"""Handover of slots, layouts and incarnation records from followers to a new coordinator.

To write the images of its followers, a coordinator that was not running at the capture needs the
layout, and the incarnation's record. It asks the follower that has the images.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from holdfast.coordinator.attempts import Attempt
from holdfast.coordinator.coordinator import Coordinator
from holdfast.coordinator.slots import Slot, SlotWriter, slot_id_of
from holdfast.errors import FormatError, HoldfastError
from holdfast.events import warn
from holdfast.format.manifest import AttemptId, Incarnation, seal, unseal
from holdfast.geometry.layout import deflate, inflate
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.hosts import messages
from holdfast.keeper.hosts.facts import Fact
from holdfast.keeper.incarnations import Incarnations
from holdfast.keeper.jobs import Background


class StateHandover:
    """The coordinator's side of the handover; lives on the keeper's loop."""

    def __init__(
        self,
        memory: ArenaFiles,
        coordinator: Coordinator,
        incarnations: Incarnations,
        background: Background,
    ) -> None:
        self._memory = memory
        self._coordinator = coordinator
        self._incarnations = incarnations
        self._background = background

    def attach_reply(
        self, attempts: Iterable[Attempt], recorded: Collection[int]
    ) -> messages.HostAttached:
        """Answer a follower's inventory with a request for what is unknown here.

        All its incarnation records are requested: storage may lack an ancestor of this incarnation.
        """
        layouts = sorted({attempt.layout for attempt in attempts})
        numbers = {attempt.incarnation for attempt in attempts}
        remembered = {one.n for one in self._memory.incarnations()}
        here = remembered | {self._coordinator.incarnation}
        for n in numbers - here:  # storage may have it, even if the follower does not
            self._background.spawn(self._background.in_thread(self._incarnations.repair, n))
        return messages.HostAttached(
            tell_layouts=tuple(
                hash_ for hash_ in layouts if not self._memory.is_layout_intact(hash_)
            ),
            tell_incarnations=tuple(sorted((numbers | set(recorded)) - here)),
        )

    def current(self) -> messages.RecordIncarnation | None:
        """Return the record of the current incarnation for all followers, once its parent is
        recorded.
        """
        incarnation = self._incarnations.current
        if incarnation is None:
            return None
        return messages.RecordIncarnation(
            n=incarnation.n,
            data=seal(incarnation),
            held=tuple(self._held()),
            is_recorded=self._incarnations.is_recorded,
            parent=self._parent_of(incarnation),
        )

    def _parent_of(self, incarnation: Incarnation) -> bytes:
        number = 0 if incarnation.parent is None else incarnation.parent[0]
        found = self._incarnations.remembered(number)
        return b"" if found is None else seal(found)

    def _held(self) -> set[int]:
        return {attempt.incarnation for attempt in self._coordinator.attempts.values()}

    def store_reply(
        self, name: str, fact: messages.LayoutReply | messages.IncarnationReply
    ) -> None:
        """Store a reply. Raises FormatError if its content does not match its name."""
        try:
            match fact:
                case messages.LayoutReply(hash=hash_, deflated=deflated):
                    data = inflate(deflated, hash_)
                    self._memory.store_layout(hash_, data, self._coordinator.used_layouts)
                case messages.IncarnationReply(data=data):
                    incarnation = unseal(Incarnation, data, f"an incarnation of host {name}")
                    if incarnation.run_id != self._memory.run_id:
                        raise FormatError(f"host {name} tells of run {incarnation.run_id}")
                    if self._incarnations.remembered(incarnation.n) is None:
                        self._memory.store_incarnation(incarnation)
        except OSError as error:
            warn(f"what host {name} knows is not remembered here: {error}")


def answer_handover(memory: ArenaFiles, asked: messages.HostAttached) -> list[Fact]:
    """Return the follower's replies to a request for layouts and incarnation records."""
    known: list[Fact] = []
    for hash_ in asked.tell_layouts:
        try:
            deflated = deflate(memory.layout(hash_))
            known.append(messages.LayoutReply(hash=hash_, deflated=deflated))
        except HoldfastError as error:
            warn(f"the coordinator does not know layout {hash_}: {error}")
    if asked.tell_incarnations:
        known += [
            messages.IncarnationReply(data=seal(one))
            for one in memory.incarnations()
            if one.n in asked.tell_incarnations
        ]
    return known


def describe(slots: list[Slot], attempts: list[Attempt]) -> tuple[messages.SlotInventory, ...]:
    """Convert an arena's discovered slots into a message for the coordinator."""
    by_id = {attempt.id: attempt for attempt in attempts}
    found = []
    for slot in slots:
        attempt = by_id.get(slot.attempt)
        unknown = AttemptId(slot.incarnation, -1, slot.attempt, 0, "")
        writer = slot.writer or SlotWriter(0, 0)
        found.append(
            messages.SlotInventory(
                number=slot.id,
                capacity_bytes=slot.capacity_bytes,
                state=slot.state,
                attempt_id=attempt.attempt_id if attempt else unknown,
                image=slot.image,
                writer_pid=writer.pid,
                writer_start=writer.start,
                is_ring=slot.is_ring,
                ring_bytes=slot.ring_bytes,
                nonce=attempt.nonce if attempt else "",
            )
        )
    return tuple(found)


def from_inventory(
    host: int, found: tuple[messages.SlotInventory, ...]
) -> tuple[list[Slot], list[Attempt]]:
    """Convert a follower's inventory into slots and attempts with the ids of this incarnation."""
    slots: list[Slot] = []
    attempts: dict[str, Attempt] = {}
    for one in found:
        slot = Slot(slot_id_of(host, one.number), one.capacity_bytes, one.state)
        slot.is_ring, slot.ring_bytes = one.is_ring, one.ring_bytes
        slots.append(slot)
        if one.state not in ("captured", "quarantined"):
            slot.state = "free"
            continue
        of, slot.image = one.attempt_id, one.image
        slot.attempt = of.attempt
        if one.state == "quarantined":
            slot.writer = SlotWriter(one.writer_pid, one.writer_start)
            slot.incarnation = of.incarnation
            continue
        said = Attempt(of.attempt, of.incarnation, of.step, of.world, of.layout)
        said.nonce = one.nonce
        attempts.setdefault(said.id, said).slots.setdefault(slot.rank, slot.id)
    return slots, list(attempts.values())
