"""State beyond a budget of host memory lies in files: brought before its update, put back after.

``rotation`` says what is brought and put, and when; this does it, on two lanes beside those of the
update. Between steps all that was updated is where it belongs, and every tensor reads true.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.errors import UsageError
from holdfast.offload.lanes import Mark, ThreadLane
from holdfast.offload.paging import PAGE_ELEMENTS, Paged
from holdfast.offload.rotation import Rotation, rotate
from holdfast.offload.rows import Subgroup


def tier_of(options: Mapping[str, Any]) -> Tier | None:
    """The tier that an optimizer's options ask for. UsageError where they cannot mean anything."""
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
    return Tier(path, budget_bytes, options.get("lane_delay_s", 0.0))


class Tier:
    """The files of one optimizer's state in ``directory``; at most ``budget_bytes`` of it outside.

    ``delay_s``: as of lanes.
    """

    def __init__(
        self, directory: str | os.PathLike[str], budget_bytes: int, delay_s: float
    ) -> None:
        self._directory, self._budget_bytes = os.fspath(Path(directory).absolute()), budget_bytes
        self._delay_s = delay_s
        self._owner = os.getpid()
        self._lanes: tuple[ThreadLane, ThreadLane] | None = None
        self._last: tuple[list[Subgroup], Rotation] | None = None
        self._here: dict[Subgroup, int] = {}
        self.most_bytes = 0
        """The most that was in memory at any time."""

    def make(self, elements: int) -> Paged:
        """Memory for one kind of a row."""
        return Paged(self._directory, elements)

    def check(self, subgroups: Sequence[Subgroup]) -> None:
        """UsageError where the budget is too small for these."""
        rotate([_size_bytes(one) for one in subgroups], budget_bytes=self._budget_bytes)

    def turn(self, subgroups: Sequence[Subgroup]) -> Turn:
        """What comes and goes in a step that updates these.

        UsageError in a process that was forked: the files are those of the one that made them.
        """
        if os.getpid() != self._owner:
            raise UsageError(
                "a forked process cannot update state that lies in files of the process that made "
                "them: make the optimizer anew there"
            )
        if self._lanes is None:
            made = [ThreadLane(name, threads=1, delay_s=self._delay_s) for name in ("bring", "put")]
            self._lanes = made[0], made[1]
        due = list(subgroups)
        last, self._last = self._last, None  # until this step is done
        after = last[1] if last is not None and last[0] == due else None
        if after is None:  # what is in memory is of other subgroups, or of a step that broke off
            for one in list(self._here):
                self.put(one)
        sizes = [_size_bytes(one) for one in due]
        found = rotate(sizes, budget_bytes=self._budget_bytes, after=after)
        return Turn(self, due, found, self._lanes)

    def done(self, due: list[Subgroup], rotation: Rotation) -> None:
        """That step was done."""
        self._last = due, rotation

    def bring(self, one: Subgroup) -> None:
        """Have a subgroup in memory."""
        self._here[one] = _size_bytes(one)
        self.most_bytes = max(self.most_bytes, sum(self._here.values()))
        for paged in one.row.paged:
            paged.bring(one.cut.start, one.cut.stop)

    def put(self, one: Subgroup) -> None:
        """Have a subgroup in its files."""
        for paged in one.row.paged:
            paged.put(one.cut.start, one.cut.stop)
        self._here.pop(one, None)


class Turn:
    """One step of a tier: what is to be waited for before an update, and what is done behind it."""

    def __init__(
        self, tier: Tier, due: list[Subgroup], rotation: Rotation,
        lanes: tuple[ThreadLane, ThreadLane],
    ) -> None:  # fmt: skip
        self._tier, self._due, self._rotation, self.lanes = tier, due, rotation, lanes
        self._bring, self._put = lanes
        self._reads = list(rotation.reads)
        self._is_put = {due[number] for number in rotation.writes}
        self._brought: dict[Subgroup, Mark] = {}
        self._puts: list[Mark] = []

    @property
    def order(self) -> list[Subgroup]:
        """The subgroups, in the order of their updates."""
        return [self._due[number] for number in self._rotation.order]

    def before(self, one: Subgroup) -> list[Mark]:
        """Behind these the subgroup is in memory. To be asked in order."""
        while self._reads and self._reads[0].writes_done <= len(self._puts):
            read = self._reads.pop(0)
            which = self._due[read.subgroup]
            after = self._puts[read.writes_done - 1 : read.writes_done]
            self._brought[which] = self._bring.run(partial(self._tier.bring, which), after=after)
        return [self._brought[one]] if one in self._brought else []

    def behind(self, one: Subgroup, updated: Mark) -> None:
        """Its update is done behind this mark."""
        if one in self._is_put:
            self._puts.append(self._put.run(partial(self._tier.put, one), after=[updated]))

    def finish(self) -> None:
        """Wait until all is where it belongs."""
        for mark in self._puts:
            mark.wait()
        self._tier.done(self._due, self._rotation)


def page_aligned(elements: int) -> int:
    """As many, or as few more as fill pages."""
    return -(-elements // PAGE_ELEMENTS) * PAGE_ELEMENTS


def _size_bytes(one: Subgroup) -> int:
    return sum(paged.part_bytes(one.cut.start, one.cut.stop) for paged in one.row.paged)
