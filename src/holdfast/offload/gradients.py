"""Copies gradients to the host during the backward, and detects those that changed afterwards.

A gradient is copied as soon as it is complete. Later changes to it (clipping, a scaler, the next
micro-batch, an average over ranks) show by its version or, as writes through ``.data`` and some of
torch's own kernels do not change versions, by a checksum of its bits; it is then copied again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from holdfast.accelerator.devices import memory_key
from holdfast.offload.bit_sums import Bits, are_same, checksum, checksums
from holdfast.offload.host_state import FlatBufferRow, ParamSlot, SmallParams
from holdfast.offload.streams import StreamMark, WorkStreams
from holdfast.state.tensors import local_of

#: A range of elements of a parameter: start, stop.
Range = tuple[int, int]


@dataclass(slots=True)
class _Arrival:
    """A gradient that was sent."""

    gradient: torch.Tensor
    """The tensor itself, referenced so that no other tensor can reuse its id."""
    version: int
    bits: Bits
    ranges: tuple[Range, ...]
    mark: StreamMark


class Gradients:
    """Sends gradients to the flat buffers of their parameters."""

    def __init__(self, streams: WorkStreams) -> None:
        self._streams = streams
        self._sent: dict[ParamSlot, _Arrival] = {}
        self.sent_again = 0
        """The number of gradients that had changed after they were sent, in total."""

    def send(
        self, buffer: FlatBufferRow, place: ParamSlot, flat: torch.Tensor, ranges: Sequence[Range]
    ) -> StreamMark:
        """Start to copy these ranges of a gradient, ``flat``, in its present form."""
        gradient, local = place.parameter.grad, place.gradient
        assert gradient is not None and local is not None
        bits = checksum(flat)
        into = buffer.transfer[place.start : place.start + place.size]

        def copy() -> None:
            for start, stop in ranges:
                into[start:stop].copy_(flat[start:stop], non_blocking=True)

        mark = self._streams.gradients.run(copy, after=[self._streams.now()], uses=[flat])
        buffer.copying["gradients"] = mark.wait
        self._sent[place] = _Arrival(gradient, local._version, bits, tuple(ranges), mark)
        return mark

    def send_small(
        self, buffer: FlatBufferRow, small: SmallParams, flats: Mapping[ParamSlot, torch.Tensor]
    ) -> StreamMark:
        """Copy the gradients of these small parameters of a flat buffer, in their present form."""
        together = small.gathered(flats)
        into = buffer.transfer[small.start : small.stop]

        def copy() -> None:
            into.copy_(together, non_blocking=True)

        mark = self._streams.gradients.run(copy, after=[self._streams.now()], uses=[together])
        buffer.copying["gradients"] = mark.wait
        return mark

    def unchanged(self, wanted: Mapping[ParamSlot, Sequence[Range]]) -> dict[ParamSlot, StreamMark]:
        """Return the marks of gradients that are unchanged since they were sent, in all wanted
        ranges.
        """
        same = [place for place, ranges in wanted.items() if self._is_same(place, ranges)]
        before = [self._sent[place].bits for place in same]
        results = are_same(before, checksums([place.flat(_local(place)) for place in same]))
        self.sent_again += results.count(False)
        return {
            place: self._sent[place].mark
            for place, is_same in zip(same, results, strict=True)
            if is_same
        }

    def _is_same(self, place: ParamSlot, ranges: Sequence[Range]) -> bool:
        sent = self._sent.get(place)
        if sent is None:
            return False
        is_same = sent.gradient is place.parameter.grad and sent.ranges == tuple(ranges)
        if is_same and sent.version == _local(place)._version:
            return True
        self.sent_again += 1
        return False

    def forget(self) -> None:
        """Forget all sent gradients, which are used or not wanted any more."""
        self._sent.clear()


def _local(place: ParamSlot) -> torch.Tensor:
    gradient = place.gradient
    assert gradient is not None
    return gradient


# Sends gradients to the host during the backward, where they are complete then.


class EarlyGradients:
    """Hooks on parameters; they hold neither parameter nor optimizer, whose methods they call.

    ``coming``: called before more is added to an existing gradient; set by ``add_coming``.
    """

    def __init__(
        self, ready: Callable[[torch.Tensor], None], coming: Callable[[torch.Tensor], None]
    ) -> None:
        self._ready, self._coming = weakref.WeakMethod(ready), weakref.WeakMethod(coming)
        self._is_coming: dict[int, weakref.ref[torch.Tensor]] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        weakref.finalize(self, _remove, self._hooks).atexit = False

    def add(self, parameter: torch.Tensor) -> None:
        """Register a hook for the parameter's completed gradient, if it can have one."""
        if not parameter.requires_grad or not parameter.is_leaf:
            return  # then it is sent at the step
        known = self._ready

        def ready(parameter: torch.Tensor) -> None:
            hear = known()
            if hear is not None:
                hear(parameter)

        self._hooks.append(parameter.register_post_accumulate_grad_hook(ready))

    def add_coming(self, parameter: torch.Tensor) -> None:
        """Register a hook that runs before a backward adds to its gradient, from now on."""
        known, of = self._coming, self._is_coming.get(id(parameter))
        if of is not None and of() is parameter:
            return
        if not parameter.requires_grad or not parameter.is_leaf:
            return
        self._is_coming[id(parameter)] = of = weakref.ref(parameter)

        def coming(_: torch.Tensor) -> None:
            hear, parameter = known(), of()
            if hear is not None and parameter is not None and parameter.grad is not None:
                hear(parameter)

        self._hooks.append(parameter.register_hook(coming))


