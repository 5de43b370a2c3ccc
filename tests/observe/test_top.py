"""What a run is doing now: followed through rotation, shown at 80 by 24, at a bounded cost."""

from __future__ import annotations

import json
import os
import pty
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import events
from holdfast.cli import main, top
from holdfast.events import AnyEvent, HostSampled
from holdfast.observe import event_place
from holdfast.observe import live_run as module
from holdfast.observe.event_files import compress, set_aside
from holdfast.observe.findings import find
from holdfast.observe.live_findings import LiveFindings
from holdfast.observe.live_run import FileTails, LiveRun
from holdfast.observe.records import RecordHead
from holdfast.observe.report_builder import report_of
from holdfast.observe.top_screen import findings_of, screen_lines, to_plain
from observe.test_trace import WALL_S, sampled, save, told
from support.runs.told import of
from support.servers.bucket_model import World, model_store


def write(root: Path, *lines: bytes, name: str = "host-a") -> Path:
    path = root / "events" / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        file.write(b"".join(lines))
    return path


def read_all(tails: FileTails, run: LiveRun) -> int:
    before = run.records
    for event, head in tails.read():
        run.take(event, head)
    return run.records - before


def state_of(*told_: AnyEvent) -> LiveRun:
    run = LiveRun()
    for second, event in enumerate(told_):
        run.take(event, RecordHead(time_s=WALL_S + second, by_host="a"))
    return run


# ── following ────────────────────────────────────────────────────────────────────────────────────


def test_what_is_appended_is_read_once_also_where_a_line_comes_in_pieces(tmp_path: Path) -> None:
    first, second = list(save(0, 100.0)), list(save(1, 101.0))
    path = write(tmp_path, *first)
    tails, run = FileTails(tmp_path), LiveRun()
    assert read_all(tails, run) == len(first) and read_all(tails, run) == 0
    for at in range(0, len(data := b"".join(second)), 100):
        with path.open("ab") as file:
            file.write(data[at : at + 100])
        read_all(tails, run)
    assert run.records == len(first) + len(second)
    assert run.reached["durable"].step == 1
    tails.close()


@pytest.mark.parametrize("is_compressed", [False, True])
def test_nothing_is_missed_when_a_file_is_set_aside(tmp_path: Path, is_compressed: bool) -> None:
    path = write(tmp_path, *save(0, 100.0))
    tails, run = FileTails(tmp_path), LiveRun()
    read_all(tails, run)
    write(tmp_path, *save(1, 101.0))
    full = set_aside(path)
    if is_compressed:
        compress(full)
    write(tmp_path, *save(2, 102.0))
    write(tmp_path, *save(3, 103.0), name="host-b")
    read_all(tails, run)
    assert sorted(step for _, step in run.saves) == [0, 1, 2, 3]
    assert read_all(tails, run) == 0
    tails.close()


def test_it_begins_at_the_end_of_a_long_file_and_costs_no_more(tmp_path: Path) -> None:
    lines = [line for step in range(2000) for line in save(step, 100.0 + step)]
    path = write(tmp_path, *lines)
    tails, run = FileTails(tmp_path, tail_bytes=1 << 16), LiveRun()
    read = read_all(tails, run)
    assert path.stat().st_size > 3e6 and 100 < read < 500
    assert run.reached["durable"].step == 1999
    tails.close()


def test_memory_does_not_grow_with_time_or_troubles(tmp_path: Path) -> None:
    run = LiveRun()
    for step in range(3000):
        for event in (
            events.SnapshotMissed(incarnation=1, step=step, reason="late"),
            events.FenceWaited(incarnation=1, step=step, rank=step % 8, held_s=0.1),
            events.Warned(message="w"),
        ):
            run.take(event, RecordHead(time_s=float(step)))
    assert len(run.saves) <= 65 and len(run.troubles) <= 8
    assert len(run.phases["fence"]) <= 512


