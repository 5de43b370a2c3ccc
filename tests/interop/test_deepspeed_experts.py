"""All experts of DeepSpeed are there by their numbers among all, or they are refused by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import holdfast
from holdfast.errors import HoldfastError
from holdfast.interop.deepspeed_experts import ExpertRanks
from holdfast.interop.opening import open_source
from holdfast.interop.parameter_partition import PartitionError

GOLDEN = Path(__file__).parents[1] / "golden" / "foreign" / "deepspeed-0.19.8"
ZERO = ("experts-zero1-fp32-4", "experts-zero2-bf16-2", "experts-data-first-4")
MODEL, EXPERT = "mp_rank_00_model_states.pt", "layer_{}_expert_{}_mp_rank_00_model_states.pt"
PREFIX = "deepspeed_moe.experts.deepspeed_experts"
Change = Callable[[Path], None]


def copied(tmp_path: Path, case: str) -> Path:
    root = shutil.copytree(GOLDEN / case / "checkpoint", tmp_path / "run")
    (tag,) = (path for path in Path(root).iterdir() if path.is_dir())
    return tag


def rewrite(file: Path, change: Callable[[Any], None]) -> None:
    state = torch.load(file, weights_only=False)
    change(state)
    torch.save(state, file)


@pytest.mark.parametrize("case", [*ZERO, "experts-fp32-2"])
def test_all_experts_of_all_ranks_are_there_by_their_own_numbers(case: str) -> None:
    expected = load_file(GOLDEN / case / "expected.safetensors")
    with holdfast.open(GOLDEN / case / "checkpoint") as opened:
        assert set(opened.leaves) == set(expected)
        for layer in ("one", "two"):
            for number in range(4):
                name = f"model.{layer}.{PREFIX}.{number}.up.weight"
                assert torch.equal(opened.read(name), expected[name])
                if case in ZERO:
                    assert f"optimizer.{name[6:]}.exp_avg_sq" in expected
        for name, tensor in expected.items():
            found = opened.read(name)
            assert found.dtype == tensor.dtype and torch.equal(found, tensor), name


@pytest.mark.parametrize("case", ZERO)
def test_groups_of_experts_have_their_own_hyperparameters(case: str) -> None:
    known = json.loads((GOLDEN / case / "expected.json").read_text())["groups"]
    with holdfast.open(GOLDEN / case / "checkpoint") as opened:
        groups = opened.values["optimizer"]["groups"]
    for group, wanted in zip(groups, known, strict=True):
        assert group["options"]["lr"] == wanted["lr"]
        assert group["options"]["weight_decay"] == wanted["weight_decay"]
        experts = [name for name in group["params"] if PREFIX in name]
        assert bool(wanted.get("moe")) == bool(experts) and len(experts) in (0, 16)


def test_numbers_of_optimizers_without_zero_are_left_out_by_name() -> None:
    store = open_source(GOLDEN / "experts-fp32-2" / "checkpoint")
    assert any("the optimizer is left out: several ranks" in note for note in store.notes)  # type: ignore[attr-defined]


def _put(found: bytes, old: Path, new: Path) -> None:
    """Writes a file under another's name, inside as well."""
    assert len(old.stem) == len(new.stem) and old.stem.encode() in found
    new.write_bytes(found.replace(old.stem.encode(), new.stem.encode()))


def _swap(tag: Path) -> None:
    one, other = (tag / f"zero_pp_rank_{n}_mp_rank_00_optim_states.pt" for n in (0, 1))
    first, second = one.read_bytes(), other.read_bytes()
    _put(first, one, other)
    _put(second, other, one)


def _set_order(tag: Path) -> None:
    key = "use_data_before_expert_parallelism"
    rewrite(tag / MODEL, lambda state: state["ds_config"].update({key: True}))


def _copy_expert(tag: Path) -> None:
    one, other = tag / EXPERT.format(0, 1), tag / EXPERT.format(0, 2)
    _put(one.read_bytes(), one, other)


REFUSED: dict[str, tuple[Change, str]] = {
    "ranks in another order": (_swap, "is another in the ranks' files than in its own"),
    "another setting": (
        _set_order,
        "is another in the ranks' files than in its own|are not in its flat group",
    ),
    "an expert twice": (_copy_expert, "holds no state of an expert|which is not of its expert"),
    "the last expert": (
        lambda tag: (tag / EXPERT.format(1, 3)).unlink(),
        r"layer_1_expert_3_mp_rank_00_model_states\.pt: it is not there, of the 4 experts of",
    ),
    "an expert too many": (
        lambda tag: rewrite(tag / MODEL, lambda s: s.update(num_experts=[4, 3])),
        r"layer_1_expert_3_.*: by .* layer 1 has 3 experts: the file is of another",
    ),
    "another layer": (
        lambda tag: rewrite(tag / MODEL, lambda s: s.update(num_experts=[4])),
        r"layer_1_expert_0_.*: by .* layer 1 has no experts: the file is of another",
    ),
    "more experts than memory has": (
        lambda tag: rewrite(tag / MODEL, lambda s: s.update(num_experts=[10**18, 4])),
        r"layer_0_expert_4_.*not there, of the 1000000000000000000 experts of layer 0",
    ),
    "no counts": (
        lambda tag: rewrite(tag / MODEL, lambda s: s.update(num_experts=None)),
        "does not say how many experts",
    ),
    "experts cut by itself": (
        lambda tag: rewrite(tag / MODEL, lambda s: s.update(ds_autoep_layers=[{}])),
        "can't be read yet",
    ),
    "a rank that is missing": (
        lambda tag: (tag / "zero_pp_rank_3_mp_rank_00_optim_states.pt").unlink(),
        "zero_pp_rank_3.*it is not there",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_experts_that_are_not_certain_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    change, said = REFUSED[kind]
    tag = copied(tmp_path, "experts-zero1-fp32-4")
    change(tag)
    with pytest.raises(HoldfastError, match=rf"^{re.escape(str(tag))}.*(?:{said})"):
        holdfast.open(tag.parent)


@pytest.mark.parametrize(
    ("shapes", "counts", "said"),
    [
        ([{"a": (3,)}, {f"{PREFIX}.0.w": (3,)}], [4, 3], "are no groups of experts"),
        ([{"a": (3,)}, {f"{PREFIX}.0.w": (3,)}], [4, 2, 2], "are no groups of experts"),
        ([{"a": (3,)}, {"b": (3,)}], [4, 2], "has a parameter that is of none"),
        ([{"a": (3,)}, {f"{PREFIX}.1.w": (3,)}], [4, 2], r"has the experts \[1\]"),
    ],
)
def test_groups_that_are_not_of_whole_experts_are_refused(
    shapes: Any, counts: list[int], said: str
) -> None:
    with pytest.raises(PartitionError, match=said):
        ExpertRanks(shapes, counts, False)