def _remove(hooks: list[torch.utils.hooks.RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def is_complete(place: ParamSlot, early: bool | None) -> bool:
    """Return whether a ready gradient is what the step will use, as far as is known.

    ``early``: the user's setting; None: unset.
    """
    if not place.is_reduced:
        return False
    if early is not None:
        return early
    if not dist.is_initialized():
        return True
    # DDP may still average a plain gradient over the ranks; a sharded one was averaged, where its
    # mesh is of all ranks.
    parameter = place.parameter
    ranks = parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1
    return ranks == dist.get_world_size()


# Clips gradients by a factor that the next step applies to the gradients it was computed from.


@dataclass(frozen=True, slots=True)
class ClippedNorm:
    """A clipping factor, and the gradients it applies to, in their state when it was computed."""

    factor: torch.Tensor
    _seen: dict[int, tuple[weakref.ref[torch.Tensor], int, int]]

    def has(self, gradient: torch.Tensor) -> bool:
        """Return whether the factor applies to this gradient, with nothing written to it since."""
        recorded = self._seen.get(id(gradient))
        return (
            recorded is not None and recorded[0]() is gradient and recorded[1:] == _marks(gradient)
        )

    def is_overtaken(self, gradient: torch.Tensor) -> bool:
        """Return whether the factor applied to this gradient, and something but zeros was
        written since.
        """
        recorded = self._seen.get(id(gradient))
        if recorded is None or recorded[0]() is not gradient or recorded[1:] == _marks(gradient):
            return False
        return bool(local_of(gradient).any())

    def settle(self, gradient: torch.Tensor) -> None:
        """Clip a gradient now, if it must be, because more is about to be added to it."""
        self.apply([gradient])
        self._seen.pop(id(gradient), None)

    def apply(self, gradients: Iterable[torch.Tensor]) -> None:
        """Multiply the gradients to which the factor applies, as torch's own clipping would
        have.
        """
        own = [local_of(gradient) for gradient in gradients if self.has(gradient)]
        if own:
            torch._foreach_mul_(own, self.factor)


def clip(
    gradients: Sequence[torch.Tensor], max_norm: float, norm_type: float
) -> tuple[torch.Tensor, ClippedNorm]:
    """Return the norm of all gradients, and their clipping factor."""
    norm = torch.nn.utils.get_total_norm(gradients, norm_type)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    seen = {id(one): (weakref.ref(one), *_marks(one)) for one in gradients}
    return norm, ClippedNorm(factor, seen)


def _marks(gradient: torch.Tensor) -> tuple[int, int]:
    local = local_of(gradient)
    return memory_key(local), local._version
