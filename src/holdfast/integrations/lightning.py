"""Keeps and resumes the Trainer of Lightning, at every step and to the bit.

``HoldfastLightningCallback`` goes around five methods of the Trainer's loops: where loaders are
made, where a run and an epoch go on, and where a step is whole, which is after its logs and its
validation. The last step of an epoch is whole when the epoch is.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.utils.data import DataLoader

from holdfast.checkpointer import Checkpointer
from holdfast.errors import NotFound, UsageError
from holdfast.events import warn
from holdfast.integrations.checkpoint_hooks import give_to_hooks, kept_by_hooks
from holdfast.integrations.lightning_limits import (
    batches_an_update,
    check_validation,
    refuse_unknown,
    take_environment,
)
from holdfast.integrations.lightning_logs import logs_state, resume_logs
from holdfast.integrations.lone_checkpoints import (
    is_whole,
    read_alone,
    remove_alone,
    write_alone,
)
from holdfast.integrations.seam import Adapter, LoaderPlace, missing, one_or_all, restore_run
from holdfast.integrations.unsaved import warn_of_unsaved
from holdfast.state.gradient_hooks import warn_of_hooks
from holdfast.state.rng import Rng

if TYPE_CHECKING:
    from holdfast.restore.restore import Restored

try:
    import lightning
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
    from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
    from lightning.pytorch import Callback
    from lightning.pytorch.loops.loop import _Loop
    from lightning.pytorch.loops.progress import _BaseProgress
    from lightning.pytorch.strategies import (
        DDPStrategy,
        ModelParallelStrategy,
        SingleDeviceStrategy,
    )
except ImportError as error:
    raise missing("lightning", error) from error

_LOOP = "lightning"
_KEYS = (_LOOP, "model", "optimizer", "scheduler", "scaler", "rng")
_ADAPTER = Adapter("lightning", "2.6", _KEYS, "the Trainer's")
_STRATEGIES = (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)
#: What ``ckpt_path`` may be for the newest checkpoint of a ``HoldfastCheckpointIO``.
_LAST = "holdfast:last"


class HoldfastLightningCallback(Callback):  # type: ignore[misc]
    """Give it to ``Trainer(callbacks=[...])``: ``fit`` then goes on from the newest generation.

    ``root`` and ``options``: as for ``Checkpointer``. ``state``: more objects and values to be
    kept, by key. ``step``: go on from this step instead, or from a generation as
    "incarnation-step".

    Steps count as ``trainer.global_step``, from 1. Raises UsageError for a strategy that it does
    not know, and for a run that cannot go on at its place in the data.
    """

    checkpointer: Checkpointer | None = None
    """The Checkpointer of the ``fit`` under way, and of the last one."""
    restored: Restored | None = None
    """Where the last ``fit`` went on from; None for one that began."""

    _is_from_environment = False

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        state: Mapping[str, Any] | None = None,
        step: int | str | None = None,
        **options: Any,
    ) -> None:
        self._more = _ADAPTER.check(lightning.__version__, root, state)
        self._root, self._wanted, self._options = root, step, options
        self._around: _AroundLoops | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restores, when everything is ready that the Trainer makes."""
        _check(trainer)
        if self._is_from_environment:
            take_environment(self)
        place = _FitPlace(trainer)
        state: dict[str, Any] = {_LOOP: place}
        self.checkpointer = Checkpointer(self._root, state, **self._options)
        state |= _state_of(trainer, pl_module) | self._more
        warn_of_unsaved(place.without_state(), state.values())
        warn_of_hooks("the model", trainer.strategy.model)  # in DDP, which the state is not
        self.restored = restore_run(self.checkpointer, _LOOP, self._wanted)
        if self.restored is not None:
            place.resume()
        self._around = _AroundLoops(trainer, self, place)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Closes the Checkpointer: promised checkpoints are in storage when ``fit`` returns."""
        self._leave_loops()
        if self.checkpointer is not None:
            self.checkpointer.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Lets the keeper hold what it has, for the next start."""
        self._leave_loops()
        if self.checkpointer is not None:
            self.checkpointer.__exit__(type(exception), exception, exception.__traceback__)

    def _leave_loops(self) -> None:
        if self._around is not None:
            self._around.remove()
        self._around = None


