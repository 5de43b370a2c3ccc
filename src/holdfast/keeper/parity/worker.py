"""This host's part in protecting a generation: it makes its rows, keeps and offers them.

The exchange runs on threads of its own, one generation at a time. Whoever coordinates says which,
into which half of the memory, and hears whether all rows of this host are sealed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError, NotProtected
from holdfast.format.image import header_size
from holdfast.format.manifest import Generation
from holdfast.keeper import parity_facts
from holdfast.keeper.background import Background
from holdfast.keeper.facts import Fact
from holdfast.keeper.kept import KeptRows
from holdfast.keeper.memory import Memory
from holdfast.keeper.network import Network
from holdfast.keeper.offering import Offering
from holdfast.keeper.rebuilding import Rebuilding
from holdfast.keeper.rows import HALVES, KeptRow, RowMemory
from holdfast.peers.calling import Peer
from holdfast.peers.client import Puller
from holdfast.peers.offering import Offering as ThreadOffering
from holdfast.peers.server import PeerServer
from holdfast.redundancy.capacity import staging_bytes
from holdfast.redundancy.exchange import Exchange, Room
from holdfast.redundancy.records import ImageFact, MemberFact, ParityRecord, Terms
from holdfast.redundancy.stripes import stored_by
from holdfast.redundancy.waiting import Budget
from holdfast.snapshot import messages as m
from holdfast.snapshot.arena import IMAGE_START

if TYPE_CHECKING:  # only where something is lost
    from holdfast.keeper.mending import Reached

Told = Callable[[Fact], None]
READY_S = 600.0
"""For the memory of all hosts; who coordinates gives up sooner, and says which have none."""


class Parity:
    """On the keeper's loop, but for the thread that makes parity.

    ``offering`` offers the images of this host, and tells what rows are kept.
    """

    def __init__(self, memory: Memory, background: Background, offering: Offering) -> None:
        self._memory, self._background = memory, background
        self.rebuilding = Rebuilding(memory, background, offering)
        self._loop = asyncio.get_running_loop()
        self._files = RowMemory(memory)
        self.kept = KeptRows(self._files, offering.holdings_changed)
        self._server: PeerServer | None = None
        self._puller: Puller | None = None
        self._own, self._port = "", 0
        self._staging = memoryview(b"")
        self._budget = Budget()
        self._run: _Run | None = None
        self._next: _Run | None = None
        self._is_unwanted = False
        """Whether the memory is to be given back, once nothing is written there."""

    def serve(self, network: Network | None, incarnation: int) -> None:
        """Offer what is kept through this one from now on, or nothing more (None)."""
        why = "another start of the run has begun"
        self.give_up(why)
        self.rebuilding.give_up(why)
        self._is_unwanted = False
        if self._puller is not None:
            self._puller.close()
        self._server, self._puller, self._port = None, None, 0
        if network is not None:
            self._server, self._own, self._port = network.peers, network.name, network.port
            self._puller = Puller(network.secret, incarnation=incarnation)
        self.kept.serve(self._server)

    @property
    def port(self) -> int:
        """Where this keeper gives images and rows to others; 0 while it does not."""
        return self._port

    def rows(self) -> Sequence[KeptRow]:
        """All rows that are kept, each whole."""
        return self.kept.all()

    @property
    def is_busy(self) -> bool:
        """Whether rows are made, or images decoded."""
        return self._run is not None or self.rebuilding.is_busy

    # ── what is asked of this host ───────────────────────────────────────────────────────

    def member(self, attempt: str) -> MemberFact:
        """The images of an attempt that are here. ArenaError or FormatError."""
        slots, attempts = self._memory.found()
        by_id = {slot.id: slot for slot in slots}
        ranks = {rank: s for one in attempts if one.id == attempt for rank, s in one.slots.items()}
        images = []
        for rank, number in sorted(ranks.items()):
            slot, image = by_id[number], self._memory.files[number].image
            start = header_size(bytes(image[:8]), f"rank {rank}", slot.image_bytes)
            images.append(ImageFact(
                rank, slot.image_bytes, start, slot.header_xxh3, slot.table_xxh3,
                bytes(image[:start]),
            ))  # fmt: skip
        return MemberFact(self._own, tuple(images))

    def make(
        self, order: parity_facts.MakeParity, hosts: Sequence[m.HostPlace], tell: Told
    ) -> None:
        """Make the rows of this host, whatever it was making before."""
        self.give_up("a newer turn has begun")
        self._is_unwanted = False
        try:
            terms = self._terms(order)
        except HoldfastError as error:  # what lies in that half stays
            tell(parity_facts.ParityNotMade(turn=order.turn, reason=str(error)))
            return
        ports = {member.host: port for member, port in zip(order.members, order.ports, strict=True)}
        peers = {h.id: Peer(h.id, h.address, ports.get(h.id) or h.port) for h in hosts}
        self._next = _Run(order, terms, peers, tell)
        if self._run is None:
            self._begin()

    def _terms(self, order: parity_facts.MakeParity) -> Terms:
        """FormatError or UsageError when this host could make no rows by them."""
        terms = Terms(
            self._memory.run_id, Generation(order.incarnation, order.step), order.attempt,
            order.world, order.layout, order.parity, order.members, order.turn,
        )  # fmt: skip
        terms.number_of(self._own)
        return terms

    def begin(self, turn: int) -> None:
        """All hosts have their memory."""
        if self._run is not None and self._run.order.turn == turn:
            self._run.may_begin.set()

    def rebuild(
        self, order: parity_facts.Rebuild, hosts: Sequence[m.HostPlace], tell: Told
    ) -> None:
        """Decode an image that no host has, out of what is left of its group."""
        record = self.record_of(order.attempt, order.rank, order.half)
        reach = self.reach(order.attempt, hosts, order.ports)
        if reach is None or record is None:
            reason = f"no parity is kept here of the image of rank {order.rank}"
            tell(parity_facts.NotRebuilt(slot=order.slot, attempt=order.attempt, reason=reason))
            return
        self.rebuilding.begin(order, record, self._own, reach, tell)

    def record_of(self, attempt: str, rank: int, half: int | None = None) -> ParityRecord | None:
        """Of a row of the group that has this rank's image, if such a row is kept here.

        ``half``: only there; else in both.
        """
        records = (row.record for row in self.kept.of(attempt, half))
        return next((one for one in records if rank in ranks_of(one)), None)

    def reach(
        self, attempt: str, hosts: Sequence[m.HostPlace], ports: Mapping[str, int] | None = None
    ) -> Callable[[], Reached] | None:
        """What finds the parts of the attempt's groups, on a thread; None while nobody is known.

        ``ports``: where hosts listen now.
        """
        puller, own = self._puller, self._own
        if puller is None:
            return None
        kept = self.kept.of(attempt)
        _, attempts = self._memory.found()
        slots = {rank: s for one in attempts if one.id == attempt for rank, s in one.slots.items()}
        now = ports or {}
        peers = {h.id: Peer(h.id, h.address, now.get(h.id) or h.port) for h in hosts if h.id != own}

        def find() -> Reached:
            from holdfast.keeper.mending import Reached, map_row

            rows = [(row, map_row(row, self._memory.directory)) for row in kept]
            return Reached(own, self._memory, slots, rows, peers, puller)

        return find

    def give_up(self, why: str) -> None:
        """Make nothing any more; what is kept stays."""
        self._next = None
        if self._run is not None:
            self._run.cancel(why)

    def drop(self) -> None:
        """Keep no rows any more, and take no memory for them."""
        self.give_up("no host keeps parity any more")
        self._is_unwanted = True
        self._drop_if_idle()

    def _drop_if_idle(self) -> None:
        if self._is_unwanted and self._run is None:  # else a thread may write there
            for half in HALVES:
                self.kept.forget(half)
            self._files.drop()

    def drop_half(self, half: int) -> None:
        """The rows of this half are not needed: those of the other take their names."""
        if self._run is None or self._run.order.half != half:
            self.kept.forget(half)

    # ── one turn ─────────────────────────────────────────────────────────────────────────

    def _begin(self) -> None:
        self._run, self._next = self._next, None
        run = self._run
        if run is None:
            return
        self._set_rate(run.order.rate_bytes_s)
        self.kept.forget(run.order.half)
        thread = threading.Thread(
            target=self._work, args=(run,), name="holdfast-parity", daemon=True
        )
        thread.start()

    def _set_rate(self, rate_bytes_s: int | None) -> None:
        """Of what is pulled for parity, and what others are sent meanwhile."""
        self._budget.set_rate(rate_bytes_s)
        if self._server is not None:
            self._server.set_rate(rate_bytes_s)

    def _work(self, run: _Run) -> None:
        failure = ""
        rows: list[KeptRow] = []
        try:
            rows = self._exchange(run)
        except (HoldfastError, OSError) as error:
            failure = str(error)
        except Exception as error:  # whatever it is, the others wait for this host
            failure = f"{type(error).__name__}: {error}"
        self._background.from_thread(lambda: self._ended(run, rows, failure))

    def _exchange(self, run: _Run) -> list[KeptRow]:
        """On the thread: all rows, with their records beside them."""
        order, terms, server, puller = run.order, run.terms, self._server, self._puller
        if server is None or puller is None:
            raise NotProtected("this keeper serves no peers")
        self._files.make(terms, self._own, order.half)
        kept = stored_by(terms.placement, terms.number_of(self._own))
        places = self._files.place(order.half, kept)
        exchange = Exchange(
            terms, self._own, peers={k: p for k, p in run.peers.items() if k != self._own},
            room=self._room(terms, {(k.stripe, k.row): m for k, (_, m) in places.items()}),
            offers=ThreadOffering(server, self._loop), puller=puller, budget=self._budget,
        )  # fmt: skip
        run.begin(exchange)
        ready = parity_facts.ParityReady(turn=order.turn)
        self._background.from_thread(lambda: run.tell(ready))
        if not run.may_begin.wait(READY_S):
            raise NotProtected(f"not all hosts had memory for parity in {READY_S:.0f} s")
        sealed = exchange.run()
        return self._files.keep(order.half, ((places[s.kept][0], s.record) for s in sealed))

    def _room(self, terms: Terms, rows: dict[tuple[int, int], memoryview]) -> Room:
        needed = staging_bytes(terms.placement.columns)
        if len(self._staging) < needed:
            self._staging = memoryview(bytearray(needed))
        passing = self._files.passing()
        if passing is None:
            return Room(rows, self._staging)
        path, memory = passing
        return Room(rows, self._staging, memory, path, IMAGE_START)

    def _ended(self, run: _Run, rows: list[KeptRow], failure: str) -> None:
        """On the loop again."""
        self._run = None
        self._set_rate(None)  # a restore reads as fast as it can
        self.kept.add(rows)
        turn = run.order.turn
        if run.why:
            failure = run.why
        if failure:
            run.tell(parity_facts.ParityNotMade(turn=turn, reason=failure))
        else:
            run.tell(parity_facts.ParityMade(turn=turn))
        self._begin()
        self._drop_if_idle()


def protect(
    parity: Parity, fact: Fact, hosts: Sequence[m.HostPlace],
    tell: Callable[[Fact], None],
) -> None:  # fmt: skip
    """Have this host's parity do what the coordinator says; ``tell`` hears what comes of it."""
    match fact:
        case parity_facts.TellHeads(turn=turn, attempt=attempt):
            try:
                said = parity_facts.Heads(turn=turn, member=parity.member(attempt))
            except (HoldfastError, KeyError) as error:
                said = parity_facts.Heads(turn=turn, member=None, reason=str(error))
            tell(said)
        case parity_facts.MakeParity():
            parity.make(fact, hosts, tell)
        case parity_facts.BeginParity(turn=turn):
            parity.begin(turn)
        case parity_facts.GiveUpParity(reason=reason):
            parity.give_up(reason)
        case parity_facts.DropParity():
            parity.drop()
        case parity_facts.DropRows(turn=turn, half=half):
            parity.drop_half(half)
            tell(parity_facts.RowsDropped(turn=turn))
        case parity_facts.Rebuild():
            parity.rebuild(fact, hosts, tell)
        case parity_facts.GiveUpRebuild(reason=reason):
            parity.rebuilding.give_up(reason)


