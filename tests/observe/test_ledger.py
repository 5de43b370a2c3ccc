"""The parts of a run's time, against a model that marks each moment as it passes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import events
from holdfast.observe.ledger import CATEGORIES, LifeTimes, account
from holdfast.observe.lives import Lives
from holdfast.observe.report import to_json
from holdfast.observe.report_builder import read_report

PAGE = Path(__file__).parents[2] / "docs" / "goodput.md"
#: One life: seconds down before it, starting up, restoring, (a step's seconds, held of these), of
#: the time after its last save, and how many kept steps the next life goes back.
LIFE = st.tuples(
    st.integers(0, 50),
    st.integers(0, 50),
    st.integers(0, 50),
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), max_size=6),
    st.integers(0, 20),
    st.integers(0, 5),
)


def started(number: int) -> events.RunStarted:
    return events.RunStarted(incarnation=number, rank=0, run_id="r", world=1, host="a", pid=1)


def restored(number: int, parent: tuple[int, int], elapsed_s: float) -> events.Restored:
    return events.Restored(
        incarnation=number,
        step=parent[1],
        rank=0,
        source="memory",
        elapsed_s=elapsed_s,
        size_bytes=0,
        saved_world=1,
        world=1,
        parent_incarnation=parent[0],
    )


def saved(number: int, step: int) -> events.SaveReturned:
    return events.SaveReturned(
        incarnation=number,
        step=step,
        rank=0,
        held_s=0,
        describe_s=0,
        volatile_s=0,
        wait_previous_s=0,
        leaves=1,
        size_bytes=1,
        durable=False,
    )


@settings(max_examples=500)
@given(st.lists(LIFE, min_size=1, max_size=6), st.randoms())
def test_every_second_is_where_the_model_saw_it_pass(history: list[tuple], random) -> None:  # type: ignore[no-untyped-def,type-arg]
    records: list[tuple[events.AnyEvent, float]] = []
    marks: list[tuple[str, int, tuple[int, int] | None]] = []
    held_s: dict[tuple[int, int], float] = {}
    line: list[tuple[int, int]] = []
    now = 1000
    for number, (down, start, restore, steps, rest, back) in enumerate(history, start=1):
        if number > 1:
            marks.append(("down", down, None))
            now += down
        records.append((started(number), now))
        if line:
            del line[max(1, len(line) - back) :]
            marks += [("start_up", start, None), ("restore", restore, None)]
            now += start + restore
            records.append((restored(number, line[-1], restore), now))
        for seconds, held in steps:
            step = line[-1][1] + 1 if line else 0
            held = min(held, seconds)
            line.append((number, step))
            marks += [("blocking", held, line[-1]), ("productive", seconds - held, line[-1])]
            held_s[line[-1]] = held
            now += seconds
            records.append((saved(number, step), now))
        # What follows a life's last save is work on the next step, which only the newest may keep.
        marks.append(("productive", rest, (number, -1)))
        now += rest
        records.append((events.FenceWaited(incarnation=number, step=-1, rank=0, held_s=0), now))
    kept = {*line, (len(history), -1)}
    # A life of which no step is in the ancestry, or that restored what nobody saved, keeps nothing.
    expected: Counter[str] = Counter()
    for category, seconds, of in marks:
        expected[category if of is None or of in kept else "lost_work"] += seconds
    random.shuffle(records)
    lives = Lives()
    for event, time_s in records:
        lives.take(event, time_s, "a")
    ledger = lives.ledger(held_s)
    assert ledger is not None
    assert ledger.elapsed_s == now - 1000 == sum(ledger.seconds.values())
    assert {name: part for name, part in ledger.seconds.items() if part} == dict(+expected)


MOMENT = st.integers(-20, 100)
MOMENTS = st.tuples(MOMENT, MOMENT, MOMENT, MOMENT, st.dictionaries(st.integers(0, 5), MOMENT))
PARENT = st.none() | st.tuples(st.integers(0, 6), st.integers(0, 5))
HELD = st.dictionaries(st.tuples(st.integers(1, 5), st.integers(0, 5)), st.floats(0, 50))


@settings(max_examples=300)
@given(st.lists(MOMENTS, min_size=1, max_size=5), st.lists(PARENT, min_size=5, max_size=5), HELD)
def test_whatever_clocks_say_no_part_is_negative_and_they_sum_up(
    moments: list[tuple[int, int, int, int, dict[int, int]]],
    parents: list[tuple[int, int] | None],
    held_s: dict[tuple[int, int], float],
) -> None:
    lives = {
        number: LifeTimes("a", began, max(began, last), at, max(0, took), dict(saves))
        for number, (began, last, at, took, saves) in enumerate(moments, start=1)
    }
    ledger = account(lives, dict(enumerate(parents, start=1)), held_s)
    assert ledger.seconds.keys() == set(CATEGORIES)
    assert all(part >= 0 for part in ledger.seconds.values())
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.elapsed_s)
    assert 0 <= ledger.goodput <= 1
    latest_s = max([life.last_s for life in lives.values()] + [each[2] for each in moments])
    assert ledger.elapsed_s <= max(0, latest_s - lives[1].began_s)


def test_what_was_not_recorded_stays_unknown(tmp_path: Path) -> None:
    """The save of the step from which the second start went on is in no file."""
    (tmp_path / "events").mkdir()
    told = [
        (started(1), 0.0),
        (saved(1, 3), 50.0),
        (started(2), 60.0),
        (restored(2, (1, 2), 1), 63.0),
    ]
    lines = [msgspec.json.encode(events.to_record(event, at + 1000)) for event, at in told]
    (tmp_path / "events" / "rank-00000.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    found = json.loads(json.dumps(to_json(read_report(tmp_path))["ledger"]))
    assert found["seconds"]["unknown"] == 50
    assert (found["seconds"]["down"], found["seconds"]["start_up"]) == (10, 2)
    assert (found["elapsed_s"], found["goodput"]) == (63, 0)


def test_the_page_names_every_part() -> None:
    text = PAGE.read_text()
    assert all(f"| `{name}` |" in text for name in CATEGORIES)