class _AroundLoops:
    """The methods of the Trainer's loops that a run goes around, until ``remove``."""

    def __init__(self, trainer: Any, callback: HoldfastLightningCallback, place: _FitPlace) -> None:
        self._trainer, self._place = trainer, place
        assert callback.checkpointer is not None
        self._checkpointer, self._restored = callback.checkpointer, callback.restored
        self._last_step = trainer.global_step
        self._sanity_steps = trainer.num_sanity_val_steps
        self._sigterm = signal.getsignal(signal.SIGTERM) if "grace_s" in callback._options else None
        if self._restored is not None:
            trainer.num_sanity_val_steps = 0  # it was done, and would be counted again
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._replaced: list[tuple[Any, str]] = []
        self._go_around(fit, "_load_combined_loader_states", self._loaders_made)
        self._go_around(fit, "on_run_start", self._run_started)
        self._go_around(fit, "on_advance_end", self._epoch_ended)
        self._go_around(fit, "on_run_end", self._run_ending)
        self._go_around(epoch.val_loop, "setup_data", self._validation_made)
        self._go_around(epoch, "on_run_start", self._epoch_started)
        self._go_around(epoch, "on_advance_end", self._batch_ended)

    def _go_around(self, loop: Any, name: str, method: Callable[..., None]) -> None:
        setattr(loop, name, partial(method, getattr(loop, name)))
        self._replaced.append((loop, name))

    def remove(self) -> None:
        """Gives the loops their own methods again, and the loaders their classes."""
        for loop, name in self._replaced:
            vars(loop).pop(name, None)
        self._replaced = []
        self._trainer.num_sanity_val_steps = self._sanity_steps
        self._place.release()

    def _loaders_made(self, original: Callable[[], None]) -> None:
        original()
        self._place.take_loaders()

    def _run_started(self, original: Callable[[], None]) -> None:
        original()
        if self._sigterm is not None:  # the Trainer has put its own in front, which ends at once
            signal.signal(signal.SIGTERM, self._sigterm)
        if self._restored is not None and not self._place.is_inside:
            self._place.set_loaders()  # the Trainer has iterated them once, and does again
            self._restored.rewind()

    def _validation_made(self, original: Callable[[], None]) -> None:
        original()
        check_validation(self._trainer.fit_loop.epoch_loop.val_loop)

    def _epoch_started(self, original: Callable[..., None], *given: Any) -> None:
        original(*given)
        if self._restored is not None and self._place.is_inside:
            _set_flags(self._trainer.fit_loop.epoch_loop, is_restarting=False)
            # A scheduler of it is called at the begin of an epoch, which was before.
            self._trainer.accumulate_grad_batches = batches_an_update(self._trainer)
            self._restored.rewind()
        self._restored = None

    def _batch_ended(self, original: Callable[..., None], *given: Any) -> None:
        original(*given)
        loop = self._trainer.fit_loop.epoch_loop
        if not (loop.done or loop._should_accumulate()):
            self._end_step(is_inside=True)

    def _epoch_ended(self, original: Callable[[], None]) -> None:
        original()
        self._end_step(is_inside=False)

    def _run_ending(self, original: Callable[[], None]) -> None:
        self._checkpointer.before_update()  # other callbacks may put other weights in place
        original()

    def _end_step(self, *, is_inside: bool) -> None:
        step = self._trainer.global_step
        if step == self._last_step:
            return
        self._last_step = step
        self._place.end_step(is_inside=is_inside)
        self._checkpointer.step(step)


