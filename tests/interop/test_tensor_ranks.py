"""Shards of DeepSpeed's tensor-parallel ranks are joined as the file says, or refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.errors import UsageError
from holdfast.geometry.box import ITEMSIZE, Box
from holdfast.interop.foreign import Extent, ForeignLeaf, StoredBox
from holdfast.interop.tensor_ranks import TensorRanks

REPLICATED = "tp_replicated_parameter_patterns"


def info_of(**more: Any) -> dict[str, Any]:
    return {"universal_checkpoint_version": 0.4, REPLICATED: [r"^norm\.weight$"], **more}


def joined(info: dict[str, Any], name: str, shards: list[torch.Tensor]) -> torch.Tensor:
    """What the parts say, put together of the shards."""
    leaves = [
        ForeignLeaf(
            "F32",
            tuple(shard.shape),
            (StoredBox(Box.whole(shard.shape), Extent(str(rank), 0), rank),),
        )
        for rank, shard in enumerate(shards)
    ]
    leaf = TensorRanks(info, len(shards), "here").join_leaves(name, leaves)
    whole = torch.full(leaf.shape, math.nan)
    for part in leaf.parts:
        flat = (
            shards[int(part.extent.file)].clone(memory_format=torch.contiguous_format).reshape(-1)
        )
        strides = part.extent.strides or torch.empty(part.box.shape).stride()
        offset = part.extent.offset // ITEMSIZE["F32"]
        assert torch.isnan(whole[part.box.slices()]).all(), "no element twice"
        whole[part.box.slices()] = flat.as_strided(part.box.shape, strides, offset)
    assert not torch.isnan(whole).any()
    return whole


def steps(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


def test_lists_say_which_are_cut_by_rows_by_columns_in_halves_and_not() -> None:
    info = info_of(
        parameter_with_row_parallelism_patterns=[r"\d+.out.weight"],
        parameter_with_2_sub_params_cat_dim_0=[r"^gate\.weight$"],
        vocabulary_parameter_patterns=["embed.weight"],
        original_vocab_size=7,
    )
    whole = steps(8, 6)
    assert torch.equal(joined(info, "up.weight", [*whole.chunk(2)]), whole)
    assert torch.equal(joined(info, "12.out.weight", [*whole.split((2, 4), 1)]), whole)
    assert torch.equal(joined(info, "norm.weight", [whole, whole.clone()]), whole)
    assert torch.equal(joined(info, "embed.weight", [*whole.chunk(4)]), whole[:7])
    quarters = whole.chunk(4)
    shards = [torch.cat((quarters[0], quarters[2])), torch.cat((quarters[1], quarters[3]))]
    assert torch.equal(joined(info, "gate.weight", shards), whole)


@given(st.data())
def test_a_map_of_pieces_gives_the_tensor_that_was_cut(data: st.DataObject) -> None:
    """Sub-parameters of uneven widths along any dimension, cut over ranks."""
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    dim = data.draw(st.integers(0, len(shape) - 1))
    degree = data.draw(st.integers(1, 3))
    sizes = st.lists(st.integers(0, 3), min_size=degree, max_size=degree)
    widths = data.draw(st.lists(sizes, min_size=1, max_size=3).filter(lambda w: sum(map(sum, w))))
    shape[dim] = sum(map(sum, widths))
    whole = steps(*shape)
    runs = iter(whole.split([one for some in widths for one in some], dim))
    cut = [[next(runs) for _ in range(degree)] for _ in widths]
    shards = [torch.cat([some[rank] for some in cut], dim) for rank in range(degree)]
    pieces: list[list[Any]] = [[] for _ in range(degree)]
    at, inner = 0, [0] * degree
    for some in widths:
        for rank, width in enumerate(some):
            held = list(shards[rank].stride()) if shards[rank].numel() else [1] * len(shape)
            size = [*shape[:dim], width, *shape[dim + 1 :]]
            pieces[rank].append(
                {
                    "shape": size,
                    "source": [at * whole.stride(dim), list(whole.stride())],
                    "dest": [inner[rank] * held[dim], held],
                    "locations": [rank],
                }
            )
            at, inner[rank] = at + width, inner[rank] + width
    ranks = {
        rank: {"shard_shape": list(shards[rank].shape), "pieces": pieces[rank]}
        for rank in range(degree)
    }
    maps = {"version": 1, "params": {"^w$": {"logical_shape": shape, "ranks": ranks}}}
    assert torch.equal(joined({"affine_map": maps}, "w", shards), whole)


def mapped(**changes: Any) -> dict[str, Any]:
    """A map of a vector of four elements on two ranks, with other values in its first piece."""
    pieces = [
        {"shape": [2], "source": [2 * rank, [1]], "dest": [0, [1]], "locations": [rank]}
        for rank in range(2)
    ]
    pieces[0] |= changes
    ranks = {rank: {"shard_shape": [2], "pieces": [pieces[rank]]} for rank in range(2)}
    return {"affine_map": {"version": 1, "params": {"^w$": {"logical_shape": [4], "ranks": ranks}}}}


def again_and_again(count: int) -> dict[str, Any]:
    """A map by which the second rank has a piece of the first so many times: each is read."""
    piece = {"shape": [2], "source": [0, [1]], "dest": [0, [1]], "locations": [0, 1]}
    ranks = {
        rank: {"shard_shape": [2], "pieces": [piece] * (count if rank else 1)} for rank in range(2)
    }
    return {"affine_map": {"version": 1, "params": {"^w$": {"logical_shape": [2], "ranks": ranks}}}}


@pytest.mark.parametrize(
    ("info", "said"),
    [
        (None, "can't be read without universal_checkpoint_info"),
        ({"universal_checkpoint_version": 0.4}, "can't be read without"),
        ({"affine_map": {"version": 2, "params": {}}}, "newer form"),
        ({"affine_map": {"version": 1, "params": {}}}, "no map has its name"),
        (
            info_of(parameter_to_average_patterns=["w"]),
            "parameter_to_average_patterns has its name",
        ),
        (info_of(autotp_unsupported_parameter_patterns={"^w$": "why"}), "autotp_unsupported"),
        (info_of(parameter_with_sub_params=[{"patterns": ["^w$"]}]), "parameter_with_sub_params"),
        (info_of(parameter_with_row_parallelism_patterns=["w"]), "do not fit along dimension 1"),
        (info_of(**{REPLICATED: ["(a+)+$"]}), "the pattern .* is not read"),
        (info_of(**{REPLICATED: [".*" * 30]}), "the pattern .* is not read"),
        (info_of(**{REPLICATED: ["a.*b.*c"]}), "the pattern .* is not read"),
        (info_of(**{REPLICATED: [f"x{n}" for n in range(200_001)]}), "are more than any model"),
        (info_of(**{REPLICATED: [3]}), "the pattern 3, which is not read"),
        (info_of(vocabulary_parameter_patterns=["w"]), "a vocabulary of None rows"),
        (mapped(scale=0.5), "the whole times 0.5"),
        (mapped(shape=[3]), "no box of the tensor"),
        (mapped(source=[0, [2]]), "no box of the tensor"),
        (mapped(source=[-1, [1]]), "no box of the tensor"),
        (mapped(dest=[1, [1]]), "no box of the tensor"),
        (mapped(locations=[1]), "is of another rank"),
        (mapped(shape=None), "has no shape"),
        (again_and_again(2), "has elements of rank 1 twice"),
        (again_and_again(5000), "has 5000 pieces for rank 1"),
    ],
)
def test_what_a_file_does_not_say_for_certain_is_refused_by_name(info: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        joined(info, "w", [steps(2), steps(2)])


def test_patterns_that_would_take_for_ever_are_refused() -> None:
    ranks = TensorRanks(info_of(**{REPLICATED: [f"x{n}.*" for n in range(1000)]}), 2, "here")
    with pytest.raises(UsageError, match="too many patterns"):
        _ = [ranks.join(f"w{number}", [(2,), (2,)]) for number in range(1000)]
    ranks = TensorRanks(info_of(**{REPLICATED: ["x.*y"]}), 2, "here")
    with pytest.raises(UsageError, match="a name of 5001 characters"):
        ranks.join("x" * 5001, [(2,), (2,)])


def test_a_piece_that_several_ranks_have_is_taken_of_one() -> None:
    assert torch.equal(joined(mapped(), "w", [steps(2), steps(2) + 2]), steps(4))
    both = mapped()
    ranks = both["affine_map"]["params"]["^w$"]["ranks"]
    for rank in range(2):
        ranks[rank]["pieces"] = [
            {"shape": [4], "source": [0, [1]], "dest": [0, [1]], "locations": [0, 1]}
        ]
        ranks[rank]["shard_shape"] = [4]
    assert torch.equal(joined(both, "w", [steps(4), steps(4)]), steps(4))


def test_a_run_of_a_shard_is_placed_as_the_part_of_the_whole_that_it_is() -> None:
    """As ZeRO cuts them: elements in the middle of a row on."""
    ranks = TensorRanks(info_of(parameter_with_row_parallelism_patterns=["w"]), 2, "here")
    found = ranks.join("w", [(3, 2), (3, 2)])
    part = StoredBox(Box((1, 1), (2, 2)), Extent("f", 100))
    (placed,) = found.place([part], "F32", 1)
    assert placed == replace(part, box=Box((1, 3), (2, 4)))
