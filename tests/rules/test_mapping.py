"""Every rule is checked before any byte moves, and an error names leaf and pattern."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast import rules
from holdfast.errors import UsageError
from holdfast.geometry.box import Box
from holdfast.rules import Kind, Rules
from support.models.patchwork import Arrays, is_covered, numbered, put

# ── what a leaf is ───────────────────────────────────────────────────────────────────────────


def test_a_leaf_without_a_rule_is_itself() -> None:
    seen = Rules([("other", rules.transpose(1, 0))]).see("w", (2, 3))
    assert (seen.same_as, seen.shape, seen.padding) == ("w", (2, 3), ())
    assert (seen.dtype, seen.spread, seen.is_copy) == (None, None, False)


def test_what_is_said_of_a_leaf_is_kept_beside_what_it_is_made_of() -> None:
    kinds = rules.averaged, rules.rename("x"), rules.cast("torch.bfloat16"), rules.optional
    seen = Rules([("w", *kinds)]).see("w", (2, 3))
    assert (seen.same_as, seen.spread, seen.dtype) == ("x", "averaged", "BF16")
    assert Rules([("w", rules.replicated)]).see("w", ()).spread == "replicated"
    assert Rules([("w", rules.unique)]).see("w", ()).spread == "unique"
    assert Rules([("w", rules.cast("F8_E5M2"))]).see("w", ()).dtype == "F8_E5M2"


def test_a_tied_leaf_is_a_copy() -> None:
    seen = Rules([("head", rules.tied("embedding"))]).see("head", (2, 3))
    assert (seen.same_as, seen.is_copy) == ("embedding", True)


def test_a_leaf_is_its_other_only_when_it_is_all_of_it() -> None:
    shape = (2, 2)
    for kind in [
        rules.transpose(1, 0),
        rules.padded(0, 1),
        rules.part_of("x", 0, at=1, whole=3),
        rules.fused(0, [1, 1], ["a", "b"]),
    ]:
        assert Rules([("w", kind)]).see("w", shape).same_as is None


def test_an_empty_leaf_stays_the_leaf_it_is() -> None:
    kinds = rules.fused(1, [2, 2], ["a", "b"]), rules.transpose(1, 0), rules.rename("x{name}")
    seen = Rules([("w", *kinds)]).see("w", (0, 4))
    assert seen.leaves == {"xa": (2, 0), "xb": (2, 0)}
    assert Rules([("w", rules.padded(0, 0))]).see("w", (0, 3)).leaves == {"w": (0, 3)}
    back = Rules([("w", *kinds)]).inverse({"w": (0, 4)})
    assert back.through(seen).leaves == {"w": (0, 4)}


def test_pairs_here_are_halves_there() -> None:
    seen = Rules([("w", rules.paired(0, 2))]).see("w", (8,))
    found: Arrays = {}
    put(seen.patches, np.array([10, 20, 11, 21, 30, 40, 31, 41]), found)
    assert found["w"].tolist() == [10, 11, 20, 21, 30, 31, 40, 41]
    assert is_covered(seen)


def test_parts_can_be_more_than_a_name() -> None:
    """GPT-2's query is turned and a part again; an expert's number comes from ``unstack``."""
    into = [
        ("q", rules.transpose(1, 0), rules.rename("{name}.{i}")),
        ("e", rules.unstack(0, "e{n}")),
    ]
    seen = Rules([("w.{i}", rules.fused(0, [2, 2], into))]).see("w.5", (4, 3))
    found: Arrays = {}
    values = numbered((4, 3))
    put(seen.patches, values, found)
    assert found.keys() == {"q.5", "e0", "e1"}
    assert np.array_equal(found["q.5"], values[:2].T)
    assert np.array_equal(found["e1"], values[3])


def test_kinds_can_be_given_as_a_bundle() -> None:
    bundle = rules.transpose(1, 0), (rules.rename("x"), rules.replicated)
    seen = Rules([("w", bundle)]).see("w", (2, 3))
    assert (seen.leaves, seen.spread) == ({"x": (3, 2)}, "replicated")


def test_names_reckon_with_values() -> None:
    mapping = Rules([("l.{i}", rules.rename("m.{i+first}"))], values={"first": 8})
    assert mapping.see("l.2", ()).same_as == "m.10"


def test_the_public_module_is_found_from_the_package() -> None:
    assert holdfast.rules is rules
    assert all(hasattr(rules, name) for name in rules.__all__)


# ── state beside parameters ──────────────────────────────────────────────────────────────────


def test_a_scalar_of_a_parameter_belongs_to_all_its_leaves() -> None:
    mapping = Rules([("w", rules.fused(0, [1, 1], ["a", "b"])), ("v", rules.rename("x"))])
    assert mapping.beside("w", (2, 3), ()) == ("a", "b")
    assert mapping.beside("w", (2, 3), (1,)) == ("a", "b")
    assert mapping.beside("v", (2, 3), ()) == ("x",)
    assert mapping.beside("u", (2, 3), ()) == ("u",)


def test_other_state_follows_a_parameter_that_is_one_leaf() -> None:
    """Adafactor's rows and columns."""
    mapping = Rules([("w", rules.fused(0, [1, 1], ["a", "b"])), ("v", rules.rename("x"))])
    assert mapping.beside("v", (2, 3), (2,)) == ("x",)
    assert mapping.beside("w", (2, 3), (3,)) == ("w",)


