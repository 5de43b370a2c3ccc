"""A save asked for while an optimizer steps is the state at the end of that step, or refused."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import holdfast
from holdfast import Every, SnapshotSkipped, UnsupportedState, UsageError
from holdfast.state import step_calls
from support.models.mid_step import OPTIMIZERS, Copy, Training, are_equal, restored

ONLY_WHEN_ASKED: dict[str, Any] = {"memory": None, "storage": None}


@pytest.fixture(autouse=True)
def no_step_broke_off_before() -> Iterator[None]:
    yield
    step_calls._breaks.clear()
    assert not step_calls._calls, "a step is believed to be under way"


def opened(root: Path, training: Training) -> holdfast.Checkpointer:
    return holdfast.Checkpointer(root, training.state, **ONLY_WHEN_ASKED)


def check_stored(root: Path, training: Training, step: int, expected: Copy) -> None:
    assert are_equal(restored(root, training.kind, step), expected)


# ── where a save may be asked for ────────────────────────────────────────────────────────────


def in_a_closure(training: Training, save: Callable[[], Any]) -> Copy:
    return training.step(save)


def in_a_pre_hook(training: Training, save: Callable[[], Any]) -> Copy:
    handle = training.optimizer.register_step_pre_hook(lambda *_: save())
    try:
        return training.step()
    finally:
        handle.remove()


def in_a_post_hook(training: Training, save: Callable[[], Any]) -> Copy:
    def hook(*_: Any) -> None:
        save()
        with torch.no_grad():  # what the hook does belongs to the step
            for parameter in training.model.parameters():
                parameter.mul_(0.5)

    handle = training.optimizer.register_step_post_hook(hook)
    try:
        return training.step()
    finally:
        handle.remove()


def in_a_handler(training: Training, save: Callable[[], Any]) -> Copy:
    before = signal.signal(signal.SIGUSR1, lambda *_: save())
    try:
        return training.step(lambda: signal.raise_signal(signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)


def on_another_thread(training: Training, save: Callable[[], Any]) -> Copy:
    def elsewhere() -> None:
        thread = threading.Thread(target=save)
        thread.start()
        thread.join()

    return training.step(elsewhere)


def in_a_step_within_a_step(training: Training, save: Callable[[], Any]) -> Copy:
    other = Training("sgd", seed=5)

    def step_other(*_: Any) -> None:
        other.step(save)

    handle = training.optimizer.register_step_pre_hook(step_other)
    try:
        return training.step()
    finally:
        handle.remove()


def in_a_compiled_step(training: Training, save: Callable[[], Any]) -> Copy:
    step = torch.compile(training.optimizer.step, backend="eager")
    training.prepare()
    handle = training.optimizer.register_step_pre_hook(torch.compiler.disable(lambda *_: save()))
    try:
        step() if training.kind != "lbfgs" else training.call_step()
    finally:
        handle.remove()
    training.copies.append(training.copy())
    return training.copies[-1]


PLACES = (
    in_a_closure,
    in_a_pre_hook,
    in_a_post_hook,
    in_a_handler,
    on_another_thread,
    in_a_step_within_a_step,
)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("durable", [True, False], ids=["durable", "in memory"])
def test_a_save_in_the_middle_of_a_step_is_the_state_at_its_end(
    tmp_path: Path, kind: str, durable: bool
) -> None:
    training = Training(kind)
    with opened(tmp_path, training) as checkpointer:
        training.step()
        for number, place in enumerate(PLACES):
            handles: list[holdfast.SaveHandle] = []

            def save() -> None:
                if not handles:  # noqa: B023
                    handles.append(checkpointer.save(number, durable=durable))  # noqa: B023

            expected = place(training, save)
            (handle,) = handles
            handle.wait_captured(60)
            if not durable:
                handle = checkpointer.save(number, durable=True)
            handle.wait_durable(60)
            assert (handle.requested_step, handle.step) == (number, number)
            check_stored(tmp_path, training, number, expected)


@pytest.mark.filterwarnings("ignore")  # torch's own, of what it does not compile
@pytest.mark.parametrize("kind", ["adamw", "sgd foreach"])
def test_a_save_in_the_middle_of_a_compiled_step_is_the_state_at_its_end(
    tmp_path: Path, kind: str
) -> None:
    training = Training(kind)
    with opened(tmp_path, training) as checkpointer:
        for number in range(3):
            handles: list[Any] = []
            expected = in_a_compiled_step(
                training,
                lambda: handles.append(checkpointer.save(number, durable=True)),  # noqa: B023
            )
            handles[0].wait_durable(60)
            check_stored(tmp_path, training, number, expected)


@pytest.mark.promise
def test_a_step_that_a_scheduler_or_scaler_calls_is_followed(tmp_path: Path) -> None:
    training = Training("adamw")
    optimizer = training.optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it keeps a `step` of its own
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with opened(tmp_path, training) as checkpointer:
        for number in range(3):
            training.prepare()
            handles: list[Any] = []
            hook = optimizer.register_step_pre_hook(
                lambda *_: handles.append(checkpointer.save(number, durable=True))  # noqa: B023
            )
            scaler.scale(torch.zeros(()))
            scaler.step(optimizer)
            scaler.update()
            hook.remove()
            expected = training.copy()
            scheduler.step()
            handles[0].wait_durable(60)
            check_stored(tmp_path, training, number, expected)


def test_what_a_policy_makes_due_in_a_hook_is_saved_at_the_end_of_the_step(tmp_path: Path) -> None:
    training = Training("sgd")
    handles: list[Any] = []
    with holdfast.Checkpointer(
        tmp_path, training.state, memory=None, storage=Every(steps=2)
    ) as checkpointer:
        training.optimizer.register_step_post_hook(
            lambda *_: handles.append(checkpointer.step(len(handles) + 1))
        )
        for _ in range(4):
            training.step()
        assert [handle is not None for handle in handles] == [True, False, True, False]
        handles[2].wait_durable(60)
    for number in (1, 3):
        check_stored(tmp_path, training, number, training.copies[number - 1])


def test_a_save_by_a_handler_in_the_middle_of_another_save_is_taken_behind_it(
    tmp_path: Path,
) -> None:
    training = Training("sgd")
    handles: list[Any] = []

    armed: list[bool] = []

    class Interrupted:
        def state_dict(self) -> dict[str, int]:
            if armed and not handles:
                handles.append(checkpointer.save(1, durable=True))
                with pytest.raises(UsageError, match="in the middle of another save"):
                    handles[0].wait_durable(60)
            return {}

        def load_state_dict(self, _: dict[str, int]) -> None:
            """There is nothing to it."""

    expected = training.step()
    state = {**training.state, "interrupted": Interrupted()}
    with holdfast.Checkpointer(tmp_path, state, **ONLY_WHEN_ASKED) as checkpointer:
        armed.append(True)
        checkpointer.save(0, durable=True)
        handles[0].wait_durable(60)
    handles.append(None)
    for number in (0, 1):
        other = Training("sgd", seed=9)
        other.step()
        holdfast.load(tmp_path, {**other.state, "interrupted": Interrupted()}, step=number)
        assert are_equal(other.copy(), expected)


# ── what cannot be done in a step ────────────────────────────────────────────────────────────


def test_what_would_wait_for_its_own_step_is_refused_at_once(tmp_path: Path) -> None:
    training = Training("sgd")
    with opened(tmp_path, training) as checkpointer:
        handles: list[Any] = []

        def inside() -> None:
            handle = checkpointer.save(0, durable=True)
            handles.append(handle)
            for call in (
                handle.wait_captured,
                handle.wait_durable,
                checkpointer.close,
                checkpointer.restore,
            ):
                with pytest.raises(UsageError, match="in the middle of an optimizer's step"):
                    call()
            with pytest.raises(UsageError, match="in the middle of an optimizer's step"):
                holdfast.save(tmp_path / "other", training.state)
            with pytest.raises(UsageError, match="in the middle of an optimizer's step"):
                holdfast.load(tmp_path / "other", training.state)

        training.step(inside)
        handles[0].wait_durable(60)


def test_who_waits_on_another_thread_is_told_when_the_step_has_ended(tmp_path: Path) -> None:
    training = Training("sgd")
    waiting: list[threading.Thread] = []
    said: list[str] = []
    with opened(tmp_path, training) as checkpointer:

        def inside() -> None:
            handle = checkpointer.save(0)

            def wait() -> None:
                with suppress(holdfast.DeadlineExceeded):
                    handle.wait_captured(0)
                    said.append("captured in the middle")
                handle.wait_captured(60)
                said.append(handle.state)

            waiting.append(threading.Thread(target=wait))
            waiting[0].start()

        training.step(inside)
        waiting[0].join(60)
        assert said == ["captured"]


# ── steps that raise ─────────────────────────────────────────────────────────────────────────


class Oops(Exception):
    pass


def fail() -> None:
    raise Oops


@contextmanager
def failing_hook(optimizer: Optimizer, which: str) -> Iterator[None]:
    handle = getattr(optimizer, f"register_step_{which}_hook")(lambda *_: fail())
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("where", ["closure", "pre", "post"])
def test_after_a_step_that_raised_nothing_is_saved_until_the_next_whole_one(
    tmp_path: Path, where: str
) -> None:
    training = Training("sgd")
    handles: list[Any] = []

    def save_and_fail() -> None:
        handles.append(checkpointer.save(1, durable=True))
        fail()

    with opened(tmp_path, training) as checkpointer:
        checkpointer.save(0, durable=True)
        training.prepare()
        if where == "closure":
            with pytest.raises(Oops):
                training.call_step(save_and_fail)
            with pytest.raises(SnapshotSkipped, match=r"a step of SGD raised .Oops"):
                handles[0].wait_durable(60)
        else:
            with failing_hook(training.optimizer, where), pytest.raises(Oops):
                training.call_step()
        with pytest.raises(UnsupportedState, match=r"a step of SGD raised .Oops"):
            checkpointer.save(2)
        with pytest.raises(UnsupportedState, match="the state of no step"):
            holdfast.save(tmp_path / "other", training.state)
        expected = training.step()
        checkpointer.save(3, durable=True).wait_durable(60)
    check_stored(tmp_path, training, 3, expected)


def test_a_restore_makes_whole_what_a_step_left_half_way(tmp_path: Path) -> None:
    training = Training("sgd")
    training.step()
    holdfast.save(tmp_path / "one", training.state, 0)
    training.prepare()
    with pytest.raises(Oops):
        training.call_step(fail)
    with pytest.raises(UnsupportedState, match="the state of no step"):
        holdfast.save(tmp_path / "two", training.state)
    other = Training("adamw")
    holdfast.save(tmp_path / "other", other.state)  # that of another training is whole
    holdfast.load(tmp_path / "one", training.state)
    holdfast.save(tmp_path / "two", training.state)


def test_a_step_that_raised_is_remembered_though_its_optimizer_is_gone(tmp_path: Path) -> None:
    training = Training("sgd")
    training.prepare()
    with opened(tmp_path, training) as checkpointer:
        with pytest.raises(Oops):
            training.call_step(fail)
        training.state["optimizer"] = training.optimizer = OPTIMIZERS["sgd"](training.model)
        gc.collect()
        with pytest.raises(UnsupportedState, match="the state of no step"):
            checkpointer.save(0)
        training.step()
        checkpointer.save(1).wait_captured(60)


def test_a_step_called_by_a_function_from_before_is_followed_by_torchs_hooks(
    tmp_path: Path,
) -> None:
    class Own(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            if closure is not None:
                closure()
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad)

    training = Training("sgd")
    optimizer = training.optimizer = training.state["optimizer"] = Own(training.model.parameters())
    step: Any = optimizer.step
    assert step.__func__.__code__ is step_calls._TORCHS_STEP
    handles: list[Any] = []
    with opened(tmp_path, training) as checkpointer:
        training.prepare()
        step(lambda: handles.append(checkpointer.save(0, durable=True)))
        expected = training.copy()
        handles[0].wait_durable(60)
        with pytest.raises(Oops):
            step(fail)
        with pytest.raises(UnsupportedState, match=r"a step of .*Own raised"):
            checkpointer.save(1)
        step(lambda: handles.append(checkpointer.save(2)))
        handles[1].wait_captured(60)
    other = Training("sgd", seed=9)
    other.state["optimizer"] = other.optimizer = Own(other.model.parameters())
    holdfast.load(tmp_path, other.state, step=0)
    assert are_equal(other.copy(), expected)


class Unhooked(torch.optim.SGD):
    """Runs none of torch's hooks, and says that it does."""

    def step(self, closure: Any = None) -> Any:
        found = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad)
        return found

    step.hooked = True  # type: ignore[attr-defined]


