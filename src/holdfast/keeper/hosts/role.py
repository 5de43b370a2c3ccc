"""Which part this keeper has in an incarnation of several hosts: it coordinates, or is a hand.

Of the keepers of a run one coordinates, that of rank 0's host; it may be another one after each
start. Whoever hears of a newer incarnation decides nothing any more, gives the root back, and
keeps what is in its memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from holdfast.errors import Fenced, KeeperError, UsageError
from holdfast.keeper import parity_facts
from holdfast.keeper.background import Background
from holdfast.keeper.connection import Ranks
from holdfast.keeper.doors import Doors
from holdfast.keeper.executor import Executor
from holdfast.keeper.incarnations import Incarnations, RootAccess
from holdfast.keeper.making import Nobody
from holdfast.keeper.memory import Memory
from holdfast.keeper.writing import Writings
from holdfast.snapshot import messages as m
from holdfast.snapshot.handoff import Coordinator

if TYPE_CHECKING:
    from holdfast.keeper.hand import Hand
    from holdfast.keeper.mending import Reached
    from holdfast.keeper.network import Network
    from holdfast.keeper.parity import Parity
    from holdfast.redundancy.records import ParityRecord


class Part:
    """What changes with it. Lives on the keeper's loop; changes come one after the other."""

    def __init__(
        self, host_id: str, coordinator: Coordinator, memory: Memory, ranks: Ranks,
        executor: Executor, incarnations: Incarnations, root: RootAccess, background: Background,
        doors: Doors, ended: Callable[[bool], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._host_id = host_id
        self._coordinator, self._memory, self._ranks = coordinator, memory, ranks
        self._executor, self._incarnations, self._root = executor, incarnations, root
        self._background, self._doors = background, doors
        self._ended = ended
        self.hosts: Sequence[m.HostPlace] = ()
        """Of the incarnation this keeper coordinates, or is to take over."""
        self.hand: Hand | None = None
        self.is_bystander = False
        """Whether the run goes on elsewhere, without this host."""
        self.writings = Writings(memory, root.store, background)
        self._parity: Parity | None = None
        self._network: Network | None = None
        self._prepared: Network | None = None
        self._changing = asyncio.Lock()

    # ── before an incarnation ────────────────────────────────────────────────────────────

    async def survey(self, message: m.Survey) -> m.Message:
        """Listen for an incarnation that is to begin, and tell what is known here."""
        async with self._changing:
            await self._drop_prepared()
            network = self._network_at(message.address, message.secret)
            await network.listen()
            if message.is_coordinator:
                await network.listen_for_hands(self._executor.hands.welcome)
            self._prepared = network
            newest = max(self._incarnations.known_here(), default=0)
            return m.Surveyed(newest=newest, port=network.port, control_port=network.control_port)

    def _network_at(self, address: str, secret: bytes) -> Network:
        from holdfast.keeper.network import Network  # a run on one host needs none of it

        return Network(secret, self._host_id, address, self._doors)

    async def _drop_prepared(self) -> None:
        if self._prepared is not None:
            await self._prepared.close()
            self._prepared = None

    # ── coordinating ─────────────────────────────────────────────────────────────────────

    async def lead(self, incarnation: int, hosts: Sequence[m.HostPlace]) -> None:
        """Coordinate this incarnation, which begins; ``hosts``: none for a run on this one."""
        async with self._changing:
            await self._take_over_memory(incarnation)
            prepared, self._prepared = self._prepared, None
            if hosts and prepared is None:
                raise KeeperError(
                    "this host's keeper was started anew while the run began: start the run again"
                )
            if prepared is not None and not hosts:  # for a start that came to nothing
                await prepared.close()
            self._executor.jobs.abort_shared(
                f"incarnation {incarnation} began before the keepers of all hosts had written it"
            )
            self._executor.hands.begin(incarnation, hosts)
            await self._use(prepared if hosts else None, incarnation)
            if self._executor.hands.protecting is not None:
                self._executor.hands.protecting.begin(hosts)
            self._root.may_open = True
            self.hosts = hosts

    async def _take_over_memory(self, incarnation: int) -> None:
        """From a coordinator elsewhere, if there was one."""
        hand, self.hand = self.hand, None
        if hand is not None:
            await hand.leave(incarnation)
        if hand is not None or self.is_bystander:
            self._executor.maker.serve(self._coordinator)
            slots, attempts = self._memory.found()
            self._coordinator.start_over(slots, attempts, self._memory.next_number)
        self.is_bystander = False

    async def _use(self, network: Network | None, incarnation: int) -> None:
        """Listen there from now on, and nowhere else."""
        old, self._network = self._network, network
        self._executor.offering.serve(None)
        if self._parity is not None:
            self._parity.serve(None, incarnation)
        if old is not None:
            await old.close()
        if network is not None:
            network.begin(incarnation)
            self._take_up_parity().serve(network, incarnation)
            self._executor.offering.serve(
                network.peers, self._host_id, network.address, network.port
            )

    @property
    def parity(self) -> Parity | None:
        """What this host keeps for others; None in a run on one."""
        return self._parity

    def reach(self, attempt: str) -> Callable[[], Reached] | None:
        """How the other parts of an attempt are found; None in a run on one host."""
        hosts = self.hosts if self.hand is None else self.hand.part.hosts
        return None if self._parity is None else self._parity.reach(attempt, hosts)

    def way_to(self, attempt: str, rank: int) -> tuple[ParityRecord, Callable[[], Reached]] | None:
        """What tells how an image is decoded; None where no parity of it is kept here."""
        reach = self.reach(attempt)
        record = None if self._parity is None else self._parity.record_of(attempt, rank)
        return None if reach is None or record is None else (record, reach)

    def image_lost(self, slot: int, attempt: str) -> None:
        """What is in a slot of this host is worth nothing any more."""
        if self.hand is not None:
            self.hand.say(parity_facts.ImageLost(slot=slot, attempt=attempt))
        elif not self.is_bystander:
            self._executor.carry_out(self._coordinator.image_lost(slot, attempt))

    def row_lost(self, attempt: str) -> None:
        """Parity of an attempt is not whole on this host any more."""
        protecting = self._executor.hands.protecting
        if self.hand is not None:
            self.hand.say(parity_facts.RowLost(attempt=attempt))
        elif not self.is_bystander and protecting is not None:
            protecting.row_lost(attempt)

    def _take_up_parity(self) -> Parity:
        """What this host keeps for others; it is looked for when there are others."""
        if self._parity is None:
            from holdfast.keeper.parity import Parity  # a run on one host needs none of it
            from holdfast.keeper.protecting import Protecting

            executor = self._executor
            self._parity = Parity(self._memory, self._background, executor.offering)
            executor.offering.rows = self._parity.rows
            executor.hands.protecting = Protecting(
                self._coordinator, self._ranks, executor.hands, self._parity, executor.carry_out
            )
        return self._parity

    # ── being told ───────────────────────────────────────────────────────────────────────

    async def take(self, message: m.TakePart) -> m.Message:
        """Have this part in this incarnation. Fenced when a newer one has begun."""
        if not 0 <= message.host < len(message.hosts):
            raise UsageError(f"host {message.host} is none of {len(message.hosts)}")
        if message.hosts[message.host].id != self._host_id:
            raise UsageError(
                f"this keeper is that of {self._host_id}, and was called as that of "
                f"{message.hosts[message.host].id}"
            )
        newest = max(self._incarnations.begun_here(), default=0)
        if newest > message.incarnation:
            raise Fenced(
                f"incarnation {message.incarnation} is over, {newest} has begun: this process "
                "belongs to an older start and must end"
            )
        async with self._changing:
            if message.host == 0:
                await self._may_take_over(message)
                return m.Done()
            hand = await self._follow(message)
        await hand.wait_attached(message.within_s)
        return m.Done()

    async def _may_take_over(self, message: m.TakePart) -> None:
        """Listen for the hands, if a coordinator's keeper died and this one is new."""
        if self._coordinator.incarnation == message.incarnation or (
            self._network is not None and self.hosts == message.hosts
        ):
            return
        own = message.hosts[0]
        network = self._network_at(own.address, message.secret)
        await network.listen(own.port)
        await network.listen_for_hands(self._executor.hands.welcome, own.control_port)
        await self._use(network, message.incarnation)
        self.hosts = message.hosts
        self._executor.hands.begin(message.incarnation, message.hosts)

    async def _follow(self, message: m.TakePart) -> Hand:
        hand = self.hand
        if hand is not None and hand.part.nonce == message.nonce:
            return hand
        if hand is not None:
            await hand.leave(message.incarnation)
            self.hand = None
        elif not self.is_bystander:
            await self._step_down(message.incarnation)
        self.is_bystander = False
        with contextlib.suppress(OSError):  # a full arena: storage knows it soon
            self._memory.keep_begun(message.incarnation)
        own = message.hosts[message.host]
        network, self._prepared = self._prepared, None
        if network is None or (network.secret, network.port) != (message.secret, own.port):
            if network is not None:
                await network.close()
            network = self._network_at(own.address, message.secret)
            await network.listen(own.port)
        await self._use(network, message.incarnation)
        from holdfast.keeper.hand import Hand  # a run on one host needs none of it

        self.hand = Hand(
            message, self._memory, self._executor.maker, self._executor.offering, self.writings,
            self._take_up_parity(), self._background, self._ended,
        )  # fmt: skip
        return self.hand

    # ── the end of it ────────────────────────────────────────────────────────────────────

    async def _step_down(self, incarnation: int) -> None:
        """Decide nothing any more: another keeper does, in a newer incarnation."""
        self._ranks.fence_off(incarnation)
        self._executor.maker.serve(Nobody())
        self._coordinator.start_over((), (), 0)
        self._coordinator.begin(incarnation, "", 0)  # nobody has a place in it here
        self._executor.jobs.abort_all(f"incarnation {incarnation} has begun elsewhere")
        self._root.may_open = False  # what is on its way there has been decided before
        await self._background.in_thread(self._root.let_go)
        self._executor.hands.begin(0, ())  # they wait for just that
        self.hosts = ()

    def superseded(self, incarnation: int) -> None:
        """A hand says that the run goes on elsewhere."""
        if incarnation > self._coordinator.incarnation and self.hand is None:
            self._background.spawn(self._stand_by(incarnation))

    async def _stand_by(self, incarnation: int) -> None:
        async with self._changing:
            if self.hand is not None or self.is_bystander:
                return
            self.is_bystander = True
            with contextlib.suppress(OSError):
                self._memory.keep_begun(incarnation)
            await self._step_down(incarnation)
            await self._use(None, incarnation)
