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
from holdfast.interop.pickle_records import Record


@pytest.mark.parametrize(
    "mappings", [None, {}, [], [3], [["w"]], [{"w": 3}], [{"w": {"start": 0, "numel": 4}}]]
)
def test_addresses_that_are_none_are_refused(mappings: Any) -> None:
    with pytest.raises(PartitionError):
        mapped_cuts({"param_slice_mappings": mappings}, 0)


@pytest.mark.promise
@pytest.mark.parametrize("begins", [(0, 4), (1, 4), (0, 2), (3, 0)])
def test_addresses_that_do_not_follow_each_other_are_refused(begins: tuple[int, int]) -> None:
    def mapped(*some: int) -> dict[str, Any]:
        both = zip("vw", some, (3, 2), strict=True)
        addresses = {n: Record("fragment_address", {"start": a, "numel": c}) for n, a, c in both}
        return {"param_slice_mappings": [addresses]}

    assert [cut[1] for cut in mapped_cuts(mapped(0, 3), 0)] == [0, 3]
    assert [cut[1] for cut in mapped_cuts(mapped(2, 0), 0)] == [2, 0]
    with pytest.raises(PartitionError, match="what is before it ends at"):
        mapped_cuts(mapped(*begins), 0)


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
