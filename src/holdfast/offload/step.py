"""Runs one step of an optimizer completely, or not at all, or marks the state as broken off.

The step collects the parameters to update, brings their gradients to the host, and runs the update.
An interrupt may come between any two lines: the step is then undone, completed, or marked as broken
off, and no further step runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.accelerator.devices import is_streamed, memory_key
from holdfast.errors import UsageError
from holdfast.offload.bit_sums import are_same, checksums
from holdfast.offload.file_state import FileTier
from holdfast.offload.gradients import ClippedNorm, Gradients
from holdfast.offload.host_state import FlatBufferRow, ParamSlot, SmallParams
from holdfast.offload.kernels import Group, Kernel, Tensors, settled
from holdfast.offload.placement import SubgroupPlacement
from holdfast.offload.state_dict import begin_state
from holdfast.offload.streams import WorkStreams
from holdfast.offload.update import DueWork, Scales, Update

#: The state of an optimizer, by parameter.
States = dict[torch.Tensor, dict[str, Any]]


class StepRunner:
    """Runs the steps of one optimizer with these ``places``.

    ``broken_off``: why its parameters and state belong to no step; "" where they do.
    """

    def __init__(
        self,
        kernel: Kernel,
        placing: SubgroupPlacement,
        places: Mapping[torch.Tensor, tuple[FlatBufferRow, ParamSlot]],
        tier: FileTier | None,
    ) -> None:
        self._kernel, self._placing, self._places = kernel, placing, places
        self._tier = tier
        self.broken_off = ""
        self.is_done = False
        """True if the last update that raised was complete all the same."""

    def step(
        self,
        flats: Mapping[ParamSlot, torch.Tensor],
        groups: Sequence[dict[str, Any]],
        state: States,
        streams: WorkStreams,
        gradients: Gradients,
        clipped: ClippedNorm | None,
        divisor: torch.Tensor | None,
    ) -> None:
        """Update these parameters, each with this rank's elements of its gradient.

        ``divisor``: the factor of a gradient scaler, by which the gradients were multiplied.
        """
        places = list(flats)
        scales = Scales(None if clipped is None else clipped.factor, divisor)
        host, device, slots = self._placing.ready(groups, streams, places, scales=scales.is_any)
        tier_step = None if self._tier is None else self._tier.tier_step(host)
        others = changed(places)
        due: dict[ParamSlot, DueWork] = {}
        update = Update(streams, self._kernel, groups, due, scales, self._placing.learn, tier_step)
        try:
            self.broken_off = "it was interrupted"  # an interrupt may come between any two lines
            for place, gradient in flats.items():
                own = state[place.parameter]
                update.had[place] = tuple(own)
                is_first = self._begin(place, groups, own, is_changed=place in others)
                if not own:
                    del state[place.parameter]
                is_clipped = clipped is not None and clipped.has(_whole(place))
                due[place] = DueWork(place.ordered(gradient), is_first, is_clipped, own.get("step"))
            self._bring(due, gradients)
            if self._kernel.counts_steps:
                steps = [one.step for one in due.values() if one.step is not None]
                update.steps_before = steps[0].item()
                update.steps = steps  # last: by then it is known whether they were counted
                self._count(list(due.values()), steps, streams.device, bool(device))
            update.run(host if tier_step is None else tier_step.order, device, slots)
            self._end(due)
            with suppress(torch.OutOfMemoryError):  # all is done; the masters follow next time
                note(due)
        except BaseException as error:
            self._settle(update, state, f"{type(error).__name__}: {error}")
            raise

    def _begin(
        self,
        place: ParamSlot,
        groups: Sequence[dict[str, Any]],
        own: dict[str, Any],
        *,
        is_changed: bool,
    ) -> bool:
        """Create a parameter's state and correct its master; return whether this is its first
        update.
        """
        buffer, _ = self._places[place.parameter]
        kinds = self._kernel.kinds(groups[buffer.group])
        return begin_state(buffer, place, own, kinds, self._kernel.counts_steps, is_changed)

    def _count(
        self, due: list[DueWork], steps: list[torch.Tensor], device: torch.device, is_needed: bool
    ) -> None:
        """Increment the step count of each; ``is_needed``: on the device, too."""
        torch._foreach_add_(steps, 1)
        all_ = torch.stack(steps)
        for one, count in zip(due, all_.tolist(), strict=True):
            one.count = count
        if is_needed:
            there = all_.to(device, non_blocking=True).unbind()
            for one, step in zip(due, there, strict=True):
                one.step_there = step

    def _bring(self, due: Mapping[ParamSlot, DueWork], gradients: Gradients) -> None:
        """Start the copies of all gradients that the host needs, in their present form."""
        ranges = {}
        small: dict[SmallParams, FlatBufferRow] = {}
        for place in due:
            found = self._placing.on_host(place)
            if place.small is not None:
                place.small.make()
            if found and place.small is not None:
                small[place.small] = self._places[place.parameter][0]
            elif found:
                ranges[place] = found
        for one, buffer in small.items():
            flats = {place: due[place].gradient for place in due if place.small is one}
            arrival = gradients.send_small(buffer, one, flats)
            for place in flats:
                due[place].arrival = arrival
        marks = gradients.unchanged(ranges)
        for place, found in ranges.items():
            mark = marks.get(place)
            buffer = self._places[place.parameter][0]
            due[place].arrival = mark or gradients.send(buffer, place, due[place].gradient, found)

    def _end(self, due: Mapping[ParamSlot, DueWork]) -> None:
        """Record the end of the update. Until ``note`` runs, every parameter counts as changed
        by others.
        """
        for place in due:
            place.seen = ()
        self.broken_off = ""

    def _settle(self, update: Update, state: States, why: str) -> None:
        """Classify a failed update: not begun, complete, or partial."""
        self.broken_off = why
        self.is_done = update.is_complete
        if update.is_complete:
            self._end(update.due)
        elif not update.has_begun:
            if update.steps and update.steps[0].item() != update.steps_before:
                torch._foreach_sub_(update.steps, 1)
            for place, had in update.had.items():  # so that a retry is again a first update
                own = state[place.parameter]
                for kind in own.keys() - had:
                    del own[kind]
                if not own:
                    del state[place.parameter]
            self.broken_off = ""


def _whole(place: ParamSlot) -> torch.Tensor:
    gradient = place.parameter.grad
    assert gradient is not None
    return gradient


# Rejects, with a reason, parameters and gradients that the optimizer cannot update.


WIDTHS = (torch.float32, torch.bfloat16, torch.float16)


def check_parameter(place: ParamSlot, device: torch.device | None) -> None:
    """Raise UsageError for a parameter that cannot be updated here."""
    local, name = place.local, place.name
    problem = ""
    if local.is_meta:
        problem = "is on the meta device: materialise the module first, then make the optimizer"
    elif local.dtype not in WIDTHS:
        problem = (
            f"is of {local.dtype}, and masters are FP32: parameters are float32, bfloat16 or "
            "float16. Give the others to an optimizer of torch"
        )
    elif not (local.is_cpu or is_streamed(local.device)):
        problem = (
            f"is on {local.device}, which has no streams here: the CPU and accelerators with "
            "streams are supported"
        )
    elif device is not None and local.device != device:
        problem = (
            f"is on {local.device}, others are on {device}: one optimizer is for one device. Make "
            "one for each, or move the module first"
        )
    elif not _is_dense(local):
        problem = "has gaps in its memory, or elements that share it: make it contiguous first"
    if problem:
        raise UsageError(f"{name} {problem}")


def check_kernel(kernel: Kernel, group: Group, device: torch.device) -> None:
    """Raise UsageError where torch cannot update parameters of this group on ``device``."""
    ones = [torch.ones(1, device=device)]
    states = {kind: [torch.zeros(1, device=device)] for kind in kernel.kinds(group)}
    steps = [torch.ones((), device=device)] if kernel.counts_steps else []
    given = Tensors(ones, [torch.zeros(1, device=device)], states, steps)
    try:
        kernel.update(settled([group])[0], given, is_first=True)
    except NotImplementedError as error:
        raise UsageError(
            f"torch has no fused kernel of {type(kernel).__name__} for {device.type} "
            f"({str(error).splitlines()[0]:.120}): give device_share=0.0, by which all is updated "
            "on the host"
        ) from error


def mesh_problem(place: ParamSlot) -> str:
    """Explain why a parameter's gradient is laid out wrongly on its mesh; "" if it is correct."""
    parameter, gradient = place.parameter, place.parameter.grad
    if isinstance(parameter, DTensor) != isinstance(gradient, DTensor):
        kinds = [
            "DTensor" if isinstance(one, DTensor) else "plain tensor"
            for one in (parameter, gradient)
        ]
        return f"is a {kinds[0]}, its gradient a {kinds[1]}: they have to be alike"
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        meshes = parameter.device_mesh, gradient.device_mesh
        if meshes[0] != meshes[1]:
            return f"is on {meshes[0]}, its gradient on {meshes[1]}: they have to be on the same"
    return ""


