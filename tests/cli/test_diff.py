"""``holdfast diff``: equal means every bit, and what differs is found, counted and measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.cli import leaf_reader as portions
from holdfast.cli.checkpoints import open_checkpoint, open_root
from holdfast.cli.diff import CheckpointDifference, First, joined, leaf_changes
from holdfast.restore.planning.plan import Want
from holdfast.restore.reading.images import Checkpoint
from holdfast.restore.reading.read import Array
from support.checkpoints.commands import (
    CHANGED,
    CHANGED_AT,
    Out,
    damage,
    error_of,
    image_of,
    json_of,
    run_alone,
    text_of,
    tied_model,
)

LAYOUTS = ("plain", "ddp", "fsdp", "tp", "fsdp_tp")


def save_two(root: Path, one: Any, other: Any) -> Path:
    """Two states as steps 1 and 2 of one root."""
    for step, state in ((1, one), (2, other)):
        holdfast.save(str(root), state if isinstance(state, dict) else {"x": state}, step=step)
    return root


def only_leaf(capsys: Out, root: Path) -> dict[str, Any]:
    """The one leaf that differs between steps 1 and 2."""
    document = json_of(capsys, "diff", root, "--step", "1", "--leaf", "*", code=1)
    (leaf,) = document["leaves"]
    found: dict[str, Any] = leaf
    return found


# ── equal, and not ──────────────────────────────────────────────────────────────────────────────


def test_equal_checkpoints_are_identical_and_exit_with_0(root: Path, capsys: Out) -> None:
    text = text_of(capsys, "diff", root, "--step", "10", "--other-step", "20")
    assert text.splitlines()[0] == "identical: 2 leaves, 2.40 MB bit for bit, 1 value"
    document = json_of(capsys, "diff", root, "--step", "10")
    assert document["identical"]
    assert (document["a"]["step"], document["b"]["step"]) == (10, 20)
    assert document["leaves"] == document["values"] == []
    assert document["size_bytes"] == 2_401_200


def test_one_bit_in_one_element_is_found_and_measured(tmp_path: Path, capsys: Out) -> None:
    one = torch.full((300, 2000), 0.5)
    other = one.clone()
    other.view(torch.int32)[123, 456] ^= 1
    save_two(tmp_path, one, other)
    leaf = only_leaf(capsys, tmp_path)
    assert (leaf["name"], leaf["change"], leaf["elements"]) == ("x", "elements", 600_000)
    assert (leaf["differing"], leaf["same_value"], leaf["nan"]) == (1, 0, 0)
    assert leaf["max_abs"] == 2.0**-24
    assert leaf["max_rel"] == pytest.approx(2.0**-23)
    assert leaf["first"] == {"index": [123, 456], "a": 0.5, "b": 0.5 + 2.0**-24}
    lines = text_of(capsys, "diff", tmp_path, "--step", "1", "--leaf", "x", code=1).splitlines()
    assert lines[0] == "different: 1 of 1 leaf"
    assert lines[-1].split()[:4] == ["x", "1", "600000", "5.96e-08"]
    assert "[123, 456]  0.5" in lines[-1]


@pytest.mark.parametrize("shape", [(), (5,), (3, 0, 2)])
def test_leaves_of_any_shape_are_compared(
    shape: tuple[int, ...], tmp_path: Path, capsys: Out
) -> None:
    save_two(tmp_path, torch.zeros(shape), torch.ones(shape))
    code = 1 if math.prod(shape) else 0
    document = json_of(capsys, "diff", tmp_path, "--step", "1", "--leaf", "x", code=code)
    if code:
        assert document["leaves"][0]["first"]["index"] == [0] * len(shape)


def test_the_same_nans_are_equal(tmp_path: Path, capsys: Out) -> None:
    one = torch.tensor([math.nan, 1.0, -math.inf, math.inf])
    save_two(tmp_path, one, one.clone())
    assert json_of(capsys, "diff", tmp_path, "--step", "1")["identical"]


def test_other_bits_of_the_same_value_are_told_from_other_values(
    tmp_path: Path, capsys: Out
) -> None:
    one, other = torch.tensor([math.nan, 0.0, 1.0]), torch.tensor([math.nan, -0.0, 1.0])
    other.view(torch.int32)[0] |= 1
    save_two(tmp_path, one, other)
    leaf = only_leaf(capsys, tmp_path)
    assert (leaf["differing"], leaf["same_value"], leaf["nan"]) == (2, 2, 0)
    assert leaf["max_abs"] == 0.0
    text = text_of(capsys, "diff", tmp_path, "--step", "1", "--leaf", "x", code=1)
    assert "bits only" in text


def test_nan_against_a_number_is_counted_and_measures_nothing(tmp_path: Path, capsys: Out) -> None:
    save_two(tmp_path, torch.tensor([math.nan, 1.0]), torch.tensor([1.0, 3.0]))
    leaf = only_leaf(capsys, tmp_path)
    assert (leaf["differing"], leaf["same_value"], leaf["nan"]) == (2, 0, 1)
    assert (leaf["max_abs"], leaf["max_rel"]) == (2.0, pytest.approx(2 / 3))
    assert leaf["first"]["a"] == "nan"


def test_infinity_is_infinitely_far_from_any_number(tmp_path: Path, capsys: Out) -> None:
    save_two(tmp_path, torch.tensor([1.0]), torch.tensor([math.inf]))
    leaf = only_leaf(capsys, tmp_path)
    assert (leaf["max_abs"], leaf["max_rel"]) == ("inf", "inf")


def test_whole_numbers_are_measured_exactly(tmp_path: Path, capsys: Out) -> None:
    least, most = -(2**63), 2**63 - 1
    save_two(tmp_path, torch.tensor([least, 5]), torch.tensor([most, 5]))
    leaf = only_leaf(capsys, tmp_path)
    assert leaf["max_abs"] == 2**64 - 1
    assert leaf["first"] == {"index": [0], "a": least, "b": most}


@pytest.mark.parametrize(
    ("dtype", "one", "other", "apart"),
    [
        (torch.bool, False, True, 1),
        (torch.uint8, 3, 250, 247),
        (torch.float16, 1.0, 2.0, 1.0),
        (torch.bfloat16, 1.0, -2.0, 3.0),
        (torch.float8_e4m3fn, 1.0, 448.0, 447.0),
        (torch.float64, 1.0, 1.0 + 2**-52, 2**-52),
        (torch.complex64, 1 + 1j, 4 + 5j, 5.0),
        (torch.complex128, 0j, 3j, 3.0),
    ],
)
def test_every_kind_of_element_is_measured(
    dtype: torch.dtype, one: Any, other: Any, apart: float, tmp_path: Path, capsys: Out
) -> None:
    first, second = (torch.tensor([one, x], dtype=dtype) for x in (one, other))
    save_two(tmp_path, first, second)
    leaf = only_leaf(capsys, tmp_path)
    assert (leaf["differing"], leaf["max_abs"]) == (1, apart)
    assert leaf["first"]["index"] == [1]


def test_the_first_difference_is_the_first_in_the_leaf_not_in_the_images() -> None:
    parts = [
        CheckpointDifference(8, 2, max_abs=1.0, max_rel=0.5, first=First((5, 0), 1, 2)),
        CheckpointDifference(8, 3, nan=1, max_abs=4.0, max_rel=0.1, first=First((0, 6), 3, 4)),
        CheckpointDifference(8),
    ]
    for order in (parts, parts[::-1]):
        assert joined(order) == CheckpointDifference(
            24, 5, nan=1, max_abs=4.0, max_rel=0.5, first=First((0, 6), 3, 4)
        )


def test_complex_zeros_of_other_signs_differ_in_bits(tmp_path: Path, capsys: Out) -> None:
    one = torch.tensor([complex(0.0, 0.0)], dtype=torch.complex128)
    other = torch.tensor([complex(0.0, -0.0)], dtype=torch.complex128)
    save_two(tmp_path, one, other)
    assert only_leaf(capsys, tmp_path)["same_value"] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2])
def test_elements_numpy_lacks_are_compared_without_torch(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    save_two(tmp_path, torch.tensor([1.0, 2.0]).to(dtype), torch.tensor([1.0, 3.0]).to(dtype))
    done = run_alone("diff", tmp_path, "--step", "1", "--leaf", "x")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[-1].split()[-2:] == ["2.0", "3.0"]


# ── leaves that are not the same leaf ───────────────────────────────────────────────────────────


def test_leaves_that_are_missing_or_of_another_kind_are_listed(tmp_path: Path, capsys: Out) -> None:
    one = {"gone": torch.zeros(1), "kind": torch.zeros(2), "shape": torch.zeros(3)}
    other = {"come": torch.zeros(1), "kind": torch.zeros(2).half(), "shape": torch.zeros(3, 1)}
    save_two(tmp_path, one, other)
    document = json_of(capsys, "diff", tmp_path, "--step", "1", "--leaf", "*", code=1)
    assert {leaf["name"]: leaf["change"] for leaf in document["leaves"]} == {
        "come": "only_b",
        "gone": "only_a",
        "kind": "dtype",
        "shape": "shape",
    }
    kind = next(leaf for leaf in document["leaves"] if leaf["name"] == "kind")
    assert kind["dtype"] == ["F32", "F16"]
    text = text_of(capsys, "diff", tmp_path, "--step", "1", code=1)
    for said in ("only in a", "only in b", "dtype F32 -> F16", "shape [3] -> [3, 1]"):
        assert said in text


def test_a_tensor_tied_in_one_checkpoint_only_is_compared_under_both_names(
    tmp_path: Path, capsys: Out
) -> None:
    tied = tied_model()
    untied = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
    untied.load_state_dict(tied.state_dict())
    save_two(tmp_path, {"m": tied}, {"m": untied})
    document = json_of(capsys, "diff", tmp_path, "--step", "1", "--leaf", "*")
    assert (document["identical"], document["leaves_compared"]) == (True, 2)
    with torch.no_grad():
        next(untied[1].parameters())[4, 2] = 0
    holdfast.save(str(tmp_path), {"m": untied}, step=3)
    document = json_of(capsys, "diff", tmp_path, "--step", "1", "--leaf", "*", code=1)
    assert [(leaf["name"], leaf["differing"]) for leaf in document["leaves"]] == [("m.1.weight", 1)]


def test_only_leaves_like_the_pattern_are_compared(root: Path, capsys: Out) -> None:
    one = json_of(capsys, "diff", root, "--step", "10", "--leaf", "*.bias")
    assert (one["leaves_compared"], one["values_compared"]) == (1, 0)
    both = json_of(capsys, "diff", root, "--step", "10", "--leaf", "*.bias", "--leaf", "*weight")
    assert both["leaves_compared"] == 2
    assert "no leaf is like *.basi" in error_of(
        capsys, "diff", root, "--step", "10", "--leaf", "*.basi", code=3
    )


# ── values ──────────────────────────────────────────────────────────────────────────────────────


def test_changed_values_are_named_by_their_place(tmp_path: Path, capsys: Out) -> None:
    one = {"a": 1, "notes": {"lr": [{"x": 0.5}, {"x": 1.5}], "old": None, 3: (1, {"y": 1})}}
    other = {"a": 1, "notes": {"lr": [{"x": 0.5}, {"x": 2.5}], "new": "z", 3: (1, {"y": 2})}}
    save_two(tmp_path, {"v": one, "m": torch.zeros(1)}, {"v": other, "m": torch.zeros(1)})
    document = json_of(capsys, "diff", tmp_path, "--step", "1", "--values-only", code=1)
    assert document["leaves_compared"] == 0
    places = {value["path"]: value for value in document["values"]}
    assert {path: (value.get("a", "-"), value.get("b", "-")) for path, value in places.items()} == {
        "v.notes['lr'][1].x": (1.5, 2.5),
        "v.notes['old']": (None, "-"),
        "v.notes['new']": ("-", "z"),
        "v.notes[3][1].y": (1, 2),
    }
    text = text_of(capsys, "diff", tmp_path, "--step", "1", "--values-only", code=1)
    assert text.splitlines()[0].startswith("different: 4 of ")


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (math.nan, math.nan, True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        (1, 1.0, False),
        (1, True, False),
        ([{"a": 1}], ({"a": 1},), False),
        (0.0, -0.0, False),
        ([1, 2, 3], [1, 2, 4], False),
    ],
)
def test_values_are_equal_when_they_are_restored_alike(
    one: Any, other: Any, is_same: bool, tmp_path: Path, capsys: Out
) -> None:
    save_two(tmp_path, {"v": one}, {"v": other})
    document = json_of(capsys, "diff", tmp_path, "--step", "1", code=0 if is_same else 1)
    assert [value["path"] for value in document["values"]] == ([] if is_same else ["v"])


def test_a_narrow_terminal_gets_a_narrow_table(
    tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_two(tmp_path, {"x": torch.zeros(3), "y": 1}, {"x": torch.ones(3), "z": 1})
    monkeypatch.setattr("holdfast.cli.output.PIPE_WIDTH", 60)
    text = text_of(capsys, "diff", tmp_path, "--step", "1", code=1)
    assert max(map(len, (line.rstrip() for line in text.splitlines()[3:]))) <= 60
    (row,) = (line.split() for line in text.splitlines() if line.startswith("x "))
    assert row == ["x", "3", "3", "1", "1", "[0]"]


# ── ranks and layouts ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_one_state_in_different_layouts_is_identical(
    layout: str, by_ranks: Path, capsys: Out
) -> None:
    document = json_of(capsys, "diff", by_ranks / "plain", by_ranks / layout, "--step", "2")
    assert document["identical"]
    assert document["leaves_compared"] > 20
    backwards = json_of(capsys, "diff", by_ranks / layout, by_ranks / "plain", "--step", "2")
    assert backwards["size_bytes"] == document["size_bytes"]


def test_one_element_of_a_spread_leaf_is_found_by_its_place_in_the_whole(
    by_ranks: Path, capsys: Out
) -> None:
    for first in ("plain", "tp"):
        two = (by_ranks / first, by_ranks / "fsdp_tp", "--step", "2", "--other-step", "3")
        document = json_of(capsys, "diff", *two, "--leaf", "*", code=1)
        (leaf,) = document["leaves"]
        assert (leaf["name"], leaf["differing"]) == (f"model.{CHANGED}", 1)
        assert leaf["first"]["index"] == CHANGED_AT
        assert leaf["max_abs"] == pytest.approx(1.0)


def test_values_of_other_numbers_of_ranks_are_those_of_rank_0(by_ranks: Path, capsys: Out) -> None:
    text = text_of(capsys, "diff", by_ranks / "plain", by_ranks / "fsdp")
    assert "values are those of rank 0" in text


def test_what_only_some_ranks_have_otherwise_is_told_with_the_ranks(
    by_ranks: Path, capsys: Out
) -> None:
    two = (by_ranks / "hsdp", "--step", "2")
    document = json_of(capsys, "diff", *two, code=1)
    assert document["leaves"] == []
    assert [(value["path"], value["ranks"]) for value in document["values"]] == [("rng.torch", [1])]
    assert text_of(capsys, "diff", *two, code=1).splitlines()[-1].split()[-1] == "1"


# ── what cannot be compared ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("offset_bytes", [20, 100_000, -8], ids=["header", "block", "block table"])
def test_a_damaged_checkpoint_is_neither_equal_nor_different(
    offset_bytes: int, root: Path, capsys: Out
) -> None:
    damage(image_of(root, 20), offset_bytes)
    said = error_of(capsys, "diff", root, "--step", "10", code=4)
    assert "stored" in said
    assert said.count("\n") == 1


def test_diff_needs_two_checkpoints(root: Path, capsys: Out) -> None:
    assert "give a second root" in error_of(capsys, "diff", root, code=2)
    assert "no checkpoint of step 30" in error_of(capsys, "diff", root, "--step", "30", code=3)
    assert "is not a directory" in error_of(capsys, "diff", root, root / "no", code=3)


def test_a_step_is_that_of_both_roots_unless_the_second_has_its_own(
    root: Path, capsys: Out
) -> None:
    both = json_of(capsys, "diff", root, root, "--step", "10")
    assert (both["a"]["step"], both["b"]["step"]) == (10, 10)
    each = json_of(capsys, "diff", root, root, "--step", "10", "--other-step", "20")
    assert (each["a"]["step"], each["b"]["step"]) == (10, 20)
    newest = json_of(capsys, "diff", root, root)
    assert (newest["a"]["step"], newest["b"]["step"]) == (20, 20)


# ── memory ──────────────────────────────────────────────────────────────────────────────────────


def test_no_more_is_read_at_once_than_the_limit_however_large_a_leaf_is(
    by_ranks: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 10_000
    monkeypatch.setattr(portions, "BATCH_BYTES", limit)
    asked: list[int] = []

    def recording(checkpoint: Checkpoint, wants: Sequence[Want]) -> list[Array]:
        found = portions.read(checkpoint, wants)
        asked.append(sum(array.nbytes for array in found))
        return found

    opened = open_root(str(root))
    a, b = open_checkpoint(opened, "10"), open_checkpoint(opened, "20")
    changed, size_bytes = leaf_changes(a, b, list(a.leaves), read=recording)
    assert (changed, size_bytes) == ([], 2_401_200)
    assert sum(asked) == 2 * size_bytes, "every element once, from either side"
    assert max(asked) <= limit


def test_small_leaves_are_read_together(by_ranks: Path) -> None:
    calls: list[int] = []

    def recording(checkpoint: Checkpoint, wants: Sequence[Want]) -> list[Array]:
        calls.append(len(wants))
        return portions.read(checkpoint, wants)

    a = open_checkpoint(open_root(str(by_ranks / "fsdp")), None)
    b = open_checkpoint(open_root(str(by_ranks / "tp")), None)
    leaf_changes(a, b, list(a.leaves), read=recording)
    assert len(calls) == 2