class Sealed(type):
    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError(f"{name} of this class stays as it is")


class Unwrappable(Unhooked, metaclass=Sealed):
    def step(self, closure: Any = None) -> Any:
        """Nobody sees it begin or end."""

    step.hooked = True  # type: ignore[attr-defined]


def test_a_step_without_hooks_is_wrapped(tmp_path: Path) -> None:
    training = Training("sgd")
    training.state["optimizer"] = training.optimizer = Unhooked(training.model.parameters())
    with opened(tmp_path, training) as checkpointer:
        checkpointer.save(0).wait_captured(60)  # from here on it is known
        handles: list[Any] = []
        expected = training.step(lambda: handles.append(checkpointer.save(1, durable=True)))
        handles[0].wait_durable(60)
        bindings = checkpointer._saver.describer.describe().bindings
        assert all(binding.lazy for binding in bindings)
    other = Training("sgd", seed=9)
    other.state["optimizer"] = other.optimizer = Unhooked(other.model.parameters())
    holdfast.load(tmp_path, other.state, step=1)
    assert are_equal(other.copy(), expected)


def test_what_a_step_changes_that_cannot_be_followed_is_copied_before_save_returns(
    tmp_path: Path,
) -> None:
    training = Training("sgd")
    training.state["optimizer"] = training.optimizer = Unwrappable(training.model.parameters())
    with opened(tmp_path, training) as checkpointer:
        checkpointer.save(0).wait_captured(60)
        bindings = checkpointer._saver.describer.describe().bindings
        assert not any(binding.lazy for binding in bindings)


