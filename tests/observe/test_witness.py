"""The ledger of a real run that is killed, against a clock and journals that know nothing of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest

from holdfast.demo.orchestrate import HERE, DemoRun
from holdfast.demo.screen import Screen
from holdfast.observe.report_builder import read_report
from holdfast.observe.run_report import Report
from holdfast.testing.runs.journals import JournalLine, RunIncarnation


@pytest.fixture
def run(tmp_path: Path) -> Iterator[DemoRun]:
    with TemporaryDirectory(prefix="holdfast-test-", dir="/dev/shm") as arenas:
        made = DemoRun(tmp_path, Path(arenas), Screen(to_stderr=True))
        yield made
        made.hosts.close()


def began_s(pid: int) -> float:
    """When a process began, by the clock of the journals."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age_s


def pids(one: RunIncarnation) -> list[int]:
    return [line.pid for line in one.lines["start"].values()]


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def lines_of(directory: Path, rank: int = 0) -> list[JournalLine]:
    text = (directory / f"rank-{rank}.jsonl").read_bytes()
    return [msgspec.json.decode(line, type=JournalLine) for line in text.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_part_is_what_the_killer_and_the_journals_saw(run: DemoRun, tmp_path: Path) -> None:
    run.launch(HERE, ranks=2)
    first = run.wait_for_step(25)
    starts = [min(map(began_s, pids(first)))]
    time.sleep(first.step_s / 2)
    killed_s = [time.monotonic()]
    run.kill_rank(1)
    while any(map(is_there, pids(first))):
        time.sleep(0.002)
    gone_s = [time.monotonic()]
    second = run.wait_for_next(first)
    starts.append(min(map(began_s, pids(second))))
    run.wait_for_step(46)
    time.sleep(second.step_s / 2)
    killed_s.append(time.monotonic())
    run.lose(HERE)
    gone_s.append(time.monotonic())
    run.launch(HERE, ranks=2)
    third = run.wait_for_next(second)
    starts.append(min(map(began_s, pids(third))))
    run.wait_for_end()

    lines = lines_of(tmp_path)
    over = {(line.incarnation, line.step): line.time_s for line in lines if line.what == "over"}
    back = {line.incarnation: line for line in lines if line.what == "restored"}
    end_s = next(line.time_s for line in lines if line.what == "end")
    kept = {n - 1: over.get((n - 1, line.step), 0.0) for n, line in back.items()}
    expected = {
        "detection": gone_s[0] - killed_s[0],
        "restart": starts[1] - gone_s[0] + starts[2] - killed_s[1],
        "restore": sum(line.elapsed_s for line in back.values()),
        "lost_work": sum(killed_s[n - 1] - at_s for n, at_s in kept.items()),
        "start_up": sum(line.time_s - line.elapsed_s - starts[n - 1] for n, line in back.items()),
    }
    joined_s = next(line.time_s for line in lines if line.what == "start")
    expected["start_up"] += joined_s - starts[0]
    elapsed_s = end_s - starts[0]
    expected["work"] = elapsed_s - sum(expected.values())
    steps = [
        max(line.step for n in (0, 1) for line in lines_of(tmp_path, n) if is_update(line, made))
        for made in (1, 2)
    ]

    report = read_report(run.root)
    assert report.ledger is not None and report.reliability is not None
    found = dict(report.ledger.seconds)
    found["work"] = found["productive"] + found["blocking"] + found["first_step"]
    found["start_up"] += found["waiting"]
    allowed_s = 0.01 * elapsed_s
    show(expected, found, elapsed_s)
    assert report.ledger.elapsed_s == pytest.approx(elapsed_s, abs=allowed_s)
    # Of what was killed with its keeper and memory nobody knows the moment within a step.
    blind_s = {"restart": second.step_s, "lost_work": second.step_s}
    for name, seconds in expected.items():
        margin_s = allowed_s + blind_s.get(name, 0.0)
        assert found[name] == pytest.approx(seconds, abs=margin_s), name
    assert found["unknown"] <= allowed_s
    died, lost = report.reliability.interruptions
    assert [died.lost_steps, lost.lost_steps] == [
        made - back[n].step for n, made in zip((2, 3), steps, strict=True)
    ]
    assert (died.rank, died.host, died.phase) == (1, HERE, "training")
    assert_memory_told_where_it_died(report, steps[0])


def is_update(line: JournalLine, incarnation: int) -> bool:
    return line.what == "update" and line.incarnation == incarnation


def assert_memory_told_where_it_died(report: Report, step: int) -> None:
    victim = report.starts[0].lost[0]
    assert (victim.rank, victim.step) == (1, step)


def show(expected: dict[str, float], found: dict[str, float], elapsed_s: float) -> None:
    for name, seconds in expected.items():
        off = 100 * (found[name] - seconds) / elapsed_s
        print(f"{name}: witness {seconds:.3f} s, ledger {found[name]:.3f} s, {off:+.2f} %")
