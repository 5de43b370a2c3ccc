"""What files of DeepSpeed say of the elements that they have, and what they say wrongly."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.interop.parameter_partition import (
    PartitionError,
    group_shapes,
    mapped_cuts,
    partition_cuts,
)


@pytest.mark.parametrize(
    "mappings", [None, {}, [], [3], [["w"]], [{"w": 3}], [{"w": {"start": 0, "numel": 4}}]]
)
def test_addresses_that_are_none_are_refused(mappings: Any) -> None:
    with pytest.raises(PartitionError):
        mapped_cuts({"param_slice_mappings": mappings}, 0)


@pytest.mark.parametrize("shapes", [{"w": (3,)}, [3], [{3: (3,)}], [{"w": [3]}]])
def test_shapes_that_are_none_are_refused(shapes: Any) -> None:
    with pytest.raises(PartitionError):
        group_shapes({"param_shapes": shapes})


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_each_element_of_a_parameter_is_of_one_rank(world: int) -> None:
    group = {"w": (5, 3), "b": (5,), "none": (0,)}
    sizes = {"w": 15, "b": 5, "none": 0}
    held: dict[str, list[int]] = {name: [] for name in group}
    for rank in range(world):
        for name, _, start, count in partition_cuts(group, rank, world):
            held[name] += range(start, start + count)
    assert held == {name: [*range(size)] for name, size in sizes.items()}
