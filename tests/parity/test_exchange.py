"""Parity goes from keeper to keeper over real sockets, and is exactly that of what was captured."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.peers.exchanging import MIB, Group
from support.peers.peering import close_pullers

SHAPES = {
    "a mirror": ([[3 * MIB + 5], [MIB - 100_000]], 1),
    "three, several images": ([[2 * MIB, 70_000], [5 * MIB + 1], [0, 9, 3 * MIB]], 1),
    "a member without images": ([[2 * MIB + 3], [], [4 * MIB], [17]], 1),
    "nobody else has images": ([[3 * MIB], [], []], 1),
    "copies of one": ([[2 * MIB + 9], [3 * MIB, 4], [0]], 2),
    "four, two losses": ([[6 * MIB + 1, 5], [3 * MIB], [], [9 * MIB, MIB]], 2),
    "five, two losses": ([[7 * MIB], [12 * MIB + 77], [1], [2 * MIB, 2 * MIB], [8 * MIB]], 2),
    "five, three losses": ([[7 * MIB], [11 * MIB + 77], [1], [2 * MIB, 2 * MIB], [8 * MIB]], 3),
    "several windows, handed on": ([[MIB], [41 * MIB + 3], [19 * MIB]], 2),
    "six, one loss": ([[n * MIB + n] for n in range(6)], 1),
    "six, three losses": ([[n * MIB + n, n] for n in range(6)], 3),
}


@pytest.fixture(autouse=True)
def closed_pullers() -> Iterator[None]:
    yield
    close_pullers()


@pytest.mark.parametrize("name", SHAPES)
def test_whatever_is_lost_comes_back_from_what_was_exchanged(name: str, arena_dir: Path) -> None:
    with Group(arena_dir, *SHAPES[name]) as group:
        group.run().check_all()


def test_what_was_exchanged_is_let_go_without_the_garbage_collector(arena_dir: Path) -> None:
    """With the headers of all images of a group: 15 MB a turn of 64 ranks with 3,000 leaves."""
    gc.collect()
    gc.disable()
    try:
        with Group(arena_dir, *SHAPES["four, two losses"]) as group:
            group.run()
            left = [weakref.ref(one) for one in group.exchanges.values()]
            group.exchanges.clear()
            assert not [one() for one in left if one() is not None]
    finally:
        gc.enable()
