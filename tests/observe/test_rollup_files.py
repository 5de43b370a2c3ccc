"""Roll-ups in files say what the records said that they are of, whatever became of these."""

from __future__ import annotations

import base64
import errno
import gzip
import io
import json
import math
import os
import re
import shutil
import tempfile
import zlib
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import events
from holdfast.observe import rollup_maker, rollup_writer
from holdfast.observe.event_files import (
    EventFile,
    closed_files,
    compress,
    encode_record,
    give_up,
    set_aside,
)
from holdfast.observe.findings import find
from holdfast.observe.report import to_json
from holdfast.observe.report_builder import read_report
from holdfast.observe.rollup_files import (
    Covered,
    FileEnd,
    decode_columns,
    decode_rollup,
    encode_rollup,
    inflate_rollup,
    name_of,
    read_ends,
    rollup_path,
)
from holdfast.observe.rollup_groups import Rollup
from holdfast.observe.rollup_joiner import RollupJoiner
from holdfast.observe.rollup_maker import roll_up
from holdfast.observe.rollup_writer import RollupWriter
from holdfast.observe.run_rollup_writer import RunRollupWriter
from observe.test_trails import wait_until
from support.runs.told import Told, of, tell_death, tell_save, tell_start

RANKS = {rank: "ab"[rank // 3] for rank in range(6)}
#: As many ranks on a host that not all of them are among the slowest.
MANY = {rank: "ab"[rank // 40] for rank in range(80)}


def tell_run(root: Path, ranks: dict[int, str], saves: int = 12) -> Path:
    """Two starts of two hosts, whose clocks are an hour apart; b's disk is slow in the second."""
    told = Told(root, {"b": 3600.0})

    def each(usual_s: float) -> dict[int, float]:
        return {rank: usual_s * (1 + rank / 1000) for rank in ranks}

    tell_start(told, 1, 10.0, ranks)
    usual: dict[str, Any]
    for step in range(saves):
        usual = {name: each(s) for name, s in (("held_s", 0.01), ("copy_s", 0.2), ("write_s", 0.3))}
        usual["copy_s"][1] += step / 100
        tell_save(told, 1, step, 15.0 + 10 * step, ranks, **usual)
    tell_death(told, 1, 20.0 + 10 * saves, ranks, "")
    tell_start(told, 2, 50.0 + 10 * saves, ranks, (1, saves - 1))
    slow = each(0.3) | {rank: 2.0 + rank / 1000 for rank, host in ranks.items() if host == "b"}
    for step in range(saves, 2 * saves):
        at_s = 60.0 + 10 * step
        usual = {name: each(s) for name, s in (("held_s", 0.02), ("copy_s", 0.2))}
        tell_save(told, 2, step, at_s, ranks, write_s=slow, grant_s=each(0.05), **usual)
        for rank, host in ranks.items():
            fenced = of(events.FenceWaited, 2, rank, step=step, held_s=0.001 * (rank + 1))
            told(fenced, at_s + 0.1, host)
            if rank % 3 == 0:
                done = of(events.StepsDone, 2, rank, step=step, steps=10, elapsed_s=9.0)
                told(done, at_s + 8, host)
        for host in ("a", "b"):
            sample = of(
                events.HostSampled,
                2,
                -1,
                host=host,
                queued_s=step / 10,
                free_bytes=1000 - step,
                cpu_pressure=0.1,
                io_pressure=0.4 if host == "b" else -1.0,
                keeper_bytes=step,
                doing={"training": 1 + step} if step % 2 else {"evaluation": 1},
            )
            told(sample, at_s + 5, host)
    for rank, host in ranks.items():
        told(of(events.RunEnded, 2, rank, outcome="closed"), 80.0 + 20 * saves, host)
    return told.write()


def said(root: Path) -> dict[str, Any]:
    """The report as plain values, without what is of files."""
    report = read_report(root)
    document: dict[str, Any] = json.loads(json.dumps(to_json(report)))
    document["findings"] = [re.sub(r"[\d.]+ m?s", "#", one.evidence) for one in find(report)]
    for name in ("files", "root"):
        del document[name]
    return document


def assert_alike(found: Any, expected: Any, where: str = "report") -> None:
    """Equal, but for numbers: these to 7 digits, and quantiles to the error of the sketch."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_alike(found[name], value, f"{where}.{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for at, value in enumerate(expected):
            assert_alike(found[at], value, f"{where}[{at}]")
    elif isinstance(expected, float):
        part = 0.0201 if where.endswith(("median_s", "p90_s", "p99_s")) else 1e-6
        assert found == pytest.approx(expected, rel=part, abs=1e-6), where
    else:
        assert found == expected, where


def trails_of(root: Path) -> list[Path]:
    return sorted((root / "events").glob("*.jsonl"))


def roll_up_all(root: Path) -> None:
    for trail in trails_of(root):
        RollupWriter(trail).finish(deadline_s=60)


@pytest.mark.parametrize("ranks", [RANKS, MANY], ids=["few", "many"])
def test_a_report_of_roll_ups_alone_says_what_that_of_all_records_says(
    ranks: dict[int, str], tmp_path: Path
) -> None:
    root = tell_run(tmp_path, ranks)
    expected = said(root)
    assert len(expected["saves"]) == 24 and any(
        re.search("(on|host) b", f) for f in expected["findings"]
    )
    roll_up_all(root)
    assert_alike(said(root), expected, "beside the records")
    for trail in trails_of(root):
        trail.unlink()
    found = said(root)
    assert_alike(found, expected, "report")
    assert found["saves"][20]["phases"]["copy_s"]["ranks"] == len(ranks)


def test_roll_ups_take_far_less_room(tmp_path: Path) -> None:
    sizes = []
    for saves in (2, 8):  # both have two starts
        (tmp_path / str(saves)).mkdir()
        root = tell_run(tmp_path / str(saves), MANY, saves=saves)
        roll_up_all(root)
        files = trails_of(root), map(rollup_path, trails_of(root))
        sizes.append([sum(path.stat().st_size for path in of) for of in files])
    (before, rolled_up), (more, more_rolled_up) = sizes
    assert more_rolled_up - rolled_up < (more - before) / 8


@pytest.mark.promise
def test_what_is_not_rolled_up_yet_is_read_once(tmp_path: Path) -> None:
    root = tell_run(tmp_path, RANKS)
    expected = said(root)
    for trail in trails_of(root):
        whole = trail.read_bytes()
        writer, lines = RollupWriter(trail), whole.splitlines(keepends=True)
        third = len(lines) // 3
        trail.write_bytes(b"".join(lines[:third]) + lines[third][:20])
        assert writer.poll(is_last=True)
        with trail.open("ab") as file:
            file.write(lines[third][20:] + b"".join(lines[third + 1 : 2 * third]))
        assert writer.poll(is_last=True)
        writer.close()
        with trail.open("ab") as file:
            file.write(b"".join(lines[2 * third :]))
        assert 0 < next(iter(read_ends(trail).ends.values())).end < len(whole)
    assert_alike(said(root), expected)


def test_a_file_that_is_set_aside_and_given_up_stays_in_the_report(tmp_path: Path) -> None:
    root = tell_run(tmp_path, RANKS)
    expected = said(root)
    (trail, other) = trails_of(root)
    lines = trail.read_bytes().splitlines(keepends=True)
    trail.unlink()
    writer = RollupWriter(trail)
    for at in range(0, len(lines), 40):
        with trail.open("ab") as file:
            file.write(b"".join(lines[at : at + 40]))
        while writer.poll(is_last=True):
            pass
        with trail.open("ab") as file:  # it is not rolled up when the file is set aside
            file.write(b'{"torn')
        compress(set_aside(trail))
    writer.finish(deadline_s=60)
    assert len(closed_files(trail)) > 3
    found = said(root)
    assert found.pop("torn_lines") == len(closed_files(trail))
    gone = give_up(trail, 0)
    assert len(gone) == len(closed_files(trail)) + len(gone) - 1
    shutil.copy(other, tmp_path / "other")
    del expected["torn_lines"]
    assert_alike(found, expected)
    found = said(root)
    del found["torn_lines"]
    assert_alike(found, expected, "after most was given up")


def test_the_next_keeper_goes_on_where_one_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollup_writer, "CHUNK_BYTES", 3000)
    root = tell_run(tmp_path, RANKS)
    expected = said(root)
    for trail in trails_of(root):
        for _ in range(3):
            writer = RollupWriter(trail)
            for _ in range(2):
                assert writer.poll()
            writer.close()
            path = rollup_path(trail)
            os.truncate(path, path.stat().st_size - 30)  # the last one was torn
    found = said(root)
    assert found.pop("torn_lines") == 6
    del expected["torn_lines"]
    assert_alike(found, expected)
    roll_up_all(root)
    for trail in trails_of(root):
        trail.unlink()
    found = said(root)
    assert found.pop("torn_lines") == 6
    assert_alike(found, expected, "rolled up by another")


def test_what_ranks_have_not_done_is_in_roll_ups(tmp_path: Path) -> None:
    told = Told(tmp_path, {})
    tell_start(told, 1, 10.0, RANKS)
    for rank, host in RANKS.items():
        returned = of(
            events.SaveReturned,
            1,
            rank,
            step=3,
            held_s=0.1,
            describe_s=0.0,
            volatile_s=0.0,
            wait_previous_s=0.0,
            size_bytes=10,
            durable=True,
        )
        told(returned, 20.0, host)
        if rank != 4:
            copied = of(
                events.ImageCaptured, 1, rank, step=3, elapsed_s=0.1, copy_s=0.1, size_bytes=10
            )
            told(copied, 21.0, host)
    root = told.write()
    roll_up_all(root)
    (save,) = read_report(root).saves
    assert save.uncopied == (4,)
    assert save.unwritten == (0, 1, 2, 3, 5)


def test_a_roll_up_that_is_lost_between_others_covers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollup_writer, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(rollup_writer, "PART_BYTES", 1 << 20)
    root = tell_run(tmp_path, RANKS)
    expected = said(root)
    roll_up_all(root)
    for trail in trails_of(root):
        path = rollup_path(trail)
        lines = path.read_bytes().splitlines(keepends=True)
        for at in (0, 3, 4):
            lines[at] = b"\0" * (len(lines[at]) - 1) + b"\n"
        path.write_bytes(b"".join(lines))
    found = said(root)
    assert found.pop("torn_lines") == 3 * len(trails_of(root))
    del expected["torn_lines"]
    for save in (*found["saves"], *expected["saves"]):
        del save["late_rank"]  # of ranks that called at once, whichever is read first
    assert_alike(found, expected)


@pytest.mark.promise
@pytest.mark.parametrize("joins", range(3))
def test_what_damaged_roll_ups_were_of_is_rolled_up_again_before_its_records_are_given_up(
    joins: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``joins``: of so many hosts the first roll-ups were joined before."""
    monkeypatch.setattr(rollup_writer, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(rollup_writer, "PART_BYTES", 1 << 20)
    root = tell_run(tmp_path, RANKS)
    expected = said(root)
    left = {trail: trail.read_bytes() for trail in trails_of(root)}
    assert len(left) == 2
    if joins:  # what the first ones were of is known by that alone
        for number, (trail, data) in enumerate(left.items()):
            trail.write_bytes(data[: data.index(b"\n", 2500) + 1] if number < joins else b"")
        roll_up_all(root)
        assert RunRollupWriter(lambda: root / "events").join()
        for trail, data in left.items():
            rollup_path(trail).unlink(missing_ok=True)
            trail.write_bytes(data)
    roll_up_all(root)
    damage = deflated(lambda data: data[:9] + bytes(9) + data[18:])
    for trail in left:
        path = rollup_path(trail)
        lines = path.read_bytes().splitlines()
        for at in (0, 3, 4):
            lines[at] = damage(lines[at])
        lines[-1] = damage(lines[-1])
        path.write_bytes(b"\n".join(lines) + b"\n")
    for _ in range(2):
        before = {trail: rollup_path(trail).stat().st_size for trail in left}
        roll_up_all(root)
    assert before == {trail: rollup_path(trail).stat().st_size for trail in left}
    for trail in left:
        trail.unlink()
    found = said(root)
    assert found.pop("torn_lines") == 8
    del expected["torn_lines"]
    for document in (found, expected):
        for save in document["saves"]:
            del save["late_rank"]
    assert_alike(found, expected)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
@settings(max_examples=60, deadline=None)
def test_each_byte_is_covered_once_by_roll_ups_in_any_order(parts: list[tuple[int, int]]) -> None:
    line = b'{"n": 1}\n'
    covered, taken = Covered(), Counter[int]()
    file = io.BytesIO(line * 10)
    name = name_of(file)
    for start, end in parts:
        if covered.take(FileEnd(name, start * len(line), end * len(line))):
            taken.update(range(start, end))
    left = b"".join(covered.blocks(file))
    assert set(taken.values()) <= {1}
    assert len(left) == (10 - len(taken)) * len(line)


def test_a_file_that_cannot_be_rolled_up_does_not_keep_the_others_from_it(tmp_path: Path) -> None:
    root = tell_run(tmp_path, RANKS)
    (trail, *_) = trails_of(root)
    data = trail.read_bytes()
    packed = compress(set_aside(trail))
    packed.write_bytes(packed.read_bytes()[:-40])
    trail.write_bytes(data.partition(b"\n")[2])
    writer = RollupWriter(trail)
    with pytest.raises(EOFError):
        writer.poll(is_last=True)
    while writer.poll(is_last=True):
        pass
    writer.close()
    assert [one.end for one in read_ends(trail).ends.values()] == [trail.stat().st_size]


def test_what_could_not_be_rolled_up_once_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollup_writer, "CHUNK_BYTES", 3000)
    root = tell_run(tmp_path, RANKS)
    expected = said(root)
    now_s, calls = [0.0], []

    def out_of_memory(*args: Any, **named: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError
        return roll_up(*args, **named)

    monkeypatch.setattr(rollup_maker, "roll_up", out_of_memory)
    writer = RollupWriter(trails_of(root)[0], clock=lambda: now_s[0])
    for _ in range(6):
        with suppress(MemoryError):
            writer.poll()
        now_s[0] += 61
    writer.close()
    assert len(calls) >= 4
    assert_alike(said(root), expected)


def test_what_follows_records_that_a_host_lost_with_its_power_is_read(tmp_path: Path) -> None:
    root = tell_run(tmp_path, RANKS)
    expected = said(root)
    for trail in trails_of(root):
        lines = trail.read_bytes().splitlines(keepends=True)
        middle = len(lines) // 2
        trail.write_bytes(b"".join(lines[:middle]))
        RollupWriter(trail).begin()
        assert not closed_files(trail)
        RollupWriter(trail).finish(deadline_s=60)
        trail.write_bytes(b"".join(lines[: middle - 5]))
        writer = RollupWriter(trail)
        writer.begin()
        file = EventFile(trail)
        file.append(lines[middle:])
        file.close()
        assert_alike(said(root), expected)
        writer.finish(deadline_s=60)
    assert_alike(said(root), expected)


def test_roll_ups_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    root = tell_run(tmp_path, RANKS)
    roll_up_all(root)
    (trail, *_) = trails_of(root)
    packed = compress(set_aside(rollup_path(trail)))
    packed.write_bytes(packed.read_bytes()[:-40])
    assert [one.partition(":")[0] for one in read_report(root).unreadable] == [packed.name]


@given(st.lists(st.integers(0, 1000), max_size=6), st.randoms(use_true_random=False))
@settings(max_examples=8, deadline=None)
def test_it_does_not_matter_where_a_file_is_cut(cuts: list[int], rng: Any) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = tell_run(Path(directory), RANKS, saves=2)
        expected = said(root)
        for trail in trails_of(root):
            data = trail.read_bytes()
            trail.write_bytes(b"")
            writer, at = RollupWriter(trail), 0
            for cut in [*sorted(cuts), 1000]:
                end = len(data) * cut // 1000
                with trail.open("ab") as file:
                    file.write(data[at:end])
                at = end
                if rng.random() < 0.7:
                    writer.poll(is_last=True)
            writer.close()
            if rng.random() < 0.5:
                RollupWriter(trail).finish(deadline_s=60)
                trail.unlink()
        assert_alike(said(root), expected)


def damaged(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    """Of a roll-up as it is, or, where it has columns, with their arrays as older versions did."""

    def damage(line: bytes) -> bytes:
        whole = msgspec.json.encode(decode_columns(inflate_rollup(line)))
        document = msgspec.json.decode(whole)
        change(document)
        return msgspec.json.encode(document)

    return damage


def repacked(change: Callable[[list[Any]], Any]) -> Callable[[bytes], bytes]:
    """Of the columns of a line; the last two are how many saves, and the deflated arrays."""

    def damage(line: bytes) -> bytes:
        document = msgspec.json.decode(inflate_rollup(line))
        change(document["packed"][0])
        return msgspec.json.encode(document)

    return damage


def arrays_as(change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    def change_arrays(columns: list[Any]) -> None:
        columns[-1] = base64.b64encode(change(base64.b64decode(columns[-1]))).decode()

    return repacked(change_arrays)


def damaged_apart(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    """Of a roll-up whose saves are not in columns."""

    def damage(line: bytes) -> bytes:
        return damaged(change)(msgspec.json.encode(decode_rollup(inflate_rollup(line))))

    return damage


def changed(at: int, kind: str, change: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
    """One of the arrays of columns, as a list."""

    def change_array(document: dict[str, Any]) -> None:
        columns = document["columns"][0]
        values = array(kind, base64.b64decode(columns[at])).tolist()
        change(values)
        columns[at] = base64.b64encode(array(kind, values).tobytes()).decode()

    return damaged(change_array)


COUNTS, MOMENTS, SECONDS = (9, "q"), (10, "d"), (11, "f")


def deflated(change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    def damage(line: bytes) -> bytes:
        document = msgspec.json.decode(line)
        columns = base64.b64encode(change(base64.b64decode(document["saves"]["columns"])))
        return msgspec.json.encode(document | {"saves": {"columns": columns.decode()}})

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line[:100],
        lambda line: b"\0" * len(line),
        lambda line: b'{"file": 3}',
        damaged_apart(lambda d: d["saves"][0][4].append([7, 1.0, 1.0, 1])),
        damaged_apart(lambda d: d["saves"][0][2]["held_s"][1].pop()),
        damaged_apart(lambda d: d["saves"][0][2]["held_s"].__setitem__(2, [[1 << 40, 3]])),
        damaged(lambda d: d["columns"][0].__setitem__(1, 7)),
        damaged(lambda d: d["columns"][0][2].append(5)),
        damaged(lambda d: d["columns"][0][4].append([5, 1])),
        damaged(lambda d: d["columns"][0][7].append("fence_s")),
        damaged(lambda d: d["columns"][0].append("of a newer version")),
        damaged(lambda d: d.__setitem__("new", {})),
        changed(*COUNTS, list.pop),
        changed(*COUNTS, list.clear),
        changed(*COUNTS, lambda counts: counts.__setitem__(0, counts[1])),
        changed(*COUNTS, lambda counts: counts.__setitem__(0, -2)),
        changed(*COUNTS, lambda counts: counts.__setitem__(-1, -1)),
        changed(*COUNTS, lambda counts: counts.__setitem__(-1, (1 << 63) - 1)),
        changed(*MOMENTS, list.pop),
        changed(*MOMENTS, lambda moments: moments.__setitem__(0, math.nan)),
        changed(*MOMENTS, lambda moments: moments.__setitem__(0, -math.inf)),
        changed(*MOMENTS, lambda moments: moments.__setitem__(-1, -0.5)),
        changed(*SECONDS, list.pop),
        changed(*SECONDS, lambda seconds: seconds.__setitem__(0, -2.0)),
        changed(*SECONDS, lambda seconds: seconds.__setitem__(0, math.nan)),
        changed(*SECONDS, lambda seconds: seconds.__setitem__(0, 1e31)),
        repacked(lambda columns: columns.__setitem__(-2, columns[-2] - 1)),
        repacked(lambda columns: columns.__setitem__(-2, columns[-2] + 1)),
        repacked(lambda columns: columns.__setitem__(-2, 0)),
        repacked(lambda columns: columns.__setitem__(-2, 1 << 50)),
        repacked(lambda columns: columns[2].append(5)),
        repacked(lambda columns: columns.__setitem__(1, 7)),
        repacked(lambda columns: columns[4].append([5, 1])),
        repacked(lambda columns: columns.append("of a newer version")),
        arrays_as(lambda data: data[:-9]),
        arrays_as(lambda data: data[:9] + bytes(9) + data[18:]),
        arrays_as(lambda _: zlib.compress(bytes(80 << 20))),
        arrays_as(lambda data: zlib.compress(b"\xff" * len(zlib.decompress(data)))),
        damaged(lambda d: d["lives"][0].__setitem__(1, 9)),
        damaged(lambda d: d.__setitem__("end", -5)),
        deflated(lambda data: data[:-9]),
        deflated(lambda data: data[:9] + bytes(9) + data[18:]),
        deflated(lambda data: zlib.compress(b"[" * 90_000)),
        deflated(lambda data: zlib.compress(bytes(80 << 20))),
    ],
)
def test_a_roll_up_that_cannot_be_is_counted_and_its_records_are_read(
    damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    root = tell_run(tmp_path, RANKS)
    expected = said(root)
    roll_up_all(root)
    for trail in trails_of(root):
        path = rollup_path(trail)
        path.write_bytes(b"\n".join(map(damage, path.read_bytes().splitlines())) + b"\n")
    found = said(root)
    assert found.pop("torn_lines") == 2
    del expected["torn_lines"]
    assert_alike(found, expected)


@pytest.mark.parametrize("decode", [decode_rollup, decode_columns])
def test_roll_ups_of_older_versions_are_read_and_joined(
    decode: Callable[[bytes], Rollup], tmp_path: Path
) -> None:
    """They stand in their files as JSON, or have columns whose arrays are not packed."""
    root = tell_run(tmp_path, RANKS)
    expected = said(root)
    roll_up_all(root)
    paths = [rollup_path(trail) for trail in trails_of(root)]
    for trail, path in zip(trails_of(root), paths, strict=True):
        lines = [
            msgspec.json.encode(decode(inflate_rollup(line)))
            for line in path.read_bytes().splitlines()
        ]
        name = b'"saves"' if decode is decode_rollup else b'"columns"'
        assert all(name in line and b'"packed"' not in line for line in lines)
        assert all((b'"columns"' in line) == (decode is decode_columns) for line in lines)
        path.write_bytes(b"\n".join(lines) + b"\n")
        trail.unlink()
    assert_alike(said(root), expected)
    assert RunRollupWriter(lambda: root / "events").join()
    for path in paths:
        path.unlink()
    assert_alike(said(root), expected)


def test_a_roll_up_that_the_disk_did_not_take_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tell_run(tmp_path, RANKS)
    expected = said(root)
    (trail, _) = trails_of(root)
    writer, write, calls = RollupWriter(trail, clock=lambda: 0.0), os.write, []

    def full(fd: int, data: bytes) -> int:
        calls.append(fd)
        if len(calls) > 2:
            return write(fd, data)
        if len(calls) == 1:
            return write(fd, data[:50])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    assert not writer.poll(is_last=True) and len(calls) == 2
    assert writer.poll(is_last=True)
    monkeypatch.undo()
    writer.close()
    trail.unlink()
    found = said(root)
    assert found.pop("torn_lines") == 1
    del expected["torn_lines"]
    assert_alike(found, expected)


def test_little_is_rolled_up_once_a_minute_and_nothing_makes_no_file(tmp_path: Path) -> None:
    now_s = [100.0]
    trail = tmp_path / "host-a.jsonl"
    writer = RollupWriter(trail, clock=lambda: now_s[0])
    assert not writer.poll()
    file = EventFile(trail)
    line = msgspec.json.encode(events.to_record(events.Warned(message="m"), 1e9)) + b"\n"
    file.append([line])
    polls = []
    for _ in range(200):
        now_s[0] += 1.0
        polls.append(writer.poll())
        if now_s[0] == 250.0:
            file.append([line])
    assert polls.count(True) == 2
    assert len(rollup_path(trail).read_bytes().splitlines()) == 2
    writer.close()
    file.close()


def test_the_keeper_of_a_run_rolls_up_its_host(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, {"model": torch.nn.Linear(64, 64)}, storage=None) as ckpt:
        for step in range(5):
            ckpt.save(step).wait_captured()
            ckpt.step(step)
    (trail,) = trails_of(tmp_path)

    def left() -> bytes:
        (end, *_) = [one.end for one in read_ends(trail).ends.values()] or [0]
        return trail.read_bytes()[end:]

    # What a trainer says after the keeper has ended is for the next keeper.
    wait_until(
        lambda: b'"writer":"keeper-' not in left() and b"KeeperStopped" in trail.read_bytes()
    )
    expected = said(tmp_path)
    assert [save["state"] for save in expected["saves"]] == ["captured"] * 5
    first = trail.read_bytes().partition(b"\n")[0]
    blank = trail.stat().st_size - len(first) - len(left())
    trail.write_bytes(first + b"\n" * blank + left())
    assert_alike(said(tmp_path), expected)


def test_sums_that_nothing_can_have_keep_nothing_else_from_being_rolled_up() -> None:
    """The records may be damaged, each with what a record may just have."""
    lines = [
        encode_record(
            events.to_record(
                events.SaveReturned(
                    incarnation=1,
                    step=step,
                    rank=rank,
                    held_s=1e11,
                    describe_s=0,
                    volatile_s=0,
                    wait_previous_s=0,
                    leaves=1,
                    size_bytes=1 << 62,
                    durable=False,
                ),
                1e9 + step,
            ),
            100.0 + step,
            "h",
            f"rank-{rank}",
            step,
            "b",
        )
        for step in range(4)
        for rank in range(1, 4)
    ]
    made = roll_up(b"".join(lines), "f", 0)
    joiner = RollupJoiner()
    for _ in range(2):  # as of two hosts
        joiner.take(decode_columns(inflate_rollup(encode_rollup(made))))
    for one in (made, joiner.made()):
        found = decode_rollup(inflate_rollup(encode_rollup(one)))
        assert [save.step for save in found.saves] == [0, 1, 2, 3]
        assert {(save.asked_bytes, save.blocked_s) for save in found.saves} == {(1 << 62, 1e11)}
        assert {s for save in found.saves for s in save.phases["held_s"].seconds} == {1e11}


def test_a_file_that_its_user_has_compressed_counts_once_beside_its_roll_ups(
    tmp_path: Path,
) -> None:
    root = tell_run(tmp_path, RANKS)
    expected = said(root)
    roll_up_all(root)
    for trail in trails_of(root):
        trail.with_name(trail.name + ".gz").write_bytes(gzip.compress(trail.read_bytes()))
        trail.unlink()
    assert_alike(said(root), expected)
