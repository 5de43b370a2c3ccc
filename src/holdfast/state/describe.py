"""Describes the state of this moment: binds each leaf to its memory, and encodes the values as
bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.accelerator.devices import is_on_device, is_streamed
from holdfast.accelerator.pinnable_pages import allocate
from holdfast.errors import UnsupportedState, UsageError
from holdfast.geometry.layout import LeafEntry, table_hash, table_to_json
from holdfast.rules import Rules
from holdfast.state import optimizers
from holdfast.state.bindings import (
    Binding,
    Bindings,
    declare_all,
    is_bound,
    is_plain,
    same_bindings,
    same_storage_form,
    signature,
)
from holdfast.state.frozen_leaves import FrozenLeaves
from holdfast.state.gradient_hooks import warn_of_hooks
from holdfast.state.hidden_state import refuse_unstored
from holdfast.state.identity import storages
from holdfast.state.mapped.mapper import RuleMapper, report_usage, shard_sight
from holdfast.state.mapped.shards import declarations, declared
from holdfast.state.mapped.tensor_parts import TensorMapping
from holdfast.state.modules import check_storable
from holdfast.state.objects import Objects, State, sort_objects
from holdfast.state.step_calls import find_break
from holdfast.state.subclasses import check_in_place
from holdfast.state.tensors import leaf_entry, local_of
from holdfast.state.unchanged import CachedWalk, again_after
from holdfast.state.walk import Walk

#: Volatile leaves of a device up to this size are copied there, as long as the copies are few.
_CLONED_BYTES, _CLONES_BYTES = 1 << 20, 16 << 20
_LIKE_A_PIECE = re.compile(r"@\d+:\d+(,\d+:\d+)*$")


class Description(Struct):
    """The state of one moment. ``table`` is this rank's leaves, as sent to the coordinator."""

    bindings: Bindings
    table: bytes
    table_hash: str
    values: bytes
    frozen: FrozenLeaves | None = None
    """What is known of the frozen leaves, which the checksums of each image confirm or refute."""


