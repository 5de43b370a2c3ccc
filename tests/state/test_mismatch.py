"""What a user reads when the state does not fit: the name, what it may have meant, the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import RestoreError, StateMismatch


def test_a_renamed_leaf_is_told_with_the_name_it_may_have_had(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"model": nn.ModuleDict({"attention": nn.Linear(2, 2)})})
    renamed = nn.ModuleDict({"attn_tion": nn.Linear(2, 2)})
    with pytest.raises(StateMismatch) as caught:
        holdfast.load(tmp_path, {"model": renamed})
    assert (
        "model.attn_tion.weight: in the model, but not in the checkpoint; did you mean "
        "model.attention.weight?"
    ) in caught.value.fields["problems"]


def test_a_wholly_other_model_is_compared_in_a_moment(tmp_path: Path) -> None:
    many = nn.ModuleDict({f"layer{n}": nn.Linear(1, 1) for n in range(500)})
    other = nn.ModuleDict({f"block{n}": nn.Linear(1, 1) for n in range(500)})
    holdfast.save(tmp_path, {"model": many})
    with pytest.raises(StateMismatch) as caught:
        holdfast.load(tmp_path, {"model": other})
    assert len(caught.value.fields["problems"]) == 2000
    assert "and 1980 more" in str(caught.value)


class Refusing:
    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("b")


def test_a_load_state_dict_that_raises_is_named_by_its_key(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"loader": Refusing()})
    with pytest.raises(RestoreError, match=r"KeyError: 'b' .*while 'loader' was given"):
        holdfast.load(tmp_path, {"loader": Refusing()})


def test_a_name_that_ends_like_a_part_of_a_leaf_is_refused(tmp_path: Path) -> None:
    with pytest.raises(holdfast.UsageError, match="ends like the name of a part"):
        holdfast.save(tmp_path, {"w@0:1": torch.zeros(1)})


class Later:
    """Has no state before it was given one."""

    seen: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen["x"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = {"x": state["seen"]}


def test_an_object_that_has_no_state_before_its_first_load_is_loaded(tmp_path: Path) -> None:
    saved, back = Later(), Later()
    saved.load_state_dict({"seen": torch.arange(3)})
    holdfast.save(tmp_path, {"later": saved})
    holdfast.load(tmp_path, {"later": back})
    assert back.seen["x"].tolist() == [0, 1, 2]


def test_a_module_where_a_plain_value_was_saved_is_a_mismatch(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"model": 5})
    with pytest.raises(StateMismatch, match="model: a module in the state, a plain value in"):
        holdfast.load(tmp_path, {"model": nn.Identity()})
