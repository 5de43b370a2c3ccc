"""Forks at every step of a save, as data loaders make them: a child does nothing of its parent's.

The thread that saves stops before calls chosen by seed, until a child was forked there. The child
lets go of all it has, runs what a process runs at its end, and exits.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from gpu.test_device_faults import STEPS, build, train, truths
from holdfast.events import ImagePassed
from support.project.devices import leave_out_objects
from support.runs.mishaps import listening

pytestmark = pytest.mark.gpu

FORKS = 4
"""In each save."""
#: The arena has room for no two images: they pass through a ring.
RING_ARENA_BYTES = 4 << 20


class ForkGate:
    """Stops the thread that saves before some calls of ours, until there is a child."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._calls, self._calls_of_last = 0, FORKS
        self._forks_at: set[int] = set()
        self._stopped, self._go_on = threading.Event(), threading.Event()
        self.children: list[int] = []

    def watch_call(self, frame: FrameType, event: str, _: object) -> None:
        """Is told of every call on a thread that was started since."""
        if event != "call" or "src/holdfast/" not in frame.f_code.co_filename:
            return
        if threading.current_thread().name != "holdfast-capture":
            return
        if self._calls in self._forks_at:
            self._stopped.set()
            self._go_on.wait(5)
            self._go_on.clear()
        self._calls += 1

    def close(self) -> None:
        """Chooses where the next save is forked: among as many calls as the last one made."""
        self._stopped.clear()
        self._go_on.clear()
        self._calls = 0
        self._forks_at = set(self._chance.sample(range(self._calls_of_last), FORKS))

    def fork_beside(self, handle: holdfast.SaveHandle, run: ForkedRun) -> None:
        """Forks on the calling thread wherever the save stops, until it is captured."""
        until_s = time.monotonic() + 60
        while handle.state == "pending":
            assert time.monotonic() < until_s
            if self._stopped.wait(0.002):
                self._stopped.clear()
                child = os.fork()
                if not child:
                    end_child(run, is_script=bool(len(self.children) % 2))
                self.children.append(child)
                self._go_on.set()
        self._calls_of_last, self._forks_at = self._calls, set()
        self._go_on.set()


def end_child(run: ForkedRun, *, is_script: bool) -> None:
    """Ends like the worker of a data loader, or like a script; exits with 1 after any exception."""
    failed: list[object] = []
    sys.unraisablehook = failed.append
    # Whatever waits for a thread of the parent ends, and is shown.
    faulthandler.dump_traceback_later(60, exit=True, file=2)
    try:
        if run.checkpointer is not None:
            run.checkpointer.close()
        vars(run).clear()
        gc.collect()
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            kept = finalizer.peek()
            if kept is not None and kept[1].__module__.startswith("holdfast."):
                finalizer()
        if is_script:
            atexit.unregister(sys.modules["device.simulator"].calm)
            atexit._run_exitfuncs()
    except BaseException as error:
        failed.append(error)
    os._exit(1 if failed else 0)


class ForkedRun:
    """Training with a save at each step. A child clears it, so nobody else keeps what it has."""

    def __init__(self, root: Path, device: str, chance: random.Random) -> None:
        self.state, self.chance = build(device), chance
        self.gate = ForkGate(chance)
        self.handles: list[holdfast.SaveHandle] = []
        self.checkpointer: holdfast.Checkpointer | None = None
        threading.setprofile(self.gate.watch_call)
        try:
            self.checkpointer = holdfast.Checkpointer(root, self.state, storage=None)
        finally:
            threading.setprofile(None)

    def train(self) -> None:
        for step in range(STEPS):
            train(self.state)
            self.gate.close()
            assert self.checkpointer is not None
            self.handles.append(self.checkpointer.save(step, durable=True))
            self.gate.fork_beside(self.handles[-1], self)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.capture.copier.PIECE_BYTES", 1 << 18)


@pytest.fixture
def frozen() -> None:
    """A child collects what was made since, and not all of torch and pytest."""
    leave_out_objects()  # for good: collections of tests behind this one would take long otherwise


def ended(children: list[int]) -> Iterator[int]:
    for child in children:
        yield os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.promise
@pytest.mark.usefixtures("small_pieces", "frozen")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    "run", [0, *(pytest.param(run, marks=pytest.mark.slow) for run in range(1, 5))]
)
@pytest.mark.parametrize("arena_bytes", [0, RING_ARENA_BYTES])
def test_a_process_that_forks_at_any_step_of_a_save_goes_on_and_all_its_snapshots_are_right(
    tmp_path: Path,
    device: str,
    arena_bytes: int,
    run: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device != "sim":
        pytest.skip("a real device cannot be forked beside at will")
    if arena_bytes:
        monkeypatch.setenv("HOLDFAST_ARENA_BYTES", str(arena_bytes))
    delays: Any = request.node.callspec.params["device"]
    training = ForkedRun(tmp_path, device, random.Random(f"{delays.seed} {run}"))
    with listening() as events:
        training.train()
        for handle in training.handles:
            handle.wait_durable(60)
        assert training.checkpointer is not None
        training.checkpointer.close()
    assert any(isinstance(event, ImagePassed) for event in events) == bool(arena_bytes)
    assert len(training.gate.children) >= STEPS  # a save may make fewer calls than the one before
    assert set(ended(training.gate.children)) == {0}
    expected = truths()
    for step in range(STEPS):
        again = build("cpu")
        holdfast.load(tmp_path, again, step)
        model: nn.Module = again["model"]
        for found, truth in zip(model.parameters(), expected[step], strict=True):
            assert torch.equal(found.detach(), truth)
