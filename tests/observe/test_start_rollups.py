"""Starts, restores and orderly ends of many ranks stand in roll-ups in rows, and say the same."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import events
from holdfast.observe import rollup_writer
from holdfast.observe.report import to_json
from holdfast.observe.report_builder import read_report
from holdfast.observe.rollup_files import decode_rollup
from holdfast.observe.rollup_groups import (
    START_ROWS,
    ClockRollup,
    RestoreRollup,
    Rollup,
    StartRollup,
)
from holdfast.observe.rollup_maker import roll_up
from observe.test_rollup_files import MANY, assert_alike, roll_up_all, said, trails_of
from observe.test_run_rollups import join_all, remove_hosts_files
from support.runs.told import Told, of, tell_death, tell_save, tell_start

STARTS = 5


def restored(number: int, rank: int, step: int, at_s: float, **fields: Any) -> events.AnyEvent:
    return of(
        events.Restored,
        number,
        rank,
        step=step,
        parent_incarnation=number - 1,
        elapsed_s=at_s,
        size_bytes=1000 + rank,
        read_bytes=rank,
        received_bytes=2 * rank,
        world=80,
        saved_world=80,
        read_s=0.1 + rank / 100,
        **fields,
    )


def tell_many_starts(root: Path) -> Path:
    """Five starts of two hosts whose clocks are apart: killed, failed, restored twice, closed."""
    told, at_s, step = Told(root, {"b": 3600.0}), 10.0, 0
    for number in range(1, STARTS + 1):
        tell_start(told, number, at_s, MANY)
        for rank, host in MANY.items() if number > 1 else ():
            source = {"source": "memory", "origin": "peers" if rank == 70 else "memory"}
            told(restored(number, rank, step - 2, 1.5 + rank / 50, **source), at_s + 4, host)
            if rank % 3 == 0:  # the program went back once more
                told(restored(number, rank, step - 2, 0.5, source="storage"), at_s + 5, host)
        for _ in range(4):
            at_s += 10.0
            copy_s = {rank: 0.2 + rank / 1000 for rank in MANY}
            tell_save(told, number, step, at_s, MANY, held_s=copy_s, copy_s=copy_s)
            step += 1
        at_s += 15.0
        if number == 2:
            for rank, host in MANY.items():
                reason = "ValueError: bad batch" if rank == 66 else "connection reset by peer"
                ended = of(events.RunEnded, 2, rank, outcome="failed", reason=reason)
                told(ended, at_s + (0.0 if rank == 66 else 1.0), host)
        elif number == STARTS:
            for rank, host in MANY.items():
                told(of(events.RunEnded, number, rank, outcome="closed", closing_s=0.5), at_s, host)
        else:
            tell_death(told, number, at_s, MANY, "")
        at_s += 20.0
    return told.write()


@pytest.mark.promise
@pytest.mark.parametrize("chunk_bytes", [1 << 18, 4000], ids=["at once", "little by little"])
def test_a_report_of_many_starts_says_the_same_of_roll_ups_alone(
    chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollup_writer, "CHUNK_BYTES", chunk_bytes)
    root = tell_many_starts(tmp_path)
    expected = said(root)
    ledger = expected["ledger"]["seconds"]
    assert min(ledger["restore"], ledger["lost_work"], ledger["restart"]) > 0
    assert [one["rank"] for one in expected["reliability"]["interruptions"]][1] == 66
    assert [len(one["sources"]) for one in expected["restores"]] == [3] * (STARTS - 1)
    roll_up_all(root)
    assert_alike(said(root), expected, "beside the records")
    for trail in trails_of(root):
        trail.unlink()
    assert_alike(said(root), expected, "of the hosts' roll-ups")
    assert join_all(root, 1 << 20 if chunk_bytes > 4000 else 1) >= 1
    remove_hosts_files(root)
    found = said(root)
    for one, other in zip(found["saves"], expected["saves"], strict=True):
        other["late_rank"] = one["late_rank"]  # of ranks that called at once
    assert_alike(found, expected, "of joined roll-ups")


def test_of_starts_only_what_is_of_rank_0_or_an_error_stays_as_it_was(tmp_path: Path) -> None:
    root = tell_many_starts(tmp_path)
    kept = [
        msgspec.json.decode(raw)
        for trail in trails_of(root)
        for raw in roll_up(trail.read_bytes(), "f", 0).kept
    ]
    of_starts = [one for one in kept if one["event"] in ("RunStarted", "Restored", "RunEnded")]
    assert {one["rank"] for one in of_starts if one["event"] != "RunEnded"} == {0}
    ended = [one for one in of_starts if one["event"] == "RunEnded" and one["rank"]]
    assert len(ended) == len(MANY) - 1 and {one["outcome"] for one in ended} == {"failed"}


def test_what_the_restores_of_ranks_took_is_a_sketch_with_the_slowest_by_name(
    tmp_path: Path,
) -> None:
    root = tell_many_starts(tmp_path)
    roll_up_all(root)
    for trail in trails_of(root):
        trail.unlink()
    (first, *_) = to_json(read_report(root))["restores"]
    spread = first["phases"]["restore_read"]
    assert spread["slowest"][0] == (79, pytest.approx(0.89)) and spread["ranks"] > len(MANY)
    assert first["size_bytes"] == sum(1000 + rank for rank in MANY)


def start_of(*values: float, ranks: tuple[int, ...] = (1,)) -> StartRollup:
    moments = struct.pack(f"<{len(values)}d", *values)
    return msgspec.convert([1, 0, 8, list(ranks), moments], StartRollup, builtin_types=(bytes,))


@pytest.mark.parametrize(
    "values",
    [
        (1.0,) * (len(START_ROWS) - 1),
        (1.0,) * (len(START_ROWS) + 1),
        (float("nan"), 1.0, 1.0, 1.0, 1.0),
        (float("inf"), 1.0, 1.0, 1.0, 1.0),
        (-2.0, 1.0, 1.0, 1.0, 1.0),
    ],
)
def test_rows_that_cannot_be_are_refused(values: tuple[float, ...]) -> None:
    with pytest.raises(msgspec.ValidationError, match="rows have"):
        start_of(*values)


def test_a_rank_is_named_once_and_a_clock_is_known() -> None:
    with pytest.raises(msgspec.ValidationError, match="name it once"):
        start_of(*(1.0,) * 2 * len(START_ROWS), ranks=(1, 1))
    start = start_of(*(1.0,) * len(START_ROWS))
    start.clock = 1
    one = Rollup("f", 0, 1, clocks=[ClockRollup("a", "b", (1.0, 1.0), (1.0, 1.0))])
    decode_rollup(msgspec.json.encode(one))
    one.starts.append(start)
    with pytest.raises(msgspec.ValidationError, match="by a clock that is known"):
        decode_rollup(msgspec.json.encode(one))
    restore = struct.pack("<5d", 3.0, 1.0, 10.0, 10.0, 0.0)
    of_one = RestoreRollup(1, 0, 0, 3, "memory", "", 8, 8, [4], restore, {})
    assert list(of_one.rows()) == [(4, (3.0, 1.0, 10.0, 10.0, 0.0))]
    with pytest.raises(ValueError, match="a value for each rank"):
        RestoreRollup(1, 0, 0, 3, "memory", "", 8, 8, [], b"", {})
