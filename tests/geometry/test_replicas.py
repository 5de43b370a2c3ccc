"""In so many turns all that several ranks hold is compared, and what differs is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.geometry import replicas as module
from holdfast.geometry.box import Box, cover_fault
from holdfast.geometry.layout import REPLICATE, Instance, Layout, LeafSpec, Mesh, Placement
from holdfast.geometry.replicas import (
    MOST_LEAVES,
    MOST_RANKS,
    TILE_BYTES,
    TURNS_PER_REPLICA,
    Replicas,
    Tile,
)
from support.models.layouts import layouts, mesh, unhurried

MIB = 1 << 20
Sums = dict[int, list[bytes]]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves of test size are cut into many."""
    monkeypatch.setattr(module, "TILE_BYTES", 16)
    module._cut.cache_clear()


def replicated(name: str, rows: int, world: int, spread: str = "split") -> LeafSpec:
    return LeafSpec(name, "F32", (rows, 64), spread, (Instance(mesh(world), (REPLICATE,)),))


def hybrid(name: str, replicas: int, shards: int, shape: tuple[int, ...] = (64, 32)) -> LeafSpec:
    grid = Mesh((replicas, shards), tuple(range(replicas * shards)))
    return LeafSpec(name, "F32", shape, "split", (Instance(grid, (REPLICATE, Placement(0))),))


def bytes_of(layout: Layout, tile: Tile) -> int:
    return tile.box.volume * layout.leaves[tile.leaf].itemsize


def sums_of(
    layout: Layout, turn: int, turns: int, changed: dict[int, set[tuple[int, Box]]] | None = None
) -> Sums:
    """What each rank tells when all hold the same, but for the tiles that are changed on some."""
    told: Sums = {}
    for rank in range(layout.world):
        bad = (changed or {}).get(rank, set())
        told[rank] = [
            b"".join(
                (hash((t.leaf, t.box)) % 2**31 + (rank + 1) * ((t.leaf, t.box) in bad)).to_bytes(
                    4, "little"
                )
                for t in tiles
            )
            for tiles in layout.replicas.tiles(rank, turn, turns)
        ]
    return told


def all_tiles(found: Replicas, rank: int, turns: int, first: int = 0) -> list[Tile]:
    return [
        tile
        for turn in range(first, first + turns)
        for group in found.tiles(rank, turn, turns)
        for tile in group
    ]


def _holds(layout: Layout, rank: int, leaf: int, box: Box) -> bool:
    return any(whole.contains(box) for whole, _ in layout.held(leaf, rank))


# ── what is taken ────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("small_tiles")
@given(layout=layouts(), turns=st.integers(1, 9), first=st.integers(0, 50))
@unhurried
def test_in_so_many_turns_all_that_is_held_alike_is_taken(
    layout: Layout, turns: int, first: int
) -> None:
    module._cut.cache_clear()
    for rank in range(layout.world):
        tiles = set(all_tiles(layout.replicas, rank, turns, first))
        for number, leaf in enumerate(layout.leaves):
            taken = [tile.box for tile in tiles if tile.leaf == number]
            assert all(_holds(layout, rank, number, box) for box in taken)
            if len(leaf.instances) > 1:
                continue  # cut otherwise, they hold no boxes that are the same
            here, elsewhere, counted = (np.zeros(leaf.shape, np.int64) for _ in range(3))
            for whole, _ in layout.held(number, rank):
                here[whole.slices()] = 1
            for other in set(range(layout.world)) - {rank}:
                for whole, _ in layout.held(number, other):
                    elsewhere[whole.slices()] = 1
            for box in taken:
                counted[box.slices()] += 1
            is_compared = leaf.spread == "split"
            assert np.array_equal(counted, here * elsewhere * is_compared)


@pytest.mark.usefixtures("small_tiles")
@given(layout=layouts(), turn=st.integers(0, 50), turns=st.integers(1, 9))
@unhurried
def test_ranks_that_hold_alike_take_the_same_at_once(layout: Layout, turn: int, turns: int) -> None:
    module._cut.cache_clear()
    told = sums_of(layout, turn, turns)
    assert layout.replicas.differences(told, turn, turns) == ([], 0)


def test_a_turn_takes_its_share_of_the_bytes_and_a_tile_at_most_besides() -> None:
    sizes = [1, 1, 3000, 700_000, 5, 9000, 2_000_000, 8]  # rows of 256 bytes
    leaves = tuple(replicated(f"w{n}", rows, 2) for n, rows in enumerate(sizes))
    layout, turns = Layout(2, leaves), 100
    total = sum(leaf.size_bytes for leaf in leaves)
    taken = [
        sum(bytes_of(layout, tile) for tile in layout.replicas.tiles(0, turn, turns)[0])
        for turn in range(turns)
    ]
    assert sum(taken) == total
    assert max(taken) <= total / turns + TILE_BYTES
    assert min(taken) >= total / turns - TILE_BYTES


