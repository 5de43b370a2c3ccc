"""Memory for parity suffices for every group of a division, and what does not fit is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ArenaError
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.parity.planning.budget import (
    WINDOW_BYTES,
    Capacity,
    capacity,
    check_room,
    passing_bytes,
    staging_bytes,
)
from holdfast.parity.planning.groups import MAX_GROUP, Division, GroupHost, divide
from holdfast.parity.planning.placement import StripePlacement, stored_by

MIB = 1 << 20
images = st.lists(st.integers(0, 40 * MIB), max_size=3).map(tuple)


@st.composite
def divisions(draw: st.DrawFn) -> Division:
    sizes = draw(st.lists(images, min_size=1, max_size=12))
    hosts = [GroupHost(f"h{n:02d}", "", of) for n, of in enumerate(sizes)]
    parity = draw(st.integers(1, 3))
    return divide(hosts, parity=parity, group_size=draw(st.integers(parity + 1, 8)))


@given(divisions())
def test_two_generations_of_every_members_rows_fit(division: Division) -> None:
    taken = capacity(division)
    for group in division.groups:
        placement = StripePlacement(tuple(host.image_bytes for host in group.hosts), group.parity)
        for member in range(placement.members):
            rows = sum(kept.size_bytes for kept in stored_by(placement, member))
            assert rows <= taken.rows
            if group.parity:
                assert 2 * rows + passing_bytes(group.parity) <= taken.shared


@given(divisions(), st.randoms())
def test_hosts_that_change_groups_need_no_more(division: Division, draw: object) -> None:
    hosts = [host for group in division.groups for host in group.hosts]
    sizes = [host.image_bytes for host in hosts]
    draw.shuffle(sizes)  # type: ignore[attr-defined]
    moved = [GroupHost(host.id, "", of) for host, of in zip(hosts, sizes, strict=True)]
    again = divide(
        moved,
        parity=division.asked,
        group_size=max(
            division.asked + 1, min(8, max(len(group.hosts) for group in division.groups))
        ),
    )
    if min(len(g.hosts) for g in again.groups) >= min(len(g.hosts) for g in division.groups):
        assert capacity(again).rows <= capacity(division).rows


def test_a_share_of_parity_is_m_of_n_minus_m() -> None:
    hosts = [GroupHost(f"h{n}", "", (1000 * MIB, 1000 * MIB)) for n in range(6)]
    assert capacity(divide(hosts, parity=2, group_size=6)) == Capacity(
        1000 * MIB, 2000 * MIB + 2 * 8 * MIB, 8 * MIB
    )
    assert capacity(divide(hosts, parity=1, group_size=6)).rows == 400 // 2 * 2 * MIB
    assert capacity(divide(hosts, parity=1, group_size=3)).rows == 1000 * MIB


def test_one_host_alone_takes_nothing() -> None:
    division = divide([GroupHost("a", "", (9,))], parity=1, group_size=2)
    assert capacity(division) == Capacity(0, 0, 0)
    check_room(division, {"a": 0})


def test_a_division_whose_parity_does_not_fit_is_refused_with_the_numbers() -> None:
    division = divide([GroupHost(one, "", (100 * MIB,)) for one in "abcd"], parity=1, group_size=2)
    check_room(division, dict.fromkeys("abcd", 200 * MIB))
    with pytest.raises(ArenaError, match=r"groups of 2 takes 200 MiB .* c has 199 MiB") as raised:
        check_room(division, {**dict.fromkeys("abd", 200 * MIB), "c": 200 * MIB - 1})
    assert raised.value.fields == {"needed_bytes": 200 * MIB, "free_bytes": 200 * MIB - 1}


def test_what_is_handed_on_and_received_takes_little_memory() -> None:
    assert [passing_bytes(parity) for parity in (1, 2, 3)] == [0, 16 * MIB, 32 * MIB]
    assert staging_bytes(MAX_GROUP) == 256 * MIB and WINDOW_BYTES % BLOCK_BYTES == 0