def test_steps_of_two_threads_that_are_never_both_at_rest_let_a_save_pass(tmp_path: Path) -> None:
    one, other = Training("sgd"), Training("sgd", seed=3)
    in_other, in_one = threading.Event(), threading.Event()
    handles: list[Any] = []

    def step_other() -> None:
        def inside() -> None:
            in_other.set()
            assert in_one.wait(60)

        other.step(inside)
        other.step(lambda: None)  # begins while the first thread is in its own

    with opened(tmp_path, one) as checkpointer:
        thread = threading.Thread(target=step_other)

        def inside() -> None:
            handles.append(checkpointer.save(0, durable=True))
            thread.start()
            assert in_other.wait(60)
            in_one.set()

        expected = one.step(inside)
        thread.join(60)
        handles[0].wait_durable(60)
    check_stored(tmp_path, one, 0, expected)


@contextmanager
def stepping_elsewhere(optimizer: Optimizer) -> Iterator[None]:
    """Another thread is in the middle of a step of ``optimizer`` meanwhile."""
    is_inside, may_go_on = threading.Event(), threading.Event()

    def hook(*_: Any) -> None:
        is_inside.set()
        assert may_go_on.wait(60)

    hold = optimizer.register_step_pre_hook(hook)
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    try:
        assert is_inside.wait(60)
        yield
    finally:
        may_go_on.set()
        thread.join(60)
        hold.remove()


