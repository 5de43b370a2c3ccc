"""Groups of one optimizer that several ranks have, in one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.dcp.forms import StoredOptimizer
from holdfast.errors import UsageError
from holdfast.format import values as codec
from holdfast.interop.writing.state_tree import merged_optimizer


def encoded(*groups: tuple[list[str], Any]) -> dict[str, Any]:
    def tensor(value: Any, where: str) -> codec.SmallTensor:
        return codec.SmallTensor(where, f"F{8 * value.itemsize}", (), value.numpy().tobytes())

    found = [
        {
            "params": names,
            "options": codec.encode({"lr": rate}, f"optimizer.{names[0]}", tensor=tensor),
        }
        for names, rate in groups
    ]
    return {"class": "", "groups": found, "state": {}}


def joined_encoded(mine: Any, other: Any) -> list[list[str]]:
    found = merged_optimizer(encoded(*mine), encoded(*other))
    return [group["params"] for group in found["groups"]]


def joined_stored(mine: Any, other: Any) -> list[list[str]]:
    one, two = (
        StoredOptimizer([{"params": list(names), "lr": rate} for names, rate in groups], {})
        for groups in (mine, other)
    )
    one.add(two)
    return [group["params"] for group in one.groups]


JOINS = pytest.mark.parametrize("join", [joined_encoded, joined_stored])


@JOINS
def test_groups_of_equal_options_are_joined_by_their_places(join: Any) -> None:
    mine, other = [(["a"], 0.1), (["h"], 0.1)], [(["b"], 0.1), (["i"], 0.1)]
    assert join(mine, other) == [["a", "b"], ["h", "i"]]


@JOINS
def test_groups_at_other_places_are_joined_by_their_options(join: Any) -> None:
    mine = [(["a"], 0.1), (["h"], 0.2)]
    assert join(mine, [(["i"], 0.2)]) == [["a"], ["h", "i"]]
    assert join(mine, [(["i"], 0.2), (["b"], 0.1)]) == [["a", "b"], ["h", "i"]]
    assert join(mine, [(["c"], 0.3)]) == [["a"], ["h"], ["c"]]
    assert join(mine, [(["a"], 0.3)]) == [["a"], ["h"]]


@JOINS
def test_a_group_that_fits_several_is_refused(join: Any) -> None:
    mine = [(["a"], 0.1), (["h"], 0.1)]
    with pytest.raises(UsageError, match="b of another rank may be in each of the groups 0, 1"):
        join(mine, [(["b"], 0.1)])


@JOINS
def test_options_that_are_tensors_are_compared_by_what_is_in_them(join: Any) -> None:
    small, large = torch.tensor(0.01), torch.tensor(0.1)
    mine = [(["a"], small), (["h"], large)]
    assert join(mine, [(["b"], large.clone())]) == [["a"], ["h", "b"]]
    assert join(mine, [(["b"], small.clone()), (["c"], torch.tensor(0.3))]) == [
        ["a", "b"],
        ["h"],
        ["c"],
    ]
    assert join(mine, [(["b"], small.double())]) == [["a"], ["h"], ["b"]]


def test_names_of_options_may_be_of_any_type() -> None:
    options: dict[Any, Any] = {"lr": 0.1, 3: 1}
    one = StoredOptimizer([{"params": ["a"], **options}], {})
    one.add(StoredOptimizer([{"params": ["b"], **options}], {}))
    assert one.names == ["a", "b"]
