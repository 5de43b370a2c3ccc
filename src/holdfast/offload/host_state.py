"""Host memory of an optimizer: parameters in a row, FP32 masters and moments for each element.

A row holds parameters of one group and one dtype. Each kind of memory is one tensor, of which a
parameter's state is a view and a subgroup a stretch; so state goes by parameter and copies do not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.events import Warned, emit
from holdfast.offload.checksums import Bits
from holdfast.offload.cutting import ALIGNED, Cut, Span, batches, cut, merged, starts
from holdfast.offload.paging import Paged
from holdfast.offload.small import Small
from holdfast.snapshot.pinning import register
from holdfast.state.tensors import local_of

#: What is called so in an optimizer's state.
MASTER = "master"
#: Elements that are updated at once on the CPU: gradient, master and moments of so many are in
#: its cache between the cast, the update and the cast back (twice as fast as without).
BATCH_ELEMENTS = 1 << 18


@dataclass(slots=True, eq=False)
class Place:
    """A parameter, and where its elements lie in a row: in the order of its own memory."""

    parameter: torch.Tensor
    name: str
    start: int = 0
    shape: tuple[int, ...] = field(init=False)
    stride: tuple[int, ...] = field(init=False)
    size: int = field(init=False)
    seen: tuple[int, ...] = ()
    """Address and versions of the parameter when its master was last known to be its own."""
    bits: Bits | None = None
    """The checksum of its elements then."""
    small: Small | None = None
    """The small ones it is one of."""
    backwards: int = 0
    """How many backwards made its gradient ready since the last step."""
    expected: int = 1
    """How many there were before that."""
    views: dict[str, torch.Tensor] = field(default_factory=dict)
    """The state tensors it was given, views of its row."""
    addresses: dict[str, int] = field(default_factory=dict)
    """Where those lay then."""
    _own: torch.Tensor | None = None
    is_placed: bool = field(init=False)
    """Whether it is a DTensor."""

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
        """The same, its address and version: not to be computed with."""
        return self.local if self.is_placed else self.parameter

    @property
    def gradient(self) -> torch.Tensor | None:
        """The gradient's elements of this rank."""
        found = self.parameter.grad
        return None if found is None else local_of(found)

    @property
    def is_reduced(self) -> bool:
        """Whether the gradient is laid out over the ranks as the parameter is."""
        parameter, gradient = self.parameter, self.parameter.grad
        if not (isinstance(parameter, DTensor) and isinstance(gradient, DTensor)):
            return True
        return gradient.placements == parameter.placements

    def reduced(self) -> torch.Tensor:
        """This rank's elements of the gradient, laid out so: all ranks have to ask for it."""
        parameter, gradient = self.parameter, self.parameter.grad
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor) and not self.is_reduced:
            found: torch.Tensor = gradient.redistribute(placements=parameter.placements).to_local()
            return found
        assert gradient is not None
        return local_of(gradient)

    def lies_so(self, tensor: torch.Tensor) -> bool:
        """Whether its elements are in memory in the order they have in the row."""
        if tensor.stride() == self.stride and tensor.shape == self.shape:
            return True
        return not self.size or (
            _strides(tensor.shape, tensor.stride()) == _strides(self.shape, self.stride)
        )

    @property
    def own(self) -> torch.Tensor:
        """The parameter's memory itself, to be written to, in the order of the row."""
        if self._own is not None and self._own.data_ptr() == self.raw.data_ptr():
            return self._own
        local = self.local
        assert self.lies_so(local), "what is written to a copy is lost"
        own = self.flat(local)
        if self.small is not None:  # thousands of them; of a large one it could hold old memory
            self._own = own
        return own

    def line(self, gradient: torch.Tensor) -> torch.Tensor:
        """``flat`` of a gradient; itself where it lies so already, as most small ones do."""
        if self.stride == (1,) == gradient.stride() and gradient.shape == self.shape:
            return gradient
        return self.flat(gradient)

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """All elements of what is shaped as the parameter in the order of the row; maybe a copy."""
        if not self.size:
            return tensor.reshape(-1)
        if not self.lies_so(tensor):
            there = torch.empty_strided(
                self.shape, self.stride, dtype=tensor.dtype, device=tensor.device
            )
            tensor = there.copy_(tensor)
        return torch.as_strided(tensor, (self.size,), (1,), tensor.storage_offset())