def test_unasked_a_turn_takes_a_fiftieth_of_what_a_rank_copies() -> None:
    for replicas in (2, 3, 8):
        layout = Layout(replicas, (replicated("w", 400_000, replicas),))
        copied = sum(piece.box.volume * 4 for piece in layout.pieces(0))
        (tiles,) = layout.replicas.tiles(0, 7, None)
        assert sum(bytes_of(layout, tile) for tile in tiles) <= copied / 50 + TILE_BYTES


@pytest.mark.usefixtures("small_tiles")
def test_unasked_what_more_ranks_hold_takes_more_turns() -> None:
    # A weight that two hold each half of, and a norm that all four hold.
    layout = Layout(4, (replicated("norm", 200, 4), hybrid("w", 2, 2, (800, 32))))
    for turns, leaf in ((4 * TURNS_PER_REPLICA, 0), (2 * TURNS_PER_REPLICA, 1)):
        taken: list[Tile] = []
        for turn in range(turns):
            taken += [t for g in layout.replicas.tiles(3, turn, None) for t in g if t.leaf == leaf]
        assert len(taken) == len(set(taken)) > turns
        whole = layout.held(leaf, 3)[0][0]
        assert sum(tile.box.volume for tile in taken) == whole.volume


def test_there_is_nothing_to_compare_where_nothing_is_shared() -> None:
    cut = LeafSpec("w", "F32", (8, 8), "split", (Instance(mesh(4), (Placement(0),)),))
    whole = replicated("running_mean", 9, 2, spread="lowest")
    for layout in (Layout(1, (replicated("w", 9, 1),)), Layout(2, (whole,)), Layout(4, (cut,))):
        assert layout.replicas.is_empty
        assert layout.replicas.tiles(0, 3, 7) == []
    assert not Layout(2, (replicated("w", 9, 2),)).replicas.is_empty


@given(
    shape=st.lists(st.integers(1, 9), max_size=3).map(tuple), itemsize=st.sampled_from([1, 2, 8])
)
@pytest.mark.usefixtures("small_tiles")
@unhurried
def test_a_tile_is_one_run_of_bytes_and_not_large(shape: tuple[int, ...], itemsize: int) -> None:
    cut = module._Cut(shape, itemsize)
    parts = [cut.part(number) for number in range(len(cut.sizes))]
    assert [part.volume * itemsize for part in parts] == cut.sizes.tolist()
    assert cover_fault(Box.whole(shape), parts) is None
    for part in parts:
        assert part.volume * itemsize <= max(16, itemsize)
        partly = [d for d, extent in enumerate(part.shape) if extent < shape[d]]
        assert not partly or all(extent == 1 for extent in part.shape[: partly[-1]])


# ── what is found ────────────────────────────────────────────────────────────────────────────


def found_in(layout: Layout, turns: int, changed: dict[int, set[tuple[int, Box]]]) -> Counter[str]:
    """In words, what each of the turns finds."""
    found: Counter[str] = Counter()
    for turn in range(turns):
        told = sums_of(layout, turn, turns, changed)
        differing, others = layout.replicas.differences(told, turn, turns)
        assert others == 0
        for each in differing:
            right = "most" if each.is_known_which else "nobody knows"
            name = layout.leaves[each.leaf].name
            found[f"{name} {each.ranks} of {each.replicas}, {right}"] += 1
    return found


@pytest.mark.usefixtures("small_tiles")
def test_the_one_that_holds_what_most_do_not_is_named_in_one_of_the_turns() -> None:
    layout = Layout(4, (replicated("a", 3, 4), replicated("b", 5, 4)))
    tile = all_tiles(layout.replicas, 0, 6)[11]
    name = layout.leaves[tile.leaf].name
    changed = {2: {(tile.leaf, tile.box)}}
    assert found_in(layout, 6, changed) == {f"{name} (2,) of 4, most": 1}


@pytest.mark.usefixtures("small_tiles")
def test_of_two_that_differ_both_are_named() -> None:
    layout = Layout(2, (replicated("a", 3, 2),))
    tile = all_tiles(layout.replicas, 0, 6)[5]
    changed = {1: {(tile.leaf, tile.box)}}
    assert found_in(layout, 6, changed) == {"a (0, 1) of 2, nobody knows": 1}
    both = {rank: {(tile.leaf, tile.box)} for rank in (0, 1)}
    assert found_in(layout, 6, both) == {"a (0, 1) of 2, nobody knows": 1}


