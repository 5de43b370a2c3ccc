"""One update: each subgroup where the schedule says, host and device at once.

On the device state goes through slots: loaded, updated, stored, each on a lane of its own, and a
slot is loaded again only behind the store before. On the host the gradient is waited for, cast,
applied, and the new parameters go to the device meanwhile. All is tied by marks, nothing by luck.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from holdfast.offload.cutting import Span, aligned
from holdfast.offload.kernels import Group, Kernel, Tensors
from holdfast.offload.lanes import Lanes, Mark, Passed
from holdfast.offload.rates import Kind
from holdfast.offload.rows import BATCH_ELEMENTS, MASTER, Batch, Place, Subgroup
from holdfast.offload.tier import Turn

#: (what was done, how much of it, how long it took)
Spent = Callable[[Kind, float, float], None]
_PASSED = Passed()


@dataclass(slots=True)
class Due:
    """What is to be done for one parameter."""

    gradient: torch.Tensor
    """On the device, in the order of the row."""
    is_first: bool
    is_clipped: bool = False
    step: torch.Tensor | None = None
    step_there: torch.Tensor | None = None
    """The same number on the device."""
    count: float = 0.0
    """The same number."""
    arrival: Mark = _PASSED
    """Behind the gradient's copy to the host."""


@dataclass(frozen=True, slots=True)
class Scales:
    """What becomes of gradients first, as tensors of one number; None: nothing."""

    factor: torch.Tensor | None = None
    """Those clipped are multiplied by this, and rounded to their own dtype."""
    divisor: torch.Tensor | None = None
    """Then, in FP32, they are divided by that: they were scaled."""

    @property
    def is_any(self) -> bool:
        """Whether anything is done with gradients."""
        return self.factor is not None or self.divisor is not None

    def on_host(self) -> Scales:
        """The same for gradients on the host."""
        factor, divisor = (None if n is None else n.cpu() for n in (self.factor, self.divisor))
        return Scales(None if factor is not None and factor.item() == 1.0 else factor, divisor)


class Slot:
    """Room for one subgroup's state on the device.

    ``raw_bytes``: for each element, of gradients as they came: those the user sees are not changed.
    """

    def __init__(
        self, elements: int, kinds: Sequence[str], device: torch.device, raw_bytes: int = 0
    ) -> None:
        self.memory = {
            kind: torch.empty(elements, dtype=torch.float32, device=device) for kind in kinds
        }
        self._raw = torch.empty(elements * raw_bytes, dtype=torch.uint8, device=device)
        self.is_free: Mark = Passed()

    def part(self, kind: str, size: int) -> torch.Tensor:
        """As much of one kind's memory as a subgroup takes."""
        return self.memory[kind][:size]

    def raw(self, dtype: torch.dtype, size: int) -> torch.Tensor:
        """As much of the room for gradients as they came."""
        return self._raw[: size * dtype.itemsize].view(dtype)


