"""Images that no host has any more are decoded into slots of this host, to be protected anew.

What is decoded is compared with its checksums, then copied into its slot unless that was given up
meanwhile: once ``give_up`` has returned nothing more is written, and the slot can be given away.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError, NotProtected
from holdfast.events import ImageRebuilt, emit
from holdfast.keeper import parity_facts
from holdfast.keeper.background import Background
from holdfast.keeper.facts import Fact
from holdfast.keeper.memory import Memory
from holdfast.keeper.offering import Offering
from holdfast.redundancy.records import ImageFact, ParityRecord
from holdfast.snapshot.arena import SlotRecord, process_start

if TYPE_CHECKING:  # only where something is lost
    from holdfast.keeper.mending import Reached

Told = Callable[[Fact], None]
#: What a slot says of itself while an image is decoded into it: whoever finds it so takes it for
#: free, and who writes to it dies with this keeper.
REBUILDING = "rebuilding"


class Rebuilding:
    """What is to be decoded here, one image after the other. On the keeper's loop."""

    def __init__(self, memory: Memory, background: Background, offering: Offering) -> None:
        self._memory, self._background, self._offering = memory, background, offering
        self._queue: deque[_Run] = deque()
        self._run: _Run | None = None

    @property
    def is_busy(self) -> bool:
        """Whether anything is being decoded."""
        return self._run is not None

    def begin(
        self, order: parity_facts.Rebuild, record: ParityRecord, own: str,
        reach: Callable[[], Reached], tell: Told,
    ) -> None:  # fmt: skip
        """Decode one more; ``reach`` is called on a thread."""
        self._queue.append(_Run(order, record, own, reach, tell))
        self._go_on()

    def give_up(self, why: str) -> None:
        """Write to no slot any more."""
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
        except (HoldfastError, KeyError) as error:
            self._settle(run, f"there is no such slot: {error}")
            return
        threading.Thread(
            target=self._work, args=(run,), name="holdfast-rebuild", daemon=True
        ).start()

    def _stamp(self, run: _Run, state: str) -> None:
        """Say in the slot what it is, as the attempt's other slots here say it."""
        file, fact, record = self._memory.files[run.order.slot], run.fact, run.record
        self._offering.withdraw(run.order.slot)
        hosts = len(record.members)
        for other in self._memory.files.values():
            said = other.read_record()
            if said is not None and (said.attempt, said.state) == (record.attempt, "captured"):
                hosts = said.hosts
        file.write_record(SlotRecord(
            state=state, boot_id=self._memory.boot_id, run_id=self._memory.run_id,
            incarnation=record.incarnation, step=record.step, attempt=record.attempt,
            rank=fact.rank, world=record.world, layout=record.layout,
            image_bytes=fact.image_bytes, header_xxh3=fact.header_xxh3,
            table_xxh3=fact.table_xxh3, writer_pid=os.getpid(),
            writer_start=process_start(os.getpid()), hosts=max(2, hosts),
        ))  # fmt: skip

    def _work(self, run: _Run) -> None:
        """On the thread."""
        failure = ""
        try:
            run.decode()
        except (HoldfastError, OSError) as error:
            failure = str(error)
        except Exception as error:  # whatever it is, the coordinator waits for it
            failure = f"{type(error).__name__}: {error}"
        self._background.from_thread(lambda: self._ended(run, failure))

    def _ended(self, run: _Run, failure: str) -> None:
        failure = run.why or failure
        if not failure:
            try:
                self._stamp(run, "captured")
            except (HoldfastError, KeyError) as error:
                failure = f"its slot is gone: {error}"
        run.memory = memoryview(b"")
        self._settle(run, failure)

    def _settle(self, run: _Run, failure: str) -> None:
        self._run = None
        order, fact, record = run.order, run.fact, run.record
        if failure:
            run.tell(
                parity_facts.NotRebuilt(slot=order.slot, attempt=order.attempt, reason=failure)
            )
        else:
            self._offering.offer(
                order.slot, order.attempt, fact.rank, record.incarnation, record.step,
                fact.image_bytes, record.layout,
            )  # fmt: skip
            self._offering.refresh()
            emit(ImageRebuilt(
                incarnation=record.incarnation, step=record.step, rank=fact.rank, host=run.own,
                elapsed_s=time.monotonic() - run.began_s, size_bytes=fact.image_bytes,
            ))  # fmt: skip
            run.tell(parity_facts.Rebuilt(
                slot=order.slot, attempt=order.attempt, rank=fact.rank,
                image_bytes=fact.image_bytes, header_xxh3=fact.header_xxh3,
                table_xxh3=fact.table_xxh3,
            ))  # fmt: skip
        self._go_on()


class _Run:
    """One image on its way into its slot."""

    def __init__(
        self, order: parity_facts.Rebuild, record: ParityRecord, own: str,
        reach: Callable[[], Reached], tell: Told,
    ) -> None:  # fmt: skip
        self.order, self.record, self.own = order, record, own
        self._reach, self.tell = reach, tell
        self.began_s = time.monotonic()
        self.memory = memoryview(b"")
        self.why = ""
        """Why it is given up; "" while it is not."""
        self._lock = threading.Lock()

    @property
    def fact(self) -> ImageFact:
        """What was captured."""
        images = (image for member in self.record.members for image in member.images)
        return next(image for image in images if image.rank == self.order.rank)

    def decode(self) -> None:
        """All of it, into the slot."""
        from holdfast.keeper.mending import decode_image, group_left, pieces_of

        group = group_left(self.record, self._reach(), self.order.places)
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
        """Once this has returned, nothing more is written."""
        with self._lock:
            self.why = self.why or why
