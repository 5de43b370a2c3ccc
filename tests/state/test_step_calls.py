"""Steps of optimizers are followed from end to end, whoever wraps, takes or interrupts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from holdfast.accelerator import devices
from holdfast.state import step_calls
from support.models.mid_step import Training, at_bytecode


class Listener:
    """Hears of steps."""

    has_deferred = False

    def __init__(self) -> None:
        self.heard: list[str] = []

    def fence(self) -> None:
        self.heard.append("fence")

    def stepping(self, _: Optimizer) -> None:
        self.heard.append("stepping")

    def stepped(self, _: Optimizer) -> None:
        self.heard.append("stepped")

    def steps_ended(self) -> None:
        self.heard.append("ended")

    def end_capture(self, *, timeout_s: float) -> bool:
        return True


ONE_STEP = ["fence", "stepping", "stepped", "ended"]


@pytest.fixture
def listener() -> Iterator[Listener]:
    one = Listener()
    step_calls.listeners.add(one)
    yield one
    step_calls.listeners.discard(one)
    step_calls._breaks.clear()
    assert not step_calls._calls


def test_a_step_is_one_however_often_it_is_wrapped(listener: Listener) -> None:
    training = Training("adamw")
    torch.optim.lr_scheduler.StepLR(training.optimizer, 1)  # puts a step into the instance
    for _ in range(3):
        step_calls.follow(training.optimizer)
        listener.heard.clear()
        training.step()
        assert listener.heard == ONE_STEP


def test_a_step_of_a_subclass_that_calls_that_of_its_base_is_one(listener: Listener) -> None:
    class Careful(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    training = Training("sgd")
    training.optimizer = Careful(training.model.parameters(), 0.1)
    step_calls.follow(training.optimizer)
    training.step()
    assert listener.heard[0] == "fence" and listener.heard[-1] == "ended"
    assert listener.heard.count("stepped") == 1


def test_an_interrupt_between_any_two_bytecodes_leaves_no_step_under_way(
    listener: Listener,
) -> None:
    training = Training("sgd")
    training.step()
    training.prepare()
    with at_bytecode(0, lambda: None) as count:
        training.call_step()

    def interrupt() -> None:
        raise KeyboardInterrupt

    for number in range(1, count(), 3):
        training.prepare()
        try:
            with at_bytecode(number, interrupt):
                training.call_step()
        except KeyboardInterrupt:
            torch.set_grad_enabled(True)  # torch's own blocks may not have been left in order
            assert not step_calls.is_under_way(), f"at bytecode {number}"
        listener.heard.clear()
        training.step()
        assert listener.heard == ONE_STEP, f"behind bytecode {number}"
        assert step_calls.find_break(lambda: {"model": training.model.parameters()}) is None


def test_a_forked_child_is_in_no_step(listener: Listener) -> None:
    training = Training("sgd")
    children: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            os._exit(int(step_calls.is_under_way() or bool(step_calls.listeners)))
        children.append(child)

    training.step(fork)
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
    assert listener.heard == ONE_STEP


def test_steps_of_tensors_that_have_no_device_behind_them_are_left_alone(
    listener: Listener,
) -> None:
    """The hooks see the steps of every optimizer, also of those that are only planned."""
    with FakeTensorMode():
        parameter = torch.nn.Parameter(torch.empty(3, device="cuda"))
        parameter.grad = torch.empty(3, device="cuda")
        torch.optim.SGD([parameter], 0.1, foreach=False).step()
    assert "fence" in listener.heard


@pytest.mark.parametrize("kind", ["xla", "hpu", "mps"])
def test_a_device_that_torch_does_not_call_the_accelerator_captures_nothing(kind: str) -> None:
    assert not devices.is_capturing(torch.device(kind, 0))