class _FitPlace:
    """The counters and logs of a ``fit``, and the places of its loaders, as a part of the state."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.is_inside = False
        """True for a step inside of an epoch, False for one with which an epoch was over."""
        self._places: list[LoaderPlace] = []
        self._saved: dict[str, Any] = {}

    # ── loaders ──────────────────────────────────────────────────────────────────────────────────

    def take_loaders(self) -> None:
        """Takes the loaders that the Trainer has made and not iterated yet, and places them."""
        fit = self._trainer.fit_loop
        self.release()
        loaders = fit._combined_loader.flattened
        for loader in loaders:
            # The Trainer does so only when it has iterated them.
            _set_sampler_epoch(loader, fit.epoch_progress.current.processed)
            if not isinstance(loader, DataLoader):
                raise UsageError(
                    f"the Trainer's data are a {type(loader).__qualname__}, whose place cannot be "
                    "found again: give it a DataLoader"
                )
        # To know the last batch, the Trainer fetches one more of all where one has no length.
        runs_ahead = any(sized_len(loader) is None for loader in loaders)
        self._places = [
            LoaderPlace(loader, lambda: None, runs_ahead=runs_ahead) for loader in loaders
        ]
        if self._saved:
            self._check_fits()
            self.set_loaders()

    def set_loaders(self) -> None:
        """Puts the loaders to the places that were restored."""
        for place, saved in zip(self._places, self._saved["loaders"], strict=True):
            place.set(saved)

    def release(self) -> None:
        """Gives the loaders their own classes again."""
        for place in self._places:
            place.release()
        self._places = []

    def end_step(self, *, is_inside: bool) -> None:
        """Notes that a step is whole, and tells samplers of the batches that were trained on."""
        self.is_inside, self._saved = is_inside, {}
        for place in self._places:
            place.advance(self._batches(place), is_over=not is_inside)

    def _batches(self, place: LoaderPlace) -> int:
        return place.given - len(getattr(self._trainer.fit_loop._data_fetcher, "batches", ()))

    def _batch_size(self, loader: Any) -> int:
        """Returns the samples in a batch, of all ranks together; 0 where the loader has none."""
        size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 0
        ranks = getattr(loader.sampler, "num_replicas", self._trainer.world_size)
        return int(size) * int(ranks)

    def _terms(self) -> dict[str, Any]:
        return {
            "batches of": [self._batch_size(place.loader) for place in self._places],
            "batches an update": batches_an_update(self._trainer),
        }

    def _check_fits(self) -> None:
        """Raises UsageError where the place in the data would be another one."""
        then, now = self._saved["terms"], self._terms()
        if len(then["batches of"]) != len(now["batches of"]):
            raise UsageError(
                f"the run was saved with {len(then['batches of'])} loaders, now there are "
                f"{len(now['batches of'])}: train with the same ones"
            )
        others = [
            f"{name} {then[name]}, now {now[name]}" for name in now if then[name] != now[name]
        ]
        if others and self.is_inside and not all(place.sampler for place in self._places):
            raise UsageError(
                f"the run was saved in the middle of an epoch with {'; '.join(others)}: its place "
                "in the data cannot be found. Use the same batch size, accumulation and number of "
                "ranks, or a ResumableSampler"
            )

    # ── as a part of the state ───────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        """Counters, logs and places, as plain values."""
        trainer = self._trainer
        fit = trainer.fit_loop
        return {
            "inside": self.is_inside,
            "loops": _loops_state(fit),
            "stopped": trainer.should_stop,
            "callbacks": {one.state_key: one.state_dict() for one in self._with_state()},
            "hooks": kept_by_hooks(trainer, self._others()),
            "data": {} if trainer.datamodule is None else trainer.datamodule.state_dict(),
            "terms": self._terms(),
            "loaders": [
                place.save(self._batches(place) if self.is_inside else None)
                for place in self._places
            ],
            **logs_state(trainer, is_inside=self.is_inside),
        }

    def load_state_dict(self, found: Mapping[str, Any]) -> None:
        """Takes up what was saved; ``resume`` gives it to the Trainer."""
        self._saved, self.is_inside = dict(found), found["inside"]

    def _others(self) -> list[Any]:
        callbacks = self._trainer.callbacks  # of which one is of Holdfast
        return [one for one in callbacks if not isinstance(one, HoldfastLightningCallback)]

    def _with_state(self) -> Iterator[Any]:
        """Yields the other callbacks that have a state."""
        for one in self._others():
            if type(one).state_dict is not Callback.state_dict:
                yield one

    def without_state(self) -> Iterator[Any]:
        """Yields the other callbacks that give nothing to be saved, in no way."""
        for one in self._others():
            kind = type(one)
            gives = (Callback.state_dict, Callback.on_save_checkpoint)
            if (kind.state_dict, kind.on_save_checkpoint) == gives:
                yield one

    def resume(self) -> None:
        """Gives the Trainer its counters and logs again."""
        trainer, saved = self._trainer, self._saved
        fit = trainer.fit_loop
        fit.load_state_dict(_read_loops(saved["loops"]))
        _set_flags(fit, is_restarting=self.is_inside)
        trainer.should_stop = saved["stopped"]
        give_to_hooks(trainer, self._others(), saved["hooks"])
        for one in self._with_state():
            if one.state_key in saved["callbacks"]:
                one.load_state_dict(saved["callbacks"][one.state_key])
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(saved["data"])
        resume_logs(trainer, saved)
        # A checkpoint of Lightning's own is where a run begins, not where it goes on.
        trainer._checkpoint_connector._loaded_checkpoint = {}


def _loops_state(fit: Any) -> dict[str, Any]:
    """Returns the counters of the loops; the state of loaders is in their places."""
    loaders, fit._combined_loader = fit._combined_loader, None
    try:
        found: dict[str, Any] = {}
        counters: dict[str, Any] = {}
        _add_loop(found, counters, fit, "")
    finally:
        fit._combined_loader = loaders
    return {**found, _COUNTERS: msgspec.json.encode(counters).decode()}


def _read_loops(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what ``_loops_state`` was made of; earlier versions kept counters one by one."""
    loops = dict(found)
    counters: dict[str, Any] = msgspec.json.decode(loops.pop(_COUNTERS, "{}"))
    return loops | counters