class Describer:
    """Describes one state again and again, reusing what did not change.

    A leaf is unchanged when it is the same tensor object with the same memory. Both are compared on
    every call, because ``load_state_dict`` and ``module.double()`` replace them.

    ``mark_frozen``: marks leaves that nothing changes as frozen, so that they are stored apart
    from the others. ``rules``: map the leaves of the training to those of the checkpoint, where
    they differ.
    """

    def __init__(
        self,
        state: State,
        rank: int,
        world: int = 1,
        *,
        mark_frozen: bool = False,
        rules: Rules | None = None,
    ) -> None:
        self.state = state
        self.rank = rank
        self.world = world
        self.through = RuleMapper(rules, rank, world)
        self._frozen = FrozenLeaves() if mark_frozen else None
        self._in_place: tuple[Bindings, frozenset[str], Bindings] | None = None
        self._last: Description | None = None
        self._again: CachedWalk | None = None
        self._staged: dict[str, torch.Tensor] = {}
        self._clones_bytes = 0
        self._checked: list[int] = []
        self._storages: tuple[Description, set[int]] | None = None
        self._declarations = 0
        self._parts: dict[str, torch.Size] = {}
        """The shape of each tensor that was declared to be a part of a leaf, by name."""

    def usage(self) -> bytes:
        """Encodes which rules apply to a leaf of this rank
        (``holdfast.state.mapped.mapper``).
        """
        return report_usage(self.through, sort_objects(self.state))

    def optimizers(self) -> Mapping[str, Optimizer]:
        """The optimizers in the state by their keys; searched for at each call."""
        return sort_objects(self.state).optimizers

    def parameters(self) -> Iterator[torch.Tensor]:
        """The parameters of the modules in the state as it is now."""
        for module in sort_objects(self.state).modules.values():
            yield from module.parameters()

    def describe(self, *, is_checked: bool = False) -> Description:
        """Describes the state as it is now. UnsupportedState names what cannot be stored.

        ``is_checked``: an image that holds other bytes of a frozen leaf than images before is
        discarded. Then leaves that were the same in these are captured in place.
        """
        objects = sort_objects(self.state)
        for key, optimizer in objects.optimizers.items():
            optimizers.check_whole(key, optimizer)
        _check_unbroken(objects)
        found = self._describe_again(objects) or self._describe_anew(objects)
        constant = self._frozen.constant if is_checked and self._frozen is not None else None
        return replace(found, bindings=self._bind_in_place(found, constant)) if constant else found

    def _bind_in_place(self, found: Description, constant: frozenset[str]) -> Bindings:
        """Returns the bindings with the ``constant`` leaves captured in place."""
        known = self._in_place
        if known is None or known[0] is not found.bindings or known[1] != constant:
            bindings = Bindings(
                replace(one, lazy=True, staged=None, is_copied_out=False)
                if one.name in constant and is_plain(one.local)
                else one
                for one in found.bindings
            )
            declare_all(bindings)
            bindings.origin = found.bindings
            known = self._in_place = found.bindings, constant, bindings
        return known[2]

    def is_changed_by(self, optimizer: Optimizer) -> bool:
        """True if a step of ``optimizer`` may change the state: in doubt, and before the first
        description. Of an optimizer that is not in the state the parameters count, not what hooks
        or wrappers of it write elsewhere.
        """
        try:
            objects = sort_objects(self.state)
            inner = [each.optimizer for each in objects.inner()]
            own = optimizers.unwrapped(optimizer)[-1]
            if self._last is None or any(
                own is one for one in (*objects.optimizers.values(), *inner)
            ):
                return True
            updated = storages(p for group in optimizer.param_groups for p in group["params"])
            held = self._storages_of(objects, inner, self._last)
            values = storages(one for one in objects.plain.values() if optimizers.is_tensor(one))
            return not updated.isdisjoint(held | values)
        except Exception:  # of whatever kind, as of a state that is changed meanwhile
            return True

    def _storages_of(
        self, objects: Objects, inner: Iterable[Optimizer], last: Description
    ) -> set[int]:
        """Returns the storages of all tensors of the state; computed anew only when it changed."""
        again, known = self._again, self._storages
        is_same = again is not None and again.watch.is_unchanged(objects)
        if again is not None and known is not None and known[0] is last and is_same:
            return known[1] | storages(leaf.tensor for leaf in again.value_leaves)
        found = storages(
            chain(
                *objects.trained().values(),
                *(group["params"] for each in inner for group in each.param_groups),
                (binding.tensor for binding in last.bindings),
            )
        )
        self._storages = (last, found) if is_same else None
        return found

    def _describe_again(self, objects: Objects) -> Description | None:
        """Reads only the values and the tensors in them again; None when anything else changed."""
        again, last = self._again, self._last
        if again is None or last is None or not again.watch.is_unchanged(objects):
            return None
        if self._frozen is not None and not self._frozen.is_settled():
            return None
        found = again.read_values(objects)
        if found is None or not all(map(self._rebind, again.value_leaves, found.tensors)):
            return None
        values = found.values.to_bytes(again.aliases)
        return replace(last, values=values)

    def _rebind(self, binding: Binding, tensor: torch.Tensor) -> bool:
        """Binds the leaf to another tensor in a value's place; False if that tensor has another
        form.
        """
        if binding.tensor is tensor and signature(tensor) == binding.signature:
            return True
        if binding.lazy or binding.sight is not None or declared(tensor) is not None:
            return False
        if leaf_entry(binding.name, tensor, self.rank, "lowest") != binding.entry:
            return False
        local = local_of(tensor)
        if binding.staged is None or local.device != binding.local.device:
            return False
        if not same_storage_form(binding.staged, local, binding.staged.device):
            return False
        binding.tensor, binding.local, binding.signature = tensor, local, signature(tensor)
        return True

    def _describe_anew(self, objects: Objects) -> Description:
        walk = Walk(self.through, keeps_small=self.world > 1, mark_frozen=self._frozen is not None)
        self._again = None
        walk.take(objects)
        if self._frozen is not None:
            self._frozen.settle(walk.leaves)
        values = walk.to_bytes()
        if self._declarations != declarations():
            self._last = None
        last = self._last
        known = Bindings() if last is None else last.bindings
        if last is None or not same_bindings(known, walk.leaves):
            last = self._last = self._bind_all(objects, walk)
            if self._frozen is not None and not _are_frozen_alike(known, last.bindings):
                self._frozen.forget_images()  # these lie elsewhere in the next one
        refuse_unstored(objects.inner(), walk.stored(), partial(_given, walk), self.rank)
        self._again = again_after(walk, objects, last.bindings)
        return replace(last, values=values)

    def _bind_all(self, objects: Objects, walk: Walk) -> Description:
        last, self._in_place = self._last, None
        self._check_once(objects, len(walk.leaves))
        known = {} if last is None else {binding.name: binding for binding in last.bindings}
        self._clones_bytes = 0
        bindings = Bindings(self._bind(walk, *leaf, known.get(leaf[0])) for leaf in walk.leaves)
        self._require_declared_copies(bindings)
        self._declarations = declarations()
        self._staged = {b.name: b.staged for b in bindings if b.staged is not None}
        entries = declare_all(bindings)
        refuse_names_of_pieces(entries)
        twice = sorted(walk.stored_aliases().keys() & {entry.name for entry in entries})
        if twice:
            raise UsageError(f"two tensors of the state are both called {twice[0]!r}")
        table = table_to_json(entries)
        return Description(bindings, table, table_hash(table), b"", self._frozen)

    def _check_once(self, objects: Objects, leaves: int) -> None:
        """Checks modules and optimizers thoroughly, once; a new tensor in a value does not repeat
        the check.
        """
        held = (each.tensor for tensors in objects.tensors.values() for each in tensors)
        found = [leaves, *map(id, objects.optimizers.values()), *map(id, held)]
        if found != self._checked:
            _check_objects(objects)
            self._checked = found

    def _bind(
        self,
        walk: Walk,
        name: str,
        tensor: torch.Tensor,
        hooked: bool,
        spread: str,
        frozen: bool,
        before: Binding | None,
    ) -> Binding:
        if before is not None and is_bound(before, (name, tensor, hooked, spread, frozen)):
            if before.staged is not None and is_on_device(before.staged):
                self._clones_bytes += before.staged.nbytes
            return before
        entry = leaf_entry(name, tensor, self.rank, spread, is_frozen=frozen)
        self._require_declared(name, tensor)
        local = local_of(tensor)
        lazy = hooked and is_plain(local)
        sight = self._sight(walk, name, tensor)
        is_stored = sight is None or not sight.is_copy
        staged = self._staging(name, local) if is_stored and not lazy else None
        is_out = staged is not None and staged.device != local.device
        return Binding(
            name,
            tensor,
            local,
            signature(tensor),
            spread,
            hooked,
            lazy,
            entry,
            staged,
            sight,
            is_out,
        )

    def _require_declared(self, name: str, tensor: torch.Tensor) -> None:
        """Raises UnsupportedState for a tensor without a declaration that has the shape of the part
        declared there before.

        Stored as a whole leaf it would mix the parts of all ranks.
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
        """Makes the same check for tensors with the shape of a declared part under another key, as
        an EMA of a module has.
        """
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

    def _sight(self, walk: Walk, name: str, tensor: torch.Tensor) -> TensorMapping | None:
        if name in walk.origins:
            sight = self.through.sight(*walk.origins[name])
            return sight if sight is None or not sight.is_copy else self._stored(walk, name, sight)
        # Rules apply to modules and optimizers; a tensor in a value carries its own declaration.
        return shard_sight(name, tensor, self.rank)

    def _stored(self, walk: Walk, name: str, copy: TensorMapping) -> TensorMapping:
        """Returns the mapping under which a tensor is stored that a rule calls a copy: nothing, if
        it is a copy.

        It may be the very tensor that is stored, met under the copy's name before its own.
        """
        for found in walk.other_names(name):
            sight = self.through.sight(*found)
            if sight is None or not sight.is_copy:
                return sight or replace(copy, is_copy=False)
        return copy

    def _staging(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Returns the memory a volatile leaf is copied to; memory that was used before is reused if
        it fits, because touched pages are fast.

        Large ones of a device are copied out to the host: the device may have no room for others.
        """
        device = self._staging_device(local)
        there = self._staged.get(name)
        if there is None or not same_storage_form(there, local, device):
            there = _allocate_like(local, device)
            self._staged[name] = there
        return there

    def _staging_device(self, local: torch.Tensor) -> torch.device:
        if not is_streamed(local.device):
            return local.device
        if local.nbytes > _CLONED_BYTES or self._clones_bytes + local.nbytes > _CLONES_BYTES:
            return torch.device("cpu")
        self._clones_bytes += local.nbytes
        return local.device


