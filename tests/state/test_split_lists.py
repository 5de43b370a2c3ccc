"""A SplitList in the state of one rank: what it holds comes back, and what cannot is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast

ITEMS: list[Any] = [
    1,
    2.5,
    None,
    True,
    "text",
    b"bytes",
    [1, [2]],
    (3, "x"),
    {"a": {"b": 1}},
    {4: 5},
    {6, 7},
    np.arange(3, dtype=np.int16),
    np.float32(1.5),
]
TENSORS = [
    torch.arange(5),
    torch.rand(40, 100),
    torch.zeros(0, 3),
    torch.rand(3, 4).t(),
    torch.tensor(1j),
    torch.rand(3).to(torch.bfloat16),
    torch.rand(2, dtype=torch.complex64).conj(),
]


def test_items_come_back_as_they_were(tmp_path: Path) -> None:
    state = {"tokens": holdfast.SplitList(ITEMS), "deep": {"more": holdfast.SplitList([[1]])}}
    holdfast.save(tmp_path, state)
    tokens = state["tokens"] = holdfast.SplitList([8, 9])
    state["deep"] = {"more": holdfast.SplitList()}
    holdfast.load(tmp_path, state)
    assert state["tokens"] is tokens
    assert repr(list(tokens)) == repr(ITEMS)
    assert state["deep"] == {"more": [[1]]}


def test_tensors_of_any_size_come_back_with_memory_of_their_own(tmp_path: Path) -> None:
    one = torch.rand(3, 3)
    tokens = holdfast.SplitList([*TENSORS, {"in": one}, one])
    holdfast.save(tmp_path, {"tokens": tokens})
    found = holdfast.SplitList()
    holdfast.load(tmp_path, {"tokens": found})
    for a, b in zip(TENSORS, found, strict=False):
        assert torch.equal(a.resolve_conj(), b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
    found[-1].zero_()
    assert torch.equal(found[-2]["in"], one)


def test_it_is_a_list_to_work_with() -> None:
    tokens = holdfast.SplitList(range(5))
    tokens += [5]
    del tokens[:2]
    assert tokens == [2, 3, 4, 5]
    assert tokens.data_rank is None
    assert holdfast.SplitList(rank=np.int64(1), world=2).data_rank == (1, 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 1}, "rank=1, world=None: give both"),
        ({"world": 1}, "give both"),
        ({"rank": 2, "world": 2}, "rank=2 is none of world=2"),
        ({"rank": 0, "world": 0}, "world=0"),
        ({"rank": "a", "world": 1}, "rank='a'"),
    ],
)
def test_a_rank_that_means_nothing_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(holdfast.UsageError, match=said):
        holdfast.SplitList(**options)


class Loader:
    """One that keeps its buffer in its own state."""

    def __init__(self) -> None:
        self.buffer = holdfast.SplitList([1])

    def state_dict(self) -> dict[str, Any]:
        return {"place": 3, "buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.buffer = state["buffer"]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"loader": Loader()}, "loader.buffer is a SplitList inside of another value"),
        ({"x": holdfast.SplitList([holdfast.SplitList()])}, r"x\.0 is a .*SplitList"),
        ({"x": holdfast.SplitList([0, object()])}, r"x\.1 is a builtins.object"),
        ({"x": holdfast.SplitList([{"t": torch.rand(2).to_sparse()}])}, r"x\.0\.t is a Tensor"),
        ({"x": holdfast.SplitList([torch.rand(2, device="meta")])}, "on meta in a SplitList"),
        ({"x": holdfast.SplitList([torch.nn.Parameter(torch.rand(2))])}, "x.0 is a Parameter"),
    ],
)
def test_what_cannot_be_stored_is_named(tmp_path: Path, state: dict[str, Any], said: str) -> None:
    with pytest.raises(holdfast.UnsupportedState, match=said):
        holdfast.save(tmp_path, state)
    assert not [*tmp_path.glob("manifests/*")]


def _state() -> dict[str, Any]:
    return {
        "tokens": holdfast.SplitList([1]),
        "rng": holdfast.Rng(),
        "notes": [1],
        "deep": {"a": holdfast.SplitList(), "b": holdfast.SplitList([2])},
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": [0]}, "tokens: a value of all ranks in the state, a SplitList in the checkp"),
        ({"tokens": holdfast.Rng()}, "tokens: random generators in the state, a SplitList in the"),
        ({"rng": holdfast.SplitList()}, "rng: a SplitList in the state, random generators in the"),
        ({"notes": holdfast.SplitList()}, "notes: a SplitList in the state, a value of all ranks"),
        ({"other": holdfast.SplitList()}, "other: not in the checkpoint"),
        ({"deep": {"a": holdfast.SplitList([7])}}, "deep.b: in the checkpoint, but nothing in the"),
    ],
)
def test_what_stands_for_something_else_is_said_before_anything_changes(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    holdfast.save(tmp_path, _state())
    state = _state() | {"tokens": holdfast.SplitList([5])} | change
    before = repr({key: item for key, item in state.items() if key != "rng"})
    with pytest.raises(holdfast.StateMismatch, match=said):
        holdfast.load(tmp_path, state)
    assert repr({key: item for key, item in state.items() if key != "rng"}) == before


def test_a_list_that_is_left_out_is_left_alone(tmp_path: Path) -> None:
    holdfast.save(tmp_path, _state())
    holdfast.load(tmp_path, state := {"notes": [0]})
    assert state == {"notes": [1]}