def gradient_problem(
    kind: str, buffer: FlatBufferRow, place: ParamSlot, gradient: torch.Tensor
) -> str:
    """Explain why a parameter cannot be updated with its gradient; "" if it can.

    ``kind``: the name of the optimizer.
    """
    local = place.raw
    if not place.is_placed and _is_as_it_was(buffer, place, local, gradient):
        return ""
    if problem := mesh_problem(place):
        return problem
    if gradient.layout is not torch.strided:
        return (
            f"has a gradient of the layout {gradient.layout}: {kind} updates "
            "by dense gradients. Make the embedding with sparse=False"
        )
    if local.dtype != buffer.dtype or local.device != buffer.device:
        return (
            f"is {local.dtype} on {local.device} now, and was {buffer.dtype} on {buffer.device} "
            "when the optimizer was made: convert and move the module first, then make the "
            "optimizer"
        )
    if tuple(local.shape) != place.shape:
        return (
            f"has the shape {list(local.shape)} here now, and had {list(place.shape)} when the "
            "optimizer was made: shard the module first, then make the optimizer"
        )
    if not place.is_in_order(local):
        return (
            f"lies in memory with the strides {list(local.stride())} now, and with "
            f"{list(place.stride)} when the optimizer was made: convert the module to its "
            "memory format first, then make the optimizer"
        )
    if gradient.dtype != local.dtype or gradient.device != local.device:
        return (
            f"is {local.dtype} on {local.device}, its gradient {gradient.dtype} on "
            f"{gradient.device}: they have to be alike"
        )
    return ""


