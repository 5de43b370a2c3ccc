"""Relays between this host's ranks and the coordinator: joins their reports, grants their slots.

``HostJoiner`` decides when a report is whole; ``ReportJoiner`` runs it on the keeper's loop, with a
clock. A slot's record is written before its rank is told that it may write there.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from holdfast.coordinator.requests import HostJoiner, HostReports, RankReport
from holdfast.coordinator.slots import SlotWriter
from holdfast.errors import UsageError
from holdfast.keeper import message_limits as limits
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.connections import LocalConnection, TrainerConnection
from holdfast.keeper.hosts.host_messages import GrantSlots
from holdfast.keeper.hosts.host_reports import from_column
from holdfast.keeper.published_images import PublishedImages
from holdfast.protocol import messages as m

#: Limit of a report that is joined: those of a host must fit into one frame.
MOST_BYTES = 1 << 20
JoinedReports = Sequence[tuple[LocalConnection, RankReport]]


class ReportJoiner:
    """Holds the reports of ``count`` ranks, and calls ``deliver`` with what is joined."""

    def __init__(self, count: int, deliver: Callable[[JoinedReports], None]) -> None:
        self._joiner = HostJoiner(count)
        self._deliver = deliver
        self._connections: dict[int, LocalConnection] = {}
        self._timer: asyncio.TimerHandle | None = None

    def take(
        self, connection: LocalConnection, seq: int, message: m.Message, size_bytes: int
    ) -> bool:
        """Take over a report and return True; False for another message, which goes next."""
        is_short = not seq and size_bytes <= MOST_BYTES
        if isinstance(message, RankReport) and is_short and _is_joined(connection, message):
            self._connections[connection.number] = connection
            self._pass_on(self._joiner.add(connection.number, message, time.monotonic()))
            return True
        self.flush()
        return False

    def flush(self) -> None:
        """Deliver what is held."""
        self._pass_on(self._joiner.flush())

    def drop(self) -> None:
        """Drop what is held: nobody can be told of it."""
        self._joiner.flush()
        self._pass_on(())

    def _pass_on(self, joined: Iterable[HostReports]) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for reports in joined:
            self._deliver([(self._connections[number], each) for number, each in reports.items()])
        if self._joiner.due_s < math.inf:
            wait_s = self._joiner.due_s - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(wait_s, self.flush)
        else:
            self._connections.clear()


def _is_joined(connection: LocalConnection, report: RankReport) -> bool:
    """Return False for a report that may have to be refused with a reason of its own."""
    try:
        limits.validate_message(report, 0)
    except UsageError:
        return False
    return connection.rank is not None


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
