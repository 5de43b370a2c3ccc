"""Bring the user's objects to a stored state: say what does not fit, make room, set values.

``check`` changes nothing and lists every difference at once; ``make_room`` makes the tensors an
optimizer lacks. Tensors are filled by the caller; ``finish`` sets
hyperparameters, plain values and generators when all ranks have verified everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from holdfast.errors import StateMismatch
from holdfast.format import values as codec
from holdfast.state import optimizers
from holdfast.state.describe import (
    Objects,
    State,
    clean_name,
    module_tensors,
    parameter_names,
    sort_objects,
    unwrap,
)
from holdfast.state.tensors import DTYPE_NAMES, TORCH_DTYPES

Stored = Mapping[str, tuple[str, tuple[int, ...]]]
_SHOWN = 20


class Restoring:
    """One restore of one state."""

    def __init__(self, state: State, stored: Stored, shared: Mapping[str, Any]) -> None:
        self.state = state
        self.stored = stored
        self.shared = {key: codec.decode(value) for key, value in shared.items()}
        self.objects: Objects = sort_objects(state)
        self.names = parameter_names(self.objects)
        self._fresh: dict[str, torch.Tensor] = {}

    def check(self) -> None:
        """StateMismatch lists every difference between this state and the stored one.

        Changes nothing.
        """
        problems: list[str] = []
        targets = self._module_targets(problems) + self._value_targets(problems)
        claimed = {name for name, _ in targets}
        for key, optimizer in self.objects.optimizers.items():
            parameters = optimizers.named(key, optimizer, self.names)
            problems += optimizers.check_values(key, optimizer, parameters, self.shared.get(key))
            for name, kinds in self._stored_kinds(key, parameters).items():
                claimed.update(f"{key}.{name}.{kind}" for kind in kinds)
        problems += self._unclaimed(claimed)
        if problems:
            shown = "\n  ".join(problems[:_SHOWN])
            more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise StateMismatch(
                f"the state offered does not fit the checkpoint:\n  {shown}{more}\n"
                "Build the model and the optimizer as they were when it was saved; leave a key "
                "out of the state to load only a part.",
                problems=problems,
            )

    def make_room(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors to fill, by leaf name; those an optimizer lacks are made first."""
        targets = self._module_targets([]) + self._value_targets([])
        for key, optimizer in self.objects.optimizers.items():
            parameters = optimizers.named(key, optimizer, self.names)
            kinds = self._stored_kinds(key, parameters)
            optimizers.make_room(optimizer, parameters, kinds)
            targets += optimizers.tensors(key, optimizer, parameters)
        return targets

    def _module_targets(self, problems: list[str]) -> list[tuple[str, torch.Tensor]]:
        targets = []
        for key, module in self.objects.modules.items():
            for name, tensor, _ in module_tensors(module):
                leaf = f"{key}.{name}"
                found = self.stored.get(leaf)
                wanted = (DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
                if found is None:
                    problems.append(f"{leaf}: in the model, but not in the checkpoint")
                elif found != wanted:
                    problems.append(
                        f"{leaf}: the checkpoint has {found[0]} {list(found[1])}, the model "
                        f"{wanted[0]} {list(wanted[1])}"
                    )
                targets.append((leaf, tensor))
        return targets

    def _value_targets(self, problems: list[str]) -> list[tuple[str, torch.Tensor]]:
        """Tensors inside values: the one that is there if it fits, else a new one."""
        objects = self.objects
        expected = [*objects.stateful, *objects.plain]
        problems += [f"{key}: not in the checkpoint" for key in expected if key not in self.shared]
        for key in [*expected, *objects.optimizers]:
            there: Any = objects.plain.get(key)
            if key in objects.stateful:
                there = objects.stateful[key].state_dict()
            if key in objects.optimizers:
                parameters = optimizers.named(key, objects.optimizers[key], self.names)
                there = optimizers.values(objects.optimizers[key], parameters)
            self._collect(self.shared.get(key), there)
        return list(self._fresh.items())

    def _collect(self, saved: Any, there: Any) -> None:
        if isinstance(saved, codec.LeafRef):
            found = self.stored.get(saved.name)
            if found is not None:
                self._fresh[saved.name] = _room_for(found, there)
        elif isinstance(saved, dict):
            for key, item in saved.items():
                self._collect(item, there.get(key) if isinstance(there, dict) else None)
        elif isinstance(saved, (list, tuple)):
            for index, item in enumerate(saved):
                inner = isinstance(there, (list, tuple)) and index < len(there)
                self._collect(item, there[index] if inner else None)

    def _stored_kinds(
        self, key: str, parameters: Mapping[str, torch.Tensor]
    ) -> dict[str, dict[str, tuple[str, tuple[int, ...]]]]:
        """What is stored of each parameter's optimizer state: name -> kind -> (dtype, shape)."""
        by_prefix = {f"{key}.{name}": name for name in parameters}
        kinds: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
        for leaf, spec in self.stored.items():
            prefix, _, kind = leaf.rpartition(".")
            if prefix in by_prefix:
                kinds.setdefault(by_prefix[prefix], {})[kind] = spec
        return kinds

    def _unclaimed(self, claimed: set[str]) -> list[str]:
        """Stored leaves below our keys that nothing here wants: a smaller model, say."""
        keys = tuple(f"{key}." for key in self.state)
        return [
            f"{leaf}: in the checkpoint, but nothing in the state takes it"
            for leaf in self.stored
            if leaf.startswith(keys) and leaf not in claimed
        ]

    def finish(self, own: Mapping[str, Any], rank: int, *, rank_was_saved: bool) -> None:
        """Set everything that is no tensor. ``own``: this rank's generators, or rank 0's."""
        objects = self.objects
        filled = {key: self._with_tensors(value) for key, value in self.shared.items()}
        for key, optimizer in objects.optimizers.items():
            parameters = optimizers.named(key, optimizer, self.names)
            optimizers.load_values(key, optimizer, parameters, filled[key])
        for key, module in objects.modules.items():
            self._set_extra_state(unwrap(module), filled.get(key, {}))
        for key, item in objects.stateful.items():
            item.load_state_dict(filled[key])
        for key in objects.plain:
            container, name = objects.homes[key]
            if isinstance(container, tuple):
                continue  # cannot be replaced in place; its tensors were filled
            container[name] = filled[key]
        for key, generator in objects.generators.items():
            if key in own:
                state = codec.decode(own[key])
                if rank_was_saved:
                    generator.load_state_dict(state)
                else:
                    generator.derive(state, rank)

    def _set_extra_state(self, module: torch.nn.Module, saved: Mapping[str, Any]) -> None:
        for prefix, part in module.named_modules():
            if clean_name(prefix) in saved:
                part.set_extra_state(saved[clean_name(prefix)])

    def _with_tensors(self, value: Any) -> Any:
        if isinstance(value, codec.LeafRef):
            return self._fresh.get(value.name)
        if isinstance(value, dict):
            return {key: self._with_tensors(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._with_tensors(item) for item in value]
        if type(value) is tuple:
            return tuple(self._with_tensors(item) for item in value)
        return value


def _room_for(spec: tuple[str, tuple[int, ...]], there: Any) -> torch.Tensor:
    dtype, shape = TORCH_DTYPES[spec[0]], spec[1]
    if isinstance(there, torch.Tensor):
        if tuple(there.shape) == shape and there.dtype == dtype:
            return there
        if tuple(there.shape) == shape:
            return torch.empty_like(there, dtype=dtype)
    return torch.empty(shape, dtype=dtype)
