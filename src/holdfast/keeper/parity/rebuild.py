"""Has the images of lost hosts rebuilt in slots of other hosts, for the generation restored.

Without them no parity could be made of that generation, and until the next snapshot is protected a
second loss would leave nothing. So hosts with its parity decode the lost images, each into a slot
of its own; with the last of them the generation is complete, and protected like any other.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from holdfast.coordinator.actions import Action
from holdfast.coordinator.attempts import Attempt
from holdfast.coordinator.coordinator import Coordinator
from holdfast.coordinator.slots import Slot, host_of, number_of
from holdfast.errors import HoldfastError, NotProtected
from holdfast.events import ImageRebuilt, SnapshotNotProtected, emit
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.hosts import host_messages
from holdfast.keeper.jobs import Background
from holdfast.keeper.published_images import PublishedImages
from holdfast.parity.planning.record import ImageFact, ParityRecord
from holdfast.protocol.arena import SlotRecord, process_start
from holdfast.protocol.facts import Fact

if TYPE_CHECKING:
    from holdfast.keeper.parity.group_access import KeeperReach

_AGAIN_S = 5.0
"""Delay after a failed attempt."""
TRIES = 3


class _LostImage(Struct):
    """An image to be decoded on ``host``; into ``slot``, once it is allocated."""

    rank: int
    size_bytes: int
    host: int
    shard: host_messages.ParityShards
    """A parity shard on that host, of the group from which the image is decoded."""
    slot: int | None = None
    asked: int | None = None
    """A slot that is being allocated for it."""


class RebuildCoordinator:
    """The coordinator's side, for one generation at a time. On the keeper's loop.

    ``say`` sends to the keeper of a host, by its number; ``port`` returns the port where it serves
    images now, 0 for the port agreed on.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        say: Callable[[int, Fact], None],
        port: Callable[[int], int],
        carry_out: Callable[[Sequence[Action]], None],
    ) -> None:
        self._coordinator, self._port = coordinator, port
        self._say, self._carry_out = say, carry_out
        self._attempt = ""
        self._lost: list[_LostImage] = []
        self._hosts: Sequence[str] = ()
        self._numbers: dict[str, int] = {}
        self._shards: Mapping[str, Sequence[host_messages.ParityShards]] = {}
        self._tries, self._again_s = 0, 0.0

    def begin(
        self,
        attempt: Attempt,
        hosts: Sequence[str],
        shards: Mapping[str, Sequence[host_messages.ParityShards]],
    ) -> None:
        """Start rebuilding what the attempt lacks, on ``hosts`` (in order of number) with their
        shards.
        """
        self.cancel("something else is protected")
        self._attempt, self._hosts, self._shards = attempt.id, hosts, shards
        self._numbers = {host: number for number, host in enumerate(hosts)}
        self._tries, self._again_s = 0, 0.0
        self.poll()

    def poll(self) -> None:
        """Continue the rebuild; called periodically."""
        attempt = self._coordinator.attempts.get(self._attempt)
        if attempt is None or attempt.phase != "complete":
            self._attempt = ""
            return
        if not self._lost:
            if attempt.is_whole or self._tries >= TRIES or time.monotonic() < self._again_s:
                return
            self._tries += 1
            self._lost = self._plan(attempt)
        for one in list(self._lost):
            if one.slot is None and self._lost:  # one image that cannot be rebuilt ends all
                self._find_slot(one, attempt)

    def _plan(self, attempt: Attempt) -> list[_LostImage]:
        """Assign each lost image to the capable host with the least work; empty if one has none."""
        loads: Counter[int] = Counter()
        for slot in attempt.slots.values():
            loads[host_of(slot)] += self._coordinator.slots[slot].image_bytes
        holders: dict[int, dict[int, host_messages.ParityShards]] = {r: {} for r in attempt.lacks()}
        for host, number in self._numbers.items():
            for shard in self._shards.get(host, ()):
                if shard.attempt == attempt.id:
                    for rank in holders.keys() & shard.images.keys():
                        holders[rank][number] = shard
        found = []
        for rank, held in holders.items():
            if not held:
                self._fail(f"no host keeps parity of the image of rank {rank}")
                return []
            least = min(held, key=lambda number: (loads[number], number))
            size = held[least].images[rank]
            loads[least] += size
            found.append(_LostImage(rank, size, least, held[least]))
        return found

    def _find_slot(self, one: _LostImage, attempt: Attempt) -> None:
        slots = self._coordinator.slots
        slot = slots.spare_for(one.host, one.size_bytes)
        if slot is not None:
            slots.forget(slot)
            slot.state, slot.attempt, slot.rank = "granted", attempt.id, one.rank
            one.slot = slot.id
            places = {
                rank: self._hosts[host_of(attempt.slots[rank])]
                for rank in one.shard.images
                if rank in attempt.slots
            }
            near = self._numbers.keys() & {*one.shard.members, *places.values()}
            ports = {host: self._port(self._numbers[host]) for host in near}
            self._say(
                one.host,
                host_messages.RebuildImage(
                    slot=number_of(slot.id),
                    attempt=attempt.id,
                    rank=one.rank,
                    half=one.shard.half,
                    places=places,
                    ports=ports,
                ),
            )
        elif one.asked is None:
            made = slots.make_for(one.host, one.size_bytes)
            one.asked = made.slot
            self._carry_out([made])
        elif one.asked not in slots:
            self._fail(f"{self._hosts[one.host]} has no memory for the image of rank {one.rank}")

    def handle(
        self, host: int, fact: host_messages.RebuildComplete | host_messages.RebuildFailed
    ) -> bool:
        """Handle a host's report on a rebuild; return True if that was the last missing image."""
        one = next((o for o in self._lost if self._is_of(o, host, fact)), None)
        if one is None or one.slot is None:
            return False
        slot = self._coordinator.slots[one.slot]
        if isinstance(fact, host_messages.RebuildFailed):
            self._fail(f"on {self._hosts[host]}: {fact.reason}")
            return False
        self._lost.remove(one)
        attempts, attempt = self._coordinator.attempts, self._coordinator.attempts[self._attempt]
        slot.state, slot.image = "captured", fact.image
        attempt.slots[one.rank] = slot.id
        attempt.sealed.add(one.rank)
        attempts.recount()
        return attempt.is_whole

    def _is_of(
        self,
        one: _LostImage,
        host: int,
        fact: host_messages.RebuildComplete | host_messages.RebuildFailed,
    ) -> bool:
        return (
            one.host == host
            and one.slot is not None
            and fact.attempt == self._attempt
            and number_of(one.slot) == fact.slot
            and self._reserved_slot(one) is not None
        )

    def _reserved_slot(self, one: _LostImage) -> Slot | None:
        """Return the image's slot while it is still reserved for it."""
        slot = self._coordinator.slots.get(-1 if one.slot is None else one.slot)
        is_ours = slot is not None and (slot.state, slot.attempt, slot.rank, slot.writer) == (
            "granted",
            self._attempt,
            one.rank,
            None,
        )
        return slot if is_ours else None

    def _fail(self, reason: str) -> None:
        attempt = self._coordinator.attempts[self._attempt]
        emit(
            SnapshotNotProtected(
                incarnation=attempt.incarnation,
                step=attempt.step,
                reason=f"what lost hosts had of it could not be made anew: {reason}",
            )
        )
        self._forget(reason)
        self._again_s = time.monotonic() + _AGAIN_S

    def cancel(self, why: str) -> None:
        """Cancel the rebuild because it is not needed, or cannot continue."""
        if self._attempt:
            self._forget(why)
            self._attempt = ""

    def _forget(self, why: str) -> None:
        """Forget the rebuild; hosts stop writing to these slots when they receive the message."""
        for host in {one.host for one in self._lost if one.slot is not None}:
            self._say(host, host_messages.CancelRebuild(reason=why))
        for one in self._lost:
            slot = self._reserved_slot(one)
            if slot is not None:
                slot.free()
        self._lost = []