def test_lines_that_are_none_and_files_that_cannot_be_read_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK_BYTES", 1 << 16)
    write(tmp_path, b"\x00" * 5000, b"\n{}\n", b'{"event":"Of the future"}\n', b"[" * 9000, b"\n")
    write(tmp_path, b"x" * (1 << 18), *save(7, 100.0), name="long")
    (tmp_path / "events" / "directory.jsonl").mkdir()
    (tmp_path / "events" / "link.jsonl").symlink_to("nowhere")
    os.mkfifo(tmp_path / "events" / "pipe.jsonl")
    tails, run = FileTails(tmp_path), LiveRun()
    read_all(tails, run)
    assert run.reached["durable"].step == 7
    (tmp_path / "events" / "host-a.jsonl").unlink()
    assert read_all(tails, run) == 0
    tails.close()


@pytest.mark.parametrize("name", ["host-7", "here"])
def test_records_of_a_bucket_are_taken_once_before_and_after_they_are_uploaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = model_store(World(), monkeypatch, tries_s=1.0)
    store.publish("holdfast.json", b"{}")
    monkeypatch.setattr(event_place, "open_store", lambda root: store)
    monkeypatch.setattr(event_place, "_host", lambda: name)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    place = event_place.event_place("s3://model/root")
    spool = place.file("rank-00000")
    spool.parent.mkdir()
    tails, run = FileTails("s3://model/root"), LiveRun()
    taken = []
    for step in range(3):
        with spool.open("ab") as file:
            file.writelines(lines := list(save(step, 100.0 + step)))
        taken += [read_all(tails, run), read_all(tails, run)]
        event_place.upload(place, store)
        taken.append(read_all(tails, run))
    assert taken == [len(lines), 0, 0] * 3
    tails.close()


@pytest.mark.parametrize("is_first", [False, True])
def test_records_that_wait_while_a_bucket_takes_nothing_are_taken_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_first: bool
) -> None:
    """Also when more of them wait than is read at one look. ``is_first``: before the first one."""
    store = model_store(World(), monkeypatch, tries_s=1.0)
    store.publish("holdfast.json", b"{}")
    monkeypatch.setattr(event_place, "open_store", lambda root: store)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    size = len(b"".join(save(0, 100.0)))
    monkeypatch.setattr(module, "_LOOK_BYTES", 2 * size)
    place = event_place.event_place("s3://model/root")
    spool = place.file("rank-00000")
    spool.parent.mkdir()
    tails, run = FileTails("s3://model/root", tail_bytes=2 * size), LiveRun()
    for step in range(6):
        with spool.open("ab") as file:
            file.writelines(lines := list(save(step, 100.0 + step)))
        if not is_first:
            assert [read_all(tails, run), read_all(tails, run)] == [len(lines), 0]
    if is_first:
        assert 0 < read_all(tails, run) <= 2 * len(lines)
    spool.rename(spool.with_suffix(".s000001.jsonl"))  # it was set aside, being full
    assert read_all(tails, run) == 0
    monkeypatch.setattr(module, "_LOOK_BYTES", 8 << 20)
    event_place.upload(place, store)
    assert [read_all(tails, run), read_all(tails, run)] == [0, 0]
    tails.close()


# ── the state ────────────────────────────────────────────────────────────────────────────────────


def test_a_keeper_that_takes_over_and_tells_of_older_generations_sets_nothing_back() -> None:
    captured = [
        events.SnapshotCaptured(incarnation=n, step=step, elapsed_s=0, world=2)
        for n, step in ((1, 9), (1, 8), (2, 5), (1, 10))
    ]
    run = state_of(*captured)
    at = run.reached["captured"]
    assert (at.incarnation, at.step, run.moment_s(at.at)) == (2, 5, WALL_S + 2)


