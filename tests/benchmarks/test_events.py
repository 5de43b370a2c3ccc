"""The benchmark of events still runs, says what it measures, and finds what it hides."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest


@pytest.mark.parametrize("ways", [[], ["--rollups"]], ids=["records", "roll-ups"])
def test_the_benchmark_of_events_runs(
    ways: list[str], bench: Callable[..., CompletedProcess[str]]
) -> None:
    ended = bench("events", "--hosts", "6", "--saves", "8", "--starts", "2", *ways)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(ended.stdout)
    assert (found["ranks"], found["saves"], found["records"]) == (48, 8, 536)
    assert found["file_bytes_a_record"] > 100 and found["records_a_cpu_second"] > 0
    named = {text.split(" comes ")[0].split(",")[0] for text in found["found"]}
    assert named == {*found["hidden"]} and len(named) == 3
    assert found["page_bytes"] < 3_000_000


@pytest.mark.slow
def test_the_quick_benchmark_of_what_events_cost_a_step_runs(
    bench: Callable[..., CompletedProcess[str]],
) -> None:
    ended = bench("overhead", "--quick")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.startswith("20 pairs, ")
    events, us = re.findall(r"(\d+) events a step|took (\d+) us of a step", ended.stdout)
    assert int(events[0]) >= 2 and 0 < int(us[1]) < 20_000
