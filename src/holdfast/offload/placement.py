"""Carries a schedule out: measures rates, has it planned, and makes room on the device for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from holdfast.accelerator.devices import is_on_device, use_device
from holdfast.errors import UsageError
from holdfast.events import warn
from holdfast.offload.file_state import FileTier, page_aligned
from holdfast.offload.gradients import Range
from holdfast.offload.host_state import MASTER, FlatBufferRow, ParamSlot, Subgroup
from holdfast.offload.kernels import Group, Kernel
from holdfast.offload.planning.schedule import Schedule, plan, replanning
from holdfast.offload.planning.simulate import Kind, Measured, Rates
from holdfast.offload.planning.subgroups import merged
from holdfast.offload.streams import WorkStreams, measure
from holdfast.offload.update import DeviceSlot

#: 192 MiB of AdamW's state: 8 ms on a link of 25 GB/s, against some 0.1 ms of fixed cost.
SUBGROUP_ELEMENTS = 1 << 24
DEVICE_SLOTS = 2
#: Rates change slowly: a new search for a schedule starts after so many steps, one division per
#: step.
_REPLAN_STEPS = 16
_ODDS = (
    "parameters that several ranks have lie in other places of the optimizer's memory on another "
    "rank, beside shards of other sizes: what has a part of them is updated on the host, so that "
    "they stay the same. Give them an optimizer of their own, or shards one size on all ranks."
)
#: With a fixed share no rate is used.
_ANY = Rates(1.0, 1.0, 1.0, 1.0)


class SubgroupPlacement:
    """Divides subgroups among host and device. ``options``: those of the optimizer."""

    def __init__(
        self, kernel: Kernel, options: Mapping[str, Any], tier: FileTier | None = None
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
        self._is_on_device = False
        self._not_agreed: list[ParamSlot] = []
        """Places that may have replicas on other ranks, which is not known yet."""
        self._layout = sha256(f"{self.longest}".encode())
        """A hash of the places of all parameters in subgroups."""
        self._is_at_odds = False
        """True if replicas lie elsewhere on other ranks: subgroups with replicas then stay on
        the host.
        """
        self._room: int | None = None
        """The number of subgroups that fit on this rank's device, once replicas agreed."""
        self.subgroups: list[Subgroup] = []
        self.schedule: Schedule | None = None
        self.measured: Measured | None = None
        self._ranges: dict[ParamSlot, list[Range]] = {}
        self._steps = 0
        self._is_full = False
        """True if the device once had no room for even one subgroup."""
        self._search: Iterator[Schedule] | None = None
        """The running search for another schedule, by the rates as they were when it began."""
        self._fix()

    def uses_device(self, device: torch.device) -> bool:
        """Return True if parameters on ``device`` may be updated there."""
        return self._may_use_device and device.type != "cpu"

    def expect(self, places: Sequence[ParamSlot]) -> None:
        """Announce parameters whose buffers come now or, for frozen ones, with their first
        gradient.

        The collectives of all ranks depend on these parameters, not on which have memory already.
        """
        self._not_agreed += places
        sizes = [(place.size, place.parameter.dtype) for place in places]
        self._layout.update(f"{sizes}".encode())
        self._is_on_device |= any(is_on_device(place.local) for place in places)

    def add(self, buffer: FlatBufferRow) -> None:
        """Add the subgroups of another flat buffer, whose places were announced."""
        self.subgroups += buffer.cut(self.longest)
        if self._tier is not None:
            self._tier.check(self.subgroups)
        if self._share is None and not self._is_full and self._is_on_device:
            self._set(None)  # at the next step, when the work streams can be measured
        else:
            self._fix()

    def _fix(self) -> None:
        share = 0.0 if self._is_full else self._share or 0.0
        self._set(self._divide(_ANY, share))

    def _divide(self, rates: Rates, share: float | None = None) -> Schedule:
        """Divide all subgroups by the best plan for those that may be on the device."""
        free = [
            number
            for number, one in enumerate(self.subgroups)
            if not (self._is_at_odds and any(map(is_replicated, one.places)))
        ]
        sizes = [self.subgroups[number].cut.size for number in free]
        schedule = plan(sizes, rates, device_slots=self._slots, device_share=share)
        device = tuple(free[number] for number in schedule.device)
        host = sorted(set(range(len(self.subgroups))).difference(device))
        return replace(schedule, host=tuple(host), device=device)

    def _set(self, schedule: Schedule | None) -> None:
        self.schedule, self._search = schedule, None
        self._ranges.clear()
        for number in () if schedule is None else schedule.host:
            subgroup = self.subgroups[number]
            for span, place in zip(subgroup.spans, subgroup.places, strict=True):
                self._ranges.setdefault(place, []).append((span.start, span.stop))
        for place, ranges in self._ranges.items():
            self._ranges[place] = list(merged(sorted(ranges)))

    def on_host(self, place: ParamSlot) -> list[Range]:
        """Return which of a parameter's elements are updated on the host, as far as is known."""
        return self._ranges.get(place, [])

    def agree(self, groups: Sequence[Group], make_streams: Callable[[], WorkStreams]) -> None:
        """Agree on the same plan with all replicas. A collective, once for each set of new
        replicas.

        It does not depend on gradients, so a rank that has none takes part.
        """
        if not self._not_agreed:
            return
        is_planned = self._share is not None or self._is_on_device or self.schedule is None
        if self._room is None and self._may_use_device and is_planned:
            others = groups_with_replicas(self._not_agreed)
            if others:
                streams = make_streams()
                self._follow(agree(self._vote(groups, streams), others, streams.device))
                if self._room is None:
                    return  # no rank can measure yet: all ask again at the next step
        self._not_agreed.clear()

    def _follow(self, vote: PlacementVote) -> None:
        """Plan by the agreed vote, from now on."""
        self.measured = None if vote.rates is None else Measured(vote.rates)
        self._is_at_odds = vote.layout == AT_ODDS
        if not vote.slots:
            self._leave_to_host()
        elif self._share is None:
            self._slots = vote.slots
            self._set(None)
        elif self._is_at_odds:
            self._fix()
        if self._is_at_odds and vote.slots:
            warn(_ODDS)
        if vote.rates is not None or self._share is not None or not vote.slots:
            self._room = vote.slots

    def _vote(self, groups: Sequence[Group], streams: WorkStreams) -> PlacementVote:
        """Return this rank's vote. Its own plan does not exist yet: the largest slots are tried."""
        layout = self._layout.hexdigest()
        if self._is_full or not self.subgroups:
            return PlacementVote(None, self._slots, layout)
        rates = None if self.measured is None else self.measured.rates
        if self._share is None and rates is None:
            rates = self._measure(streams, groups)
            if rates is None:
                return PlacementVote(None, 0, layout)
        wanted = min(self._slots, len(self.subgroups))
        made = len(self._allocate(wanted, self.subgroups, groups, streams.device, scales=True))
        if not made:
            self._warn_of_room(self.subgroups, streams.device)
        return PlacementVote(rates, self._slots if made == wanted else made, layout)

    def ready(
        self,
        groups: Sequence[Group],
        streams: WorkStreams,
        places: Iterable[ParamSlot],
        *,
        scales: bool,
    ) -> tuple[list[Subgroup], list[Subgroup], list[DeviceSlot]]:
        """Return the subgroups with work on the host and on the device, in order, and the slots.

        ``scales``: gradients are multiplied first, which needs memory, too.
        """
        self._plan(groups, streams)
        assert self.schedule is not None
        due = set(places)
        device = self._due(self.schedule.device, due)
        slots = self._make_slots(device, groups, streams.device, scales) if device else []
        if device and not slots:
            everything = self._due([*self.schedule.host, *self.schedule.device], due)
            self._leave_to_host()
            return everything, [], []
        return self._due(self.schedule.host, due), device, slots

    def _due(self, numbers: Iterable[int], due: set[ParamSlot]) -> list[Subgroup]:
        subgroups = (self.subgroups[number] for number in numbers)
        return [one for one in subgroups if not due.isdisjoint(one.places)]

    # ── the schedule ─────────────────────────────────────────────────────────────────────

    def _plan(self, groups: Sequence[Group], streams: WorkStreams) -> None:
        """Plan by the measured rates, where the share is not fixed."""
        self._steps += 1
        if self.schedule is None and not self.subgroups:
            self._fix()  # this rank has no elements
        elif self.schedule is None:
            if self.measured is None:
                rates = self._measure(streams, groups)
                if rates is None:
                    return
                self.measured = Measured(rates)
            self._set(self._divide(self.measured.rates))
        elif self.measured is not None and not self._is_full and self._room is None:
            self._continue_search(self.schedule, self.measured)

    def _continue_search(self, current: Schedule, measured: Measured) -> None:
        """Continue the search for a better schedule: one division per step, as each costs
        milliseconds.
        """
        sizes = [subgroup.cut.size for subgroup in self.subgroups]
        if self._search is None and self._steps % _REPLAN_STEPS == 0:
            self._search = replanning(current, sizes, measured.rates, device_slots=self._slots)
        if self._search is None:
            return
        schedule = next(self._search, None)
        if schedule is None:
            self._search = None
        elif schedule != current:
            self._set(schedule)

    def _measure(self, streams: WorkStreams, groups: Sequence[Group]) -> Rates | None:
        """Measure the rates; None, with all left to the host, where the device lacks memory for
        the test.
        """
        buffer = max((one.buffer for one in self.subgroups), key=lambda buffer: buffer.elements)
        try:
            return measure(streams, self._kernel, groups[buffer.group], buffer.dtype)
        except torch.OutOfMemoryError:
            self._warn(f"no room on {streams.device} to measure how fast it updates")
            self._leave_to_host()
            return None

    def learn(self, kind: Kind, work: float, elapsed_s: float) -> None:
        """Record a duration and update the rates, except rates that replicas agreed on."""
        if self._room is None and self.measured is not None and self.schedule is not None:
            speed = self.schedule.host_speed if kind == "host_update" else 1.0  # beside copies
            self.measured = self.measured.after(kind, work, elapsed_s * speed)

    # ── room on the device ───────────────────────────────────────────────────────────────

    def _make_slots(
        self, device: Sequence[Subgroup], groups: Sequence[Group], where: torch.device, scales: bool
    ) -> list[DeviceSlot]:
        """Allocate as many slots as fit: for the step alone, when activations take no memory.

        UsageError where none fits, and replicas agreed on using the device.
        """
        wanted = min(self._slots if self._room is None else self._room, len(device))
        slots = self._allocate(wanted, device, groups, where, scales)
        if len(slots) == wanted:
            return slots
        if self._room is not None:
            self._check_room(slots, device, where)
            self._room = len(slots)  # the same subgroups, with fewer at once
            return slots
        self._slots = len(slots)  # a retry at every step would empty torch's caches
        if slots:
            assert self.schedule is not None
            self.schedule = replace(self.schedule, rates=None)  # search for another
        else:
            self._warn_of_room(device, where)
        return slots

    def _allocate(
        self,
        wanted: int,
        device: Sequence[Subgroup],
        groups: Sequence[Group],
        where: torch.device,
        scales: bool,
    ) -> list[DeviceSlot]:
        """Allocate all device memory of an update: a running update must not need more."""
        kinds = {MASTER, *(kind for group in groups for kind in self._kernel.kinds(group))}
        if not all(subgroup.buffer.is_wide for subgroup in device):
            kinds.add("gradient")
        raw_bytes = max(one.buffer.dtype.itemsize for one in device) if scales else 0
        slots: list[DeviceSlot] = []
        with suppress(torch.OutOfMemoryError):
            for _ in range(wanted):
                slots.append(DeviceSlot(_longest(device), sorted(kinds), where, raw_bytes))
        return slots

    def _check_room(
        self, slots: Sequence[DeviceSlot], device: Sequence[Subgroup], where: torch.device
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
        """Leave everything to the host, permanently: a device that was full once is nearly full."""
        self._is_full, self._slots = True, 0
        self._set(Schedule(tuple(range(len(self.subgroups))), (), 0.0))

    def _warn(self, what: str) -> None:
        warn(f"{what}: from now on all is updated on the host. Make subgroup_elements smaller.")


def _longest(subgroups: Sequence[Subgroup]) -> int:
    return max(subgroup.cut.size for subgroup in subgroups)


# Makes ranks that hold the same parameters update the same subgroups in the same place.
#
# A GPU's kernels and the CPU's differ in last bits, and nothing averages parameters: replicas of
# which one is updated on the host and one on the device drift apart permanently. So the ranks
# agree, once, on the inputs of the schedule.


@dataclass(frozen=True, slots=True)
class PlacementVote:
    """The inputs of one rank's plan."""

    rates: Rates | None
    """None: the rank has nothing to measure, or does not need to."""
    slots: int
    """The number of subgroups that fit on its device."""
    layout: str
    """Equal where parameters lie in the same places of the same buffers; ``AT_ODDS`` otherwise."""


#: The layout of a vote when layouts differ.
AT_ODDS = ""


def is_replicated(place: ParamSlot) -> bool:
    """Return whether other ranks hold the same elements, as far as is known: see below."""
    return bool(groups_with_replicas([place]))


def groups_with_replicas(places: Iterable[ParamSlot]) -> list[dist.ProcessGroup]:
    """Return the groups of ranks in which others hold the same elements of any of these parameters.

    For a plain parameter that is every rank, because nothing tells which ranks hold it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    groups: list[dist.ProcessGroup] = []
    for place in places:
        if not isinstance(place.parameter, DTensor):
            everyone = dist.group.WORLD
            return [everyone] if everyone is not None and everyone.size() > 1 else []
        mesh = place.parameter.device_mesh
        if mesh.get_coordinate() is None:
            continue  # this rank has none of it
        for number, placement in enumerate(place.parameter.placements):
            if placement.is_replicate() and mesh.size(number) > 1:
                group = mesh.get_group(number)
                if all(group is not one for one in groups):
                    groups.append(group)
    return groups


def agree(
    vote: PlacementVote, groups: Iterable[dist.ProcessGroup], device: torch.device
) -> PlacementVote:
    """Return the rates of the first rank that has some, the fewest slots, and whether layouts
    agree.

    A collective: every rank has to call it.
    """
    for group in groups:
        votes: list[PlacementVote] = [vote] * group.size()
        # A process group of GPUs gathers objects on the current device.
        with use_device(device):
            dist.all_gather_object(votes, vote, group=group)
        rates = next((one.rates for one in votes if one.rates is not None), None)
        layout = vote.layout if len({one.layout for one in votes}) == 1 else AT_ODDS
        vote = PlacementVote(rates, min(one.slots for one in votes), layout)
    return vote


# Finds the group of each flat buffer: the user may reorder, remove or fill groups.


def find_groups(
    kind: str,
    groups: Sequence[Mapping[str, Any]],
    places: Mapping[torch.Tensor, tuple[FlatBufferRow, ParamSlot]],
    waiting: Collection[torch.Tensor] = (),
) -> list[ParamSlot]:
    """Number every flat buffer by its present group; return the places that are in a group, in
    order.

    ``waiting``: parameters that have no memory yet. UsageError for parameters without memory that
    are not among them, and for a buffer whose parameters are in two groups.
    """
    group_of: dict[FlatBufferRow, int] = {}
    there: list[ParamSlot] = []
    for number, group in enumerate(groups):
        for position, parameter in enumerate(group["params"]):
            known = places.get(parameter)
            if known is None and parameter in waiting:
                continue
            if known is None:
                raise UsageError(
                    f"parameter {position} of group {number} is not one that this {kind} was "
                    "given: there is no memory for its state. Add parameters by add_param_group, "
                    f"and where some were replaced make the {kind} anew"
                )
            buffer, place = known
            if group_of.setdefault(buffer, number) != number:
                raise UsageError(
                    f"{place.name} is in group {number} now, and parameters that came in one group "
                    f"with it are in group {group_of[buffer]}: their state lies together. Take the "
                    "group out of param_groups and give its parts to add_param_group"
                )
            there.append(place)
    for buffer, _ in places.values():
        buffer.group = group_of.get(buffer, 0)  # no parameter in a group: not updated
    return there