@pytest.mark.parametrize("source", ["memory", "storage"])
def test_after_going_back_further_than_it_knows_it_shows_what_it_went_back_to(source: str) -> None:
    """All generations that it still knows were given up."""
    told_: list[AnyEvent] = []
    for step in range(200):
        of: dict[str, Any] = {"incarnation": 1, "step": step}
        told_.append(
            events.SaveReturned(
                **of,
                rank=1,
                held_s=0.0,
                describe_s=0.0,
                volatile_s=0.0,
                wait_previous_s=0.0,
                leaves=1,
                size_bytes=1,
                durable=True,
            )
        )
        told_.append(events.SnapshotCaptured(**of, elapsed_s=0, world=2))
        told_.append(events.SnapshotProtected(**of, survives="", elapsed_s=0.0))
        told_.append(events.CheckpointPublished(**of, elapsed_s=0, size_bytes=1, images=1))
    told_.append(
        events.Restored(
            incarnation=2,
            rank=0,
            step=9,
            parent_incarnation=1,
            source=source,
            elapsed_s=1.0,
            size_bytes=1,
            world=2,
            saved_world=2,
        )
    )
    run = state_of(*told_)
    reached = {state: (at.incarnation, at.step) for state, at in run.reached.items()}
    known = {"captured": (1, 9)} | ({"durable": (1, 9)} if source == "storage" else {})
    assert reached == known
    assert run.newest is None
    lines = screen_lines("r", run, WALL_S + 900)
    assert "captured  1-9          restored 100 s ago" in lines, lines
    shown = {line.split()[0]: line for line in lines if "not known" in line}
    assert shown.keys() == {"protected", "durable"} - known.keys()
    assert not any("1-199" in line for line in lines)
    assert to_plain(run, WALL_S)["reached"]["captured"]["is_restored"]


@pytest.mark.parametrize(("parent", "origin"), [(7, ""), (1, "start_from")])
def test_what_a_run_started_from_of_another_root_is_nothing_that_it_has(
    parent: int, origin: str
) -> None:
    """Its start has a smaller number than that of this run, too; older versions wrote no origin."""
    other = events.Restored(
        incarnation=2,
        rank=0,
        step=1000,
        parent_incarnation=parent,
        source="storage",
        elapsed_s=1.0,
        size_bytes=1,
        world=2,
        saved_world=2,
        origin=origin,
    )
    assert state_of(other).reached == {}
    mine = events.CheckpointPublished(incarnation=2, step=1001, elapsed_s=0, size_bytes=1, images=1)
    assert state_of(other, mine).reached["durable"].step == 1001


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0], ids=["back", "forward"])
def test_a_wall_clock_that_is_set_while_a_run_trains_changes_no_age_and_no_rate(
    jump_s: float,
) -> None:
    run, found = LiveRun(), LiveFindings("r")
    for second in range(180):
        wall_s = WALL_S + second + (jump_s if second >= 90 else 0.0)
        head = RecordHead(time_s=wall_s, mono_s=50.0 + second, by_host="a", boot="b")
        event: AnyEvent = events.SnapshotCaptured(
            incarnation=1, step=second, elapsed_s=0.0, world=1
        )
        if second == 0:
            event = events.RunStarted(incarnation=1, rank=0, run_id="r", world=1, host="a", pid=1)
        run.take(event, head)
        found.take(event, head)
    now_s = WALL_S + 180 + jump_s
    lines = screen_lines("r", run, now_s, findings=found)
    assert lines[0].endswith("last record 1.00 s ago"), lines
    assert any("rates     60 snapshots a minute" in line for line in lines)
    assert lines[-1] == "no trouble in the last 15 minutes"
    report = report_of("r", [(events.Warned(message=""), head)])
    assert not any(one.cause == "no_sign_of_life" for one in find(report, now_s))


