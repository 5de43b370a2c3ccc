"""Where the time of a restore goes: each moment counts once, and all of it from its beginning."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast import events
from holdfast.restore import restore, sources
from holdfast.restore.match import StateMatch
from holdfast.restore.reading.images import StoredImage
from holdfast.restore.restore_clock import PHASES, RestoreClock
from holdfast.storage import local


class Now:
    """A clock that goes on by itself only when told to."""

    def __init__(self) -> None:
        self.at_s = 100.0

    def __call__(self) -> float:
        return self.at_s


def test_a_phase_within_another_interrupts_it() -> None:
    now = Now()
    clock = RestoreClock(now)
    now.at_s += 1  # of no phase
    with clock.during("meet"):
        now.at_s += 2
        with clock.during("plan"):
            now.at_s += 4
        now.at_s += 8
    elapsed_s, phases = clock.read()
    assert elapsed_s == 15
    assert {name: s for name, s in phases.items() if s} == {"meet": 10, "plan": 4}


def test_what_threads_did_divides_the_time_that_they_took_together() -> None:
    now = Now()
    clock = RestoreClock(now)
    with clock.dividing("read") as spent:
        now.at_s += 4
        spent.add({"read": 1.0, "verify": 5.0})
        spent.add({"verify": 1.0, "copy": 1.0})
    with clock.dividing("read"):
        now.at_s += 16
    assert {n: s for n, s in clock.read()[1].items() if s} == pytest.approx(
        {"read": 16.5, "verify": 3.0, "copy": 0.5}
    )


def test_all_that_was_done_with_a_source_that_failed_is_lost() -> None:
    now = Now()
    clock = RestoreClock(now)
    with clock.during("plan"):
        now.at_s += 1

    def fail() -> None:
        with clock.attempting(), clock.during("meet"):
            now.at_s += 2
            with clock.dividing("read") as spent:
                spent.add({"copy": 1.0})
                now.at_s += 4
                raise EOFError

    with pytest.raises(EOFError):
        fail()
    with clock.attempting(), clock.during("read"):
        now.at_s += 8
    assert {n: s for n, s in clock.read()[1].items() if s} == {"plan": 1, "dropped": 6, "read": 8}


_Tree = list[Any]
TREES: st.SearchStrategy[_Tree] = st.recursive(
    st.builds(list),
    lambda inner: st.lists(
        st.tuples(st.sampled_from(PHASES), st.integers(0, 9), st.booleans(), inner), max_size=4
    ),
    max_leaves=12,
)


def walk(clock: RestoreClock, now: Now, tree: _Tree) -> None:
    for phase, seconds, is_divided, inner in tree:
        now.at_s += 1
        if is_divided:
            with clock.dividing(phase) as spent:
                spent.add({"copy": seconds, "verify": 1})
                now.at_s += seconds
        else:
            with clock.during(phase):
                now.at_s += seconds
                walk(clock, now, inner)


@pytest.mark.promise
@given(TREES)
def test_phases_never_add_up_to_more_than_the_restore(tree: _Tree) -> None:
    now = Now()
    clock = RestoreClock(now)
    walk(clock, now, tree)
    elapsed_s, phases = clock.read()
    assert all(seconds >= 0 for seconds in phases.values())
    assert sum(phases.values()) <= elapsed_s + 1e-9


# ── real restores ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def told() -> Iterator[list[events.Restored]]:
    found: list[events.Restored] = []

    def hear(event: events.Event, _: float) -> None:
        if isinstance(event, events.Restored):
            found.append(event)

    unsubscribe = events.subscribe(hear)
    yield found
    unsubscribe()


def slowed(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, seconds: float) -> None:
    real = getattr(where, name)

    def slow(*args: Any, **named: Any) -> Any:
        is_small = name == "view" and args[2] - args[1] < 2_000_000  # a block, of values
        time.sleep(0 if is_small else seconds)
        return real(*args, **named)

    monkeypatch.setattr(where, name, slow)


@pytest.mark.promise
@pytest.mark.parametrize(
    ("where", "name", "phase"),
    [
        (sources, "overview_of", "inventory_s"),
        (StateMatch, "compare", "plan_s"),
        (StoredImage, "view", "read_s"),
        (restore._RestoreAttempt, "_make_room", "allocate_s"),
        (restore._RestoreAttempt, "_finish", "set_s"),
    ],
)
def test_a_slow_restore_says_where_its_time_went(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: list[events.Restored],
    where: Any,
    name: str,
    phase: str,
) -> None:
    holdfast.save(tmp_path, {"w": torch.ones(1_000_000), "n": {"n": 5}})
    monkeypatch.setattr(local, "is_cached", lambda *_: True)
    slowed(monkeypatch, where, name, 0.15)
    began_s = time.monotonic()
    restored = holdfast.load(tmp_path, {"w": torch.zeros(1_000_000), "n": {"n": 0}})
    elapsed_s = time.monotonic() - began_s
    (event,) = told
    spent = {f"{name}_s": getattr(event, f"{name}_s") for name in PHASES}
    assert max(spent, key=lambda one: spent[one]) == phase, spent
    assert spent[phase] >= 0.15
    assert spent[phase] <= sum(spent.values()) <= event.elapsed_s <= elapsed_s
    assert restored.elapsed_s == event.elapsed_s, "the whole restore, its beginning too"
