"""A trainer is told to end, or interrupted at the keyboard: the next start goes on from there."""

from __future__ import annotations

import gc
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

import holdfast
from holdfast.capture.saver import Saver
from holdfast.capture.task import CaptureTask
from support.runs.evidence import check_storage
from support.runs.lives import (
    PHASES,
    Lives,
    build,
    read_progress,
    read_signpost,
    take_step,
    wrong_elements,
)
from support.runs.torchruns import SCRIPT, environment, write_life


def start_script(lives: Lives, steps: int) -> subprocess.Popen[str]:
    """One rank as a user starts it: a script in the foreground, nothing around it."""
    life = lives.plan(1, steps, layout="plain")
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), write_life(life)],
        env=environment() | {"PYTHONFAULTHANDLER": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


def last_words(process: subprocess.Popen[str]) -> str:
    """What the script printed until it ended; what its threads were doing if it does not end."""
    try:
        return process.communicate(timeout=30)[1]
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        pytest.fail(f"the script goes on after the signal, in:\n{process.communicate()[1]}")


def wait_phase(directory: str, phase: str, completed: int) -> None:
    """Wait until the script is in ``phase``, and at least ``completed`` was reached."""
    deadline = time.monotonic() + 60
    while True:
        found = read_signpost(directory, 0)
        if found[1] == "closed" or (found[1] == phase and found[0] >= completed):
            return
        assert time.monotonic() < deadline, f"{phase} did not come: {found}"
        time.sleep(0.0005)


def interrupt_scripts(root: Path, kinds: list[tuple[str, signal.Signals]]) -> None:
    """A script is started again and again, and gets this signal in this phase."""
    chance, completed = random.Random(4), -1
    lives = Lives(root, seed=4)
    for phase, signum in kinds:
        process = start_script(lives, 100_000)
        directory = f"{lives.directory}/round-0"
        wait_phase(directory, phase, completed + 3 if phase in PHASES[2:] else -1)
        time.sleep(chance.random() * 0.003)
        process.send_signal(signum)
        said = last_words(process)
        if signum == signal.SIGTERM:
            assert process.returncode == -signal.SIGTERM and "Traceback" not in said
        else:
            assert process.returncode == -signal.SIGINT, (process.returncode, said)
            assert said.rstrip().endswith("KeyboardInterrupt"), said
            assert said.count("Traceback") == 1, said
        report = Path(directory) / "restored-0"
        if report.exists():
            step, source, wrong = report.read_text().split(" ", 2)
            assert wrong == "[]" and int(step) in (completed, completed - 1), report.read_text()
            assert source == ("memory" if completed >= 0 else "")
        completed = max(completed, read_progress(directory, 1))
    process = start_script(lives, 2)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    step, source, wrong = (Path(lives.directory) / "round-0/restored-0").read_text().split(" ", 2)
    assert wrong == "[]" and int(step) in (completed, completed - 1) and source == "memory"
    check_storage(root, int(step) + 2)


@pytest.mark.timeout(300)
def test_a_trainer_told_to_end_or_interrupted_is_resumed_where_it_was(tmp_path: Path) -> None:
    """SIGTERM with its default action; SIGINT, a KeyboardInterrupt in whatever was being done."""
    kinds = [("save", signal.SIGINT), ("update", signal.SIGTERM), ("restore", signal.SIGINT)]
    interrupt_scripts(tmp_path / "run", kinds)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_trainer_is_resumed_wherever_it_was_told_to_end_or_interrupted(tmp_path: Path) -> None:
    kinds = [(phase, n) for n in (signal.SIGINT, signal.SIGTERM) for phase in PHASES[:-1] * 2]
    random.Random(5).shuffle(kinds)
    interrupt_scripts(tmp_path / "run", kinds)


class Interrupts:
    """KeyboardInterrupt in this thread, at random moments, but only inside what it is told.

    Outside it would tear the user's own update, which nobody can mend.
    """

    def __init__(self, seed: int, latest_s: float) -> None:
        self.chance, self.latest_s, self.raised = random.Random(seed), latest_s, 0
        self._is_inside = False
        signal.signal(signal.SIGALRM, self._raise)

    def _raise(self, _: int, frame: FrameType | None) -> None:
        if self._is_inside and is_swallowed(frame):
            signal.setitimer(signal.ITIMER_REAL, 1e-4)
        elif self._is_inside:
            self._is_inside = False
            self.raised += 1
            raise KeyboardInterrupt

    def during(self, act: Callable[[], object]) -> bool:
        """Call ``act``, which an interrupt may end; whether it came to its end."""
        try:
            self._is_inside = True
            signal.setitimer(signal.ITIMER_REAL, self.chance.random() * self.latest_s + 1e-6)
            act()
            self._is_inside = False
            return True
        except KeyboardInterrupt:
            return False


def is_swallowed(frame: FrameType | None) -> bool:
    """Whether what is raised here goes nowhere: where a reference died."""
    while frame is not None:
        if frame.f_code.co_name in ("__del__", "_remove", "remove"):
            return True
        frame = frame.f_back
    return False


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    """Interrupts within a few milliseconds: as long as a save, a fence or a restore takes."""
    gc.disable()  # what is raised in a callback of the collector goes nowhere
    yield Interrupts(seed=3, latest_s=0.004)
    gc.enable()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


@pytest.mark.timeout(300)
def test_who_interrupts_a_save_or_a_fence_may_go_on_in_the_same_process(
    tmp_path: Path, interrupts: Interrupts
) -> None:
    """A notebook: the user interrupts, looks, and goes on."""
    model, state = build("plain")
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=holdfast.Every(steps=7))
    step = -1
    while interrupts.raised < 25:
        step += 1
        interrupts.during(checkpointer.before_update)
        take_step(model, state, step)
        interrupts.during(lambda at=step: checkpointer.step(at))  # type: ignore[misc]
    step += 1
    take_step(model, state, step)
    checkpointer.save(step, durable=True).wait_durable(60)
    checkpointer.close()
    check_storage(tmp_path, step)


