"""What plain tensors of ranks are: numpy cuts the leaf, the rules put it together again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import rules
from holdfast.errors import UsageError
from holdfast.rules import Rules
from support.models.patchwork import Array, Arrays, numbered, put_local, take_local

Cut = Callable[[int], Array]


def assert_put_together(mapping: Rules, name: str, tensors: list[Array], leaves: Arrays) -> None:
    """All ranks together have these leaves, and each gets its tensor from them."""
    found: Arrays = {}
    locals_ = [mapping.local(name, t.shape, rank) for rank, t in enumerate(tensors)]
    for local, tensor in zip(locals_, tensors, strict=True):
        put_local(local, tensor, found)
    assert found.keys() == leaves.keys()
    for leaf, values in leaves.items():
        assert np.array_equal(found[leaf], values), leaf
    for local, tensor in zip(locals_, tensors, strict=True):
        assert np.array_equal(take_local(local, tensor.shape, leaves), tensor)


def test_equal_parts_over_one_dimension_of_the_mesh() -> None:
    w = numbered((6, 5))
    mapping = Rules([("w", rules.shard(0, "tp"))], {"dp": 2, "tp": 3})
    assert_put_together(mapping, "w", np.split(w, 3) * 2, {"w": w})


def test_parts_over_several_dimensions_of_the_mesh_count_the_last_one_fastest() -> None:
    w = numbered((6, 4))
    both = Rules([("w", rules.shard(0, ["dp", "tp"]))], {"dp": 2, "tp": 3})
    assert_put_together(both, "w", np.split(w, 6), {"w": w})
    turned = Rules([("w", rules.shard(0, ["tp", "dp"]))], {"dp": 2, "tp": 3})
    parts = np.split(w, 6)
    assert_put_together(turned, "w", [parts[n] for n in (0, 2, 4, 1, 3, 5)], {"w": w})


def test_a_part_of_a_part_is_listed_before_the_part() -> None:
    w = numbered((8, 6))
    kinds = rules.shard(0, "dp"), rules.shard(1, "ep"), rules.shard(0, "tp")
    mapping = Rules([("w", *kinds)], {"tp": 2, "ep": 3, "dp": 2})
    tensors = [
        np.split(np.split(half, 3, 1)[ep], 2)[dp]
        for half in np.split(w, 2)
        for ep in range(3)
        for dp in range(2)
    ]
    assert_put_together(mapping, "w", tensors, {"w": w})


def test_uneven_parts_have_the_sizes_that_are_given() -> None:
    w = numbered((3, 7))
    mapping = Rules([("w", rules.shard(1, "ep", sizes=(4, 0, 3)))], {"ep": 3})
    assert_put_together(mapping, "w", np.split(w, [4, 4], 1), {"w": w})


@given(st.integers(1, 9), st.integers(1, 5))
def test_a_whole_size_is_cut_as_dtensor_cuts_it(size: int, ranks: int) -> None:
    w = numbered((size, 2))
    each = -(-size // ranks)
    tensors = [w[rank * each : (rank + 1) * each] for rank in range(ranks)]
    mapping = Rules([("w", rules.shard(0, "tp", sizes=size))], {"tp": ranks})
    assert_put_together(mapping, "w", tensors, {"w": w})


def test_fewer_heads_than_ranks_are_those_of_neighbours() -> None:
    w = numbered((6, 2))  # two heads of three rows
    mapping = Rules([("wk", rules.shard(0, "tp", units=2), rules.rename("k"))], {"tp": 4})
    tensors = [w[:3], w[:3], w[3:], w[3:]]
    assert_put_together(mapping, "wk", tensors, {"k": w})
    assert mapping.local("wk", (3, 2), 2).shape == (12, 2)  # all ranks, one behind another


def test_more_heads_than_ranks_are_shared_out() -> None:
    w = numbered((12, 2))
    mapping = Rules([("w", rules.shard(0, "tp", units=4))], {"tp": 2})
    assert_put_together(mapping, "w", np.split(w, 2), {"w": w})
    assert mapping.see("w", (12, 2)).same_as == "w"


@st.composite
def fusions(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """(units of each part, width of a unit of each, ranks)."""
    ranks = draw(st.sampled_from([1, 2, 4]))
    units = draw(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=3))
    return units, [draw(st.integers(1, 3)) for _ in units], ranks


@given(fusions())
def test_each_part_of_a_fused_tensor_is_cut_by_itself(
    fusion: tuple[list[int], list[int], int],
) -> None:
    units, widths, ranks = fusion
    whole = [unit * width for unit, width in zip(units, widths, strict=True)]
    leaves = {f"part{n}": numbered((w, 3), 1 + 100 * n) for n, w in enumerate(whole)}

    def held(leaf: Array, count: int, rank: int) -> Array:
        heads = np.split(leaf, count)
        if count >= ranks:
            each = count // ranks
            return np.concatenate(heads[rank * each : (rank + 1) * each])
        return heads[rank // (ranks // count)]

    tensors = [
        np.concatenate(
            [held(leaf, n, rank) for leaf, n in zip(leaves.values(), units, strict=True)]
        )
        for rank in range(ranks)
    ]
    kind = rules.fused(0, whole, list(leaves), over="tp", units=units)
    assert_put_together(Rules([("w", kind)], {"tp": ranks}), "w", tensors, leaves)


def test_parts_of_uneven_widths_are_cut_as_they_are_said_to_be() -> None:
    q, k = numbered((5, 2)), numbered((3, 2), 100)
    kind = rules.fused(0, [5, 3], ["q", "k"], over="tp", sizes=[(3, 2), (1, 2)])
    tensors = [np.concatenate([q[:3], k[:1]]), np.concatenate([q[3:], k[1:]])]
    assert_put_together(Rules([("w", kind)], {"tp": 2}), "w", tensors, {"q": q, "k": k})


def test_groups_are_shared_out_as_they_alternate() -> None:
    q, k = numbered((8, 2)), numbered((4, 2), 100)
    kind = rules.fused(0, [8, 4], ["q", "k"], over="tp", groups=4)
    groups = [np.concatenate([q[2 * n : 2 * n + 2], k[n : n + 1]]) for n in range(4)]
    tensors = [np.concatenate(groups[:2]), np.concatenate(groups[2:])]
    assert_put_together(Rules([("w", kind)], {"tp": 2}), "w", tensors, {"q": q, "k": k})


def test_padding_is_on_the_ranks_that_have_it() -> None:
    w = numbered((5, 2))
    padded = np.pad(w, [(0, 3), (0, 0)])
    mapping = Rules([("emb", rules.shard(0, "tp"), rules.padded(0, 5))], {"tp": 4})
    assert_put_together(mapping, "emb", np.split(padded, 4), {"emb": w})
    assert mapping.local("emb", (2, 2), 0).padding == ()
    assert mapping.local("emb", (2, 2), 3).patches == ()


@given(st.lists(st.integers(1, 4), max_size=3), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_flat_parts_have_the_elements_in_their_order(
    shape: list[int], ranks: int, align: int, is_padded: bool
) -> None:
    w = numbered(tuple(shape))
    each = -(-w.size // (ranks * align)) * align
    row = np.pad(w.ravel(), (0, each * ranks - w.size if is_padded else 0))
    tensors = [row[rank * each : (rank + 1) * each] for rank in range(ranks)]
    mapping = Rules([("w", rules.flat(shape, "dp", align=align))], {"dp": ranks})
    assert_put_together(mapping, "w", tensors, {"w": w})


def test_flat_parts_of_a_cut_and_fused_tensor() -> None:
    """ZeRO over tensor parallelism: what Megatron's distributed optimizer holds."""
    q, k = numbered((4, 3)), numbered((2, 3), 100)
    ranks = [np.concatenate([q[2 * n : 2 * n + 2], k[n : n + 1]]) for n in range(2)]
    flat = [np.pad(rank.ravel(), (0, 1)) for rank in ranks]
    tensors = [half for rank in flat for half in np.split(rank, 2)]
    kinds = rules.flat((3, 3), "dp"), rules.fused(0, [4, 2], ["q", "k"], over="tp")
    mapping = Rules([("w", *kinds, rules.transpose(1, 0))], {"tp": 2, "dp": 2})
    assert_put_together(mapping, "w", tensors, {"q": q.T, "k": k.T})
    held = mapping.local("w", (5,), 1)
    assert (held.offsets, held.padding[0][0]) == ((0, 1), -1)