@pytest.mark.promise
def test_a_step_of_another_training_on_another_thread_defers_no_save(tmp_path: Path) -> None:
    """Deferred to its end, a save would hold the buffers of this training's next step."""
    one, other = Training("sgd"), Training("sgd", seed=3)
    with opened(tmp_path, one) as checkpointer:
        one.step()
        checkpointer.save(0).wait_captured(60)
        expected = one.step()
        with stepping_elsewhere(other.optimizer):
            handle = checkpointer.save(1, durable=True)
            assert handle.held_up is None
            handle.wait_durable(60)
    check_stored(tmp_path, one, 1, expected)


@pytest.mark.parametrize("where", ["module", "value", "object", "inside"])
def test_a_step_of_whatever_updates_something_of_the_state_defers_a_save(
    tmp_path: Path, where: str
) -> None:
    training, latent = Training("sgd"), torch.ones(3, requires_grad=True)
    parameter = next(training.model.parameters()) if where == "module" else latent
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    held = {"latent": latent} if where != "inside" else {}
    holder = Holder(held, optimizer if where == "inside" else None)
    state = training.state | ({"latent": latent} if where == "value" else {})
    state |= {} if where in ("module", "value") else {"holder": holder}
    with holdfast.Checkpointer(tmp_path, state, **ONLY_WHEN_ASKED) as checkpointer:
        training.step()
        checkpointer.save(0).wait_captured(60)
        with stepping_elsewhere(optimizer):
            handle = checkpointer.save(1)
            assert handle.held_up is not None and handle.state == "pending"
        handle.wait_captured(60)


