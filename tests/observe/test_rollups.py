"""Roll-ups give what all values together would, to 1 %, in whatever portions these came."""

from __future__ import annotations

import itertools
import math
import random
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import events
from holdfast.observe import save_records
from holdfast.observe.clocks import HostClocks
from holdfast.observe.rank_sets import RankSet
from holdfast.observe.records import RecordHead
from holdfast.observe.report_builder import read_report
from holdfast.observe.rollup_groups import PhaseValues
from holdfast.observe.rollups import NAMED, PhaseRollup
from holdfast.observe.save_records import SaveRecords
from holdfast.observe.sketch import LEAST, RELATIVE_ERROR, Sketch
from support.runs.told import Told, of, tell_start

durations = st.one_of(st.just(0.0), st.floats(1e-9, 1e11))
by_rank = st.dictionaries(st.integers(0, 20_000), durations, min_size=1, max_size=300)
came = st.lists(st.sets(st.integers(0, 30)), min_size=3, max_size=3)


def true_quantile(values: list[float], part: float) -> float:
    return sorted(values)[max(1, math.ceil(part * len(values))) - 1]


@given(st.lists(durations, min_size=1), st.floats(0, 1))
def test_a_quantile_is_within_its_error(values: list[float], part: float) -> None:
    few, many = Sketch(), Sketch()
    few.add(values)
    many.add_many(np.array(values))
    expected = true_quantile(values, part)
    for sketch in (few, many):
        (found, last) = sketch.quantiles(part, 1.0)
        assert abs(found - expected) <= RELATIVE_ERROR * expected * (1 + 1e-9) + LEAST
        assert last == pytest.approx(max(values), rel=RELATIVE_ERROR * (1 + 1e-9), abs=LEAST)


