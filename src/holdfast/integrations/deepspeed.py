"""Saves and resumes an engine of DeepSpeed, at every update and to the bit, in any stage of ZeRO.

Leaves are whole and have the parameters' names, so that another stage, another number of ranks and
plain torch read them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from holdfast.capture.handles import SaveHandle
from holdfast.errors import UsageError
from holdfast.format.native_types import register_enum, register_value
from holdfast.integrations.attached import AttachedCheckpointer, check_free, present
from holdfast.integrations.deepspeed_partitions import find_partitions
from holdfast.integrations.lone_checkpoints import read_alone, write_alone
from holdfast.integrations.seam import Adapter, missing
from holdfast.state.rng import Rng

if TYPE_CHECKING:
    from holdfast.restore.restore import Restored

try:
    import deepspeed
    import torch
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address
except ImportError as error:
    raise missing("deepspeed", error) from error

_LOOP = "deepspeed"
_KEYS = (_LOOP, "model", "optimizer", "scheduler", "scaler", "client_state", "rng")
_ADAPTER = Adapter("deepspeed", "0.19", _KEYS, "the engine's")
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
#: What a scaler has found out, whichever of DeepSpeed's it is.
_OF_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def attach(
    engine: Any,
    root: str | os.PathLike[str],
    *,
    client_state: dict[str, Any] | None = None,
    state: Mapping[str, Any] | None = None,
    step: int | str | None = None,
    **options: Any,
) -> DeepSpeedCheckpointer:
    """Attach a Checkpointer to an engine, and restore the newest generation into it.

    Call it after ``deepspeed.initialize``, on all ranks, and ``step()`` on what it returns after
    each ``engine.step()``. ``client_state``: plain values of yours, such as the place in the data;
    this very dict is filled. ``root`` and ``options``: as for ``Checkpointer``. ``state``: more
    objects and values, by key. ``step``: go on from this step instead, or from a generation as
    "incarnation-step".

    Raises UsageError for an engine that it does not know.
    """
    check_engine(engine)
    more = _ADAPTER.check(deepspeed.__version__, root, state)
    return DeepSpeedCheckpointer(engine, root, client_state, more, step, options)


class DeepSpeedCheckpointer(AttachedCheckpointer):
    """Keeps one engine: call ``step`` after each ``engine.step()``, and ``close`` at the end.

    It is made by ``attach``. As a context manager it closes at the end, and lets the keeper hold
    what it has after an error. ``steps`` counts updates, as ``engine.global_steps``.
    """

    def __init__(
        self,
        engine: Any,
        root: str | os.PathLike[str],
        client_state: dict[str, Any] | None,
        more: dict[str, Any],
        step: int | str | None,
        options: Mapping[str, Any],
    ) -> None:
        self._engine = engine
        self._parts = EngineParts(engine)
        self.client_state: dict[str, Any] = {} if client_state is None else client_state
        """The dict that was given; read your values from it after ``attach``."""
        own = {
            "model": self._parts.module,
            "optimizer": self._parts.optimizer,
            "scheduler": engine.lr_scheduler,
            "scaler": self._parts.scaler,
            "client_state": _Values(self.client_state),
            "rng": Rng(),
        }
        parts = {**present(own), **more}
        super().__init__(engine, root, _LOOP, self._parts.counters, parts, options)
        restored = self._restore(step)
        if restored is not None:
            self._parts.publish(restored)
        self.steps = int(engine.global_steps)

    def step(self, step: int | None = None) -> SaveHandle | None:
        """Call after each ``engine.step()``, on all ranks; saves when a policy says so.

        Between the passes of an accumulation it does nothing. Updates that the scaler skipped
        count. ``step``: the engine's count, and no other. See ``Checkpointer.step``.
        """
        now = int(self._engine.global_steps)
        if step not in (None, now):
            raise UsageError(
                f"step({step}): the engine is at update {now}, whose count is saved. Call step() "
                "without a number"
            )
        return None if now == self.steps else super().step(now)

    def save(self) -> SaveHandle | None:
        """Save the last update as a durable checkpoint; raises UsageError in an accumulation."""
        passes: int = self._engine.gradient_accumulation_steps()
        if int(self._engine.micro_steps) % passes:
            raise UsageError(
                "save() in the middle of an accumulation: gradients are not saved. Call it after "
                "the engine.step() that updates"
            )
        return self._save(int(self._engine.global_steps))  # also before step()

    def _shown(self) -> AbstractContextManager[None]:
        return self._parts.shown()


class EngineParts:
    """What is saved of an engine, in a loop of any library.

    ``check_engine`` comes first. Raises UsageError for an optimizer that it does not know.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._partitions = find_partitions(engine)
        self.module = self._partitions.module
        """Has the leaves of the model, under the parameters' names."""
        self.optimizer = self._partitions.optimizer
        """The optimizer of torch that updates, whose tensors are declared."""
        self.scaler = _scaler_of_torch(engine)
        """The scaler of torch's; None for an engine that has its own, or none."""
        self.counters = _EngineState(engine)
        """The engine's counters and its own scaler, as a part of the state."""

    def saved(self, prepared: Any) -> Any:
        """Returns what is saved in place of the engine or its optimizer; anything else itself."""
        if prepared is self._engine:
            return self.module
        return self.optimizer if prepared is self._engine.optimizer else prepared

    def shown(self) -> AbstractContextManager[None]:
        """The optimizer's groups have their tensors meanwhile: in each save and restore."""
        return self._partitions.shown()

    def publish(self, restored: Restored) -> None:
        """Makes what the model computes with of what was restored."""
        self._partitions.publish()
        restored.rewind()  # a collective may draw numbers


