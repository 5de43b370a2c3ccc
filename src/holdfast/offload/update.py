"""Runs one update: each subgroup where the schedule says, on host and device in parallel.

On the device state goes through slots: loaded, updated, stored, each on a work stream of its own; a
slot is loaded again only after its previous store. On the host each update waits for the gradient,
casts and applies it, and the new parameters go to the device meanwhile. All work is synchronized by
marks; nothing depends on timing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from holdfast.offload.file_state import TierStep
from holdfast.offload.host_state import BATCH_ELEMENTS, MASTER, ParamBatch, ParamSlot, Subgroup
from holdfast.offload.kernels import Group, Kernel, Tensors
from holdfast.offload.planning.simulate import Kind
from holdfast.offload.planning.subgroups import ElementSpan, aligned
from holdfast.offload.streams import PassedMark, StreamMark, WorkStreams

#: (kind of work, amount, duration)
Spent = Callable[[Kind, float, float], None]
_PASSED = PassedMark()


@dataclass(slots=True)
class DueWork:
    """The work for one parameter in this step."""

    gradient: torch.Tensor
    """The gradient on the device, in the order of the flat buffer."""
    is_first: bool
    is_clipped: bool = False
    step: torch.Tensor | None = None
    step_there: torch.Tensor | None = None
    """The step count on the device."""
    count: float = 0.0
    """The step count as a number."""
    arrival: StreamMark = _PASSED
    """The mark behind the gradient's copy to the host."""


@dataclass(frozen=True, slots=True)
class Scales:
    """Factors applied to gradients first, as one-element tensors; None: nothing."""

    factor: torch.Tensor | None = None
    """Clipped gradients are multiplied by it, and rounded to their own dtype."""
    divisor: torch.Tensor | None = None
    """Scaled gradients are then divided by it, in FP32."""

    @property
    def is_any(self) -> bool:
        """True if any factor is applied."""
        return self.factor is not None or self.divisor is not None

    def on_host(self) -> Scales:
        """Return the same factors for gradients on the host."""
        factor, divisor = (None if n is None else n.cpu() for n in (self.factor, self.divisor))
        return Scales(None if factor is not None and factor.item() == 1.0 else factor, divisor)


class DeviceSlot:
    """Memory for one subgroup's state on the device.

    ``raw_bytes``: for each element, a copy of the original gradients: those the user sees must not
    change.
    """

    def __init__(
        self, elements: int, kinds: Sequence[str], device: torch.device, raw_bytes: int = 0
    ) -> None:
        self.memory = {
            kind: torch.empty(elements, dtype=torch.float32, device=device) for kind in kinds
        }
        self._raw = torch.empty(elements * raw_bytes, dtype=torch.uint8, device=device)
        self.is_free: StreamMark = PassedMark()

    def part(self, kind: str, size: int) -> torch.Tensor:
        """Return the part of one kind's memory that a subgroup needs."""
        return self.memory[kind][:size]

    def raw(self, dtype: torch.dtype, size: int) -> torch.Tensor:
        """Return the part of the memory for the original gradients that a subgroup needs."""
        return self._raw[: size * dtype.itemsize].view(dtype)


