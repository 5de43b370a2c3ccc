"""Saves at random moments of random trainings, compared bit for bit with the end of their step."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

import holdfast
from holdfast import events
from support.models.mid_step import OPTIMIZERS, Copy, Training, are_equal, at_bytecode, restored
from support.runs.mishaps import listening

TORCHS = [kind for kind in OPTIMIZERS if "hybrid" not in kind]


class Oops(Exception):
    pass


@dataclass
class Asked:
    """A save, and what the state may be that it saves."""

    number: int
    handle: holdfast.SaveHandle
    is_deferred: bool
    may_be: list[Copy]


class Program:
    """A training and its saves, all drawn from one seed."""

    def __init__(self, root: Path, kind: str, seed: int, *, durable: bool) -> None:
        self.root, self.kind, self.durable = root, kind, durable
        self.random = random.Random(f"{kind} {seed} {durable}")
        self.training = Training(kind, seed)
        self.number = self.deferred = self.refused = 0
        self.bytecodes = 400
        self.pending: list[Asked] = []
        self.training.step()

    def run(self, steps: int) -> None:
        """So many steps, each of them with a save somewhere in it, or around it."""
        with holdfast.Checkpointer(
            self.root, self.training.state, memory=None, storage=None
        ) as checkpointer:
            self.checkpointer = checkpointer
            checkpointer.save(0).wait_captured(60)
            ways = [self.by_bytecode, self.by_bytecode, self.by_timer, self.by_thread, self.by_hook]
            if "hybrid" not in self.kind:  # they know themselves whether they broke off
                ways.append(self.that_raises)
            for _ in range(steps):
                self.random.choice(ways)()
                self.settle()
            self.by_hook()  # or closing would say that the last durable save was refused
            self.settle()

    def ask(self) -> None:
        """As a handler of a signal, a hook, or a thread does."""
        self.number += 1
        handle = self.checkpointer.save(self.number, durable=self.durable)
        is_deferred = handle.held_up is not None
        self.pending.append(Asked(self.number, handle, is_deferred, []))

    # ── a step with a save in it ─────────────────────────────────────────────────────────────

    def step(self, inside: Callable[[], object] | None = None) -> None:
        before = self.training.copies[-1]
        self.training.call_step(inside)
        self.end_step(before)

    def end_step(self, before: Copy) -> None:
        after = self.training.copy()
        self.training.copies.append(after)
        for asked in self.pending:
            asked.may_be += [after] if asked.is_deferred else [before, after]

    def by_bytecode(self) -> None:
        """Between two bytecodes of torch or of Holdfast."""
        self.training.prepare()
        with at_bytecode(self.random.randrange(1, self.bytecodes + 1), self.ask) as count:
            self.training.call_step()
        before = self.training.copies[-1]
        self.end_step(before)
        self.bytecodes = count() or self.bytecodes

    def by_timer(self) -> None:
        """By a real signal."""
        self.training.prepare()
        former = signal.signal(signal.SIGALRM, lambda *_: self.ask())
        try:
            signal.setitimer(signal.ITIMER_REAL, self.random.uniform(2e-6, 4e-4))
            self.step()
            while not self.pending:
                signal.sigtimedwait([], 0.001)
            for asked in self.pending:  # it may have come behind all of it
                asked.may_be = asked.may_be or [self.training.copies[-1]]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, former)

    def by_thread(self) -> None:
        """By another thread, at any time of two steps."""
        thread = threading.Thread(target=self.ask)
        before = self.training.copies[-1]
        self.training.prepare()
        if self.random.random() < 0.5:
            self.training.call_step(lambda: None if thread.ident else thread.start())
        else:
            thread.start()
            self.training.call_step()
        after = self.training.copy()
        self.training.copies.append(after)
        self.training.prepare()
        self.training.call_step()
        thread.join()
        last = self.training.copy()
        self.training.copies.append(last)
        self.pending[-1].may_be += [before, after, last]

    def by_hook(self) -> None:
        """In a hook of the step, or in its closure."""
        which = self.random.choice(["pre", "post", "closure"])
        self.training.prepare()
        if which == "closure":
            self.step(self.ask_once())
            return
        register = getattr(self.training.optimizer, f"register_step_{which}_hook")
        hook = register(lambda *_: self.ask())
        try:
            self.step()
        finally:
            hook.remove()

    def ask_once(self) -> Callable[[], None]:
        def ask() -> None:
            if not self.pending:
                self.ask()

        return ask

    def that_raises(self) -> None:
        """What is asked for in it is refused, and what is saved next is whole."""

        def inside() -> None:
            self.ask_once()()
            raise Oops

        self.training.prepare()
        with suppress(Oops):
            self.training.call_step(inside)
        (asked,) = self.pending
        with pytest.raises(holdfast.SnapshotSkipped, match="the state of no step"):
            asked.handle.wait_captured(60)
        self.refused += 1
        self.pending.clear()
        self.training.step()

    # ── what came of it ──────────────────────────────────────────────────────────────────────

    def settle(self) -> None:
        for asked in self.pending:
            asked.handle.wait_captured(60)
            handle = asked.handle
            if not self.durable:
                handle = self.checkpointer.save(asked.number, durable=True)
            handle.wait_durable(60)
            found = restored(self.root, self.kind, asked.number)
            assert asked.may_be, "the save was never in a step"
            assert any(are_equal(found, one) for one in asked.may_be), (
                f"step {asked.number} is the state of no step it may be of"
            )
            self.deferred += asked.is_deferred
        self.pending.clear()


def run(root: Path, kind: str, seed: int, steps: int, *, durable: bool) -> int:
    """How many saves fell into a step."""
    program = Program(root, kind, seed, durable=durable)
    with listening() as heard:
        program.run(steps)
    lost = [each for each in heard if isinstance(each, events.SnapshotMissed)]
    assert len(lost) == program.refused, [each.reason for each in lost]
    return program.deferred + program.refused


@pytest.mark.parametrize("kind", TORCHS)
def test_what_was_saved_at_random_moments_is_the_state_between_two_steps(
    tmp_path: Path, kind: str
) -> None:
    durable = TORCHS.index(kind) % 2 == 0
    assert run(tmp_path, kind, 1, 8, durable=durable) > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_hundred_saves_in_the_middle_of_a_step_are_none_lost_and_none_mixed(
    tmp_path: Path,
) -> None:
    fell_into_one = seed = 0
    while fell_into_one < 300:
        for kind in OPTIMIZERS:
            for durable in (True, False):
                seed += 1
                root = tmp_path / str(seed)
                fell_into_one += run(root, kind, seed, 20, durable=durable)