class Row:
    """Parameters of one group, of one dtype, and the memory for their state.

    ``group`` is its number, as it was when last looked for. Those of fewer elements than ``small``
    lie last, and of them those that end on a whole vector first: the others have padding.
    ``make``: makes memory that lies in a file.
    """

    def __init__(
        self, places: Sequence[Place], group: int, *, is_pinned: bool, small: int = 0,
        make: Callable[[int], Paged] | None = None,
    ) -> None:  # fmt: skip
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
        """Whether the parameters themselves have all digits of their masters."""
        self._is_pinned = is_pinned
        self._make, self._paged = make, dict[str, Paged]()
        self._memory: dict[str, torch.Tensor] = {}
        self.transfer = self._allocate(self.dtype)
        """Gradients that came from the device; then, where narrow, parameters that go there."""

    def _small(self, limit: int) -> Small | None:
        found = [place for place in self.places if place.size < limit]
        if not found:
            return None
        made = Small(found, found[0].start, self.elements, self.dtype, self.device)
        for place in found:
            place.small = made
        return made

    def memory(self, kind: str) -> torch.Tensor:
        """All elements of one kind of state, or ``MASTER``; zeros when first asked for."""
        if kind not in self._memory:
            self._memory[kind] = self._allocate_state(kind)
        return self._memory[kind]

    def _allocate_state(self, kind: str) -> torch.Tensor:
        if self._make is None or not self.elements:
            return self._allocate(torch.float32)
        self._paged[kind] = self._make(self.elements)
        return self._paged[kind].tensor

    @property
    def paged(self) -> list[Paged]:
        """Of its memory for state what lies in files."""
        return list(self._paged.values())

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of memory there are."""
        return tuple(self._memory)

    @property
    def storages(self) -> list[int]:
        """Addresses of all memory for state."""
        return [memory.untyped_storage().data_ptr() for memory in self._memory.values()]

    def _allocate(self, dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False):  # it is updated later, outside of any
            made = torch.zeros(self.elements, dtype=dtype, device="cpu")
        if self._is_pinned and self.elements:
            _pin(self, made)
        return made

    def address(self, kind: str, place: Place) -> int:
        """Where the state of a parameter begins in memory; 0 where it has no elements."""
        return self.memory(kind).data_ptr() + 4 * place.start if place.size else 0

    def flat(self, kind: str, place: Place) -> torch.Tensor:
        """The elements of one parameter in their row."""
        return self.memory(kind)[place.start : place.start + place.size]

    def state(self, kind: str, place: Place) -> torch.Tensor:
        """The same, shaped as the parameter, and a DTensor where that is one."""
        memory = self.memory(kind)
        local = torch.as_strided(memory, place.shape, place.stride, place.start)
        parameter = place.parameter
        made = _placed(local, parameter) if isinstance(parameter, DTensor) else local
        place.views[kind], place.addresses[kind] = made, local.data_ptr()
        return made

    def cut(self, longest: int) -> list[Subgroup]:
        """The subgroups of so many elements."""
        sizes = [place.size for place in self.places]
        return [Subgroup(self, each) for each in cut(sizes, longest)]


def _placed(local: torch.Tensor, like: DTensor) -> torch.Tensor:
    # from_local would move it to the device of the mesh; FSDP's own offload makes it so, too.
    there: Any = like._spec
    meta = there.tensor_meta._replace(dtype=local.dtype)
    make: Any = DTensor
    made: torch.Tensor = make(local, replace(there, tensor_meta=meta), requires_grad=False)
    return made


@dataclass(slots=True, eq=False)
class Batch:
    """Parts of parameters that are updated in one call on the CPU.

    ``runs``: where they lie in the row, those that have no padding between them as one.
    """

    spans: tuple[Span, ...]
    runs: tuple[tuple[int, int], ...]
    views: dict[tuple[str, bool], list[torch.Tensor]] = field(default_factory=dict)


class Subgroup:
    """A stretch of a row: what is updated in one place at a time, on the host or on the device."""

    def __init__(self, row: Row, cut: Cut) -> None:
        self.row, self.cut = row, cut
        self.spans = cut.spans

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """The parameters that have elements in it, each once."""
        return tuple(self.row.places[span.parameter] for span in self.spans)

    @cached_property
    def batches(self) -> list[Batch]:
        """Its elements in portions for the CPU."""
        return [
            Batch(tuple(found), tuple(merged(map(self.where, found))))
            for found in batches(self.spans, BATCH_ELEMENTS)
        ]

    def where(self, span: Span) -> tuple[int, int]:
        """From where to where a span lies in the row."""
        start = self.row.places[span.parameter].start
        return start + span.start, start + span.stop

    def of_batch(self, kind: str, batch: Batch, *, joined: bool) -> list[torch.Tensor]:
        """The memory of one kind (or "transfer") of each span of a batch, or each of its runs."""
        if (kind, joined) not in batch.views:  # made once: a model has tens of thousands
            whole = self.row.transfer if kind == "transfer" else self.row.memory(kind)
            where = batch.runs if joined else map(self.where, batch.spans)
            batch.views[kind, joined] = [whole[start:stop] for start, stop in where]
        return batch.views[kind, joined]

    def part(self, whole: torch.Tensor, span: Span) -> torch.Tensor:
        """The elements of a span in memory of all the row."""
        start, stop = self.where(span)
        return whole[start:stop]

    def stretch(self, whole: torch.Tensor) -> torch.Tensor:
        """All of the subgroup in memory of all the row."""
        return whole[self.cut.start : self.cut.stop]

    def inside(self, stretch: torch.Tensor, span: Span) -> torch.Tensor:
        """The elements of a span in memory of the subgroup alone."""
        start = self.row.places[span.parameter].start - self.cut.start
        return stretch[start + span.start : start + span.stop]


def _strides(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    return [step for size, step in zip(shape, stride, strict=True) if size > 1]


def _pin(row: Row, memory: torch.Tensor) -> None:
    # By the driver itself: torch's own pinned memory comes in powers of two.
    cudart: Any = torch.cuda.cudart()
    address = memory.data_ptr()
    status = register(address, memory.nbytes)
    if status:
        emit(Warned(
            message=f"{memory.nbytes >> 20} MiB of an optimizer's state could not be pinned (CUDA "
            f"error {status}): its copies to and from the GPU will be slow. Raise the memlock "
            "limit, or give it fewer parameters per process."
        ))  # fmt: skip
        return
    unregister: Callable[[int], Any] = cudart.cudaHostUnregister
    weakref.finalize(row, unregister, address).atexit = False
