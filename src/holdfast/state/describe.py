"""What the state is right now: each leaf bound to its memory, and the values as bytes.

Volatile leaves, and every value, are copied before ``save`` returns; lazy ones behind the next
forward and backward.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.errors import UnsupportedState, UsageError
from holdfast.geometry.layout import table_hash, table_to_json
from holdfast.rules import Rules
from holdfast.state import optimizers
from holdfast.state.again import Again, again_after
from holdfast.state.binding import Binding, Bindings, is_bound, is_like, is_same, signature
from holdfast.state.declared import declarations, declared
from holdfast.state.entries import declare_all
from holdfast.state.frozen import Frozen
from holdfast.state.modules import check_storable
from holdfast.state.objects import Objects, State, sort_objects
from holdfast.state.sight import Sight
from holdfast.state.subclasses import check_in_place
from holdfast.state.tensors import leaf_entry, local_of
from holdfast.state.through import Through, shard_sight
from holdfast.state.usage import say_usage
from holdfast.state.walk import Walk

_LIKE_A_PIECE = re.compile(r"@\d+:\d+(,\d+:\d+)*$")


@dataclass(slots=True)
class Description:
    """What the state is right now. ``table`` is this rank's leaves, as told to the coordinator."""

    bindings: Bindings
    table: bytes
    table_hash: str
    values: bytes