# ── leaves and rules that do not fit ─────────────────────────────────────────────────────────


def test_rules_that_fit_say_nothing() -> None:
    mapping = Rules(
        [
            ("l.{i}.w", rules.rename("m.{i}.w")),
            ("bias", rules.optional),
            ("head", rules.tied("embedding")),
        ]
    )
    mapping.check({"l.0.w": (2,), "l.1.w": (3,), "embedding": (2,), "head": (2,), "x": ()})


def test_a_pattern_that_finds_nothing_is_an_error() -> None:
    mapping = Rules([("layers.{i}.wq", rules.replicated), ("norm", rules.replicated)])
    leaves = {f"layers.{n}.wk": (2,) for n in range(9)} | {"norm": (2,)}
    with pytest.raises(UsageError, match=r"rule 'layers.\{i\}.wq': no leaf.*layers.0.wk") as caught:
        mapping.check(leaves)
    assert "layers.5.wk" not in str(caught.value)
    assert caught.value.fields["pattern"] == "layers.{i}.wq"
    mapping.check(leaves, elsewhere=["layers.{i}.wq"])
    assert mapping.used(iter(leaves)) == ("norm",)
    assert mapping.patterns == ("layers.{i}.wq", "norm")
    with pytest.raises(UsageError, match="Leaves are: none"):
        mapping.check({})


def test_two_rules_for_one_leaf_are_an_error() -> None:
    mapping = Rules([("**", rules.replicated), ("a.*", rules.unique)])
    with pytest.raises(UsageError, match=r"a.b: both '\*\*' and 'a.\*' are rules") as caught:
        mapping.see("a.b", (2,))
    assert caught.value.fields == {"leaf": "a.b", "pattern": "a.*"}
    assert mapping.see("b", (2,)).spread == "replicated"


@pytest.mark.parametrize(
    ("kinds", "says"),
    [
        ([rules.rename("x")], r"w.0 and w.1 are both seen as x\[0:2, 0:3\].*rules.tied"),
        ([rules.stack("x", 0, count=2, at="0")], r"both seen as x\[0:1, 0:2, 0:3\]"),
        ([rules.part_of("x", 0, at=1, whole=4)], r"both seen as x\[1:3, 0:3\]"),
    ],
)
def test_two_leaves_that_would_be_the_same_elements_are_an_error(
    kinds: list[Kind], says: str
) -> None:
    mapping = Rules([("w.{n}", *kinds)])
    with pytest.raises(UsageError, match=says):
        mapping.check({"w.0": (2, 3), "w.1": (2, 3)})
    with pytest.raises(UsageError, match=says):
        mapping.inverse({"w.0": (2, 3), "w.1": (2, 3)})


def test_two_leaves_that_give_another_different_shapes_are_an_error() -> None:
    mapping = Rules([("w.{n}", rules.stack("x", 0, count=2))])
    with pytest.raises(UsageError, match=r"w.0 and w.1 give x different shapes, \[2, 2\] and"):
        mapping.check({"w.0": (2,), "w.1": (3,)})


