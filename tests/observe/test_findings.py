"""Every rule finds what it is for, with figures, and none finds anything in a healthy run."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from holdfast import events
from holdfast.observe.clocks import ClockOffset
from holdfast.observe.findings import RULES, find, to_plain
from holdfast.observe.report import KeeperLoss, Report, WrongClock, to_json
from holdfast.observe.report_builder import read_report
from holdfast.observe.report_page import render_page
from holdfast.observe.summary import MOST_OF_CAUSE, finding_lines
from holdfast.observe.tables import render
from observe.test_interference import run as slowed_run
from support.runs.told import RANKS, Told, of, tell_death, tell_save, tell_sick_run, tell_start


def healthy(root: Path) -> Told:
    told = Told(root, {"b": 0.4})
    tell_start(told, 1, 10.0, RANKS)
    for step in range(20):
        tell_save(told, 1, step, 11.0 + 10 * step, RANKS)
        done = of(events.StepsDone, 1, step=step, steps=1, elapsed_s=10.0, longest_s=10.0)
        told(done, 11.0 + 10 * step)
    return told


def causes(report: Report, now_s: float | None = None) -> dict[str, str]:
    return {one.cause: one.evidence for one in find(report, now_s)}


def test_nothing_is_found_in_a_healthy_run_that_trains(tmp_path: Path) -> None:
    report = read_report(healthy(tmp_path).write())
    assert find(report, report.last_s + 5) == ()
    for rank, host in RANKS.items():
        told = healthy(tmp_path)
        told(of(events.RunEnded, 1, rank, outcome="closed"), 300.0, host)
    assert find(read_report(told.write())) == ()


def test_what_is_wrong_with_a_sick_run_is_found_worst_first(tmp_path: Path) -> None:
    report = read_report(tell_sick_run(tmp_path))
    found = find(report)
    severities = [one.severity for one in found]
    assert severities == sorted(severities, key=["critical", "warning", "notice"].index)
    seen = causes(report)
    assert seen.keys() >= {
        *("saves_missed", "damage", "replicas_differ", "storage_trouble", "same_host_dies"),
        *("source_dropped", "protection_lower", "keeper_lost", "keeper_restarts", "late_host"),
        *("slow_place", "clocks_apart"),
    }
    assert seen["same_host_dies"] == "2 of 2 interruptions began with a rank on b: 3 steps lost"
    assert seen["slow_place"].startswith("host b, disk: writing an image takes 2.20 s where others")
    assert seen["clocks_apart"] == "clock of host b is 1 h 00 min ahead"
    assert seen["saves_missed"] == "4 saves in a row gave nothing, the last: late"
    assert all(one.remedy for one in found)
    assert to_plain(found)[0]["cause"] == found[0].cause


def stall(told: Told) -> None:
    slow = of(events.StepsDone, 1, step=20, steps=1, elapsed_s=150.0, longest_s=150.0)
    told(slow, 360.0)


def stall_of_one(told: Told) -> None:
    stall(told)
    for rank, host in RANKS.items():
        returned = of(events.SaveReturned, 1, rank, step=20, held_s=0.01, size_bytes=1_000_000)
        told(returned, 380.0 if rank == 2 else 360.0, host)


def test_a_rank_that_came_a_little_late_once_does_not_explain_a_long_stall(tmp_path: Path) -> None:
    told = healthy(tmp_path)
    stall(told)
    for rank, host in RANKS.items():
        returned = of(events.SaveReturned, 1, rank, step=20, held_s=0.01, size_bytes=1_000_000)
        told(returned, 362.0 if rank == 2 else 360.0, host)
    assert "came to save" not in causes(read_report(told.write()))["stalled"]


def test_a_rank_that_hung_twice_is_named_with_both_moments(tmp_path: Path) -> None:
    told = healthy(tmp_path)
    stall(told)
    for step, at_s in ((20, 360.0), (21, 400.0)):
        for rank, host in RANKS.items():
            late_s = 20.0 if rank == 2 else 0.0
            fields = {"step": step, "held_s": 0.01, "size_bytes": 1_000_000}
            told(of(events.SaveReturned, 1, rank, **fields), at_s + late_s, host)
    report = read_report(told.write())
    (found,) = (one for one in find(report) if one.cause == "stalled")
    expected = "; rank 2 on b came to save 1-20 20.0 s after the first, to 1-21 20.0 s"
    assert found.evidence.endswith(expected)
    assert found.since_s == pytest.approx(report.saves[20].time_s)


def no_durable(told: Told) -> None:
    for step in range(20, 25):
        tell_save(told, 1, step, 211.0 + 10 * step, RANKS, durable=False)


def unprotected(told: Told) -> None:
    told(of(events.ProtectionPlanned, 1, -1, parity=1, hosts=2, survives="one host"), 10.0)
    no_durable(told)


def slower_than_asked(told: Told) -> None:
    for step in range(20, 26):
        tell_save(told, 1, step, 211.0 + step, RANKS, persist_s=4.0)


def always_slower_than_asked(told: Told) -> None:
    """From the first save on: each is to be durable, and every third is, when storage is free."""
    tell_death(told, 1, 205.0, RANKS, "")
    tell_start(told, 2, 220.0, RANKS, (1, 19))
    for step in range(20, 40):
        at_s = 230.0 + step
        tell_save(told, 2, step, at_s, RANKS, persist_s=2.5, durable=step % 3 == 2)
        told(of(events.SaveReturned, 2, step=step, durable=True, size_bytes=1_000_000), at_s)


def slower_storage(told: Told) -> None:
    for step in range(20, 25):
        tell_save(told, 1, step, 11.0 + 10 * step, RANKS, persist_s=2.0)


def slow_link(told: Told) -> None:
    for n in range(60):
        trip_s = 0.2 if n > 35 else 0.001
        measured = {"other": "a", "round_trip_s": trip_s, "error_s": trip_s / 2, "ahead_s": 0.4}
        told(
            of(events.ClocksCompared, 1, -1, host="b", other_boot="b", **measured),
            12.0 + 3 * n,
            "b",
        )


def loop(told: Told) -> None:
    for number in range(2, 6):
        tell_death(told, number - 1, 205.0 + 40 * (number - 2), RANKS, "")
        tell_start(told, number, 220.0 + 40 * (number - 2), RANKS, (1, 19))


def ring(told: Told) -> None:
    for rank, host in RANKS.items():
        passed = of(events.ImagePassed, 1, rank, step=20, copy_s=0.2, size_bytes=9, ring_bytes=5)
        told(passed, 212.0, host)


def slow_restore(told: Told) -> None:
    tell_death(told, 1, 205.0, RANKS, "")
    tell_start(told, 2, 220.0, RANKS, (1, 19))
    times = {"elapsed_s": 9.0, "verify_s": 0.5}
    for rank, host in RANKS.items():
        read_s = 8.0 if rank == 3 else 2.0
        fields = {"source": "storage", "parent_incarnation": 1, "step": 18, "size_bytes": 10}
        waits = {"read_s": read_s, "meet_s": 8.5 - read_s}
        told(of(events.Restored, 2, rank, **fields, **times, **waits), 231.0, host)


def failed_source(told: Told) -> None:
    tell_death(told, 1, 205.0, RANKS, "")
    tell_start(told, 2, 220.0, RANKS)
    for rank, host in RANKS.items():
        fields = {"source": "storage", "parent_incarnation": 1, "step": 18}
        times = {"elapsed_s": 9.0, "dropped_s": 6.0, "read_s": 2.9}
        told(of(events.Restored, 2, rank, **fields, **times), 231.0, host)


@pytest.mark.parametrize(
    ("rule", "act", "evidence"),
    [
        (
            "slow_restore",
            slow_restore,
            "the restore of 1-18 took 9.00 s: rank 3 on b was reading for 8.00 s, half of the "
            "ranks for 2.",
        ),
        (
            "slow_restore",
            failed_source,
            "the restore of 1-18 took 9.00 s, 6.00 s of it with sources that failed or did not",
        ),
        ("stalled", stall, "steps that hung took 140 s in all, 39.7 % of the run"),
        (
            "stalled",
            stall_of_one,
            "of the run; rank 2 on b came to save 1-20 20.0 s after the first",
        ),
        ("no_durable", no_durable, "the newest durable generation is 1-19, 5 steps old"),
        ("no_protected", unprotected, "the newest protected generation is 1-19, 5 steps old"),
        ("storage_slow", slower_than_asked, "takes 4.20 s to be durable, and the next is asked"),
        (
            "storage_slow",
            always_slower_than_asked,
            "takes 3.70 s to be durable, and the next is asked for after 1.00 s",
        ),
        ("slow_link", slow_link, "link of host b: messages to a take 200 ms there and back, where"),
        (
            "throughput_down",
            slower_storage,
            "where they went at 8.00 MB/s: each takes 1.50 s longer",
        ),
        ("restart_loop", loop, "4 starts in a row came no further than step 19"),
        ("no_room", ring, "shared memory had no room for whole images"),
    ],
)
def test_a_rule_finds_what_it_is_for(
    tmp_path: Path, rule: str, act: Callable[[Told], None], evidence: str
) -> None:
    told = healthy(tmp_path)
    act(told)
    report = read_report(told.write())
    if rule == "restart_loop":  # starts without any step of their own
        assert [start.newest_step for start in report.starts[1:]] == [None] * 4
    found = causes(report)
    assert evidence in found[rule], found


@pytest.mark.parametrize(
    ("rule", "persist_s", "apart_s"), [("storage_slow", 4.0, 1.0), ("throughput_down", 2.0, 10.0)]
)
def test_storage_became_slow_with_the_first_slow_save(
    tmp_path: Path, rule: str, persist_s: float, apart_s: float
) -> None:
    told = healthy(tmp_path)
    for step in range(20, 29):
        tell_save(told, 1, step, 211.0 + apart_s * (step - 20), RANKS, persist_s=persist_s)
    report = read_report(told.write())
    (found,) = (one for one in find(report) if one.cause == rule)
    assert found.since_s == report.saves[20].time_s


def test_a_loop_that_one_rank_makes_names_it(tmp_path: Path) -> None:
    told = healthy(tmp_path)
    loop(told)
    assert causes(read_report(told.write()))["restart_loop"].endswith(
        "no further than step 19, each until rank 3 on b was gone"
    )


def test_a_run_that_did_not_close_and_says_nothing_is_found_while_one_looks(tmp_path: Path) -> None:
    report = read_report(healthy(tmp_path).write())
    found = causes(report, report.last_s + 150)
    assert found == {"no_sign_of_life": "no sign of life for 150 s, after step 19"}
    assert causes(report, None) == {}


def test_steps_that_saves_slow_are_found(tmp_path: Path) -> None:
    report = slowed_run(tmp_path, 0.3, 1, every=14)
    assert causes(report)["interference"].startswith("behind a copy or a write a step takes ")


def test_records_that_are_lost_are_found(tmp_path: Path) -> None:
    report = dataclasses.replace(
        read_report(healthy(tmp_path).write()), lost_records=3, unreadable=("x: why",)
    )
    assert causes(report)["records_lost"].endswith("3 lost, 1 unreadable file")


def test_every_rule_was_provoked_here() -> None:
    text = Path(__file__).read_text()
    assert not [rule.name for rule in RULES if f'"{rule.name}"' not in text]


def test_clocks_within_their_error_are_no_finding(tmp_path: Path) -> None:
    report = read_report(healthy(tmp_path).write())
    for error_s, is_found in ((1.0, False), (0.1, True), (None, True)):
        offsets = (ClockOffset("b", 2.0, error_s),)
        found = causes(dataclasses.replace(report, clocks=offsets))
        assert ("clocks_apart" in found) == is_found


@pytest.mark.parametrize(("saves", "is_found"), [(2, False), (3, True)])
def test_a_clock_that_is_wrong_at_three_saves_is_a_finding(
    saves: int, is_found: bool, tmp_path: Path
) -> None:
    report = read_report(healthy(tmp_path).write())
    wrong = (WrongClock("b", -3.2, saves, "1-2"),)
    found = causes(dataclasses.replace(report, wrong_clocks=wrong))
    assert ("clocks_wrong" in found) == is_found
    if is_found:
        assert found["clocks_wrong"].startswith("clock of host b is at least 3.20 s behind")


def test_the_hosts_of_a_healthy_run_are_brought_to_one_clock(tmp_path: Path) -> None:
    (offset,) = read_report(healthy(tmp_path).write()).clocks
    assert offset.host == "b" and offset.ahead_s == pytest.approx(0.4)
    assert to_json(read_report(tmp_path))["clocks"][0]["host"] == "b"


def hung_disk(told: Told) -> None:
    """Save 20 was to be durable; the images of host b are never written, and training goes on."""
    for step in range(20, 32):
        for rank, host in RANKS.items():
            is_asked = step == 20
            fields = {"step": step, "size_bytes": 10}
            returned = of(events.SaveReturned, 1, rank, durable=is_asked, held_s=0.01, **fields)
            told(returned, 11.0 + 10 * step, host)
            told(of(events.ImageCaptured, 1, rank, copy_s=0.1, **fields), 11.2 + 10 * step, host)
            if is_asked and host == "a":
                told(of(events.ImageDurable, 1, rank, **fields), 11.5 + 10 * step, host)
        captured = of(events.SnapshotCaptured, 1, -1, step=step, elapsed_s=0.2, world=4)
        told(captured, 11.3 + 10 * step)


def test_a_save_that_hangs_is_found_with_the_ranks_it_hangs_at(tmp_path: Path) -> None:
    told = healthy(tmp_path)
    hung_disk(told)
    report = read_report(told.write())
    assert causes(report)["no_durable"] == (
        "the newest durable generation is 1-19, 12 steps old, where one came every 1 step; "
        "no image was written of rank 2 on b, rank 3 on b"
    )


@pytest.mark.promise
def test_the_first_durable_save_that_hangs_is_found_too(tmp_path: Path) -> None:
    told = Told(tmp_path)
    tell_start(told, 1, 10.0, RANKS)
    hung_disk(told)
    report = read_report(told.write())
    assert causes(report)["no_durable"] == (
        "save 1-20 was to be durable, and is not after 110 s; "
        "no image was written of rank 2 on b, rank 3 on b"
    )
    quick = dataclasses.replace(report, last_s=(report.saves[0].time_s or 0.0) + 50)
    assert "no_durable" not in causes(quick), "it may still come"


@pytest.mark.parametrize("is_restarted", [True, False], ids=["next start", "closed"])
def test_a_save_of_a_start_that_is_over_is_not_waited_for(
    tmp_path: Path, is_restarted: bool
) -> None:
    """Its trainers were killed, or closed; the next start trains, and saved nothing yet."""
    told = Told(tmp_path)
    tell_start(told, 1, 10.0, RANKS)
    hung_disk(told)
    if is_restarted:
        tell_death(told, 1, 330.0, RANKS, "")
        tell_start(told, 2, 340.0, RANKS)
        told(of(events.StepsDone, 2, step=9, steps=9, elapsed_s=90.0, longest_s=10.0), 440.0)
    else:
        for rank, host in RANKS.items():
            told(of(events.RunEnded, 1, rank, outcome="closed"), 440.0, host)
    report = read_report(told.write())
    assert report.starts[-1].ended == ("open" if is_restarted else "closed")
    assert "no_durable" not in causes(report)
    assert "no_durable" not in causes(report, report.last_s + 5)


def test_a_rank_that_stands_still_is_named(tmp_path: Path) -> None:
    told = healthy(tmp_path)
    for rank, host in RANKS.items():
        if rank != 2:
            told(of(events.SaveReturned, 1, rank, step=20, held_s=0.01), 211.0, host)
    report = read_report(told.write())
    assert report.behind == (2,)
    assert causes(report, report.last_s + 150)["no_sign_of_life"] == (
        "no sign of life for 150 s, after step 20: rank 2 on b did not return from save 1-20 as "
        "others did"
    )
    assert causes(report, report.last_s + 10) == {}


@pytest.mark.promise
def test_a_clock_that_was_never_compared_makes_no_rank_late(tmp_path: Path) -> None:
    """Rank 3's host joined with a boot of which no start was recorded, 0.2 s ahead: less
    than contradicts the coordinator's clock.
    """
    told = healthy(tmp_path)
    lines = []
    for name in sorted((told.write() / "events").iterdir()):
        for line in name.read_text().splitlines():
            record = json.loads(line)
            if record["by_host"] == "b":
                record["boot"] = "another"
                record["time_s"] -= 0.2
                if record["event"] == "RunStarted":
                    continue
            lines.append(json.dumps(record))
        name.unlink()
    (tmp_path / "events" / "all.jsonl").write_text("\n".join(lines))
    report = read_report(tmp_path)
    assert report.unplaced_hosts == ("b",)
    assert {save.late_rank for save in report.saves} <= {0, 1, -1}
    assert "slow_place" not in causes(report)


def test_what_thousands_of_hosts_have_alike_takes_few_lines(tmp_path: Path) -> None:
    report = read_report(healthy(tmp_path).write())
    offsets = tuple(ClockOffset(f"h{n}", 9.0, 0.1) for n in range(2000))
    losses = tuple(KeeperLoss(1, f"h{n}", "killed", 5.0) for n in range(2000))
    report = dataclasses.replace(report, clocks=offsets, keeper_losses=losses)
    found = find(report)
    assert len(found) == 4000 == len(to_plain(found))
    lines = list(finding_lines(found))
    assert sum("clock of host" in line for line in lines) == MOST_OF_CAUSE
    assert sum("and 1995 more like these: --json has all" in line for line in lines) == 2
    assert len(lines) < 20
    out = io.StringIO()
    render(report, Console(file=out, width=200))
    assert out.getvalue().count("\n") < 150 and "and 1940 more like these" in out.getvalue()
    assert len(render_page(report, found)) < 300_000