@dataclass(slots=True)
class Update:
    """The inputs and progress of one update of an optimizer."""

    streams: WorkStreams
    kernel: Kernel
    groups: Sequence[Group]
    due: Mapping[ParamSlot, DueWork]
    scales: Scales
    """The scales for gradients on the device."""
    spent: Spent
    tier_step: TierStep | None = None
    """The step's reads and writes of files; None: all state is in memory."""
    _marks: list[StreamMark] = field(default_factory=list)
    had: dict[ParamSlot, tuple[str, ...]] = field(default_factory=dict)
    """The keys of each parameter's state before the update."""
    steps: list[torch.Tensor] = field(default_factory=list)
    """Step counters that are incremented once the first differs from ``steps_before``; set
    after it.
    """
    steps_before: float = 0.0
    has_begun: bool = False
    """True if anything may have been updated."""
    is_complete: bool = False
    """True if everything was updated and all memory is final, even if ``run`` was then
    interrupted.
    """
    _visible: list[StreamMark] = field(default_factory=list)
    """Marks behind new parameters: the caller's next computation must follow them."""
    _scratch: torch.Tensor | None = None

    def run(
        self, host: Sequence[Subgroup], device: Sequence[Subgroup], slots: Sequence[DeviceSlot]
    ) -> None:
        """Update these subgroups, in this order on each side; all memory is final on return."""
        is_given = False
        try:
            begin = self.streams.now()
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
                with suppress(Exception):  # the first error is raised
                    self._finish()
            raise

    def _finish(self) -> None:
        for mark in self._marks:
            mark.wait()
        for mark in self._visible:
            self.streams.follow(mark)
        self.is_complete = True
        if self.tier_step is not None:  # all state is correct already, in memory or in files
            self.tier_step.finish()

    def _drain(self) -> None:
        """Wait until no work stream writes any more, whatever error it raises."""
        streams = self.streams
        for stream in (
            streams.gradients,
            streams.host,
            streams.parameters,
            streams.prefetch,
            streams.compute,
            streams.flush,
            *(self.tier_step.streams if self.tier_step is not None else ()),
        ):
            try:
                stream.run(_nothing).wait()
            except Exception:  # the first error is raised
                continue

    # ── on the host ──────────────────────────────────────────────────────────────────────

    def _on_host(self, subgroup: Subgroup, scales: Scales, begin: StreamMark) -> None:
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
        if self.tier_step is not None:
            after += self.tier_step.before(subgroup)
        updated = self.streams.host.run(update, after=after)
        self._marks.append(updated)
        if self.tier_step is not None:
            self.tier_step.behind(subgroup, updated)

    def _are_alike(self, subgroup: Subgroup, due: Sequence[DueWork]) -> bool:
        """Return whether all of a subgroup is updated, and in the same way."""
        first = due[0]
        return len(due) == len(subgroup.places) and all(
            one.count == first.count
            and one.is_first == first.is_first
            and one.is_clipped == first.is_clipped
            for one in due
        )

    def _update_runs(
        self, subgroup: Subgroup, batch: ParamBatch, due: DueWork, scales: Scales
    ) -> None:
        """Update a whole batch; adjacent spans are joined."""
        parts = self._parts(subgroup, batch, joined=True)
        factor = scales.factor if due.is_clipped else None
        steps = [] if due.step is None else [due.step] * len(parts[MASTER])
        self._update_on_host(subgroup, parts, steps, factor, scales.divisor, due.is_first)

    def _update_spans(self, subgroup: Subgroup, batch: ParamBatch, scales: Scales) -> None:
        """Update the due spans of a batch, each with the settings of its parameter."""
        all_ = self._parts(subgroup, batch, joined=False)
        for what, which in self._which(subgroup, batch.spans).items():
            parts = {kind: _pick(tensors, which) for kind, tensors in all_.items()}
            due = [self._due(subgroup, batch.spans[number]) for number in which]
            steps = [one.step for one in due if one.step is not None]
            factor = scales.factor if what.is_clipped else None
            self._update_on_host(subgroup, parts, steps, factor, scales.divisor, what.is_first)

    def _parts(
        self, subgroup: Subgroup, batch: ParamBatch, *, joined: bool
    ) -> dict[str, list[torch.Tensor]]:
        kinds = (MASTER, "transfer", *self.kernel.kinds(self.groups[subgroup.buffer.group]))
        return {kind: subgroup.of_batch(kind, batch, joined=joined) for kind in kinds}

    def _update_on_host(
        self,
        subgroup: Subgroup,
        parts: dict[str, list[torch.Tensor]],
        steps: list[torch.Tensor],
        factor: torch.Tensor | None,
        divisor: torch.Tensor | None,
        is_first: bool,
    ) -> None:
        """Call the kernel once, with the casts before and after it."""
        buffer = subgroup.buffer
        masters, transfer = parts.pop(MASTER), parts.pop("transfer")
        if factor is not None:
            torch._foreach_mul_(transfer, factor)
        gradients = transfer
        if not buffer.is_wide:
            gradients = self._cast_room(transfer)
            torch._foreach_copy_(gradients, transfer)
        given = Tensors(masters, gradients, parts, steps, divisor)
        self.kernel.update(self.groups[buffer.group], given, is_first=is_first)
        if not buffer.is_wide:
            torch._foreach_copy_(transfer, masters)

    def _cast_room(self, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return memory for the gradients of a batch in FP32: shared by all batches, so that it
        is cached.
        """
        if self._scratch is None:
            self._scratch = torch.empty(aligned(BATCH_ELEMENTS), dtype=torch.float32, device="cpu")
        room, at = [], 0
        for one in like:
            room.append(self._scratch[at : at + one.numel()])
            at += aligned(one.numel())
        return room

    def _to_device(self, subgroup: Subgroup, begin: StreamMark) -> StreamMark:
        """Copy new parameters behind ``begin``: earlier work may still read them, backward or
        capture.

        The arrival of a gradient does not prove that the backward has ended.
        """
        buffer = subgroup.buffer
        source = buffer.memory(MASTER) if buffer.is_wide else buffer.transfer

        def copy() -> None:
            self._write(subgroup, source[subgroup.cut.start : subgroup.cut.stop])

        mark = self.streams.parameters.run(copy, after=[begin])
        buffer.copying["parameters"] = mark.wait
        return mark

    def _write(self, subgroup: Subgroup, source: torch.Tensor) -> None:
        """Write the new parameters: ``source`` is all of a subgroup."""
        small: list[tuple[ElementSpan, ParamSlot]] = []
        for span, place in self._spans(subgroup):
            if place.small is not None:
                small.append((span, place))
                continue
            into = place.own[span.start : span.stop]
            into.copy_(subgroup.inside(source, span), non_blocking=True)
        if small:
            self._write_small(subgroup, small, source)

    def _write_small(
        self,
        subgroup: Subgroup,
        small: Sequence[tuple[ElementSpan, ParamSlot]],
        source: torch.Tensor,
    ) -> None:
        """Write first to the recorded values beside the parameters: all at once, if all are due."""
        of = subgroup.buffer.small
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

    def _on_device(self, subgroup: Subgroup, slot: DeviceSlot, begin: StreamMark) -> None:
        buffer, size = subgroup.buffer, subgroup.cut.size
        kinds = (MASTER, *self.kernel.kinds(self.groups[buffer.group]))

        def load() -> None:
            for kind in kinds:
                slot.part(kind, size).copy_(
                    subgroup.stretch(buffer.memory(kind)), non_blocking=True
                )

        def update() -> None:
            self._update_slot(subgroup, slot)

        def store() -> None:
            for kind in kinds:
                subgroup.stretch(buffer.memory(kind)).copy_(
                    slot.part(kind, size), non_blocking=True
                )

        loaded = self.streams.prefetch.run(load, after=[begin, slot.is_free])
        updated = self.streams.compute.run(update, after=[loaded])
        slot.is_free = self.streams.flush.run(store, after=[updated])
        self._marks.append(slot.is_free)

    def _update_slot(self, subgroup: Subgroup, slot: DeviceSlot) -> None:
        buffer, size = subgroup.buffer, subgroup.cut.size
        group = self.groups[buffer.group]
        for what, which in self._which(subgroup, subgroup.spans).items():
            spans = [subgroup.spans[n] for n in which]

            def parts(kind: str, spans: list[ElementSpan] = spans) -> list[torch.Tensor]:
                return [subgroup.inside(slot.part(kind, size), span) for span in spans]

            given = [self._due(subgroup, span) for span in spans]
            gradients = [
                due.gradient[span.start : span.stop] for due, span in zip(given, spans, strict=True)
            ]
            factor = self.scales.factor if what.is_clipped else None
            if factor is not None or (buffer.is_wide and self.scales.divisor is not None):
                raw = slot.raw(buffer.dtype, size)  # the kernel writes to it
                room = [subgroup.inside(raw, span) for span in spans]
                torch._foreach_copy_(room, gradients)
                gradients = room
            if factor is not None:
                torch._foreach_mul_(gradients, factor)
            if not buffer.is_wide:
                room = parts("gradient")
                torch._foreach_copy_(room, gradients)
                gradients = room
            states = {kind: parts(kind) for kind in self.kernel.kinds(group)}
            steps = [one.step_there for one in given if one.step_there is not None]
            self.kernel.update(
                group,
                Tensors(parts(MASTER), gradients, states, steps, self.scales.divisor),
                is_first=what.is_first,
            )
        self._write(subgroup, slot.part(MASTER, size))

    # ── selection of spans ───────────────────────────────────────────────────────────────

    def _due(self, subgroup: Subgroup, span: ElementSpan) -> DueWork:
        return self.due[subgroup.buffer.places[span.parameter]]

    def _spans(self, subgroup: Subgroup) -> Iterator[tuple[ElementSpan, ParamSlot]]:
        """Return the spans of parameters that are due."""
        for span, place in zip(subgroup.spans, subgroup.places, strict=True):
            if place in self.due:
                yield span, place

    def _which(self, subgroup: Subgroup, spans: Sequence[ElementSpan]) -> dict[_What, list[int]]:
        """Group the indexes of the due spans by their settings."""
        indexes: dict[_What, list[int]] = {}
        for number, span in enumerate(spans):
            due = self.due.get(subgroup.buffer.places[span.parameter])
            if due is not None:
                indexes.setdefault(_What(due.is_first, due.is_clipped), []).append(number)
        return indexes


class _What(NamedTuple):
    """The settings of one kernel call."""

    is_first: bool
    is_clipped: bool


def _pick(tensors: list[torch.Tensor], which: Sequence[int]) -> list[torch.Tensor]:
    return tensors if len(which) == len(tensors) else [tensors[number] for number in which]


def _nothing() -> None:
    """Do nothing: the work whose mark is waited for."""
