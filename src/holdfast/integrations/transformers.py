"""Saves and resumes the Trainer of transformers, at every step and to the bit.

``HoldfastTrainer`` is ready made; ``HoldfastMixin`` goes before any other Trainer. Both put four
methods of the Trainer's loop around its own: where its counters are made, where its objects are
ready, where an epoch begins, and where a step is whole: after logging and evaluation, so that
neither is lost or done twice.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from holdfast.checkpointer import Checkpointer
from holdfast.errors import NotFound, UsageError
from holdfast.events import warn
from holdfast.integrations.orders import tensor_of, text_of
from holdfast.integrations.seam import Adapter, missing, restore_loop_first
from holdfast.integrations.trainer_logs import (
    counts_of_trl,
    give_counts_of_trl,
    log_entries,
    padded,
)
from holdfast.integrations.unsaved import warn_of_unsaved
from holdfast.state.rng import Rng

if TYPE_CHECKING:
    from holdfast.restore.restore import Restored

try:
    import transformers
    from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise missing("transformers", error) from error

#: The methods of a Trainer's loop that the mixin goes around; those before 5.0 have other ones.
_NEEDED = {
    "_init_training_state": {"max_steps", "num_update_steps_per_epoch"},
    "_prepare_for_training": {"max_steps", "train_dataloader"},
    "_run_epoch": {"epoch", "num_update_steps_per_epoch", "resume_from_checkpoint"},
    "_maybe_log_save_evaluate": {"tr_loss"},
    "_load_rng_state": {"checkpoint"},
}
_LOOP = "trainer"
_KEYS = (_LOOP, "model", "optimizer", "scheduler", "scaler", "rng")
_ADAPTER = Adapter("transformers", "5.23", _KEYS, "the Trainer's")
_RESUMED = "holdfast"
#: Of which files the Trainer writes one, under FSDP too: without it another object is begun with.
_FILES = {
    "optimizer": ("optimizer.pt", "optimizer.bin", "optimizer_0/.metadata"),
    "scheduler": ("scheduler.pt",),
}


class HoldfastMixin:
    """Goes before a Trainer: ``class MyTrainer(HoldfastMixin, SFTTrainer)``.

    ``holdfast``: the root, as for ``Checkpointer``. ``holdfast_options``: other arguments of
    ``Checkpointer``, by name. ``state``: more objects and values to be kept, by key.

    ``train()`` goes on from the newest generation that the root or memory has; with
    ``resume_from_checkpoint="ROOT@1-39"`` from that one. Steps count as the Trainer counts, from 1.
    """

    checkpointer: Checkpointer | None = None
    """The Checkpointer of the ``train()`` under way, and of the last one."""

    # Of the Trainer behind this class.
    args: Any
    state: Any
    control: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    callback_handler: Any
    is_deepspeed_enabled: bool
    add_callback: Any

    def __init__(
        self,
        *args: Any,
        holdfast: str | os.PathLike[str],
        holdfast_options: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        _check_version(type(self))
        more = _ADAPTER.check(transformers.__version__, holdfast, state)
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled:
            raise UsageError(
                "the Trainer trains by an engine of DeepSpeed, whose optimizer has its own "
                "partitions: write the loop by hand, with holdfast.integrations.deepspeed, or "
                "train with FSDP2 (fsdp_version 2)"
            )
        if self.args.auto_find_batch_size:
            raise UsageError(
                "auto_find_batch_size begins again with another batch size in the middle of a "
                "run, so that no step of it can be resumed: find the size first, and set "
                "per_device_train_batch_size"
            )
        if self.args.optim.endswith("layerwise"):
            raise UsageError(
                f"optim={self.args.optim.value!r} updates inside of the backward, by an optimizer "
                "for each parameter that the Trainer does not have: take one without _layerwise"
            )
        self._hf_root, self._hf_options = os.fspath(holdfast), dict(holdfast_options or {})
        self._hf_more = more
        self._hf_loop = _Loop(self)
        self._hf_restored: Restored | None = None
        self._hf_wanted: str | None = None
        self.add_callback(_LoopCallback(self))

    # ── the loop ─────────────────────────────────────────────────────────────────────────────────

    def train(
        self, resume_from_checkpoint: str | os.PathLike[str] | bool | None = None, **kwargs: Any
    ) -> Any:
        """Train, from where the root says; see ``Trainer.train``.

        ``resume_from_checkpoint``: a generation of the root, as ``ROOT@1-39``; True: raise NotFound
        if the root has none; the directory of a checkpoint of the Trainer's own: begin there if
        the root has none.
        """
        if kwargs.get("trial") is not None:
            raise UsageError(
                "a search over hyperparameters trains many runs, and a root is one: search with "
                "the Trainer itself, and train the best by this class"
            )
        resume = resume_from_checkpoint
        text = "" if resume is None or isinstance(resume, bool) else os.fspath(resume)
        own_root, _, generation = text.rpartition("@")  # runs/x@1-39
        is_ours = resume == self._hf_root or own_root == self._hf_root
        self._hf_wanted = generation if is_ours and own_root else None
        self._hf_must = resume is True or is_ours
        self._hf_restored = None
        foreign = text if not is_ours and os.path.isdir(text) else None
        self._hf_gone = None if is_ours or foreign else text or None  # removed since the begin?
        lacks = [what for what, names in _FILES.items() if foreign and not _has(foreign, names)]
        if lacks:
            raise UsageError(
                f"{foreign} has no {' and no '.join(lacks)}, as save_only_model=True leaves it: "
                "the Trainer would begin with others in silence: load the model from there by "
                "from_pretrained(), and begin a run"
            )
        try:
            found = super().train(resume_from_checkpoint=foreign, **kwargs)  # type: ignore[misc]
        except BaseException:
            if self.checkpointer is not None:
                self.checkpointer.__exit__(*sys.exc_info())
            raise
        assert self.checkpointer is not None
        self.checkpointer.close()
        return found

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        begin = super()._init_training_state  # type: ignore[misc]
        found: tuple[int, int] = begin(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        loop = self._hf_loop
        is_stream = num_train_epochs >= sys.maxsize  # the Trainer's word for data without a length
        loop.begin(num_update_steps_per_epoch, *found, is_stream=is_stream)
        self._hf_state: dict[str, Any] = {_LOOP: loop}
        self.checkpointer = Checkpointer(self._hf_root, self._hf_state, **self._hf_options)
        restored = restore_loop_first(
            self.checkpointer, _LOOP, self._hf_wanted, adapter="transformers"
        )
        if restored is None:
            if self._hf_must or self._hf_gone:
                what = (
                    f"there is no directory {self._hf_gone}" if self._hf_gone else "it asks for one"
                )
                raise NotFound(
                    f"resume_from_checkpoint: {what}, and {self._hf_root} has no checkpoint: "
                    "leave it out to begin a run",
                    root=self._hf_root,
                )
            return found
        self._hf_restored = restored
        loop.check_fits()
        self._hf_terms = (max_steps, num_train_epochs, trial)
        place = self._take_terms()
        if place[0] >= num_train_epochs and self.state.global_step < max_steps:
            warn(_over_text(self._hf_root, self.state.global_step, max_steps))
        return place

    def _take_terms(self) -> tuple[int, int]:
        """Gives the restored counters the terms of this run: its length, and its intervals.

        Returns the epoch to go on with, and the batches of it that were trained on.
        """
        max_steps, num_train_epochs, trial = self._hf_terms
        self.state.compute_steps(self.args, max_steps)
        self.state.init_training_references(self, max_steps, num_train_epochs, trial)
        return self._hf_loop.place(max_steps, num_train_epochs)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[Any, Any]:
        own = None if self._hf_restored is not None else resume_from_checkpoint
        model, loader = super()._prepare_for_training(max_steps, train_dataloader, own)  # type: ignore[misc]
        self._hf_state.update(
            model=model,
            optimizer=self.optimizer,
            scheduler=getattr(self.lr_scheduler, "scheduler", self.lr_scheduler),
            rng=Rng(),
            **self._hf_more,
        )
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None:
            self._hf_state["scaler"] = scaler
        callbacks = self.callback_handler.callbacks
        known = _exportable(self)
        warn_of_unsaved(
            (one for one in callbacks if not any(one is each for each in known)),
            self._hf_state.values(),
        )
        if self._hf_restored is not None:
            assert self.checkpointer is not None
            generation = f"{self._hf_restored.generation}"
            self._hf_restored = self.checkpointer.restore(generation)
            self._take_terms()
        return model, loader

    def _run_epoch(self, **given: Any) -> Any:
        loop, restored = self._hf_loop, self._hf_restored
        loop.epoch = given["epoch"]
        if restored is not None:
            given["resume_from_checkpoint"] = _RESUMED
        if restored is not None and given["epoch"] == given["epochs_trained"]:
            if given["steps_trained_in_current_epoch"]:
                # The order of the data may be drawn from it; the Trainer rewinds after the skip.
                torch.set_rng_state(tensor_of(loop.generator))
            else:
                restored.rewind()
        loop.generator = text_of(torch.get_rng_state())
        return super()._run_epoch(**given)  # type: ignore[misc]

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self.checkpointer is not None:
            self.checkpointer.before_update()  # the best model may be loaded over the last one
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint != _RESUMED:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
        elif self._hf_restored is not None:
            self._hf_restored.rewind()

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        assert self.checkpointer is not None
        loop = self._hf_loop
        if loop.passes_step(self.state.global_step, self.control):
            self.checkpointer.step(self.state.global_step)


class _Loop:
    """The Trainer's counters, the place in its loop, and the state of its callbacks."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.epoch = 0
        self._updates_an_epoch = 1
        self._first_step, self._updates_before = 0, 0
        self._last_step = -1
        self._is_stream = self._is_stopped = False
        self._is_saved = True
        self.has_batches = True
        """Whether the epoch has had a batch."""
        self.evaluated_step = -1
        """The step of the last evaluation."""
        self._saved: dict[str, Any] = {}
        self._forget_log()
        self.generator: Any = text_of(torch.get_rng_state())
        """The state of torch's generator at the begin of the epoch."""

    def begin(self, updates_an_epoch: int, epoch: int, batches: int, *, is_stream: bool) -> None:
        """Begins at this epoch, after so many batches of it.

        ``is_stream``: the data have no length, and an epoch is the whole run.
        """
        self.epoch, self._updates_an_epoch = epoch, updates_an_epoch
        self._is_stream, self._is_stopped = is_stream, False
        self._is_saved, self.evaluated_step = True, -1
        self._forget_log()
        self._updates_before = batches // self._trainer.args.gradient_accumulation_steps
        self._first_step = self._last_step = self._trainer.state.global_step
        self._saved = {}

    def _forget_log(self) -> None:
        self._logged, self._log = 0, b""
        self._log_leaf = torch.empty(0, dtype=torch.uint8)

    def passes_step(self, step: int, control: Any) -> bool:
        """Notes a call at the end of a step or of an epoch; True when the step is whole.

        The last step of an epoch is whole when the epoch is: the Trainer logs and evaluates then.
        """
        stops = bool(control.should_training_stop)
        is_last = self._updates() >= self._updates_an_epoch
        if step != self._last_step:
            self._last_step = step
            ends = stops and (step >= self._trainer.state.max_steps or self._is_end(step))
            self._is_saved = not (is_last or control.should_epoch_stop or ends)
            return self._is_saved
        self._is_stopped = stops and self._is_end(step)
        is_over = is_last and not self._is_stream
        # A run that was stopped in the middle of an epoch goes on there when it is started again.
        if is_over or control.should_epoch_stop or not stops:
            self.epoch, self._first_step, self._updates_before = self.epoch + 1, step, 0
        elif self._is_saved and not self._is_stopped:
            return False  # what is evaluated because of the stop is no part of this step
        self._is_saved = True
        return step > 0

    def _is_end(self, step: int) -> bool:
        """True if a run that stops has ended: its data have, or it learns no more.

        Any other callback may stop a run that is to go on, as one for signals or for time does.
        """
        callbacks = self._trainer.callback_handler.callbacks
        stoppers = (one for one in callbacks if isinstance(one, EarlyStoppingCallback))
        is_spent = any(
            one.early_stopping_patience_counter >= one.early_stopping_patience for one in stoppers
        )
        is_empty = not (self.has_batches or self._updates())
        return is_empty or (is_spent and self.evaluated_step == step)

    def _updates(self) -> int:
        step: int = self._trainer.state.global_step
        return self._updates_before + step - self._first_step

    def place(self, max_steps: int, epochs: int) -> tuple[int, int]:
        """Returns the epoch to go on with, and the batches of it that were trained on.

        A run that has ended is over, unless it is to be longer now.
        """
        trainer, saved = self._trainer, self._saved
        is_same = saved.get("stopped") and saved["state"]["max_steps"] == max_steps
        if is_same or trainer.state.global_step >= max_steps:
            return epochs, 0
        if trainer.args.ignore_data_skip:
            self._updates_before = 0
            return self.epoch, 0
        return self.epoch, self._updates_before * trainer.args.gradient_accumulation_steps

    # ── as a part of the state ───────────────────────────────────────────────────────────────────

    def _terms(self) -> dict[str, int]:
        trainer = self._trainer
        return {
            "total batch size": trainer.get_total_train_batch_size(trainer.args),
            "updates an epoch": 0 if self._is_stream else self._updates_an_epoch,
        }

    def state_dict(self) -> dict[str, Any]:
        """The counters as plain values, and the log as one tensor."""
        trainer = self._trainer
        plain = {
            field.name: getattr(trainer.state, field.name)
            for field in dataclasses.fields(trainer.state)
            if field.name not in ("log_history", "stateful_callbacks")
        }
        history = trainer.state.log_history
        if len(history) != self._logged:  # entries are only ever added
            added = (json.dumps(entry).encode() + b"\n" for entry in history[self._logged :])
            self._log, self._logged = self._log + b"".join(added), len(history)
            self._log_leaf = torch.frombuffer(padded(self._log), dtype=torch.uint8)
        loss = getattr(trainer, "_tr_loss", None)
        return {
            "state": plain,
            "callbacks": _callback_states(trainer),
            "log": self._log_leaf,
            "generator": self.generator,
            "stopped": self._is_stopped,
            "epoch": self.epoch,
            "updates": self._updates(),
            "terms": self._terms(),
            # A tensor on a GPU is stored once for all ranks: each has a key of its own.
            "loss": {self._rank(): torch.zeros(()) if loss is None else _without_gradient(loss)},
            "losses_before": getattr(trainer, "_total_loss_scalar", 0.0),
            "last_logged": getattr(trainer, "_globalstep_last_logged", 0),
            "first_step": getattr(trainer, "_initial_global_step", 0),
            "first_tokens": getattr(trainer, "_initial_num_input_tokens_seen", 0),
            "flos": getattr(trainer, "current_flos", 0.0),
            "trl": counts_of_trl(trainer),
        }

    def load_state_dict(self, found: Mapping[str, Any]) -> None:
        """Takes up counters and place; ``resume`` sets what the loop makes anew."""
        trainer = self._trainer
        self._saved = dict(found)
        history = log_entries(bytes(found["log"].tolist()))
        self._forget_log()
        self._is_stopped = False
        if "generator" in found:  # the first version kept none
            self.generator = found["generator"]
        trainer.state = dataclasses.replace(trainer.state, **found["state"], log_history=history)
        _set_callback_states(trainer, found["callbacks"])
        self.epoch, self._updates_before = found["epoch"], found["updates"]
        self._first_step = self._last_step = trainer.state.global_step

    def _rank(self) -> str:
        return f"{self._trainer.args.process_index}"

    def check_fits(self) -> None:
        """Raises UsageError where the place in the data would be another one."""
        then, now = self._saved["terms"], self._terms()
        others = [
            f"{name} {then[name]}, now {now[name]}" for name in now if then[name] != now[name]
        ]
        if others and self._updates_before and not self._trainer.args.ignore_data_skip:
            raise UsageError(
                f"the run was saved in the middle of an epoch with {'; '.join(others)}: its place "
                "in the data cannot be found. Use the same batch size, accumulation and data, or "
                "ignore_data_skip=True to begin the epoch again"
            )

    def resume(self) -> None:
        """Sets what the Trainer makes anew at the begin of its loop."""
        if not self._saved:
            return
        trainer, saved = self._trainer, self._saved
        loss = saved["loss"]
        if not isinstance(loss, torch.Tensor):  # the first version kept one for all ranks
            any_rank = next(iter(loss.values()), torch.zeros(()))  # of another number of ranks
            loss = loss.get(self._rank(), any_rank)
        trainer._tr_loss = loss.to(trainer.args.device).clone()
        trainer._total_loss_scalar = saved["losses_before"]
        trainer._globalstep_last_logged = saved["last_logged"]
        trainer._initial_global_step = saved["first_step"]
        trainer._initial_num_input_tokens_seen = saved["first_tokens"]
        trainer.current_flos = saved["flos"]
        give_counts_of_trl(trainer, saved.get("trl", {}))


