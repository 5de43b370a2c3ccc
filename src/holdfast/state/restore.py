"""Bring the user's objects to a stored state: say what does not fit, make room, set values.

``amiss`` changes nothing and lists every difference at once; what of a checkpoint no rank takes
is for all of them to find, and ``refuse`` raises both. ``make_room`` makes the tensors an optimizer
lacks. Tensors are filled by the caller; ``finish`` sets hyperparameters, plain values and
generators when all ranks have verified everything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from holdfast.errors import StateMismatch
from holdfast.format import values as codec
from holdfast.state import optimizers
from holdfast.state.following import Gathered
from holdfast.state.kinds import Stored, value_problems
from holdfast.state.memory import Spoken, made_anew
from holdfast.state.module_leaves import ModuleLeaves
from holdfast.state.modules import set_extra_state
from holdfast.state.objects import Objects, State
from holdfast.state.offer import Spec
from holdfast.state.optimizer_leaves import OptimizerLeaves
from holdfast.state.tensors import fill_small, local_of
from holdfast.state.value_tensors import ValueTensors

#: So many differences are shown; an error has all of them.
_SHOWN = 20


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
        self._filled: dict[str, torch.Tensor] = {}
        self._left = left
        self._modules = ModuleLeaves(objects, stored, self.aliases, left)
        self._values = ValueTensors(objects, stored, self.shared, self._small, references or {})
        self._optimizers = OptimizerLeaves(objects, stored, self.aliases, self._values)

    def _note_small(self, small: codec.SmallTensor) -> codec.SmallTensor:
        self._small[small.name] = small
        return small

    @cached_property
    def amiss(self) -> list[str]:
        """What stands between this state and the stored one, as far as one rank can tell."""
        self._value_targets()  # what is found there is no state of a parameter
        values = Stored(self.shared, self.keys, self.own, self.lists)
        amiss = value_problems(self.objects, self.state, values)
        in_modules, in_optimizers = self._modules.problems(), self._optimizers.problems()
        return [*in_modules, *amiss, *self.found.problems, *in_optimizers]

    def claimed(self) -> set[str]:
        """The stored leaves that something in this state takes."""
        claimed = {name for name, _ in self._modules.targets()}
        claimed.update(name for name, _ in self._value_targets())
        claimed.update(name for name, _ in self._optimizers.wanted())
        return claimed

    def wanted(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """(leaf, the tensor it is cut like; None: whole) of what would be filled; makes nothing."""
        found: dict[str, torch.Tensor | None] = dict(self._modules.targets())
        for name, like in self._optimizers.wanted():
            found.setdefault(name, like)
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
            filled = dict(self._modules.targets())
            for tensor in filled.values():
                spoken.take(tensor)
            filled.update(self._masters())
            self._optimizers.make_room(filled, spoken)
            for name, tensor in self._value_targets():
                if name not in filled:
                    filled[name] = tensor if spoken.take(tensor) else made_anew(tensor)
        self._filled = filled
        return [(name, tensor) for name, tensor in filled.items() if name not in self._small]

    def _value_targets(self) -> list[tuple[str, torch.Tensor]]:
        return self._values.targets({name for name, _ in self._modules.targets()})

    def _masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that optimizers update and no module holds."""
        for origin, tensor in self.objects.all_masters():
            if origin.leaf not in self._left:
                yield origin.leaf, tensor

    def finish(self, rank: int, *, rank_was_saved: bool, items: Mapping[str, list[Any]]) -> None:
        """Set everything that is no tensor, and small tensors.

        ``items``: what this rank gets of each list.
        """
        with torch.inference_mode(False), torch.no_grad():
            # Bytes were read into them, of which torch knows nothing: whoever goes by versions
            # (an optimizer with copies of parameters, a graph that is still there) has to.
            torch.autograd.graph.increment_version(list(map(local_of, self._filled.values())))
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
                optimizers.load_values(optimizer, objects.parameters(key), filled[key])
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

    def _leaf_room(self, leaf: str) -> torch.Tensor | None:
        return self._filled.get(self._values.name(leaf))

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