@pytest.mark.parametrize(
    ("kinds", "says"),
    [
        ([rules.fused(0, [2, 3], ["a", "b"])], r"widths \[2, 3\] give 5 along dimension 0.*has 4"),
        ([rules.fused(1, [4], ["a"])], r"no dimension 1 in its shape \[4\]"),
        ([rules.fused(0, [2, 2], ["a{i}", "a0"])], "two of its parts are called 'a0'"),
        ([rules.padded(0, 5)], "has 4, less than the true size 5"),
        ([rules.padded(1, 5)], "no dimension 1"),
        ([rules.transpose(1, 0)], r"\[1, 0\] is no order of the dimensions of its shape \[4\]"),
        ([rules.part_of("x", 0, at=1, whole=4)], "which from 1 on go beyond the 4 of 'x'"),
        ([rules.stack("x", 0, count=3, at="{i+3}")], "number 3 counted from 0, and 'x' has 3"),
        ([rules.stack("x", 2, count=3, at="0")], "along dimension 2: give one from 0 to 1"),
        ([rules.stack("x", 0, count=3, at="{i}x")], "gives '0x', and a number is wanted"),
        ([rules.unstack(1, "x{n}")], "no dimension 1"),
        ([rules.paired(0, 4)], "has 4, which 4 heads of an even size cannot have"),
        ([rules.rename("{i-1}")], "is -1"),
        ([rules.unstack(0, "x{n//2}")], r"two of its parts are called 'x0'"),
        ([rules.fused(0, [2, 2], ["a", "b"]), rules.rename("x")], "parts a and b are both seen"),
        (
            [rules.fused(0, [2, 2], [("a", rules.rename("x")), ("b", rules.rename("x"))])],
            "parts a and b are both seen as x.*{name} in a template",
        ),
        (
            [rules.fused(0, [1, 3], ["a", "b"]), rules.part_of("x", 0, at=0, whole=3)],
            r"parts a and b are both seen as x\[0:1\]",
        ),
        (
            [rules.fused(0, [1, 3], ["a", "b"]), rules.stack("x", 0, count=2, at="0")],
            "give x different shapes",
        ),
    ],
)
def test_a_leaf_that_a_rule_does_not_fit_is_named(kinds: list[Kind], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        Rules([("w{i}", *kinds)]).check({"w0": (4,)})
    assert str(caught.value).startswith("w0 (rule 'w{i}'): ")


# ── rules that mean nothing, whatever the leaves are ─────────────────────────────────────────


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("w", "'w' is no rule"),
        ((), r"\(\) is no rule"),
        ((3, rules.unique), r"\(3, .* is no rule: give a tuple"),
        (("w", "replicated"), "rule 'w': 'replicated' is nothing a leaf can be"),
        (("w", rules.rename), "is nothing a leaf can be"),
        (("w", rules.rename("x.{i}")), "wants 'i'"),
        (("w.{i}", rules.fused(0, [1], [("x", rules.rename("y.{j}"))])), "wants 'j'"),
        (("w", rules.stack("x", 0, count=2)), "wants 'n'"),
        (("w", rules.rename("x{n}")), "wants 'n'"),
        (("w.{n}", rules.unstack(0, "x{n}")), "{n} would be two things"),
        (("w.{n}", rules.fused(0, [1], [("x", rules.unstack(0, "y{n}"))])), "{n} would be two"),
        (("w.{name}", rules.rename("x")), "{name} would be two things"),
        (("w.{first}", rules.rename("x")), "{first} would be two things"),
        (("w", rules.shard(0, "pp")), "cuts over 'pp', and the mesh has tp, dp"),
        (("w", rules.unique, rules.replicated), "replicated and unique at once"),
        (("w", rules.cast("float16"), rules.cast("float32")), "F16 and F32 at once"),
        (("w", rules.shard(0, "dp"), rules.flat((3,), "tp")), "flat is listed behind shard"),
        (("w", rules.transpose(0), rules.shard(0, "dp")), "shard is listed behind transpose"),
        (
            ("w", rules.shard(0, "tp", units=2), rules.unique, rules.shard(1, "dp")),
            "shard is listed behind shard",
        ),
        (
            (
                "w",
                rules.fused(0, [2], ["a"]),
                rules.rename("x"),
                rules.fused(0, [2], "b", over="tp"),
            ),
            "fused is listed behind fused",
        ),
    ],
)
def test_a_rule_that_means_nothing_is_refused_at_once(given: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Rules([given], {"tp": 2, "dp": 2}, values={"first": 1})


def test_numbers_of_their_own_and_values_are_told_apart() -> None:
    with pytest.raises(UsageError, match=r"{n} would be two things"):
        Rules([("w", rules.unstack(0, "x{n}"))], values={"n": 1})


@pytest.mark.parametrize("size", [0, 2.0, "2", True])
def test_a_mesh_without_ranks_is_refused(size: Any) -> None:
    with pytest.raises(UsageError, match=r"mesh: 'tp' has .* ranks"):
        Rules([], {"tp": size})


def test_a_mesh_that_is_missing_is_said() -> None:
    with pytest.raises(UsageError, match=r"the mesh has no dimensions. Give its size in mesh="):
        Rules([("w", rules.shard(0, "tp"))])


@pytest.mark.parametrize(
    ("word", "says"),
    [
        (lambda: rules.cast("int8"), r"cast\('int8'\): give one of float64"),
        (lambda: rules.cast(3), "give one of"),  # type: ignore[arg-type]
        (lambda: rules.shard(-1, "tp"), "dim is a whole number from 0 on, not -1"),
        (lambda: rules.shard(0, ()), "over names dimensions of the mesh, each once"),
        (lambda: rules.shard(0, ["tp", "tp"]), "each once"),
        (lambda: rules.shard(0, "tp", sizes=[2], units=2), "give sizes or units"),
        (lambda: rules.shard(0, "tp", sizes=[2, -2]), "sizes is a whole number from 0 on"),
        (lambda: rules.shard(0, "tp", sizes=-2), "sizes is a whole number from 0 on"),
        (lambda: rules.shard(0, "tp", units=0), "units is a whole number from 1 on"),
        (lambda: rules.flat((2, -1), "dp"), "shape is a whole number from 0 on"),
        (lambda: rules.flat((2,), "dp", align=0), "align is a whole number from 1 on"),
        (lambda: rules.fused(-1, [1], ["a"]), "dim is a whole"),
        (lambda: rules.fused(0, [], []), "0 widths, 0 names"),
        (lambda: rules.fused(0, [0], ["a"]), "widths is a whole number from 1 on"),
        (lambda: rules.fused(0, [1.5], ["a"]), "not 1.5"),  # type: ignore[list-item]
        (lambda: rules.fused(0, [1, 2], ["a"]), "2 widths, 1 names, 2 units and 2 sizes"),
        (lambda: rules.fused(0, [4], ["a"], units=[3]), "a width of 4 cannot have 3 equal units"),
        (lambda: rules.fused(0, [4], ["a"], units=[0]), "units is a whole"),
        (lambda: rules.fused(0, [4], ["a"], groups=3), "a width of 4 cannot have 3 equal units"),
        (lambda: rules.fused(0, [4], ["a"], groups=0), "groups is a whole"),
        (lambda: rules.fused(0, [4], ["a"], groups=2, units=[2]), "groups are the units already"),
        (lambda: rules.fused(0, [4], ["a"], sizes=[[4]]), "cut over something, without units"),
        (
            lambda: rules.fused(0, [4], ["a"], over="tp", units=[2], sizes=[[2, 2]]),
            "without units",
        ),
        (lambda: rules.fused(0, [4], ["a"], over="tp", sizes=[[2, 3]]), "add up to 5, not to"),
        (lambda: rules.fused(0, [4], ["a"], over="tp", sizes=[[5, -1]]), r"sizes \[5, -1\]"),
        (lambda: rules.fused(0, [4], [("a", rules.unique)]), "is no part"),
        (lambda: rules.fused(0, [4], [("a", rules.shard(0, "tp"))]), "is no part.*over= says"),
        (lambda: rules.fused(0, [4], [(rules.unique,)]), "is no part"),
        (lambda: rules.part_of("x", 0, at=-1, whole=3), "dim and at is a whole number"),
        (lambda: rules.padded(0, -1), "dim and true_size is a whole number"),
        (lambda: rules.stack("x", -1, count=2), "dim is a whole number"),
        (lambda: rules.stack("x", 0, count=0), "count is a whole number from 1 on"),
        (lambda: rules.unstack(-1, "x{n}"), "dim is a whole number"),
        (lambda: rules.unstack(0, "x"), "all leaves get the same name"),
        (lambda: rules.transpose(0, 2), r"transpose\(0, 2\): name each dimension once"),
        (lambda: rules.paired(-1, 2), "dim is a whole number"),
        (lambda: rules.paired(0, 0), "heads is a whole number"),
    ],
)
def test_a_word_that_means_nothing_is_refused_where_it_is_written(
    word: Callable[[], object], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        word()


def test_a_patch_says_what_runs_along_what() -> None:
    """What callers build on: the expert's number is a dimension here and none there."""
    seen = Rules([("w", rules.unstack(1, "e{n}"), rules.transpose(1, 0))]).see("w", (2, 3, 4))
    patch = seen.patches[2]
    assert (patch.leaf, patch.leaf_shape, patch.dims) == ("e2", (4, 2), (1, -1, 0))
    assert (patch.here, patch.box) == (Box((0, 2, 0), (2, 3, 4)), Box((0, 0), (4, 2)))
