"""This host's keeper as a hand of the coordinator on another: it owns its arena, decides nothing.

It makes, stamps and removes slots as it is told, writes its host's images, and hands on what its
trainers and the coordinator say to each other. While the coordinator is out of reach its
trainers hear what they would hear if their keeper had gone, and train on without snapshots.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping

from holdfast.errors import Fenced, FormatError, HoldfastError, KeeperError, PeerError
from holdfast.events import Warned, emit
from holdfast.format.manifest import Incarnation, unseal
from holdfast.keeper import control, parity_facts
from holdfast.keeper.background import Background
from holdfast.keeper.connection import NearConnection
from holdfast.keeper.facts import Fact
from holdfast.keeper.learning import tell
from holdfast.keeper.making import Nobody, SlotMaker
from holdfast.keeper.memory import Memory
from holdfast.keeper.offering import Offering
from holdfast.keeper.parity import Parity, protect, rows_of
from holdfast.keeper.writing import Writings
from holdfast.peers.calling import Peer
from holdfast.peers.control import ControlLine, call
from holdfast.snapshot import messages as m
from holdfast.snapshot.actions import Action
from holdfast.snapshot.arena import is_running
from holdfast.snapshot.rings import RingNeed

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
#: How long a coordinator whose time is over may take to let go of the root.
_LET_GO_S = 20.0


class Hand:
    """One part of an incarnation; ``ended(keep_arena)`` is told that the run is over."""

    def __init__(
        self, part: m.TakePart, memory: Memory, maker: SlotMaker, offering: Offering,
        writings: Writings, parity: Parity, background: Background,
        ended: Callable[[bool], Awaitable[None]],
    ) -> None:  # fmt: skip
        self.part = part
        self._memory, self._maker = memory, maker
        self._offering, self._writings, self._parity = offering, writings, parity
        self._background = background
        self._ended = ended
        self._line: ControlLine | None = None
        self._is_attached = asyncio.Event()
        self._trainers: dict[int, NearConnection] = {}
        self._watched: dict[int, tuple[str, int, int]] = {}
        self._why = "it was not tried yet"
        self.is_stopping = self.may_stop = False
        """Whether this keeper was told to stop, and the coordinator has saved what it wants to."""
        self.fenced = ""
        """Why this incarnation is over; "" while it is not."""
        self._following = asyncio.create_task(self._follow())

    # ── the line ─────────────────────────────────────────────────────────────────────────

    @property
    def is_attached(self) -> bool:
        """Whether the coordinator is in reach."""
        return self._is_attached.is_set()

    async def wait_attached(self, within_s: float) -> None:
        """KeeperError when the coordinator is not in reach within that time, Fenced when over."""
        try:
            async with asyncio.timeout(within_s):
                await self._is_attached.wait()
        except TimeoutError:
            if self.fenced:
                raise Fenced(self.fenced) from None
            raise self._out_of_reach() from None

    def _out_of_reach(self) -> KeeperError:
        place = self.part.hosts[0]
        return KeeperError(
            f"the keeper of {place.id}, which coordinates this run, is out of reach of "
            f"{self.part.hosts[self.part.host].id}: {self._why}. Training goes on, and no snapshot "
            "is taken until it is back."
        )

    async def _follow(self) -> None:
        """Call the coordinator, again and again, and do what it says."""
        place, own = self.part.hosts[0], self.part.hosts[self.part.host].id
        peer = Peer(place.id, place.address, place.control_port)
        pause_s = _FIRST_PAUSE_S
        while not self.fenced:
            try:
                line = await call(
                    self.part.secret, peer, name=own, incarnation=self.part.incarnation
                )
                pause_s = _FIRST_PAUSE_S
                await self._serve(line)
            except Fenced as error:
                self.fenced = str(error)
            except (PeerError, FormatError) as error:
                self._why = str(error)
            except Exception as error:  # told what it is at the next attaching, it may do better
                traceback.print_exc(file=sys.stderr)
                self._why = f"{type(error).__name__}: {error}"
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _serve(self, line: ControlLine) -> None:
        self._line = line
        self._maker.serve(_Reports(line))
        slots, attempts = self._memory.found()
        line.send(control.pack(control.Holds(
            arena=str(self._memory.directory), slots=control.describe(slots, attempts),
            next_number=self._memory.next_number, port=self._offering.port,
            rows=rows_of(self._parity),
        )))  # fmt: skip
        try:
            while True:
                await self._do(line, control.from_coordinator(await line.receive()))
        finally:
            line.close()
            self._detached()

    def _detached(self) -> None:
        """Trainers hear what they would hear if their keeper went away."""
        self._line = None
        self._is_attached.clear()
        self._watched.clear()
        self._writings.stop_all("the coordinator is out of reach")
        self._parity.give_up("the coordinator is out of reach")
        self._parity.rebuilding.give_up("the coordinator is out of reach")
        self._maker.serve(Nobody())
        for connection in list(self._trainers.values()):
            connection.hang_up()
        self._trainers.clear()

    async def leave(self, incarnation: int) -> None:
        """A newer incarnation has begun: its coordinator is told, and has let go of the root."""
        line = self._line
        self.fenced = f"incarnation {incarnation} of this run has begun"
        for connection in list(self._trainers.values()):
            connection.send(m.FencedOff(incarnation=incarnation))
        if line is not None:
            line.send(control.pack(control.Superseded(incarnation=incarnation)))
            try:
                async with asyncio.timeout(_LET_GO_S):
                    await asyncio.wait([self._following])
            except TimeoutError:
                line.close("it does not let go")
        await self.stop()

    def is_needed(self) -> bool:
        """Whether this keeper, told to stop, is to stay: the coordinator is told, and may save."""
        if not self.is_stopping:
            self.is_stopping = True
            if self._line is not None and self.is_attached:
                self._line.send(control.pack(control.Stopping()))
        return self.is_attached and not self.may_stop

    def say(self, fact: Fact) -> None:
        """To the coordinator, if it is in reach: whoever comes back asks what there is."""
        if self._line is not None:
            self._line.send(control.pack(fact))

    async def stop(self) -> None:
        """Follow no longer."""
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)

    # ── trainers ─────────────────────────────────────────────────────────────────────────

    def hear(self, connection: NearConnection, seq: int, message: m.Message, body: bytes) -> None:
        """Hand on what a trainer says. KeeperError when it can be handed to nobody."""
        if isinstance(message, m.Progress):
            if connection.rank is not None:
                self._writings.copied(message.attempt, connection.rank, message.size_bytes)
            return
        line = self._line
        if line is None or not self.is_attached:
            raise Fenced(self.fenced) if self.fenced else self._out_of_reach()
        if connection.number not in self._trainers:
            self._trainers[connection.number] = connection
            process = connection.process
            came = control.Came(line=connection.number, pid=process.pid, start=process.start)
            line.send(control.pack(came))
        if isinstance(message, m.Join):
            connection.rank = message.rank
        line.send(control.pack(control.Said(line=connection.number, body=body)))

    def gone(self, connection: NearConnection) -> None:
        """A trainer's connection broke."""
        if self._trainers.pop(connection.number, None) is not None and self._line is not None:
            self._line.send(control.pack(control.Left(line=connection.number)))

    # ── what the coordinator says ────────────────────────────────────────────────────────

    async def _do(self, line: ControlLine, fact: control.ToHand) -> None:
        match fact:
            case control.Attached():
                for known in tell(self._memory, fact):
                    line.send(control.pack(known))
                self._is_attached.set()
                if self.is_stopping:
                    line.send(control.pack(control.Stopping()))
            case control.Tell(line=number, frame=frame):
                if number in self._trainers:
                    self._trainers[number].send_frame(frame)
            case control.HangUp(line=number):
                if number in self._trainers:
                    self._trainers[number].hang_up()
            case control.MayStop():
                self.may_stop = True
            case control.End(keep_arena=keep_arena):
                await self._ended(keep_arena)
            case (
                parity_facts.TellHeads() | parity_facts.MakeParity() | parity_facts.BeginParity()
                | parity_facts.GiveUpParity() | parity_facts.DropParity() | parity_facts.DropRows()
                | parity_facts.Rebuild() | parity_facts.GiveUpRebuild()
            ):  # fmt: skip
                protect(self._parity, fact, self.part.hosts, lambda s: line.send(control.pack(s)))
            case control.Write() | control.StopWriting() | control.Sealed():
                self._write(line, fact)
            case _:
                self._change_memory(line, fact)

    def _write(
        self, line: ControlLine, fact: control.Write | control.StopWriting | control.Sealed
    ) -> None:
        match fact:
            case control.Write():
                self._writings.start(fact, lambda said: line.send(control.pack(said)))
            case control.StopWriting(directory=directory, reason=reason):
                self._writings.stop(directory, reason)
            case control.Sealed():
                self._writings.sealed(fact)
                if not fact.is_ring:
                    self._offering.offer(
                        fact.slot, fact.attempt, fact.rank, fact.incarnation, fact.step,
                        fact.image_bytes, fact.layout,
                    )  # fmt: skip

    def _change_memory(
        self, line: ControlLine,
        fact: control.Make | control.MakeRings | control.Remove | control.Stamp
        | control.KeepLayout | control.KeepIncarnation | control.Watch,
    ) -> None:  # fmt: skip
        match fact:
            case control.Make(slot=slot, capacity_bytes=capacity_bytes, leave_bytes=leave_bytes):
                self._maker.make(slot, capacity_bytes, leave_bytes)
            case control.MakeRings(needs=needs):
                self._maker.make_rings(tuple(RingNeed(*need) for need in needs))
            case control.Remove(slot=slot):
                self._offering.withdraw(slot)
                self._maker.remove(slot)
            case control.Stamp(slot=slot, record=record):
                self._offering.withdraw(slot)
                self._memory.stamp(slot, record)
            case control.KeepLayout():
                self._keep_layout(line, fact)
            case control.KeepIncarnation():
                self._keep_incarnation(fact)
            case control.Watch(slot=slot, attempt=attempt, pid=pid, start=start):
                self._watched[slot] = attempt, pid, start

    def _keep_layout(self, line: ControlLine, fact: control.KeepLayout) -> None:
        try:
            self._memory.keep_layout(fact.hash, fact.data, fact.used)
        except OSError as error:
            where = self._memory.directory
            reason = f"no room for the layout: {error.strerror}. Free some in {where}"
            line.send(control.pack(control.LayoutNotKept(hash=fact.hash, reason=reason)))

    def _keep_incarnation(self, fact: control.KeepIncarnation) -> None:
        try:
            incarnation = unseal(Incarnation, fact.data, f"incarnation {fact.n}")
            self._memory.keep_incarnation(incarnation, fact.held)
        except (OSError, HoldfastError) as error:  # storage has it too
            emit(Warned(message=f"incarnation {fact.n} is not remembered here: {error}"))

    def look_around(self) -> None:
        """Tell of slots that nobody can write to any more."""
        line = self._line
        if line is None:
            return
        for slot, (attempt, pid, start) in list(self._watched.items()):
            if self._memory.is_sealed(slot, attempt) or (pid and not is_running(pid, start)):
                del self._watched[slot]
                line.send(control.pack(control.WriterGone(slot=slot, attempt=attempt)))


class _Reports:
    """Tells the coordinator what came of making memory."""

    def __init__(self, line: ControlLine) -> None:
        self._line = line

    def is_awaited(self, _: int) -> bool:
        return True

    def drop_spare(self, _: int) -> bool:
        return False

    def allocated(self, slot_id: int) -> list[Action]:
        self._line.send(control.pack(control.Made(slot=slot_id)))
        return []

    def allocation_failed(self, slot_id: int, reason: str) -> list[Action]:
        self._line.send(control.pack(control.NotMade(slot=slot_id, reason=reason)))
        return []

    def rings_made(self, made: Mapping[int, tuple[int, int]]) -> list[Action]:
        self._line.send(control.pack(control.RingsMade(made=dict(made))))
        return []

    def rings_not_made(self, slot_ids: Iterable[int], reason: str) -> list[Action]:
        self._line.send(control.pack(control.RingsNotMade(slots=tuple(slot_ids), reason=reason)))
        return []
