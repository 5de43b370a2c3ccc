"""When a keeper saves a last time and ends: every situation, in every state of its life."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.keeper.process import Lifecycle, Situation, Step

FLAGS = (
    "leads",
    "everyone_left",
    "is_forgotten",
    "must_store",
    "is_busy",
    "is_opening_root",
    "followers_stop",
    "is_attached",
    "is_needed",
)
A: frozenset[str] = frozenset({"a"})
B: frozenset[str] = frozenset({"b"})
NONE: frozenset[str] = frozenset()


def situations(lateness: Sequence[bool]) -> Iterator[Situation]:
    for flags in itertools.product((False, True), repeat=len(FLAGS)):
        known: dict[str, Any] = dict(zip(FLAGS, flags, strict=True))
        for unsaved, persisting, is_late in itertools.product(("", "a"), (NONE, A, B), lateness):
            if known["is_busy"] or not persisting:
                yield Situation(**known, unsaved=unsaved, persisting=persisting, is_late=is_late)


def every_case() -> Iterator[tuple[Lifecycle, Situation]]:
    """Every state, in every situation that tells it from others."""
    seen = list(situations([False]))
    for tried, saved in itertools.product((NONE, A), (False, True)):
        serving = Lifecycle(tried=tried, has_saved_for_followers=saved)
        letting_go = serving.run_ended()
        yield from itertools.product([serving, letting_go, letting_go.released()], seen)
    ordered = Lifecycle().told_to_stop("why", 1.0, NONE)
    stopping = [
        replace(ordered, tried=tried, awaited=awaited)
        for tried, awaited in itertools.product((NONE, A), repeat=2)
    ]
    yield from itertools.product(stopping, situations([False, True]))


#: What decides, in this order: the first row that fits. What a row does not name may be anything.
SERVING: list[tuple[dict[str, Any], Step]] = [
    ({"leads": False, "is_forgotten": False}, "serve"),
    ({"leads": False}, "end"),
    ({"followers_stop": True, "storing": False, "saves_for_followers": True}, "save"),
    ({"followers_stop": True, "storing": False}, "let followers stop"),
    ({"everyone_left": False, "is_forgotten": False}, "serve"),
    ({"is_opening_root": True}, "serve"),
    ({"is_busy": True}, "serve"),
    ({"unsaved_at_end": True, "was_tried": False}, "save"),
    ({}, "end"),
]
LETTING_GO: list[tuple[dict[str, Any], Step]] = [
    ({"leads": False}, "serve"),
    *SERVING[2:],
]
LET_GO: list[tuple[dict[str, Any], Step]] = [
    ({"leads": False, "is_attached": True}, "serve"),
    ({"leads": False}, "exit"),
    *SERVING[2:],
]
STOPPING: list[tuple[dict[str, Any], Step]] = [
    ({"late": True}, "stop"),
    ({"is_opening_root": True}, "serve"),
    ({"awaits": True}, "serve"),
    ({"is_needed": True}, "serve"),
    ({"unsaved": True, "must_store": True, "tried_any": False}, "save"),
    ({}, "stop"),
]
TABLES = {"serving": SERVING, "letting go": LETTING_GO, "let go": LET_GO, "stopping": STOPPING}


def facts(life: Lifecycle, seen: Situation) -> dict[str, bool]:
    """What the rows speak of."""
    return {
        **{name: getattr(seen, name) for name in FLAGS},
        "unsaved": seen.unsaved != "",
        "storing": seen.is_opening_root or seen.persisting != NONE,
        "saves_for_followers": seen.unsaved != ""
        and seen.must_store
        and not life.has_saved_for_followers,
        "unsaved_at_end": seen.unsaved != "" and (seen.must_store or not seen.everyone_left),
        "was_tried": seen.unsaved in life.tried,
        "tried_any": life.tried != NONE,
        "awaits": any(attempt in life.awaited for attempt in seen.persisting),
        "late": seen.is_late,
    }


def test_every_situation_is_decided_by_the_table() -> None:
    used = set()
    for life, seen in every_case():
        true = facts(life, seen)
        number, step = next(
            (number, step)
            for number, (row, step) in enumerate(TABLES[life.phase])
            if all(true[name] == value for name, value in row.items())
        )
        used.add((life.phase, number))
        after, done = life.next(seen)
        assert done == step, (life, seen, TABLES[life.phase][number])
        assert after.phase == life.phase
        if done == "save":  # what storage refuses is not saved once more
            assert after.next(seen)[1] != "save"
        else:
            assert replace(after, has_saved_for_followers=life.has_saved_for_followers) == life
    assert len(used) == sum(len(table) for table in TABLES.values()), "a row that decides nothing"


@pytest.mark.parametrize("phase", ["serving", "letting go"])
def test_an_order_to_stop_wins_and_its_first_reason_is_told(phase: Any) -> None:
    life = Lifecycle(phase).told_to_stop("first", 1.0, A)
    assert (life.phase, life.reason, life.awaited) == ("stopping", "first", A)
    assert life.told_to_stop("second", 5.0, NONE).reason == "first"
    assert life.run_ended() == life.released() == life
    assert Lifecycle().run_ended().phase == "letting go"


def test_what_is_saved_when_told_to_stop_is_waited_for() -> None:
    life = Lifecycle().told_to_stop("why", 1.0, NONE)
    life, step = life.next(Situation(unsaved="a", must_store=True))
    assert (step, life.awaited) == ("save", A)
    assert life.next(Situation(persisting=A))[1] == "serve"
    assert life.next(Situation(persisting=A, is_late=True))[1] == "stop"
    assert life.next(Situation(unsaved="a", must_store=True))[1] == "stop", "it was refused"
