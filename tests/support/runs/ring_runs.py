"""A state on its way through a ring, and a GPU whose copies land as late as they may."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from holdfast.capture.copy_plan import CopyPlan, SlotTarget, plan_copies
from holdfast.capture.copy_ring import Move, RingTarget, copy_through_ring
from holdfast.capture.copy_slot import copy_image
from holdfast.capture.overtaking import OvertakeDetector
from holdfast.capture.progress import CopyCancelled, CopyProgress, ImageSeal
from holdfast.capture.task import RingCredit
from holdfast.capture.volatile_copies import stage
from holdfast.format.image import Image, fill_in
from holdfast.geometry.layout import Layout, merge, table_from_json
from holdfast.persist.writer import Arrival, RingImage, WrittenImage, write_image
from holdfast.protocol.image_plan import chunk_bytes
from holdfast.state.bindings import Bindings
from holdfast.state.describe import Describer
from holdfast.storage.base import Store

#: The header area of any size at all: the ring begins behind it.
HEAD_BYTES = 64 << 10


class FakeGpu:
    """Copies that land only when their event is waited for, as late as a GPU's may."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.queue: list[Move] = []
        self.landed = 0
        self.enqueued_at = -1
        self.most_in_flight = 0

    def wrap(self, move: Move) -> Any:
        return SimpleNamespace(
            stop=move.stop, device=self.device, run=lambda: self.queue.append(move)
        )

    def enqueued(self, _: object) -> None:
        assert self.enqueued_at < 0, "the fence was opened twice"
        self.enqueued_at = len(self.queue)

    # ── what is asked of a stream ────────────────────────────────────────────────────────

    def wait_event(self, _: object) -> None:
        assert not self.queue, "copies were enqueued before the computation was waited for"

    def record_event(self) -> Any:
        upto = len(self.queue)
        self.most_in_flight = max(self.most_in_flight, upto - self.landed)
        return SimpleNamespace(synchronize=lambda: self.land(upto))

    def synchronize(self) -> None:
        self.land(len(self.queue))

    def land(self, upto: int) -> None:
        for move in self.queue[self.landed : upto]:
            move.run()
        self.landed = max(self.landed, upto)


class Through:
    """One state on its way through a ring, with the writer's part played by the real writer."""

    def __init__(self, tensors: dict[str, torch.Tensor], values: bytes = b"{}") -> None:
        described = Describer(dict(tensors), 0).describe()
        stage(described.bindings)
        self.bindings = described.bindings
        layout: Layout = merge([table_from_json(described.table)])
        self.plan: CopyPlan = plan_copies(layout, 0, described.bindings)
        self.values = values
        self.image: Image = fill_in(self.plan.image, {"step": "3"}, len(values))
        self.overtaking = OvertakeDetector(described.bindings)

    def whole(self) -> tuple[bytes, ImageSeal]:
        memory = memoryview(bytearray(self.image.size_bytes))
        progress = CopyProgress(check=lambda: None, copied=lambda _: None, enqueued=lambda _: None)
        target = SlotTarget(memory, self.plan)
        seal = copy_image(
            target, self.image, self.values, OvertakeDetector(Bindings()), progress, 0, {}
        )
        return bytes(memory), seal

    def run(
        self,
        ring_bytes: int,
        store: Store,
        *,
        room_s: float = 20.0,
        ready: dict[torch.device, Any] | None = None,
        gpu: FakeGpu | None = None,
        most_ahead: Callable[[int, int], None] = lambda *_: None,
    ) -> tuple[ImageSeal, WrittenImage]:
        """Copy and write at once, as trainer and keeper do; raises what either raises."""
        head = max(HEAD_BYTES, self.image.data_start)
        memory = memoryview(bytearray(head + ring_bytes))
        room, arrival = RingCredit(), Arrival()
        freed_bytes = [0]

        def freed(size_bytes: int) -> None:
            freed_bytes[0] = max(freed_bytes[0], size_bytes)
            room.freed(size_bytes)

        def wait_room(needed_bytes: int) -> None:
            if not room.wait(needed_bytes, room_s):
                raise CopyCancelled("no room")

        def copied(size_bytes: int) -> None:
            most_ahead(size_bytes, freed_bytes[0])
            arrival.copied(size_bytes)

        progress = CopyProgress(
            check=lambda: None,
            copied=copied,
            enqueued=gpu.enqueued if gpu else lambda _: None,
            wait_room=wait_room,
            has_room=lambda needed: room.wait(needed, 0.0),
        )
        size = self.image.size_bytes
        source = RingImage(memory[:head], memory[head:], size, freed)
        outcome: list[Any] = []

        def write() -> None:
            sink = store.create("image", size)
            try:
                chunk = chunk_bytes(ring_bytes)
                outcome.append(write_image(sink, source, arrival, "image", chunk_bytes=chunk))
                sink.finish()
            except Exception as error:
                outcome.append(error)
                room.close("it broke")

        writing = threading.Thread(target=write)
        writing.start()
        try:
            target = RingTarget(memory, ring_bytes, self.plan)
            if gpu:
                target.moves = [gpu.wrap(move) for move in target.moves]
            seal = copy_through_ring(
                target, self.image, self.values, self.overtaking, progress, ready or {}
            )
            arrival.copied(size)
        except CopyCancelled:
            arrival.abort("the copy was given up")  # unless storage failed first
            writing.join(20)
            raise outcome[0] from None
        except BaseException as error:
            arrival.abort(f"given up: {error}")
            raise
        finally:
            writing.join(20)
            assert not writing.is_alive()
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return seal, outcome[0]
