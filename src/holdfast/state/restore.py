"""Restores the user's objects to a stored state: reports differences, makes room, sets values.

``amiss`` changes nothing and lists every difference at once. Leaves of the checkpoint that no rank
uses are found by all ranks together, and ``refuse`` raises both. ``make_room`` makes the tensors an
optimizer lacks. The caller fills the tensors; ``finish`` sets hyperparameters, plain values and
generators when all ranks have verified everything.

Between a restore and the next batch a script may draw numbers that an unbroken run does not draw
there. In the middle of an epoch a loader does, unless it has a generator of its own: it draws a
seed when it is iterated. ``Rewind`` sets the generators again as the restore set them, and detects
where that is needed. What the loop draws for its batch is drawn by both, and says nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch
from msgspec import Struct
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from holdfast.data.sampler import ResumableSampler
from holdfast.errors import FormatError, RestoreError, StateMismatch, UsageError
from holdfast.events import warn
from holdfast.format import values as codec
from holdfast.state import optimizers
from holdfast.state.identity import ClaimedMemory, made_anew
from holdfast.state.lent_tensors import LentTensors, contents, copy_of, is_as_given
from holdfast.state.mapped.checkpoint_view import CheckpointView
from holdfast.state.modules import extra_state, set_extra_state
from holdfast.state.objects import Objects, State
from holdfast.state.restore_targets import OptimizerLeaves, ValueTensors
from holdfast.state.rng import Rng
from holdfast.state.saved_values import SavedValues
from holdfast.state.step_calls import mend
from holdfast.state.tensors import fill_small, local_of
from holdfast.state.values import stored_lists


class Rewind:
    """The generators of one restored state, until its first update.

    ``setters``: each generator object, and the function that sets it to its restored state.
    ``shared``: the values by key that were restored, the places of loaders among them.
    """

    def __init__(
        self,
        objects: Objects,
        setters: Sequence[tuple[Rng, Callable[[], None]]],
        shared: Mapping[str, Any],
    ) -> None:
        self._setters = setters
        self._loads = [rng.loads for rng, _ in setters]
        self._updated = _parameter_ids(objects) if setters else set()
        self._samplers = {
            key: item
            for key, item in objects.stateful.items()
            if isinstance(item, ResumableSampler)
        }
        self._loaders = {
            key: item
            for key, item in objects.stateful.items()
            if isinstance(item, DataLoader) and _is_under_way(shared.get(key))
        }
        self._is_over = False
        if setters:
            for sampler in self._samplers.values():
                sampler.watch_generators()
            _waiting.add(self)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Makes a copy None: a copy belongs to another time or process, from which nothing can be
        set again.
        """
        return type(None), ()

    def again(self) -> None:
        """Sets the generators as the restore did; raises UsageError where there are none, or too
        late.
        """
        if not self._setters:
            raise UsageError(
                "rewind(): no random generators were restored. Put holdfast.Rng() into the state, "
                "and save with it: a run that goes on without it draws other numbers anyhow"
            )
        if self._is_over:
            raise UsageError(
                "rewind(): an optimizer has stepped since the restore, so that the numbers drawn "
                "for that step would be drawn once more. Call it once the first batch is there, "
                "before its forward"
            )
        for _, set_as_restored in self._setters:
            set_as_restored()

    def note_step(self, optimizer: Optimizer) -> None:
        """Notes a step: after the first update of the state the generators are no longer set
        again.
        """
        stepped = (id(p) for group in optimizer.param_groups for p in group["params"])
        if self._updated.isdisjoint(stepped):
            return
        self._is_over = True
        self._updated = set()
        _waiting.discard(self)
        was_set_again = any(
            rng.loads != loads for (rng, _), loads in zip(self._setters, self._loads, strict=True)
        )
        keys = [] if was_set_again else list(self._keys_of_moving())
        if keys:
            warn(
                f"{', '.join(keys)}: torch's default generator was moved between the restore and "
                "the next batch, in the middle of an epoch, as a loader does that is iterated. A "
                "run that was never stopped draws nothing there, so that dropout and all else that "
                "is random differs from now on. Give the loader a generator of its own "
                "(generator=sampler.generator with a ResumableSampler), or call restored.rewind() "
                "once the first batch is there"
            )

    def _keys_of_moving(self) -> Iterator[str]:
        """Yields the data of the state whose loader drew from the restored generators."""
        for key, sampler in self._samplers.items():
            if sampler.saw_generators_moved:
                yield key
        for key, loader in self._loaders.items():
            if getattr(loader, "generator", self) is None:  # one that wraps another may have none
                yield key


