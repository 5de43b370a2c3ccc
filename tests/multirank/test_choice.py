"""What ranks want of a checkpoint is the same for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast.errors import UsageError
from support.runs.launch import run_ranks

Only = list[str] | None


def _load(rank: int, world: int, root: str, only: list[Only]) -> tuple[str, int]:
    holdfast.save(root, {"x": 1, "y": 2})
    state = {"x": 5, "y": 6}
    try:
        holdfast.load(root, state, only=only[rank], timeout_s=3.0)
    except UsageError as error:
        return str(error), state["x"]
    return "", state["x"]


@pytest.mark.parametrize("only", [[["y"], None], [["y"], ["y", "x"]]])
def test_ranks_that_want_other_parts_are_refused_alike(tmp_path: Path, only: list[Only]) -> None:
    one, other = run_ranks(2, _load, str(tmp_path), only)
    assert one == other
    assert one[0].startswith(f"only={only[0]} on rank 0, and only={only[1]} on rank 1: give all")
    assert one[1] == 5
