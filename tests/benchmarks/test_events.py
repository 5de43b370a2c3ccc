"""The benchmark of events still runs, says what it measures, and finds what it hides."""

from __future__ import annotations

import json
from collections.abc import Callable
from subprocess import CompletedProcess


def test_the_benchmark_of_events_runs(bench: Callable[..., CompletedProcess[str]]) -> None:
    ended = bench("events", "--hosts", "6", "--saves", "8")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(ended.stdout)
    assert (found["ranks"], found["saves"], found["records"]) == (48, 8, 432)
    assert found["file_bytes_a_record"] > 100 and found["records_a_cpu_second"] > 0
    named = {text.split(" comes ")[0].split(",")[0] for text in found["found"]}
    assert named == {*found["hidden"]} and len(named) == 3
    assert found["page_bytes"] < 3_000_000
