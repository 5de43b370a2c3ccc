"""A device that fails: training goes on or ends by its own error, and older snapshots load.

Every step of the training is known without a look at the device, so that each snapshot that was
captured is compared whatever has become of it.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.accelerator import devices
from holdfast.capture import pinning, staging
from holdfast.events import Warned
from support.runs.mishaps import listening

pytestmark = pytest.mark.gpu

WIDTH, LAYERS, STEPS = 200, 3, 4


def build(device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).to(device)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)}


def train(state: dict[str, Any]) -> None:
    for parameter in state["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    state["optimizer"].step()


def truths() -> list[list[torch.Tensor]]:
    """The parameters after each step."""
    state, found = build("cpu"), []
    for _ in range(STEPS + 1):
        train(state)
        found.append([parameter.detach().clone() for parameter in state["model"].parameters()])
    return found


def break_device(sim: Any, chance: random.Random) -> None:
    sim.fail(**{chance.choice(["kernel", "down"]): chance.randrange(1, 30)})


def hang_device(sim: Any, chance: random.Random) -> None:
    sim.fail(**{chance.choice(["kernel", "down"]): chance.randrange(1, 30)}, hangs=1)
    threading.Timer(chance.random(), sim.recover).start()


def fill_device(sim: Any, chance: random.Random) -> None:
    sim.fail(allocation=chance.randrange(1, 40))


def fork(sim: Any, chance: random.Random) -> None:
    child = os.fork()
    if not child:
        time.sleep(chance.random() / 10)
        os._exit(0)
    threading.Thread(target=os.waitpid, args=(child, 0)).start()


def nothing(sim: Any, chance: random.Random) -> None:
    """What was refused was refused at the start."""


@contextmanager
def refusing(sim: Any, fault: str, chance: random.Random) -> Iterator[None]:
    if fault == "refused":
        sim.fail(registration=1, registrations=1000)
    elif fault == "half refused":
        sim.fail(registration=chance.randrange(1, 6), registrations=1000)
    yield


FAULTS: dict[str, Callable[[Any, random.Random], None]] = {
    "broken": break_device,
    "hung": hang_device,
    "full": fill_device,
    "forked": fork,
    "refused": nothing,
    "half refused": nothing,
}


def live(root: Path, sim: Any, fault: str, seed: int) -> tuple[list[int], BaseException | None]:
    """Train with saves while the fault happens; the steps that were captured, and how it ended."""
    chance, state, ended = random.Random(f"{fault} {seed}"), build("sim"), None
    handles: dict[int, holdfast.SaveHandle] = {}
    with refusing(sim, fault, chance):
        checkpointer = holdfast.Checkpointer(root, state, storage=None)
        try:
            for step in range(STEPS):
                train(state)
                if step == 1:
                    FAULTS[fault](sim, chance)
                handles[step] = checkpointer.save(step, durable=True)
                if step == 0:
                    handles[step].wait_durable(60)
                if chance.random() < 0.5:
                    time.sleep(chance.random() / 20)
        except RuntimeError as error:
            ended = error
        captured = []
        for step, handle in handles.items():
            try:
                handle.wait_durable(20)
                captured.append(step)
            except (holdfast.HoldfastError, RuntimeError):
                continue
        sim.recover()
        with suppress(holdfast.HoldfastError):
            checkpointer.close(20)
    return captured, ended


def check(root: Path, device: str, fault: str, seed: int) -> None:
    if device != "sim":
        pytest.skip("a real device is not broken on purpose")
    captured, ended = live(root, sys.modules["simdev"], fault, seed)
    assert 0 in captured
    if fault not in ("broken", "full"):
        assert ended is None
    if fault not in ("broken", "full", "hung"):
        assert captured == list(range(STEPS))
    expected = truths()
    for step in captured:
        again = build("cpu")
        holdfast.load(root, again, step)
        found = again["model"].parameters()
        assert all(
            torch.equal(one.detach(), other)
            for one, other in zip(found, expected[step], strict=True)
        )


@pytest.mark.promise
@pytest.mark.untimed
def test_where_nothing_can_be_pinned_saves_and_restores_are_right_and_it_is_said_once(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device != "sim":
        pytest.skip("a real device pins what it is asked for")
    simdev: Any = sys.modules["simdev"]
    simdev.fail(registration=1, registrations=1000, pinning=1)
    monkeypatch.setattr(staging, "pieces", staging.StagingPieces())
    monkeypatch.setattr(devices, "_refused", [])
    state, again = build(device), build(device)
    with listening() as events, holdfast.Checkpointer(tmp_path, state, storage=None) as ckpt:
        for step in range(2):
            train(state)
            ckpt.save(step, durable=True).wait_durable(60)
        holdfast.load(tmp_path, again)
    found = [one.detach().cpu() for one in again["model"].parameters()]
    assert all(map(torch.equal, found, truths()[1]))
    warned = [one.message for one in events if isinstance(one, Warned)]
    assert len([one for one in warned if "no pinned memory could be allocated" in one]) == 1


RUNS = [0, *(pytest.param(run, marks=pytest.mark.slow) for run in range(1, 10))]


@pytest.mark.promise
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_device_that_fails_harms_no_snapshot_that_was_captured(
    tmp_path: Path,
    device: str,
    fault: str,
    run: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("holdfast.capture.copier.PIECE_BYTES", 1 << 18)
    monkeypatch.setattr(pinning.Pins.__init__, "__defaults__", (1 << 18,))
    delays = request.node.callspec.params["device"]
    check(tmp_path, device, fault, 1000 * (delays.seed if delays else 0) + run)
