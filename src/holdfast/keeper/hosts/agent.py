"""Carries out the coordinator's orders on one host, its own or another, and reports the results.

On its own host the coordinator calls the agent directly; on another host the follower does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.coordinator.slots import SlotWriter
from holdfast.errors import ArenaError, HoldfastError
from holdfast.format.manifest import ImageId
from holdfast.geometry.layout import Layout, inflate
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.connections import TrainerConnection
from holdfast.keeper.hosts import messages
from holdfast.keeper.hosts.host_reports import from_column, seals_from_bytes
from holdfast.keeper.hosts.messages import Report, ignore
from holdfast.keeper.hosts.remote_writes import RemoteWriteService
from holdfast.keeper.jobs import Background
from holdfast.keeper.published_images import PublishedImages
from holdfast.keeper.rank_relay import grant_slots
from holdfast.keeper.slot_allocator import SlotAllocator
from holdfast.protocol import messages as m
from holdfast.protocol.arena import is_running
from holdfast.protocol.image_plan import ImageSizes, RingNeed

if TYPE_CHECKING:  # a run on one host does not need it
    from holdfast.keeper.parity.worker import ParityWorker


class HostAgent:
    """Slots, images and parity of this host, for whoever coordinates. On the keeper's loop."""

    writes: RemoteWriteService

    def __init__(self, memory: ArenaFiles, background: Background) -> None:
        self._memory, self._background = memory, background
        self.published = PublishedImages(memory)
        self.allocator = SlotAllocator(memory, background)
        self.parity: ParityWorker | None = None
        self.hosts: Sequence[m.HostEntry] = ()
        """Hosts of the incarnation that this keeper has a part in, or will take over."""
        self.serve(ignore)

    def serve(
        self,
        report: Report,
        writer_of: Callable[[int], SlotWriter | None] = lambda _: None,
        trainer_of: Callable[[int], TrainerConnection | None] = lambda _: None,
        is_awaited: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """Report to this coordinator from now on; what another ordered before is reported to none.

        The functions return process and connection by the numbers in ``GrantSlots.lines``, and True
        for a slot that a save waits for.
        """
        self.report = report
        self._writer_of, self._trainer_of = writer_of, trainer_of
        self.allocator.serve(report, is_awaited)
        self._watched: dict[int, messages.WatchWriter] = {}
        self._layout_error = self._awaited_layout = ""
        self._waiting_plan: messages.SizeImages | None = None
        """An order to plan images under the layout whose bytes were asked for."""

    def stop(self, why: str) -> None:
        """Cancel what was ordered: the coordinator is lost."""
        self.writes.stop_all(why)
        if self.parity is not None:
            self.parity.cancel(why)
            self.parity.rebuilding.cancel(why)
        self.serve(ignore)

    def do(self, fact: Any) -> None:
        """Carry out an order."""
        match fact:
            case messages.CreateSlot():
                self.allocator.make(fact.slot, fact.capacity_bytes, fact.leave_bytes)
            case messages.CreateRings(needs=needs):
                self.allocator.make_rings(tuple(RingNeed(*need) for need in needs))
            case messages.DeleteSlot(slot=slot):
                self.published.withdraw(slot)
                self.allocator.remove(slot)
            case messages.GrantSlots():
                published = self.published
                grant_slots(fact, self._memory, published, self._writer_of, self._trainer_of)
            case messages.SlotsSealed():
                self._publish(fact)
            case messages.RecordLayout():
                self._record_layout(fact)
            case messages.SizeImages():
                self._size_images(fact)
            case messages.WatchWriter(slot=slot):
                self._watched[slot] = fact
            case messages.WriteImage():
                self.writes.start(fact, self.report)
            case messages.CancelWrite(directory=directory, reason=reason):
                self.writes.stop(directory, reason)
            case _ if self.parity is not None:
                self.parity.do(fact, self.hosts, self.report)

    def _publish(self, fact: messages.SlotsSealed) -> None:
        """Have captured images written without waiting, and serve them to other hosts."""
        sizes = from_column(fact.image_bytes, len(fact.slots))
        seals = seals_from_bytes(fact.seals)
        for slot, rank, size, seal in zip(fact.slots, fact.ranks, sizes, seals, strict=True):
            image = ImageId(rank, size, *seal)
            self.writes.sealed(fact.attempt_id.attempt, image)
            if not fact.is_ring:
                self.published.publish(slot, fact.attempt_id, image)

    def _record_layout(self, fact: messages.RecordLayout) -> None:
        """Store a layout, or ask for its bytes, if this host has not got them."""
        self._awaited_layout = ""
        planning, self._waiting_plan = self._waiting_plan, None
        try:
            is_here = not fact.deflated
            data = self._memory.layout(fact.hash) if is_here else inflate(fact.deflated, fact.hash)
        except ArenaError:  # its bytes are sent on their own, before any grant that names it
            self._awaited_layout = fact.hash
            self.report(messages.LayoutMissing(hash=fact.hash))
        else:
            self.store_layout(fact.hash, data, fact.used, fact.tables)
        if planning is not None:
            self._size_images(planning)

    def store_layout(self, hash_: str, data: bytes, used: Collection[str], tables: str) -> None:
        """Store a layout that was agreed from ``tables``, and delete those that are not
        ``used``.
        """
        self._layout_error = ""
        try:
            self._memory.store_layout(hash_, data, used, tables)
        except OSError as error:
            where = self._memory.directory
            reason = f"no room for the layout: {error.strerror}. Free some in {where}"
            self._layout_error = reason
            self.report(messages.LayoutFailed(hash=hash_, reason=reason))

    def _size_images(self, fact: messages.SizeImages) -> None:
        if fact.layout == self._awaited_layout:
            self._waiting_plan = fact
            return
        try:
            data = self._memory.layout(fact.layout)
        except HoldfastError as error:
            self._report_sizes(fact.layout, ImageSizes({}, self._layout_error or str(error)))
        else:
            self.plan_images(fact.layout, data, fact.ranks)

    def plan_images(self, hash_: str, layout: Layout | bytes, ranks: Iterable[int]) -> None:
        """Plan the images of these ranks off the loop, and report their sizes."""

        async def plan() -> None:
            self._report_sizes(hash_, await self._background.plan_images(layout, ranks))

        self._background.spawn(plan())

    def _report_sizes(self, hash_: str, sizes: ImageSizes) -> None:
        planned = messages.ImagesPlanned(
            layout=hash_, sizes=sizes.by_rank, reason=sizes.reason, is_passing=sizes.is_passing
        )
        self.report(planned)

    def tick(self) -> None:
        """Report watched slots that nobody can write to any more."""
        for slot, each in list(self._watched.items()):
            is_sealed = self._memory.is_sealed(slot, each.attempt)
            if is_sealed or (each.pid and not is_running(each.pid, each.start)):
                del self._watched[slot]
                self.report(messages.WriterGone(slot=slot, attempt=each.attempt))