def _is_as_it_was(
    buffer: FlatBufferRow, place: ParamSlot, local: torch.Tensor, gradient: torch.Tensor
) -> bool:
    """Return whether nothing changed since the last check: a fast path for thousands of
    parameters.
    """
    return (
        type(place.parameter.grad) is torch.Tensor
        and gradient.layout is torch.strided
        and local.dtype is buffer.dtype is gradient.dtype
        and local.device == buffer.device == gradient.device
        and local.shape == place.shape
        and local.stride() == place.stride
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(
        (stride, size)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size != 1
    ):
        if stride != expected and tensor.numel():
            return False
        expected *= size
    return True


# Detects parameters that no longer match their masters, because other code wrote to them.


def note(places: Iterable[ParamSlot]) -> None:
    """Record that these parameters match their masters now."""
    places = list(places)
    large = [place for place in places if place.small is None]  # of others the values are recorded
    for place, bits in zip(large, checksums(_flats(large)), strict=True):
        place.bits = bits
    for place in places:
        place.seen = _seen(place)  # last: after an interrupt the old value stands


def changed(places: Iterable[ParamSlot]) -> set[ParamSlot]:
    """Return the places whose parameter differs from the recorded state."""
    result: set[ParamSlot] = set()
    large: list[ParamSlot] = []
    small: dict[SmallParams, list[ParamSlot]] = {}
    for place in places:
        if not place.seen or place.seen != _seen(place):
            result.add(place)
        elif place.small is not None:
            small.setdefault(place.small, []).append(place)
        else:
            large.append(place)
    before = [place.bits for place in large if place.bits is not None]
    same = are_same(before, checksums(_flats(large)))
    result.update(place for place, is_same in zip(large, same, strict=True) if not is_same)
    for of, doubtful in small.items():
        result.update(of.changed(doubtful))
    return result


def _flats(places: Iterable[ParamSlot]) -> list[torch.Tensor]:
    return [place.flat(place.local) for place in places]


def _seen(place: ParamSlot) -> tuple[int, ...]:
    # An in-place operation on a DTensor changes its own version, and not that of its local tensor.
    local = place.raw
    return memory_key(local), local._version, place.parameter._version
