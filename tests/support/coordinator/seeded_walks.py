"""Plays a state machine's rules at random, by a seed alone: many more runs than one that shrinks.

Each walk prefers some of the rules and leaves others aside, so that long runs of few kinds occur.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine

#: Rules played in one walk.
MOVES = 40
#: Walks that a process is given at a time.
_PART = 500


@dataclass(frozen=True)
class SeededData:
    """Draws what a strategy may give, each value as likely as the next."""

    chance: random.Random

    def draw(self, strategy: Any) -> Any:
        strategy = getattr(strategy, "wrapped_strategy", strategy)
        match type(strategy).__name__:
            case "DataStrategy":
                return self
            case "BooleansStrategy":
                return self.chance.random() < 0.5
            case "IntegersStrategy":
                return self.chance.randint(strategy.start, strategy.end)
            case "JustStrategy":
                return strategy.value
            case "SampledFromStrategy":
                return self.chance.choice(list(strategy.elements))
            case "BuildsStrategy":
                named = {name: self.draw(one) for name, one in strategy.kwargs.items()}
                return strategy.target(*map(self.draw, strategy.args), **named)
            case other:
                raise NotImplementedError(f"a seeded walk cannot draw from {other}")


def walk(kind: type[RuleBasedStateMachine], seed: int, moves: int = MOVES) -> list[str]:
    """Play one walk of ``kind``; return the names of the rules in order. Its invariants hold."""
    chance = random.Random(seed)
    data, machine, played = SeededData(chance), kind(), list[str]()
    weights = {
        one: (chance.random() ** 3 + 1e-3) * (1.0 if one.preconditions else 0.1)
        for one in machine.rules
    }
    try:
        for one in kind.setup_state().initializers:
            _play(machine, one, data, played)
        for _ in range(moves):
            ready = [one for one in machine.rules if _may_run(machine, one)]
            if not ready:
                break
            (one,) = chance.choices(ready, [weights[one] for one in ready])
            weights[one] *= 0.7  # what may always be played would crowd out the rest
            _play(machine, one, data, played)
        machine.teardown()
    except Exception as error:
        error.add_note(f"seed {seed}: {', '.join(played)}")
        raise
    return played


def _may_run(machine: RuleBasedStateMachine, one: Any) -> bool:
    for condition in one.preconditions:  # noqa: SIM110 -- half of the time of a generator's
        if not condition(machine):
            return False
    return True


def _play(machine: RuleBasedStateMachine, one: Any, data: SeededData, played: list[str]) -> None:
    played.append(one.function.__name__)
    one.function(machine, **{name: data.draw(of) for name, of in one.arguments.items()})
    for held in machine.invariants:
        if _may_run(machine, held):
            held.function(machine)


def walk_many(kind: type[RuleBasedStateMachine], first: int, stop: int) -> int:
    """Play the walks of these seeds; return the number of rules played."""
    return sum(len(walk(kind, seed)) for seed in range(first, stop))


def main() -> None:
    """Play so many walks of every machine, on all cores: the machines share them evenly."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("walks", type=int)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    machines = importlib.import_module("coordinator.test_handoff_machine").MACHINES
    per_machine = -(-options.walks // len(machines))
    began_s, walks, moves = time.monotonic(), 0, 0
    with ProcessPoolExecutor() as pool:
        parts = {}
        for kind in machines:
            for first in range(options.first, options.first + per_machine, _PART):
                stop = min(first + _PART, options.first + per_machine)
                parts[pool.submit(walk_many, kind, first, stop)] = stop - first
        for part in as_completed(parts):
            if part.exception() is not None:
                pool.shutdown(wait=False, cancel_futures=True)  # it is told at once
            moves, walks = moves + part.result(), walks + parts[part]
            print(f"\r{walks:,} walks, {moves:,} rules", end="", file=sys.stderr, flush=True)
    took_s = time.monotonic() - began_s
    print(f"\n{walks:,} walks, {moves:,} rules, none broken, {took_s:.0f} s")


if __name__ == "__main__":
    main()
