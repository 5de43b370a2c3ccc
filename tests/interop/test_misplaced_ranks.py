"""Files of ranks that were renamed, copied or put in each other's place are refused by name."""

from __future__ import annotations

import re
import shutil
from itertools import permutations
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import ForeignFormatError, HoldfastError
from holdfast.interop import megatron_ranks
from holdfast.interop.deepspeed_tags import is_of_another_rank

GOLDEN = Path(__file__).parents[1] / "golden" / "foreign"
OF_RANKS = re.compile(r".*(optim_states|model_states|model_optim_rng)\.pt")
CASES = [
    one.parent
    for one in sorted(GOLDEN.glob("*/*/checkpoint"))
    if one.parent.parent.name.startswith(("deepspeed-", "megatron-core-0.16"))
    and "universal" not in one.parent.name
    and len([name for name in one.rglob("*.pt") if OF_RANKS.fullmatch(name.name)]) > 1
]
MEGATRON = [one for one in CASES if one.name.startswith("ranks")]
DEEPSPEED = [one for one in CASES if one.parent.name.startswith("deepspeed-")]


def read(path: Path) -> dict[str, bytes]:
    with holdfast.open(path) as opened:
        leaves = {name: opened.read(name).contiguous() for name in opened.leaves}
    return {name: one.view(-1).view(torch.uint8).numpy().tobytes() for name, one in leaves.items()}


@pytest.mark.promise
@pytest.mark.parametrize("case", CASES, ids=lambda one: f"{one.parent.name}-{one.name}")
def test_files_of_ranks_in_each_others_place_are_refused_or_change_nothing(
    case: Path, tmp_path: Path
) -> None:
    whole, refused, number = read(case / "checkpoint"), list[str](), 0
    files = sorted(case.joinpath("checkpoint").rglob("*.pt"))
    pairs = [
        (one, other)
        for one, other in permutations(files, 2)
        if OF_RANKS.fullmatch(one.name) and OF_RANKS.fullmatch(other.name)
    ]
    for one, other in pairs[:: max(1, len(pairs) // 6)]:
        for is_swapped in (True, False):
            number += 1
            copy = shutil.copytree(case / "checkpoint", tmp_path / str(number))
            paths = [copy / path.relative_to(case / "checkpoint") for path in (one, other)]
            first, second = (path.read_bytes() for path in paths)
            paths[1].write_bytes(first)
            if is_swapped:
                paths[0].write_bytes(second)
            try:
                found = read(copy)
            except HoldfastError as error:
                refused.append(str(error))
            else:
                assert found == whole, (one, other, is_swapped)
    assert refused and all(str(tmp_path) in one for one in refused), refused


def test_a_name_inside_a_file_is_compared_by_its_numbers() -> None:
    model, other = "mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"
    assert is_of_another_rank(model, other) and not is_of_another_rank(model, model)
    assert not is_of_another_rank(model, "archive.pt")
    states = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    assert not is_of_another_rank(f"bf16_{states}", states)
    assert is_of_another_rank(states, model)
    assert is_of_another_rank("layer_03-model_states.pt", "layer_04-model_states.pt")


@pytest.mark.parametrize("layer", ["00", "03", "04"])
def test_a_layer_that_is_missing_is_seen_by_the_optimizer(layer: str, tmp_path: Path) -> None:
    """No list of shapes names it."""
    case = next(one for one in DEEPSPEED if one.name == "pipeline-fp32-2")
    copy = shutil.copytree(case / "checkpoint", tmp_path / "copy")
    next(copy.rglob(f"layer_{layer}-model_states.pt")).unlink()
    said = rf"{copy}/.*: .* 8 parameters, and the files of its layers 6"
    with pytest.raises(ForeignFormatError, match=said):
        holdfast.open(copy)


def test_there_are_cases_of_both_writers() -> None:
    assert MEGATRON and DEEPSPEED


@pytest.mark.parametrize("case", MEGATRON, ids=lambda one: one.name)
def test_files_that_one_process_wrote_are_read_and_a_copy_among_them_is_not(
    case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's converter has the same arguments in all of them."""
    arguments = megatron_ranks._RankFiles._arguments
    monkeypatch.setattr(
        megatron_ranks._RankFiles,
        "_arguments",
        lambda files, name: {**arguments(files, name), "rank": 0},
    )
    assert read(case / "checkpoint")
    copy = shutil.copytree(case / "checkpoint", tmp_path / "copy")
    first, *_, last = sorted(copy.rglob("model_optim_rng.pt"))
    shutil.copyfile(first, last)
    with pytest.raises(HoldfastError, match=r"it has the tensors of .*: it is a copy of it"):
        holdfast.open(copy)