def test_after_a_start_on_fewer_hosts_it_shows_those_that_are_left_and_their_ranks() -> None:
    run = LiveRun()

    def take(event: AnyEvent, at_s: float, host: str) -> None:
        run.take(event, RecordHead(time_s=WALL_S + at_s, by_host=host))

    def copy(number: int, rank: int, copy_s: float, at_s: float, host: str) -> None:
        image: dict[str, Any] = {
            "step": int(at_s),
            "elapsed_s": copy_s,
            "copy_s": copy_s,
            "size_bytes": 1 << 20,
        }
        take(events.ImageCaptured(incarnation=number, rank=rank, **image), at_s, host)

    def of_host(host: str) -> AnyEvent:
        return of(HostSampled, 0, -1, host=host)

    def start(number: int, ranks: dict[int, str], at_s: float) -> None:
        for rank, host in ranks.items():
            fields = {"run_id": "r", "world": len(ranks), "host": host, "pid": 1}
            take(of(events.RunStarted, number, rank, **fields), at_s, host)
            copy(number, rank, 9.0 if rank == 3 else 0.1, at_s + 1, host)

    start(1, {0: "a", 1: "a", 2: "b", 3: "b"}, 0.0)
    for at_s in (0.0, 10.0, 20.0):
        for host in "ab":
            take(of_host(host), at_s, host)
    assert run.slowest_ranks(1)[0][:2] == (3, "b") and run.hosts.keys() == {"a", "b"}
    start(2, {0: "a", 1: "a"}, 30.0)
    for at_s in (40.0, 85.0):
        take(of_host("a"), at_s, "a")
    copy(1, 3, 9.0, 29.0, "b")  # the file of b is read behind that of a
    assert {rank for rank, *_ in run.slowest_ranks(9)} == {0, 1}
    assert run.hosts.keys() == {"a"} and run.world == 2
    assert "incarnation 2, 2 ranks on 1 host," in screen_lines("r", run, WALL_S + 86)[0]


def test_rates_slow_ranks_and_the_save_under_way() -> None:
    run, mine = LiveRun(), {"incarnation": 1, "step": 3}
    run.take(
        events.SnapshotCaptured(incarnation=1, step=2, elapsed_s=0, world=4),
        RecordHead(time_s=WALL_S),
    )
    for rank in range(4):
        copied = events.ImageCaptured(
            **mine, rank=rank, elapsed_s=1, copy_s=4.0 if rank == 2 else 1.0, size_bytes=1
        )
        if rank < 3:
            run.take(copied, RecordHead(time_s=WALL_S + rank, by_host="b"))
        run.take(events.FenceWaited(**mine, rank=rank, held_s=0.3), RecordHead(time_s=WALL_S + 3))
        run.take(events.FenceWaited(**mine, rank=rank, held_s=0.3), RecordHead(time_s=WALL_S))
    assert run.slowest_ranks(1) == [(2, "b", 4.0)]
    assert run.held_part() == pytest.approx(8 * 0.3 / (3 * 4))
    newest = run.newest
    assert newest is not None and (newest.step, len(newest.copied)) == (3, 3)
    assert run.captures_per_minute() == 1
    text = "\n".join(screen_lines("r", run, WALL_S + 5))
    assert "newest    1-3: saved by 0, copied by 3; under way" in text
    assert "2 on b 4.0x" in text and "captured  1-2          5.00 s ago" in text


def test_what_ranks_are_doing_is_shown_where_some_do_not_train() -> None:
    def shown(**doing: int) -> str:
        run = state_of(of(HostSampled, 0, -1, host="a", doing=doing | {"training": 6}))
        return "\n".join(screen_lines("r", run, WALL_S))

    assert "ranks     6 in training, 2 in evaluation" in shown(evaluation=2)
    assert "in training" not in shown(saving=2)


