"""Runs of every framework, killed at twenty places that are drawn; the seed is printed, SEED draws
them again, and FROM begins at one of them by its number: a series may be run in parts.

A kill is followed by a restart as the framework makes it, from memory, or from storage where shared
memory is cleared. What both starts say together is what an unbroken run says, to the bit.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.observe.report_builder import read_report
from integrations import test_ray, test_torchft
from integrations.real_runs import check_same, needs, said, start, whole
from support.runs.leftovers import end_keepers

KILLS = 20
SEED = os.environ.get("SEED") or str(random.SystemRandom().randrange(10**6))
FROM = int(os.environ.get("FROM") or 0)


@dataclass(frozen=True)
class Kill:
    """One kill: of the rank ``victim``, at ``place`` of ``step``; ``clears``: with the memory."""

    place: str
    step: int
    victim: int
    clears: bool


Play = Callable[[Path, Path, Sequence[Kill]], list[str]]


@dataclass(frozen=True)
class Runs:
    """The runs of a framework: where each can be killed, and how it is played.

    ``play`` takes a root, the directory of the shared memory, and the kills of one run, of which
    none is a whole run; it returns what the run says, and has checked how many steps were lost.
    """

    framework: str
    places: Mapping[str, range]
    play: Play
    victims: int = 1
    name: str = ""
    clears: bool = True
    """False where a group that clears its memory is not what is asked for."""
    kills: int = KILLS
    together: int = 1
    """The kills of one run: several where it takes long to begin."""

    def draw(self, seed: str) -> Iterator[Kill]:
        """Yields the kills of a seed."""
        chance = random.Random(f"{seed} {self.framework} {self.name}")
        for _ in range(self.kills):
            place = chance.choice(sorted(self.places))
            step = chance.choice(self.places[place])
            yield Kill(
                place,
                step,
                chance.randrange(self.victims),
                self.clears and chance.random() < 0.25,
            )


@dataclass(frozen=True)
class Script:
    """A script of this folder, started with these options; its root of Holdfast lies ``below``
    its own.
    """

    script: str
    options: dict[str, Any] = field(default_factory=dict)
    below: str = "."

    def __call__(self, root: Path, arena: Path, kills: Sequence[Kill]) -> list[str]:
        if not kills:
            return self._steps(whole(self.script, root, **self.options))
        [kill] = kills
        run = partial(start, self.script, root, kill.step, kill.place, who=kill.victim)
        done = run(**self.options)
        if self.options.get("ranks", 1) == 1:
            assert done.returncode == -9, done.stderr
            if kill.clears:
                clear(arena)
            done = run(**self.options)
        assert done.returncode == 0, done.stderr
        assert Path(f"{root}.died").exists(), "it was killed"
        starts = read_report(root / self.below).starts
        assert len(starts) == 2 and (kill.clears or (starts[1].lost_steps or 0) <= 1)
        return self._steps(said(root))

    def _steps(self, lines: list[str]) -> list[str]:
        return [line for line in lines if "restored" not in line]


def clear(arena: Path) -> None:
    """Removes what is in shared memory, as the restart of a host does."""
    end_keepers(arena, grace_s=0.0)
    for left in arena.iterdir():
        shutil.rmtree(left, ignore_errors=True)


def play_ray(root: Path, arena: Path, kills: Sequence[Kill]) -> list[str]:
    if not kills:
        return test_ray.steps_of(test_ray.run(root)[0])
    named = [[one.place, one.step, one.victim, one.clears] for one in kills]
    found, _ = test_ray.run(root, kills=named)
    died = [line.split() for line in found if ": killed " in line]
    wanted = {(f"{one.victim}:", f"{one.step}", one.place, f"{one.clears}") for one in kills}
    assert {(who, step, place, clears) for who, _, step, place, clears in died} == wanted
    last, clears = 0, False
    for line in found:
        match line.split():
            case [_, "killed", step, place, cleared]:
                # The copy of the last whole step may be under way until the next update.
                last, clears = int(step) - (place != "report"), cleared == "True"
            case [_, "restored", step, *_] if not clears:
                assert 0 <= last - int(step) <= 1, line
    return test_ray.steps_of(found)


def play_torchft(root: Path, arena: Path, kills: Sequence[Kill]) -> list[str]:
    if not kills:
        return test_torchft.steps_of(test_torchft.run(root))
    [kill] = kills
    found = test_torchft.run(root, kill.step, kill.place)
    last = kill.step if kill.place == "save" else kill.step - 1
    again = [f"{n}: restored {last} memory {2 * last}" for n in (0, 1)] if last else []
    assert test_torchft.restores_of(found) == again
    return test_torchft.steps_of(found)


def steps(last: int, first: int = 1, every: int = 1) -> range:
    return range(first, last + 1, every)


OF_ACCELERATE = {
    **dict.fromkeys(("forward", "update", "save"), steps(42)),
    "log": steps(40, 4, 4),
    **dict.fromkeys(("evaluate", "epoch begin", "epoch end"), range(3)),
}
OF_LIGHTNING = {
    **dict.fromkeys(("batch begin", "forward", "update", "batch end"), steps(42)),
    "log": steps(41, 2, 3),
    "evaluate": steps(42, 14, 14),
    **dict.fromkeys(("epoch begin", "epoch end"), range(3)),
}
OF_TRAINER = {
    **dict.fromkeys(("begin", "end"), steps(24)),
    "log": steps(24, 3, 3),
    **dict.fromkeys(("evaluate", "epoch end"), steps(24, 8, 8)),
    "epoch begin": range(0, 24, 8),
}
OF_TORCHTITAN = dict.fromkeys(("begin", "forward", "update", "log", "save"), steps(8))
OF_DEEPSPEED = dict.fromkeys(("forward", "update", "save"), steps(12))
OF_MEGATRON = dict.fromkeys(("forward", "update", "save"), steps(16))
OF_RAY = dict.fromkeys(("begin", "forward", "update", "report"), steps(20))
OF_TORCHFT = dict.fromkeys(("begin", "forward", "backward", "update", "save"), steps(20))

ROWS = [
    Runs("transformers", OF_TRAINER, Script("trainer_run.py")),
    Runs("accelerate", OF_ACCELERATE, Script("accelerate_run.py")),
    Runs(
        "accelerate_deepspeed",
        OF_ACCELERATE,
        Script("accelerate_run.py", {"stage": 2, "precision": "bf16"}),
    ),
    Runs("lightning", OF_LIGHTNING, Script("lightning_run.py")),
    Runs(
        "torchtitan",
        OF_TORCHTITAN,
        Script("torchtitan_run.py", {"layers": 2, "steps": 8}, below="checkpoint"),
    ),
    *(
        Runs(
            "deepspeed",
            OF_DEEPSPEED,
            Script("deepspeed_run.py", {"stage": stage, "precision": precision}),
            name=f"ZeRO-{stage} {precision}",
            kills=KILLS // 2,
        )
        for stage, precision in ((2, "bf16"), (3, "fp32"))
    ),
    *(
        Runs(
            "megatron",
            OF_MEGATRON,
            Script("megatron_run.py", {"ranks": 2, **options}),
            victims=2,
            name=name,
            clears=False,
            kills=KILLS // 2,
        )
        for name, options in (
            ("tensor parallel", {"tp": 2}),
            ("distributed optimizer", {"distributed": True, "bucket": 2000}),
        )
    ),
    Runs("ray", OF_RAY, play_ray, victims=2, together=5),
    Runs("torchft", OF_TORCHFT, play_torchft, clears=False),
]


def test_every_framework_has_twenty_kills_and_a_seed_draws_the_same_again() -> None:
    found: dict[str, int] = {}
    for row in ROWS:
        found[row.framework] = found.get(row.framework, 0) + row.kills
        assert list(row.draw("7")) == list(row.draw("7")) != list(row.draw("8"))
        assert all(kill.step in row.places[kill.place] for kill in row.draw("7"))
        assert any(kill.clears for seed in range(9) for kill in row.draw(str(seed))) == row.clears
    assert set(found.values()) == {KILLS}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row, marks=needs(*row.framework.split("_")), id=f"{row.framework} {row.name}".strip()
        )
        for row in ROWS
    ],
)
def test_a_run_that_is_killed_anywhere_goes_on_as_if_nothing_had_been(
    row: Runs, tmp_path: Path, arena_dir: Path
) -> None:
    print(f"SEED={SEED}")
    unbroken = row.play(tmp_path / "whole", arena_dir, [])
    kills = list(row.draw(SEED))
    assert kills[FROM:], f"there are {len(kills)} kills, FROM={FROM}"
    for number in range(FROM, len(kills), row.together):
        some = list(dict.fromkeys(kills[number : number + row.together]))
        print(f"{row.framework} {row.name} {number}: {some}", flush=True)
        root = tmp_path / f"run-{number}"
        check_same(row.play(root, arena_dir, some), unbroken)
        end_keepers(arena_dir, grace_s=5.0)
        shutil.rmtree(root, ignore_errors=True)
        print(f"{row.framework} {row.name} {number}: the same", flush=True)
