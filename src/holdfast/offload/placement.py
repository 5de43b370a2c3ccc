"""Which subgroups are updated where: the schedule, kept in step with rows and rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
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
from holdfast.offload.replicas import AT_ODDS, Said, agree, groups_with_replicas, is_replicated
from holdfast.offload.rows import MASTER, Place, Row, Subgroup
from holdfast.offload.schedule import Schedule, plan, replanning
from holdfast.offload.tier import Tier, page_aligned
from holdfast.offload.update import Slot

#: 192 MiB of AdamW's state: 8 ms on a link of 25 GB/s, against some 0.1 ms to begin.
SUBGROUP_ELEMENTS = 1 << 24
DEVICE_SLOTS = 2
#: Rates move slowly. Another schedule is looked for in so many steps, one way tried at each.
_REPLAN_STEPS = 16
_ODDS = (
    "parameters that several ranks have lie in other places of the optimizer's memory on another "
    "rank, beside shards of other sizes: what has a part of them is updated on the host, so that "
    "they stay the same. Give them an optimizer of their own, or shards one size on all ranks."
)
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
        self._may_use_device = self._share != 0.0 and self._slots > 0
        self._is_on_gpu = False
        self._unasked: list[Place] = []
        """Of which it is not known yet whether other ranks have them too."""
        self._layout = sha256(f"{self.longest}".encode())
        """From which it follows where the elements of each parameter lie in subgroups."""
        self._is_at_odds = False
        """Whether replicas lie elsewhere on other ranks: what has some stays on the host."""
        self._room: int | None = None
        """Once replicas agreed: for so many subgroups there is room on this rank's device."""
        self.subgroups: list[Subgroup] = []
        self.schedule: Schedule | None = None
        self.measured: Measured | None = None
        self._ranges: dict[Place, list[Range]] = {}
        self._steps = 0
        self._is_full = False
        """Whether the device had no room for even one subgroup, once."""
        self._search: Iterator[Schedule] | None = None
        """For another schedule, by the rates as they were when it began."""
        self._fix()

    def expect(self, places: Sequence[Place]) -> None:
        """Rows of these come, now or later: of frozen ones when they first have a gradient.

        What all ranks have to ask together depends on them, not on what has memory already.
        """
        self._unasked += places
        sizes = [(place.size, place.parameter.dtype) for place in places]
        self._layout.update(f"{sizes}".encode())
        self._is_on_gpu |= any(place.local.is_cuda for place in places)

    def add(self, row: Row) -> None:
        """Subgroups of another row, of places that were expected."""
        self.subgroups += row.cut(self.longest)
        if self._tier is not None:
            self._tier.check(self.subgroups)
        if self._share is None and not self._is_full and self._is_on_gpu:
            self._set(None)  # at the next step, when the lanes can be measured
        else:
            self._fix()

    def _fix(self) -> None:
        share = 0.0 if self._is_full else self._share or 0.0
        self._set(self._divide(_ANY, share))

    def _divide(self, rates: Rates, share: float | None = None) -> Schedule:
        """All subgroups by the best plan for those that may be on the device."""
        free = [
            number
            for number, one in enumerate(self.subgroups)
            if not (self._is_at_odds and any(map(is_replicated, one.places)))
        ]
        sizes = [self.subgroups[number].cut.size for number in free]
        found = plan(sizes, rates, device_slots=self._slots, device_share=share)
        device = tuple(free[number] for number in found.device)
        host = sorted(set(range(len(self.subgroups))).difference(device))
        return replace(found, host=tuple(host), device=device)

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

    def agree(self, groups: Sequence[Group], make_lanes: Callable[[], Lanes]) -> None:
        """See that all replicas plan alike. A collective, the first time that there are others.

        It does not depend on what is due, so a rank that has no gradient takes part.
        """
        if not self._unasked:
            return
        is_planned = self._share is not None or self._is_on_gpu or self.schedule is None
        if self._room is None and self._may_use_device and is_planned:
            others = groups_with_replicas(self._unasked)
            if others:
                lanes = make_lanes()
                self._follow(agree(self._said(groups, lanes), others, lanes.device))
                if self._room is None:
                    return  # nobody has anything to measure yet: all ask again at the next step
        self._unasked.clear()

    def _follow(self, found: Said) -> None:
        """Plan by what all agreed on, from now on."""
        self.measured = None if found.rates is None else Measured(found.rates)
        self._is_at_odds = found.layout == AT_ODDS
        if not found.slots:
            self._leave_to_host()
        elif self._share is None:
            self._slots = found.slots
            self._set(None)
        elif self._is_at_odds:
            self._fix()
        if self._is_at_odds and found.slots:
            emit(Warned(message=_ODDS))
        if found.rates is not None or self._share is not None or not found.slots:
            self._room = found.slots

    def _said(self, groups: Sequence[Group], lanes: Lanes) -> Said:
        """What this rank can do. Its own plan is not made yet: the largest slots are tried."""
        layout = self._layout.hexdigest()
        if self._is_full or not self.subgroups:
            return Said(None, self._slots, layout)
        rates = None if self.measured is None else self.measured.rates
        if self._share is None and rates is None:
            rates = self._measure(lanes, groups)
            if rates is None:
                return Said(None, 0, layout)
        wanted = min(self._slots, len(self.subgroups))
        made = len(self._allocate(wanted, self.subgroups, groups, lanes.device, scales=True))
        if not made:
            self._warn_of_room(self.subgroups, lanes.device)
        return Said(rates, self._slots if made == wanted else made, layout)

    def ready(
        self, groups: Sequence[Group], lanes: Lanes, places: Iterable[Place], *, scales: bool
    ) -> tuple[list[Subgroup], list[Subgroup], list[Slot]]:
        """Those with something to do on the host and on the device, in order, and the slots.

        ``scales``: gradients are multiplied first, for which there has to be room, too.
        """
        self._plan(groups, lanes)
        assert self.schedule is not None
        due = set(places)
        device = self._due(self.schedule.device, due)
        slots = self._make_slots(device, groups, lanes.device, scales) if device else []
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
        if self.schedule is None and not self.subgroups:
            self._fix()  # this rank has no elements
        elif self.schedule is None:
            if self.measured is None:
                rates = self._measure(lanes, groups)
                if rates is None:
                    return
                self.measured = Measured(rates)
            self._set(self._divide(self.measured.rates))
        elif self.measured is not None and not self._is_full and self._room is None:
            self._look_on(self.schedule, self.measured)

    def _look_on(self, current: Schedule, measured: Measured) -> None:
        """For a better schedule: one way at each step, as every one costs milliseconds."""
        sizes = [subgroup.cut.size for subgroup in self.subgroups]
        if self._search is None and self._steps % _REPLAN_STEPS == 0:
            self._search = replanning(current, sizes, measured.rates, device_slots=self._slots)
        if self._search is None:
            return
        found = next(self._search, None)
        if found is None:
            self._search = None
        elif found != current:
            self._set(found)

    def _measure(self, lanes: Lanes, groups: Sequence[Group]) -> Rates | None:
        """None, and all is left to the host, where the device has no memory to try it with."""
        row = max((one.row for one in self.subgroups), key=lambda row: row.elements)
        try:
            return measure(lanes, self._kernel, groups[row.group], row.dtype)
        except torch.OutOfMemoryError:
            self._warn(f"no room on {lanes.device} to measure how fast it updates")
            self._leave_to_host()
            return None

    def learn(self, kind: Kind, work: float, elapsed_s: float) -> None:
        """So long took so much: the rates follow, but for those that replicas agreed on."""
        if self._room is None and self.measured is not None and self.schedule is not None:
            speed = self.schedule.host_speed if kind == "host_update" else 1.0  # beside copies
            self.measured = self.measured.after(kind, work, elapsed_s * speed)

    # ── room on the device ───────────────────────────────────────────────────────────────

    def _make_slots(
        self, device: Sequence[Subgroup], groups: Sequence[Group], where: torch.device, scales: bool
    ) -> list[Slot]:
        """As many as there is memory for: for the step alone, when activations take none.

        UsageError where there is room for none, and replicas agreed on using the device.
        """
        wanted = min(self._slots if self._room is None else self._room, len(device))
        slots = self._allocate(wanted, device, groups, where, scales)
        if len(slots) == wanted:
            return slots
        if self._room is not None:
            self._check_room(slots, device, where)
            self._room = len(slots)  # the same subgroups, with less at once
            return slots
        self._slots = len(slots)  # to ask again at every step empties torch's caches
        if slots:
            assert self.schedule is not None
            self.schedule = replace(self.schedule, rates=None)  # look for another
        else:
            self._warn_of_room(device, where)
        return slots

    def _allocate(
        self, wanted: int, device: Sequence[Subgroup], groups: Sequence[Group], where: torch.device,
        scales: bool,
    ) -> list[Slot]:  # fmt: skip
        """All memory that an update takes there: one that has begun must not ask for more."""
        kinds = {MASTER, *(kind for group in groups for kind in self._kernel.kinds(group))}
        if not all(subgroup.row.is_wide for subgroup in device):
            kinds.add("gradient")
        raw_bytes = max(one.row.dtype.itemsize for one in device) if scales else 0
        slots: list[Slot] = []
        with suppress(torch.OutOfMemoryError):
            for _ in range(wanted):
                slots.append(Slot(_longest(device), sorted(kinds), where, raw_bytes))
        return slots

    def _check_room(
        self, slots: Sequence[Slot], device: Sequence[Subgroup], where: torch.device
    ) -> None:
        if not slots:
            raise UsageError(
                f"no room on {where} for the state of one subgroup ({_longest(device)} elements), "
                "and the replicas of these parameters on other ranks are updated there, with "
                "other last bits than on the host: make subgroup_elements smaller, or give "
                "device_share=0.0"
            )

    def _warn_of_room(self, device: Sequence[Subgroup], where: torch.device) -> None:
        self._warn(
            f"no room on {where} for the state of one subgroup ({_longest(device)} elements)"
        )

    def _leave_to_host(self) -> None:
        """For good: a device that was full once is nearly full."""
        self._is_full, self._slots = True, 0
        self._set(Schedule(tuple(range(len(self.subgroups))), (), 0.0))

    def _warn(self, what: str) -> None:
        emit(Warned(
            message=f"{what}: from now on all is updated on the host. Make subgroup_elements "
            "smaller."
        ))  # fmt: skip


def _longest(subgroups: Sequence[Subgroup]) -> int:
    return max(subgroup.cut.size for subgroup in subgroups)