# Rebuild worker: decodes lost images into slots of this host, to be protected again. Decoded data
# is compared with its checksums, then copied into its slot unless that was cancelled meanwhile:
# once ``give_up`` has returned nothing more is written, and the slot can be reused.


Told = Callable[[Fact], None]
#: State of a slot while an image is decoded into it: a later keeper treats the slot as free, and
#: the writing thread dies with this keeper.
REBUILDING = "rebuilding"


class RebuildWorker:
    """Images to be decoded here, one after the other. On the keeper's loop."""

    def __init__(
        self, memory: ArenaFiles, background: Background, offering: PublishedImages
    ) -> None:
        self._memory, self._background, self._offering = memory, background, offering
        self._queue: deque[_RebuildRun] = deque()
        self._run: _RebuildRun | None = None

    @property
    def is_busy(self) -> bool:
        """Return True if an image is being decoded."""
        return self._run is not None

    def begin(
        self,
        order: host_messages.RebuildImage,
        record: ParityRecord,
        own: str,
        reach: Callable[[], KeeperReach],
        tell: Told,
    ) -> None:
        """Queue one more image to decode; ``reach`` is called on a thread."""
        self._queue.append(_RebuildRun(order, record, own, reach, tell))
        self._go_on()

    def cancel(self, why: str) -> None:
        """Stop writing to any slot."""
        self._queue.clear()
        if self._run is not None:
            self._run.cancel(why)

    def _go_on(self) -> None:
        if self._run is not None or not self._queue:
            return
        run = self._run = self._queue.popleft()
        try:
            self._stamp(run, REBUILDING)
            run.memory = self._memory.files[run.order.slot].image
        except (HoldfastError, KeyError, OSError) as error:
            self._settle(run, f"there is no such slot: {error}")
            return
        self._background.run_beside(
            "holdfast-rebuild", run.decode, lambda _, failure: self._ended(run, failure)
        )

    def _stamp(self, run: _RebuildRun, state: str) -> None:
        """Write the slot's record like those of the attempt's other slots here."""
        file, fact, record = self._memory.files[run.order.slot], run.fact, run.record
        self._offering.withdraw(run.order.slot)
        hosts = len(record.members)
        for other in self._memory.files.values():
            said = other.read_record()
            if said is not None and (said.attempt, said.state) == (record.attempt, "captured"):
                hosts = said.hosts
        file.write_record(
            SlotRecord(
                state=state,
                boot_id=self._memory.boot_id,
                run_id=self._memory.run_id,
                incarnation=record.incarnation,
                step=record.step,
                attempt=record.attempt,
                rank=fact.rank,
                world=record.world,
                layout=record.layout,
                image_bytes=fact.image_bytes,
                header_xxh3=fact.header_xxh3,
                table_xxh3=fact.table_xxh3,
                writer_pid=os.getpid(),
                writer_start=process_start(os.getpid()),
                hosts=max(2, hosts),
                root_id=self._memory.root_id,
            )
        )

    def _ended(self, run: _RebuildRun, failure: str) -> None:
        failure = run.why or failure
        if not failure:
            try:
                self._stamp(run, "captured")
            except (HoldfastError, KeyError, OSError) as error:
                failure = f"its slot is gone: {error}"
        run.memory = memoryview(b"")
        self._settle(run, failure)

    def _settle(self, run: _RebuildRun, failure: str) -> None:
        self._run = None
        order, fact, record = run.order, run.fact, run.record
        if failure:
            run.tell(
                host_messages.RebuildFailed(slot=order.slot, attempt=order.attempt, reason=failure)
            )
        else:
            self._offering.publish(order.slot, record.attempt_id, fact.image)
            self._offering.refresh()
            emit(
                ImageRebuilt(
                    incarnation=record.incarnation,
                    step=record.step,
                    rank=fact.rank,
                    host=run.own,
                    elapsed_s=time.monotonic() - run.began_s,
                    size_bytes=fact.image_bytes,
                )
            )
            run.tell(
                host_messages.RebuildComplete(
                    slot=order.slot, attempt=order.attempt, image=fact.image
                )
            )
        self._go_on()