class HoldfastEngine(CheckpointEngine):  # type: ignore[misc]
    """For calls of ``save_checkpoint`` that exist: ``engine.checkpoint_engine = HoldfastEngine()``.

    What a rank would write as a file of ``torch.save`` is a directory of that name in Holdfast's
    format: durable when ``save_checkpoint`` returns, every byte checked when it is read, without
    pickle. Raises UnsupportedState for values in ``client_state`` that are no data.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name = type(self).__name__
        _ADAPTER.check_version(deepspeed.__version__)

    def create(self, info: Any) -> None:
        """Nothing is to be made ready."""

    def save(self, state_dict: Mapping[str, Any], path: str) -> None:
        """Writes what one rank has, in place of what is there."""
        write_alone(path, state_dict, int(state_dict.get("global_steps", 0)))

    def load(self, path: str, map_location: Any = None) -> Any:
        """Returns what a rank wrote, on the CPU; raises UsageError for a file of ``torch.save``."""
        if os.path.isfile(path):
            raise UsageError(
                f"{path} is a file of torch.save, which is not read here: load_checkpoint() with "
                "the engine's own checkpoint_engine, or `holdfast import`"
            )
        return read_alone(path)

    def commit(self, info: Any) -> bool:
        """What was saved is durable."""
        return True

    def preserves_storage_sharing(self) -> bool:
        """False: a view is written without the rest of its memory."""
        return False


def _take_values(kind: type) -> None:
    """Lets objects that DeepSpeed puts into its checkpoints be stored as their attributes."""

    def give(found: dict[str, Any]) -> Any:
        made: Any = object.__new__(kind)
        vars(made).update(found)
        return made

    register_value(kind, lambda one: dict(vars(one)), give)


for _kind in (LossScaler, DynamicLossScaler, fragment_address):
    _take_values(_kind)
register_value(torch.Size, tuple, torch.Size, name="torch.Size")
register_enum(ZeroStageEnum)


def _scaler_of_torch(engine: Any) -> Any:
    """Returns the scaler of an engine under torch.autocast in fp16; None for others."""
    own = getattr(engine, "torch_autocast_z0_gradscaler", None)
    return own or getattr(engine.optimizer, "torch_autocast_gradscaler", None)


class _Values:
    """A dict of plain values that is filled in place."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self._values)

    def load_state_dict(self, found: Mapping[str, Any]) -> None:
        self._values.clear()
        self._values.update(found)


class _EngineState:
    """The counters of an engine and what its scaler has found out, as a part of the state."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        outer = engine.optimizer
        self._scaler = getattr(outer, "loss_scale_config", getattr(outer, "loss_scaler", None))

    def state_dict(self) -> dict[str, Any]:
        """Counters and the scaler's, as plain values."""
        return {
            "counters": {name: int(getattr(self._engine, name)) for name in _COUNTERS},
            "accumulation": int(self._engine.gradient_accumulation_steps()),
            "scaler": self._of_scaler(),
        }

    def load_state_dict(self, found: Mapping[str, Any]) -> None:
        """Goes on counting; passes of another accumulation are counted from whole updates."""
        for name, value in found["counters"].items():
            setattr(self._engine, name, value)
        passes = int(self._engine.gradient_accumulation_steps())
        if passes != found["accumulation"]:
            self._engine.micro_steps = found["counters"]["global_steps"] * passes
        for name in self._of_scaler():
            if name in found["scaler"]:
                setattr(self._scaler, name, found["scaler"][name])

    def _of_scaler(self) -> dict[str, Any]:
        """Returns what a scaler of changing scale has found out; {} for others."""
        if getattr(self._scaler, "last_overflow_iter", None) is None:
            return {}
        return {
            name: getattr(self._scaler, name) for name in _OF_SCALER if hasattr(self._scaler, name)
        }


def check_engine(engine: Any) -> None:
    """Raises UsageError for an engine that nothing can be attached to, and for an old DeepSpeed."""
    _ADAPTER.check_version(deepspeed.__version__)
    if not isinstance(engine, DeepSpeedEngine):
        raise UsageError(
            f"attach() takes an engine of DeepSpeed, got a {type(engine).__qualname__}: give the "
            "first thing that deepspeed.initialize() returned"
        )
    check_free(engine)
    if engine.optimizer is None or not hasattr(engine.optimizer, "param_groups"):
        raise UsageError("attach() found no optimizer in the engine: it saves engines that train")
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    found = {
        "a pipeline": isinstance(engine, PipelineEngine),
        "experts": engine.has_moe_layers,
        "tensor parallelism": engine.mp_world_size > 1,
        "curriculum learning or data sampling": engine.curriculum_learning_enabled()
        or engine.data_sampling_enabled(),
        "random layer dropping": engine.random_ltd_enabled(),
        "zenflow": getattr(engine, "zenflow", None),
        "super offload": engine.super_offload(),
        # Those of the oldest version alone.
        "progressive layer dropping": getattr(engine, "progressive_layer_drop", None),
        "compressed weights": getattr(engine, "quantizer", None) or _is_compressing(engine),
        "a 1-bit optimizer": ".onebit." in type(inner).__module__,
        # Its momentum is one of whole parameters beside a rank's share of them.
        "Muon": ".muon." in type(inner).__module__,
    }
    for what, has_it in found.items():
        if has_it:
            raise UsageError(
                f"attach() does not know an engine with {what}, whose state it would not keep: "
                "use engine.save_checkpoint()"
            )


def _is_compressing(engine: Any) -> bool:
    """True for an engine that prunes or quantizes weights by a count of its own."""
    schedule = getattr(engine, "compression_scheduler", None)
    methods = getattr(schedule, "different_compression_methods", {})
    return any(one.get("enabled") for one in methods.values())
