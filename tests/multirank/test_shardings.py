"""Four ranks hold one set of leaves in eight ways; what one saves, each other restores."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

import holdfast
import shardings
from launch import run_ranks

WORLD = 4


def _from_each_to_each(rank: int, world: int, root: str) -> list[str]:
    """What differs from the whole leaves, for every pair of layouts."""
    found: list[str] = []
    layouts = {name: make(rank, world) for name, make in shardings.LAYOUTS.items()}
    for name, layout in layouts.items():
        state = shardings.build(layout, filled=True)
        holdfast.save(f"{root}/{name}", state, rules=layout.rules)
    for saved, here in product(layouts, layouts):
        layout = layouts[here]
        state = shardings.build(layout, filled=False)
        try:
            holdfast.load(f"{root}/{saved}", state, rules=layout.rules)
        except holdfast.HoldfastError as error:
            found.append(f"{saved} -> {here}: {type(error).__name__}: {error}")
            continue
        found += [f"{saved} -> {here}: {one}" for one in shardings.differences(layout, state)]
    return found


def _through_memory(rank: int, world: int, root: str) -> list[str]:
    """The same out of the keeper's memory, from one to the next in a ring of layouts."""
    found: list[str] = []
    names = list(shardings.LAYOUTS)
    for number, (saved, here) in enumerate(zip(names, names[1:] + names[:1], strict=True)):
        place = f"{root}/{number}"
        layout = shardings.LAYOUTS[saved](rank, world)
        before = shardings.build(layout, filled=True)
        first = holdfast.Checkpointer(place, before, storage=None, rules=layout.rules)
        first.save(0).wait_captured(30)
        first._hang_up()
        layout = shardings.LAYOUTS[here](rank, world)
        after = shardings.build(layout, filled=False)
        second = holdfast.Checkpointer(place, after, storage=None, rules=layout.rules)
        restored = second.restore()
        if restored is None or restored.source != "memory":
            found.append(f"{saved} -> {here}: {restored}")
        found += [f"{saved} -> {here}: {one}" for one in shardings.differences(layout, after)]
        second.close()
    return found


def test_what_one_layout_saved_each_other_restores_bit_for_bit(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(WORLD, _from_each_to_each, str(tmp_path))):
        assert found == [], f"rank {rank}"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_layouts_follow_each_other_out_of_memory(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(WORLD, _through_memory, str(tmp_path))):
        assert found == [], f"rank {rank}"