class _RebuildRun:
    """One image that is decoded into its slot."""

    def __init__(
        self,
        order: host_messages.RebuildImage,
        record: ParityRecord,
        own: str,
        reach: Callable[[], KeeperReach],
        tell: Told,
    ) -> None:
        self.order, self.record, self.own = order, record, own
        self._reach, self.tell = reach, tell
        self.began_s = time.monotonic()
        self.memory = memoryview(b"")
        self.why = ""
        """Reason for its cancellation; "" while it is not cancelled."""
        self._lock = threading.Lock()

    @property
    def fact(self) -> ImageFact:
        """Return the facts of the captured image."""
        images = (image for member in self.record.members for image in member.images)
        return next(image for image in images if image.rank == self.order.rank)

    def decode(self) -> None:
        """Decode the whole image into the slot."""
        from holdfast.keeper.parity.group_access import open_group, pieces_of
        from holdfast.restore.cluster.decode import decode_image

        group = open_group(self.record, self._reach(), self.order.places)
        image = decode_image(group, self.record, self.order.rank)
        staging = bytearray()
        for start, stop in pieces_of(image, self.fact.data_start):
            if len(staging) < stop - start:
                staging = bytearray(stop - start)
            self._put(start, image.view(start, stop, staging))

    def _put(self, start: int, data: memoryview) -> None:
        with self._lock:
            if self.why:
                raise NotProtected(self.why)
            self.memory[start : start + len(data)] = data

    def cancel(self, why: str) -> None:
        """Cancel; once this has returned, nothing more is written."""
        with self._lock:
            self.why = self.why or why