def _add_loop(found: dict[str, Any], counters: dict[str, Any], loop: Any, prefix: str) -> None:
    """Adds what the ``state_dict`` of a loop has, which copies numbers in ten times the time."""
    found[f"{prefix}state_dict"] = loop.on_save_checkpoint()
    for name, one in vars(loop).items():
        kind = _kind_of_part(one.__class__)
        if kind == "counters":
            counters[f"{prefix}{name}"] = one
        elif kind == "progress":
            found[f"{prefix}{name}"] = one.state_dict()
        elif kind == "loop":
            _add_loop(found, counters, one, f"{prefix}{name}.")


@cache
def _kind_of_part(kind: type) -> str:
    if issubclass(kind, _BaseProgress):
        # Of the Trainer's own it is known that they have numbers and words alone.
        return "counters" if kind.__module__ == _BaseProgress.__module__ else "progress"
    return "loop" if issubclass(kind, _Loop) else ""


#: One text, as their numbers by name are a tenth of what a small step takes.
_COUNTERS = "counters"


def _set_flags(loop: Any, *, is_restarting: bool) -> None:
    """Tells a loop and those in it whether they go on inside of what they repeat."""
    loop._restarting = is_restarting
    loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    for inner in vars(loop).values():
        if isinstance(inner, _Loop):
            _set_flags(inner, is_restarting=is_restarting)


def _state_of(trainer: Any, module: Any) -> dict[str, Any]:
    state: dict[str, Any] = {"model": module, "rng": Rng()}
    if trainer.optimizers:
        state["optimizer"] = one_or_all(trainer.optimizers)
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    if schedulers:
        state["scheduler"] = one_or_all(schedulers)
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:
        state["scaler"] = scaler
    return state


def _check(trainer: Any) -> None:
    """Raises UsageError for a Trainer that the callback cannot resume."""
    if not isinstance(trainer, lightning.Trainer):
        raise UsageError(
            "HoldfastLightningCallback is for lightning.Trainer, got one of "
            f"{type(trainer).__module__}: import lightning in place of pytorch_lightning"
        )
    if sum(isinstance(one, HoldfastLightningCallback) for one in trainer.callbacks) > 1:
        raise UsageError(
            "the Trainer has two callbacks of Holdfast: give it one (HOLDFAST_ROOT adds one too)"
        )
    refuse_unknown(trainer)
    if not isinstance(trainer.strategy, _STRATEGIES):
        raise UsageError(
            f"HoldfastLightningCallback does not know {type(trainer.strategy).__qualname__}: use a "
            "single device, DDPStrategy, or ModelParallelStrategy in place of FSDPStrategy"
        )


