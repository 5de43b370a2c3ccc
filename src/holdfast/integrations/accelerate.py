"""Keeps and resumes loops of accelerate, at every optimizer step and to the bit.

``attach`` takes all that the Accelerator prepared or registered, restores it, and places the
loaders: the next ``for`` over the loader that was under way goes on behind the last batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.data.sampler import ResumableSampler
from holdfast.errors import UsageError
from holdfast.events import warn
from holdfast.integrations.attached import AttachedCheckpointer, check_free, present
from holdfast.integrations.seam import Adapter, LoaderPlace, missing, one_or_all
from holdfast.state.rng import Rng

if TYPE_CHECKING:
    from holdfast.capture.handles import SaveHandle
    from holdfast.integrations.deepspeed import EngineParts
    from holdfast.restore.restore import Restored

try:
    import accelerate
    from accelerate import Accelerator
    from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
except ImportError as error:
    raise missing("accelerate", error) from error

_LOOP = "accelerate"
_KEYS = (_LOOP, "model", "optimizer", "scheduler", "scaler", "registered", "engine", "rng")
_ADAPTER = Adapter("accelerate", "1.15", _KEYS, "the Accelerator's")
_NO_ADAPTER = (DistributedType.MEGATRON_LM, DistributedType.XLA)


def attach(
    accelerator: Accelerator,
    root: str | os.PathLike[str],
    *,
    state: Mapping[str, Any] | None = None,
    step: int | str | None = None,
    **options: Any,
) -> AcceleratorCheckpointer:
    """Attach a Checkpointer to an Accelerator, and go on from the newest generation of the run.

    Call it after ``prepare`` and ``register_for_checkpointing``, on all ranks. ``root`` and
    ``options``: as for ``Checkpointer``. ``state``: more objects and values to be kept, by key.
    ``step``: go on from this step instead, or from a generation as "incarnation-step".

    ``accelerator.save_state()`` without a directory then saves a durable checkpoint,
    ``accelerator.load_state()`` restores before the first step, and ``accelerator.end_training()``
    closes. Raises UsageError where nothing is prepared or a Checkpointer is attached already.
    """
    more = _ADAPTER.check(accelerate.__version__, root, state)
    _check(accelerator)
    return AcceleratorCheckpointer(accelerator, root, more, step, options)


class AcceleratorCheckpointer(AttachedCheckpointer):
    """A Checkpointer attached to an Accelerator, made by ``attach``."""

    def __init__(
        self,
        accelerator: Accelerator,
        root: str | os.PathLike[str],
        more: Mapping[str, Any],
        step: int | str | None,
        options: Mapping[str, Any],
    ) -> None:
        self._accelerator = accelerator
        self._updates: _Updates | _EngineUpdates | None = None
        self._engine = _parts_of_engine(accelerator)
        self._loop = _AcceleratorLoop(accelerator, self._settle)
        self._prepared = _prepared(accelerator)
        parts = {**present(self._prepared_state()), "rng": Rng(), **more}
        super().__init__(accelerator, root, _LOOP, self._loop, parts, options)
        self.restore(step)
        if accelerator._save_model_state_pre_hook:
            warn(
                "hooks of register_save_state_pre_hook() are not called by a "
                "Checkpointer: give the objects that they save (an average of the weights, "
                "say) to register_for_checkpointing() or in state={...}"
            )
        self._updates = (
            _Updates(accelerator._optimizers)
            if self._engine is None
            else _EngineUpdates(_engine_of(accelerator))
        )
        self._take_over()

    @property
    def epoch(self) -> int:
        """The number of the epoch under way, or of the next one: from 0."""
        return self._loop.epoch

    def step(self, step: int | None = None) -> SaveHandle | None:
        """Call at the end of each pass of the loop, on all ranks; saves when a policy says so.

        Where no prepared optimizer has stepped since the last call, as between the passes of an
        accumulation, it does nothing. ``step``: the number of the optimizer step that has ended; by
        default they are counted, from 1. See ``Checkpointer.step``.
        """
        assert self._updates is not None
        if not (self._accelerator.sync_gradients and self._updates.take()):
            return None
        if _prepared(self._accelerator) != self._prepared:
            raise UsageError(
                "the Accelerator has prepared or registered objects since attach(), which would "
                "not be saved: call attach() after them"
            )
        self._loop.end_step(step)
        return super().step(self._loop.steps)

    def save(self) -> SaveHandle | None:
        """Save the last step as a durable checkpoint; None where it is the restored one."""
        if not self._accelerator.sync_gradients or self._loop.has_moved():
            raise UsageError(
                "save_state() in the middle of an accumulation: gradients are not saved. Call it "
                "when an optimizer has stepped, after step(), and before the next batch"
            )
        return super().save()

    def restore(self, step: int | str | None = None) -> Restored | None:
        """Restore everything again, before the first step; ``attach`` does it by itself."""
        found = self._restore(step, self._loop.check_fits)
        if found is not None:
            if self._engine is not None:
                self._engine.publish(found)
            if self._updates is not None:
                self._updates.take()  # an engine has another count now
            self._loop.place()
        return found

    def _shown(self) -> AbstractContextManager[None]:
        return nullcontext() if self._engine is None else self._engine.shown()

    def _prepared_state(self) -> dict[str, Any]:
        accelerator = self._accelerator
        schedulers = [getattr(one, "scheduler", one) for one in accelerator._schedulers]
        optimizers = [getattr(one, "optimizer", one) for one in accelerator._optimizers]
        models, scaler, counters = list(accelerator._models), accelerator.scaler, None
        engine = self._engine
        if engine is not None:
            models, optimizers = (
                list(map(engine.saved, models)),
                list(map(engine.saved, optimizers)),
            )
            scaler, counters = engine.scaler, engine.counters
            of_settings = _engine_of(accelerator).lr_scheduler  # nobody may have prepared it
            if of_settings is not None and not any(one is of_settings for one in schedulers):
                schedulers.append(of_settings)
        return {
            "model": one_or_all(models),
            "optimizer": one_or_all(optimizers) if optimizers else None,
            "scheduler": one_or_all(schedulers) if schedulers else None,
            "scaler": scaler,
            "registered": list(accelerator._custom_objects) or None,
            "engine": counters,
        }

    def _settle(self) -> None:
        """Sets the generators as they were restored, unless an update has drawn from them."""
        if self.restored is not None and self.steps == self.restored.step:
            self.restored.rewind()

    def _take_over(self) -> None:
        accelerator = self._accelerator
        save_state, load_state = accelerator.save_state, accelerator.load_state
        end_training = accelerator.end_training

        def save(output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
            return self.save() if output_dir is None else save_state(output_dir, *args, **kwargs)

        def load(input_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
            return self.restore() if input_dir is None else load_state(input_dir, *args, **kwargs)

        def end() -> None:
            self.close()
            end_training()

        accelerator.save_state, accelerator.load_state = save, load
        accelerator.end_training = end

    def _hand_back(self) -> None:
        self._loop.release()
        if self._updates is not None:
            self._updates.release()
        for name in ("save_state", "load_state", "end_training"):
            vars(self._accelerator).pop(name, None)


class _Updates:
    """Says whether a prepared optimizer has stepped, or its scaler has skipped a step."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = list(optimizers)
        self._has_stepped = False
        self._hooks = [
            getattr(one, "optimizer", one).register_step_post_hook(self._note)
            for one in self._optimizers
        ]
        self._scaled = [one for one in self._optimizers if getattr(one, "scaler", None) is not None]
        for one in self._scaled:
            one.step = partial(self._step_or_skip, one.step)

    def take(self) -> bool:
        """True if one has since this was called last; always where no optimizer is prepared."""
        found, self._has_stepped = self._has_stepped, False
        return found or not self._optimizers

    def release(self) -> None:
        """Gives the optimizers their own methods again."""
        for hook in self._hooks:
            hook.remove()
        for one in self._scaled:
            vars(one).pop("step", None)

    def _note(self, *_: Any) -> None:
        self._has_stepped = True

    def _step_or_skip(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        self._has_stepped |= bool(self._scaled[0].gradient_state.sync_gradients)
        return found


class _EngineUpdates:
    """Says whether an engine of DeepSpeed has counted an update, one that was skipped too."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._taken = engine.global_steps

    def take(self) -> bool:
        """True if it has since this was called last."""
        before, self._taken = self._taken, self._engine.global_steps
        return bool(before != self._taken)

    def release(self) -> None:
        """Nothing was put into the engine."""


class _PlacedLoader(NamedTuple):
    """A loader as the Accelerator prepared it, and its place: no loader by itself, in which each
    save would search for optimizers that nobody stores.
    """

    loader: Any
    place: LoaderPlace

    def batches(self) -> int:
        """The batches of a loader under way that the loop has had: one less than were fetched."""
        return self.place.given if self.loader.end_of_dataloader else self.place.given - 1


class _AcceleratorLoop:
    """The counters of the loop, and the places of its loaders, as a part of the state."""

    def __init__(self, accelerator: Any, settle: Any) -> None:
        self._accelerator = accelerator
        self._loaders = [
            _PlacedLoader(one, LoaderPlace(one.base_dataloader, settle, runs_ahead=True))
            for one in accelerator._dataloaders
        ]
        for loader, place in self._loaders:
            place.skips_finished = partial(_pass_epoch, loader)
            if hasattr(loader, "state_dict"):
                place.own_state = loader.state_dict  # it knows what it has fetched ahead
        self.steps = 0
        self._main = 0
        """The number of the loader that was under way at the last step."""
        self._counted: tuple[int, int] | None = None
        """The iteration and batch of the main loader at the last step that was counted."""
        self._saved: dict[str, Any] = {}

    @property
    def epoch(self) -> int:
        return int(self._loaders[self._main].loader.iteration) if self._loaders else 0

    def end_step(self, step: int | None) -> None:
        """Counts an optimizer step, and tells samplers of the batches that were trained on."""
        self.steps = self.steps + 1 if step is None else step
        under_way = [n for n, one in enumerate(self._loaders) if self._is_under_way(one)]
        if under_way:
            self._main = under_way[0]
        for one in (self._loaders[number] for number in under_way):
            one.place.advance(one.batches(), is_over=one.loader.end_of_dataloader)
        self._counted = self._main_place()

    def has_moved(self) -> bool:
        """True where the main loader has given batches since the last step that was counted."""
        return self._counted is not None and self._counted != self._main_place()

    def _main_place(self) -> tuple[int, int] | None:
        if not self._loaders:
            return None
        main = self._loaders[self._main]
        return main.place.begun, main.batches()

    def release(self) -> None:
        """Gives loaders their own classes again."""
        for _, place in self._loaders:
            place.release()

    def _is_under_way(self, one: _PlacedLoader) -> bool:
        active = self._accelerator.gradient_state.dataloader_references
        return one.place.is_open and any(each is one.loader for each in active)

    # ── as a part of the state ───────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        """Counters, places and what they depend on, as plain values."""
        return {
            "steps": self.steps,
            "main": self._main,
            "accumulation": self._accelerator.gradient_accumulation_steps,
            "loaders": list(map(self._save, self._loaders)),
        }

    def _save(self, one: _PlacedLoader) -> dict[str, Any]:
        loader, place = one
        is_inside = self._is_under_way(one)
        batches = one.batches() if is_inside else None
        is_over = is_inside and bool(loader.end_of_dataloader)
        return {
            **place.save(batches, is_over=is_over),
            "epoch": loader.iteration,
            "batch": _total_batch(loader),
        }

    def load_state_dict(self, found: Mapping[str, Any]) -> None:
        """Takes up the counters; ``place`` does the rest."""
        self._saved = dict(found)
        self.steps, self._main = found["steps"], found["main"]

    def check_fits(self) -> None:
        """Raises UsageError where the place in the data would be another one."""
        saved, now = self._saved["loaders"], self._loaders
        if len(saved) != len(now):
            raise UsageError(
                f"the run was saved with {len(saved)} prepared loaders, now there are "
                f"{len(now)}: prepare the same ones, in the same order"
            )
        then, steps = self._saved["accumulation"], self._accelerator.gradient_accumulation_steps
        for place, (loader, _) in zip(saved, now, strict=True):
            if not place["batches"] or place["over"] or place["sampler"] is not None:
                continue
            batch, size = place["batch"], _total_batch(loader)
            if batch != size or then != steps:
                raise UsageError(
                    "the run was saved in the middle of an epoch with batches of "
                    f"{batch} samples on all ranks together and {then} of them an update, now "
                    f"{size} and {steps}: its place in the data cannot be found. Use the same "
                    "batch size, accumulation and number of ranks, or a ResumableSampler"
                )

    def place(self) -> None:
        """Puts the loaders to their places."""
        self._accelerator.step = 0  # what is saved is the end of an accumulation
        for (loader, place), saved in zip(self._loaders, self._saved["loaders"], strict=True):
            loader.iteration = saved["epoch"]
            place.set(saved)


def _pass_epoch(loader: Any) -> None:
    loader.iteration += 1


def _total_batch(loader: Any) -> int:
    """Returns the samples in a batch, of all ranks together; 0 where the loader does not know."""
    try:
        return int(loader.total_batch_size)
    except (AttributeError, TypeError):
        return int(loader.batch_size or 0) * int(PartialState().num_processes)


def _engine_of(accelerator: Any) -> Any:
    return accelerator.deepspeed_engine_wrapped.engine


def _parts_of_engine(accelerator: Any) -> EngineParts | None:
    """Returns what is saved of an engine of DeepSpeed; None where there is none."""
    if accelerator.distributed_type is not DistributedType.DEEPSPEED:
        return None
    from holdfast.integrations.deepspeed import EngineParts

    return EngineParts(_engine_of(accelerator))


def _prepared(accelerator: Any) -> list[int]:
    kinds = ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects")
    return [id(one) for kind in kinds for one in getattr(accelerator, kind)]


def _check(accelerator: Any) -> None:
    """Raises UsageError for an Accelerator that nothing can be attached to."""
    if not isinstance(accelerator, Accelerator):
        raise UsageError(
            f"attach() takes an Accelerator, got a {type(accelerator).__qualname__}: give what "
            "Accelerator() returned"
        )
    check_free(accelerator)
    if accelerator.distributed_type in _NO_ADAPTER:
        raise UsageError(
            f"attach() does not know {accelerator.distributed_type.value} inside accelerate: its "
            "optimizer is not torch's"
        )
    if not accelerator._models:
        raise UsageError("attach() found no model: call it after accelerator.prepare(model, ...)")
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        from holdfast.integrations.deepspeed import check_engine

        check_engine(_engine_of(accelerator))
    for loader in accelerator._dataloaders:
        _check_loader(loader, accelerator.num_processes)


def _check_loader(loader: Any, ranks: int) -> None:
    if ranks > 1 and isinstance(loader, DataLoaderDispatcher):
        raise UsageError(
            "a loader reads on rank 0 for all ranks, so that no other rank knows its place: use "
            "DataLoaderConfiguration(dispatch_batches=False)"
        )
    sampler = loader.batch_sampler
    if isinstance(sampler, BatchSamplerShard) and isinstance(
        sampler.batch_sampler, ResumableSampler
    ):
        raise UsageError(
            "a ResumableSampler divides its samples over the ranks, and prepare() divided them "
            "again: leave its loader out of prepare(), and put the sampler into state="
        )