def _parameter_ids(objects: Objects) -> set[int]:
    found = {id(p) for module in objects.modules.values() for p in module.parameters()}
    for optimizer in objects.optimizers.values():
        found.update(id(p) for group in optimizer.param_groups for p in group["params"])
    return found


def _is_under_way(state: Any) -> bool:
    """True if a loader that keeps its place itself, as torchdata's does, was inside an epoch."""
    if not isinstance(state, dict) or state.get("_iterator_finished") is not False:
        return False
    snapshot = state.get("_snapshot")  # of a loader with workers
    given = [state.get("_num_yielded"), state.get("_steps_since_snapshot")]
    given.append(snapshot.get("_snapshot_step") if isinstance(snapshot, dict) else None)
    return any(given)


#: Weak references: a state that is never trained on is not kept alive by this list.
_waiting: weakref.WeakSet[Rewind] = weakref.WeakSet()


def _before_step(optimizer: Optimizer, *_: object) -> None:
    if _waiting:
        for each in tuple(_waiting):
            each.note_step(optimizer)


register_optimizer_step_pre_hook(_before_step)


_NONE: Mapping[str, torch.Tensor] = MappingProxyType({})
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
        self.changed: list[str] = []
        """After ``finish``: the keys whose objects changed the tensors they were given."""
        self._lent = LentTensors({}, {})
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
        in_objects = self._object_problems()
        return [*self.view.problems, *amiss, *self.found.problems, *in_optimizers, *in_objects]

    def _object_problems(self) -> Iterator[str]:
        """Yields the objects that ``give`` cannot make of zeros in the stored shapes.

        Made before anything changes, and discarded: an error afterwards leaves a mixture.
        """
        rooms = {**dict(self.view.targets), **dict(self._value_targets())}

        def zeros(leaf: str) -> torch.Tensor | None:
            room = rooms.get(self._values.name(leaf))
            return None if room is None else torch.zeros_like(room.detach())

        def small(found: codec.SmallTensor) -> torch.Tensor:
            made = torch.zeros_like(rooms[found.name].detach())
            if not made.is_meta:
                fill_small(made, found)
            return made

        for key, value in self.encoded.items():
            for one in codec.objects_in(value):
                try:
                    with torch.inference_mode(False), torch.no_grad():
                        codec.decode(one, leaf=zeros, tensor=small, strict=True, makes_objects=True)
                except UsageError as error:
                    yield f"{key}: {error}"

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
            self.changed = self._lent.changed()
        for key, found in self.objects.lists.items():
            if key in items:  # or it may be missing, and is
                found[:] = items[key]
        trained = self.objects.trained()
        for key in self.objects.optimizers or self.objects.modules:
            mend(trained[key])
        return rewind

    def finish_again(
        self,
        keys: Collection[str],
        rank: int,
        *,
        rank_was_saved: bool,
        read_again: Callable[[Sequence[tuple[str, torch.Tensor]]], None],
    ) -> Rewind:
        """Gives the objects of ``keys`` their values once more, in tensors that are no others.

        On all ranks alike: an object may wait for the other ranks while it takes them.
        ``read_again`` fills tensors that were filled before. Returns the Rewind in the place of the
        one before. Raises RestoreError for an object that then shows other values than these: one
        that adds what it is given to what it has has it twice.
        """
        with torch.inference_mode(False), torch.no_grad():
            mine = {key: value for key, value in self.encoded.items() if key in keys}
            before = {key: contents(self._shown(key), key) for key in mine}
            lent = self._lent.of(keys)
            read_again([one for one in lent.items() if one[0] not in self._small])
            for name in self._small.keys() & lent.keys():
                fill_small(lent[name], self._small[name])
            torch.autograd.graph.increment_version(list(map(local_of, lent.values())))
            copies = {name: copy_of(tensor) for name, tensor in lent.items()}
            filled = {key: self._decoded(value, copies) for key, value in mine.items()}
            for key in filled.keys() & self.objects.modules.keys():
                there = self._shown(key)
                filled[key] = {name: one for name, one in filled[key].items() if name in there}
            given = {key: contents(value, key) for key, value in filled.items()}
            self._give(filled)
            amiss = [
                key
                for key, value in given.items()
                if not is_as_given(contents(self._shown(key), key), value, before[key])
            ]
            if amiss:
                raise RestoreError(
                    f"{', '.join(amiss)}: load_state_dict changed the tensors of the state that it "
                    "was given, and so was called once more, with copies; now it shows other "
                    "values than were saved, as an object does that adds what it is given to what "
                    "it has. The checkpoint is as it was: let it set its values, or clone what it "
                    "is given before it resets its own"
                )
            return self._set_generators(rank, rank_was_saved)

    def _shown(self, key: str) -> Any:
        """Returns what an object shows, of a module the extra state that is stored of it."""
        if key not in self.objects.modules:
            return self.objects.stateful[key].state_dict()
        found = extra_state(self.objects.modules[key], is_old=key in self.objects.old)
        return {name: one for name, one in found.items() if name in self.shared[key]}

    def _finish(self) -> None:
        objects = self.objects
        filled = {key: self._decoded(value) for key, value in self.encoded.items()}
        given = (key for key in filled if key in objects.modules or key in objects.stateful)
        self._lent = LentTensors(*self._in_values(given))
        for key, optimizer in objects.optimizers.items():
            if key in filled:
                optimizers.load_values(optimizer, objects.parameters(key), filled[key])
        self._give(filled, self._lent.note_given)
        for key in objects.plain:
            container, name = objects.homes[key]
            if isinstance(container, tuple) or key not in filled:
                continue  # cannot be replaced in place; its tensors were filled. Or it was missing
            container[name] = filled[key]

    def _give(
        self, filled: Mapping[str, Any], then: Callable[[str], None] = lambda _: None
    ) -> None:
        """Gives objects and modules their values, by key, and calls ``then`` after each; one may
        have been allowed to be missing.
        """
        objects = self.objects
        for key, module in objects.modules.items():
            if key in filled:
                with _naming(key):
                    set_extra_state(module, filled[key], is_old=key in objects.old)
                    then(key)
        for key, item in objects.stateful.items():
            if key in filled:
                with _naming(key):
                    item.load_state_dict(filled[key])
                    then(key)

    def _in_values(
        self, keys: Iterable[str]
    ) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, dict[str, torch.Tensor]]]:
        """Returns the filled tensors in the values of keys by leaf: those that an object has, and
        those that were made.
        """
        lent: dict[str, dict[str, torch.Tensor]] = {}
        made: dict[str, dict[str, torch.Tensor]] = {}
        for key in keys:
            lent[key], made[key] = {}, {}
            for name in self._values.names_in(self.shared[key]) & self._filled.keys():
                one = self._filled[name]
                (made if self._values.is_made(name, one) else lent)[key][name] = one
        return lent, made

    def _decoded(self, value: Any, copies: Mapping[str, torch.Tensor] = _NONE) -> Any:
        """Decodes a value with the tensors that were filled, or with ``copies`` of them, and makes
        its objects.
        """

        def leaf_room(leaf: str) -> torch.Tensor | None:
            name = self._values.name(leaf)
            return copies.get(name, self._filled.get(name))

        def small_room(small: codec.SmallTensor) -> torch.Tensor:
            return copies.get(small.name, self._filled[small.name])

        try:
            return codec.decode(
                value, leaf=leaf_room, tensor=small_room, strict=True, makes_objects=True
            )
        except UsageError as error:  # which says that nothing was changed
            raise RestoreError(
                f"{error}. The tensors of the state were filled already: restore again into a "
                "model and an optimizer made anew"
            ) from error

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
            "out of the state to load only a part, and name what is new by allow_missing=.",
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


class StoredState(Struct, frozen=True):
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
