"""Restores the user's objects to a stored state: reports differences, makes room, sets values.

``amiss`` changes nothing and lists every difference at once. Leaves of the checkpoint that no rank
uses are found by all ranks together, and ``refuse`` raises both. ``make_room`` makes the tensors an
optimizer lacks. The caller fills the tensors; ``finish`` sets hyperparameters, plain values and
generators when all ranks have verified everything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from holdfast.data.sampler import ResumableSampler
from holdfast.errors import FormatError, StateMismatch
from holdfast.format import values as codec
from holdfast.state import optimizers
from holdfast.state.claimed_memory import ClaimedMemory, made_anew
from holdfast.state.mapped.checkpoint_view import CheckpointView
from holdfast.state.modules import set_extra_state
from holdfast.state.objects import Objects, State
from holdfast.state.restore_targets import OptimizerLeaves, ValueTensors
from holdfast.state.rewind import Rewind
from holdfast.state.saved_values import SavedValues
from holdfast.state.step_calls import mend
from holdfast.state.tensors import fill_small, local_of
from holdfast.state.values import stored_lists

#: The number of differences that a message shows; the error's fields have all of them.
_SHOWN = 20


class StateRestore:
    """One restore of one state.

    ``objects``: the objects of the state. ``view``: the checkpoint's leaves by the names here.
    ``found``: the encoded values by key. ``own``: this rank's generators, or rank 0's. ``lists``:
    the keys of the lists that all saved ranks hold.
    """

    def __init__(
        self,
        state: State,
        objects: Objects,
        view: CheckpointView,
        found: SavedValues,
        own: Mapping[str, Any],
        *,
        lists: Collection[str] = (),
    ) -> None:
        self.state = state
        self.view = view
        self.stored = view.specs
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
        self._values = ValueTensors(objects, view.specs, self.shared, self._small, view.references)
        self._optimizers = OptimizerLeaves(objects, view, self._values)

    def _note_small(self, small: codec.SmallTensor) -> codec.SmallTensor:
        if self._small.setdefault(small.name, small) != small:
            raise FormatError(f"two small tensors among the values are called {small.name!r:.100}")
        return small

    @cached_property
    def amiss(self) -> list[str]:
        """Returns the differences between this state and the stored one, as far as one rank can
        know them.
        """
        self._value_targets()  # what is found there is no state of a parameter
        values = StoredState(self.shared, self.keys, self.own, self.lists)
        amiss = value_problems(self.objects, self.state, values)
        in_optimizers = self._optimizers.problems()
        return [*self.view.problems, *amiss, *self.found.problems, *in_optimizers]

    def claimed(self) -> set[str]:
        """Returns the stored leaves that this state uses."""
        claimed = {name for name, _ in self.view.targets}
        claimed.update(name for name, _ in self._value_targets())
        claimed.update(name for name, _ in self._optimizers.wanted())
        return (claimed & self.view.rest) | self.view.claimed

    def wanted(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yields (leaf, the tensor it is cut like; None: whole) of all that would be filled; makes
        nothing.
        """
        found: dict[str, torch.Tensor | None] = dict(self.view.targets)
        for name, like in self._optimizers.wanted():
            found.setdefault(name, like)
        for name, _ in self._value_targets():
            found.setdefault(name, None)
        for name, like in found.items():
            if name in self.stored and name not in self._small:
                yield name, like

    def in_scope(self, leaf: str) -> bool:
        """True if a stored leaf is below a key of this state, so that some object should use it."""
        is_below = leaf.startswith(tuple(f"{key}." for key in self.state))
        return is_below and self.objects.choice.takes(leaf)

    def make_room(self) -> list[tuple[str, torch.Tensor]]:
        """Returns the tensors to fill, by leaf name; missing ones are made first.

        No two of them share memory.
        """
        with torch.inference_mode(False):  # what is made is trained on later, outside of any
            claims = ClaimedMemory()
            filled = dict(self.view.targets)
            for tensor in filled.values():
                claims.claim(tensor)
            filled.update(self._masters())
            self._optimizers.make_room(filled, claims)
            for name, tensor in self._value_targets():
                if name not in filled:
                    filled[name] = tensor if claims.claim(tensor) else made_anew(tensor)
        self._filled = filled
        return [(name, tensor) for name, tensor in filled.items() if name not in self._small]

    def _value_targets(self) -> list[tuple[str, torch.Tensor]]:
        return self._values.targets({name for name, _ in self.view.targets})

    def _masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors that optimizers update and no module holds."""
        for origin, tensor in self.objects.all_masters():
            if origin.leaf not in self.view.left:
                yield origin.leaf, tensor

    def finish(self, rank: int, *, rank_was_saved: bool, items: Mapping[str, list[Any]]) -> Rewind:
        """Sets everything that is no tensor, and small tensors. Returns the Rewind that can set the
        generators again.

        ``items``: the items of each list for this rank.
        """
        with torch.inference_mode(False), torch.no_grad():
            # Bytes were read into the tensors without torch's knowledge: the version counters are
            # raised for those who compare them (an optimizer with copies of parameters, a graph
            # that still exists).
            torch.autograd.graph.increment_version(list(map(local_of, self._filled.values())))
            for name in self._small.keys() & self._filled.keys():
                fill_small(self._filled[name], self._small[name])
            self._finish()
            rewind = self._set_generators(rank, rank_was_saved)
        for key, found in self.objects.lists.items():
            if key in items:  # or it may be missing, and is
                found[:] = items[key]
        trained = self.objects.trained()
        for key in self.objects.optimizers or self.objects.modules:
            mend(trained[key])
        return rewind

    def _finish(self) -> None:
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
                set_extra_state(module, filled.get(key, {}), is_old=key in objects.old)
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

    def _set_generators(self, rank: int, rank_was_saved: bool) -> Rewind:
        """Sets the generators last, when no other object is still to be set that might draw from
        them.
        """
        setters = []
        for key, generator in self.objects.generators.items():
            if key not in self.own:
                continue
            state = codec.decode(self.own[key])
            set_one = (
                partial(generator.load_state_dict, state)
                if rank_was_saved
                else partial(generator.derive, state, rank)
            )
            set_one()
            setters.append((generator, set_one))
        return Rewind(self.objects, setters, self.shared)

    def _leaf_room(self, leaf: str) -> torch.Tensor | None:
        return self._filled.get(self._values.name(leaf))

    def _small_room(self, small: codec.SmallTensor) -> torch.Tensor:
        return self._filled[small.name]


def refuse(problems: list[str]) -> None:
    """Raises StateMismatch with every difference between states and the stored one, if there are
    any.
    """
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
    """Adds to errors of the user's own code which key of the state it was."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while {key!r} was given what is stored of it")
        raise


