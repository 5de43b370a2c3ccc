"""Whatever rules are listed: nothing is lost, nothing is twice, and numpy says the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast import rules
from holdfast.rules import Rules, Table
from holdfast.rules.kinds import Kind
from support.models.patchwork import (
    UNKNOWN,
    Array,
    Arrays,
    Shape,
    is_covered,
    numbered,
    put,
    take,
    without_padding,
)

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@dataclass(frozen=True)
class Chain:
    """Kinds, the shape of the tensor they begin with, and what numpy makes of it by them."""

    shape: Shape
    kinds: tuple[Kind, ...]
    leaves: Arrays


Drawn = tuple[Kind, Callable[[str, Array], Arrays]]


@st.composite
def kinds_of(draw: st.DrawFn, leaves: Arrays) -> Drawn:
    """A kind that all of these can be, and what it makes of each."""
    all_shapes = [leaf.shape for leaf in leaves.values()]
    ndim = len(all_shapes[0])
    dim = draw(st.integers(0, max(0, ndim - 1)))
    words = [renamed, stacked]
    if ndim:
        words += [transposed, part_of]
        extents = {shape[dim] for shape in all_shapes}
        words += [padded, unstacked] if min(extents) > 1 else []
        words += [fused, grouped] if len(extents) == 1 else []
        words += [paired] if all(extent % 2 == 0 for extent in extents) else []
    drawn: Drawn = draw(st.sampled_from(words))(draw, leaves, dim)
    return drawn


def renamed(draw: st.DrawFn, leaves: Arrays, dim: int) -> Drawn:
    return rules.rename("{name}r"), lambda name, values: {f"{name}r": values}


def stacked(draw: st.DrawFn, leaves: Arrays, dim: int) -> Drawn:
    count = draw(st.integers(1, 3))
    at = draw(st.integers(0, count - 1))

    def there(name: str, values: Array) -> Arrays:
        parts = [np.full(values.shape, UNKNOWN) for _ in range(count)]
        parts[at] = values
        return {f"{name}s": np.stack(parts, dim)}

    return rules.stack("{name}s", dim, count=count, at=str(at)), there


def transposed(draw: st.DrawFn, leaves: Arrays, dim: int) -> Drawn:
    order = draw(st.permutations(range(next(iter(leaves.values())).ndim)))
    return rules.transpose(*order), lambda name, values: {name: values.transpose(order)}


def part_of(draw: st.DrawFn, leaves: Arrays, dim: int) -> Drawn:
    at, more = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    whole = at + more + max(leaf.shape[dim] for leaf in leaves.values())

    def there(name: str, values: Array) -> Arrays:
        around = [(0, 0)] * values.ndim
        around[dim] = (at, whole - at - values.shape[dim])
        return {f"{name}p": np.pad(values, around, constant_values=UNKNOWN)}

    return rules.part_of("{name}p", dim, at=at, whole=whole), there


def padded(draw: st.DrawFn, leaves: Arrays, dim: int) -> Drawn:
    size = draw(st.integers(1, min(leaf.shape[dim] for leaf in leaves.values())))
    return rules.padded(dim, size), lambda name, values: {name: np.split(values, [size], dim)[0]}


def unstacked(draw: st.DrawFn, leaves: Arrays, dim: int) -> Drawn:
    def there(name: str, values: Array) -> Arrays:
        count = values.shape[dim]
        return {f"{name}{n}": values.take(n, dim) for n in range(count)}

    return rules.unstack(dim, "{name}{n}"), there


def fused(draw: st.DrawFn, leaves: Arrays, dim: int) -> Drawn:
    extent = next(iter(leaves.values())).shape[dim]
    ends = sorted(draw(st.sets(st.integers(1, extent - 1)))) if extent > 1 else []
    widths = np.diff([0, *ends, extent]).tolist()
    names = "abcdefghijklm"[: len(widths)]

    def there(name: str, values: Array) -> Arrays:
        parts = zip(names, np.split(values, ends, dim), strict=True)
        return {f"{name}{part}": found for part, found in parts}

    # What only the first part is has an effect on no other.
    is_renamed = draw(st.booleans())
    first = ("{name}-", rules.rename("{name}x")) if is_renamed else "{name}a"
    kind = rules.fused(dim, widths, [first, *(f"{{name}}{part}" for part in names[1:])])
    if not is_renamed:
        return kind, there
    return kind, lambda name, values: {
        (f"{name}-x" if part == f"{name}a" else part): found
        for part, found in there(name, values).items()
    }


def grouped(draw: st.DrawFn, leaves: Arrays, dim: int) -> Drawn:
    extent = next(iter(leaves.values())).shape[dim]
    groups = draw(st.sampled_from([n for n in range(1, extent + 1) if extent % n == 0]))
    each = extent // groups
    first = draw(st.integers(1, each)) if each > 1 else each
    widths = [width * groups for width in (first, each - first) if width]

    def there(name: str, values: Array) -> Arrays:
        by_group = np.split(values, groups, dim)
        halves = [np.split(group, [first], dim) for group in by_group]
        return {
            f"{name}{part}": np.concatenate([half[number] for half in halves], dim)
            for number, part in enumerate("ab"[: len(widths)])
        }

    into = ["{name}a", "{name}b"][: len(widths)]
    return rules.fused(dim, widths, into, groups=groups), there


def paired(draw: st.DrawFn, leaves: Arrays, dim: int) -> Drawn:
    extents = {leaf.shape[dim] for leaf in leaves.values()}
    heads = draw(st.sampled_from([n for n in (1, 2) if all(e % (2 * n) == 0 for e in extents)]))

    def there(name: str, values: Array) -> Arrays:
        by_head = np.split(values, heads, dim)
        pairs = [slice(0, None, 2), slice(1, None, 2)]
        halves = [
            np.moveaxis(np.moveaxis(head, dim, 0)[pair], 0, dim)
            for head in by_head
            for pair in pairs
        ]
        return {name: np.concatenate(halves, dim)}

    return rules.paired(dim, heads), there


@st.composite
def chains(draw: st.DrawFn, most: int = 4) -> Chain:
    shape = draw(shapes)
    leaves = {"w": numbered(shape)}
    kinds = []
    for _ in range(draw(st.integers(1, most))):
        kind, there = draw(kinds_of(leaves))
        kinds.append(kind)
        leaves = {k: v for name, leaf in leaves.items() for k, v in there(name, leaf).items()}
        leaves = {name: leaf for name, leaf in leaves.items() if (leaf != UNKNOWN).any()}
        if not leaves:  # all of it is padding
            break
    return Chain(shape, tuple(kinds), leaves)


@given(chains())
def test_every_element_is_in_one_patch_or_is_padding(chain: Chain) -> None:
    assert is_covered(Rules([("w", *chain.kinds)]).see("w", chain.shape))


@given(chains())
def test_leaves_are_made_of_the_elements_that_numpy_says(chain: Chain) -> None:
    seen = Rules([("w", *chain.kinds)]).see("w", chain.shape)
    found: Arrays = {}
    put(seen.patches, numbered(chain.shape), found)
    assert found.keys() == chain.leaves.keys()
    assert all(np.array_equal(found[name], leaf) for name, leaf in chain.leaves.items())
    assert seen.leaves == {name: chain.leaves[name].shape for name in seen.leaves}


@given(chains())
def test_there_and_back_is_the_same(chain: Chain) -> None:
    seen = Rules([("w", *chain.kinds)]).see("w", chain.shape)
    assert np.array_equal(take(seen, chain.leaves), without_padding(seen, numbered(chain.shape)))


@given(chains(), st.data())
def test_rules_one_after_the_other_are_the_same_as_all_at_once(
    chain: Chain, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(chain.kinds)))
    first = Rules([("w", *chain.kinds[:at])]).see("w", chain.shape)
    second = Rules([("**", *chain.kinds[at:])])
    seen = Table({name: second.see(name, shape) for name, shape in first.leaves.items()}).through(
        first
    )
    at_once = Rules([("w", *chain.kinds)]).see("w", chain.shape)
    assert np.array_equal(take(seen, chain.leaves), take(at_once, chain.leaves))
    assert seen.leaves == at_once.leaves


@given(chains())
def test_the_inverse_undoes_rules(chain: Chain) -> None:
    """So a checkpoint saved in the form of a training is read as that training has it."""
    mapping = Rules([("w", *chain.kinds)])
    seen = mapping.see("w", chain.shape)
    back = mapping.inverse({"w": chain.shape})
    assert {name: back.see(name).shape for name in seen.leaves} == seen.leaves
    undone = back.through(seen)
    values = numbered(chain.shape)
    assert np.array_equal(take(undone, {"w": values}), without_padding(seen, values))
    assert all(patch.box == patch.here for patch in undone.patches)
    if not seen.padding:
        assert undone.same_as == "w"


@given(chains(), st.data())
def test_a_checkpoint_of_another_form_is_read_as_this_one(
    chain: Chain, data: st.DataObject
) -> None:
    """The other form is made of the same leaves by rules of its own."""
    seen = Rules([("w", *chain.kinds)]).see("w", chain.shape)
    other_rules, stored, found = [], {}, {}
    for number, (name, leaf) in enumerate(chain.leaves.items()):
        # Its rules lead from stored leaves to these: a transposed, fused or stacked form.
        order = tuple(data.draw(st.permutations(range(leaf.ndim))))
        back = tuple(np.argsort(order).tolist())
        other_rules.append((f"s{number}", rules.transpose(*back), rules.rename(name)))
        stored[f"s{number}"] = leaf.transpose(order).shape
        found[f"s{number}"] = leaf.transpose(order)
    table = Rules(other_rules).inverse(stored)
    assert np.array_equal(take(table.through(seen), found), take(seen, chain.leaves))
