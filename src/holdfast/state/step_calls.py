"""Follows every call of an optimizer's ``step``, and calls the fence before its first hook.

In the middle of a call the state is of no step. Torch's own hooks show where a step begins, and
where one ends that raises nothing; so ``step`` itself is wrapped, in its class and where an
instance has one of its own. A step that raised leaves a state that is neither the one before nor
the next: which optimizers those are is remembered until their next whole step, or a restore.

What happens here may happen in the handler of a signal, between any two lines of itself: it takes
no lock. A thread writes down that it steps before it looks who reads the state, and whoever reads
it does so before it looks who steps: of two that meet one sees the other.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from threading import get_ident
from typing import Any, Protocol

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from holdfast.errors import CaptureOvertaken, UsageError
from holdfast.state import graph_steps

IN_A_STEP = "this thread is in the middle of an optimizer's step, and has to end that first"
_LOOK_S = 0.001
#: The time for which a thread lets deferred saves run first, where several threads step in turns.
_LET_PASS_S = 5.0
#: The time for which captures may go on when the interpreter ends.
_AT_EXIT_S = 10.0
_MARK = "holdfast_follows"
#: The code objects of every ``step`` that torch has given hooks.
_TORCHS_STEP = Optimizer.profile_hook_step(lambda: None).__code__


class Listener(Protocol):
    """Implemented by objects that read a state which optimizers change."""

    def fence(self) -> None:
        """Wait until an update may overwrite the state; for nothing while it is captured into a
        graph.
        """
        ...

    def stepping(self, optimizer: Optimizer) -> None:
        """Called when an optimizer of this process is about to step."""
        ...

    def stepped(self, optimizer: Optimizer) -> None:
        """Called when it has taken a whole step."""
        ...

    def steps_ended(self) -> None:
        """Called when this thread is in no step any more."""
        ...

    @property
    def has_deferred(self) -> bool:
        """True if a save waits for the end of a step."""
        ...

    def end_capture(self, *, timeout_s: float) -> bool:
        """Wait until nothing reads the state any more; returns False if that took longer than the
        timeout.
        """
        ...


listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
"""Weak references: a listener that nobody closes and nobody holds is not kept alive by this set."""


class StepCall:
    """One call of a step. ``is_wrapped``: its end is seen in every case, also when it raises.

    ``is_step`` False: a call of another function that changes what an optimizer changes.
    """

    __slots__ = ("has_begun", "is_settled", "is_step", "is_whole", "is_wrapped", "optimizer")

    def __init__(self, optimizer: Optimizer, *, is_wrapped: bool, is_step: bool = True) -> None:
        self.optimizer = optimizer
        self.is_wrapped, self.is_step = is_wrapped, is_step
        self.has_begun = self.is_whole = self.is_settled = False


#: The calls that each thread is inside of, the outermost first.
_calls: dict[int, list[StepCall]] = {}
_numbers = count(1)
_begun = 0
"""The number of the outermost call that began last."""


def _forget_calls() -> None:
    """Clears the calls in a forked child (a data loader's worker), which runs none of them."""
    _calls.clear()
    listeners.clear()


os.register_at_fork(after_in_child=_forget_calls)


@atexit.register
def _end_captures() -> None:
    """Finish running captures when the interpreter ends; the keeper continues with them."""
    for each in tuple(listeners):
        each.end_capture(timeout_s=_AT_EXIT_S)


# ── who is in the middle of a step ───────────────────────────────────────────────────────────


def is_under_way(concerns: Callable[[Optimizer], bool] = lambda _: True) -> bool:
    """True if this thread is inside an optimizer's step, or any other is inside one that
    ``concerns`` the caller.
    """
    return bool(_calls) and any(
        not _is_over(thread) and (thread == get_ident() or _is_any(calls, concerns))
        for thread, calls in tuple(_calls.items())
    )


def _is_any(calls: list[StepCall], concerns: Callable[[Optimizer], bool]) -> bool:
    """True if one of these calls concerns the caller, or which they are is not written down yet."""
    return not calls or any(concerns(call.optimizer) for call in tuple(calls))


def is_inside() -> bool:
    """True if this thread is inside an optimizer's step."""
    thread = get_ident()
    return thread in _calls and not _is_over(thread)


def refuse_inside(call: str) -> None:
    """Raises UsageError for a call made inside a step, on the step's own thread."""
    if is_inside():
        raise UsageError(f"{call} cannot be called here: {IN_A_STEP}. Call it behind that")


class Rest:
    """A time in which no optimizer steps, from now on; waits at most ``timeout_s`` for it to begin.

    It blocks no step: ``check`` says whether one began. For a reader that reads the state only
    once.
    """

    def __init__(self, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        self._begun = _begun
        while is_under_way():
            if time.monotonic() > until_s:
                raise CaptureOvertaken(
                    f"an optimizer of another thread was in its step for {timeout_s:g} s: save on "
                    "the thread that trains, between two steps"
                )
            time.sleep(_LOOK_S)
            self._begun = _begun

    def check(self) -> None:
        """Raises CaptureOvertaken if a step began meanwhile."""
        if self._begun != _begun:
            raise CaptureOvertaken(
                "an optimizer of another thread began a step while its state was copied: save on "
                "the thread that trains, between two steps"
            )


def _is_over(thread: int) -> bool:
    """True if this thread is in no step any more, although the end of its call was not seen.

    That happens when a step without the wrapper raised, so that only torch's hooks were seen, or an
    interrupt came between two lines of this module: then no step is among the thread's frames.
    """
    calls = _calls.get(thread)
    if calls is None:
        return True
    if _has_step(sys._current_frames().get(thread)):
        return False
    _settle(calls, None)
    if thread == get_ident():  # what another one is about to add to is not taken away
        _calls.pop(thread, None)
    return True


def _has_step(frame: types.FrameType | None) -> bool:
    """True if ``frame`` or one of its callers is a step."""
    while frame is not None and not _is_step(frame.f_code):
        frame = frame.f_back
    return frame is not None


def _has_outer_step() -> bool:
    """True if the step that begins now was called within another."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not _is_step(frame.f_code):
        frame = frame.f_back
    return frame is not None and _has_step(frame.f_back)


def _is_step(code: types.CodeType) -> bool:
    """Recognizes a step by name: compiled code is another object."""
    return (code.co_name, code.co_filename) in _STEPS


# ── a step ───────────────────────────────────────────────────────────────────────────────────


def _begin(call: StepCall) -> None:
    global _begun
    thread = get_ident()
    calls = _calls.get(thread)
    if calls and not _has_outer_step():
        _settle(calls, None)
        calls = None
    if not calls:
        if _calls:
            _let_pass()
        calls = _calls[thread] = []
        _begun = next(_numbers)
    elif calls[-1].is_wrapped and calls[-1].optimizer is call.optimizer:
        return  # its own step, wrapped once more, or that of the class below
    calls.append(call)
    is_captured = graph_steps.is_capturing(call.optimizer)
    if is_captured:
        graph_steps.note_captured(call.optimizer)
        call.is_settled = True  # it updates nothing
    for each in tuple(listeners):
        each.fence()
        if call.is_step and not is_captured:
            each.stepping(call.optimizer)


def _let_pass() -> None:
    """Lets deferred saves run first where several threads step, which may never all be between two
    steps.
    """
    until_s = time.monotonic() + _LET_PASS_S
    while any(each.has_deferred for each in tuple(listeners)) and time.monotonic() < until_s:
        time.sleep(_LOOK_S)


def _end(call: StepCall) -> None:
    thread = get_ident()
    calls = _calls.get(thread)
    if calls is None or call not in calls:
        return
    behind = calls.index(call) + 1
    _settle(calls[behind:], None)  # they have raised, and that was caught
    _settle([call], sys.exception())
    del calls[behind - 1 :]
    if not calls:
        _calls.pop(thread, None)
        for each in tuple(listeners):
            each.steps_ended()


def _settle(calls: Iterable[StepCall], error: BaseException | None) -> None:
    """Records how these calls ended, only once, because several hooks may see the same end."""
    for call in calls:
        if call.is_settled:
            continue
        call.is_settled = True
        if call.is_whole:
            mend(parameters_of(call.optimizer))
            for each in tuple(listeners) if call.is_step else ():
                each.stepped(call.optimizer)
        elif call.has_begun and not hasattr(type(call.optimizer), "broken_off"):
            _breaks.append(Break(call.optimizer, error))


def whole_update(optimizer: Optimizer, act: Callable[[], object]) -> None:
    """Runs ``act``, of which no save may see a part, and which is no step of ``optimizer``."""
    call = StepCall(optimizer, is_wrapped=True, is_step=False)
    try:
        _begin(call)
        call.has_begun = True
        act()
        call.is_whole = True
    finally:
        _end(call)


def _call_step(
    optimizer: Optimizer,
    step: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    call = StepCall(optimizer, is_wrapped=True)
    try:  # around all of it: an interrupt comes between any two lines
        _begin_uncompiled(call)
        call.has_begun = True
        found = step(*arguments, **options)
        call.is_whole = True
        return found
    finally:
        _end_uncompiled(call)


def _before(optimizer: Optimizer, *_: object) -> None:
    """Torch's hook before a step. It is global: it also sees optimizers that were not handed
    over.
    """
    calls = _calls.get(get_ident())
    if calls and calls[-1].is_wrapped and calls[-1].optimizer is optimizer:
        return
    follow(optimizer)  # from the next one on
    call = StepCall(optimizer, is_wrapped=False)
    call.has_begun = True
    _begin(call)


def _after(optimizer: Optimizer, *_: object) -> None:
    """Torch's hook after a step that has not raised."""
    calls = _calls.get(get_ident())
    if calls and not calls[-1].is_wrapped and calls[-1].optimizer is optimizer:
        calls[-1].is_whole = True
        _end(calls[-1])


_STEPS = {
    (_TORCHS_STEP.co_name, _TORCHS_STEP.co_filename),
    *((each.__name__, each.__code__.co_filename) for each in (_call_step, whole_update)),
}
# Compiled steps run these functions uncompiled: their frames, threads and clocks cannot be
# compiled.
_begin_uncompiled = torch._disable_dynamo(_begin)
_end_uncompiled = torch._disable_dynamo(_end)
register_optimizer_step_pre_hook(torch._disable_dynamo(_before))
register_optimizer_step_post_hook(torch._disable_dynamo(_after))


# ── having it followed ───────────────────────────────────────────────────────────────────────


def follow(optimizer: Optimizer) -> None:
    """Wraps the optimizer's ``step``, once, in its class and where the instance has one of its
    own.
    """
    kind = type(optimizer)
    step = getattr(kind, "step", None)
    if isinstance(step, types.FunctionType) and not hasattr(step, _MARK):
        home = next(one for one in kind.__mro__ if "step" in vars(one))
        try:
            home.step = _of_class(step)  # type: ignore[attr-defined]
        except (AttributeError, TypeError):
            return  # torch's hooks are what there is, if any
    own = vars(optimizer).get("step")
    if own is not None and not hasattr(own, _MARK):
        optimizer.step = _of_instance(own, weakref.ref(optimizer))  # type: ignore[method-assign]


def is_followed(optimizer: Optimizer) -> bool:
    """True if the begin and the end of each of its steps are seen."""
    step = getattr(type(optimizer), "step", None)
    return hasattr(step, _MARK) or getattr(step, "__code__", None) is _TORCHS_STEP


def _of_class(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def step_call(self: Optimizer, *arguments: Any, **options: Any) -> Any:
        return _call_step(self, step, (self, *arguments), options)

    vars(step_call)[_MARK] = True
    return step_call


def _of_instance(step: Callable[..., Any], reference: weakref.ref[Optimizer]) -> Callable[..., Any]:
    """Wraps a ``step`` that schedulers and scalers have set on the instance."""
    inner = step.__func__ if isinstance(step, types.MethodType) else step

    @functools.wraps(inner)
    def step_call(*arguments: Any, **options: Any) -> Any:
        optimizer = reference()
        if optimizer is None:
            return inner(*arguments, **options)
        return _call_step(optimizer, inner, arguments, options)

    vars(step_call)[_MARK] = True
    if isinstance(step, types.MethodType):
        return types.MethodType(step_call, step.__self__)
    return step_call


# ── steps that broke off ─────────────────────────────────────────────────────────────────────


class Break:
    """A step that raised: ``parameters`` may have been updated in part."""

    def __init__(self, optimizer: Optimizer, error: BaseException | None) -> None:
        self.why = "it did not end" if error is None else f"{type(error).__name__}: {error}"
        self.name = type(optimizer).__qualname__
        self._parameters = [weakref.ref(one) for one in parameters_of(optimizer)]

    def concerns(self, parameters: set[int]) -> bool:
        """True if one of these ids is among its parameters."""
        living = (one() for one in self._parameters)
        return any(id(one) in parameters for one in living if one is not None)


_breaks: list[Break] = []


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yields the parameters that an optimizer updates."""
    for group in optimizer.param_groups:
        yield from group["params"]


def find_break(
    held: Callable[[], Mapping[str, Iterable[torch.Tensor]]],
) -> tuple[str, Break] | None:
    """Returns a step that left tensors half-updated which are ``held`` under a key, and that
    key.
    """
    if not _breaks:
        return None
    known = {key: set(map(id, tensors)) for key, tensors in held().items()}
    for each in tuple(_breaks):
        for key, ids in known.items():
            if each.concerns(ids):
                return key, each
    return None


def mend(parameters: Iterable[torch.Tensor]) -> None:
    """Marks these parameters as whole again."""
    if _breaks:
        ids = set(map(id, parameters))
        _breaks[:] = [each for each in _breaks if not each.concerns(ids)]