@contextmanager
def interrupted_at(code: CodeType, number: int) -> Iterator[Callable[[], bool]]:
    """KeyboardInterrupt before the line of this number that runs in ``code``; says if it came."""
    seen = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal seen
        if frame.f_code is not code:
            return None
        if event == "line":
            seen += 1
            if seen == number:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lambda: seen >= number
    finally:
        sys.settrace(before)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", [Saver._hand_over, CaptureTask.begin])
def test_after_an_interrupt_between_any_two_lines_no_step_waits_and_the_next_save_is_taken(
    tmp_path: Path, method: FunctionType
) -> None:
    model, state = build("plain")
    step, is_over = 0, False
    with holdfast.Checkpointer(tmp_path, state, memory=None, storage=None) as checkpointer:
        for number in count(1):
            take_step(model, state, step)
            with interrupted_at(method.__code__, number) as has_come:
                with suppress(KeyboardInterrupt):
                    checkpointer.save(step + 1)
                is_over = not has_come()
            began_s = time.monotonic()
            take_step(model, state, step + 1)
            assert time.monotonic() - began_s < 4, f"an update was held by line {number}"
            step += 2
            checkpointer.save(step).wait_captured(10)
            if is_over:
                break


@pytest.mark.timeout(300)
def test_an_interrupted_restore_can_be_repeated_and_nothing_is_saved_in_between(
    tmp_path: Path, interrupts: Interrupts
) -> None:
    model, state = build("plain")
    with holdfast.Checkpointer(tmp_path, state) as first:
        take_step(model, state, 0)
        first.save(0, durable=True).wait_durable(60)
    model, state = build("plain")
    with holdfast.Checkpointer(tmp_path, state) as second:
        while interrupts.raised < 15:
            if interrupts.during(second.restore):
                break
            with pytest.raises((holdfast.StatePoisoned, holdfast.UsageError)):
                second.step(1)
        restored = second.restore()
        assert restored is not None and restored.step == 0
        assert not wrong_elements(model, state, 0)
        take_step(model, state, 1)
        second.step(1)
    check_storage(tmp_path, 1)
