"""Allocates the host memory of an optimizer: flat buffers of FP32 masters and moments.

A flat buffer holds parameters of one group and one dtype. Each kind of state is one tensor, of
which a parameter's state is a view and a subgroup is a range. So state is by parameter, and copies
are by subgroup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.accelerator.devices import host_address, memory_key, storage_key
from holdfast.offload.bit_sums import Bits
from holdfast.offload.mapped_memory import PagedMemory, Wait, pinned
from holdfast.offload.planning.subgroups import (
    ALIGNED,
    ElementSpan,
    SubgroupCut,
    aligned,
    batches,
    cut,
    merged,
    starts,
)
from holdfast.state.tensors import local_of

#: The key of the master in an optimizer's state.
MASTER = "master"
#: Elements that are updated at once on the CPU: their gradient, master and moments stay in the
#: cache between the cast, the update and the cast back (twice as fast as without).
BATCH_ELEMENTS = 1 << 18


@dataclass(slots=True, eq=False)
class ParamSlot:
    """A parameter, and the place of its elements in a flat buffer: in the order of its own
    memory.
    """

    parameter: torch.Tensor
    name: str
    start: int = 0
    shape: tuple[int, ...] = field(init=False)
    stride: tuple[int, ...] = field(init=False)
    size: int = field(init=False)
    seen: tuple[int, ...] = ()
    """Address and versions of the parameter when it last matched its master."""
    bits: Bits | None = None
    """The checksum of its elements at that time."""
    small: SmallParams | None = None
    """The group of small parameters it belongs to."""
    backwards: int = 0
    """The number of backwards that made its gradient ready since the last step."""
    expected: int = 1
    """The number of backwards in the step before."""
    views: dict[str, torch.Tensor] = field(default_factory=dict)
    """Its state tensors, views of the flat buffer."""
    addresses: dict[str, int] = field(default_factory=dict)
    """The addresses of those views when they were made."""
    _own: torch.Tensor | None = None
    is_placed: bool = field(init=False)
    """True if it is a DTensor."""

    def __post_init__(self) -> None:
        local = local_of(self.parameter)
        self.is_placed = isinstance(self.parameter, DTensor)
        self.shape, self.stride, self.size = tuple(local.shape), local.stride(), local.numel()

    @property
    def local(self) -> torch.Tensor:
        """The parameter's elements of this rank."""
        return local_of(self.parameter)

    @property
    def raw(self) -> torch.Tensor:
        """The same elements, for address and version only: not for computation."""
        return self.local if self.is_placed else self.parameter

    @property
    def gradient(self) -> torch.Tensor | None:
        """The gradient's elements of this rank."""
        gradient = self.parameter.grad
        return None if gradient is None else local_of(gradient)

    @property
    def is_reduced(self) -> bool:
        """True if the gradient is laid out over the ranks as the parameter is."""
        parameter, gradient = self.parameter, self.parameter.grad
        if not (isinstance(parameter, DTensor) and isinstance(gradient, DTensor)):
            return True
        return gradient.placements == parameter.placements

    def reduced(self) -> torch.Tensor:
        """Return this rank's elements of the gradient, redistributed like the parameter: a
        collective.
        """
        parameter, gradient = self.parameter, self.parameter.grad
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor) and not self.is_reduced:
            local: torch.Tensor = gradient.redistribute(placements=parameter.placements).to_local()
            return local
        assert gradient is not None
        return local_of(gradient)

    def is_in_order(self, tensor: torch.Tensor) -> bool:
        """Return whether its elements are in memory in the order of the flat buffer."""
        if tensor.stride() == self.stride and tensor.shape == self.shape:
            return True
        return not self.size or (
            _strides(tensor.shape, tensor.stride()) == _strides(self.shape, self.stride)
        )

    @property
    def own(self) -> torch.Tensor:
        """Return the parameter's memory itself, writable, in the order of the flat buffer."""
        if self._own is not None and memory_key(self._own) == memory_key(self.raw):
            return self._own
        local = self.local
        assert self.is_in_order(local), "what is written to a copy is lost"
        own = self.flat(local)
        if self.small is not None:  # a large one could keep old memory alive
            self._own = own
        return own

    def ordered(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return ``flat`` of a gradient; the gradient itself where possible, as for most small
        ones.
        """
        if self.stride == (1,) == gradient.stride() and gradient.shape == self.shape:
            return gradient
        return self.flat(gradient)

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return all elements of a tensor shaped as the parameter in buffer order; maybe a copy."""
        if not self.size:
            return tensor.reshape(-1)
        if not self.is_in_order(tensor):
            there = torch.empty_strided(
                self.shape, self.stride, dtype=tensor.dtype, device=tensor.device
            )
            tensor = there.copy_(tensor)
        return torch.as_strided(tensor, (self.size,), (1,), tensor.storage_offset())


class FlatBufferRow:
    """Parameters of one group and one dtype, and the memory for their state: one flat buffer.

    ``group`` is the number of the group when it was last looked up. Parameters of fewer elements
    than ``small`` lie last, and of them those that end on a whole vector first: the others have
    padding. ``make``: allocates memory that lies in a file.
    """

    def __init__(
        self,
        places: Sequence[ParamSlot],
        group: int,
        *,
        is_pinned: bool,
        small: int = 0,
        make: Callable[[int], PagedMemory] | None = None,
    ) -> None:
        self.group = group
        self.places = tuple(
            sorted(places, key=lambda one: one.size < small and 1 + bool(one.size % ALIGNED))
        )
        at = starts([place.size for place in self.places])
        for place, start in zip(self.places, at, strict=False):
            place.start = start
        self.elements = at[-1]
        self.dtype, self.device = places[0].parameter.dtype, places[0].local.device
        self.small = self._small(small)
        self.is_wide = self.dtype == torch.float32
        """True if the parameters themselves have the full precision of their masters."""
        self._is_pinned = is_pinned
        self.copying: dict[str, Wait] = {}
        """Waits for the last copies that use this memory, by their stream: those of new parameters
        may do so after the step.
        """
        self._make, self._paged = make, dict[str, PagedMemory]()
        self._memory: dict[str, torch.Tensor] = {}
        self.transfer = self._allocate(self.dtype)
        """Gradients from the device; then, for narrow parameters, the parameters that go to the
        device.
        """

    def _small(self, limit: int) -> SmallParams | None:
        places = [place for place in self.places if place.size < limit]
        if not places:
            return None
        made = SmallParams(places, places[0].start, self.elements, self.dtype, self.device)
        for place in places:
            place.small = made
        return made

    def memory(self, kind: str) -> torch.Tensor:
        """Return all elements of one kind of state, or ``MASTER``; zeros when first used."""
        if kind not in self._memory:
            self._memory[kind] = self._allocate_state(kind)
        return self._memory[kind]

    def _allocate_state(self, kind: str) -> torch.Tensor:
        if self._make is None or not self.elements:
            return self._allocate(torch.float32)
        self._paged[kind] = self._make(self.elements)
        return self._paged[kind].tensor

    @property
    def paged(self) -> list[PagedMemory]:
        """The state memory that lies in files."""
        return list(self._paged.values())

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of memory that exist."""
        return tuple(self._memory)

    @property
    def storages(self) -> list[int]:
        """The addresses of all state memory."""
        return [storage_key(memory) for memory in self._memory.values()]

    def _allocate(self, dtype: torch.dtype) -> torch.Tensor:
        if self._is_pinned and self.elements:
            return pinned(self.elements, dtype, self.device, self.copying.values())
        with torch.inference_mode(False):  # it is updated later, outside of inference mode
            return torch.zeros(self.elements, dtype=dtype, device="cpu")

    def address(self, kind: str, place: ParamSlot) -> int:
        """Return the address of a parameter's state; 0 where it has no elements."""
        return host_address(self.memory(kind)) + 4 * place.start if place.size else 0

    def flat(self, kind: str, place: ParamSlot) -> torch.Tensor:
        """Return the elements of one parameter in the flat buffer."""
        return self.memory(kind)[place.start : place.start + place.size]

    def state(self, kind: str, place: ParamSlot) -> torch.Tensor:
        """Return the same elements, shaped as the parameter, and as a DTensor where that is one."""
        memory = self.memory(kind)
        local = torch.as_strided(memory, place.shape, place.stride, place.start)
        parameter = place.parameter
        made = _placed(local, parameter) if isinstance(parameter, DTensor) else local
        place.views[kind], place.addresses[kind] = made, memory_key(local)
        return made

    def cut(self, longest: int) -> list[Subgroup]:
        """Return the subgroups of so many elements."""
        sizes = [place.size for place in self.places]
        return [Subgroup(self, each) for each in cut(sizes, longest)]


def _placed(local: torch.Tensor, like: DTensor) -> torch.Tensor:
    # from_local would move it to the device of the mesh; FSDP's own offload builds it in this way,
    # too.
    there: Any = like._spec
    meta = there.tensor_meta._replace(dtype=local.dtype)
    make: Any = DTensor
    made: torch.Tensor = make(local, replace(there, tensor_meta=meta), requires_grad=False)
    return made


@dataclass(slots=True, eq=False)
class ParamBatch:
    """Parts of parameters that are updated in one call on the CPU.

    ``runs``: their ranges in the flat buffer; parts without padding between them are joined.
    """

    spans: tuple[ElementSpan, ...]
    runs: tuple[tuple[int, int], ...]
    views: dict[tuple[str, bool], list[torch.Tensor]] = field(default_factory=dict)


class Subgroup:
    """A range of a flat buffer: the unit that is updated in one place, on the host or on the
    device.
    """

    def __init__(self, buffer: FlatBufferRow, cut: SubgroupCut) -> None:
        self.buffer, self.cut = buffer, cut
        self.spans = cut.spans

    @cached_property
    def places(self) -> tuple[ParamSlot, ...]:
        """The parameters that have elements in it, each once."""
        return tuple(self.buffer.places[span.parameter] for span in self.spans)

    @cached_property
    def batches(self) -> list[ParamBatch]:
        """Its elements in batches for the CPU."""
        return [
            ParamBatch(tuple(batch), tuple(merged(map(self.where, batch))))
            for batch in batches(self.spans, BATCH_ELEMENTS)
        ]

    def where(self, span: ElementSpan) -> tuple[int, int]:
        """Return the range of a span in the flat buffer."""
        start = self.buffer.places[span.parameter].start
        return start + span.start, start + span.stop

    def of_batch(self, kind: str, batch: ParamBatch, *, joined: bool) -> list[torch.Tensor]:
        """Return the memory of one kind (or "transfer") of each span of a batch, or of each of
        its runs.
        """
        if (kind, joined) not in batch.views:  # cached: a model has tens of thousands
            whole = self.buffer.transfer if kind == "transfer" else self.buffer.memory(kind)
            where = batch.runs if joined else map(self.where, batch.spans)
            batch.views[kind, joined] = [whole[start:stop] for start, stop in where]
        return batch.views[kind, joined]

    def part(self, whole: torch.Tensor, span: ElementSpan) -> torch.Tensor:
        """Return the elements of a span in memory of the whole buffer."""
        start, stop = self.where(span)
        return whole[start:stop]

    def stretch(self, whole: torch.Tensor) -> torch.Tensor:
        """Return all of the subgroup in memory of the whole buffer."""
        return whole[self.cut.start : self.cut.stop]

    def inside(self, stretch: torch.Tensor, span: ElementSpan) -> torch.Tensor:
        """Return the elements of a span in memory of the subgroup alone."""
        start = self.buffer.places[span.parameter].start - self.cut.start
        return stretch[start + span.start : start + span.stop]


def _strides(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    return [step for size, step in zip(shape, stride, strict=True) if size > 1]


# Handles the small parameters of a flat buffer together, because each alone has too much overhead.
#
# They lie last in their buffer, so that one copy takes the gradients of all to the host and one
# brings the new parameters back, to memory beside the parameters that records the written values.
# So writes by others are detected bit by bit. Their gradients are sent at the step, in little time.


#: A parameter is small with fewer elements than these, if that is a small part of a subgroup.
SMALL_ELEMENTS = 1 << 13
#: The largest part of a subgroup that a small parameter may be.
PART_OF_SUBGROUP = 16


def limit(subgroup_elements: int) -> int:
    """Return the number of elements below which a parameter is small."""
    return min(SMALL_ELEMENTS, subgroup_elements // PART_OF_SUBGROUP)


@dataclass(eq=False)
class SmallParams:
    """Small parameters that lie one behind the other, from ``start`` to ``stop`` of a flat
    buffer.
    """

    places: Sequence[ParamSlot]
    start: int
    stop: int
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def noted(self) -> torch.Tensor:
        """The values written to the parameters at the last update, on their device."""
        with torch.inference_mode(False):
            return torch.zeros(self.stop - self.start, dtype=self.dtype, device=self.device)

    def make(self) -> None:
        """Allocate that memory before an update begins: during the update a failure would be
        too late.
        """
        _ = self.noted

    @cached_property
    def _pieces(self) -> list[torch.Tensor]:
        """Views of it: of each parameter, and of its padding."""
        sizes = []
        for place in self.places:
            padding = aligned(place.size) - place.size
            sizes += [place.size, padding] if padding else [place.size]
        return list(self.noted.split(sizes))

    @cached_property
    def _numbers(self) -> dict[ParamSlot, int]:
        """The index of each parameter's view."""
        indexes: dict[ParamSlot, int] = {}
        at = 0
        for place in self.places:
            indexes[place] = at
            at += 1 + (aligned(place.size) != place.size)
        return indexes

    def all_between(self, start: int, stop: int) -> torch.Tensor:
        """Return the recorded elements of a range of the flat buffer."""
        return self.noted[start - self.start : stop - self.start]

    def part(self, place: ParamSlot, start: int, stop: int) -> torch.Tensor:
        """Return the recorded elements of a part of a parameter; mostly of all of it."""
        piece = self._pieces[self._numbers[place]]
        return piece if stop - start == place.size else piece[start:stop]

    def gathered(self, flats: Mapping[ParamSlot, torch.Tensor]) -> torch.Tensor:
        """Join the given tensors in buffer order into one; parameters without one get arbitrary
        values.
        """
        parts, numbers = list(self._pieces), self._numbers
        for place, flat in flats.items():
            parts[numbers[place]] = flat
        return torch.cat(parts)

    def changed(self, doubtful: Iterable[ParamSlot]) -> set[ParamSlot]:
        """Return the places whose parameter differs from the recorded values."""
        flats = {place: place.own for place in doubtful}
        as_integers = torch.int32 if self.dtype.itemsize == 4 else torch.int16
        differs = self.gathered(flats).view(as_integers) != self.noted.view(as_integers)
        if not bool(differs.any()):
            return set()
        here = differs.cpu()
        return {
            place for place in flats if bool(here[place.start - self.start :][: place.size].any())
        }