class Holder:
    """Gives tensors as its state, or copies of the tensors that an optimizer inside of it has."""

    def __init__(self, tensors: dict[str, Any], optimizer: Optimizer | None) -> None:
        self.tensors, self.optimizer = tensors, optimizer

    def state_dict(self) -> dict[str, Any]:
        if self.optimizer is None:
            return self.tensors
        groups = enumerate(self.optimizer.param_groups)
        return {str(n): [one.detach().clone() for one in g["params"]] for n, g in groups}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        """Nothing is restored here."""


def test_no_update_begins_while_another_thread_describes_the_state(tmp_path: Path) -> None:
    training = Training("sgd")
    describing, may_go_on = threading.Event(), threading.Event()
    armed: list[bool] = []

    class Slow:
        def state_dict(self) -> dict[str, int]:
            if not armed:
                return {}
            describing.set()
            assert may_go_on.wait(60)
            return {}

        def load_state_dict(self, _: dict[str, int]) -> None:
            """There is nothing to it."""

    slow = Slow()
    expected = training.step()
    state = {**training.state, "slow": slow}
    with holdfast.Checkpointer(tmp_path, state, **ONLY_WHEN_ASKED) as checkpointer:
        armed.append(True)
        handles: list[Any] = []
        thread = threading.Thread(target=lambda: handles.append(checkpointer.save(0, durable=True)))
        thread.start()
        assert describing.wait(60)
        threading.Timer(0.1, may_go_on.set).start()
        training.step()
        assert may_go_on.is_set(), "an update began while the state was described"
        thread.join(60)
        handles[0].wait_durable(60)
    other = Training("sgd", seed=9)
    other.step()
    holdfast.load(tmp_path, {**other.state, "slow": slow}, step=0)
    assert are_equal(other.copy(), expected)


def test_a_close_on_another_thread_waits_for_the_step_in_which_a_save_is_deferred(
    tmp_path: Path,
) -> None:
    training = Training("sgd")
    handles: list[Any] = []
    checkpointer = opened(tmp_path, training)
    closing = threading.Thread(target=checkpointer.close)

    def inside() -> None:
        handles.append(checkpointer.save(0, durable=True))
        closing.start()

    expected = training.step(inside)
    closing.join(60)
    assert not closing.is_alive()
    assert handles[0].state == "durable"
    check_stored(tmp_path, training, 0, expected)
