"""Saves and resumes the Trainer of torchtitan, at every step and to the bit.

``HoldfastCheckpointManager`` is a checkpoint manager of torchtitan's. What its settings say of
checkpoints of other formats, to begin from and to end with, torchtitan's own manager does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import nn

from holdfast.capture.handles import SaveHandle
from holdfast.checkpointer import Checkpointer
from holdfast.errors import NotFound, UsageError
from holdfast.integrations.seam import (
    Adapter,
    check_options,
    missing,
    one_or_all,
    restore_loop_first,
)
from holdfast.oneshot import load
from holdfast.policy.when import Every, Keep
from holdfast.state.modules import derived
from holdfast.state.rng import Rng

if TYPE_CHECKING:
    from holdfast.restore.restore import Restored

try:
    import tyro
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager
    from torchtitan.models.common.attention import FusedQKVLinear
    from torchtitan.tools import filesystem
    from torchtitan.tools.logging import logger
except ImportError as error:
    raise missing("torchtitan", error) from error

_LOOP = "train_state"
_KEYS = ("model", "optimizer", "lr_scheduler", "dataloader", "rng")
_OWN_FILES = ("step-*/.metadata", "step-*/model.safetensors.index.json")
_ADAPTER = Adapter("torchtitan", "0.3", _KEYS, "torchtitan's", _OWN_FILES)
#: Arguments of Checkpointer that the settings have under torchtitan's names.
_SETTINGS = {
    "memory": "memory_interval",
    "storage": "interval",
    "keep": "keep_latest_k",
    "parity": "parity",
    "state": "trainer.checkpointer.state",
}
#: Where nothing is ever saved: torchtitan's own manager then begins from ``initial_load_path``.
_NOWHERE = "no-checkpoints-of-torchtitan"

# Its state_dict has the three projections that the stored one is made of.
derived(
    FusedQKVLinear, [f"{name}.{kind}" for name in ("wq", "wk", "wv") for kind in ("weight", "bias")]
)


@dataclass(frozen=True, slots=True)
class _EveryFromOne(Every):
    """Due after every ``steps`` steps, of steps that are counted from 1."""

    def is_due_by_steps(self, step: int, last_step: int | None = None) -> bool:
        return Every.is_due_by_steps(self, step - 1, None if last_step is None else last_step - 1)


class HoldfastCheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """Saves each ``memory_interval`` steps in memory and each ``interval`` steps in the root.

    Give the Trainer ``checkpoint=HoldfastCheckpointManager.Config(enable=True)``: ``train`` then
    goes on from the newest generation. The root is the folder of the settings.

    Raises UsageError for settings that it does not keep, and for a run that cannot go on at its
    place in the data.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """The settings of torchtitan, and those of Holdfast. Intervals count steps."""

        memory_interval: int = 1
        """Steps from one snapshot in memory to the next; 0 for none but those for storage."""

        parity: int = 0
        """Hosts of a group that can be lost with their memory."""

        holdfast_options: Annotated[dict[str, Any], tyro.conf.Suppress] = field(
            default_factory=dict
        )
        """Further arguments of ``Checkpointer``, such as ``grace_s`` and ``cache``."""

        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)
            taken = sorted(_SETTINGS.keys() & self.holdfast_options)
            if taken:
                raise UsageError(
                    f"holdfast_options has {taken[0]}, which is {_SETTINGS[taken[0]]} here: say it "
                    "there"
                )
            check_options(self.holdfast_options)
            if self.memory_interval < 0:
                raise UsageError(
                    f"memory_interval={self.memory_interval}: give a number of steps, or 0"
                )

    checkpointer: Checkpointer | None = None
    """The Checkpointer; None before, and with ``enable=False`` or ``load_only=True``."""
    restored: Restored | None = None
    """Where the run went on from; None for one that began."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: Sequence[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: Mapping[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable, self.save_future = config.enable, None
        if not self.enable:
            return
        self._config = config
        self._root = filesystem.join(base_folder, config.folder)
        more = _ADAPTER.check(version("torchtitan"), self._root, states)
        if _LOOP not in more:
            raise UsageError(f"states= has no {_LOOP!r}: it holds the Trainer's step")
        if config.last_save_in_hf and sd_adapter is None:
            raise UsageError(
                "last_save_in_hf=True, and the model has no adapter to the names of Hugging Face"
            )
        self._own = partial(
            CheckpointManager,
            dataloader=dataloader,
            model_parts=list(model_parts),
            optimizers=optimizers,
            lr_schedulers=lr_schedulers,
            sd_adapter=sd_adapter,
            base_folder=base_folder,
        )
        self._states = more
        self._data = _LoaderState(dataloader, config)
        self._trainer = more[_LOOP]
        self._owed: tuple[int, bool] | None = None
        """A step, and whether it is the last one, that is saved when it was validated."""
        self.state: dict[str, Any] = more | {
            "model": _one_part(model_parts),
            "optimizer": one_or_all(optimizers),
            "lr_scheduler": one_or_all(lr_schedulers),
            "dataloader": self._data,
            "rng": Rng(),
        }
        """The state that is saved: add objects of yours by key, before ``train``."""
        self._check_excluded()

    # ── loading ──────────────────────────────────────────────────────────────────────────────────

    def _load(self, step: int = -1) -> bool:
        self._check_excluded()
        wanted = None if step == -1 else step
        if self._config.load_only:
            found = self._load_published(wanted)
        else:
            self._open()
            found = self._restore(wanted)
        self._follow_validation()
        if found is not None:
            self.restored = found
            logger.info(f"Holdfast goes on from step {found.step} ({found.source})")
            return True
        return self._begin_from()

    def _open(self) -> Checkpointer:
        if self.checkpointer is None:
            config = self._config
            memory = _EveryFromOne(config.memory_interval) if config.memory_interval else None
            self.checkpointer = Checkpointer(
                self._root,
                self.state,
                memory=memory,
                storage=_EveryFromOne(config.interval),
                keep=Keep(last=config.keep_latest_k) if config.keep_latest_k else Keep(),
                parity=config.parity,
                **config.holdfast_options,
            )
        return self.checkpointer

    def _restore(self, step: int | None) -> Restored | None:
        assert self.checkpointer is not None
        found = restore_loop_first(self.checkpointer, _LOOP, step, adapter="torchtitan")
        if found is None:
            return None
        return self.checkpointer.restore(f"{found.generation}", only=self._wanted(found.step))

    def _load_published(self, step: int | None) -> Restored | None:
        """Loads what is in storage: with ``load_only`` the run that saves there goes on."""
        try:
            found = load(self._root, self.state, step, only=[_LOOP])
        except NotFound:
            if step is not None:
                raise
            return None
        return load(self._root, self.state, f"{found.generation}", only=self._wanted(found.step))

    def _wanted(self, step: int) -> list[str] | None:
        """Returns the keys to restore: of a seed checkpoint, which is step 0, the model alone."""
        if step == 0:
            return ["model.**"]
        excluded = self._config.exclude_from_loading
        return [f"{key}.**" for key in self.state if key not in excluded] if excluded else None

    def _begin_from(self) -> bool:
        """Begins from the checkpoint in ``initial_load_path``; False where there is none."""
        config = self._config
        where = config.initial_load_path
        if where and filesystem.exists(filesystem.join(where, "holdfast.json")):
            if config.initial_load_model_only:
                load(where, self.state, only=["model.**"])
            else:
                excluded = config.exclude_from_loading
                load(where, self.state, only=[f"{k}.**" for k in self.state if k not in excluded])
            return True
        if not (where or config.initial_load_in_hf):
            return False
        own = self._make_own(_NOWHERE)
        try:
            return bool(own.load())
        finally:
            own.close()

    def _make_own(self, folder: str) -> Any:
        """Makes torchtitan's own manager, with these settings and a folder of its own."""
        names = {one.name for one in fields(BaseCheckpointManager.Config)}
        given = {name: getattr(self._config, name) for name in names}
        given |= {"folder": folder, "keep_latest_k": 0, "load_only": False}
        return self._own(CheckpointManager.Config(**given), states=dict(self._states))

    def _check_excluded(self) -> None:
        """Raises UsageError for keys that cannot be left out of a load."""
        for key in self._config.exclude_from_loading:
            if key not in self.state:
                raise UsageError(
                    f"exclude_from_loading has {key!r}, the state has {', '.join(self.state)}"
                )
            if key == _LOOP:
                raise UsageError(
                    f"exclude_from_loading has {_LOOP!r}: steps would be counted from 1 and saved "
                    "a second time. Use another folder, and initial_load_path for this one"
                )

    # ── saving ───────────────────────────────────────────────────────────────────────────────────

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self._config.load_only:
            return False
        if curr_step and self._validates(curr_step):
            self._owed = (curr_step, last_step)  # draws numbers: the step is whole after it
            return True
        return self._save_whole(curr_step, last_step)

    def _save_whole(self, step: int, is_last: bool) -> bool:
        config, checkpointer = self._config, self._open()
        is_first = step == 1 and config.enable_first_step_checkpoint
        handle: SaveHandle | None
        if is_first or is_last:
            handle = checkpointer.save(step, durable=True)
        else:
            handle = checkpointer.step(step)
        if is_last and step and config.last_save_model_only:
            own = self._make_own(f"{config.folder.rstrip('/')}-export")
            own.save(step, last_step=True)
            own.close()
        return handle is not None

    def _validates(self, step: int) -> bool:
        validator = getattr(self._trainer, "validator", None)
        if validator is None or not self._trainer.config.validator.enable:
            return False
        return bool(validator.should_validate(step))

    def _follow_validation(self) -> None:
        """Saves a step after its validation."""
        validator = getattr(self._trainer, "validator", None)
        if validator is not None:
            validator.validate = partial(self._validated, validator.validate)

    def _validated(self, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        found = original(*given, **named)
        if self._owed is not None:
            (step, is_last), self._owed = self._owed, None
            self._save_whole(step, is_last)
        return found

    def _maybe_wait_for_staging(self) -> None:
        """The Checkpointer waits before an optimizer's update by itself."""

    def _wait_for_saving(self) -> None:
        """Never called: the keeper writes."""

    def _close(self) -> None:
        """Waits for promised checkpoints; after an error the keeper holds what it has."""
        kind, error, trace = sys.exc_info()
        if self.checkpointer is not None:
            self.checkpointer.__exit__(kind, error, trace)


class _LoaderState:
    """The place in the data, as a part of the state: that of this rank's loader."""

    def __init__(self, loader: Any, config: Any) -> None:
        self._loader = loader
        if not isinstance(loader, StatefulDataLoader):
            return
        if loader.generator is None:
            # It draws a seed when it is iterated, which a run that goes on would do once more.
            loader.generator = torch.Generator()
            loader.generator.manual_seed(torch.initial_seed())
        batches = max(1, (loader.snapshot_every_n_steps or config.interval) // config.interval)
        loader.snapshot_every_n_steps = batches * (config.memory_interval or config.interval)

    def _terms(self) -> dict[str, int]:
        loader = self._loader
        found = {
            "data ranks": int(getattr(loader, "dp_world_size", 1)),
            "workers": int(getattr(loader, "num_workers", 0)),
        }
        if found["workers"]:  # they pass over batches
            found["samples in a batch"] = int(loader.batch_size or 0)
        return found

    def state_dict(self) -> dict[str, Any]:
        """The loader's state, as plain values; None before it was iterated."""
        loader = self._loader
        if not isinstance(loader, StatefulDataLoader):
            return {"terms": self._terms(), "loader": loader.state_dict()}
        is_begun = loader._iterator is not None or loader.next_iter_state is not None
        state = None
        if is_begun:
            state = loader.next_iter_state or StatefulDataLoader.state_dict(loader)
        return {"terms": self._terms(), "loader": state}

    def load_state_dict(self, found: Mapping[str, Any]) -> None:
        """Makes the next iteration begin there; raises UsageError where it would be a guess."""
        then, now = found["terms"], self._terms()
        if then != now:
            raise UsageError(
                f"the run was saved with {_words(then)}, now there are {_words(now)}: its place in "
                'the data cannot be found. Use the same, or exclude_from_loading=["dataloader"], '
                "which begins the data anew"
            )
        if found["loader"] is None:
            return
        if isinstance(self._loader, StatefulDataLoader):
            StatefulDataLoader.load_state_dict(self._loader, found["loader"])
        else:
            self._loader.load_state_dict(found["loader"])


def _words(terms: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in terms.items())


def _one_part(parts: Sequence[nn.Module]) -> nn.Module:
    if len(parts) == 1:
        return parts[0]
    raise UsageError(
        f"the model has {len(parts)} parts on this rank, of a pipeline schedule with several "
        "stages a rank: use one with a single stage, such as 1F1B"
    )
