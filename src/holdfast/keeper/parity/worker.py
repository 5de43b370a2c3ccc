"""Runs parity rounds on this host by ``parity.exchange``, and serves the shards.

The exchange runs on threads of its own, one generation at a time. The coordinator chooses the
generation and the buffer, and is told when all shards of this host are sealed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from holdfast.errors import HoldfastError, NotFound, NotProtected
from holdfast.format.image import header_size
from holdfast.format.manifest import AttemptId
from holdfast.geometry.rank_ranges import ranks_in
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.hosts import host_messages
from holdfast.keeper.hosts.network import Network
from holdfast.keeper.jobs import Background
from holdfast.keeper.parity.rebuild import RebuildWorker
from holdfast.keeper.parity.store import HALVES, ShardFiles, ShardStore, StoredParity
from holdfast.keeper.published_images import PublishedImages
from holdfast.parity.exchange.shard_exchange import ShardExchange, ShardMemory
from holdfast.parity.exchange.terms import TermsReader, heads_of, list_of
from holdfast.parity.exchange.windows import BudgetedPuller, CancelScope, RateBudget
from holdfast.parity.planning.budget import staging_bytes
from holdfast.parity.planning.placement import stored_by
from holdfast.parity.planning.record import (
    ImageFact,
    MemberFact,
    ParityRecord,
    RecordTerms,
    seals_of,
)
from holdfast.protocol import messages as m
from holdfast.protocol.arena import IMAGE_START
from holdfast.protocol.facts import Report
from holdfast.transport.client import Puller
from holdfast.transport.client_connection import Peer
from holdfast.transport.server import PeerServer, ThreadSafeServer
from holdfast.transport.wire.http import generation_name, members_path

if TYPE_CHECKING:  # needed only after a loss
    from holdfast.keeper.parity.group_access import KeeperReach

T = TypeVar("T")
READY_S = 600.0
"""Timeout for the memory of all hosts; the coordinator gives up sooner, and names the hosts without
it.
"""


class ParityWorker:
    """Parity of this host on the keeper's loop, except the thread that makes parity.

    ``offering`` publishes the images of this host, and is told of the stored shards.
    """

    def __init__(
        self, memory: ArenaFiles, background: Background, offering: PublishedImages
    ) -> None:
        self._memory, self._background = memory, background
        self.rebuilding = RebuildWorker(memory, background, offering)
        self._loop = asyncio.get_running_loop()
        self._files = ShardFiles(memory)
        self.store = ShardStore(self._files, offering.holdings_changed)
        self._server: PeerServer | None = None
        self._puller: Puller | None = None
        self._own, self._port = "", 0
        self._group: ParityGroup | None = None
        self._round_id = -1
        """The round of the last order."""
        self._staging = memoryview(b"")
        self._budget = RateBudget()
        self._run: _ParityRun | None = None
        self._next: _ParityRun | None = None
        self._is_unwanted = False
        """True if the memory is to be freed, once nothing is written there."""

    def serve(self, network: Network | None, incarnation: int) -> None:
        """Serve the shards through this network from now on, or not at all (None)."""
        why = "another start of the run has begun"
        self.cancel(why)
        self.rebuilding.cancel(why)
        self._is_unwanted = False
        if self._puller is not None:
            self._puller.close()
        self._server, self._puller, self._port = None, None, 0
        self._group, self._round_id = None, -1
        if network is not None:
            self._server, self._own, self._port = network.peers, network.name, network.port
            self._puller = Puller(network.secret, incarnation=incarnation)
        self.store.serve(self._server)

    @property
    def port(self) -> int:
        """Return the port where this keeper serves images and shards; 0 while it does not."""
        return self._port

    def shards(self) -> Sequence[StoredParity]:
        """Return all stored shards, each complete."""
        return self.store.all()

    @property
    def is_busy(self) -> bool:
        """Return True if shards are being made, or images decoded."""
        return self._run is not None or self.rebuilding.is_busy

    # ── orders of the coordinator ────────────────────────────────────────────────────────────────

    def member(self, order: host_messages.MakeParity) -> MemberFact:
        """Return the images of an order that are here. Raises ArenaError, FormatError or NotFound.

        NotFound if one is missing, or is not the one that was captured.
        """
        wanted = set(ranks_in(order.ranks))
        slots = {slot.id: slot for slot in self._memory.discovered()[0]}
        there = {rank: slots[n] for rank, n in self._slots_of(order.attempt).items()}
        if lacking := sorted(wanted - there.keys()):
            raise NotFound(f"the images of ranks {lacking[:4]} were damaged meanwhile")
        if seals_of(there[rank].image for rank in wanted) != order.seals:
            raise NotFound("the images here are not those that were captured")
        images = []
        for rank in sorted(wanted):
            slot = there[rank]
            image = self._memory.files[slot.id].image
            start = header_size(bytes(image[:8]), f"rank {rank}", slot.image_bytes)
            head = memoryview(bytes(image[:start]))  # the slot may get another image
            images.append(
                ImageFact(rank, slot.image_bytes, start, slot.header_xxh3, slot.table_xxh3, head)
            )
        return MemberFact(self._own, tuple(images))

    def _slots_of(self, attempt: str) -> dict[int, int]:
        """Return this host's slots of an attempt, by rank."""
        found = (one.slots for one in self._memory.discovered()[1] if one.id == attempt)
        return next(found, {})

    def join(self, group: host_messages.JoinGroup, hosts: Sequence[m.HostEntry]) -> None:
        """Make parity with these hosts from now on."""
        self._group = ParityGroup(
            tuple(
                Peer(hosts[n].id, hosts[n].address, port or hosts[n].port)
                for n, port in zip(group.hosts, group.ports, strict=True)
            ),
            group.parity,
        )

    def make(self, order: host_messages.MakeParity, tell: Report) -> None:
        """Make the shards of this host, cancelling another round. An order is obeyed once."""
        if order.round_id == self._round_id:
            return
        self._round_id = order.round_id
        self.cancel("a newer turn has begun")
        self._is_unwanted = False
        try:
            run = self._prepare(order, tell)
        except (HoldfastError, KeyError) as error:  # the content of that buffer stays
            tell(host_messages.ParityFailed(round_id=order.round_id, reason=str(error)))
            return
        self._next = run
        self._begin()

    def _prepare(self, order: host_messages.MakeParity, tell: Report) -> _ParityRun:
        """Look for the images of an order, and list them for the other members."""
        group, server = self._group, self._server
        if group is None or server is None:
            raise NotProtected("this keeper was told no group")
        attempt_id = order.attempt_id
        if attempt_id is None:
            attempts = (one for one in self._memory.discovered()[1] if one.id == order.attempt)
            if (one := next(attempts, None)) is None:
                raise NotFound("there is no image of it here")
            attempt_id = one.attempt_id
        member, half = self.member(order), 1 - order.half
        records = [row.record for row in self.store.all() if row.half == half]
        earlier = {
            image.rank: image
            for record in records[:1]
            for one in record.members
            for image in one.images
        }
        run = _ParityRun(order, group, attempt_id, member, heads_of(records), tell)
        server.offer_document(run.path, list_of(member, earlier), generation=run.generation)
        return run

    def begin(self, round_id: int) -> None:
        """Start the exchange: all hosts have their memory."""
        if self._run is not None and self._run.order.round_id == round_id:
            self._run.may_begin.set()

    def rebuild(
        self, order: host_messages.RebuildImage, hosts: Sequence[m.HostEntry], tell: Report
    ) -> None:
        """Decode an image that no host has, from the surviving members of its group."""
        record = self.record_of(order.attempt, order.rank, order.half)
        reach = self.group_access(order.attempt, hosts, order.ports)
        if reach is None or record is None:
            reason = f"no parity is kept here of the image of rank {order.rank}"
            tell(host_messages.RebuildFailed(slot=order.slot, attempt=order.attempt, reason=reason))
            return
        self.rebuilding.begin(order, record, self._own, reach, tell)

    def record_of(self, attempt: str, rank: int, half: int | None = None) -> ParityRecord | None:
        """Return the record of a shard stored here whose group has this rank's image, or None.

        ``half``: search only this buffer; else both.
        """
        records = (row.record for row in self.store.of(attempt, half))
        return next((one for one in records if rank in ranks_of(one)), None)

    def group_access(
        self, attempt: str, hosts: Sequence[m.HostEntry], ports: Mapping[str, int] | None = None
    ) -> Callable[[], KeeperReach] | None:
        """Return a function that locates the attempt's group parts, on a thread; None without
        hosts.

        ``ports``: where hosts listen now.
        """
        puller, own = self._puller, self._own
        if puller is None:
            return None
        kept, slots = self.store.of(attempt), self._slots_of(attempt)
        now = ports or {}
        peers = {h.id: Peer(h.id, h.address, now.get(h.id) or h.port) for h in hosts if h.id != own}

        def find() -> KeeperReach:
            from holdfast.keeper.parity.group_access import KeeperReach, map_shard

            rows = [(row, map_shard(row, self._memory.directory)) for row in kept]
            return KeeperReach(own, self._memory, slots, rows, peers, puller)

        return find

    def cancel(self, why: str) -> None:
        """Cancel all work; stored shards stay."""
        if self._next is not None:
            self._withdraw(self._next)
            self._next = None
        if self._run is not None:
            self._run.cancel(why)

    def drop(self) -> None:
        """Delete all shards, and free their memory."""
        self.cancel("no host keeps parity any more")
        self._is_unwanted = True
        self._drop_if_idle()

    def _drop_if_idle(self) -> None:
        if self._is_unwanted and self._run is None:  # otherwise a thread may write there
            for half in HALVES:
                self.store.forget(half)
            self._files.drop()

    def drop_buffer(self, half: int) -> None:
        """Delete the shards of this buffer: those of the other buffer take their names."""
        if self._run is None or self._run.order.half != half:
            self.store.forget(half)

    # ── one round ────────────────────────────────────────────────────────────────────────────────

    def _begin(self) -> None:
        """Begin the next round, unless one is under way: who hears of an end may order another."""
        run = self._next
        if self._run is not None or run is None:
            return
        self._run, self._next = run, None
        self._set_rate(run.order.rate_bytes_s)
        self._in_thread(run, self._agree, self._agreed)

    def _set_rate(self, rate_bytes_s: int | None) -> None:
        """Set the rate limit for pulling parity data, and for serving others meanwhile."""
        self._budget.set_rate(rate_bytes_s)
        if self._server is not None:
            self._server.set_rate(rate_bytes_s)

    def _in_thread(
        self,
        run: _ParityRun,
        work: Callable[[_ParityRun], T],
        done: Callable[[_ParityRun, T | None, str], None],
    ) -> None:
        self._background.run_beside(
            "holdfast-parity", lambda: work(run), lambda result, why: done(run, result, why)
        )

    def _agree(self, run: _ParityRun) -> RecordTerms:
        """Read on the thread of which images the members make parity; nothing is written yet."""
        puller, order = self._puller, run.order
        if puller is None:
            raise NotProtected("this keeper serves no peers")

        members = TermsReader(
            run.member,
            [peer for peer in run.group.members if peer.name != self._own],
            attempt=order.attempt,
            round_id=order.round_id,
            generation=run.generation,
            heads=run.heads,
            budgeted=BudgetedPuller(puller, self._budget, run.scope),
        ).run()
        terms = RecordTerms(
            self._memory.run_id,
            run.attempt_id.generation,
            run.attempt_id.attempt,
            run.attempt_id.world,
            run.attempt_id.layout,
            run.group.parity,
            members,
            order.round_id,
        )
        terms.number_of(self._own)
        return terms

    def _agreed(self, run: _ParityRun, terms: RecordTerms | None, failure: str) -> None:
        if terms is None or run.why:
            self._ended(run, None, failure or run.why)
            return
        self.store.forget(run.order.half)
        self._in_thread(run, lambda run: self._exchange(run, terms), self._ended)

    def _exchange(self, run: _ParityRun, terms: RecordTerms) -> list[StoredParity]:
        """Run the exchange on the thread; return all shards, with their records written."""
        order, server, puller = run.order, self._server, self._puller
        if server is None or puller is None:
            raise NotProtected("this keeper serves no peers")
        self._files.make(terms, self._own, order.half)
        kept = stored_by(terms.placement, terms.number_of(self._own))
        places = self._files.place(order.half, kept)
        exchange = ShardExchange(
            terms,
            self._own,
            peers={peer.name: peer for peer in run.group.members if peer.name != self._own},
            room=self._room(terms, {(k.stripe, k.row): m for k, (_, m) in places.items()}),
            offers=ThreadSafeServer(server, self._loop),
            puller=puller,
            budget=self._budget,
        )
        run.begin(exchange)
        ready = host_messages.ParityReady(round_id=order.round_id, terms=terms.digest)
        self._background.from_thread(lambda: run.tell(ready))
        if not run.may_begin.wait(READY_S):
            raise NotProtected(f"not all hosts had memory for parity in {READY_S:.0f} s")
        sealed = exchange.run()
        return self._files.store_records(
            order.half, ((places[s.kept][0], s.record) for s in sealed)
        )

    def _room(self, terms: RecordTerms, rows: dict[tuple[int, int], memoryview]) -> ShardMemory:
        needed = staging_bytes(terms.placement.columns)
        if len(self._staging) < needed:
            self._staging = memoryview(bytearray(needed))
        passing = self._files.transit()
        if passing is None:
            return ShardMemory(rows, self._staging)
        path, memory = passing
        return ShardMemory(rows, self._staging, memory, path, IMAGE_START)

    def _withdraw(self, run: _ParityRun) -> None:
        if self._server is not None:
            self._server.withdraw(run.path)

    def _ended(self, run: _ParityRun, made: list[StoredParity] | None, failure: str) -> None:
        """Handle the end of a round, on the loop. ``made``: its shards; ``failure``: why there are
        none.
        """
        self._run = None
        self._withdraw(run)
        self._set_rate(None)  # a restore reads as fast as it can
        self.store.add(made or ())
        if failure or run.why:
            reason = run.why or failure
            run.tell(host_messages.ParityFailed(round_id=run.order.round_id, reason=reason))
        else:
            run.tell(host_messages.ParityComplete(round_id=run.order.round_id))
        self._begin()
        self._drop_if_idle()

    def do(self, fact: Any, hosts: Sequence[m.HostEntry], tell: Report) -> None:
        """Carry out a parity order of the coordinator; ``tell`` is called with the results."""
        match fact:
            case host_messages.JoinGroup():
                self.join(fact, hosts)
            case host_messages.MakeParity():
                self.make(fact, tell)
            case host_messages.BeginParity(round_id=round_id):
                self.begin(round_id)
            case host_messages.CancelParity(reason=reason):
                self.cancel(reason)
            case host_messages.DropParity():
                self.drop()
            case host_messages.DropShards(round_id=round_id, half=half):
                self.drop_buffer(half)
                tell(host_messages.ShardsDropped(round_id=round_id))
            case host_messages.RebuildImage():
                self.rebuild(fact, hosts, tell)
            case host_messages.CancelRebuild(reason=reason):
                self.rebuilding.cancel(reason)


