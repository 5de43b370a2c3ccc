"""Which subgroups are updated where: the schedule, kept in step with rows and rates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from holdfast.errors import UsageError
from holdfast.events import Warned, emit
from holdfast.offload.cutting import merged
from holdfast.offload.gradients import Range
from holdfast.offload.kernels import Group, Kernel
from holdfast.offload.lanes import Lanes
from holdfast.offload.measure import measure
from holdfast.offload.rates import Kind, Measured, Rates
from holdfast.offload.rows import MASTER, Place, Row, Subgroup
from holdfast.offload.schedule import Schedule, plan, replanning
from holdfast.offload.tier import Tier, page_aligned
from holdfast.offload.update import Slot

#: 192 MiB of AdamW's state: 8 ms on a link of 25 GB/s, against some 0.1 ms to begin.
SUBGROUP_ELEMENTS = 1 << 24
DEVICE_SLOTS = 2
#: Rates move slowly. Another schedule is looked for in so many steps, one way tried at each.
_REPLAN_STEPS = 16
#: With a fixed share no rate is asked for.
_ANY = Rates(1.0, 1.0, 1.0, 1.0)


class Placing:
    """Divides subgroups among host and device. ``options``: those of the optimizer."""

    def __init__(
        self, kernel: Kernel, options: Mapping[str, Any], tier: Tier | None = None
    ) -> None:
        self._kernel, self._tier = kernel, tier
        self._share: float | None = options.get("device_share")
        self.longest: int = options.get("subgroup_elements", SUBGROUP_ELEMENTS)
        self._slots: int = options.get("device_slots", DEVICE_SLOTS)
        if self.longest < 1 or self._slots < 0:
            raise UsageError(
                f"subgroup_elements={self.longest} and device_slots={self._slots}: at least one "
                "element, and 0 or more slots"
            )
        if tier is not None:
            self.longest, self._share = page_aligned(self.longest), 0.0
        self.subgroups: list[Subgroup] = []
        self.schedule: Schedule | None = None
        self.measured: Measured | None = None
        self._ranges: dict[Place, list[Range]] = {}
        self._steps = 0
        self._is_full = False
        """Whether the device had no room for even one subgroup, once."""
        self._search: Iterator[Schedule] | None = None
        """For another schedule, by the rates as they were when it began."""
        self._fix([])

    def add(self, row: Row) -> None:
        """Subgroups of another row."""
        self.subgroups += row.cut(self.longest)
        if self._tier is not None:
            self._tier.check(self.subgroups)
        if (
            self._share is None
            and not self._is_full
            and any(place.local.is_cuda for place in row.places)
        ):
            self._set(None)  # at the next step, when the lanes can be measured
        else:
            self._fix([subgroup.cut.size for subgroup in self.subgroups])

    def _fix(self, sizes: Sequence[int]) -> None:
        share = 0.0 if self._is_full else self._share or 0.0
        self._set(plan(sizes, _ANY, device_slots=self._slots, device_share=share))

    def _set(self, schedule: Schedule | None) -> None:
        self.schedule, self._search = schedule, None
        self._ranges.clear()
        for number in () if schedule is None else schedule.host:
            subgroup = self.subgroups[number]
            for span, place in zip(subgroup.spans, subgroup.places, strict=True):
                self._ranges.setdefault(place, []).append((span.start, span.stop))
        for place, ranges in self._ranges.items():
            self._ranges[place] = list(merged(sorted(ranges)))

    def on_host(self, place: Place) -> list[Range]:
        """Which of a parameter's elements are updated on the host, as far as is known."""
        return self._ranges.get(place, [])

    def ready(
        self, groups: Sequence[Group], lanes: Lanes, places: Iterable[Place]
    ) -> tuple[list[Subgroup], list[Subgroup], list[Slot]]:
        """Those with something to do on the host and on the device, in order, and the slots."""
        self._plan(groups, lanes)
        assert self.schedule is not None
        due = set(places)
        device = self._due(self.schedule.device, due)
        slots = self._make_slots(device, groups, lanes.device) if device else []
        if device and not slots:
            everything = self._due([*self.schedule.host, *self.schedule.device], due)
            self._leave_to_host()
            return everything, [], []
        return self._due(self.schedule.host, due), device, slots

    def _due(self, numbers: Iterable[int], due: set[Place]) -> list[Subgroup]:
        found = (self.subgroups[number] for number in numbers)
        return [one for one in found if not due.isdisjoint(one.places)]

    # ── the schedule ─────────────────────────────────────────────────────────────────────

    def _plan(self, groups: Sequence[Group], lanes: Lanes) -> None:
        """By the rates as they are measured, where the share is not fixed."""
        self._steps += 1
        sizes = [subgroup.cut.size for subgroup in self.subgroups]
        if self.schedule is None and not self.subgroups:
            self._fix([])  # this rank has no elements
        elif self.schedule is None:
            row = max((one.row for one in self.subgroups), key=lambda row: row.elements)
            if self.measured is None:
                rates = self._measure(lanes, groups[row.group], row)
                if rates is None:
                    return
                self.measured = Measured(rates)
            self._set(plan(sizes, self.measured.rates, device_slots=self._slots))
        elif self.measured is not None and not self._is_full:
            self._look_on(self.schedule, sizes, self.measured)

    def _look_on(self, current: Schedule, sizes: Sequence[int], measured: Measured) -> None:
        """For a better schedule: one way at each step, as every one costs milliseconds."""
        if self._search is None and self._steps % _REPLAN_STEPS == 0:
            self._search = replanning(current, sizes, measured.rates, device_slots=self._slots)
        if self._search is None:
            return
        found = next(self._search, None)
        if found is None:
            self._search = None
        elif found != current:
            self._set(found)

    def _measure(self, lanes: Lanes, group: Group, row: Row) -> Rates | None:
        """None, and all is left to the host, where the device has no memory to try it with."""
        try:
            return measure(lanes, self._kernel, group, row.dtype)
        except torch.OutOfMemoryError:
            self._warn(f"no room on {lanes.device} to measure how fast it updates")
            self._leave_to_host()
            return None

    def learn(self, kind: Kind, work: float, elapsed_s: float) -> None:
        """So long took so much: the rates follow."""
        if self.measured is not None and self.schedule is not None:
            speed = self.schedule.host_speed if kind == "host_update" else 1.0  # beside copies
            self.measured = self.measured.after(kind, work, elapsed_s * speed)

    # ── room on the device ───────────────────────────────────────────────────────────────

    def _make_slots(
        self, device: Sequence[Subgroup], groups: Sequence[Group], where: torch.device
    ) -> list[Slot]:
        """As many as there is memory for: for the step alone, when activations take none."""
        kinds = {MASTER, *(kind for group in groups for kind in self._kernel.kinds(group))}
        if not all(subgroup.row.is_wide for subgroup in device):
            kinds.add("gradient")
        longest = max(subgroup.cut.size for subgroup in device)
        slots: list[Slot] = []
        try:
            for _ in range(min(self._slots, len(device))):
                slots.append(Slot(longest, sorted(kinds), where))
        except torch.OutOfMemoryError:  # to ask again at every step empties torch's caches
            self._slots = len(slots)
            if slots:
                assert self.schedule is not None
                self.schedule = replace(self.schedule, rates=None)  # look for another
            else:
                self._warn(f"no room on {where} for the state of one subgroup ({longest} elements)")
        return slots

    def _leave_to_host(self) -> None:
        """For good: a device that was full once is nearly full."""
        self._is_full, self._slots = True, 0
        self._set(Schedule(tuple(range(len(self.subgroups))), (), 0.0))

    def _warn(self, what: str) -> None:
        emit(Warned(
            message=f"{what}: from now on all is updated on the host. Make subgroup_elements "
            "smaller."
        ))  # fmt: skip
