"""Makes, stores and serves this host's parity shards as the coordinator orders.

The exchange runs on threads of its own, one generation at a time. The coordinator chooses the
generation and the buffer, and is told when all shards of this host are sealed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError, NotProtected
from holdfast.format.image import header_size
from holdfast.format.manifest import Generation
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.hosts import parity_messages
from holdfast.keeper.hosts.network import Network
from holdfast.keeper.hosts.parity_messages import Fact
from holdfast.keeper.jobs import Background
from holdfast.keeper.parity.rebuild import RebuildWorker
from holdfast.keeper.parity.store import HALVES, ShardFiles, ShardStore, StoredParity
from holdfast.keeper.published_images import PublishedImages
from holdfast.parity.exchange.shard_exchange import ShardExchange, ShardMemory
from holdfast.parity.exchange.windows import RateBudget
from holdfast.parity.planning.budget import staging_bytes
from holdfast.parity.planning.placement import stored_by
from holdfast.parity.planning.record import ImageFact, MemberFact, ParityRecord, RecordTerms
from holdfast.protocol import messages as m
from holdfast.protocol.arena import IMAGE_START
from holdfast.transport.client import Puller
from holdfast.transport.client_connection import Peer
from holdfast.transport.server import PeerServer
from holdfast.transport.server import ThreadSafeServer as ThreadOffering

if TYPE_CHECKING:  # needed only after a loss
    from holdfast.keeper.parity.group_access import GroupAccess

Told = Callable[[Fact], None]
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

    def member(self, attempt: str) -> MemberFact:
        """Return the images of an attempt that are here. Raises ArenaError or FormatError."""
        slots, attempts = self._memory.discovered()
        by_id = {slot.id: slot for slot in slots}
        ranks = {rank: s for one in attempts if one.id == attempt for rank, s in one.slots.items()}
        images = []
        for rank, number in sorted(ranks.items()):
            slot, image = by_id[number], self._memory.files[number].image
            start = header_size(bytes(image[:8]), f"rank {rank}", slot.image_bytes)
            images.append(
                ImageFact(
                    rank,
                    slot.image_bytes,
                    start,
                    slot.header_xxh3,
                    slot.table_xxh3,
                    bytes(image[:start]),
                )
            )
        return MemberFact(self._own, tuple(images))

    def make(
        self, order: parity_messages.MakeParity, hosts: Sequence[m.HostEntry], tell: Told
    ) -> None:
        """Make the shards of this host, cancelling an earlier round."""
        self.cancel("a newer turn has begun")
        self._is_unwanted = False
        try:
            terms = self._terms(order)
        except HoldfastError as error:  # the content of that buffer stays
            tell(parity_messages.ParityFailed(turn=order.turn, reason=str(error)))
            return
        ports = {member.host: port for member, port in zip(order.members, order.ports, strict=True)}
        peers = {h.id: Peer(h.id, h.address, ports.get(h.id) or h.port) for h in hosts}
        self._next = _ParityRun(order, terms, peers, tell)
        if self._run is None:
            self._begin()

    def _terms(self, order: parity_messages.MakeParity) -> RecordTerms:
        """Return the terms of an order. FormatError or UsageError if no shards can be made by
        them.
        """
        terms = RecordTerms(
            self._memory.run_id,
            Generation(order.incarnation, order.step),
            order.attempt,
            order.world,
            order.layout,
            order.parity,
            order.members,
            order.turn,
        )
        terms.number_of(self._own)
        return terms

    def begin(self, turn: int) -> None:
        """Start the exchange: all hosts have their memory."""
        if self._run is not None and self._run.order.turn == turn:
            self._run.may_begin.set()

    def rebuild(
        self, order: parity_messages.RebuildImage, hosts: Sequence[m.HostEntry], tell: Told
    ) -> None:
        """Decode an image that no host has, from the surviving members of its group."""
        record = self.record_of(order.attempt, order.rank, order.half)
        reach = self.group_access(order.attempt, hosts, order.ports)
        if reach is None or record is None:
            reason = f"no parity is kept here of the image of rank {order.rank}"
            tell(
                parity_messages.RebuildFailed(slot=order.slot, attempt=order.attempt, reason=reason)
            )
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
    ) -> Callable[[], GroupAccess] | None:
        """Return a function that locates the attempt's group parts, on a thread; None without
        hosts.

        ``ports``: where hosts listen now.
        """
        puller, own = self._puller, self._own
        if puller is None:
            return None
        kept = self.store.of(attempt)
        _, attempts = self._memory.discovered()
        slots = {rank: s for one in attempts if one.id == attempt for rank, s in one.slots.items()}
        now = ports or {}
        peers = {h.id: Peer(h.id, h.address, now.get(h.id) or h.port) for h in hosts if h.id != own}

        def find() -> GroupAccess:
            from holdfast.keeper.parity.group_access import GroupAccess, map_shard

            rows = [(row, map_shard(row, self._memory.directory)) for row in kept]
            return GroupAccess(own, self._memory, slots, rows, peers, puller)

        return find

    def cancel(self, why: str) -> None:
        """Cancel all work; stored shards stay."""
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
        self._run, self._next = self._next, None
        run = self._run
        if run is None:
            return
        self._set_rate(run.order.rate_bytes_s)
        self.store.forget(run.order.half)
        thread = threading.Thread(
            target=self._work, args=(run,), name="holdfast-parity", daemon=True
        )
        thread.start()

    def _set_rate(self, rate_bytes_s: int | None) -> None:
        """Set the rate limit for pulling parity data, and for serving others meanwhile."""
        self._budget.set_rate(rate_bytes_s)
        if self._server is not None:
            self._server.set_rate(rate_bytes_s)

    def _work(self, run: _ParityRun) -> None:
        failure = ""
        rows: list[StoredParity] = []
        try:
            rows = self._exchange(run)
        except (HoldfastError, OSError) as error:
            failure = str(error)
        except Exception as error:  # the other hosts wait for this one, whatever the error is
            failure = f"{type(error).__name__}: {error}"
        self._background.from_thread(lambda: self._ended(run, rows, failure))

    def _exchange(self, run: _ParityRun) -> list[StoredParity]:
        """Run the exchange on the thread; return all shards, with their records written."""
        order, terms, server, puller = run.order, run.terms, self._server, self._puller
        if server is None or puller is None:
            raise NotProtected("this keeper serves no peers")
        self._files.make(terms, self._own, order.half)
        kept = stored_by(terms.placement, terms.number_of(self._own))
        places = self._files.place(order.half, kept)
        exchange = ShardExchange(
            terms,
            self._own,
            peers={k: p for k, p in run.peers.items() if k != self._own},
            room=self._room(terms, {(k.stripe, k.row): m for k, (_, m) in places.items()}),
            offers=ThreadOffering(server, self._loop),
            puller=puller,
            budget=self._budget,
        )
        run.begin(exchange)
        ready = parity_messages.ParityReady(turn=order.turn)
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

    def _ended(self, run: _ParityRun, rows: list[StoredParity], failure: str) -> None:
        """Handle the end of a round, on the loop."""
        self._run = None
        self._set_rate(None)  # a restore reads as fast as it can
        self.store.add(rows)
        turn = run.order.turn
        if run.why:
            failure = run.why
        if failure:
            run.tell(parity_messages.ParityFailed(turn=turn, reason=failure))
        else:
            run.tell(parity_messages.ParityComplete(turn=turn))
        self._begin()
        self._drop_if_idle()


def protect(
    parity: ParityWorker,
    fact: Fact,
    hosts: Sequence[m.HostEntry],
    tell: Callable[[Fact], None],
) -> None:
    """Execute a parity order of the coordinator; ``tell`` is called with the results."""
    match fact:
        case parity_messages.ListImages(turn=turn, attempt=attempt):
            try:
                reply = parity_messages.ImagesListed(turn=turn, member=parity.member(attempt))
            except (HoldfastError, KeyError) as error:
                reply = parity_messages.ImagesListed(turn=turn, member=None, reason=str(error))
            tell(reply)
        case parity_messages.MakeParity():
            parity.make(fact, hosts, tell)
        case parity_messages.BeginParity(turn=turn):
            parity.begin(turn)
        case parity_messages.CancelParity(reason=reason):
            parity.cancel(reason)
        case parity_messages.DropParity():
            parity.drop()
        case parity_messages.DropShards(turn=turn, half=half):
            parity.drop_buffer(half)
            tell(parity_messages.ShardsDropped(turn=turn))
        case parity_messages.RebuildImage():
            parity.rebuild(fact, hosts, tell)
        case parity_messages.CancelRebuild(reason=reason):
            parity.rebuilding.cancel(reason)


def stored_shards(parity: ParityWorker) -> tuple[parity_messages.ParityShards, ...]:
    """Return the stored shards as a message for the coordinator."""
    return tuple(
        parity_messages.ParityShards(
            half=row.half,
            attempt=row.record.attempt,
            members=row.members,
            parity=row.record.parity,
            images=row.images,
        )
        for row in parity.shards()
    )


def ranks_of(record: ParityRecord) -> set[int]:
    """Return the ranks whose images a shard is made of."""
    return {image.rank for member in record.members for image in member.images}


class _ParityRun:
    """One round on this host, from its order on."""

    def __init__(
        self,
        order: parity_messages.MakeParity,
        terms: RecordTerms,
        peers: dict[str, Peer],
        tell: Told,
    ) -> None:
        self.order, self.terms, self.peers, self.tell = order, terms, peers, tell
        self.why = ""
        """Reason for its cancellation; "" while it is not cancelled."""
        self.may_begin = threading.Event()
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
            if self._exchange is not None:
                self._exchange.cancel(why)
