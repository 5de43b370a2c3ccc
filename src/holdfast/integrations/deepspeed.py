"""Saves and resumes an engine of DeepSpeed, at every update and to the bit, in any stage of ZeRO.

Leaves are whole and have the parameters' names, so that another stage, another number of ranks and
plain torch read them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from holdfast.capture.handles import SaveHandle
from holdfast.checkpointer import Checkpointer
from holdfast.errors import UsageError
from holdfast.integrations.deepspeed_partitions import find_partitions
from holdfast.integrations.seam import (
    check_keys,
    check_root,
    check_version,
    missing,
    restore_loop_first,
)
from holdfast.state.objects import State
from holdfast.state.rng import Rng

if TYPE_CHECKING:
    from holdfast.restore.restore import Restored

try:
    import deepspeed
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine
except ImportError as error:
    raise missing("deepspeed", error) from error

_LEAST = "0.19"
_LOOP = "deepspeed"
#: The keys of the state that are the adapter's.
_KEYS = (_LOOP, "model", "optimizer", "scheduler", "client_state", "rng")
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
    check_version("deepspeed", deepspeed.__version__, _LEAST)
    _check(engine)
    check_root(root)
    more = check_keys(state, _KEYS, "the engine's")
    return DeepSpeedCheckpointer(engine, root, client_state, more, step, options)


class DeepSpeedCheckpointer:
    """Keeps one engine: call ``step`` after each ``engine.step()``, and ``close`` at the end.

    It is made by ``attach``. As a context manager it closes at the end, and lets the keeper hold
    what it has after an error.
    """

    checkpointer: Checkpointer
    """The Checkpointer."""
    restored: Restored | None
    """Where the run went on from; None for one that began."""

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
        self._partitions = find_partitions(engine)
        self.client_state: dict[str, Any] = {} if client_state is None else client_state
        """The dict that was given; read your values from it after ``attach``."""
        loop = _EngineState(engine)
        self._state: dict[str, Any] = {
            _LOOP: loop,
            "model": self._partitions.module,
            "optimizer": self._partitions.optimizer,
            "client_state": _Values(self.client_state),
            "rng": Rng(),
            **more,
        }
        if engine.lr_scheduler is not None:
            self._state["scheduler"] = engine.lr_scheduler
        with self._shown():
            self.checkpointer = Checkpointer(root, self._state, **options)
            try:
                self.restored = restore_loop_first(self.checkpointer, _LOOP, step)
                if self.restored is not None:
                    self.restored = self.checkpointer.restore(f"{self.restored.generation}")
            except BaseException as error:
                self.checkpointer.__exit__(type(error), error, error.__traceback__)
                raise
        if self.restored is not None:
            self._partitions.publish()
            self.restored.rewind()  # a collective may draw numbers
        self._saved = int(engine.global_steps)
        engine._holdfast = self

    @property
    def state(self) -> State:
        """The state that is saved."""
        return self.checkpointer.state

    @property
    def steps(self) -> int:
        """The number of the last update, ``engine.global_steps``; 0 before the first."""
        return int(self._engine.global_steps)

    def step(self) -> SaveHandle | None:
        """Call after each ``engine.step()``, on all ranks; saves when a policy says so.

        Between the passes of an accumulation it does nothing. Updates that the scaler skipped
        count. See ``Checkpointer.step``.
        """
        if self.steps == self._saved:
            return None
        self._saved = self.steps
        with self._shown():
            return self.checkpointer.step(self._saved)

    def save(self) -> SaveHandle:
        """Save the last update as a durable checkpoint; raises UsageError in an accumulation."""
        if not self._is_whole():
            raise UsageError(
                "save() in the middle of an accumulation: gradients are not saved. Call it after "
                "the engine.step() that updates"
            )
        with self._shown():
            return self.checkpointer.save(self.steps, durable=True)

    def close(self) -> None:
        """Close the Checkpointer: promised checkpoints are then in storage."""
        self.__exit__(None, None, None)

    def __enter__(self) -> DeepSpeedCheckpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with self._shown():
                self.checkpointer.__exit__(kind, error, trace)
        finally:
            vars(self._engine).pop("_holdfast", None)

    @contextmanager
    def _shown(self) -> Iterator[None]:
        with self._partitions.shown():
            yield

    def _is_whole(self) -> bool:
        passes: int = self._engine.gradient_accumulation_steps()
        return int(self._engine.micro_steps) % passes == 0


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


def _check(engine: Any) -> None:
    """Raises UsageError for an engine that nothing can be attached to."""
    if not isinstance(engine, DeepSpeedEngine):
        raise UsageError(
            f"attach() takes an engine of DeepSpeed, got a {type(engine).__qualname__}: give the "
            "first thing that deepspeed.initialize() returned"
        )
    if getattr(engine, "_holdfast", None) is not None:
        raise UsageError(
            "a Checkpointer is attached to this engine already: close it first, or use the one "
            "that attach() returned"
        )
    if engine.optimizer is None or not hasattr(engine.optimizer, "param_groups"):
        raise UsageError("attach() found no optimizer in the engine: it saves engines that train")
    found = {
        "a pipeline": isinstance(engine, PipelineEngine),
        "experts": engine.has_moe_layers,
        "tensor parallelism": engine.mp_world_size > 1,
        "curriculum learning or data sampling": engine.curriculum_learning_enabled()
        or engine.data_sampling_enabled(),
        "random layer dropping": engine.random_ltd_enabled(),
        "zenflow": getattr(engine, "zenflow", None),
        "super offload": engine.super_offload(),
    }
    for what, has_it in found.items():
        if has_it:
            raise UsageError(
                f"attach() does not know an engine with {what}, whose state it would not keep: "
                "use engine.save_checkpoint()"
            )
