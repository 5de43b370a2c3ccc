"""Sets the keeper's role in an incarnation of several hosts: coordinator or follower.

Of the keepers of a run the one on rank 0's host coordinates; it may be another one after each
start. A keeper that learns of a newer incarnation decides nothing any more, releases the root, and
keeps what is in its memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from holdfast.errors import Fenced, KeeperError, UsageError
from holdfast.keeper import message_limits as limits
from holdfast.keeper.connections import AdmissionCounters
from holdfast.keeper.executor import Executor
from holdfast.protocol import messages as m
from holdfast.protocol.facts import Fact, ignore

if TYPE_CHECKING:
    from holdfast.keeper.hosts.follower import Follower
    from holdfast.keeper.hosts.network import Network
    from holdfast.keeper.parity.group_access import KeeperReach
    from holdfast.keeper.parity.worker import ParityWorker
    from holdfast.parity.planning.record import ParityRecord


class HostRole:
    """The current role and all that changes with it. Lives on the keeper's loop; changes are
    serialized.
    """

    def __init__(
        self,
        host_id: str,
        executor: Executor,
        doors: AdmissionCounters,
        ended: Callable[[bool], Awaitable[None]],
    ) -> None:
        self._host_id, self._executor, self._agent = host_id, executor, executor.agent
        self._coordinator, self._memory = executor.coordinator, executor.memory
        self._incarnations, self._root = executor.incarnations, executor.root
        self._background, self._ranks = executor.background, executor.ranks
        self._admission, self._ended = doors, ended
        self.follower: Follower | None = None
        self.is_bystander = False
        """True if the run continues elsewhere, without this host."""
        self._network: Network | None = None
        self._prepared: Network | None = None
        self._changing = asyncio.Lock()

    # ── before an incarnation ────────────────────────────────────────────────────────────────────

    async def probe(self, message: m.ProbeHost) -> m.Message:
        """Listen for an incarnation that will begin, and report what is known here."""
        async with self._changing:
            await self._drop_prepared()
            network = self._network_at(message.address, message.secret)
            await network.listen()
            if message.is_coordinator:
                await network.listen_for_followers(self._executor.followers.welcome)
            self._prepared = network
            newest = max(self._incarnations.known_here(), default=0)
            return m.HostProbed(newest=newest, port=network.port, control_port=network.control_port)

    def _network_at(self, address: str, secret: bytes) -> Network:
        from holdfast.keeper.hosts.network import Network  # a run on one host does not need it

        return Network(secret, self._host_id, address, self._admission)

    async def _drop_prepared(self) -> None:
        if self._prepared is not None:
            await self._prepared.close()
            self._prepared = None

    # ── coordinating ─────────────────────────────────────────────────────────────────────────────

    async def lead(self, incarnation: int, hosts: Sequence[m.HostEntry]) -> None:
        """Coordinate this new incarnation; ``hosts`` is empty for a run on one host."""
        async with self._changing:
            await self._take_over_memory(incarnation)
            prepared, self._prepared = self._prepared, None
            if hosts and prepared is None:
                raise KeeperError(
                    "this host's keeper was started anew while the run began: start the run again"
                )
            if prepared is not None and not hosts:  # prepared for a start that failed
                await prepared.close()
            self._executor.abort_jobs(
                f"incarnation {incarnation} began before the keepers of all hosts had written it",
                shared_only=True,
            )
            self._executor.followers.begin(incarnation, hosts)
            await self._use(prepared if hosts else None, incarnation)
            self._executor.caches.begin()
            self._share_cache(hosts)
            if self._executor.followers.parity_scheduler is not None:
                self._executor.followers.parity_scheduler.begin(hosts)
            self._root.may_open = True
            self._agent.hosts = hosts

    def succeed(self) -> None:
        """Coordinate an incarnation that an earlier keeper of this host began, before its root is
        opened.
        """
        self._executor.caches.gather()
        self._share_cache(self._agent.hosts)
        self._root.may_open = True

    def _share_cache(self, hosts: Sequence[m.HostEntry]) -> None:
        others = self._executor.caches if hosts else None
        self._root.share_cache(others, is_shared=bool(hosts))

    async def _take_over_memory(self, incarnation: int) -> None:
        """Take the arena back from a coordinator elsewhere, if there was one."""
        follower, self.follower = self.follower, None
        if follower is not None:
            await follower.leave(incarnation)
        if follower is not None or self.is_bystander:
            self._executor.serve_own_host()
            slots, attempts = self._memory.discovered()
            self._coordinator.start_over(slots, attempts, self._memory.next_number)
        self.is_bystander = False

    async def _use(self, network: Network | None, incarnation: int) -> None:
        """Listen on this network only, from now on."""
        old, self._network = self._network, network
        published, parity = self._agent.published, self.parity
        published.serve(None)
        await self._agent.caches.serve_peers(None)
        if parity is not None:
            parity.serve(None, incarnation)
        if old is not None:
            await old.close()
        if network is not None:
            network.begin(incarnation)
            self._ensure_parity().serve(network, incarnation)
            published.serve(network.peers, self._host_id, network.port)
            await self._agent.caches.serve_peers(network.peers)

    @property
    def parity(self) -> ParityWorker | None:
        """Return this host's parity worker; None in a run on one host."""
        return self._agent.parity

    def group_access(self, attempt: str) -> Callable[[], KeeperReach] | None:
        """Return a function that locates the other parts of an attempt; None in a run on one
        host.
        """
        return None if self.parity is None else self.parity.group_access(attempt, self._agent.hosts)

    def decode_access(
        self, attempt: str, rank: int
    ) -> tuple[ParityRecord, Callable[[], KeeperReach]] | None:
        """Return the record and the access needed to decode an image; None if no parity of it is
        here.
        """
        reach = self.group_access(attempt)
        record = None if self.parity is None else self.parity.record_of(attempt, rank)
        return None if reach is None or record is None else (record, reach)

    def report(self, fact: Fact) -> None:
        """Report damage on this host to its coordinator, after what was said before."""
        (self._agent if self.follower is None else self.follower).report(fact)

    def _ensure_parity(self) -> ParityWorker:
        """Return the parity worker, created with the stored shards when there are other hosts."""
        executor = self._executor
        if self._agent.parity is None:
            from holdfast.keeper.parity.scheduler import ParityScheduler
            from holdfast.keeper.parity.worker import (
                ParityWorker,  # a run on one host does not need it
            )

            published = self._agent.published
            parity = self._agent.parity = ParityWorker(self._memory, self._background, published)
            published.shards = parity.shards
            executor.followers.parity_scheduler = ParityScheduler(
                self._coordinator, self._ranks, executor.followers, parity, executor.carry_out
            )
        return self._agent.parity

    # ── following ────────────────────────────────────────────────────────────────────────────────

    async def follow(self, message: m.AssignRole) -> m.Message:
        """Adopt the assigned role in this incarnation. Raises Fenced if a newer one has begun."""
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
        if message.incarnation > newest + limits.MOST_STARTS_AHEAD:  # storage may know a newer one
            limits.check_start(message.incarnation, await self._incarnations.next_number())
        async with self._changing:
            if message.host == 0:
                await self._listen_as_successor(message)
                return m.Done()
            follower = await self._follow(message)
        await follower.wait_attached(message.within_s)
        return m.Done()

    async def _listen_as_successor(self, message: m.AssignRole) -> None:
        """Listen for followers, if a coordinator's keeper died and this one is its successor."""
        if self._coordinator.incarnation == message.incarnation or (
            self._network is not None and self._agent.hosts == message.hosts
        ):
            return
        own = message.hosts[0]
        network = self._network_at(own.address, message.secret)
        await network.listen(own.port)
        await network.listen_for_followers(self._executor.followers.welcome, own.control_port)
        await self._use(network, message.incarnation)
        self._agent.hosts = message.hosts
        self._executor.followers.begin(message.incarnation, message.hosts)

    async def _follow(self, message: m.AssignRole) -> Follower:
        follower = self.follower
        if follower is not None and follower.role.nonce == message.nonce:
            return follower
        if follower is not None:
            await follower.leave(message.incarnation)
            self.follower = None
        elif not self.is_bystander:
            await self._step_down(message.incarnation)
        self.is_bystander = False
        with contextlib.suppress(OSError):  # a full arena: storage has the record soon
            self._memory.store_begun(message.incarnation)
        own = message.hosts[message.host]
        network, self._prepared = self._prepared, None
        if network is None or (network.secret, network.port) != (message.secret, own.port):
            if network is not None:
                await network.close()
            network = self._network_at(own.address, message.secret)
            await network.listen(own.port)
        await self._use(network, message.incarnation)
        from holdfast.keeper.hosts.follower import Follower  # a run on one host does not need it

        self.follower = Follower(message, self._memory, self._agent, self._ended)
        self._root.share_cache(None, is_shared=True)
        await self._root.open_cache()
        return self.follower

    # ── end of a role ────────────────────────────────────────────────────────────────────────────

    async def _step_down(self, incarnation: int) -> None:
        """Stop deciding: another keeper coordinates a newer incarnation."""
        self._ranks.fence_off(incarnation)
        self._agent.serve(ignore)
        self._coordinator.start_over((), (), 0)
        self._coordinator.begin(incarnation, "", 0)  # no rank has a place here any more
        self._executor.abort_jobs(f"incarnation {incarnation} has begun elsewhere")
        self._root.may_open = False  # writes on their way there were decided before
        self._coordinator.durability.forget_cached()
        await self._background.in_thread(self._root.detach())
        self._executor.followers.begin(0, ())  # the followers wait for this
        self._agent.hosts = ()

    def superseded(self, incarnation: int) -> None:
        """Handle a follower's report that the run continues elsewhere."""
        if incarnation > self._coordinator.incarnation and self.follower is None:
            self._background.spawn(self._stand_by(incarnation))

    async def _stand_by(self, incarnation: int) -> None:
        async with self._changing:
            if self.follower is not None or self.is_bystander:
                return
            self.is_bystander = True
            with contextlib.suppress(OSError):
                self._memory.store_begun(incarnation)
            await self._step_down(incarnation)
            await self._use(None, incarnation)
