"""The parts of a run's time, against a model that marks each moment as it passes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import events
from holdfast.observe.ledger import CATEGORIES, Ledger, LifeTimes, RankTimes, account, claim
from holdfast.observe.lives import Lives
from holdfast.observe.records import RecordHead
from holdfast.observe.report_builder import read_report
from holdfast.observe.run_report import to_json
from support.runs.told import of

PAGE = Path(__file__).parents[2] / "docs" / "goodput.md"
Records = list[tuple[events.AnyEvent, float]]


def started(number: int, rank: int = 0, **fields: Any) -> events.AnyEvent:
    return of(events.RunStarted, number, rank, **{"world": 1, "host": "a", **fields})


def restored(number: int, parent: tuple[int, int], elapsed_s: float, rank: int = 0) -> Any:
    return of(
        events.Restored,
        number,
        rank,
        step=parent[1],
        source="memory",
        elapsed_s=elapsed_s,
        parent_incarnation=parent[0],
    )


def saved(number: int, step: int, held_s: float = 0.0, rank: int = 0) -> events.AnyEvent:
    return of(events.SaveReturned, number, rank, step=step, held_s=held_s)


def ledger_of(records: Iterable[tuple[events.AnyEvent, float]]) -> Ledger:
    lives = Lives()
    for event, time_s in records:
        lives.take(event, RecordHead(time_s=time_s, by_host="a"))
    return account(lives.times(lives.clock()))


def parts(seconds: dict[str, float]) -> dict[str, float]:
    return {name: part for name, part in seconds.items() if part}


#: One life: seconds until its process starts, until it joins, waits for ranks, joins, restores;
#: then the steps, each with what it was held and a phase of the program; what follows its last
#: save; whether its end was seen, and how long the others were there; how many steps the next one
#: goes back; whether it closed.
STEP = st.tuples(st.integers(1, 20), st.integers(0, 20), st.integers(0, 20))
LIFE = st.tuples(
    st.tuples(*[st.integers(0, 50)] * 4),
    st.integers(0, 50),
    st.lists(STEP, max_size=6),
    st.integers(0, 20),
    st.integers(-1, 30),
    st.integers(0, 5),
)


@settings(max_examples=100)
@given(st.lists(LIFE, min_size=1, max_size=6), st.randoms())
def test_every_second_is_where_the_model_saw_it_pass(history: list[Any], random: Any) -> None:
    records: Records = []
    marks: list[tuple[str, int, tuple[int, int] | None]] = []
    line: list[tuple[int, int]] = []
    now = 1000
    for number, ((gap, start, wait, join), restore, steps, rest, detect, back) in enumerate(
        history, start=1
    ):
        if number > 1:
            marks.append(("restart", gap, None))
            now += gap
        marks += [("start_up", start, None), ("waiting", wait, None), ("start_up", join, None)]
        now += start + wait + join
        ages = {"process_s": start + wait + join, "joined_s": wait + join}
        records.append((started(number, world=2, **ages), now))
        # The last rank to come waits for nobody.
        records.append((started(number, 1, world=2, process_s=join, joined_s=join), now))
        if line:
            del line[max(1, len(line) - back) :]
            marks.append(("restore", restore, None))
            now += restore
            records.append((restored(number, line[-1], restore), now))
        for seconds, held, phase in steps:
            line.append((number, line[-1][1] + 1 if line else 0))
            marks += [("declared", phase, line[-1]), ("productive", seconds, line[-1])]
            marks.append(("blocking", held, line[-1]))
            now += phase
            records.append((of(events.PhaseEnded, number, name="data", elapsed_s=phase), now))
            now += seconds + held
            records.append((saved(number, line[-1][1], held), now))
        # What follows a life's last save is work on the next step, which only the newest may keep.
        marks.append(("productive", rest, (number, -1)))
        now += rest
        records.append((of(events.FenceWaited, number), now))
        if detect >= 0:  # rank 1 died here, and rank 0 was there a while
            records.append((of(events.TrainerLost, number, 1), now))
            marks.append(("detection", detect, None))
            now += detect
            records.append((of(events.TrainerLost, number, 0), now))
    kept = {*line, (len(history), -1)}
    expected: Counter[str] = Counter()
    for category, seconds, where in marks:
        expected[category if where is None or where in kept else "lost_work"] += seconds
    random.shuffle(records)
    ledger = ledger_of(records)
    assert ledger.elapsed_s == now - 1000 == sum(ledger.seconds.values())
    assert parts(ledger.seconds) == dict(+expected)
    assert sum(ledger.rank_seconds.values()) == 2 * ledger.elapsed_s
    assert sum(ledger.declared_s.values()) == ledger.seconds["declared"]


MOMENT = st.integers(-20_000_000, 100_000_000)
SPAN = st.tuples(MOMENT, MOMENT)
TIMES = st.builds(
    RankTimes,
    began_us=MOMENT,
    last_us=MOMENT,
    process_us=st.integers(0, 10_000_000),
    joined_us=st.integers(0, 10_000_000),
    restored=st.none() | SPAN,
    died_us=st.none() | MOMENT,
    ended_us=st.none() | MOMENT,
)
ANY_LIFE = st.builds(
    LifeTimes,
    world=st.integers(0, 4),
    ranks=st.dictionaries(st.integers(0, 4), TIMES, min_size=1),
    over_us=MOMENT,
    is_closed=st.booleans(),
    parent=st.none() | st.tuples(st.integers(0, 6), st.integers(0, 5)),
    source=st.sampled_from(["", "memory", "storage"]),
    saved_us=st.dictionaries(st.integers(0, 5), MOMENT),
    blocked=st.lists(SPAN),
    blocked_us=st.dictionaries(st.integers(0, 5), st.integers(0, 50_000_000)),
    declared=st.lists(st.tuples(st.sampled_from("ab"), MOMENT, MOMENT)),
    short_us=st.dictionaries(st.sampled_from("bc"), st.integers(0, 50_000_000)),
    slow=st.lists(SPAN),
    first_us=st.integers(-1_000_000, 50_000_000),
)


def micros(seconds: dict[str, float]) -> int:
    return sum(round(part * 1e6) for part in seconds.values())


@settings(max_examples=100)
@given(st.dictionaries(st.integers(1, 6), ANY_LIFE, min_size=1, max_size=5))
def test_whatever_was_recorded_no_part_is_negative_and_they_sum_up_exactly(
    lives: dict[int, LifeTimes],
) -> None:
    ledger = account(lives)
    elapsed_us = round(ledger.elapsed_s * 1e6)
    assert ledger.seconds.keys() == ledger.rank_seconds.keys() == set(CATEGORIES)
    assert min(*ledger.seconds.values(), *ledger.rank_seconds.values()) >= 0
    assert micros(ledger.seconds) == elapsed_us
    assert micros(ledger.rank_seconds) == elapsed_us * ledger.ranks
    assert 0 <= ledger.goodput <= ledger.ettr <= 1
    assert micros(ledger.restore_s) == round(ledger.seconds["restore"] * 1e6)
    assert micros(ledger.declared_s) == round(ledger.seconds["declared"] * 1e6)


@given(st.sets(st.integers(0, 40)), st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40))))
def test_what_is_claimed_is_taken_once_and_the_rest_is_left(
    points: set[int], wanted: list[tuple[int, int]]
) -> None:
    free = [(at, at + 1) for at in sorted(points)]
    asked = {at for start, end in wanted for at in range(start, end)}
    left, taken = claim(free, wanted)
    assert taken == len(points & asked)
    assert [at for start, end in left for at in range(start, end)] == sorted(points - asked)


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
    assert (found["seconds"]["restart"], found["seconds"]["start_up"]) == (10, 2)
    assert (found["elapsed_s"], found["goodput"]) == (63, 0)


def test_ranks_that_are_not_there_are_absent_and_a_rank_without_records_is_unknown() -> None:
    ledger = ledger_of(
        [
            *((started(1, rank, world=4), 0.0) for rank in (0, 1, 2)),
            (saved(1, 0), 10.0),
            (saved(1, 0, rank=1), 10.0),
            (saved(1, 0, rank=2), 10.0),
            (started(2, world=2), 15.0),
            (started(2, 1, world=2), 15.0),
            (restored(2, (1, 0), 0), 15.0),
            (restored(2, (1, 0), 0, rank=1), 15.0),
            (saved(2, 1), 25.0),
            (saved(2, 1, rank=1), 25.0),
        ]
    )
    assert parts(ledger.seconds) == {"productive": 20, "restart": 5}
    assert parts(ledger.rank_seconds) == {
        "productive": 3 * 10 + 2 * 10,
        "unknown": 10,
        "restart": 4 * 5,
        "absent": 2 * 10,
    }


def test_time_between_an_orderly_end_and_the_next_start_is_not_available() -> None:
    ledger = ledger_of(
        [
            (started(1), 0.0),
            (saved(1, 0), 10.0),
            (of(events.RunEnded, 1, outcome="closed", closing_s=2.0), 14.0),
            (started(2), 100.0),
            (restored(2, (1, 0), 1), 101.0),
            (saved(2, 1), 111.0),
        ]
    )
    assert parts(ledger.seconds) == {"productive": 22, "blocking": 2, "away": 86, "restore": 1}
    assert ledger.available_s == 25 and ledger.ettr == 22 / 25


def test_a_step_of_ten_medians_is_a_stall_and_the_first_is_measured_against_the_median() -> None:
    def done(step: int, elapsed_s: float, *, is_first: bool = False) -> events.AnyEvent:
        how: dict[str, Any] = {"elapsed_s": elapsed_s, "longest_s": elapsed_s, "is_first": is_first}
        return of(events.StepsDone, 1, step=step, steps=1, **how)

    ledger = ledger_of(
        [
            (started(1), 0.0),
            (done(0, 7.0, is_first=True), 7.0),
            *((done(step, 1.0), 7.0 + step) for step in range(1, 10)),
            (done(10, 31.0), 47.0),
        ]
    )
    assert parts(ledger.seconds) == {"first_step": 6, "stall": 30, "productive": 11}


def test_the_page_names_every_part() -> None:
    text = PAGE.read_text()
    assert all(f"| `{name}` |" in text for name in CATEGORIES)
