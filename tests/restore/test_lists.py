"""Lists of all saved ranks, dealt out to any others: each item once, and few images opened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.restore import split_lists as subject
from holdfast.restore.split_lists import SavedLists, divide, report_lists
from holdfast.state.values import decode_items, encode_list

#: Of a data rank: its items.
PARTS = st.lists(st.lists(st.integers(), max_size=7), min_size=1, max_size=6)


class Images:
    """A checkpoint, as far as lists are concerned; it counts how often an image is looked into."""

    def __init__(self, own: list[dict[str, Any]]) -> None:
        self.own = own
        self.world = len(own)
        self.files = {rank: SimpleNamespace(name=f"image {rank}") for rank in range(len(own))}
        self.looks = [0] * len(own)

    def header(self, rank: int) -> Any:
        return SimpleNamespace(values=SimpleNamespace(size_bytes=100))

    def read(self, _: Any, rank: int) -> dict[str, Any]:
        self.looks[rank] += 1
        return {"shared": {}, "own": self.own[rank]}


@contextmanager
def _reading(images: Images, kept_bytes: int) -> Iterator[None]:
    with (
        mock.patch.object(subject, "read_values", images.read),
        mock.patch.object(subject, "KEPT_BYTES", kept_bytes),
    ):
        yield


def _deal(
    images: Images, wanted: list[holdfast.SplitList], kept_bytes: int = 1 << 20
) -> list[list[Any]]:
    """What each rank of the new world gets."""
    world = len(wanted)
    checkpoint: Any = images
    with _reading(images, kept_bytes):
        ranks = [SavedLists(checkpoint, rank, world) for rank in range(world)]
        told = [rank.read_share() for rank in ranks]
        for rank in ranks:
            rank.set_reports(told)
        here = [report_lists({"x": one}) for one in wanted]
        taken = [one.read_items(divide(here, rank)) for rank, one in enumerate(ranks)]
    return [decode_items(items["x"]) for items in taken]


def _saved(parts: list[list[int]], copies: int) -> Images:
    """Each part held by so many ranks, as tensor parallel ranks do; neighbours, or far apart."""
    world = len(parts)
    found: list[dict[str, Any]] = []
    for rank in range(world * copies):
        at = rank // copies if copies < 3 else rank % world
        named = {} if copies == 1 else {"rank": at, "world": world}
        found.append({"x": encode_list("x", holdfast.SplitList(parts[at], **named)), "rng": {}})
    return Images(found)


@given(
    parts=PARTS,
    copies=st.integers(1, 3),
    world=st.integers(1, 7),
    here=st.integers(1, 2),
    keeps=st.booleans(),
)
def test_items_are_dealt_out_in_their_order_to_any_ranks(
    parts: list[list[int]], copies: int, world: int, here: int, keeps: bool
) -> None:
    images = _saved(parts, copies)
    wanted = [holdfast.SplitList(rank=rank // here, world=world) for rank in range(world * here)]
    dealt = _deal(images, wanted, kept_bytes=(1 << 20) * keeps)
    assert dealt[::here] == dealt[here - 1 :: here]
    assert list(chain(*dealt[::here])) == list(chain(*parts))
    if world == len(parts):
        assert dealt[::here] == parts


def test_each_rank_opens_the_images_that_hold_its_items_and_a_share_to_count() -> None:
    images = _saved([[rank] * 4 for rank in range(12)], 1)
    _deal(images, [holdfast.SplitList() for _ in range(4)])
    assert images.looks == [1] * 12  # the share is what each rank gets, and was kept
    images = _saved([[rank] * 4 for rank in range(12)], 1)
    _deal(images, [holdfast.SplitList() for _ in range(4)], kept_bytes=250)  # two images
    assert sum(images.looks) == 16


def test_the_lowest_rank_of_a_data_rank_counts_and_others_are_reported() -> None:
    images = _saved([[1, 2], [3]], 2)
    images.own[1]["x"]["items"] = [9]
    assert _deal(images, [holdfast.SplitList()]) == [[1, 2, 3]]
    checkpoint: Any = images
    with _reading(images, 0):
        lists = SavedLists(checkpoint, 0, 1)
        lists.set_reports([lists.read_share()])
    assert lists.differing == ("x",)


@pytest.mark.parametrize("ranks", [[0, 1, 1], [1, 2, 0, 0], [0]])
def test_a_division_that_misses_a_data_rank_is_refused(ranks: list[int]) -> None:
    world = 2 if ranks[0] == 0 else 4
    own = [
        {"x": encode_list("x", holdfast.SplitList([rank], rank=rank, world=world))}
        for rank in ranks
    ]
    if {*ranks} == {*range(world)}:
        _deal(Images(own), [holdfast.SplitList()])
        return
    with pytest.raises(holdfast.FormatError, match="which make no whole"):
        _deal(Images(own), [holdfast.SplitList()])


@pytest.mark.parametrize(
    "document",
    [
        {"kind": "split_list", "rank": None, "world": None, "items": {}},
        {"kind": "split_list", "rank": 0, "world": None, "items": []},
        {"kind": "split_list", "rank": 2, "world": 2, "items": []},
        {"kind": "split_list", "rank": -1, "world": 2, "items": []},
        {"kind": "split_list", "rank": True, "world": 2, "items": []},
        {"kind": "split_list", "rank": 0, "world": 1, "items": [{"$leaf": "model.w"}]},
        {"kind": "split_list", "rank": 0, "world": 1, "items": [{"$unknown": 1}]},
    ],
)
def test_a_list_that_is_none_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(holdfast.FormatError):
        _deal(Images([{"x": document}]), [holdfast.SplitList()])


def test_values_of_a_rank_that_are_no_object_are_refused() -> None:
    own: Any = [["x"]]
    with pytest.raises(holdfast.FormatError, match="image 0"):
        _deal(Images(own), [holdfast.SplitList()])


@pytest.mark.parametrize(
    ("ranks", "places"),
    [
        ([None, None, None], [(0, 3), (1, 3), (2, 3)]),
        (["", None, None], [None, (0, 2), (1, 2)]),  # the first has no such list
        ([(0, 2), (1, 2), (0, 2)], [(0, 2), (1, 2), (0, 2)]),
        ([(0, 1), (0, 1), (0, 1)], [(0, 1)] * 3),
        ([(0, 2), (0, 2), (0, 2)], None),
        ([(0, 2), (1, 3), (2, 3)], None),
        ([(0, 3), None, (0, 3)], None),
    ],
)
def test_ranks_that_would_lose_items_between_them_are_told_before_anything_is_read(
    ranks: list[Any], places: list[tuple[int, int] | None] | None
) -> None:
    told = []
    for at in ranks:
        rank, world = at or (None, None)
        told.append(
            b"" if at == "" else report_lists({"x": holdfast.SplitList(rank=rank, world=world)})
        )
    if places is not None:
        assert [divide(told, rank).get("x") for rank in range(len(ranks))] == places
        return
    with pytest.raises(holdfast.UsageError, match="one and the same division"):
        divide(told, 0)


def test_a_list_that_only_some_ranks_have_is_theirs() -> None:
    own: list[dict[str, Any]] = [{}, {"x": encode_list("x", holdfast.SplitList([1, 2, 3]))}, {}]
    assert _deal(Images(own), [holdfast.SplitList() for _ in range(3)]) == [[1], [2], [3]]
