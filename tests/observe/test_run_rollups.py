"""Roll-ups of all hosts say what those of each host said, and nothing of it twice."""

from __future__ import annotations

import base64
import errno
import gzip
import json
import os
import random
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import events
from holdfast.errors import NotFound
from holdfast.observe import records, rollup_writer, run_rollup_writer, run_rollups
from holdfast.observe.event_files import closed_files, open_file
from holdfast.observe.rollup_files import ROLLUPS, inflate_rollup, name_of, rollup_path
from holdfast.observe.rollup_groups import FilePart, Rollup, RunRollupHead, SaveRollup, TrailParts
from holdfast.observe.rollup_maker import roll_up
from holdfast.observe.rollup_writer import RollupWriter
from holdfast.observe.rollups import NAMED
from holdfast.observe.run_rollup_thread import RollupJoining
from holdfast.observe.run_rollup_writer import RunRollupWriter
from holdfast.observe.run_rollups import (
    Coverage,
    joined_directory,
    joined_files,
    joined_name,
    read_head,
)
from observe.test_rollup_files import (
    MANY,
    RANKS,
    assert_alike,
    roll_up_all,
    said,
    tell_run,
    trails_of,
)
from observe.test_trails import wait_until
from support.runs.told import Told, of, tell_save, tell_start

#: More hosts than are kept of the first and the last calls.
HOSTS = {rank: f"h{rank // 2:02d}" for rank in range(80)}


def writer_of(root: Path, part_bytes: int = 1 << 20, reading_s: float = 0.0) -> RunRollupWriter:
    return RunRollupWriter(lambda: root / "events", part_bytes=part_bytes, reading_s=reading_s)


def join_all(root: Path, part_bytes: int = 1 << 20) -> int:
    writer, count = writer_of(root, part_bytes), 0
    while writer.join():
        count += 1
    return count


def remove_hosts_files(root: Path) -> None:
    for directory in (root / "events", root / "events" / ROLLUPS):
        for path in directory.iterdir():
            if path.is_file():
                path.unlink()


def tell_many_hosts(root: Path) -> Path:
    """Hosts whose clocks are apart, the last of which calls late, and measures its link."""
    rng = random.Random(1)
    ahead_s = {host: rng.uniform(0.0, 3600.0) for host in sorted(set(HOSTS.values()))}
    told = Told(root, ahead_s)
    tell_start(told, 1, 10.0, HOSTS)
    for step in range(6):
        called_s = {rank: 0.01 + rank / 1e4 for rank in HOSTS}
        copy_s = {rank: 0.2 - rank / 1e4 for rank in HOSTS}
        tell_save(told, 1, step, 20.0 + 10 * step, HOSTS, held_s=called_s, copy_s=copy_s)
        returned = of(events.SaveReturned, 1, 78, step=step, held_s=0.01, size_bytes=1_000_000)
        told(returned, 20.21 + 10 * step, "h39")
    for at in range(40):
        compared = of(
            events.ClocksCompared,
            1,
            -1,
            host="h39",
            other="h00",
            other_boot="b",
            ahead_s=ahead_s["h39"] - ahead_s["h00"],
            error_s=0.001,
            round_trip_s=0.002 + at / 1e5,
        )
        told(compared, 15.0 + at, "h39")
    return told.write()


@pytest.mark.parametrize("part_bytes", [1 << 20, 1], ids=["at once", "little by little"])
@pytest.mark.parametrize("ranks", [RANKS, MANY], ids=["few", "many"])
def test_a_report_of_joined_roll_ups_alone_says_what_that_of_all_records_says(
    ranks: dict[int, str], part_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollup_writer, "CHUNK_BYTES", 20_000)
    root = tell_run(tmp_path, ranks)
    expected = said(root)
    roll_up_all(root)
    assert join_all(root, part_bytes) >= 1
    for where in ("beside the records", "of joined roll-ups"):
        found = said(root)
        for one, other in zip(found["saves"], expected["saves"], strict=True):
            other["late_rank"] = one["late_rank"]  # of ranks that called at once
        assert_alike(found, expected, where)
        remove_hosts_files(root)


