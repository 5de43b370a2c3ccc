"""Keeps state beyond a host memory budget in files: reads it before an update, writes it after.

``subgroups.rotate`` plans the reads and writes; this module performs them, on two work streams
beside those of the update. Between steps all updated state is in its place, and every tensor reads
correctly.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.errors import UsageError
from holdfast.offload.host_state import Subgroup
from holdfast.offload.mapped_memory import PAGE_ELEMENTS, PagedMemory
from holdfast.offload.planning.subgroups import TierRotation, rotate
from holdfast.offload.streams import StreamMark, ThreadStream


def tier_of(options: Mapping[str, Any]) -> FileTier | None:
    """Return the file tier that an optimizer's options request. UsageError for invalid options."""
    budget_bytes, path = options.get("host_memory_bytes"), options.get("storage_path")
    if budget_bytes is None and path is None:
        return None
    if budget_bytes is None or path is None or budget_bytes < 0:
        raise UsageError(
            f"host_memory_bytes={budget_bytes} and storage_path={path!r}: how many bytes of the "
            "state are in memory and in which directory the others lie; both, or neither"
        )
    if options.get("device_share"):
        raise UsageError(
            f"device_share={options['device_share']} with a storage_path: storage is slower than "
            "the host's update, so all is updated on the host. Leave device_share out"
        )
    return FileTier(path, budget_bytes, options.get("lane_delay_s", 0.0))


class FileTier:
    """The files of one optimizer's state in ``directory``; at most ``budget_bytes`` of it in
    memory.

    ``delay_s``: as of ``ThreadStream``.
    """

    def __init__(
        self, directory: str | os.PathLike[str], budget_bytes: int, delay_s: float
    ) -> None:
        self._directory, self._budget_bytes = os.fspath(Path(directory).absolute()), budget_bytes
        self._delay_s = delay_s
        self._owner = os.getpid()
        self._streams: tuple[ThreadStream, ThreadStream] | None = None
        self._last: tuple[list[Subgroup], TierRotation] | None = None
        self._here: dict[Subgroup, int] = {}
        self.most_bytes = 0
        """The largest amount that was in memory at any time."""

    def make(self, elements: int) -> PagedMemory:
        """Allocate memory for one kind of state of a flat buffer."""
        return PagedMemory(self._directory, elements)

    def check(self, subgroups: Sequence[Subgroup]) -> None:
        """Raise UsageError where the budget is too small for these subgroups."""
        rotate([_size_bytes(one) for one in subgroups], budget_bytes=self._budget_bytes)

    def tier_step(self, subgroups: Sequence[Subgroup]) -> TierStep:
        """Plan the reads and writes of a step that updates these subgroups.

        UsageError in a forked process: the files belong to the process that created them.
        """
        if os.getpid() != self._owner:
            raise UsageError(
                "a forked process cannot update state that lies in files of the process that made "
                "them: make the optimizer anew there"
            )
        if self._streams is None:
            made = [
                ThreadStream(name, threads=1, delay_s=self._delay_s) for name in ("bring", "put")
            ]
            self._streams = made[0], made[1]
        due = list(subgroups)
        last, self._last = self._last, None  # until this step is done
        after = last[1] if last is not None and last[0] == due else None
        if after is None:  # memory holds other subgroups, or those of a step that broke off
            for one in list(self._here):
                self.put(one)
        sizes = [_size_bytes(one) for one in due]
        rotation = rotate(sizes, budget_bytes=self._budget_bytes, after=after)
        return TierStep(self, due, rotation, self._streams)

    def done(self, due: list[Subgroup], rotation: TierRotation) -> None:
        """Record that the step is done."""
        self._last = due, rotation

    def bring(self, one: Subgroup) -> None:
        """Read a subgroup into memory."""
        self._here[one] = _size_bytes(one)
        self.most_bytes = max(self.most_bytes, sum(self._here.values()))
        for paged in one.buffer.paged:
            paged.bring(one.cut.start, one.cut.stop)

    def put(self, one: Subgroup) -> None:
        """Write a subgroup to its files."""
        for paged in one.buffer.paged:
            paged.put(one.cut.start, one.cut.stop)
        self._here.pop(one, None)


class TierStep:
    """One step of a tier: the reads before each update, and the writes after it."""

    def __init__(
        self,
        tier: FileTier,
        due: list[Subgroup],
        rotation: TierRotation,
        streams: tuple[ThreadStream, ThreadStream],
    ) -> None:
        self._tier, self._due, self._rotation, self.streams = tier, due, rotation, streams
        self._bring, self._put = streams
        self._reads = list(rotation.reads)
        self._is_put = {due[number] for number in rotation.writes}
        self._brought: dict[Subgroup, StreamMark] = {}
        self._puts: list[StreamMark] = []

    @property
    def order(self) -> list[Subgroup]:
        """The subgroups, in the order of their updates."""
        return [self._due[number] for number in self._rotation.order]

    def before(self, one: Subgroup) -> list[StreamMark]:
        """Return the marks behind which the subgroup is in memory. Must be called in order."""
        while self._reads and self._reads[0].writes_done <= len(self._puts):
            read = self._reads.pop(0)
            which = self._due[read.subgroup]
            after = self._puts[read.writes_done - 1 : read.writes_done]
            self._brought[which] = self._bring.run(partial(self._tier.bring, which), after=after)
        return [self._brought[one]] if one in self._brought else []

    def behind(self, one: Subgroup, updated: StreamMark) -> None:
        """Write it to its file behind this mark of its update, if the plan says so."""
        if one in self._is_put:
            self._puts.append(self._put.run(partial(self._tier.put, one), after=[updated]))

    def finish(self) -> None:
        """Wait until all reads and writes are done."""
        for mark in self._puts:
            mark.wait()
        self._tier.done(self._due, self._rotation)


def page_aligned(elements: int) -> int:
    """Round up to whole pages."""
    return -(-elements // PAGE_ELEMENTS) * PAGE_ELEMENTS


def _size_bytes(one: Subgroup) -> int:
    return sum(paged.part_bytes(one.cut.start, one.cut.stop) for paged in one.buffer.paged)
