"""A parallelism that is only named: what it would cut, and what it cannot tell."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import UsageError
from holdfast.geometry.box import Box
from holdfast.geometry.layout import REPLICATE, BoxList, Instance, Layout, LeafSpec, Mesh, Placement
from holdfast.geometry.parallelism import NamedLayout, NamedParallelism, asked

ALONE = (Instance(Mesh((1,), (0,)), (REPLICATE,)),)


def layout(*names: str, shape: tuple[int, ...] = (8, 6), world: int = 1) -> Layout:
    return Layout(world, tuple(LeafSpec(n, "F32", shape, "split", ALONE) for n in sorted(names)))


def held(wish: NamedLayout, rank: int) -> dict[str, list[Box]]:
    found: dict[str, list[Box]] = {}
    for leaf, box in wish.boxes(rank):
        found.setdefault(leaf.name, []).append(box)
    return found


def test_a_wish_is_read_in_row_major_order() -> None:
    wish = asked(" dp=2, tp=3")
    assert wish == NamedParallelism(("dp", "tp"), (2, 3))
    assert [wish.coordinate(rank) for rank in (0, 2, 3, 5)] == [(0, 0), (0, 2), (1, 0), (1, 2)]


@pytest.mark.parametrize(
    "text",
    ["", "dp", "dp=0", "dp=2,dp=2", "xp=2", "dp=-1", "dp=2;tp=2", "dp=1048577", "dp=9999999"],
)
def test_what_names_no_parallelism_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"names no parallelism|makes more than"):
        asked(text)


def test_dp_repeats_and_fsdp_cuts_parameters_only() -> None:
    buffers = LeafSpec("m.z", "F32", (8,), "lowest", ALONE)
    scalar = LeafSpec("m.zz", "F32", (), "split", ALONE)
    found = NamedLayout(Layout(1, (*layout("m.w").leaves, buffers, scalar)), asked("dp=3,fsdp=4"))
    assert list(found.different()) == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert (
        held(found, 5)
        == held(found, 1)
        == {
            "m.w": [Box((2, 0), (4, 6))],
            "m.z": [Box((0,), (8,))],
            "m.zz": [Box((), ())],
        }
    )
    assert found.size_bytes(5) == (2 * 6 + 8 + 1) * 4
    assert [one.partition(" ")[0] for one in found.assumptions] == ["the", "fsdp"]


def test_thousands_of_ranks_that_repeat_others_cost_nothing() -> None:
    found = NamedLayout(layout("m.w"), asked("fsdp=2,dp=500000"))
    assert list(found.different()) == [(0, 500_000), (500_000, 500_000)]
    assert held(found, 999_999) == {"m.w": [Box((4, 0), (8, 6))]}


def _cut(*placements: int) -> tuple[Instance, ...]:
    mesh = Mesh((2, 2), (0, 1, 2, 3))
    return (Instance(mesh, tuple(Placement(dim) for dim in placements)),)


def test_tp_cuts_as_the_checkpoint_was_cut_and_fsdp_what_that_left() -> None:
    leaves = (
        LeafSpec("m.column", "F32", (8, 6), "split", _cut(0, 0)),
        LeafSpec("m.norm", "F32", (8, 6), "split", _cut(0, -1)),
        LeafSpec("m.row", "F32", (8, 6), "split", _cut(0, 1)),
    )
    found = NamedLayout(Layout(4, leaves), asked("fsdp=2,tp=2"))
    assert held(found, 3) == {
        "m.column": [Box((6, 0), (8, 6))],
        "m.norm": [Box((4, 0), (8, 6))],
        "m.row": [Box((4, 3), (8, 6))],
    }
    assert held(found, 2)["m.column"] == [Box((2, 0), (4, 6))]
    assert "tp cuts 2 leaves" in found.assumptions[0]
    assert "the most it can be" in NamedLayout(layout("m.w"), asked("tp=2")).assumptions[0]


def test_tp_keeps_leaves_whole_of_which_the_checkpoint_has_only_boxes() -> None:
    boxes = BoxList(((Box((0, 0), (8, 3)), (0, 1)), (Box((0, 3), (8, 6)), (2, 3))))
    listed = LeafSpec("m.listed", "F32", (8, 6), "split", (boxes,))
    leaves = (listed, LeafSpec("m.row", "F32", (8, 6), "split", _cut(0, 1)))
    found = NamedLayout(Layout(4, leaves), asked("tp=2"))
    assert held(found, 1) == {"m.listed": [Box((0, 0), (8, 6))], "m.row": [Box((0, 3), (8, 6))]}
    assert found.assumptions[0].startswith("tp cuts 1 leaves")


def test_pp_divides_layers_in_order_and_counts_the_rest_at_both_ends() -> None:
    names = [f"{key}.layers.{n}.w" for key in ("m", "o") for n in range(5)]
    found = NamedLayout(layout("m.embed", *names), asked("pp=3"))
    stages = [sorted(held(found, rank)) for rank in range(3)]
    assert stages == [
        ["m.embed", "m.layers.0.w", "m.layers.1.w", "o.layers.0.w", "o.layers.1.w"],
        ["m.layers.2.w", "m.layers.3.w", "o.layers.2.w", "o.layers.3.w"],
        ["m.embed", "m.layers.4.w", "o.layers.4.w"],
    ]
    assert "5 layers (layers.0 to layers.4)" in found.assumptions[0]
    with pytest.raises(UsageError, match=r"pp=6: .* 5 numbered layers \(layers.0"):
        NamedLayout(layout(*names), asked("pp=6"))
    with pytest.raises(UsageError, match=r"0 numbered layers, fewer"):
        NamedLayout(layout("m.w"), asked("pp=2"))


def test_ep_divides_experts_by_number_or_by_their_first_dimension() -> None:
    names = [f"m.layers.0.experts.{n}.w" for n in range(3)]
    found = NamedLayout(layout("m.gate", "m.shared_experts.0.w", *names), asked("ep=2"))
    assert [name for name in held(found, 0) if "experts." in name] == [
        *names[:2],
        "m.shared_experts.0.w",
    ]
    assert held(found, 1).keys() == {"m.gate", "m.shared_experts.0.w", names[2]}
    stacked = NamedLayout(layout("m.experts.w", shape=(5, 2, 2)), asked("fsdp=2,ep=2"))
    boxes = [held(stacked, rank).get("m.experts.w", []) for rank in range(4)]
    assert [(box.start[0], box.stop[0]) for some in boxes for box in some] == [
        (0, 2),
        (3, 4),
        (2, 3),
        (4, 5),
    ]
    with pytest.raises(UsageError, match=r"ep=4: .* 3 experts"):
        NamedLayout(layout(*names), asked("ep=4"))


@pytest.mark.parametrize("text", ["dp=2,pp=2,fsdp=3", "tp=2,fsdp=2", "ep=2,dp=2,fsdp=2", "shard=7"])
def test_every_element_is_somewhere_and_sizes_are_those_of_the_boxes(text: str) -> None:
    names = [f"m.layers.{n}.experts.{e}.w" for n in range(3) for e in range(2)]
    found = NamedLayout(layout("m.embed", *names, shape=(7, 3)), asked(text))
    seen: dict[str, set[Any]] = {}
    for rank in range(found.wish.world):
        volume = 0
        for leaf, box in found.boxes(rank):
            rows = seen.setdefault(leaf.name, set())
            rows.update((r, c) for r in range(box.start[0], box.stop[0]) for c in range(3))
            volume += box.volume
        assert found.size_bytes(rank) == 4 * volume
    assert all(len(seen[leaf.name]) == 21 for leaf in found.layout.leaves)
    assert sum(alike for _, alike in found.different()) == found.wish.world
