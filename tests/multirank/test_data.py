"""Data and randomness on real ranks of which there are two, then three, then two."""

from __future__ import annotations

import random
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import holdfast
from holdfast.data.planning.order import Order
from holdfast.events import ValuesDiffer
from support.models.packing import SAMPLES, Packing, lines
from support.runs.launch import run_ranks

#: (name, ranks, steps): together one epoch and some of the next.
LIVES = (("first", 2, 7), ("second", 3, 9), ("third", 2, 8))
LISTS = {"a": 3, "b": 2}


def _live(rank: int, world: int, directory: str) -> list[dict[str, Any]]:
    dist.destroy_process_group()
    found = []
    for number, (life, ranks, steps) in enumerate(LIVES):
        if rank < ranks:
            store = dist.FileStore(f"{directory}/{life}-store", ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
            found.append(_one_life(rank, directory, life, steps, is_first=number == 0))
            dist.destroy_process_group()
    return found


def _one_life(rank: int, directory: str, life: str, steps: int, is_first: bool) -> dict[str, Any]:
    events: list[holdfast.Event] = []
    stop = holdfast.subscribe(lambda event, _: events.append(event))
    random.seed(f"{life} {rank}")
    np.random.seed(rank)
    torch.manual_seed(rank)
    packing = Packing(directory, life, rank)
    told: dict[str, Any] = {"draws": []}
    for _ in range(0 if is_first else 2):
        holdfast.load(f"{directory}/run", packing.state)
        told["draws"].append(_draws())
    if not is_first:
        holdfast.load(f"{directory}/run", packing.state)
    told["restored"] = packing.waiting()
    for _ in packing.steps(steps):
        torch.rand(rank + 1)
    told["left"] = packing.waiting()
    holdfast.save(f"{directory}/run", packing.state, step=packing.state["step"])
    told["next"] = _draws()
    told["differing"] = [event.names for event in events if isinstance(event, ValuesDiffer)]
    stop()
    told.update(_data_ranks(rank, dist.get_world_size(), f"{directory}/{life}-parts"))
    return told


def _draws() -> tuple[float, ...]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def _data_ranks(rank: int, world: int, root: str) -> dict[str, Any]:
    """Lists by data ranks of the user's own, wrongly and rightly divided."""
    told: dict[str, Any] = {}

    def lists(numbers: dict[str, tuple[int, int]]) -> dict[str, holdfast.SplitList]:
        return {
            key: holdfast.SplitList([f"{key}{at[0]}"] * 2, rank=at[0], world=at[1])
            for key, at in numbers.items()
        }

    # All ranks are one data rank; saved as if they were half a division.
    one, half = {"a": (0, 1)}, {"b": (0, 2)}
    state = lists(one | half)
    if rank == 1:
        state["a"].append("more")
    holdfast.save(root, state)
    try:
        holdfast.load(root, lists(half))
    except holdfast.RestoreError as error:
        told["missing"] = str(error)
    except holdfast.UsageError as error:
        told["lost"] = str(error)
    try:
        holdfast.load(root, {"b": holdfast.SplitList()})
    except holdfast.RestoreError as error:
        told["missing"] = str(error)
    cut = {"a": holdfast.SplitList(rank=rank, world=world)}
    heard: list[holdfast.Event] = []
    stop = holdfast.subscribe(lambda event, _: heard.append(event))
    holdfast.load(root, cut)
    stop()
    told["cut"] = list(cut["a"])
    told["cut_differing"] = [event.names for event in heard if isinstance(event, ValuesDiffer)]
    return told


def test_data_and_randomness_follow_the_number_of_ranks(tmp_path: Path) -> None:
    told = run_ranks(3, _live, str(tmp_path))
    by_life = [
        [told[rank][n - (rank == 2)] for rank in range(ranks)]
        for n, (_, ranks, _) in enumerate(LIVES)
    ]

    # Every sample once, in the one order, over both changes and the epoch's end.
    given: list[int] = []
    used: list[int] = []
    first = 0
    for life, ranks, steps in LIVES:
        for step in lines(str(tmp_path), life, ranks, range(first, first + steps)):
            given += chain(*(line["given"] for line in step))
            used += chain(*(line["used"] for line in step))
        first += steps
    order = Order(SAMPLES, 11, shuffle=True)
    assert given == [*order.at(0, 0, SAMPLES), *order.at(1, 0, len(given) - SAMPLES)]
    assert len(given) > SAMPLES
    left = chain(*(rank["left"] for rank in by_life[-1]))
    assert sorted([*used, *left]) == sorted(given)

    # The buffers: the same order over all ranks, in equal stretches.
    for before, after in pairwise(by_life):
        items = [*chain(*(rank["left"] for rank in before))]
        world = len(after)
        assert [rank["restored"] for rank in after] == [
            items[len(items) * n // world : len(items) * (n + 1) // world] for n in range(world)
        ]

    # Generators: a rank that was there goes on, a new one is the same at each restore, and other
    # than all others in each of its generators.
    for before, after in pairwise(by_life):
        for rank, here in enumerate(after):
            assert here["draws"][0] == here["draws"][1]
            if rank < len(before):
                assert here["draws"][0] == before[rank]["next"]
        drawn = [*zip(*(rank["draws"][0] for rank in after), strict=True)]
        assert all(len(set(of_kind)) == len(after) for of_kind in drawn)

    assert [rank["differing"] for life in by_life for rank in life] == [[]] * 7

    # Data ranks of the user's own.
    for ranks_of in by_life:
        world = len(ranks_of)
        for rank, here in enumerate(ranks_of):
            assert "b: the ranks of this run take a SplitList as data ranks 0 of 2" in here["lost"]
            assert "saved as data ranks 0 of 2, which make no whole" in here["missing"]
            assert here["cut"] == ["a0"] * (2 * (rank + 1) // world - 2 * rank // world)
            assert here["cut_differing"] == ([("a",)] if rank == 0 else [])
