"""Play hosts without keepers: each is one real, sealed line to the coordinator's keeper.

A played host says what a keeper says whose ranks answer at once, and remembers what one would find
in its memory; there are no bytes of state.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from holdfast.catalogue import image_path
from holdfast.coordinator.actions import AllocateSlots, RemoveSlot
from holdfast.coordinator.requests import HostJoiner, RankReport
from holdfast.coordinator.slots import SlotWriter, number_of
from holdfast.errors import PeerError
from holdfast.format.image import ImagePlan, image_bytes
from holdfast.format.manifest import ImageId, ImageRef
from holdfast.geometry.layout import deflate, inflate
from holdfast.keeper.hosts import host_messages
from holdfast.keeper.hosts.follower import pauses
from holdfast.keeper.hosts.host_reports import encode_reports
from holdfast.persist.frozen_parts import StoredPart
from holdfast.protocol import messages as m
from holdfast.protocol.arena import SlotRecord, StoredSlot, process_start
from holdfast.protocol.image_plan import ImageSizes
from holdfast.transport.channel import SealedChannel, call
from holdfast.transport.client_connection import Peer

if TYPE_CHECKING:
    from benchmarks.fleet.run import Fleet

#: (Bytes before the data, bytes of tensors) of every played image.
SIZES = 4096, 1 << 20
X = "0123456789abcdef"
#: The plain values of every image: none.
VALUES = b"{}"


class PlayedHost:
    """One host, and its ranks."""

    def __init__(self, fleet: Fleet, name: str, ranks: int, domain: str = "") -> None:
        self.fleet, self.name, self.count, self.domain = fleet, name, ranks, domain
        self.attached, self.joined = asyncio.Event(), asyncio.Event()
        self.calls = 0
        self.slots: dict[int, StoredSlot] = {}
        self.shards: dict[int, host_messages.ParityShards] = {}
        self.line: SealedChannel | None = None
        self._task: asyncio.Task[None] | None = None
        self.layouts: set[str] = set()
        """Hashes of the layouts in its memory."""
        self._waiting_plan: host_messages.SizeImages | None = None
        self._group: tuple[str, ...] = ()
        self._order: host_messages.MakeParity | None = None
        self._answers = 0
        self._answered = asyncio.Event()

    def place(self, number: int) -> None:
        """Its number in the next incarnation."""
        self.number = number
        self.ranks = tuple(range(number * self.count, (number + 1) * self.count))

    def entry(self) -> m.HostEntry:
        """Its line in the table of hosts."""
        return m.HostEntry(
            id=self.name, ranks=self.ranks, address="127.0.0.1", port=1, domain=self.domain
        )

    def follow(self) -> None:
        """Call the coordinator of this incarnation, again and again, and stay."""
        self.stop()
        self.attached.clear()
        self._task = asyncio.create_task(self._follow())

    def stop(self) -> None:
        """Be gone."""
        if self._task is not None:
            self._task.cancel()

    async def _follow(self) -> None:
        fleet, waits = self.fleet, pauses()
        place = fleet.table_of(self.number)[0]
        peer = Peer(place.id, place.address, place.control_port)
        while True:
            self.calls += 1
            try:
                n = fleet.incarnation
                line = await call(fleet.secret, peer, name=self.name, incarnation=n)
                await self._serve(line)
            except PeerError:
                if self.attached.is_set():
                    waits = pauses()
            self.attached.clear()
            await asyncio.sleep(next(waits))

    async def _serve(self, line: SealedChannel) -> None:
        self.line = line
        self.joiner = HostJoiner(self.count)
        self._waiting_plan = None
        self.send(
            host_messages.HostInventory(
                arena=f"/{self.name}",
                slots=tuple(self.slots.values()),
                next_number=max(self.slots, default=-1) + 1,
                port=1,
                shards=tuple(self.shards.values()),
            )
        )
        try:
            while True:
                frame = await line.receive()
                fact = host_messages.from_coordinator(frame)
                self._count(type(fact).__name__, frame)
                self.obey(fact)
        finally:
            line.close()
            self.line = None

    def _count(self, kind: str, frame: bytes) -> None:
        self.fleet.traffic[kind] += 1
        self.fleet.traffic[f"{kind} bytes"] += len(frame)

    def send(self, fact: host_messages.Fact) -> None:
        """Tell the coordinator."""
        if self.line is not None:
            frame = host_messages.pack(fact)
            self._count(type(fact).__name__, frame)
            self.line.send(frame)

    # ── its ranks ────────────────────────────────────────────────────────────────────────────────

    async def join(self) -> None:
        """All ranks take their places."""
        fleet, process = self.fleet, os.getpid()
        for number, rank in enumerate(self.ranks):
            writer = SlotWriter(process, process_start(process))
            self.send(host_messages.TrainerConnected(line=number, process=writer))
            join = m.Join(
                incarnation=fleet.incarnation,
                nonce=fleet.nonce,
                rank=rank,
                is_copying=False,
                parity=fleet.parity,
                persist_at_end=False,
            )
            self._say(number, join, 1)
        await self._all_answered()

    def _say(self, number: int, message: m.Message, seq: int = 0) -> None:
        body = m.pack(message, seq)[m.LENGTH_BYTES :]
        self.send(host_messages.TrainerMessage(line=number, body=body))

    async def _all_answered(self) -> None:
        await self._answered.wait()
        self._answered.clear()

    def ask(self, request: m.RequestCapture) -> None:
        """All ranks ask for a slot."""
        self._report([request] * self.count)

    def _report(self, reports: list[RankReport]) -> None:
        for number, report in enumerate(reports):
            for joined in self.joiner.add(number, report, 0.0):
                self.send(encode_reports(joined))

    def _hear(self, lines: Sequence[int], frame: bytes) -> None:
        seq, message = m.unpack(frame[m.LENGTH_BYTES :])
        if isinstance(message, m.RequestTable):
            self._say(lines[0], self.fleet.own_table(message))
            return
        if not seq:
            self.fleet.hear(message, len(lines))
            return
        assert isinstance(message, m.Done), message
        self._answers += len(lines)
        if self._answers == self.count:
            self._answers = 0
            self._answered.set()

    # ── orders of the coordinator ────────────────────────────────────────────────────────────────

    def obey(self, fact: host_messages.ToFollower) -> None:
        """Do what a keeper does, at once."""
        match fact:
            case host_messages.ForwardMessage(lines=lines, frame=frame):
                self._hear(lines, frame)
            case host_messages.HostAttached(tell_layouts=hashes):
                for hash_ in hashes:
                    deflated = deflate(self.fleet.layouts[hash_])
                    self.send(host_messages.LayoutReply(hash=hash_, deflated=deflated))
                self.attached.set()
            case AllocateSlots(slot, capacity_bytes):
                number = number_of(slot)
                self.slots[number] = StoredSlot(number, capacity_bytes)
                self.send(host_messages.SlotsCreated(made={number: (capacity_bytes, 0)}))
            case RemoveSlot(slot):
                self.slots.pop(number_of(slot), None)
            case host_messages.RecordLayout():
                self._record_layout(fact)
            case host_messages.SizeImages():
                self._size_images(fact)
            case host_messages.GrantSlots():
                self._capture(fact)
            case host_messages.WriteImage():
                self._write(fact)
            case _:
                self._protect(fact)

    def _record_layout(self, fact: host_messages.RecordLayout) -> None:
        """Remember a layout, or ask for its bytes; an order to plan waits for them."""
        hash_, planning = fact.hash, self._waiting_plan
        self._waiting_plan = None
        if not fact.deflated and hash_ not in self.layouts:
            self.send(host_messages.LayoutMissing(hash=hash_))
        else:
            self.layouts = self.layouts.intersection(fact.used) | {hash_}
        if hash_ in self.layouts and hash_ not in self.fleet.layouts:
            self.fleet.layouts[hash_] = inflate(fact.deflated, hash_)
        if planning is not None:
            self._size_images(planning)

    def _size_images(self, fact: host_messages.SizeImages) -> None:
        if fact.layout not in self.layouts:
            self._waiting_plan = fact
            return
        sizes = ImageSizes(dict.fromkeys(fact.ranks, SIZES))
        self.send(host_messages.ImagesPlanned(layout=fact.layout, sizes=sizes))

    def _set(self, number: int, record: SlotRecord, image: ImageId) -> None:
        sealed = msgspec.structs.replace(
            record,
            state="captured",
            nonce=self.fleet.nonce,
            rank=image.rank,
            image_bytes=image.image_bytes,
            header_xxh3=image.header_xxh3,
            table_xxh3=image.table_xxh3,
        )
        self.slots[number] = msgspec.structs.replace(self.slots[number], record=sealed)

    def _capture(self, fact: host_messages.GrantSlots) -> None:
        """All ranks copy at once, and say so."""
        plan, values_bytes = ImagePlan((), SIZES[1], "", SIZES[0]), len(VALUES)
        size = image_bytes(plan, values_bytes)
        reports: list[RankReport] = []
        for rank, slot in zip(fact.ranks, fact.slots, strict=True):
            image = image_id(rank, fact.record.step, size)
            self._set(slot, fact.record, image)
            reports.append(
                m.Captured(
                    attempt=fact.record.attempt,
                    image_bytes=size,
                    header_xxh3=image.header_xxh3,
                    table_xxh3=image.table_xxh3,
                )
            )
        self.fleet.save_now.is_granted(len(reports))
        self._report(reports)

    def _write(self, fact: host_messages.WriteImage) -> None:
        for order in fact.images:
            image = order.image
            path = image_path(fact.attempt_id.generation, fact.directory, image.rank)
            stored = ImageRef(
                path=path,
                rank=image.rank,
                size_bytes=image.image_bytes,
                header_xxh3=image.header_xxh3 or X,
                table_xxh3=image.table_xxh3 or X,
            )
            self.send(
                host_messages.ImageWritten(directory=fact.directory, stored=StoredPart(stored))
            )
        self.send(host_messages.WriteEnded(directory=fact.directory, reason=""))

    def _protect(self, fact: host_messages.ToFollower) -> None:
        match fact:
            case host_messages.JoinGroup(hosts=hosts, parity=parity):
                self._group = tuple(self.fleet.table[n].id for n in hosts)
                self._parity = parity
            case host_messages.MakeParity(round_id=round_id):
                self._order = fact
                self.send(host_messages.ParityReady(round_id=round_id, terms=0))
            case host_messages.BeginParity(round_id=round_id) if self._order is not None:
                self.shards[self._order.half] = host_messages.ParityShards(
                    half=self._order.half,
                    attempt=self._order.attempt,
                    members=self._group,
                    parity=self._parity,
                    images=self._images_of_group(),
                )
                self.send(host_messages.ParityComplete(round_id=round_id))
            case host_messages.DropShards(round_id=round_id, half=half):
                self.shards.pop(half, None)
                self.send(host_messages.ShardsDropped(round_id=round_id))
            case host_messages.DropParity():
                self.shards.clear()
            case host_messages.RebuildImage(slot=slot, attempt=attempt, rank=rank):
                self._rebuild(slot, attempt, rank)
            case _:
                pass

    def _images_of_group(self) -> dict[int, int]:
        size = image_bytes(ImagePlan((), SIZES[1], "", SIZES[0]), len(VALUES))
        members = set(self._group)
        return {
            rank: size for each in self.fleet.table if each.id in members for rank in each.ranks
        }

    def _rebuild(self, slot: int, attempt: str, rank: int) -> None:
        held = [each.record for each in self.slots.values() if each.record is not None]
        record = next(each for each in held if each.attempt == attempt)
        size = image_bytes(ImagePlan((), SIZES[1], "", SIZES[0]), len(VALUES))
        image = image_id(rank, record.step, size)
        self._set(slot, record, image)
        self.send(host_messages.RebuildComplete(slot=slot, attempt=attempt, image=image))


def image_id(rank: int, step: int, size_bytes: int) -> ImageId:
    """An image as its keeper names it: the checksums are others for each rank and step."""
    sums = hashlib.shake_128(f"{rank} {step}".encode()).hexdigest(16)
    return ImageId(rank, size_bytes, sums[:16], sums[16:])