@given(st.lists(st.lists(durations), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_sketches_add_up_in_any_order(parts: list[list[float]], rng: random.Random) -> None:
    whole, merged = Sketch(), Sketch()
    whole.add([value for part in parts for value in part])
    rng.shuffle(parts)
    for part in parts:
        one = Sketch()
        one.add(part)
        merged.add_buckets(one.buckets())
    assert merged.count == whole.count
    assert merged._buckets == whole._buckets


def test_no_values_have_no_quantile() -> None:
    with pytest.raises(ValueError, match="no values"):
        Sketch().quantiles(0.5)


@given(by_rank, st.integers(1, 5))
def test_the_slowest_ranks_are_known_by_name(values: dict[int, float], portions: int) -> None:
    rollup = PhaseRollup()
    for portion in range(portions):
        one = PhaseRollup()
        own = {rank: value for rank, value in values.items() if rank % portions == portion}
        for part in range(2):
            some = [rank for rank in own if (rank % 3 > 0) == part]
            one.add(some, [own[rank] for rank in some])
        if own:
            rollup.merge(msgspec.json.decode(msgspec.json.encode(one.values()), type=PhaseValues))
    written = {rank: float(f"{value:.7g}") for rank, value in values.items()}
    expected = sorted(written.items(), key=lambda each: (-each[1], each[0]))[:NAMED]
    spread = rollup.spread()
    assert [value for _, value in spread.slowest] == [value for _, value in expected]
    assert spread.largest_s == expected[0][1]
    assert all(written[rank] == value for rank, value in spread.slowest)
    assert spread.ranks == len(values)
    assert spread.median_s <= spread.p90_s <= spread.p99_s <= spread.largest_s


def returned(step: int, rank: int, held_s: float) -> events.SaveReturned:
    return events.SaveReturned(
        incarnation=1,
        step=step,
        rank=rank,
        held_s=held_s,
        describe_s=held_s / 2,
        volatile_s=0.0,
        wait_previous_s=0.0,
        leaves=3,
        size_bytes=100,
        durable=False,
    )


def folded(records: list[events.SaveReturned | events.FenceWaited]) -> SaveRecords:
    saves = SaveRecords()
    for event in records:
        saves.take(event, RecordHead(time_s=1.0, by_host=f"h{event.rank % 3}", mono_s=1.0))
    return saves


@settings(max_examples=20)
@given(st.integers(1, 60), st.integers(1, 300), st.integers(0, 100))
def test_a_save_is_the_same_whether_its_ranks_come_together_or_host_by_host(
    ranks: int, saves: int, seed: int
) -> None:
    rng = random.Random(seed)
    records: list[events.SaveReturned | events.FenceWaited] = []
    for step in range(min(saves, 1000 // ranks)):
        for rank in range(ranks):
            records.append(returned(step, rank, rng.expovariate(10)))
            for _ in range(rng.randrange(3)):
                waited_s = rng.expovariate(10)
                fence = events.FenceWaited(incarnation=1, step=step, rank=rank, held_s=waited_s)
                records.append(fence)
    by_host = sorted(records, key=lambda event: event.rank % 3)
    assert folded(by_host).saves() == folded(records).saves()


def test_memory_of_a_save_does_not_grow_with_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_records, "_OPEN_SAVES", 4)

    def size_of(ranks: int) -> int:
        clocks, head = HostClocks(), RecordHead(time_s=1.0, by_host="a", mono_s=1.0)
        clocks.take_all([head])
        saves = SaveRecords(clocks)
        tracemalloc.start()
        for first in range(0, ranks, 8):  # a host's file after the other
            own = [
                returned(step, rank, 0.01 + (rank * 7919 % 1000) / 1e5)
                for step in range(12)
                for rank in range(first, first + 8)
            ]
            saves.take_returned(own, [head] * len(own), 0, [1.0] * len(own))
        found, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert saves.saves()[0].ranks == ranks
        return found

    size_of(1024)  # what is kept once for all
    a_rank_bytes = (size_of(4096) - size_of(2048)) / 2048
    assert a_rank_bytes < 160, "its newest save, and nothing of each"


@pytest.mark.promise
def test_what_a_rank_has_not_done_is_known_however_many_saves_are_read_at_once(
    tmp_path: Path,
) -> None:
    """One rank on a host: hundreds of saves lie in what is read of a file at once."""
    told = Told(tmp_path)
    tell_start(told, 1, 1.0, {0: "a"})
    for step in range(300):
        image = {"step": step, "size_bytes": 5}
        told(of(events.SaveReturned, 1, durable=True, held_s=0.1, **image), 10.0 + step)
        if step % 3:
            told(of(events.ImageCaptured, 1, copy_s=0.1, **image), 10.5 + step)
        if step % 3 == 2:
            told(of(events.ImageDurable, 1, **image), 10.8 + step)
    saves = read_report(told.write()).saves
    assert len(saves) == 300
    missing = [(save.uncopied, save.unwritten) for save in saves]
    assert missing == [((0,), ()), ((), (0,)), ((), ())] * 100


@pytest.mark.promise
@settings(max_examples=60, deadline=None)
@given(came, st.booleans(), st.integers(1, 8), st.randoms(use_true_random=False))
def test_ranks_that_did_not_come_are_named_whatever_order_records_have(
    came: list[set[int]], durable: bool, at_once: int, rng: random.Random
) -> None:
    asked, copied, stored = came
    records: list[Any] = [returned(5, rank, 0.1) for rank in asked]
    if durable:
        records = [msgspec.structs.replace(one, durable=True) for one in records]
    records += [of(events.ImageCaptured, 1, rank, step=5, size_bytes=7) for rank in copied]
    records += [of(events.ImageDurable, 1, rank, step=5, size_bytes=7) for rank in stored]
    rng.shuffle(records)
    saves = SaveRecords()
    for number, event in enumerate(records):  # many other saves lie between them
        saves.take(event, RecordHead(time_s=1.0, by_host=f"h{event.rank % 3}", mono_s=1.0))
        if number % at_once == 0:
            for step in range(100, 100 + save_records._OPEN_SAVES):
                saves.take(returned(step, 0, 0.1), RecordHead(time_s=1.0, mono_s=1.0))
    found = [one for one in saves.saves() if one.step == 5]
    assert len(found) == bool(records)
    if not found:
        return
    (save,) = found
    assert save.uncopied == tuple(sorted(asked - copied - stored))[:NAMED]
    is_asked = durable and asked
    assert save.unwritten == (tuple(sorted(copied - stored))[:NAMED] if is_asked else ())


ranks_anywhere = st.sets(st.one_of(st.integers(-3, 5000), st.sampled_from([1 << 20, 1 << 31])))


@given(ranks_anywhere, ranks_anywhere, st.integers(0, 3000), st.integers(0, 1500))
def test_a_set_of_ranks_is_one(some: set[int], others: set[int], first: int, count: int) -> None:
    known, other = RankSet(), RankSet()
    known.add(some)
    known.add(range(first, first + count))
    other.add(others)
    expected = {rank for rank in some | set(range(first, first + count)) if rank >= 0}
    assert list(known.without()) == sorted(expected)
    assert list(known.without(other)) == sorted(expected - others)
    ranges = known.ranges()
    assert all(a[1] + 1 < b[0] for a, b in itertools.pairwise(ranges))
    assert list(RankSet(ranges).without()) == sorted(expected)
