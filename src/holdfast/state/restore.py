"""Bring the user's objects to a stored state: say what does not fit, make room, set values.

``amiss`` changes nothing and lists every difference at once; what of a checkpoint no rank takes
is for all of them to find, and ``refuse`` raises both. ``make_room`` makes the tensors an optimizer
lacks. Tensors are filled by the caller; ``finish`` sets hyperparameters, plain values and
generators when all ranks have verified everything.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import torch

from holdfast.errors import FormatError, StateMismatch
from holdfast.format import values as codec
from holdfast.state import optimizers
from holdfast.state.following import Gathered
from holdfast.state.kinds import Stored, value_problems
from holdfast.state.known import Known
from holdfast.state.memory import Spoken, shares_its_own
from holdfast.state.modules import extra_state, set_extra_state
from holdfast.state.objects import Objects, State
from holdfast.state.subclasses import plain_parts
from holdfast.state.tensors import DTYPE_NAMES, TORCH_DTYPES, empty, fill_small
from holdfast.state.values import beside, optimizer_values

Spec = tuple[str, tuple[int, ...]]
_SHOWN = 20
#: How many missing names are compared with how many stored ones: each takes a moment.
_HINTS, _SEARCHED = 5, 2000


class Restoring:
    """One restore of one state.

    ``objects``: those of the state. ``stored``: leaf name -> (dtype, shape). ``found``: the encoded
    values by key, and further names of leaves. ``own``: this rank's generators, or rank 0's.
    ``lists``: the keys of what all saved ranks have of lists. ``left``: the tensors of modules that
    stay as they are. ``references``: what values call tensors of modules -> their names here.
    """

    def __init__(
        self,
        state: State,
        objects: Objects,
        stored: Mapping[str, Spec],
        found: Gathered,
        own: Mapping[str, Any],
        *,
        lists: Collection[str] = (),
        left: Collection[str] = (),
        references: Mapping[str, str] | None = None,
    ) -> None:
        self.state = state
        self.stored = stored
        self.aliases = found.aliases
        self.own = own
        self.lists = lists
        self.objects = objects
        self.found = found
        shared = found.shared
        self.keys = frozenset(shared)
        self.encoded = {k: v for k, v in shared.items() if self.objects.has_values(k)}
        self.shared = {k: codec.decode(v, strict=True) for k, v in self.encoded.items()}
        self._small: dict[str, codec.SmallTensor] = {}
        for value in shared.values():  # one that is wanted may refer to one that is not
            codec.decode(value, tensor=self._note_small)
        self._fresh: dict[str, torch.Tensor] = {}
        self._filled: dict[str, torch.Tensor] = {}
        self._hints = _HINTS
        self._left = left
        self._references = references or {}

    def _note_small(self, small: codec.SmallTensor) -> codec.SmallTensor:
        self._small[small.name] = small
        return small

    @cached_property
    def amiss(self) -> list[str]:
        """What stands between this state and the stored one, as far as one rank can tell."""
        self._value_targets()  # what is found there is no state of a parameter
        values = Stored(self.shared, self.keys, self.own, self.lists)
        amiss = value_problems(self.objects, self.state, values)
        problems = [*self._module_problems(), *amiss, *self.found.problems]
        for key, optimizer in self.objects.optimizers.items():
            parameters = self._parameters(key)
            stored = self._stored_kinds(key, parameters)
            problems += optimizers.room_problems(key, optimizer, parameters, stored)
        return problems

    def claimed(self) -> set[str]:
        """The stored leaves that something in this state takes."""
        claimed = {name for name, _ in self._module_targets()}
        claimed.update(name for name, _ in self._value_targets())
        for key in self.objects.optimizers:
            for name, kinds in self._stored_kinds(key, self._parameters(key)).items():
                claimed.update(self._leaf(f"{key}.{name}.{kind}") for kind in kinds)
        return claimed

    def wanted(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """(leaf, the tensor it is cut like; None: whole) of what would be filled; makes nothing."""
        found: dict[str, torch.Tensor | None] = dict(self._module_targets())
        for key in self.objects.optimizers:
            parameters = self._parameters(key)
            for name, kinds in self._stored_kinds(key, parameters).items():
                for kind, (_, shape) in kinds.items():
                    is_like = shape == tuple(parameters[name].shape)
                    leaf = self._leaf(f"{key}.{name}.{kind}")
                    found.setdefault(leaf, parameters[name] if is_like else None)
        for name, _ in self._value_targets():
            found.setdefault(name, None)
        for name, like in found.items():
            if name in self.stored and name not in self._small:
                yield name, like

    def in_scope(self, leaf: str) -> bool:
        """Whether a stored leaf is below a key of this state: something should take it."""
        is_below = leaf.startswith(tuple(f"{key}." for key in self.state))
        return is_below and self.objects.choice.takes(leaf)

    def make_room(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors to fill, by leaf name; those that are missing are made first.

        No two of them share memory.
        """
        with torch.inference_mode(False):  # what is made is trained on later, outside of any
            spoken = Spoken()
            filled = dict(self._module_targets())
            for tensor in filled.values():
                spoken.take(tensor)
            filled.update(self._masters())
            for key, optimizer in self.objects.optimizers.items():
                parameters = self._parameters(key)
                kinds = self._stored_kinds(key, parameters)
                parameters = {
                    name: parameter
                    for name, parameter in parameters.items()
                    if name in kinds or not self.objects.choice.allows(f"{key}.{name}")
                }
                optimizers.make_room(optimizer, parameters, kinds)
                self._tell_apart(key, parameters, filled, spoken)
            for key in self.objects.optimizers:
                self._tie_optimizer_state(key, self._parameters(key), filled)
            for name, tensor in self._value_targets():
                if name not in filled:
                    filled[name] = tensor if spoken.take(tensor) else _made_anew(tensor)
        self._filled = filled
        return [(name, tensor) for name, tensor in filled.items() if name not in self._small]

    def _masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that optimizers update and no module holds."""
        for origin, tensor in self.objects.all_masters():
            if origin.leaf not in self._left:
                yield origin.leaf, tensor

    def _tell_apart(
        self,
        key: str,
        parameters: Mapping[str, torch.Tensor],
        filled: dict[str, torch.Tensor],
        spoken: Spoken,
    ) -> None:
        """Fill an optimizer's own tensors; those whose memory is another leaf's are made anew."""
        state = self.objects.optimizers[key].state
        for name, parameter in parameters.items():
            for kind, tensor in list(state.get(parameter, {}).items()):
                if not optimizers.is_tensor(tensor) or f"{key}.{name}.{kind}" in self.aliases:
                    continue
                parts = dict(plain_parts(f"{key}.{name}.{kind}", tensor))
                are_free = [spoken.take(part) for part in parts.values()]
                is_plain = all(part is tensor for part in parts.values())
                if is_plain and not all(are_free):
                    state[parameter][kind] = parts[f"{key}.{name}.{kind}"] = _made_anew(tensor)
                filled.update(parts)

    def _parameters(self, key: str) -> dict[str, torch.Tensor]:
        optimizer = self.objects.optimizers[key]
        return optimizers.named(key, optimizer, self.objects.parameter_names(optimizer))

    def _leaf(self, name: str) -> str:
        """The leaf that has this name, be it its first or another."""
        return self.aliases.get(name, name)

    def _module_tensors(self) -> Iterator[tuple[str, torch.Tensor, str]]:
        """(name, tensor, the name it was first met under) of all that modules hold."""
        known = Known()
        for key, tensors in self.objects.tensors.items():
            for held in tensors:
                for part, inner in plain_parts(f"{key}.{held.name}", held.tensor):
                    if part not in self._left:
                        yield part, inner, known.name(inner, part)

    def _module_targets(self) -> list[tuple[str, torch.Tensor]]:
        """(leaf, tensor), tied tensors once."""
        return [
            (self._leaf(name), tensor)
            for name, tensor, first in self._module_tensors()
            if first == name
        ]

    def _module_problems(self) -> Iterator[str]:
        first_here: dict[str, str] = {}
        for name, tensor, first in self._module_tensors():
            leaf = self._leaf(name)
            found = self.stored.get(leaf)
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
            elif shares_its_own(tensor):
                yield f"{name}: several of its elements are the same memory; make it contiguous"
            elif self._leaf(first) != leaf:
                yield f"{name}: tied to {first} in the model, but not in the checkpoint"
            elif tied != first:
                yield f"{name}: tied to {tied} in the checkpoint, but not in the model"

    def _near(self, name: str) -> str:
        """What it may be called in the checkpoint."""
        if not self._hints:
            return ""
        self._hints -= 1
        key = name.partition(".")[0]
        others = [leaf for leaf in self.stored if leaf.startswith(f"{key}.")]
        near = difflib.get_close_matches(name, others[:_SEARCHED], n=1, cutoff=0.8)
        return f"; did you mean {near[0]}?" if near else ""

    def _value_targets(self) -> list[tuple[str, torch.Tensor]]:
        """Tensors inside values: the one that is there if it fits, else a new one."""
        objects = self.objects
        of_modules = {name for name, _ in self._module_targets()}
        for key in [*objects.stateful, *objects.plain, *objects.optimizers, *objects.modules]:
            there: Any = objects.plain.get(key)
            if key in objects.modules:
                there = extra_state(objects.modules[key])
            if key in objects.stateful:
                there = None
                with suppress(Exception):  # before its first load it may have none to give
                    there = objects.stateful[key].state_dict()
            if key in objects.optimizers:
                there = optimizer_values(beside(objects.optimizers[key], self._parameters(key)))
            self._collect(self.shared.get(key), there, of_modules)
        return list(self._fresh.items())

    def _collect(self, saved: Any, there: Any, of_modules: set[str]) -> None:
        if isinstance(saved, (codec.LeafRef, codec.SmallTensor)):
            small = self._small.get(saved.name)
            name = saved.name if small is not None else self._name(saved.name)
            found = self.stored.get(name) if small is None else (small.dtype, small.shape)
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

    def _stored_kinds(
        self, key: str, parameters: Mapping[str, torch.Tensor]
    ) -> dict[str, dict[str, Spec]]:
        """What is stored of each parameter's optimizer state: name -> kind -> (dtype, shape)."""
        by_prefix = {f"{key}.{name}": name for name in parameters}
        kinds: dict[str, dict[str, Spec]] = {}
        masters = {origin.leaf for origin, _ in self.objects.masters(key)}
        for name in [*self.stored, *self.aliases]:
            if not name.startswith(f"{key}."):
                continue
            prefix, _, _ = name.rpartition(".")
            while prefix and prefix not in by_prefix:
                prefix, _, _ = prefix.rpartition(".")
            kind = name[len(prefix) + 1 :]
            is_in_values = name in self._fresh and "." in kind
            if prefix and not is_in_values and name not in masters:
                kinds.setdefault(by_prefix[prefix], {})[kind] = self.stored[self._leaf(name)]
        return kinds

    def _tie_optimizer_state(
        self,
        key: str,
        parameters: Mapping[str, torch.Tensor],
        filled: dict[str, torch.Tensor],
    ) -> None:
        """State tensors that were one with another tensor are one with it again."""
        state = self.objects.optimizers[key].state
        for name, parameter in parameters.items():
            for kind, tensor in list(state.get(parameter, {}).items()):
                leaf = self.aliases.get(f"{key}.{name}.{kind}")
                if leaf is not None:
                    one = filled.setdefault(leaf, tensor)
                    state[parameter][kind] = one.detach() if one.requires_grad else one

    def finish(self, rank: int, *, rank_was_saved: bool, items: Mapping[str, list[Any]]) -> None:
        """Set everything that is no tensor, and small tensors.

        ``items``: what this rank gets of each list.
        """
        with torch.inference_mode(False), torch.no_grad():
            for name in self._small.keys() & self._filled.keys():
                fill_small(self._filled[name], self._small[name])
            self._finish(rank, rank_was_saved)
        for key, found in self.objects.lists.items():
            if key in items:  # or it may be missing, and is
                found[:] = items[key]

    def _finish(self, rank: int, rank_was_saved: bool) -> None:
        objects = self.objects
        filled = {
            key: codec.decode(value, leaf=self._leaf_room, tensor=self._small_room, strict=True)
            for key, value in self.encoded.items()
        }
        for key, optimizer in objects.optimizers.items():
            if key in filled:
                optimizers.load_values(optimizer, self._parameters(key), filled[key])
        for key, module in objects.modules.items():
            with _naming(key):
                set_extra_state(module, filled.get(key, {}))
        for key, item in objects.stateful.items():
            if key not in filled:
                continue  # it was allowed to be missing
            with _naming(key):
                item.load_state_dict(filled[key])
        for key in objects.plain:
            container, name = objects.homes[key]
            if isinstance(container, tuple) or key not in filled:
                continue  # cannot be replaced in place; its tensors were filled. Or it was missing
            container[name] = filled[key]
        for key, generator in objects.generators.items():
            if key not in self.own:
                continue
            state = codec.decode(self.own[key])
            if rank_was_saved:
                generator.load_state_dict(state)
            else:
                generator.derive(state, rank)

    def _name(self, leaf: str) -> str:
        """What a leaf that a value names is called here."""
        return self._references.get(leaf, leaf)

    def _leaf_room(self, leaf: str) -> torch.Tensor | None:
        return self._filled.get(self._name(leaf))

    def _small_room(self, small: codec.SmallTensor) -> torch.Tensor:
        return self._filled[small.name]


def refuse(problems: list[str]) -> None:
    """StateMismatch lists every difference between states and the stored one, if there are any."""
    if problems:
        shown = "\n  ".join(problems[:_SHOWN])
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise StateMismatch(
            f"the state offered does not fit the checkpoint:\n  {shown}{more}\n"
            "Build the model and the optimizer as they were when it was saved; leave a key "
            "out of the state to load only a part.",
            problems=problems,
        )


@contextmanager
def _naming(key: str) -> Iterator[None]:
    """Errors of the user's own code say which key of the state it was."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while {key!r} was given what is stored of it")
        raise


def _made_anew(tensor: torch.Tensor) -> torch.Tensor:
    """One like it with memory of its own."""
    return torch.empty_like(tensor.detach(), memory_format=torch.contiguous_format)


def _room_for(spec: Spec, there: Any) -> torch.Tensor:
    dtype, shape = TORCH_DTYPES[spec[0]], spec[1]
    if isinstance(there, torch.Tensor):
        if tuple(there.shape) == shape and there.dtype == dtype:
            return there
        if tuple(there.shape) == shape:
            return torch.empty_like(there, dtype=dtype)
    return empty(shape, spec[0])
