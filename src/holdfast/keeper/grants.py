"""Grants slots of one host to its ranks: each slot's record is written before its rank is told."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.coordinator.slots import SlotWriter
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.connections import TrainerConnection
from holdfast.keeper.hosts.host_reports import from_column
from holdfast.keeper.hosts.messages import GrantSlots
from holdfast.keeper.published_images import PublishedImages
from holdfast.protocol import messages as m


def grant_slots(
    order: GrantSlots,
    memory: ArenaFiles,
    published: PublishedImages,
    writer_of: Callable[[int], SlotWriter | None],
    trainer_of: Callable[[int], TrainerConnection | None],
) -> None:
    """Carry out ``order``; the functions return process and connection by connection number."""
    record, count = order.record, len(order.slots)
    rings, numbers = from_column(order.ring_bytes, count), from_column(order.request_number, count)
    rows = zip(order.lines, order.ranks, order.slots, rings, numbers, strict=True)
    for line, rank, slot, ring_bytes, request_number in rows:
        found, trainer = writer_of(line), trainer_of(line)
        if found is None and trainer is None:  # nobody writes there: nobody's end is waited for
            published.withdraw(slot)
            memory.stamp(slot, msgspec.structs.replace(record, rank=rank, state="free"))
            continue
        writer = found or SlotWriter(0, 0)
        stamped = msgspec.structs.replace(
            record,
            rank=rank,
            ring_bytes=ring_bytes,
            writer_pid=writer.pid,
            writer_start=writer.start,
        )
        published.withdraw(slot)
        memory.stamp(slot, stamped)
        grant = m.Grant(
            step=record.step,
            attempt=record.attempt,
            slot=str(memory.slot_path(slot)),
            durable=order.durable,
            layout=record.layout,
            ring_bytes=ring_bytes,
            request_number=request_number,
            hosts=record.hosts,
            compare=order.compare,
        )
        if trainer is not None:
            trainer.send(grant)