def _without_gradient(loss: torch.Tensor) -> torch.Tensor:
    """Returns the sum of losses itself where it can: a save looks at a new tensor for longer."""
    return loss.detach() if loss.requires_grad else loss


def _exportable(trainer: Any) -> list[Any]:
    callbacks = [*trainer.callback_handler.callbacks, trainer.control]
    return [one for one in callbacks if isinstance(one, ExportableState)]


def _callback_states(trainer: Any) -> list[list[Any]]:
    """Returns the attributes of callbacks that have a state, and of the control, by class."""
    return [[type(one).__name__, one.state().get("attributes", {})] for one in _exportable(trainer)]


def _set_callback_states(trainer: Any, found: list[list[Any]]) -> None:
    """Gives callbacks their attributes again: those of one class in their order."""
    waiting = list(_exportable(trainer))
    for kind, attributes in found:
        one = next((each for each in waiting if type(each).__name__ == kind), None)
        if one is not None:
            waiting.remove(one)
            for name, value in attributes.items():
                setattr(one, name, value)


def _has(directory: str, names: Iterable[str]) -> bool:
    return any(os.path.isfile(os.path.join(directory, name)) for name in names)


def _over_text(root: str, step: int, max_steps: int) -> str:
    return (
        f"{root}: the run ended at step {step} of {max_steps}, by EarlyStoppingCallback or "
        "for want of data, and trains no further. To go on, make max_steps or num_train_epochs "
        f'larger, or take an earlier generation by resume_from_checkpoint="{root}@GENERATION"'
    )


