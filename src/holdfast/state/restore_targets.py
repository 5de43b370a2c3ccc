"""Matches tensors of modules and optimizer state with the stored leaves of their names."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from holdfast.errors import FormatError
from holdfast.format import values as codec
from holdfast.state import optimizers
from holdfast.state.claimed_memory import ClaimedMemory, made_anew, shares_its_own
from holdfast.state.hidden_state import memory_gone
from holdfast.state.identity import TensorNames
from holdfast.state.mapped.checkpoint_view import Spec
from holdfast.state.modules import extra_state
from holdfast.state.objects import Objects
from holdfast.state.tensors import DTYPE_NAMES, TORCH_DTYPES, empty, plain_parts
from holdfast.state.values import beside, optimizer_values

#: Limits how many missing names are compared with how many stored ones: each comparison takes time.
_HINTS, _SEARCHED = 5, 2000


class ModuleLeaves:
    """The part of the ``stored`` leaves that modules hold.

    ``aliases``: further names of leaves. ``left``: the tensors that keep their content.
    """

    def __init__(
        self,
        objects: Objects,
        stored: Mapping[str, Spec],
        aliases: Mapping[str, str],
        left: Collection[str],
    ) -> None:
        self._objects, self._stored, self._aliases, self._left = objects, stored, aliases, left
        self._hints = _HINTS

    def _leaf(self, name: str) -> str:
        return self._aliases.get(name, name)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor, str]]:
        """Yields (name, tensor, the name it was first met under) of all tensors that modules
        hold.
        """
        known = TensorNames()
        for key, tensors in self._objects.tensors.items():
            for held in tensors:
                for part, inner in plain_parts(f"{key}.{held.name}", held.tensor):
                    if part not in self._left:
                        yield part, inner, known.name(inner, part)

    def targets(self) -> list[tuple[str, torch.Tensor]]:
        """Returns (leaf, tensor) of what to fill, tied tensors once."""
        return [
            (self._leaf(name), tensor) for name, tensor, first in self._tensors() if first == name
        ]

    def problems(self) -> Iterator[str]:
        """Yields the mismatches, in words."""
        first_here: dict[str, str] = {}
        for name, tensor, first in self._tensors():
            leaf = self._leaf(name)
            found = self._stored.get(leaf)
            wanted = (DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
            tied = first_here.setdefault(leaf, first)
            if found is None:
                if first == name:
                    yield f"{name}: in the model, but not in the checkpoint{self._near(name)}"
            elif found != wanted:
                yield (
                    f"{name}: the checkpoint has {found[0]} {list(found[1])}, the model "
                    f"{wanted[0]} {list(wanted[1])}"
                )
            elif gone := memory_gone(tensor):
                yield f"{name} {gone}: restore where it is gathered"
            elif shares_its_own(tensor):
                yield f"{name}: several of its elements are the same memory; make it contiguous"
            elif self._leaf(first) != leaf:
                yield f"{name}: tied to {first} in the model, but not in the checkpoint"
            elif tied != first:
                yield f"{name}: tied to {tied} in the checkpoint, but not in the model"

    def _near(self, name: str) -> str:
        """Suggests similar names in the checkpoint."""
        if not self._hints:
            return ""
        self._hints -= 1
        key = name.partition(".")[0]
        others = [leaf for leaf in self._stored if leaf.startswith(f"{key}.")]
        near = difflib.get_close_matches(name, others[:_SEARCHED], n=1, cutoff=0.8)
        return f"; did you mean {near[0]}?" if near else ""


# Matches the state of optimizers with the stored leaves of their names, and makes room for it.


class OptimizerLeaves:
    """The part of the ``stored`` leaves that optimizers have, or could have.

    ``aliases``: further names of leaves. ``values``: leaves that are tensors in values and so no
    state of a parameter.
    """

    def __init__(
        self,
        objects: Objects,
        stored: Mapping[str, Spec],
        aliases: Mapping[str, str],
        values: ValueTensors,
    ) -> None:
        self._objects, self._stored, self._aliases, self._values = objects, stored, aliases, values
        self._kinds: dict[str, dict[str, dict[str, Spec]]] = {}

    def leaf(self, name: str) -> str:
        """Returns the leaf that has this name, be it its first or another."""
        return self._aliases.get(name, name)

    def kinds(self, key: str) -> dict[str, dict[str, Spec]]:
        """Returns the stored optimizer state of each parameter: name -> kind -> (dtype, shape).

        Call it after the values were decoded.
        """
        if key not in self._kinds:
            self._kinds[key] = self._find(key)
        return self._kinds[key]

    def _find(self, key: str) -> dict[str, dict[str, Spec]]:
        parameters = self._objects.parameters(key)
        by_prefix = {f"{key}.{name}": name for name in parameters}
        kinds: dict[str, dict[str, Spec]] = {}
        masters = {origin.leaf for origin, _ in self._objects.masters(key)}
        for name in [*self._stored, *self._aliases]:
            if not name.startswith(f"{key}."):
                continue
            prefix, _, _ = name.rpartition(".")
            while prefix and prefix not in by_prefix:
                prefix, _, _ = prefix.rpartition(".")
            kind = name[len(prefix) + 1 :]
            is_in_values = name in self._values and "." in kind
            if prefix and not is_in_values and name not in masters:
                kinds.setdefault(by_prefix[prefix], {})[kind] = self._stored[self.leaf(name)]
        return kinds

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


class ValueTensors:
    """The tensors that ``shared``, the decoded values by key, refers to.

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

    def __contains__(self, name: str) -> bool:
        """True if the leaf is one of them."""
        return name in self._fresh

    def name(self, leaf: str) -> str:
        """Returns the name here of a leaf that a value refers to."""
        return self._references.get(leaf, leaf)

    def targets(self, of_modules: Collection[str]) -> list[tuple[str, torch.Tensor]]:
        """Returns (leaf, tensor): the existing tensor if it fits, else a new one.

        ``of_modules``: the leaves that modules hold.
        """
        objects = self._objects
        for key in [*objects.stateful, *objects.plain, *objects.optimizers, *objects.modules]:
            there: Any = objects.plain.get(key)
            if key in objects.modules:
                there = extra_state(objects.modules[key], is_old=key in objects.old)
            if key in objects.stateful:
                there = None
                with suppress(Exception):  # before its first load it may have none to give
                    there = objects.stateful[key].state_dict()
            if key in objects.optimizers:
                there = optimizer_values(beside(objects.optimizers[key], objects.parameters(key)))
            self._collect(self._shared.get(key), there, of_modules)
        return list(self._fresh.items())

    def _collect(self, saved: Any, there: Any, of_modules: Collection[str]) -> None:
        if isinstance(saved, (codec.LeafRef, codec.SmallTensor)):
            small = self._small.get(saved.name)
            name = saved.name if small is not None else self.name(saved.name)
            found = self._stored.get(name) if small is None else (small.dtype, small.shape)
            if found is None:
                raise FormatError(f"a stored value refers to {saved.name!r}, which is no leaf")
            if name not in of_modules and name not in self._fresh:
                self._fresh[name] = _room_for(found, there)
        elif isinstance(saved, dict):
            for key, item in saved.items():
                inner = there.get(key) if isinstance(there, dict) else None
                self._collect(item, inner, of_modules)
        elif isinstance(saved, (list, tuple)):
            for index, item in enumerate(saved):
                is_there = isinstance(there, (list, tuple)) and index < len(there)
                self._collect(item, there[index] if is_there else None, of_modules)


def _room_for(spec: Spec, there: Any) -> torch.Tensor:
    dtype, shape = TORCH_DTYPES[spec[0]], spec[1]
    if isinstance(there, torch.Tensor):
        if tuple(there.shape) == shape and there.dtype == dtype:
            return there
        if tuple(there.shape) == shape:
            return torch.empty_like(there, dtype=dtype)
    return empty(shape, spec[0])
