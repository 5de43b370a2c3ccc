"""The keepers of the other hosts, as the coordinator speaks to them and hears of them.

What a hand says becomes the same calls as what happens on this host. A hand whose line breaks is
lost with its ranks and slots, until it comes again.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from holdfast.errors import FormatError, HoldfastError, PeerError
from holdfast.events import Warned, emit
from holdfast.keeper import control, parity_facts
from holdfast.keeper.background import Background
from holdfast.keeper.connection import Connection, FarConnection
from holdfast.keeper.facts import Fact
from holdfast.keeper.images import Job
from holdfast.keeper.learning import Learning
from holdfast.keeper.shares import FarShare
from holdfast.persist.parts import Stored
from holdfast.snapshot import messages as m
from holdfast.snapshot.actions import Action
from holdfast.snapshot.arena import SLOT_SUFFIX
from holdfast.snapshot.attempts import Attempt
from holdfast.snapshot.handoff import Coordinator
from holdfast.snapshot.slots import Slot, Writer, host_of, number_of, slot_id_of

if TYPE_CHECKING:  # a run on one host needs none of it
    from holdfast.keeper.protecting import Protecting
    from holdfast.peers.control import ControlLine


class Talks(Protocol):
    """Who hears trainers, near and far."""

    async def hear(self, connection: Connection, seq: int, message: m.Message) -> None:
        """One message; it is answered."""
        ...

    def came(self, connection: Connection) -> None:
        """It may be heard from now on."""
        ...

    def gone(self, connection: Connection) -> None:
        """It is not heard any more."""
        ...


class _Trainer:
    """A trainer of another host; what it says is taken one after the other, as of those here."""

    def __init__(self, connection: FarConnection) -> None:
        self.connection = connection
        self.said: asyncio.Queue[bytes | None] = asyncio.Queue()


class FarHand:
    """One hand, from when its line stands until it breaks."""

    def __init__(self, host: int, line: ControlLine, arena: str) -> None:
        self.host, self.name, self.arena = host, line.peer, arena
        self.line = line
        self.trainers: dict[int, _Trainer] = {}
        self.shares: dict[str, FarShare] = {}
        self.watched: set[tuple[int, str]] = set()
        self.is_stopping = False
        self.port = 0

    def say(self, fact: Fact) -> None:
        """Queue it; a line that broke is noticed by who listens to it."""
        self.line.send(control.pack(fact))


class Hands:
    """All hands of this incarnation that are in reach. Lives on the keeper's loop."""

    def __init__(
        self, coordinator: Coordinator, background: Background,
        carry_out: Callable[[Sequence[Action]], None],
        ring_freed: Callable[[str, int, int], None],
        superseded: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._coordinator = coordinator
        self._background = background
        self._carry_out = carry_out
        self._ring_freed = ring_freed
        self._superseded = superseded
        self._talks: Talks | None = None
        self._hosts: Sequence[m.HostPlace] = ()
        self._incarnation = 0
        self._by_host: dict[int, FarHand] = {}
        self.protecting: Protecting | None = None
        """What makes parity of what all hosts have; None in a run on one."""

    def connect(self, talks: Talks) -> None:
        """Who hears the trainers of the other hosts."""
        self._talks = talks

    def learn_by(self, learning: Learning) -> None:
        """Where what hands know is remembered."""
        self._learning = learning

    def begin(self, incarnation: int, hosts: Sequence[m.HostPlace]) -> None:
        """The hands of this incarnation are to come; those of an older one are let go."""
        self._incarnation, self._hosts = incarnation, hosts
        for hand in list(self._by_host.values()):
            self._forget(hand, "a newer incarnation has begun")
            self._background.spawn(hand.line.finish())
        if self.protecting is not None:
            self.protecting.begin(hosts)

    def name_of(self, host: int) -> str:
        """What a host is called; "" in a run on one."""
        return self._hosts[host].id if host < len(self._hosts) else ""

    def port_of(self, host: int) -> int:
        """Where a host's keeper gives images to others now; 0 when that is not known."""
        hand = self._by_host.get(host)
        return hand.port if hand is not None else 0

    # ── saying ───────────────────────────────────────────────────────────────────────────

    def say(self, slot_id: int, fact: Fact) -> None:
        """To the hand of a slot's host, if it is in reach."""
        self.say_host(host_of(slot_id), fact)

    def say_host(self, host: int, fact: Fact) -> None:
        """To the hand of this host, if it is in reach."""
        hand = self._by_host.get(host)
        if hand is not None:
            hand.say(fact)

    def say_all(self, fact: Fact) -> None:
        """To all that are in reach."""
        for hand in self._by_host.values():
            hand.say(fact)

    def remember(self) -> None:
        """Have the hands know what this incarnation went on from: one of them may lead the next."""
        current = self._learning.current()
        if current is not None:
            self.say_all(current)

    def slot_path(self, slot_id: int) -> str:
        """Where a slot of another host lies there."""
        hand = self._by_host.get(host_of(slot_id))
        return f"{hand.arena if hand else ''}/{number_of(slot_id):05d}{SLOT_SUFFIX}"

    def watch(self, slot: Slot) -> None:
        """Have it told when nobody can write to this slot any more."""
        hand, key = self._by_host.get(host_of(slot.id)), (slot.id, slot.attempt)
        if hand is not None and key not in hand.watched:
            hand.watched.add(key)
            writer = slot.writer or Writer(0, 0)
            hand.say(control.Watch(
                slot=number_of(slot.id), attempt=slot.attempt, pid=writer.pid, start=writer.start
            ))  # fmt: skip

    @property
    def are_stopping(self) -> bool:
        """Whether one of them was told to stop, and awaits what is still to be saved."""
        return any(hand.is_stopping for hand in self._by_host.values())

    def let_stop(self) -> None:
        """Nothing is to be saved any more before they stop."""
        for hand in self._by_host.values():
            if hand.is_stopping:
                hand.is_stopping = False
                hand.say(control.MayStop())

    async def finish(self) -> None:
        """End all lines, when what was said has arrived."""
        hands = list(self._by_host.values())
        self._by_host.clear()
        await asyncio.gather(*(hand.line.finish() for hand in hands))

    # ── storage ──────────────────────────────────────────────────────────────────────────

    def share(self, job: Job, host: int, ranks: frozenset[int]) -> FarShare:
        """What stands for the images of ``job`` that another host has to write."""
        name = self.name_of(host) or f"number {host}"

        def begin() -> None:
            self._background.from_thread(lambda: self._order(job, host, share))

        def stop(reason: str) -> None:
            stopping = control.StopWriting(directory=job.directory, reason=reason)
            self._background.from_thread(lambda: self.say(slot_id_of(host, 0), stopping))

        share = FarShare(name, ranks, begin, stop)
        return share

    def _order(self, job: Job, host: int, share: FarShare) -> None:
        hand, attempt = self._by_host.get(host), self._coordinator.attempts.get(job.attempt)
        slots = self._coordinator.slots
        where = attempt.slots.items() if attempt is not None else ()
        there = {rank for rank, slot in where if host_of(slot) == host}
        if job.aborted or hand is None or attempt is None or not share.ranks <= there:
            share.end(job.aborted or "its keeper is out of reach")
            return
        hand.shares[job.directory] = share
        orders = []
        for rank in sorted(share.ranks):
            slot, is_sealed = slots[attempt.slots[rank]], rank in attempt.sealed
            orders.append(control.ImageOrder(
                rank=rank, slot=number_of(slot.id), image_bytes=slot.image_bytes,
                ring_bytes=slot.ring_bytes if slot.is_ring else 0,
                header_xxh3=slot.header_xxh3 if is_sealed else "",
                table_xxh3=slot.table_xxh3 if is_sealed else "",
            ))  # fmt: skip
        hand.say(control.Write(
            directory=job.directory, attempt=job.attempt, incarnation=job.generation.incarnation,
            step=job.generation.step, layout=job.layout, images=tuple(orders),
        ))  # fmt: skip

    def sealed(self, attempt: Attempt, rank: int) -> None:
        """A rank's image is captured: its host may offer it, and need not wait to write it."""
        slot = self._coordinator.slots[attempt.slots[rank]]
        self.say(slot.id, control.Sealed(
            slot=number_of(slot.id), is_ring=slot.is_ring, attempt=attempt.id, rank=rank,
            incarnation=attempt.incarnation, step=attempt.step, layout=attempt.layout,
            image_bytes=slot.image_bytes,
            header_xxh3=slot.header_xxh3, table_xxh3=slot.table_xxh3,
        ))  # fmt: skip

    # ── hearing ──────────────────────────────────────────────────────────────────────────

    async def welcome(self, line: ControlLine) -> None:
        """Talk with the keeper of another host until its line breaks."""
        places = {place.id: n for n, place in enumerate(self._hosts) if n}
        host = places.get(line.peer)
        is_served = self._coordinator.incarnation == self._incarnation
        if host is None or not is_served:
            return  # not taken over yet: it calls again
        hand = None
        try:
            holds = control.from_hand(await line.receive())
            if not isinstance(holds, control.Holds):
                raise FormatError(f"a hand begins with {type(holds).__name__}")
            hand = self._attach(host, line, holds)
            while True:
                self._hear(hand, control.from_hand(await line.receive()))
        except (PeerError, FormatError) as error:
            line.close(str(error))
        except Exception as error:  # the other hosts are still to be heard
            traceback.print_exc(file=sys.stderr)
            line.close(f"{type(error).__name__}: {error}")
        finally:
            if hand is not None:
                self._lose(hand)

    def _attach(self, host: int, line: ControlLine, holds: control.Holds) -> FarHand:
        if host in self._by_host:
            self._lose(self._by_host[host])  # its line broke unnoticed
        hand = self._by_host[host] = FarHand(host, line, holds.arena)
        hand.port = holds.port
        slots, attempts = control.take(host, holds.slots)
        self._coordinator.attach(host, slots, attempts, holds.next_number)
        hand.say(self._learning.welcome(attempts))
        current = self._learning.current()
        if current is not None:
            hand.say(current)
        if self.protecting is not None:
            self.protecting.attached(hand.name, holds.rows)
        return hand

    def _lose(self, hand: FarHand) -> None:
        if self._by_host.get(hand.host) is not hand:
            return
        hand.line.close("it called again")
        why = hand.line.why_broken
        emit(Warned(message=(
            f"the keeper of {hand.name} is out of reach ({why}): no snapshot is taken until it is "
            "back"
        )))  # fmt: skip
        del self._by_host[hand.host]
        self._carry_out(self._coordinator.detach(hand.host, hand.name))
        if self.protecting is not None:
            self.protecting.detached(hand.name)
        self._forget(hand, f"its keeper is out of reach: {why}")

    def _forget(self, hand: FarHand, reason: str) -> None:
        self._by_host.pop(hand.host, None)
        for share in hand.shares.values():
            share.end(reason)
        for trainer in hand.trainers.values():
            trainer.said.put_nowait(None)
        hand.trainers.clear()

    def _hear(self, hand: FarHand, fact: control.ToCoordinator) -> None:
        match fact:
            case control.Came() | control.Said() | control.Left():
                self._hear_trainer(hand, fact)
            case control.Written() | control.WritingEnded() | control.RingFreed():
                self._hear_writing(hand, fact)
            case (
                parity_facts.Heads() | parity_facts.ParityReady() | parity_facts.ParityMade()
                | parity_facts.ParityNotMade() | parity_facts.RowsDropped() | parity_facts.Rebuilt()
                | parity_facts.NotRebuilt() | parity_facts.RowLost()
            ):  # fmt: skip
                if self.protecting is not None:
                    self.protecting.hear(hand.name, fact)
            case control.LayoutTold() | control.IncarnationTold():
                self._learning.hear(hand.name, fact)
            case control.Superseded(incarnation=n):
                self._superseded(n)
            case parity_facts.ImageLost(slot=number, attempt=attempt):
                lost = slot_id_of(hand.host, number)
                self._carry_out(self._coordinator.image_lost(lost, attempt))
            case control.Stopping():
                hand.is_stopping = True
            case control.Holds():
                raise FormatError("a hand tells once what it holds")
            case _:
                self._carry_out(self._memory_changed(hand, fact))

    def _hear_trainer(
        self, hand: FarHand, fact: control.Came | control.Said | control.Left
    ) -> None:
        trainer = hand.trainers.get(fact.line)
        match fact:
            case control.Came(line=number, pid=pid, start=start) if trainer is None:
                connection = FarConnection(hand.line, number, Writer(pid, start))
                trainer = hand.trainers[number] = _Trainer(connection)
                self._background.spawn(self._talk(trainer))
            case control.Said(body=body) if trainer is not None:
                trainer.said.put_nowait(body)
            case control.Left(line=number) if trainer is not None:
                del hand.trainers[number]
                trainer.said.put_nowait(None)

    async def _talk(self, trainer: _Trainer) -> None:
        talks, connection = self._talks, trainer.connection
        assert talks is not None
        talks.came(connection)
        try:
            while (body := await trainer.said.get()) is not None:
                seq, message = m.unpack(body)
                await talks.hear(connection, seq, message)
        except HoldfastError:
            connection.hang_up()  # it talks nonsense
        finally:
            talks.gone(connection)

    def _hear_writing(
        self, hand: FarHand, fact: control.Written | control.WritingEnded | control.RingFreed
    ) -> None:
        match fact:
            case control.Written(directory=directory):
                share = hand.shares.get(directory)
                if share is not None:
                    stored = Stored(fact.image, fact.part, fact.is_reused)
                    share.receive(stored, fact.values)
            case control.WritingEnded(directory=directory, reason=reason):
                share = hand.shares.pop(directory, None)
                if share is not None:
                    share.end(reason)
            case control.RingFreed():
                for share in hand.shares.values():
                    share.moved()
                self._ring_freed(fact.attempt, fact.rank, fact.size_bytes)

    def _memory_changed(
        self, hand: FarHand,
        fact: control.Made | control.NotMade | control.RingsMade | control.RingsNotMade
        | control.WriterGone | control.LayoutNotKept,
    ) -> list[Action]:  # fmt: skip
        coordinator, host = self._coordinator, hand.host
        match fact:
            case control.LayoutNotKept(hash=hash_, reason=reason):
                return coordinator.layout_not_kept(hash_, f"on host {hand.name}: {reason}", host)
            case control.RingsMade(made=made):
                if self._are_made(host, list(made)):
                    return coordinator.rings_made(
                        {slot_id_of(host, number): size for number, size in made.items()}
                    )
            case control.RingsNotMade(slots=numbers, reason=reason):
                if self._are_made(host, numbers):
                    ids = [slot_id_of(host, number) for number in numbers]
                    return coordinator.rings_not_made(ids, f"on host {hand.name}: {reason}")
            case control.WriterGone(slot=number, attempt=attempt):
                slot = coordinator.slots.get(slot_id_of(host, number))
                hand.watched.discard((slot_id_of(host, number), attempt))
                if slot is not None and slot.attempt == attempt:
                    return coordinator.writer_gone(slot.id)
            case control.Made(slot=number):
                if self._are_made(host, [number]):
                    return coordinator.allocated(slot_id_of(host, number))
            case control.NotMade(slot=number, reason=reason):
                if self._are_made(host, [number]):
                    why = f"on host {hand.name}: {reason}"
                    return coordinator.allocation_failed(slot_id_of(host, number), why)
        return []

    def _are_made(self, host: int, numbers: Sequence[int]) -> bool:
        """Whether these slots of this host are being made: a hand is believed no more than that."""
        slots = self._coordinator.slots
        found = [slots.get(slot_id_of(host, number)) for number in numbers]
        return all(slot is not None and slot.state == "allocating" for slot in found)
