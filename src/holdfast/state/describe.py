"""What the state is right now: each leaf bound to its memory, and the values as bytes.

Volatile leaves, and every value, are copied before ``save`` returns; lazy ones behind the next
forward and backward.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

import torch

from holdfast.errors import UsageError
from holdfast.format import values as codec
from holdfast.geometry.layout import LeafEntry, table_hash, table_to_json
from holdfast.state import optimizers
from holdfast.state.frozen import Frozen
from holdfast.state.modules import check_storable
from holdfast.state.objects import Objects, State, sort_objects
from holdfast.state.subclasses import check_in_place
from holdfast.state.tensors import leaf_entry, local_of
from holdfast.state.walk import Found, Walk

_LIKE_A_PIECE = re.compile(r"@\d+:\d+(,\d+:\d+)*$")


@dataclass(slots=True)
class Binding:
    """A leaf's name, the tensor it is, and this rank's part of it."""

    name: str
    tensor: torch.Tensor
    local: torch.Tensor
    signature: tuple[object, ...]
    is_hooked: bool
    """Whether it changes at a hooked optimizer step only."""
    lazy: bool
    """Whether it is captured in place: hooked, and its memory is what it says."""
    entry: LeafEntry
    staged: torch.Tensor | None = None
    """Where a volatile leaf is copied before ``save`` returns."""

    @property
    def source(self) -> torch.Tensor:
        """What the capture copies from."""
        return self.local if self.staged is None else self.staged


@dataclass(slots=True)
class Description:
    """What the state is right now. ``table`` is this rank's leaves, as told to the coordinator."""

    bindings: list[Binding]
    table: bytes
    table_hash: str
    values: bytes


class Describer:
    """Describes one state again and again, reusing what did not change.

    A leaf is unchanged when it is the same tensor object with the same memory; both are
    looked at on every call, for ``load_state_dict`` and ``module.double()`` replace them.

    ``tells_frozen``: leaves that nothing changes are called so, to be stored apart from the others.
    """

    def __init__(
        self, state: State, rank: int, world: int = 1, *, tells_frozen: bool = False
    ) -> None:
        self.state = state
        self.rank = rank
        self.world = world
        self._frozen = Frozen() if tells_frozen else None
        self._last: Description | None = None
        self._staged: dict[str, torch.Tensor] = {}
        self._checked: list[int] = []

    def describe(self) -> Description:
        """The state as it is now. UnsupportedState names what cannot be stored."""
        objects = sort_objects(self.state)
        walk = Walk(keeps_small=self.world > 1, tells_frozen=self._frozen is not None)
        walk.take(objects)
        if self._frozen is not None and walk.has_frozen:
            self._frozen.settle(walk.leaves)
        values = codec.to_bytes(walk.documents)
        last = self._last
        if last is not None and _is_same(last.bindings, walk.leaves):
            return Description(last.bindings, last.table, last.table_hash, values)
        self._check_once(objects, len(walk.leaves))
        known = {} if last is None else {binding.name: binding for binding in last.bindings}
        bindings = [self._bind(*leaf, known.get(leaf[0])) for leaf in walk.leaves]
        self._staged = {b.name: b.staged for b in bindings if b.staged is not None}
        entries = sorted((b.entry for b in bindings), key=lambda e: e.name)
        for entry in entries:
            if _LIKE_A_PIECE.search(entry.name):
                raise UsageError(f"{entry.name!r} ends like the name of a part: rename it")
        for one, other in pairwise(entries):
            if one.name == other.name:
                raise UsageError(f"two tensors of the state are both called {one.name!r}")
        twice = sorted(walk.aliases.keys() & {entry.name for entry in entries})
        if twice:
            raise UsageError(f"two tensors of the state are both called {twice[0]!r}")
        table = table_to_json(entries)
        self._last = Description(bindings, table, table_hash(table), values)
        return self._last

    def _check_once(self, objects: Objects, leaves: int) -> None:
        """Look closely at modules and optimizers, but not again for a value's tensor made anew."""
        held = (each.tensor for tensors in objects.tensors.values() for each in tensors)
        found = [leaves, *map(id, objects.optimizers.values()), *map(id, held)]
        if found != self._checked:
            _check_objects(objects)
            self._checked = found

    def _bind(
        self, name: str, tensor: torch.Tensor, hooked: bool, spread: str, frozen: bool,
        before: Binding | None,
    ) -> Binding:  # fmt: skip
        if before is not None and _is_bound(before, (name, tensor, hooked, spread, frozen)):
            return before
        entry = leaf_entry(name, tensor, self.rank, spread, is_frozen=frozen)
        local = local_of(tensor)
        # A conjugate or negative view is one by a flag: only a copy has what it says.
        lazy = hooked and not (local.is_conj() or local.is_neg())
        staged = None if lazy else self._staging(name, local)
        return Binding(name, tensor, local, _signature(tensor), hooked, lazy, entry, staged)

    def _staging(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Where a volatile leaf is copied: as before, if it fits, for touched pages are fast."""
        there = self._staged.get(name)
        alike = there is not None and (
            (there.shape, there.dtype, there.device) == (local.shape, local.dtype, local.device)
        )
        if there is None or not alike:
            with torch.inference_mode(False):  # it is written to later, outside of any
                there = torch.empty_like(local, memory_format=torch.contiguous_format)
            self._staged[name] = there
        return there


def _check_objects(objects: Objects) -> None:
    """What need not be looked at again as long as the same tensors are found."""
    for key, optimizer in objects.optimizers.items():
        optimizers.check_storable(key, optimizer)
    for key, tensors in objects.tensors.items():
        for held in tensors:
            check_in_place(f"{key}.{held.name}", held.tensor)
    for key, module in objects.modules.items():
        check_storable(key, module)


def _is_same(bindings: list[Binding], found: list[Found]) -> bool:
    return len(bindings) == len(found) and all(map(_is_bound, bindings, found))


def _is_bound(binding: Binding, found: Found) -> bool:
    name, tensor, hooked, spread, frozen = found
    return (
        binding.tensor is tensor
        and binding.is_hooked == hooked
        and binding.name == name
        and binding.entry.spread == spread
        and binding.entry.is_frozen == frozen
        and _signature(tensor) == binding.signature
    )


def _signature(tensor: torch.Tensor) -> tuple[object, ...]:
    """What must be as it was for a binding to be used again: memory, shape, strides, dtype."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    dtype = local.dtype
    conjugate = dtype.is_complex and local.is_conj()
    return local.data_ptr(), local.shape, local.stride(), dtype, conjugate
