"""The state of optimizers beside the stored leaves of their names, and room for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from holdfast.state import optimizers
from holdfast.state.memory import Spoken, made_anew
from holdfast.state.objects import Objects
from holdfast.state.offer import Spec
from holdfast.state.subclasses import plain_parts
from holdfast.state.value_tensors import ValueTensors


class OptimizerLeaves:
    """What optimizers have, and could have, of ``stored`` leaves.

    ``aliases``: further names of leaves. ``values``: the leaves in it are no state of a parameter.
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
        """The leaf that has this name, be it its first or another."""
        return self._aliases.get(name, name)

    def kinds(self, key: str) -> dict[str, dict[str, Spec]]:
        """What is stored of each parameter's optimizer state: name -> kind -> (dtype, shape).

        Asked for after the values were looked through.
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
        """(leaf, the parameter it is cut like; None: whole) of all that is stored of them."""
        for key in self._objects.optimizers:
            parameters = self._objects.parameters(key)
            for name, kinds in self.kinds(key).items():
                for kind, (_, shape) in kinds.items():
                    is_like = shape == tuple(parameters[name].shape)
                    yield self.leaf(f"{key}.{name}.{kind}"), parameters[name] if is_like else None

    def problems(self) -> Iterator[str]:
        """What of it does not fit, in words."""
        for key, optimizer in self._objects.optimizers.items():
            parameters = self._objects.parameters(key)
            yield from optimizers.room_problems(key, optimizer, parameters, self.kinds(key))

    def make_room(self, filled: dict[str, torch.Tensor], spoken: Spoken) -> None:
        """Make the tensors that are missing; all are noted in ``filled``, by leaf."""
        for key, optimizer in self._objects.optimizers.items():
            kinds = self.kinds(key)
            parameters = {
                name: parameter
                for name, parameter in self._objects.parameters(key).items()
                if name in kinds or not self._objects.choice.allows(f"{key}.{name}")
            }
            optimizers.make_room(optimizer, parameters, kinds)
            self._tell_apart(key, parameters, filled, spoken)
        for key in self._objects.optimizers:
            self._tie(key, filled)

    def _tell_apart(
        self,
        key: str,
        parameters: Mapping[str, torch.Tensor],
        filled: dict[str, torch.Tensor],
        spoken: Spoken,
    ) -> None:
        """Fill an optimizer's own tensors; those whose memory is another leaf's are made anew."""
        state = self._objects.optimizers[key].state
        for name, parameter in parameters.items():
            for kind, tensor in list(state.get(parameter, {}).items()):
                if not optimizers.is_tensor(tensor) or f"{key}.{name}.{kind}" in self._aliases:
                    continue
                parts = dict(plain_parts(f"{key}.{name}.{kind}", tensor))
                are_free = [spoken.take(part) for part in parts.values()]
                is_plain = all(part is tensor for part in parts.values())
                if is_plain and not all(are_free):
                    state[parameter][kind] = parts[f"{key}.{name}.{kind}"] = made_anew(tensor)
                filled.update(parts)

    def _tie(self, key: str, filled: dict[str, torch.Tensor]) -> None:
        """State tensors that were one with another tensor are one with it again."""
        parameters = self._objects.parameters(key)
        state = self._objects.optimizers[key].state
        for name, parameter in parameters.items():
            for kind, tensor in list(state.get(parameter, {}).items()):
                leaf = self._aliases.get(f"{key}.{name}.{kind}")
                if leaf is not None:
                    one = filled.setdefault(leaf, tensor)
                    state[parameter][kind] = one.detach() if one.requires_grad else one
