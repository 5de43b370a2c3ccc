"""Columns of a host's saves are these saves, and joined at once they give what they give apart."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from holdfast.observe import rollup_columns
from holdfast.observe.clocks import ClockComparison, HostClocks, HostMoment
from holdfast.observe.rollup_columns import columns_of, saves_of
from holdfast.observe.rollup_groups import ClockRollup, PhaseValues, Rollup, SaveRollup
from holdfast.observe.rollup_joiner import RollupJoiner
from holdfast.observe.rollups import NAMED, PhaseRollup


def single(seconds: float) -> float:
    """Returns seconds that stay the same in columns: of 7 digits some do not."""
    return round(seconds, 5)


def host_saves(host: int, steps: range, chance: random.Random) -> list[SaveRollup]:
    """Saves of eight ranks: each phase of some of them, and now and then a form of its own."""
    ranks = list(range(8 * host, 8 * host + 8))
    saves = []
    for step in steps:
        some = sorted(chance.sample(ranks, chance.randrange(1, 9)))
        phases = {
            "held_s": PhaseValues(
                ranks, [chance.choice((0.0, 0.25, single(chance.random()))) for _ in ranks]
            ),
            "fence_s": PhaseValues(some, [single(chance.random()) for _ in some]),
        }
        at_s = 100.0 + 10 * step + host / 100
        calls = [(0, at_s, at_s + chance.random(), chance.choice(ranks))]
        kind = chance.randrange(8)
        if kind == 0:
            calls.append((1, at_s + 3000, at_s + 3001, ranks[0]))
        if kind == 1:
            phases["held_s"].others, phases["held_s"].least_s = [(5, 3)], 0.001
        of = [(ranks[0], ranks[-1])]
        saves.append(
            SaveRollup(
                1 + (step > 6),
                step,
                phases,
                {"copy_s": PhaseValues(some, [1.5] * len(some))},
                calls,
                [(0, at_s + 1)] if chance.random() < 0.7 else [],
                chance.random(),
                asked_bytes=chance.randrange(1 << 40),
                image_bytes=7,
                images=8,
                written=kind,
                ring_bytes=chance.randrange(9),
                asked_durable=kind > 3,
                asked=of,
                copied=of,
                stored=of[: kind % 2],
            )
        )
    return saves


def rollup_of(host: int, saves: list[SaveRollup], *, in_columns: bool) -> Rollup:
    ends = (1e9, 1.0), (1e9 + 1000, 1001.0)
    clocks = [ClockRollup(f"h{host}", "b", *ends), ClockRollup(f"h{host}", "c", *ends)]
    columns, others = columns_of(saves) if in_columns else ([], saves)
    started = {"event": "RunStarted", "incarnation": 1, "by_host": f"h{host}", "boot": "b"}
    kept = [msgspec.Raw(msgspec.json.encode(started | {"time_s": 1e9 + 9, "mono_s": 9.0}))]
    made = Rollup("", 0, 0, saves=others, columns=columns, clocks=clocks, kept=kept)
    return msgspec.json.decode(msgspec.json.encode(made), type=Rollup)


@pytest.mark.parametrize("seed", range(4))
def test_saves_that_stood_in_columns_are_the_same(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollup_columns, "_LEAST_SAVES", 1)
    saves = host_saves(3, range(12), random.Random(seed))
    columns, others = columns_of(saves)
    found = [*others, *(save for one in columns for save in saves_of(one))]
    assert len(columns) > 1 and len(others) < len(saves)
    assert sorted(found, key=lambda save: save.step) == saves


@pytest.mark.promise
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("least_saves", [1, 3])
def test_columns_that_are_joined_at_once_give_what_their_saves_give(
    seed: int, least_saves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a save of a host is in two parts, and hosts have different saves."""
    monkeypatch.setattr(rollup_columns, "_LEAST_SAVES", least_saves)
    chance, joined = random.Random(seed), []
    told = []
    for host in range(60):
        first = chance.randrange(3)
        saves = host_saves(host, range(first, 12), chance)
        cut = chance.randrange(len(saves))
        told += [(host, saves[: cut + 1]), (host, saves[cut:])]  # one save in both
    for in_columns in (True, False):
        joiner = RollupJoiner()
        for host, saves in told:
            joiner.take(rollup_of(host, saves, in_columns=in_columns))
        made = joiner.made()
        joined.append({(save.incarnation, save.step): save for save in made.saves})
    columns, apart = joined
    assert columns.keys() == apart.keys() and len(columns) == 12
    for key, save in columns.items():
        expected = apart[key]
        assert save.blocked_s == pytest.approx(expected.blocked_s)
        assert save.phases.keys() == expected.phases.keys()
        for name in save.phases:
            found, other = save.phases[name], expected.phases[name]
            assert (found.ranks, found.seconds) == (other.ranks, other.seconds)
            assert found.others == other.others and found.least_s == other.least_s
        for one in (save, expected):
            one.blocked_s, one.phases = 0.0, {}
        assert len(save.calls) < 60
        assert save == expected


def test_many_values_at_once_name_those_that_they_name_one_by_one() -> None:
    chance = np.random.default_rng(1)
    for size in (1, 15, 16, 17, 200, 5000):
        values = np.where(chance.random(size) < 0.5, 0.5, np.round(chance.random(size), 2))
        ranks = chance.permutation(size)
        one, other = PhaseRollup(), PhaseRollup()
        for part in np.array_split(np.arange(size), 3):
            one.add_many(ranks[part], values[part])
            for at in part.tolist():
                other._keep([(float(values[at]), int(ranks[at]))])
        found, expected = one.values(), other.values()
        assert found == expected and len(found.ranks) == min(size, NAMED)


def test_moments_of_one_clock_at_once_are_those_one_by_one() -> None:
    clocks = HostClocks()
    for host, boot in (("a", "x"), ("b", "y")):
        for at_s in (0.0, 500.0, 1000.0):
            clocks.take(host, boot, 1e9 + at_s, at_s * (1.001 if host == "b" else 1.0))
    for at_s in (100.0, 200.0, 700.0):
        clocks.compare(1, "a", "x", ClockComparison(at_s, at_s / 1000, 0.001))
    common = clocks.solve()
    moments = np.array([0.0, 100.0, 150.0, 400.0, 700.0, 900.0])
    for clock in (0, 1):
        one_by_one = [common.exact(HostMoment(clock, at_s)) for at_s in moments.tolist()]
        assert common.exact_many(clock, moments) == pytest.approx(one_by_one, abs=1e-6)