def test_what_went_wrong_is_said_with_its_age_and_once_for_all_ranks() -> None:
    run = state_of(
        *(events.SnapshotMissed(incarnation=1, step=4, rank=r, reason="late") for r in (0, 1)),
        events.TrainerLost(incarnation=1, rank=3, host="h", pid=7),
    )
    assert findings_of(run, WALL_S + 12) == [
        "10.0 s ago: rank 3 on h went away without a goodbye",
        "12.0 s ago: 1-4 missed: late",
    ]
    late = findings_of(run, WALL_S + 1000)
    assert late == ["no record for 17 min: the run ended, or stands"]


def test_the_findings_that_are_shown_can_be_anyones() -> None:
    run = state_of(events.Warned(message="w"))
    lines = screen_lines("r", run, WALL_S, findings=lambda _, __: ["host c, disk: fsync 2.1 s"])
    assert lines[-1] == "host c, disk: fsync 2.1 s"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 12), (200, 60)])
@pytest.mark.parametrize("hosts", [0, 1, 300])
def test_the_screen_fits_whatever_is_in_the_records(width: int, height: int, hosts: int) -> None:
    run, chance = LiveRun(), random.Random(0)
    for step in range(20):
        for kind in (events.SaveReturned, events.ImageCaptured, events.ImageDurable):
            fields: dict[str, Any] = {
                name: 10.0 ** chance.randrange(-3, 9)
                if name.endswith("_s")
                else "\x1b[2J\u202e/" * 99
                if name == "image"
                else chance.randrange(1 << 14)
                for name in kind.__struct_fields__
            }
            head = RecordHead(time_s=WALL_S + step, by_host="\x1b[31m" + "h" * 300)
            run.take(kind(**fields | {"step": step, "incarnation": 1 << 50}), head)
        run.take(events.Warned(message="\x1b[2J\u202e\n" * 400), RecordHead(time_s=WALL_S + step))
    for number in range(hosts):
        sample = sampled(1)
        assert isinstance(sample, HostSampled)
        sample = msgspec.structs.replace(sample, host=f"\x1b[5m{number}" * 50)
        run.take(sample, RecordHead(time_s=WALL_S))
    lines = screen_lines("/r/" + "x" * 300, run, WALL_S + 20, width=width, height=height)
    assert len(lines) <= height and max(map(len, lines)) <= width
    assert all(line.isprintable() and "\x1b" not in line for line in lines)
    if (width, height) == (80, 24):
        assert any(line.startswith("phase") for line in lines)
        assert any(line.startswith("host ") for line in lines) == bool(hosts)
    json.dumps(to_plain(run, WALL_S))


# ── the command ──────────────────────────────────────────────────────────────────────────────────


def test_once_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, *save(0, 100.0), told(sampled(5), 100.0))
    assert main(["top", str(tmp_path), "--once"]) == 0
    out = capsys.readouterr().out
    assert "durable   1-0" in out and out.count("\n") <= 24
    assert max(map(len, out.splitlines())) <= 80
    assert main(["top", str(tmp_path)]) == 0, "where nobody watches it is printed once"
    assert main(["top", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out.partition("{\n")[2].join(("{\n", "")))
    assert document["reached"]["durable"]["step"] == 0
    assert document["hosts"]["a"]["queued_bytes"] == 5


def test_a_run_without_events_and_a_pause_that_is_none_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", str(tmp_path)]) == 3
    assert "no events in" in capsys.readouterr().err
    write(tmp_path, *save(0, 100.0))
    assert main(["top", str(tmp_path), "--every", "0"]) == 2


def on_terminal(root: Path) -> tuple[subprocess.Popen[bytes], int]:
    """``holdfast top`` on a terminal of 80 by 24 of its own."""
    master, slave = pty.openpty()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli", "top", str(root), "--every", "0.1"],
        stdin=slave,
        stdout=slave,
        env=environment | {"COLUMNS": "80", "LINES": "24"},
        start_new_session=True,
    )
    os.close(slave)
    return process, master