def rows_of(parity: Parity) -> tuple[parity_facts.HeldRows, ...]:
    """What parity is kept here, as a coordinator is told."""
    return tuple(
        parity_facts.HeldRows(
            half=row.half,
            attempt=row.record.attempt,
            members=row.members,
            parity=row.record.parity,
            images=row.images,
        )
        for row in parity.rows()
    )


def ranks_of(record: ParityRecord) -> set[int]:
    """The ranks whose images a row is made of."""
    return {image.rank for member in record.members for image in member.images}


class _Run:
    """One turn on this host, from when it is ordered."""

    def __init__(
        self, order: parity_facts.MakeParity, terms: Terms, peers: dict[str, Peer], tell: Told
    ) -> None:
        self.order, self.terms, self.peers, self.tell = order, terms, peers, tell
        self.why = ""
        """Why it is given up; "" while it is not."""
        self.may_begin = threading.Event()
        self._exchange: Exchange | None = None
        self._lock = threading.Lock()

    def begin(self, exchange: Exchange) -> None:
        """It can be cancelled from now on. NotProtected when it was given up before."""
        with self._lock:
            self._exchange = exchange
            if self.why:
                raise NotProtected(self.why)

    def cancel(self, why: str) -> None:
        """From any thread."""
        with self._lock:
            self.why = self.why or why
            self.may_begin.set()
            if self._exchange is not None:
                self._exchange.cancel(why)
