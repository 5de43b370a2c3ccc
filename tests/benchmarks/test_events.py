"""The benchmark of events still runs, and says what it measures."""

from __future__ import annotations

import json
from collections.abc import Callable
from subprocess import CompletedProcess


def test_the_benchmark_of_events_runs(bench: Callable[..., CompletedProcess[str]]) -> None:
    ended = bench("events", "--hosts", "2", "--saves", "3")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(ended.stdout)
    assert (found["ranks"], found["saves"], found["records"]) == (16, 3, 64)
    assert found["file_bytes_a_record"] > 100 and found["records_a_cpu_second"] > 0