class Describer:
    """Describes one state again and again, reusing what did not change.

    A leaf is unchanged when it is the same tensor object with the same memory; both are
    looked at on every call, for ``load_state_dict`` and ``module.double()`` replace them.

    ``tells_frozen``: leaves that nothing changes are called so, to be stored apart from the others.
    ``rules``: what the leaves of the training are in the checkpoint, where they are not the same.
    """

    def __init__(
        self,
        state: State,
        rank: int,
        world: int = 1,
        *,
        tells_frozen: bool = False,
        rules: Rules | None = None,
    ) -> None:
        self.state = state
        self.rank = rank
        self.world = world
        self.through = Through(rules, rank, world)
        self._frozen = Frozen() if tells_frozen else None
        self._last: Description | None = None
        self._again: Again | None = None
        self._staged: dict[str, torch.Tensor] = {}
        self._checked: list[int] = []
        self._declarations = 0
        self._parts: dict[str, torch.Size] = {}
        """Of what was declared a part of a leaf, the shape of the part."""

    def usage(self) -> bytes:
        """Which rules are for a leaf of this rank (``holdfast.state.usage``)."""
        return say_usage(self.through, sort_objects(self.state))

    def optimizers(self) -> Iterator[Optimizer]:
        """Those in the state; looked for when they are asked for."""
        yield from sort_objects(self.state).optimizers.values()

    def describe(self) -> Description:
        """The state as it is now. UnsupportedState names what cannot be stored."""
        objects = sort_objects(self.state)
        for key, optimizer in objects.optimizers.items():
            optimizers.check_whole(key, optimizer)
        return self._describe_again(objects) or self._describe_anew(objects)

    def _describe_again(self, objects: Objects) -> Description | None:
        """Only values read anew, and the tensors met in them; None when anything else changed."""
        again, last = self._again, self._last
        if again is None or last is None or not again.watch.is_unchanged(objects):
            return None
        if self._frozen is not None and not self._frozen.is_settled():
            return None
        found = again.take_values(objects)
        if found is None or not all(map(self._rebind, again.value_leaves, found.tensors)):
            return None
        values = found.values.to_bytes(again.aliases)
        return Description(last.bindings, last.table, last.table_hash, values)

    def _rebind(self, binding: Binding, tensor: torch.Tensor) -> bool:
        """Have the leaf be another tensor in a value's place; False when it is not one like it."""
        if binding.tensor is tensor and signature(tensor) == binding.signature:
            return True
        if binding.lazy or binding.sight is not None or declared(tensor) is not None:
            return False
        if leaf_entry(binding.name, tensor, self.rank, "lowest") != binding.entry:
            return False
        local = local_of(tensor)
        if not is_like(binding.staged, local):
            return False
        binding.tensor, binding.local, binding.signature = tensor, local, signature(tensor)
        return True

    def _describe_anew(self, objects: Objects) -> Description:
        walk = Walk(self.through, keeps_small=self.world > 1, tells_frozen=self._frozen is not None)
        self._again = None
        walk.take(objects)
        if self._frozen is not None:
            self._frozen.settle(walk.leaves)
        values = walk.to_bytes()
        if self._declarations != declarations():
            self._last = None
        last = self._last
        if last is None or not is_same(last.bindings, walk.leaves):
            last = self._last = self._bind_all(objects, walk)
        self._again = again_after(walk, objects, last.bindings)
        return Description(last.bindings, last.table, last.table_hash, values)

    def _bind_all(self, objects: Objects, walk: Walk) -> Description:
        last = self._last
        self._check_once(objects, len(walk.leaves))
        known = {} if last is None else {binding.name: binding for binding in last.bindings}
        bindings = Bindings(self._bind(walk, *leaf, known.get(leaf[0])) for leaf in walk.leaves)
        self._require_declared_copies(bindings)
        self._declarations = declarations()
        self._staged = {b.name: b.staged for b in bindings if b.staged is not None}
        entries = declare_all(bindings)
        for entry in entries:
            if _LIKE_A_PIECE.search(entry.name):
                raise UsageError(f"{entry.name!r} ends like the name of a part: rename it")
        twice = sorted(walk.stored_aliases().keys() & {entry.name for entry in entries})
        if twice:
            raise UsageError(f"two tensors of the state are both called {twice[0]!r}")
        table = table_to_json(entries)
        return Description(bindings, table, table_hash(table), b"")

    def _check_once(self, objects: Objects, leaves: int) -> None:
        """Look closely at modules and optimizers, but not again for a value's tensor made anew."""
        held = (each.tensor for tensors in objects.tensors.values() for each in tensors)
        found = [leaves, *map(id, objects.optimizers.values()), *map(id, held)]
        if found != self._checked:
            _check_objects(objects)
            self._checked = found

    def _bind(
        self, walk: Walk, name: str, tensor: torch.Tensor, hooked: bool, spread: str, frozen: bool,
        before: Binding | None,
    ) -> Binding:  # fmt: skip
        if before is not None and is_bound(before, (name, tensor, hooked, spread, frozen)):
            return before
        entry = leaf_entry(name, tensor, self.rank, spread, is_frozen=frozen)
        self._require_declared(name, tensor)
        local = local_of(tensor)
        # A conjugate or negative view is one by a flag: only a copy has what it says.
        lazy = hooked and not (local.is_conj() or local.is_neg())
        sight = self._sight(walk, name, tensor)
        is_stored = sight is None or not sight.is_copy
        staged = self._staging(name, local) if is_stored and not lazy else None
        return Binding(
            name, tensor, local, signature(tensor), spread, hooked, lazy, entry, staged, sight
        )

    def _require_declared(self, name: str, tensor: torch.Tensor) -> None:
        """UnsupportedState for what looks as the part of a leaf that was there, and says nothing.

        Stored as a whole it would be made of all ranks' parts.
        """
        what = declared(tensor)
        if what is not None:
            is_whole = getattr(what, "global_shape", None) == tuple(tensor.shape)
            self._parts[name] = torch.Size((-1,)) if is_whole else tensor.shape
        elif self._parts.get(name) == tensor.shape and not isinstance(tensor, DTensor):
            raise UnsupportedState(
                f"{name} was declared a part of a leaf, and another tensor of the same shape has "
                f"taken its place, {list(tensor.shape)}, of which nothing was declared: call "
                "holdfast.declare for the new tensor as well",
                leaf=name,
            )

    def _require_declared_copies(self, bindings: Bindings) -> None:
        """The same for what looks as a part that stands under another key: an EMA of a module."""
        parts: dict[tuple[str, torch.Size], str] = {}
        for name, shape in self._parts.items():
            parts.setdefault((name.partition(".")[2], shape), name)
        for binding in bindings if parts else ():
            tensor, rest = binding.tensor, binding.name.partition(".")[2]
            if not rest or binding.sight is not None or isinstance(tensor, DTensor):
                continue
            like = parts.get((rest, tensor.shape))
            if like is not None and declared(tensor) is None:
                raise UnsupportedState(
                    f"{binding.name} is called and shaped like {like}, which was declared a part "
                    "of a leaf, and nothing was declared of it: a copy of a tensor is declared "
                    "anew. Call holdfast.declare for it as well, or call it otherwise",
                    leaf=binding.name,
                )

    def _sight(self, walk: Walk, name: str, tensor: torch.Tensor) -> Sight | None:
        if name in walk.origins:
            sight = self.through.sight(*walk.origins[name])
            return sight if sight is None or not sight.is_copy else self._stored(walk, name, sight)
        # Rules are for what modules and optimizers hold: what is in a value says itself what it is.
        return shard_sight(name, tensor, self.rank)

    def _stored(self, walk: Walk, name: str, copy: Sight) -> Sight:
        """What is stored of a tensor that a rule calls a copy: nothing, if it is one.

        It may be the very tensor that is stored, met under the copy's name before its own.
        """
        for found in walk.other_names(name):
            sight = self.through.sight(*found)
            if sight is None or not sight.is_copy:
                return sight or replace(copy, is_copy=False)
        return copy

    def _staging(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Where a volatile leaf is copied: as before, if it fits, for touched pages are fast."""
        there = self._staged.get(name)
        if there is None or not is_like(there, local):
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