def until(terminal: int, text: bytes) -> bytes:
    seen, end_s = b"", time.monotonic() + 30
    while text not in seen:
        assert time.monotonic() < end_s, seen[-2000:]
        seen += os.read(terminal, 65536)
    return seen


@pytest.mark.parametrize("end", ["q", "interrupt"])
def test_on_a_terminal_it_follows_the_run_until_a_key(tmp_path: Path, end: str) -> None:
    write(tmp_path, *save(0, 100.0))
    process, terminal = on_terminal(tmp_path)
    try:
        seen = until(terminal, b"durable   1-0")
        assert b"\x1b[?1049h" in seen, "on a screen of its own"
        write(tmp_path, *save(17, 110.0))
        until(terminal, b"durable   1-17")
        if end == "q":
            os.write(terminal, b"q")
        else:
            process.send_signal(signal.SIGINT)
        until(terminal, b"\x1b[?1049l")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def test_an_interrupt_while_it_reads_or_draws_ends_it() -> None:
    def interrupted() -> list[str]:
        raise KeyboardInterrupt

    top._follow(interrupted, lambda: ["drawn"], 0.01)
    top._follow(lambda: None, interrupted, 0.01)


# ── figures that would mislead ───────────────────────────────────────────────────────────────────


@pytest.mark.promise
@pytest.mark.parametrize("behind_s", [0.0, 3600.0])
def test_rates_and_ages_are_by_one_clock_for_all_hosts(behind_s: float) -> None:
    """The coordinator's host is an hour behind: its saves are as new as they are."""
    run = LiveRun()
    for at_s in range(100):
        for host, late_s in (("a", behind_s), ("b", 0.0)):
            head = RecordHead(WALL_S + at_s - late_s, 5000.0 + at_s - late_s, host, f"boot-{host}")
            if at_s == 0:
                started = events.RunStarted(
                    incarnation=1, rank=host == "b", run_id="r", world=2, host=host, pid=1
                )
                run.take(started, head)
            elif host == "b":
                done = events.StepsDone(step=at_s, steps=1, rank=1, elapsed_s=1, longest_s=1)
                run.take(done, head)
            elif at_s % 10 == 9:
                of = {"incarnation": 1, "step": at_s}
                run.take(events.SnapshotCaptured(**of, elapsed_s=0, world=2), head)
                published = events.CheckpointPublished(**of, elapsed_s=1, size_bytes=60, images=2)
                run.take(published, head)
                run.take(published, head)  # by a keeper that took over
    assert run.captures_per_minute() == 6
    assert run.stored_bytes_per_s() == 6
    now_s = run.last_s + 1
    shown = screen_lines("r", run, now_s)
    assert any(line.startswith("durable   1-99         1.00 s ago") for line in shown), shown
    assert "6 snapshots a minute, 6 B/s to storage" in "\n".join(shown)


@pytest.mark.parametrize("world", [2, 8, 1000])
def test_the_part_that_saves_hold_does_not_depend_on_the_number_of_ranks(world: int) -> None:
    run = LiveRun()
    run.take(events.RunStarted(run_id="r", world=world, host="a", pid=1), RecordHead(WALL_S))
    for step in range(1, 13):
        for rank in range(world):
            held = events.FenceWaited(incarnation=1, step=step, rank=rank, held_s=0.2)
            run.take(held, RecordHead(WALL_S + 10 * step + rank / 1e5, by_host="a"))
    assert run.held_part() == pytest.approx(0.02, rel=0.02)


def test_troubles_are_told_in_words() -> None:
    run = state_of(
        events.LoopHeld(host="a", times=2, longest_s=0.25),
        events.KeeperLost(incarnation=1, reason="killed"),
        events.SourceDropped(source="storage 1-3", reason="checksum"),
    )
    assert [text for _, text in run.troubles] == [
        "keeper of a answered nobody for up to 0.25 s, 2 times",
        "keeper lost: killed",
        "source storage 1-3 dropped: checksum",
    ]