def callbacks() -> list[Callback]:
    """Returns the callback of the root in HOLDFAST_ROOT; none where that is not set.

    Lightning calls it for each Trainer, by the entry point ``lightning.pytorch.callbacks_factory``.
    """
    root = os.environ.get("HOLDFAST_ROOT")
    if not root:
        return []
    callback = HoldfastLightningCallback(root)
    callback._is_from_environment = True
    return [callback]


class FabricWatch:
    """Says at the first update of a Fabric with HOLDFAST_ROOT that it has no fabric_checkpointer.

    A loop of Fabric is the user's own: which objects it is made of, and when a step of it is whole,
    is what ``fabric_checkpointer`` is told.
    """

    def __init__(self, root: str) -> None:
        self._root, self.is_saved = root, False

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        """Called by Fabric after each step of an optimizer that it has set up."""
        if not self.is_saved:
            self.is_saved = True  # it is said once
            warn(
                f"HOLDFAST_ROOT={self._root}, and no fabric_checkpointer was made for "
                "this Fabric: unless a Checkpointer of your own saves it, nothing does. Make "
                "fabric_checkpointer(fabric, root, state) after fabric.setup(), and call "
                "its restore() and step()"
            )


def fabric_callbacks() -> list[FabricWatch]:
    """Returns the watch of the root in HOLDFAST_ROOT; none where that is not set.

    Fabric calls it for each Fabric, by the entry point ``lightning.fabric.callbacks_factory``.
    """
    root = os.environ.get("HOLDFAST_ROOT")
    return [FabricWatch(root)] if root else []


class HoldfastCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """The plugin for ``ModelCheckpoint(dirpath=root)``: its checkpoints, in Holdfast's format.

    Each is a root of its own under the name that ModelCheckpoint gives it, durable when ``save``
    returns, and read without pickle. ``ckpt_path="holdfast:last"`` is the newest of them.

    ``root``: the directory in which they lie.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        _ADAPTER.check_version(lightning.__version__)
        self._root = Path(root).expanduser().absolute()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save ``checkpoint`` at ``path``; rank 0 alone does it."""
        write_alone(self._below_root(path), checkpoint, int(checkpoint["global_step"]))

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load the checkpoint at ``path``, on the CPU, or the newest one for "holdfast:last"."""
        checkpoint: dict[str, Any] = read_alone(self._newest() if str(path) == _LAST else path)
        return checkpoint

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the checkpoint at ``path``."""
        remove_alone(self._below_root(path))

    def _below_root(self, path: str | os.PathLike[str]) -> Path:
        found = Path(path).absolute()
        if self._root not in found.parents:
            raise UsageError(
                f"{found} does not lie in {self._root}: use "
                f"ModelCheckpoint(dirpath={str(self._root)!r})"
            )
        return found

    def _newest(self) -> Path:
        found = [one for one in self._root.glob("*") if is_whole(one)]
        if not found:
            raise NotFound(f"{_LAST}: {self._root} has no checkpoint", root=str(self._root))
        return max(found, key=lambda one: one.stat().st_mtime)


def fabric_checkpointer(
    fabric: Fabric, root: str | os.PathLike[str], state: dict[str, Any], **options: Any
) -> Checkpointer:
    """Make a Checkpointer for a loop of Fabric, by the names that its objects had before ``setup``.

    Call it after ``fabric.setup``, on all ranks. ``state``: the objects that ``setup`` and
    ``setup_dataloaders`` returned, and others, by key; without ``holdfast.Rng()`` one is added as
    "rng". ``root`` and ``options``: as for ``Checkpointer``.
    """
    _ADAPTER.check(lightning.__version__, root)
    if not isinstance(fabric, Fabric):
        raise UsageError(f"fabric_checkpointer() takes a Fabric, got a {type(fabric).__qualname__}")
    for key, item in state.items():
        if isinstance(item, torch.optim.Optimizer) and not hasattr(item, "_strategy"):
            raise UsageError(
                f"{key} was not given to fabric.setup(): call fabric_checkpointer() after it, with "
                "what it returned"
            )
        if type(item).__name__ == "_FabricDataLoader":
            state[key] = item._dataloader
    if not any(isinstance(item, Rng) for item in state.values()):
        state["rng"] = Rng()
    found = Checkpointer(root, state, **options)
    for one in fabric._callbacks:
        if isinstance(one, FabricWatch):
            one.is_saved = True
    return found
