"""Makes room for the stored state of optimizers, and for the tensors that values refer to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

import torch

from holdfast.accelerator.devices import is_shared_or_pinned
from holdfast.errors import FormatError
from holdfast.format import values as codec
from holdfast.format.native_types import StoredObject, registered_class
from holdfast.state import optimizers
from holdfast.state.identity import ClaimedMemory, made_anew
from holdfast.state.mapped.checkpoint_view import CheckpointView
from holdfast.state.mapped.mapper import Spec
from holdfast.state.modules import extra_state
from holdfast.state.objects import Objects
from holdfast.state.subclasses import plain_parts
from holdfast.state.tensors import TORCH_DTYPES, empty, local_of
from holdfast.state.values import beside, optimizer_values


class OptimizerLeaves:
    """The state of optimizers that the checkpoint ``view`` has.

    ``values``: leaves that are tensors in values and so no state of a parameter.
    """

    def __init__(self, objects: Objects, view: CheckpointView, values: ValueTensors) -> None:
        self._objects, self._view, self._values = objects, view, values
        self._aliases = view.aliases
        self._kinds: dict[str, dict[str, dict[str, Spec]]] = {}

    def leaf(self, name: str) -> str:
        """Returns the leaf that has this name, be it its first or another."""
        return self._aliases.get(name, name)

    def kinds(self, key: str) -> dict[str, dict[str, Spec]]:
        """Returns the stored optimizer state of each parameter: name -> kind -> (dtype, shape).

        Call it after the values were decoded.
        """
        if key not in self._kinds:
            found = {
                name: {
                    kind: spec
                    for kind, spec in kinds.items()
                    if "." not in kind or f"{key}.{name}.{kind}" not in self._values
                }
                for name, kinds in self._view.kinds.get(key, {}).items()
            }
            self._kinds[key] = {name: kinds for name, kinds in found.items() if kinds}
        return self._kinds[key]

    def wanted(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yields (leaf, the parameter it is cut like; None: whole) of all that is stored of
        them.
        """
        for key in self._objects.optimizers:
            parameters = self._objects.parameters(key)
            for name, kinds in self.kinds(key).items():
                for kind, (_, shape) in kinds.items():
                    is_like = shape == tuple(parameters[name].shape)
                    yield self.leaf(f"{key}.{name}.{kind}"), parameters[name] if is_like else None

    def problems(self) -> Iterator[str]:
        """Yields the mismatches, in words."""
        for key, optimizer in self._objects.optimizers.items():
            parameters = self._objects.parameters(key)
            yield from optimizers.room_problems(key, optimizer, parameters, self.kinds(key))

    def make_room(self, filled: dict[str, torch.Tensor], claims: ClaimedMemory) -> None:
        """Makes the tensors that are missing; enters all of them in ``filled``, by leaf."""
        for key, optimizer in self._objects.optimizers.items():
            kinds = self.kinds(key)
            parameters = {
                name: parameter
                for name, parameter in self._objects.parameters(key).items()
                if name in kinds or not self._objects.choice.allows(f"{key}.{name}")
            }
            optimizers.make_room(optimizer, parameters, kinds)
            self._tell_apart(key, parameters, filled, claims)
        for key in self._objects.optimizers:
            self._tie(key, filled)

    def _tell_apart(
        self,
        key: str,
        parameters: Mapping[str, torch.Tensor],
        filled: dict[str, torch.Tensor],
        claims: ClaimedMemory,
    ) -> None:
        """Enters an optimizer's own tensors; those that share memory with another leaf are replaced
        by new ones.
        """
        state = self._objects.optimizers[key].state
        for name, parameter in parameters.items():
            for kind, tensor in list(state.get(parameter, {}).items()):
                if not optimizers.is_tensor(tensor) or f"{key}.{name}.{kind}" in self._aliases:
                    continue
                parts = dict(plain_parts(f"{key}.{name}.{kind}", tensor))
                are_free = [claims.claim(part) for part in parts.values()]
                is_plain = all(part is tensor for part in parts.values())
                if is_plain and not all(are_free):
                    state[parameter][kind] = parts[f"{key}.{name}.{kind}"] = made_anew(tensor)
                filled.update(parts)

    def _tie(self, key: str, filled: dict[str, torch.Tensor]) -> None:
        """Ties state tensors again that were tied to another tensor."""
        parameters = self._objects.parameters(key)
        state = self._objects.optimizers[key].state
        for name, parameter in parameters.items():
            for kind, tensor in list(state.get(parameter, {}).items()):
                leaf = self._aliases.get(f"{key}.{name}.{kind}")
                if leaf is not None:
                    one = filled.setdefault(leaf, tensor)
                    state[parameter][kind] = one.detach() if one.requires_grad else one


# Makes room for the stored tensors that values refer to.

#: How much memory a restore takes for tensors that objects have already. What is beyond it is read
#: into their own, so that a model in an object does not need its memory twice.
SPARE_BYTES = 1 << 30


