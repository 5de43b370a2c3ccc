"""The chaos benchmark: what it calls a run is right, and it still runs."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType

import pytest

from holdfast.testing.faults import Hosts
from holdfast.testing.runs.journals import RunIncarnation


@pytest.fixture
def judge(importable: None) -> ModuleType:
    return importlib.import_module("benchmarks.chaos.verdict")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"resumed": 7, "completed": 9}, "PASS"),
        ({"resumed": 9, "completed": 9}, "PASS"),
        ({"resumed": 6, "completed": 9}, "LOST_WORK"),
        ({"resumed": -1, "completed": 9}, "LOST_WORK"),
        ({"resumed": 10, "completed": 9}, "SILENT_DIVERGENCE"),
        ({"error": "no source", "completed": 9}, "HARD_FAIL"),
        ({"resumed": 8, "completed": 9, "differs": ("w",)}, "SILENT_DIVERGENCE"),
        ({"resumed": 8, "completed": 9, "differs": ("w",), "error": "x"}, "SILENT_DIVERGENCE"),
    ],
)
def test_a_loss_is_called_what_it_was(
    judge: ModuleType, found: dict[str, object], expected: str
) -> None:
    assert judge.classify(judge.Outcome(**found), 7) == expected


def start(judge: ModuleType, n: int, parent: tuple[int, int] | None, *lost: str) -> object:
    return judge.Start(n, frozenset("abc"), 1, parent, set(lost))


def test_what_is_protected_is_promised_while_parity_replaces_what_is_lost(
    judge: ModuleType,
) -> None:
    starts = {1: start(judge, 1, None, "b")}
    protected = {(1, 5), (1, 8)}
    assert judge.promised(starts, protected, (1, 4)) == (8, "memory")
    assert judge.promised(starts, set(), (1, 4)) == (4, "storage")
    assert judge.promised(starts, set(), None) == (-1, "")
    starts = {1: start(judge, 1, None, "b", "x")}  # x was none of its hosts
    assert judge.promised(starts, protected, (1, 4)) == (8, "memory")
    starts = {1: start(judge, 1, None, "b", "a")}
    assert judge.promised(starts, protected, (1, 4)) == (4, "storage")
    assert judge.promised(starts, protected, None) == (-1, "")


def test_only_what_the_newest_start_goes_on_from_is_promised(judge: ModuleType) -> None:
    starts = {1: start(judge, 1, None, "b"), 2: start(judge, 2, (1, 6)), 3: start(judge, 3, (2, 8))}
    protected = {(1, 5), (1, 9), (2, 7)}
    assert judge.promised(starts, protected, None) == (7, "memory")
    assert judge.promised(starts, {(1, 5), (1, 9)}, None) == (5, "memory")  # 1-9 is abandoned
    assert judge.promised(starts, {(1, 9)}, (1, 9)) == (-1, "")
    assert judge.promised(starts, protected, (2, 8)) == (8, "storage")  # newer than memory
    starts = {1: start(judge, 1, None), 2: start(judge, 2, None)}
    assert judge.promised(starts, {(1, 5)}, None) == (-1, "")


@pytest.mark.usefixtures("importable")
def test_generators_that_go_on_otherwise_are_named(tmp_path: Path) -> None:
    life = importlib.import_module("benchmarks.chaos.life")
    story = importlib.import_module("benchmarks.chaos.story")
    expected = life.Reference([5, 6], {(0, 0): 1, (0, 1): 2, (1, 0): 3, (1, 1): 4})
    with Hosts() as hosts:
        told = story.Story(
            tmp_path,
            hosts,
            count=2,
            parity=1,
            seed=1,
            reference=expected,
            say=print,
            chance=random.Random(1),
        )
    shares = {0: {0: 2, 1: 3}, 1: {0: 2, 1: 4}, 2: {0: 1}}
    seen = RunIncarnation(1, world=2, shares=shares, drawn={(1, 0): 3})  # on fewer ranks, say
    assert told._compare(seen) == []
    seen.drawn[1, 1] = 3
    assert told._compare(seen) == ["the generators of rank 1 after step 1"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_short_chaos_passes(bench: Callable[..., CompletedProcess[str]]) -> None:
    options = ("--hosts", "3", "--parity", "1", "--runs", "3", "--steps", "50", "--seed", "7")
    ended = bench("chaos", "--no-results", *options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "| in all | 3 | 0 | 0 | 0 |" in ended.stdout