def test_a_tensor_that_no_rule_cuts_is_the_whole_leaf() -> None:
    w = numbered((2, 3))
    mapping = Rules([("w", rules.transpose(1, 0))], {"dp": 2})
    assert_put_together(mapping, "w", [w, w], {"w": w.T})
    assert_put_together(mapping, "b", [w, w], {"b": w})
    assert_put_together(Rules([]), "b", [w, w, w], {"b": w})  # ranks need no mesh for that


def test_the_same_rules_on_another_mesh() -> None:
    w = numbered((6, 2))
    mapping = Rules([("w", rules.shard(0, "tp"), rules.rename("w{x}"))], {"tp": 3}, values={"x": 7})
    assert_put_together(mapping.on({"dp": 2, "tp": 2}), "w", np.split(w, 2) * 2, {"w7": w})


@pytest.mark.parametrize(
    ("kinds", "shape", "says"),
    [
        ([rules.shard(0, "tp", sizes=(3, 2))], (4, 2), r"4 in part 1 of 2.*\[3, 2\]"),
        ([rules.shard(0, "tp", sizes=(4, 2, 1))], (2, 2), "part 1 of 2"),
        ([rules.shard(2, "tp")], (4, 2), "no dimension 2"),
        ([rules.shard(0, "tp", units=3)], (3, 2), "3 units .* over 2 parts"),
        ([rules.shard(0, "tp", units=4)], (3, 2), "6 in all 2 parts .* 4 equal units"),
        ([rules.fused(0, [4, 2], ["a", "b"], over="tp")], (4, 2), "give 3 .* part 1.* has 4"),
        ([rules.fused(0, [4, 3], ["a", "b"], over="tp")], (4, 2), "3 units of 'b'"),
        ([rules.fused(0, [4, 2], "ab", over="tp", sizes=[(4,), (2,)])], (6, 2), "1 sizes"),
        ([rules.fused(1, [6], ["a"], over="tp", groups=3)], (4, 3), "3 units of groups"),
        ([rules.flat((5, 2), "tp")], (4,), r"part 1 of the 10 .* has 5.*\[4\]"),
        ([rules.flat((5, 2), "tp", align=4)], (3,), "has 8, or 2 without padding"),
    ],
)
def test_a_tensor_that_is_no_such_part_is_refused(
    kinds: list[rules.Kind], shape: tuple[int, ...], says: str
) -> None:
    mapping = Rules([("layers.{i}.w", *kinds)], {"tp": 2})
    with pytest.raises(UsageError, match=says) as caught:
        mapping.local("layers.3.w", shape, 1)
    assert "layers.3.w (rule 'layers.{i}.w')" in str(caught.value)
    assert caught.value.fields["leaf"] == "layers.3.w"


def test_a_rank_that_is_not_on_the_mesh_is_refused() -> None:
    mapping = Rules([("w", rules.shard(0, "tp"))], {"dp": 2, "tp": 2})
    with pytest.raises(UsageError, match=r"rank 4 is not on the mesh.*which has 4 ranks"):
        mapping.local("w", (2,), 4)