@pytest.mark.usefixtures("small_tiles")
def test_under_hybrid_sharding_only_ranks_with_the_same_shard_are_compared() -> None:
    layout = Layout(8, (hybrid("w", 4, 2),))
    replicas = layout.replicas
    tile = all_tiles(replicas, 5, 4)[0]  # rank 5 has the second half, as 1, 3 and 7 have
    assert found_in(layout, 4, {5: {(0, tile.box)}}) == {"w (5,) of 4, most": 1}
    assert all(tile not in all_tiles(replicas, rank, 4) for rank in (0, 2, 4, 6))


@pytest.mark.usefixtures("small_tiles")
def test_ranks_of_another_instance_with_the_same_boxes_are_compared_too() -> None:
    # As a norm under tensor parallelism: plain on each of two ranks, and cut over two others.
    pairs = tuple(Instance(Mesh((2,), ranks), (Placement(0),)) for ranks in ((0, 2), (1, 3)))
    layout = Layout(4, (LeafSpec("norm", "F32", (64,), "split", pairs),))
    tile = all_tiles(layout.replicas, 3, 4)[0]
    assert found_in(layout, 4, {3: {(0, tile.box)}}) == {"norm (2, 3) of 2, nobody knows": 1}


@pytest.mark.usefixtures("small_tiles")
def test_what_a_rank_did_not_tell_or_told_otherwise_is_no_difference() -> None:
    layout = Layout(3, (replicated("a", 3, 3), hybrid("b", 3, 1)))
    told = sums_of(layout, 1, 4)
    for nonsense in ([], [b""], [b"abc", b"abcd"], [told[1][0] + b"1234"], [b""] * 9):
        assert layout.replicas.differences(told | {1: nonsense}, 1, 4) == ([], 0)
    assert layout.replicas.differences({}, 1, 4) == ([], 0)
    without = {rank: sums for rank, sums in told.items() if rank != 1}
    assert layout.replicas.differences(without, 1, 4) == ([], 0)
    for nobody_else in ([told[0][0], b"abc", b""], [b"1", b"22", b"333"]):
        alone = {rank: [sums] for rank, sums in enumerate(nobody_else)}
        assert layout.replicas.differences(alone, 1, 4) == ([], 0)


@pytest.mark.usefixtures("small_tiles")
def test_where_all_differs_a_few_are_named_and_the_others_counted() -> None:
    count, world = MOST_LEAVES + 5, MOST_RANKS + 4
    layout = Layout(world, tuple(replicated(f"w{n:03}", 1, world) for n in range(count)))
    everything = {(t.leaf, t.box) for t in all_tiles(layout.replicas, 0, 1)}
    told = sums_of(layout, 0, 1, dict.fromkeys(range(world), everything))
    found, others = layout.replicas.differences(told, 0, 1)
    assert (len(found), others) == (MOST_LEAVES, 5)
    assert all(len(each.ranks) == MOST_RANKS and each.replicas == world for each in found)


def _large(replicas: int, shards: int, leaves: Sequence[tuple[int, ...]]) -> Layout:
    grid = Mesh((replicas, shards), tuple(range(replicas * shards)))
    where = (Instance(grid, (REPLICATE, Placement(0))),)
    specs = [LeafSpec(f"w{n:05}", "F32", shape, "split", where) for n, shape in enumerate(leaves)]
    return Layout(replicas * shards, tuple(specs))


def test_what_a_rank_tells_stays_small_at_thousands_of_ranks() -> None:
    # 64 replicas of 32 shards, 1200 leaves of 64 MiB: 2.4 GiB a rank.
    layout = _large(64, 32, [(4096, 4096)] * 1200)
    for rank in (0, 2047):
        (tiles,) = layout.replicas.tiles(rank, 9, None)
        assert sum(bytes_of(layout, tile) for tile in tiles) <= 2 * MIB
        assert len(tiles) * 4 <= 64  # bytes a save
    (tiles,) = layout.replicas.tiles(5, 9, 100)
    assert len(tiles) * 4 <= 100
    told = {rank: [bytes(4 * len(tiles))] for rank in range(2048)}
    told[37] = [b"\1" + bytes(4 * len(tiles) - 1)]
    found, _ = layout.replicas.differences(told, 9, 100)
    (each,) = found
    assert (each.ranks, each.replicas, each.is_known_which) == ((37,), 64, True)