# Compares the kind of object under each key, here and in the checkpoint, before anything changes.


_SHARED, _GENERATORS, _LIST = "a value of all ranks", "random generators", "a SplitList"


@dataclass(frozen=True, slots=True)
class StoredState:
    """The values of a checkpoint: ``shared`` by key, decoded, for those of ``keys`` that are
    selected; ``own`` of this rank, encoded; the keys of all ranks' ``lists``.
    """

    shared: Mapping[str, Any]
    keys: Collection[str]
    own: Mapping[str, Any]
    lists: Collection[str]

    def kinds(self) -> dict[str, str]:
        """Returns the kind of object stored under each key, in words."""
        lists = {*self.lists, *stored_lists(self.own, "the values of this rank")}
        return {
            **dict.fromkeys(self.keys, _SHARED),
            **dict.fromkeys(self.own, _GENERATORS),
            **dict.fromkeys(lists, _LIST),
        }


def value_problems(objects: Objects, state: Iterable[str], stored: StoredState) -> Iterator[str]:
    """Yields objects without a value in the checkpoint, lists without an object, and values for
    another kind of object.
    """
    wanted = {
        **dict.fromkeys([*objects.stateful, *objects.plain], _SHARED),
        **dict.fromkeys(objects.generators, _GENERATORS),
        **dict.fromkeys(objects.lists, _LIST),
    }
    kinds = stored.kinds()
    for key, kind in wanted.items():
        if key not in kinds:
            if not objects.choice.allows(key):
                yield f"{key}: not in the checkpoint"
        elif kinds[key] != kind:
            yield f"{key}: {kind} in the state, {kinds[key]} in the checkpoint"
    yield from _extra_state_problems(objects, stored.shared)
    yield from _sampler_problems(objects, stored.shared)
    inside = tuple(f"{key}." for key in state)
    for key in sorted(kinds.keys() - wanted.keys()):
        if kinds[key] == _LIST and key.startswith(inside) and objects.choice.takes_key(key):
            yield f"{key}: in the checkpoint, but nothing in the state takes it"


def _extra_state_problems(objects: Objects, shared: Mapping[str, Any]) -> Iterator[str]:
    for key in objects.modules:
        saved, here = shared.get(key, {}), objects.extra_names(key)
        if not isinstance(saved, dict):
            yield f"{key}: a module in the state, a plain value in the checkpoint"
            continue
        for name in sorted(here - set(saved)):
            if objects.choice.allows(f"{key}.{name}" if name else key):
                continue
            yield f"{key}.{name}: has extra state in the model, but none in the checkpoint"


def _sampler_problems(objects: Objects, shared: Mapping[str, Any]) -> Iterator[str]:
    """Yields samplers whose saved place is in other data than theirs."""
    for key, item in objects.stateful.items():
        if isinstance(item, ResumableSampler) and key in shared:
            yield from (f"{key}: {problem}" for problem in item.problems_with(shared[key]))
