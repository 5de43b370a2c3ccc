"""Hyperparameters follow names: out of several documents, by other groups, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import FormatError
from holdfast.state.param_groups import SavedGroups, merge_param_groups, regroup_scheduler

RATE = {"$tensor": {"name": "o.groups.a.options.lr", "dtype": "F32", "shape": [], "data": "AAAA"}}


def document(*groups: tuple[list[str], float], **more: Any) -> dict[str, Any]:
    rows = [{"params": names, "options": {"lr": lr, "fused": lr > 1}} for names, lr in groups]
    state = {name: {"count": len(name)} for names, _ in groups for name in names}
    return {"o": {"class": "SGD", "groups": rows, "state": state}, **more}


def made(saved: SavedGroups, *groups: list[str]) -> Any:
    found = merge_param_groups("o", "SGD", groups, saved)
    assert found.problems == []
    return found


def test_each_group_gets_what_its_parameters_had_on_whichever_rank() -> None:
    saved = SavedGroups({3: document((["a", "b"], 1), (["c"], 2)), 0: document((["d"], 2))})
    found = made(saved, ["d", "c"], ["b"])
    assert [(group["params"], group["options"]["lr"]) for group in found.value["groups"]] == [
        (["d", "c"], 2),
        (["b"], 1),
    ]
    assert found.value["state"].keys() == {"b", "c", "d"}
    assert found.home == 0


def test_groups_that_are_as_they_were_are_taken_as_they_are() -> None:
    saved = SavedGroups({0: document((["a", "b"], 1), (["c"], 2))})
    found = made(saved, ["b", "a"], ["c"])
    assert found.value is saved.shared[0]["o"]
    assert found.places is None


def test_a_group_of_parameters_that_had_several_rates_is_refused_by_name() -> None:
    saved = SavedGroups({0: document((["a"], 1)), 1: document((["b"], 2), (["c"], 1))})
    (problem,) = merge_param_groups("o", "SGD", [["c"], ["a", "c", "b"]], saved).problems
    assert "o: group 1 joins parameters saved in groups that differ in lr, as a and b do" in problem
    assert "fused" not in problem


def test_a_parameter_that_no_rank_had_is_named() -> None:
    saved = SavedGroups({0: document((["a"], 1))})
    assert merge_param_groups("o", "SGD", [["x", "a"]], saved).problems == [
        "o.x: not in the saved optimizer"
    ]
    assert merge_param_groups("p", "SGD", [["a"]], saved).problems == [
        "p: the checkpoint has no optimizer of this name"
    ]
    assert merge_param_groups("o", "Adam", [["a"]], saved).problems == [
        "o is a Adam, saved was SGD"
    ]


def test_rates_that_are_tensors_of_several_ranks_are_told_apart() -> None:
    one, other = document((["a"], 1)), document((["b"], 1))
    one["o"]["groups"][0]["options"]["lr"] = RATE
    body = {**RATE["$tensor"], "data": "AACA"}
    other["o"]["groups"][0]["options"]["lr"] = {"$tensor": body}
    found = made(SavedGroups({0: one, 1: other}), ["b"], ["a"]).value["groups"]
    rates = [group["options"]["lr"]["$tensor"] for group in found]
    assert [rate["data"] for rate in rates] == ["AACA", "AAAA"]
    assert rates[0]["name"] != rates[1]["name"]
    problems = merge_param_groups(
        "o", "SGD", [["a", "b"]], SavedGroups({0: one, 1: other})
    ).problems
    assert "differ in lr" in problems[0]
    other["o"]["groups"][0]["options"]["lr"] = {"$tensor": {**RATE["$tensor"], "name": "other"}}
    assert made(SavedGroups({0: one, 1: other}), ["a", "b"])


def test_a_tensor_that_stood_in_a_group_that_is_elsewhere_now_comes_along() -> None:
    saved = document((["a"], 1), (["b"], 1))
    saved["o"]["groups"][0]["options"]["lr"] = RATE
    saved["o"]["groups"][1]["options"]["lr"] = {"$leaf": RATE["$tensor"]["name"]}
    found = made(SavedGroups({0: saved}), ["b"])
    assert found.value["groups"][0]["options"]["lr"] == RATE


def test_an_empty_group_is_known_by_its_place_if_there_are_as_many() -> None:
    saved = SavedGroups({0: document((["a"], 1), (["b"], 2))})
    assert made(saved, ["a"], []).value["groups"][1]["options"]["lr"] == 2
    assert made(saved, ["a"], ["b"], []).value["groups"][2]["options"] == {}


def test_a_parameter_made_of_several_has_what_they_all_had() -> None:
    saved = SavedGroups({0: document((["aa", "bb"], 1), (["c"], 1))})
    parts = {"ab": ("aa", "bb"), "abc": ("aa", "bb", "c")}
    found = merge_param_groups(
        "o", "SGD", [["ab"], ["c"]], saved, lambda name: parts.get(name, (name,))
    )
    assert found.value["state"] == {"ab": {"count": 2}, "c": {"count": 1}}
    assert [group["params"] for group in found.value["groups"]] == [["ab"], ["c"]]
    (problem,) = merge_param_groups("o", "SGD", [["abc"]], saved, lambda name: parts[name]).problems
    assert problem.startswith("o.abc: what it is made of was saved with state that differs")


def scheduler(saved: SavedGroups, *groups: list[str]) -> tuple[Any, list[str]]:
    found: tuple[Any, list[str]] = regroup_scheduler("s", "o", saved, made(saved, *groups))
    return found


def test_a_scheduler_follows_the_groups_it_is_for_and_those_inside_it() -> None:
    inner = {"base_lrs": [5, 6], "_milestones": [3, 4], "last_epoch": 2}
    first = document((["a"], 1), (["b"], 1), s={"base_lrs": [1, 2], "_schedulers": [inner]})
    second = document(
        (["c"], 1),
        s={"base_lrs": [3], "_schedulers": [{"base_lrs": [7], "_milestones": [3, 4]}]},
    )
    state, problems = scheduler(SavedGroups({0: first, 1: second}), ["b"], ["c"], ["a"])
    assert problems == []
    assert state == {
        "base_lrs": [2, 3, 1],
        "_schedulers": [{"base_lrs": [6, 7, 5], "_milestones": [3, 4], "last_epoch": 2}],
    }


def test_a_scheduler_with_a_list_that_may_go_by_groups_is_refused_by_name() -> None:
    saved = SavedGroups(
        {0: document((["a"], 1), (["b"], 1), s={"mine": [1, 2], "base_lrs": [1, 1]})}
    )
    _, (problem,) = scheduler(saved, ["b"], ["a"])
    assert problem.startswith("s: goes by the order of the groups of o")
    assert "mine cannot follow" in problem
    same = SavedGroups(
        {0: document((["a"], 1), (["b"], 1), s={"mine": [4, 4], "base_lrs": [1, 2]})}
    )
    assert scheduler(same, ["b"], ["a"]) == ({"mine": [4, 4], "base_lrs": [2, 1]}, [])
    _, (joined,) = scheduler(
        SavedGroups({0: {**same.shared[0], "s": {"base_lrs": [1, 2]}}}), ["a", "b"]
    )
    assert "base_lrs cannot follow" in joined


def test_malformed_groups_are_a_damaged_checkpoint() -> None:
    malformed: list[Any] = [
        {},
        [3],
        [{"params": [1], "options": {}}],
        [{"params": [], "options": []}],
    ]
    for groups in malformed:
        saved = SavedGroups({2: {"o": {"class": "SGD", "groups": groups}}})
        with pytest.raises(FormatError, match="saved rank 2: o has malformed groups"):
            merge_param_groups("o", "SGD", [["a"]], saved)
