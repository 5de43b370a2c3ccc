"""Counts the processor time that a thread spends in adapters, and in the Checkpointers below them.

Every function of ``holdfast.integrations`` is put into another that looks at the thread's processor
clock before and after it. What a function calls counts as its own, but for what the framework would
do without an adapter (``AROUND``: what adapters go around, and the loaders that they iterate), and
for the Checkpointer, which counts by itself; in it the adapter's ``state_dict`` counts as the
adapter's again. The looks at the clock count as the adapter's too, so the sum is an upper bound.
What the Checkpointer does in hooks of an optimizer is in neither: it is there without an adapter.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

ADAPTER, CHECKPOINTER, OTHERS = range(3)
#: What adapters go around or iterate: what is spent in it is the framework's.
AROUND = {
    "torch.utils.data.dataloader": ("_BaseDataLoaderIter.__next__",),
    "transformers.trainer": (
        "Trainer.train",
        "Trainer._init_training_state",
        "Trainer._prepare_for_training",
        "Trainer._run_epoch",
        "Trainer._maybe_log_save_evaluate",
        "Trainer._load_rng_state",
        "Trainer._finalize_training",
    ),
    "lightning.pytorch.loops.fit_loop": (
        "_FitLoop._load_combined_loader_states",
        "_FitLoop.on_run_start",
        "_FitLoop.on_advance_end",
        "_FitLoop.on_run_end",
    ),
    "lightning.pytorch.loops.training_epoch_loop": (
        "_TrainingEpochLoop.on_run_start",
        "_TrainingEpochLoop.on_advance_end",
    ),
    "lightning.pytorch.loops.evaluation_loop": ("_EvaluationLoop.setup_data",),
    "ray.train": ("report",),
    "torchft.manager": ("Manager.should_commit",),
}
_METHODS = ("step", "save", "before_update", "restore", "close", "__exit__")


class Meter:
    """Nanoseconds of the processor by whose code threads are in: that of the innermost call."""

    def __init__(self) -> None:
        self.is_following = False
        """True once the functions of adapters are charged."""
        self._spent_ns = [0, 0, 0]
        self._thread = threading.local()

    def spent_s(self) -> tuple[float, float]:
        """Returns the seconds in adapters and in Checkpointers so far, of all threads."""
        return self._spent_ns[ADAPTER] / 1e9, self._spent_ns[CHECKPOINTER] / 1e9

    def enter(self, whose: int) -> None:
        """From now on this thread is in code of ``whose``."""
        now_ns, stack = time.thread_time_ns(), self._stack()
        if stack:
            self._spent_ns[stack[-1]] += now_ns - self._thread.since_ns
        stack.append(whose)
        self._thread.since_ns = time.thread_time_ns()

    def leave(self) -> None:
        """This thread goes back to where it was before the last ``enter``."""
        now_ns, stack = time.thread_time_ns(), self._stack()
        self._spent_ns[stack.pop()] += now_ns - self._thread.since_ns
        self._thread.since_ns = time.thread_time_ns()

    def _stack(self) -> list[int]:
        if not hasattr(self._thread, "stack"):
            self._thread.stack = []
        found: list[int] = self._thread.stack
        return found

    def charge(self, whose: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that does the same, and whose time is that of ``whose``."""
        if inspect.isgeneratorfunction(function):
            return self._charge_items(whose, function)

        @functools.wraps(function)
        def charged(*given: Any, **named: Any) -> Any:
            self.enter(whose)
            try:
                return function(*given, **named)
            finally:
                self.leave()

        return charged

    def _charge_items(self, whose: int, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def charged(*given: Any, **named: Any) -> Iterator[Any]:
            items = function(*given, **named)
            try:
                while True:
                    self.enter(whose)
                    try:
                        item = next(items)
                    except StopIteration:
                        return
                    finally:
                        self.leave()
                    yield item
            finally:
                items.close()

        return charged


METER = Meter()


def follow() -> None:
    """From now on the functions of the modules that are loaded are charged; called once."""
    if METER.is_following:
        return
    METER.is_following = True
    for name, paths in AROUND.items():
        if name in sys.modules:
            for path in paths:
                _replace(sys.modules[name], path, OTHERS)
    checkpointer = import_module("holdfast.checkpointer").Checkpointer
    for method in _METHODS:
        _replace(checkpointer, method, CHECKPOINTER)
    _charge_adapters()


def _replace(where: Any, path: str, whose: int) -> None:
    *inside, name = path.split(".")
    for each in inside:
        where = getattr(where, each)
    setattr(where, name, METER.charge(whose, getattr(where, name)))


def _charge_adapters() -> None:
    modules = [
        module for name, module in sys.modules.items() if name.startswith("holdfast.integrations.")
    ]
    replaced: dict[int, Any] = {}
    for module in modules:
        for one in list(vars(module).values()):
            if getattr(one, "__module__", None) != module.__name__:
                continue
            if inspect.isfunction(one):
                replaced[id(one)] = METER.charge(ADAPTER, one)
            elif inspect.isclass(one):
                _charge_class(one)
    for module in modules:
        for name, one in list(vars(module).items()):
            if id(one) in replaced:
                setattr(module, name, replaced[id(one)])


def _charge_class(kind: type) -> None:
    for name, one in list(vars(kind).items()):
        if inspect.isfunction(one):
            setattr(kind, name, METER.charge(ADAPTER, one))
        elif isinstance(one, property) and one.fget is not None:
            setattr(kind, name, property(METER.charge(ADAPTER, one.fget), one.fset, one.fdel))