class _LoopCallback(TrainerCallback):  # type: ignore[misc]
    """Called when the Trainer has made its counters anew, and for what ends a run."""

    def __init__(self, trainer: HoldfastMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._hf_loop.resume()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._hf_loop.has_batches = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._hf_loop.has_batches = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._hf_loop.evaluated_step = state.global_step


def _check_version(kind: type) -> None:
    """Raises UsageError for a Trainer without the methods that the mixin goes around."""
    lacking = []
    for name, needed in _NEEDED.items():
        method = _below(kind, name)
        if method is None or not needed <= set(inspect.signature(method).parameters):
            lacking.append(name)
    if lacking:
        raise UsageError(
            f"{kind.__qualname__} of transformers {transformers.__version__} has no "
            f"{', '.join(lacking)} as Holdfast knows it: put HoldfastMixin before a Trainer of "
            "transformers 5.23 or later, `class MyTrainer(HoldfastMixin, Trainer)`"
        )


def _below(kind: type, name: str) -> Any:
    """Returns the method of the first class behind the mixin that has it."""
    order = kind.__mro__
    behind = order[order.index(HoldfastMixin) + 1 :]
    return next((vars(one)[name] for one in behind if name in vars(one)), None)


class HoldfastTrainer(HoldfastMixin, Trainer):  # type: ignore[misc]
    """The Trainer of transformers with a Checkpointer in it; see ``HoldfastMixin``."""


class HoldfastTrainerCallback(TrainerCallback):  # type: ignore[misc]
    """Saves the weights, moments and schedule of any Trainer; resumes none.

    A callback sees a step before it is logged, and the Trainer's counters are locals of its loop:
    what goes on to the bit is ``HoldfastTrainer``, or ``HoldfastMixin`` before a Trainer. What this
    callback saved is read by ``holdfast.load``.

    ``root`` and ``options``: as for ``Checkpointer``. ``state``: more objects and values to be
    kept, by key. Raises UsageError when a run begins for which the root has a checkpoint already.
    """

    checkpointer: Checkpointer | None = None
    """The Checkpointer of the ``train()`` under way, and of the last one."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        state: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._more = _ADAPTER.check(transformers.__version__, root, state)
        self._root, self._options = root, options

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any = None, **kwargs: Any
    ) -> None:
        """Begins to save; raises UsageError where the root has something to resume."""
        scheduler = kwargs.get("lr_scheduler")
        found = {
            "model": model,
            "optimizer": kwargs.get("optimizer"),
            "scheduler": getattr(scheduler, "scheduler", scheduler),
            "rng": Rng(),
            "callback": {"begins": state.global_step},
        }
        checkpointer = Checkpointer(self._root, found | self._more, **self._options)
        try:
            if checkpointer.restore(only=["callback"]) is not None:
                raise UsageError(
                    f"{self._root} has a checkpoint of this run, and a callback alone cannot "
                    "resume a Trainer: its counters are locals of its loop. Use HoldfastTrainer, "
                    "or HoldfastMixin before your Trainer, with a root of its own"
                )
        except BaseException:
            checkpointer.__exit__(*sys.exc_info())
            raise
        self.checkpointer = checkpointer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Saves when a policy says so."""
        if self.checkpointer is not None:
            self.checkpointer.step(state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Waits for the copy of the last step: the best model may be loaded over it."""
        if self.checkpointer is not None:
            self.checkpointer.before_update()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Closes the Checkpointer: promised checkpoints are in storage when ``train`` returns."""
        if self.checkpointer is not None:
            self.checkpointer.close()