@dataclass(slots=True)
class Update:
    """What one update of an optimizer goes by."""

    lanes: Lanes
    kernel: Kernel
    groups: Sequence[Group]
    due: Mapping[Place, Due]
    scales: Scales
    """Of the gradients on the device."""
    spent: Spent
    turn: Turn | None = None
    """What comes from storage and goes there; None: nothing."""
    _marks: list[Mark] = field(default_factory=list)
    had: dict[Place, tuple[str, ...]] = field(default_factory=dict)
    """What was in each parameter's state before."""
    steps: list[torch.Tensor] = field(default_factory=list)
    """Which are counted, once the first is not ``steps_before`` any more; set behind it."""
    steps_before: float = 0.0
    has_begun: bool = False
    """Whether anything may have been updated."""
    is_complete: bool = False
    """Whether everything was, and all memory is final: ``run`` may have been interrupted yet."""
    _visible: list[Mark] = field(default_factory=list)
    """Behind new parameters: what is computed next comes behind them."""
    _scratch: torch.Tensor | None = None

    def run(
        self, host: Sequence[Subgroup], device: Sequence[Subgroup], slots: Sequence[Slot]
    ) -> None:
        """Update these subgroups, in this order on each side; all memory is final on return."""
        is_given = False
        try:
            begin = self.lanes.now()
            scales = self.scales.on_host()
            self.has_begun = True
            for number, subgroup in enumerate(device):
                self._on_device(subgroup, slots[number % len(slots)], begin)
            for subgroup in host:
                self._on_host(subgroup, scales, begin)
            is_given = True
            self._finish()
        except BaseException:
            self._drain()
            if is_given:
                with suppress(Exception):  # it is the first error that is raised
                    self._finish()
            raise

    def _finish(self) -> None:
        for mark in self._marks:
            mark.wait()
        for mark in self._visible:
            self.lanes.follow(mark)
        self.is_complete = True
        if self.turn is not None:  # all is true already, wherever it is
            self.turn.finish()

    def _drain(self) -> None:
        """Until no lane writes anywhere any more, whatever they raise."""
        lanes = self.lanes
        for lane in (
            lanes.gradients, lanes.host, lanes.parameters, lanes.prefetch, lanes.compute,
            lanes.flush, *(self.turn.lanes if self.turn is not None else ()),
        ):  # fmt: skip
            try:
                lane.run(_nothing).wait()
            except Exception:  # it is the first error that is raised
                continue

    # ── on the host ──────────────────────────────────────────────────────────────────────

    def _on_host(self, subgroup: Subgroup, scales: Scales, begin: Mark) -> None:
        due = [self.due[place] for place in subgroup.places if place in self.due]
        alike = due[0] if self._are_alike(subgroup, due) else None

        def update() -> None:
            began_s = time.perf_counter()
            for batch in subgroup.batches:
                if alike is not None:
                    self._update_runs(subgroup, batch, alike, scales)
                else:
                    self._update_spans(subgroup, batch, scales)
            self.spent("host_update", subgroup.cut.size, time.perf_counter() - began_s)
            self._visible.append(self._to_device(subgroup, begin))

        after = list({id(one.arrival): one.arrival for one in due}.values())
        if self.turn is not None:
            after += self.turn.before(subgroup)
        updated = self.lanes.host.run(update, after=after)
        self._marks.append(updated)
        if self.turn is not None:
            self.turn.behind(subgroup, updated)

    def _are_alike(self, subgroup: Subgroup, due: Sequence[Due]) -> bool:
        """Whether all of a subgroup is due, and the same is to be done with it."""
        first = due[0]
        return len(due) == len(subgroup.places) and all(
            one.count == first.count
            and one.is_first == first.is_first
            and one.is_clipped == first.is_clipped
            for one in due
        )

    def _update_runs(self, subgroup: Subgroup, batch: Batch, due: Due, scales: Scales) -> None:
        """All of a batch, and what lies one behind the other as one."""
        parts = self._parts(subgroup, batch, joined=True)
        factor = scales.factor if due.is_clipped else None
        steps = [] if due.step is None else [due.step] * len(parts[MASTER])
        self._update_on_host(subgroup, parts, steps, factor, scales.divisor, due.is_first)

    def _update_spans(self, subgroup: Subgroup, batch: Batch, scales: Scales) -> None:
        """What is due of a batch, each span as what is to be done with its parameter."""
        all_ = self._parts(subgroup, batch, joined=False)
        for what, which in self._which(subgroup, batch.spans).items():
            parts = {kind: _pick(tensors, which) for kind, tensors in all_.items()}
            due = [self._due(subgroup, batch.spans[number]) for number in which]
            steps = [one.step for one in due if one.step is not None]
            factor = scales.factor if what.is_clipped else None
            self._update_on_host(subgroup, parts, steps, factor, scales.divisor, what.is_first)

    def _parts(
        self, subgroup: Subgroup, batch: Batch, *, joined: bool
    ) -> dict[str, list[torch.Tensor]]:
        kinds = (MASTER, "transfer", *self.kernel.kinds(self.groups[subgroup.row.group]))
        return {kind: subgroup.of_batch(kind, batch, joined=joined) for kind in kinds}

    def _update_on_host(
        self, subgroup: Subgroup, parts: dict[str, list[torch.Tensor]], steps: list[torch.Tensor],
        factor: torch.Tensor | None, divisor: torch.Tensor | None, is_first: bool,
    ) -> None:  # fmt: skip
        """One call of the kernel, and what is before and behind it."""
        row = subgroup.row
        masters, transfer = parts.pop(MASTER), parts.pop("transfer")
        if factor is not None:
            torch._foreach_mul_(transfer, factor)
        gradients = transfer
        if not row.is_wide:
            gradients = self._cast_room(transfer)
            torch._foreach_copy_(gradients, transfer)
        given = Tensors(masters, gradients, parts, steps, divisor)
        self.kernel.update(self.groups[row.group], given, is_first=is_first)
        if not row.is_wide:
            torch._foreach_copy_(transfer, masters)

    def _cast_room(self, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Memory for the gradients of a batch in FP32: the same for all, so that it is cached."""
        if self._scratch is None:
            self._scratch = torch.empty(aligned(BATCH_ELEMENTS), dtype=torch.float32, device="cpu")
        found, at = [], 0
        for one in like:
            found.append(self._scratch[at : at + one.numel()])
            at += aligned(one.numel())
        return found

    def _to_device(self, subgroup: Subgroup, begin: Mark) -> Mark:
        """Behind ``begin``: what comes before may still read the parameters, backward or capture.

        That their gradient is there does not tell.
        """
        row = subgroup.row
        source = row.memory(MASTER) if row.is_wide else row.transfer

        def copy() -> None:
            self._write(subgroup, source[subgroup.cut.start : subgroup.cut.stop])

        return self.lanes.parameters.run(copy, after=[begin])

    def _write(self, subgroup: Subgroup, source: torch.Tensor) -> None:
        """The new parameters: ``source`` is all of a subgroup."""
        small: list[tuple[Span, Place]] = []
        for span, place in self._spans(subgroup):
            if place.small is not None:
                small.append((span, place))
                continue
            into = place.own[span.start : span.stop]
            into.copy_(subgroup.inside(source, span), non_blocking=True)
        if small:
            self._write_small(subgroup, small, source)

    def _write_small(
        self, subgroup: Subgroup, small: Sequence[tuple[Span, Place]], source: torch.Tensor
    ) -> None:
        """First to where it is kept in mind what they are, beside them: all at once, if all is."""
        of = subgroup.row.small
        assert of is not None
        noted = [of.part(place, span.start, span.stop) for span, place in small]
        start, stop = max(of.start, subgroup.cut.start), subgroup.cut.stop
        if sum(aligned(span.stop - span.start) for span, _ in small) == stop - start:
            from_ = source[start - subgroup.cut.start :]
            of.all_between(start, stop).copy_(from_, non_blocking=True)
        else:
            parts = [subgroup.inside(source, span) for span, _ in small]
            torch._foreach_copy_(noted, parts, non_blocking=True)
        own = [
            place.own if span.stop - span.start == place.size else place.own[span.start : span.stop]
            for span, place in small
        ]
        torch._foreach_copy_(own, noted)

    # ── on the device ────────────────────────────────────────────────────────────────────

    def _on_device(self, subgroup: Subgroup, slot: Slot, begin: Mark) -> None:
        row, size = subgroup.row, subgroup.cut.size
        kinds = (MASTER, *self.kernel.kinds(self.groups[row.group]))

        def load() -> None:
            for kind in kinds:
                slot.part(kind, size).copy_(subgroup.stretch(row.memory(kind)), non_blocking=True)

        def update() -> None:
            self._update_slot(subgroup, slot)

        def store() -> None:
            for kind in kinds:
                subgroup.stretch(row.memory(kind)).copy_(slot.part(kind, size), non_blocking=True)

        loaded = self.lanes.prefetch.run(load, after=[begin, slot.is_free])
        updated = self.lanes.compute.run(update, after=[loaded])
        slot.is_free = self.lanes.flush.run(store, after=[updated])
        self._marks.append(slot.is_free)

    def _update_slot(self, subgroup: Subgroup, slot: Slot) -> None:
        row, size = subgroup.row, subgroup.cut.size
        group = self.groups[row.group]
        for what, which in self._which(subgroup, subgroup.spans).items():
            spans = [subgroup.spans[n] for n in which]

            def parts(kind: str, spans: list[Span] = spans) -> list[torch.Tensor]:
                return [subgroup.inside(slot.part(kind, size), span) for span in spans]

            given = [self._due(subgroup, span) for span in spans]
            gradients = [
                due.gradient[span.start : span.stop] for due, span in zip(given, spans, strict=True)
            ]
            factor = self.scales.factor if what.is_clipped else None
            if factor is not None or (row.is_wide and self.scales.divisor is not None):
                raw = slot.raw(row.dtype, size)  # the kernel writes to what it divides
                room = [subgroup.inside(raw, span) for span in spans]
                torch._foreach_copy_(room, gradients)
                gradients = room
            if factor is not None:
                torch._foreach_mul_(gradients, factor)
            if not row.is_wide:
                room = parts("gradient")
                torch._foreach_copy_(room, gradients)
                gradients = room
            states = {kind: parts(kind) for kind in self.kernel.kinds(group)}
            steps = [one.step_there for one in given if one.step_there is not None]
            self.kernel.update(
                group, Tensors(parts(MASTER), gradients, states, steps, self.scales.divisor),
                is_first=what.is_first,
            )  # fmt: skip
        self._write(subgroup, slot.part(MASTER, size))

    # ── of what is due ───────────────────────────────────────────────────────────────────

    def _due(self, subgroup: Subgroup, span: Span) -> Due:
        return self.due[subgroup.row.places[span.parameter]]

    def _spans(self, subgroup: Subgroup) -> Iterator[tuple[Span, Place]]:
        """Those of parameters that are due."""
        for span, place in zip(subgroup.spans, subgroup.places, strict=True):
            if place in self.due:
                yield span, place

    def _which(self, subgroup: Subgroup, spans: Sequence[Span]) -> dict[_What, list[int]]:
        """The numbers of the spans that are due, by what is to be done."""
        found: dict[_What, list[int]] = {}
        for number, span in enumerate(spans):
            due = self.due.get(subgroup.row.places[span.parameter])
            if due is not None:
                found.setdefault(_What(due.is_first, due.is_clipped), []).append(number)
        return found


class _What(NamedTuple):
    """What is to be done in one call."""

    is_first: bool
    is_clipped: bool


def _pick(tensors: list[torch.Tensor], which: Sequence[int]) -> list[torch.Tensor]:
    return tensors if len(which) == len(tensors) else [tensors[number] for number in which]


def _nothing() -> None:
    """What is done when a lane is waited for."""
