"""Carries out what the coordinator decides: messages, slots, layouts, and jobs for storage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from holdfast.errors import ArenaError, HoldfastError
from holdfast.events import SnapshotCaptured, SnapshotMissed, Warned, emit
from holdfast.keeper import control
from holdfast.keeper.background import Background
from holdfast.keeper.connection import Ranks
from holdfast.keeper.hands import Hands
from holdfast.keeper.incarnations import Incarnations, RootAccess
from holdfast.keeper.jobs import Jobs
from holdfast.keeper.learning import Learning
from holdfast.keeper.making import SlotMaker
from holdfast.keeper.memory import Memory
from holdfast.keeper.offering import Offering
from holdfast.snapshot import messages as m
from holdfast.snapshot.actions import (
    AbortPersist,
    Action,
    Allocate,
    AllocateRings,
    GiveSlot,
    KeepLayout,
    Note,
    NoteUnlike,
    Remove,
    StartPersist,
    Tell,
    Warn,
)
from holdfast.snapshot.arena import SlotRecord
from holdfast.snapshot.attempts import Attempt
from holdfast.snapshot.handoff import Coordinator
from holdfast.snapshot.slots import Writer, host_of, number_of
from holdfast.snapshot.unlike import events_of


class Executor:
    """The coordinator's hands; used on the keeper's loop.

    ``persist_ended`` and ``pruned`` are for any thread.
    """

    def __init__(
        self, coordinator: Coordinator, memory: Memory, ranks: Ranks, background: Background,
        superseded: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._coordinator = coordinator
        self._memory = memory
        self._ranks = ranks
        self._background = background
        self.hands = Hands(coordinator, background, self.carry_out, self._ring_told, superseded)
        self.jobs = Jobs(memory, coordinator, self._ring_freed, self._write_broke, self.hands.share)
        self.maker = SlotMaker(coordinator, memory, background, self.carry_out)
        self.offering = Offering(memory)
        self.refusals: dict[str, str] = {}
        """Why storage would not take an attempt that is still in memory."""

    def connect(self, root: RootAccess, incarnations: Incarnations) -> None:
        """Where jobs go, and whose they are. (The root's persister reports back to this.)"""
        self._root, self._incarnations = root, incarnations
        self.hands.learn_by(
            Learning(self._memory, self._coordinator, incarnations, self._background)
        )

    def carry_out(self, actions: Sequence[Action]) -> None:
        """All of them, in order."""
        held = self._coordinator.attempts
        for action in actions:
            match action:
                case Tell(message, rank):
                    self._ranks.tell(message, rank)
                case Allocate() | AllocateRings() | Remove():
                    self._change_memory(action)
                case KeepLayout(hash_, data):
                    self._keep_layout(hash_, data)
                case GiveSlot(_, _, attempt) | StartPersist(attempt) if attempt not in held:
                    pass  # its layout could not be kept
                case GiveSlot(slot, rank, attempt):
                    self._give(slot, rank, attempt)
                case StartPersist(attempt):
                    self._start_job(held[attempt])
                case AbortPersist(attempt):
                    self._abort_job(attempt)
                case Note():
                    self._note(action)
                case NoteUnlike() | Warn():
                    self._say(action)

    def _change_memory(self, action: Allocate | AllocateRings | Remove) -> None:
        match action:
            case Allocate(slot, capacity, leave) if host_of(slot):
                self.hands.say(slot, control.Make(
                    slot=number_of(slot), capacity_bytes=capacity, leave_bytes=leave
                ))  # fmt: skip
            case Allocate(slot, capacity, leave):
                self.maker.make(slot, capacity, leave)
            case AllocateRings(needs) if host_of(needs[0].slot):
                made = tuple((number_of(n.slot), n.head_bytes, n.data_bytes) for n in needs)
                self.hands.say(needs[0].slot, control.MakeRings(needs=made))
            case AllocateRings(needs):
                self.maker.make_rings(needs)
            case Remove(slot) if host_of(slot):
                self.hands.say(slot, control.Remove(slot=number_of(slot)))
            case Remove(slot):
                self.offering.withdraw(slot)
                self.maker.remove(slot)

    def _abort_job(self, attempt_id: str) -> None:
        if not self.jobs.abort(attempt_id):  # storage never began with it
            self.carry_out(self._coordinator.persist_ended(attempt_id))

    def _keep_layout(self, hash_: str, data: bytes) -> None:
        used = {one.layout for one in self._coordinator.attempts.values()}
        self.hands.say_all(control.KeepLayout(hash=hash_, data=data, used=tuple(used)))
        try:
            self._memory.keep_layout(hash_, data, used)
        except OSError as error:
            where = self._memory.directory
            reason = f"no room for the layout: {error.strerror}. Free some in {where}"
            self.carry_out(self._coordinator.layout_not_kept(hash_, reason))

    # ── slots ────────────────────────────────────────────────────────────────────────────

    def _give(self, slot_id: int, rank: int, attempt_id: str) -> None:
        attempt = self._coordinator.attempts[attempt_id]
        slot = self._coordinator.slots[slot_id]
        writer = slot.writer or Writer(0, 0)
        record = SlotRecord(
            state="writing", boot_id=self._memory.boot_id, run_id=self._memory.run_id,
            incarnation=attempt.incarnation, nonce=self._coordinator.nonce, step=attempt.step,
            attempt=attempt_id, rank=rank, world=attempt.world, layout=attempt.layout,
            writer_pid=writer.pid, writer_start=writer.start, ring_bytes=slot.ring_bytes,
            hosts=attempt.hosts,
        )  # fmt: skip
        if host_of(slot_id):
            self.hands.say(slot_id, control.Stamp(slot=number_of(slot_id), record=record))
        else:
            self.offering.withdraw(slot_id)
            self._memory.stamp(slot_id, record)
        grant = m.Grant(
            step=attempt.step, attempt=attempt_id, slot=self.path_of(slot_id),
            durable=attempt.durable, layout=attempt.layout, ring_bytes=slot.ring_bytes,
            turn=attempt.asks[rank].turn, hosts=attempt.hosts,
            compare=self._coordinator.comparing.part(attempt_id),
        )  # fmt: skip
        self._ranks.tell(grant, rank)

    def path_of(self, slot_id: int) -> str:
        """Where a slot lies, on its own host."""
        if host_of(slot_id):
            return self.hands.slot_path(slot_id)
        return str(self._memory.slot_path(slot_id))

    def captured(self, attempt_id: str, rank: int) -> None:
        """A rank says that its image is sealed: whoever writes or offers it may."""
        self.jobs.sealed(attempt_id)
        attempt = self._coordinator.attempts.get(attempt_id)
        if attempt is None or rank not in attempt.sealed:
            return
        slot = self._coordinator.slots[attempt.slots[rank]]
        if host_of(slot.id):
            self.hands.sealed(attempt, rank)
        elif not slot.is_ring:
            self.offering.offer(
                slot.id, attempt_id, rank, attempt.incarnation, attempt.step, slot.image_bytes,
                attempt.layout,
            )  # fmt: skip

    def _note(self, note: Note) -> None:
        coordinator = self._coordinator
        if note.what == "missed":
            emit(SnapshotMissed(
                incarnation=coordinator.incarnation, step=note.step, reason=note.reason,
                overtaken=note.overtaken, leaf=note.leaf,
            ))  # fmt: skip
            return
        emit(SnapshotCaptured(
            incarnation=coordinator.incarnation, step=note.step, world=coordinator.world,
            elapsed_s=note.elapsed_s,
        ))  # fmt: skip
        if self.hands.protecting is not None:
            self.hands.protecting.captured(note.attempt)
        else:
            self._memory.drop_parity()
        self.carry_out(coordinator.spares())

    def _say(self, action: NoteUnlike | Warn) -> None:
        match action:
            case NoteUnlike(message):
                for event in events_of(message, self._coordinator.incarnation, -1):
                    emit(event)
            case Warn(text):
                emit(Warned(message=text))

    # ── making durable ───────────────────────────────────────────────────────────────────

    def _start_job(self, attempt: Attempt) -> None:
        incarnation, persister = self._incarnations.of(attempt), self._root.persister
        try:
            if persister is None or incarnation is None:
                raise ArenaError(f"it is not known how incarnation {attempt.incarnation} began")
            persister.submit(self.jobs.start(attempt, incarnation))
        except HoldfastError as error:
            self.persist_ended(attempt.id, str(error))

    def persist_ended(self, attempt_id: str, reason: str | None) -> None:
        """Hear how it went (None: well); called on the persister's thread."""
        self._background.from_thread(lambda: self._settle(attempt_id, reason))

    def pruned(self, attempt_id: str) -> None:
        """Storage is done with what an attempt replaced, too; on the persister's thread."""
        self._background.from_thread(
            lambda: self.carry_out(self._coordinator.persist_ended(attempt_id))
        )

    def _settle(self, attempt_id: str, reason: str | None) -> None:
        self.jobs.ended(attempt_id)
        held = self._coordinator.attempts
        self.refusals = {id_: why for id_, why in self.refusals.items() if id_ in held}
        if attempt_id not in held:
            self.carry_out(self._coordinator.persist_ended(attempt_id))
        elif reason is None:
            self.carry_out(self._coordinator.persisted(attempt_id))
        else:
            self.refusals[attempt_id] = reason
            self.carry_out(self._coordinator.persist_failed(attempt_id, reason))

    # ── rings ────────────────────────────────────────────────────────────────────────────

    def _ring_freed(self, attempt_id: str, rank: int, size_bytes: int) -> None:
        """On a writer's thread: the beginning of an image is stored."""
        self._background.from_thread(lambda: self._ring_told(attempt_id, rank, size_bytes))

    def _ring_told(self, attempt_id: str, rank: int, size_bytes: int) -> None:
        self._coordinator.ring_moved(attempt_id, time.monotonic())
        self._ranks.tell(m.Freed(attempt=attempt_id, size_bytes=size_bytes), rank)

    def _write_broke(self, attempt_id: str, reason: str) -> None:
        """On the persister's thread: an image cannot be written."""
        self._background.from_thread(
            lambda: self.carry_out(self._coordinator.write_broke(attempt_id, reason))
        )