def _are_frozen_alike(one: Bindings, other: Bindings) -> bool:
    """True if both have the same frozen leaves."""
    before = [binding.entry for binding in one if binding.entry.is_frozen]
    return before == [binding.entry for binding in other if binding.entry.is_frozen]


def refuse_names_of_pieces(entries: Iterable[LeafEntry]) -> None:
    """Raises UsageError for a leaf that is called like a part of another one."""
    for entry in entries:
        if _LIKE_A_PIECE.search(entry.name):
            raise UsageError(f"{entry.name!r} ends like the name of a part: rename it")


def _allocate_like(local: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns memory for a copy of a leaf: on the host where its device has no room for it."""
    if device == local.device:
        try:
            with torch.inference_mode(False):  # it is written to later, outside of any
                return torch.empty_like(local, memory_format=torch.contiguous_format)
        except torch.OutOfMemoryError:
            if not is_streamed(device):
                raise
    return allocate(local.shape, local.dtype)


def _check_unbroken(objects: Objects) -> None:
    """Raises UnsupportedState for tensors that a step that raised may have updated in part."""
    found = find_break(objects.trained)
    if found is not None:
        key, broken = found
        raise UnsupportedState(
            f"a step of {broken.name} raised ({broken.why}): some of what it updates in {key!r} "
            "may have that update and some not, which is the state of no step. Nothing is saved "
            "until its next whole step, or until a checkpoint is restored",
            where=key,
        )


def _check_objects(objects: Objects) -> None:
    """Makes the checks that need no repetition as long as the same tensors are found."""
    for key, optimizer in objects.optimizers.items():
        for each in (*objects.wrappers[key], optimizer):
            optimizers.check_storable(key, each)
    for key, tensors in objects.tensors.items():
        for held in tensors:
            check_in_place(f"{key}.{held.name}", held.tensor)
    for key, module in objects.modules.items():
        check_storable(key, module)
        warn_of_hooks(key, module)


def _given(walk: Walk, path: str) -> int | None:
    """Counts the elements that only the object at the beginning of ``path`` gives."""
    key = next((k for k in walk.values.shared if path.startswith(f"{k}.")), "")
    if _is_hollow(walk.values.shared.get(key)):
        return None
    tensors = (t for where, t in walk.from_values.items() if where.startswith(f"{key}."))
    return sum(tensor.numel() for tensor in tensors) + _raw(walk.values.shared.get(key))


def _is_hollow(encoded: Any) -> bool:
    """True if an encoded value consists of empty containers only."""
    if isinstance(encoded, dict):
        return all(map(_is_hollow, encoded.values()))
    return encoded is None or (isinstance(encoded, list) and all(map(_is_hollow, encoded)))


def _raw(encoded: Any) -> int:
    """Counts how much of an encoded value is bytes and arrays, in characters: at least one per
    element.
    """
    if isinstance(encoded, list):
        return sum(map(_raw, encoded))
    if not isinstance(encoded, dict):
        return 0
    if len(encoded) == 1:
        ((tag, body),) = encoded.items()
        if tag in ("$bytes", "$bytearray"):
            return len(body)
        if tag == "$numpy":
            return math.prod(body["shape"])
    return sum(map(_raw, encoded.values()))