def test_of_many_hosts_the_first_and_the_last_are_kept(tmp_path: Path) -> None:
    root = tell_many_hosts(tmp_path)
    expected = said(root)
    assert {save["late_rank"] for save in expected["saves"]} == {78}
    roll_up_all(root)
    assert join_all(root) == 1
    (_, path), *_ = joined_files(root / "events")
    content = json.loads(gzip.decompress(path.read_bytes()).splitlines()[1])
    assert all(NAMED <= len(save[4]) <= 2 * NAMED + 1 for save in content["saves"])
    remove_hosts_files(root)
    found = said(root)
    for document in (found, expected):
        document["clocks"] = [
            {**one, "error_s": None, "ahead_s": round(one["ahead_s"], 2)}
            for one in document["clocks"]
        ]
        (link,) = document.pop("links")
        assert link["count"] == 40 and link["largest_s"] == pytest.approx(0.00239)
        assert link["median_s"] == pytest.approx(0.0022, rel=0.1)
    assert_alike(found, expected)


def test_clocks_are_known_to_the_roll_ups_behind_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start, by which clocks are compared, is in the first one alone."""
    monkeypatch.setattr(rollup_writer, "CHUNK_BYTES", 1200)
    root = tell_many_hosts(tmp_path)
    expected = said(root)
    roll_up_all(root)
    assert join_all(root, 1) > 5
    sizes = [
        len(save[4])
        for _, path in joined_files(root / "events")
        for save in json.loads(gzip.decompress(path.read_bytes()).splitlines()[1]).get("saves", ())
    ]
    assert max(sizes) <= 2 * NAMED + 1
    remove_hosts_files(root)
    found = said(root)
    late = [(save["late_rank"], round(save["late_s"], 1)) for save in found["saves"]]
    assert late == [(save["late_rank"], round(save["late_s"], 1)) for save in expected["saves"]]


@given(
    st.lists(st.sampled_from(["tell", "roll up", "join", "join little", "give up"])),
    st.randoms(use_true_random=False),
)
@settings(max_examples=15, deadline=None)
def test_whatever_is_rolled_up_joined_and_given_up_the_report_stays(
    acts: list[str], rng: random.Random
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = tell_run(Path(directory), RANKS, saves=2)
        expected = said(root)
        left = {trail: trail.read_bytes().splitlines(keepends=True) for trail in trails_of(root)}
        for trail in left:
            trail.write_bytes(b"")
        for act in [*acts, "tell all"]:
            for trail, lines in left.items():
                if act.startswith("tell"):
                    count = len(lines) if act == "tell all" else rng.randrange(12)
                    with trail.open("ab") as file:
                        file.write(b"".join(lines[:count]))
                    del lines[:count]
                elif act == "roll up" and rng.random() < 0.8:
                    writer = RollupWriter(trail)
                    writer.poll(is_last=True)
                    writer._file._begin_part() if rng.random() < 0.5 else None
                    writer.close()
            if act.startswith("join"):
                writer_of(root, 1 if act == "join little" else 1 << 20).join()
        assert_alike(said(root), expected)


def test_one_of_two_keepers_that_join_at_once_gets_the_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tell_run(tmp_path, RANKS)
    expected = said(root)
    roll_up_all(root)
    other, published = writer_of(root), run_rollup_writer._publish

    def publish_second(*args: Any) -> None:
        monkeypatch.undo()
        assert other.join()
        published(*args)

    monkeypatch.setattr(run_rollup_writer, "_publish", publish_second)
    writer = writer_of(root)
    assert writer.join()
    assert [number for number, _ in joined_files(root / "events")] == [1]
    assert not writer.join() and not other.join()
    assert [path.name for path in joined_directory(root / "events").iterdir()] == [
        "00000001.jsonl.gz"
    ]
    remove_hosts_files(root)
    assert_alike(said(root), expected)


def test_what_is_joined_is_given_up_and_not_rolled_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollup_writer, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(rollup_writer, "PART_BYTES", 1)
    root = tell_run(tmp_path, RANKS)
    expected = said(root)
    roll_up_all(root)
    paths = [rollup_path(trail) for trail in trails_of(root)]
    parts = [len(closed_files(path)) for path in paths]
    assert min(parts) > 5
    writer = writer_of(root)
    assert writer.join()
    assert [len(closed_files(path)) for path in paths] == parts
    assert not writer.join()
    assert [len(closed_files(path)) for path in paths] == [1, 1]
    left = [path.read_bytes() for path in paths]
    roll_up_all(root)
    assert [path.read_bytes() for path in paths] == left
    assert_alike(said(root), expected)
    for trail in trails_of(root):
        trail.unlink()
    assert_alike(said(root), expected)


def test_a_full_file_is_read_once_and_the_directory_is_listed_once_for_all_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of hosts change the directory all the time."""
    monkeypatch.setattr(rollup_writer, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(rollup_writer, "PART_BYTES", 1)
    root = tell_run(tmp_path, RANKS)
    roll_up_all(root)
    every = [path for trail in trails_of(root) for path in closed_files(rollup_path(trail))]
    opened, listed = list[Path](), list[Path]()
    listdir = os.listdir

    def open_and_note(path: Path) -> Any:
        opened.append(path)
        return open_file(path)

    def list_and_note(path: Any) -> Any:
        listed.append(Path(path))
        return listdir(path)

    monkeypatch.setattr(run_rollup_writer, "open_file", open_and_note)
    monkeypatch.setattr(os, "listdir", list_and_note)
    writer = writer_of(root, reading_s=60.0)
    assert writer.join() and not writer.join() and not writer.join()
    assert sorted(path for path in opened if path in every) == sorted(every)
    assert listed.count(root / "events" / ROLLUPS) == 3
    assert all(path.exists() for path in every)


def test_none_is_larger_than_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thousands of hosts that have much to say one would be."""
    monkeypatch.setattr(rollup_writer, "CHUNK_BYTES", 3000)
    root = tell_run(tmp_path, RANKS)
    expected = said(root)
    roll_up_all(root)
    monkeypatch.setattr(run_rollup_writer, "_JOINED_BYTES", 1)
    assert join_all(root) > 10
    assert all(len(read_head(path).trails) == 1 for _, path in joined_files(root / "events"))
    remove_hosts_files(root)
    assert_alike(said(root), expected)


@pytest.mark.parametrize("is_cut", [False, True], ids=["roll-ups lost", "events lost, too"])
def test_what_is_appended_after_a_loss_of_power_is_read_though_more_was_joined(
    is_cut: bool, tmp_path: Path
) -> None:
    """What was joined is durable before what it is of."""
    root = tell_run(tmp_path, RANKS)
    expected = said(root)
    left = {trail: trail.read_bytes().splitlines(keepends=True) for trail in trails_of(root)}
    for trail, lines in left.items():
        trail.write_bytes(b"".join(lines[:40]))
    roll_up_all(root)
    join_all(root)
    for trail, lines in left.items():
        rollup_path(trail).write_bytes(b"")
        if is_cut:
            trail.write_bytes(b"".join(lines[:20]))
        writer = RollupWriter(trail)
        writer.begin()
        with trail.open("ab") as file:
            file.write(b"".join(lines[40:]))
        writer.finish(deadline_s=60)
    assert_alike(said(root), expected)
    join_all(root)
    remove_hosts_files(root)
    assert_alike(said(root), expected)


def test_what_is_joined_while_a_report_is_read_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollup_writer, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(rollup_writer, "PART_BYTES", 1)
    root = tell_run(tmp_path, RANKS)
    expected = said(root)
    roll_up_all(root)
    for trail in trails_of(root):
        trail.unlink()
    read = run_rollups.read_run_rollups

    def join_behind(*args: Any) -> Iterator[Rollup]:
        yield from read(*args)
        writer = RunRollupWriter(lambda: root / "events")
        while writer.join():
            pass

    monkeypatch.setattr(records, "read_run_rollups", join_behind)
    assert_alike(said(root), expected)
    assert joined_files(root / "events")


def test_what_was_begun_is_rolled_up_to_its_end_by_the_next_keeper(tmp_path: Path) -> None:
    """One file could not be read for a while, and its keeper rolled up the next one before."""
    root = tell_run(tmp_path, RANKS)
    trail, *_ = trails_of(root)
    lines = trail.read_bytes().splitlines(keepends=True)
    trail.write_bytes(b"".join(lines[:30]))
    RollupWriter(trail).finish(deadline_s=60)
    full = trail.with_suffix(".s000001.jsonl")
    full.write_bytes(b"".join(lines[:50]))
    trail.write_bytes(b"".join(lines[50:]))
    newest = msgspec.json.encode(roll_up(trail.read_bytes(), _name(trail), 0)) + b"\n"
    with rollup_path(trail).open("ab") as file:
        file.write(newest)
    expected = said(root)
    RollupWriter(trail).finish(deadline_s=60)
    full.unlink()
    assert_alike(said(root), expected)


def _name(path: Path) -> str:
    with path.open("rb") as file:
        return name_of(file)


def of_newer(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    """Returns a line as a newer version writes it, which has more in a roll-up than this one."""

    def changed(line: bytes) -> bytes:
        rolled_up = json.loads(inflate_rollup(line))
        change(rolled_up)
        deflated = base64.b64encode(zlib.compress(json.dumps(rolled_up).encode())).decode()
        return json.dumps({**json.loads(line), "saves": {"columns": deflated}}).encode() + b"\n"

    return changed


@pytest.mark.parametrize(
    "change",
    [
        lambda line: json.dumps({**json.loads(line), "saves": 3}).encode() + b"\n",
        of_newer(lambda rolled_up: rolled_up.update(tables=[])),
        of_newer(lambda rolled_up: rolled_up["clocks"][0].append(7)),
        of_newer(lambda rolled_up: rolled_up["lives"][0].append("of the future")),
    ],
    ids=["a line", "a field", "a column of clocks", "a column of lives"],
)
def test_what_is_of_another_version_is_not_given_up(
    change: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A keeper of a newer version rolled it up, or one of an older: what this one does not know
    would be in no roll-up any more.
    """
    monkeypatch.setattr(rollup_writer, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(rollup_writer, "PART_BYTES", 1)
    root = tell_run(tmp_path, RANKS)
    roll_up_all(root)
    foreign = next(
        path
        for trail in trails_of(root)
        for path in closed_files(rollup_path(trail))
        if b'"lives"' in inflate_rollup(path.read_bytes())
    )
    data = change(foreign.read_bytes())
    foreign.write_bytes(data)
    writer = writer_of(root)
    assert writer.join() and not writer.join()
    assert [path for path in foreign.parent.glob("*.s*") if path == foreign] == [foreign]
    assert foreign.read_bytes() == data
    heads = [read_head(path) for _, path in joined_files(root / "events")]
    start = json.loads(data)["start"]
    trail = f"{foreign.name.partition('.')[0]}.jsonl"
    parts = [
        part
        for head in heads
        for one in head.trails
        if one.trail == trail
        for part in one.parts
        if part.file == json.loads(data)["file"]
    ]
    assert parts and start not in [part.start for part in parts]


class _OlderLine(msgspec.Struct):
    """A line as versions read it that had no columns."""

    file: str
    start: int
    end: int
    is_end: bool
    saves: bytes


class _OlderRollup(msgspec.Struct):
    saves: list[SaveRollup] = []


def test_a_version_that_knows_no_columns_takes_no_line_that_has_some(tmp_path: Path) -> None:
    """It would join what it knows of them, and give up the rest."""
    root = tell_run(tmp_path, RANKS)
    roll_up_all(root)
    for trail in trails_of(root):
        for line in rollup_path(trail).read_bytes().splitlines():
            for older in (_OlderLine, _OlderRollup):
                with pytest.raises(msgspec.ValidationError):
                    msgspec.json.decode(line, type=older)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"\0" * len(data),
        lambda data: b"",
        lambda data: gzip.compress(b'{"number": 1, "trails": []}\n{"file": 3}\n'),
        lambda data: gzip.compress(b"[" * 100_000 + b"\n"),
        lambda data: gzip.compress(b"\xff\xfe\n{}\n"),
    ],
)
def test_a_damaged_one_is_named_and_what_it_was_of_is_read(
    damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    root = tell_run(tmp_path, RANKS)
    expected = said(root)
    roll_up_all(root)
    join_all(root)
    ((_, path),) = joined_files(root / "events")
    path.write_bytes(damage(path.read_bytes()))
    found = said(root)
    assert [one.partition(":")[0] for one in found.pop("unreadable")] == [path.name]
    del expected["unreadable"]
    expected["findings"] = [one for one in found["findings"] if "unreadable" not in one]
    found["findings"] = expected["findings"]
    assert_alike(found, expected)


def join_in_two(root: Path) -> tuple[Path, Path]:
    """Two roll-ups of all hosts, the second of what was told behind the first."""
    left = {trail: trail.read_bytes().splitlines(keepends=True) for trail in trails_of(root)}
    for trail, lines in left.items():
        trail.write_bytes(b"".join(lines[: len(lines) // 2]))
    roll_up_all(root)
    join_all(root)
    for trail, lines in left.items():
        trail.write_bytes(b"".join(lines))
    roll_up_all(root)
    join_all(root)
    (_, first), (_, second) = joined_files(root / "events")
    return first, second


def unlisted(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Directories are listed without this name, as that of another host may be for a while."""
    iterdir = Path.iterdir
    monkeypatch.setattr(
        Path, "iterdir", lambda path: (one for one in iterdir(path) if one.name != name)
    )


def test_one_that_is_not_listed_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tell_run(tmp_path, RANKS)
    expected = said(root)
    first, _ = join_in_two(root)
    remove_hosts_files(root)
    unlisted(monkeypatch, first.name)
    assert_alike(said(root), expected)


def test_one_that_is_not_there_between_others_is_named(tmp_path: Path) -> None:
    root = tell_run(tmp_path, RANKS)
    first, _ = join_in_two(root)
    remove_hosts_files(root)
    first.unlink()
    (named,) = said(root)["unreadable"]
    assert named == f"{first.name}: No such file or directory"
    (first.parent / "99999999.jsonl.gz").write_bytes(b"")  # millions seem to be missing
    assert len(said(root)["unreadable"]) == 17


def test_what_one_that_is_not_listed_is_of_is_not_joined_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tell_run(tmp_path, RANKS)
    expected = said(root)
    first, _ = join_in_two(root)
    with monkeypatch.context() as patch:
        unlisted(patch, first.name)
        assert not writer_of(root, reading_s=60.0).join()
    away = first.with_name("away")
    first.rename(away)
    writer = writer_of(root, reading_s=60.0)
    with pytest.raises(FileNotFoundError):  # it must have been there
        writer.join()
    away.rename(first)
    assert not writer.join()
    first.unlink()
    assert writer_of(root, reading_s=0.0).join()  # it is lost for good
    found = said(root)
    assert found.pop("unreadable") == [f"{first.name}: No such file or directory"]
    del found["findings"], expected["findings"], expected["unreadable"]
    assert_alike(found, expected)


def test_many_that_are_lost_are_waited_for_together(tmp_path: Path) -> None:
    root = tell_run(tmp_path, RANKS)
    join_in_two(root)
    directory = joined_directory(root / "events")
    for path in directory.iterdir():
        path.rename(directory / f"{int(path.name[:8]) + 5:08d}.jsonl.gz")
    writer = writer_of(root, reading_s=0.2)
    with pytest.raises(FileNotFoundError):
        writer.join()
    time.sleep(0.25)
    writer.join()


def test_a_keeper_of_some_minutes_joins_though_one_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is missed from the first look on, and not from when there is something to join."""
    root = tell_run(tmp_path, RANKS)
    first, second = join_in_two(root)
    first.unlink()
    writer = partial(RunRollupWriter, reading_s=0.3)
    monkeypatch.setattr(run_rollup_writer, "RunRollupWriter", writer)
    joining = RollupJoining(lambda: root / "events", lambda: True, every_s=0.6, look_s=0.02)
    time.sleep(0.8)
    joining.close()
    assert [path for _, path in joined_files(root / "events")][1:] == [
        second,
        second.with_name(joined_name(3)),
    ]


@pytest.mark.parametrize(
    "name", ["..", "", "a\0.jsonl", 400 * "x" + ".jsonl", 240 * "é" + ".jsonl"], ids=range(5)
)
def test_a_name_that_no_file_can_have_is_passed_over(name: str, tmp_path: Path) -> None:
    root = tell_run(tmp_path, RANKS)
    directory = joined_directory(root / "events")
    directory.mkdir(parents=True)
    head = RunRollupHead(1, [TrailParts(name, [FilePart("0", 0, 1)])])
    lines = msgspec.json.encode(head) + b'\n{"file": "", "start": 0, "end": 0}\n'
    (directory / joined_name(1)).write_bytes(gzip.compress(lines))
    assert said(root)["unreadable"] == []


@pytest.mark.parametrize("which", ["events", "rollups", "joined"])
def test_a_directory_that_cannot_be_listed_is_named(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tell_run(tmp_path, RANKS)
    roll_up_all(root)
    join_all(root)
    others = [path for path in (root / "events").rglob("*.jsonl*") if path.parent.name != which]
    scandir, listdir = os.scandir, os.listdir

    def refuse(of: Any, path: Any) -> Any:
        if Path(path).name == which:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return of(path)

    monkeypatch.setattr(os, "scandir", lambda path=".": refuse(scandir, path))
    monkeypatch.setattr(os, "listdir", lambda path=".": refuse(listdir, path))
    assert any(one == f"{which}: Input/output error" for one in said(root)["unreadable"])
    for path in others:
        path.unlink()
    with pytest.raises(NotFound, match="Input/output error"):
        said(root)


@pytest.mark.promise
def test_what_two_say_is_counted_once(tmp_path: Path) -> None:
    root = tell_run(tmp_path, RANKS)
    expected = said(root)
    roll_up_all(root)
    join_all(root)
    ((_, path),) = joined_files(root / "events")
    shutil.copy(path, path.with_name("00000002.jsonl.gz"))
    (path.parent / "00000003.jsonl.gz").mkdir()
    (path.parent / "notes.txt").write_text("mine")
    found = said(root)
    named = sorted(one.partition(":")[0] for one in found.pop("unreadable"))
    assert named == ["00000002.jsonl.gz", "00000003.jsonl.gz"]
    del expected["unreadable"], expected["findings"], found["findings"]
    assert_alike(found, expected)


def test_a_name_of_another_directory_is_read_by_nobody(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    root = tell_run(tmp_path / "run", RANKS)
    (tmp_path / "secret.jsonl").write_text('{"event": "Warned", "message": "secret"}\n')
    coverage = Coverage()
    head = RunRollupHead(1, [TrailParts("../../secret.jsonl", [FilePart("0", 0, 1)])])
    assert coverage.take(head)
    directory = joined_directory(root / "events")
    directory.mkdir(parents=True)
    lines = msgspec.json.encode(head) + b'\n{"file": "", "start": 0, "end": 0}\n'
    (directory / "00000001.jsonl.gz").write_bytes(gzip.compress(lines))
    assert "secret" not in str(said(root))


def test_the_keeper_of_a_run_joins_what_its_hosts_rolled_up(tmp_path: Path) -> None:
    (tmp_path / "told").mkdir()
    other = tell_run(tmp_path / "told", RANKS)
    roll_up_all(other)
    (tmp_path / "events" / ROLLUPS).mkdir(parents=True)
    for trail in trails_of(other):
        shutil.copy(rollup_path(trail), tmp_path / "events" / ROLLUPS / f"host-x{trail.name}")
    for _ in range(2):
        with holdfast.Checkpointer(
            tmp_path, {"model": torch.nn.Linear(64, 64)}, storage=None
        ) as ckpt:
            ckpt.restore()
            for step in range(3):
                ckpt.save(step).wait_captured()
                ckpt.step(step)
        wait_until(lambda: bool(joined_files(tmp_path / "events")))
    expected = said(tmp_path)
    heads = [read_head(path) for _, path in joined_files(tmp_path / "events")]
    (trail,) = trails_of(tmp_path)
    own = [one for head in heads for one in head.trails if one.trail == trail.name]
    end = max(part.end for one in own for part in one.parts)
    first, *_ = trail.read_bytes().splitlines(keepends=True)
    left = trail.read_bytes()[end:]
    trail.write_bytes(first + b"\n" * (end - len(first)) + left)
    for path in (tmp_path / "events" / ROLLUPS).glob("*.jsonl*"):
        path.unlink()
    assert_alike(said(tmp_path), expected)


def test_a_keeper_that_follows_joins_nothing(tmp_path: Path) -> None:
    root = tell_run(tmp_path, RANKS)
    roll_up_all(root)
    leads = [False]
    joining = RollupJoining(lambda: root / "events", lambda: leads[0], every_s=0.0, look_s=0.01)
    joining.close()
    assert not joined_files(root / "events")
    joining = RollupJoining(lambda: root / "events", lambda: leads[0], every_s=0.0, look_s=0.01)
    leads[0] = True
    wait_until(lambda: bool(joined_files(root / "events")))
    joining.close()
