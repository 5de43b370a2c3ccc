"""Sets a state's generators again as a restore set them, and detects where that is needed.

Between a restore and the next batch a script may draw numbers that an unbroken run does not draw
there. In the middle of an epoch a loader does, unless it has a generator of its own: it draws a
seed when it is iterated. What the loop draws for its batch is drawn by both, and says nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from holdfast.data.sampler import ResumableSampler
from holdfast.errors import UsageError
from holdfast.events import Warned, emit
from holdfast.state.objects import Objects
from holdfast.state.rng import Rng


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
            emit(
                Warned(
                    message=(
                        f"{', '.join(keys)}: torch's default generator was moved between the "
                        "restore and "
                        "the next batch, in the middle of an epoch, as a loader does that is "
                        "iterated. A "
                        "run that was never stopped draws nothing there, so that dropout and all "
                        "else that "
                        "is random differs from now on. Give the loader a generator of its own "
                        "(generator=sampler.generator with a ResumableSampler), or call "
                        "restored.rewind() "
                        "once the first batch is there"
                    )
                )
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