def stored_shards(parity: ParityWorker | None) -> tuple[host_messages.ParityShards, ...]:
    """Return the stored shards as a message for the coordinator."""
    return tuple(
        host_messages.ParityShards(
            half=row.half,
            attempt=row.record.attempt,
            members=row.members,
            parity=row.record.parity,
            images=row.images,
        )
        for row in (parity.shards() if parity is not None else ())
    )


def ranks_of(record: ParityRecord) -> set[int]:
    """Return the ranks whose images a shard is made of."""
    return {image.rank for member in record.members for image in member.images}


class ParityGroup(NamedTuple):
    """The members of this host's group, in order of id, and how many of them can be lost."""

    members: tuple[Peer, ...]
    parity: int


class _ParityRun:
    """One round on this host, from its order on."""

    def __init__(
        self,
        order: host_messages.MakeParity,
        group: ParityGroup,
        attempt_id: AttemptId,
        member: MemberFact,
        heads: Mapping[str, memoryview],
        tell: Report,
    ) -> None:
        self.order, self.group, self.attempt_id, self.member = order, group, attempt_id, member
        self.heads, self.tell = heads, tell
        self.generation = generation_name(attempt_id.generation)
        self.path = members_path(order.attempt, order.round_id)
        self.why = ""
        """Reason for its cancellation; "" while it is not cancelled."""
        self.may_begin = threading.Event()
        self.scope = CancelScope()
        """Of what is read before the exchange."""
        self._exchange: ShardExchange | None = None
        self._lock = threading.Lock()

    def begin(self, exchange: ShardExchange) -> None:
        """Make the round cancellable. Raises NotProtected if it was cancelled before."""
        with self._lock:
            self._exchange = exchange
            if self.why:
                raise NotProtected(self.why)

    def cancel(self, why: str) -> None:
        """Cancel the round; from any thread."""
        with self._lock:
            self.why = self.why or why
            self.may_begin.set()
            self.scope.stop(NotProtected(why))
            if self._exchange is not None:
                self._exchange.cancel(why)