class ValueTensors:
    """The tensors that ``shared``, the decoded values by key, refers to.

    An object that takes its values by a call is given tensors of no other, as after ``torch.load``:
    it may reset its own before it takes them, or add them. Up to ``SPARE_BYTES`` where there is
    memory for it, and not what another entry of the state holds as well, which stays one tensor,
    nor what is shared with other processes or pinned, which stays in that memory.

    ``small``: the tensors that are stored among the values. ``references``: the names by which
    values refer to tensors of modules -> their names here.
    """

    def __init__(
        self,
        objects: Objects,
        stored: Mapping[str, Spec],
        shared: Mapping[str, Any],
        small: Mapping[str, codec.SmallTensor],
        references: Mapping[str, str],
    ) -> None:
        self._objects, self._stored, self._shared = objects, stored, shared
        self._small, self._references = small, references
        self._fresh: dict[str, torch.Tensor] = {}
        self._made: set[str] = set()
        self._spare_bytes = SPARE_BYTES
        holders = Counter(chain.from_iterable(map(self.names_in, shared.values())))
        self._tied = {name for name, count in holders.items() if count > 1}

    def __contains__(self, name: str) -> bool:
        """True if the leaf is one of them."""
        return name in self._fresh

    def is_made(self, name: str, tensor: torch.Tensor) -> bool:
        """True if this tensor was made for the restore: no object has it."""
        return name in self._made and self._fresh[name] is tensor

    def name(self, leaf: str) -> str:
        """Returns the name here of a leaf that a value refers to."""
        return self._references.get(leaf, leaf)

    def targets(self, of_modules: Collection[str]) -> list[tuple[str, torch.Tensor]]:
        """Returns (leaf, tensor): the existing tensor if it fits, else a new one.

        ``of_modules``: the leaves that modules hold.
        """
        objects = self._objects
        # Those first that are filled in place: what another object shows as well is one tensor.
        for key in [*objects.plain, *objects.optimizers, *objects.stateful, *objects.modules]:
            there: Any = objects.plain.get(key)
            if key in objects.modules:
                there = extra_state(objects.modules[key], is_old=key in objects.old)
            if key in objects.stateful:
                there = None
                with suppress(Exception):  # before its first load it may have none to give
                    there = objects.stateful[key].state_dict()
            if key in objects.optimizers:
                there = optimizer_values(beside(objects.optimizers[key], objects.parameters(key)))
            is_taken = key in objects.stateful or key in objects.modules
            self._collect(self._shared.get(key), there, of_modules, is_taken)
        return list(self._fresh.items())

    def _collect(self, saved: Any, there: Any, of_modules: Collection[str], is_taken: bool) -> None:
        if isinstance(saved, (codec.LeafRef, codec.SmallTensor)):
            small = self._small.get(saved.name)
            name = saved.name if small is not None else self.name(saved.name)
            found = self._stored.get(name) if small is None else (small.dtype, small.shape)
            if found is None:
                raise FormatError(f"a stored value refers to {saved.name!r}, which is no leaf")
            if name not in of_modules and name not in self._fresh:
                with torch.inference_mode(False):  # it is trained on later, outside of any
                    room = _room_for(found, there)
                    if room is there and is_taken and self._is_replaceable(name, there):
                        room = self._room_beside(there)
                self._fresh[name] = room
                if room is not there:
                    self._made.add(name)
        elif isinstance(saved, StoredObject):
            self._collect(saved.value, _data_of(there, saved.type), of_modules, is_taken)
        elif isinstance(saved, dict):
            for key, item in saved.items():
                inner = there.get(key) if isinstance(there, dict) else None
                self._collect(item, inner, of_modules, is_taken)
        elif isinstance(saved, (list, tuple)):
            for index, item in enumerate(saved):
                is_there = isinstance(there, (list, tuple)) and index < len(there)
                one = there[index] if is_there else None
                self._collect(item, one, of_modules, is_taken)

    def names_in(self, saved: Any) -> set[str]:
        """Returns the names here of the tensors that a value refers to."""
        if isinstance(saved, codec.SmallTensor):
            return {saved.name}
        if isinstance(saved, codec.LeafRef):
            return {saved.name if saved.name in self._small else self.name(saved.name)}
        if isinstance(saved, StoredObject):
            return self.names_in(saved.value)
        items = saved.values() if isinstance(saved, dict) else saved
        is_container = isinstance(saved, (dict, list, tuple))
        return set().union(*map(self.names_in, items)) if is_container else set()

    def _is_replaceable(self, name: str, there: torch.Tensor) -> bool:
        """True if nothing would be lost with the tensor's own memory."""
        return name not in self._tied and not is_shared_or_pinned(local_of(there))

    def _room_beside(self, there: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the same form and kind in memory of its own; ``there`` itself where
        no memory is left for one.
        """
        size_bytes = local_of(there).nbytes
        if size_bytes > self._spare_bytes:
            return there
        try:
            room = made_anew(there)
        except RuntimeError:  # the device is full, or the type has no such tensors
            self._spare_bytes = 0
            return there
        self._spare_bytes -= size_bytes
        if isinstance(there, torch.nn.Parameter):
            return torch.nn.Parameter(room, requires_grad=there.requires_grad)
        return room.requires_grad_(there.requires_grad)


def _data_of(there: Any, name: str) -> Any:
    """Returns the data of an object of the registered class of this name; None for anything
    else.
    """
    known = registered_class(type(there))
    if known is not None and known.name == name:
        with suppress(Exception):  # the program's own function: it may need more than is there yet
            return known.take(there)
    return None


def _room_for(spec: Spec, there: Any) -> torch.Tensor:
    dtype, shape = TORCH_DTYPES[spec[0]], spec[1]
    if isinstance(there, torch.Tensor):
        if there.layout is not torch.strided:  # as sparse ones: leaves are dense
            return torch.empty(shape, dtype=dtype, device=there.device)
        if tuple(there.shape) == shape and there.dtype == dtype:
            return there
        if tuple(there.shape) == shape:
            return torch.empty_like(there, dtype=dtype)
    return empty(shape, spec[0])
