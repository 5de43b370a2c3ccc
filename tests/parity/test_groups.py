"""Groups follow from the set of hosts, spread every domain, and move nobody who need not move."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise, permutations
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.format.manifest import Generation
from holdfast.parity.coding.codes import MAX_MEMBERS
from holdfast.parity.planning import groups
from holdfast.parity.planning.groups import Division, GroupHost, HostGroup, HostRoom, divide, settle
from holdfast.parity.planning.protection import CaptureDone, HeldSnapshot, HostShards, take_over
from support.peers import slow_groups


def named(count: int, domains: int = 0) -> list[GroupHost]:
    """Hosts h00, h01, ...; with ``domains``, in racks r0, r1, ... in turn."""
    return [GroupHost(f"h{n:02}", f"r{n % domains}" if domains else "") for n in range(count)]


def ids(division: Division) -> list[list[str]]:
    return [[host.id for host in group.hosts] for group in division.groups]


hosts = st.lists(st.sampled_from(["", "a", "b", "c", "d"]), min_size=1, max_size=24).map(
    lambda domains: [GroupHost(f"h{n:02}", domain) for n, domain in enumerate(domains)]
)
parities, group_sizes = st.integers(1, 3), st.integers(4, 9)


@given(hosts, parities, group_sizes, st.randoms())
def test_groups_follow_from_the_set_of_hosts(
    given_hosts: list[GroupHost], parity: int, group_size: int, shuffler: random.Random
) -> None:
    division = divide(given_hosts, parity=parity, group_size=group_size)
    mixed = list(given_hosts)
    shuffler.shuffle(mixed)
    assert divide(mixed, parity=parity, group_size=group_size) == division
    assert sorted(one for group in ids(division) for one in group) == [h.id for h in given_hosts]
    assert all(group == sorted(group) for group in ids(division))
    sizes = [len(group.hosts) for group in division.groups]
    assert max(sizes) - min(sizes) <= 1
    assert {group.parity for group in division.groups} == {min(parity, len(given_hosts) - 1)}
    assert min(sizes) > division.groups[0].parity
    assert max(sizes) <= MAX_MEMBERS


@given(hosts, parities, group_sizes)
def test_the_level_is_what_is_survived_and_no_less(
    given_hosts: list[GroupHost], parity: int, group_size: int
) -> None:
    given_hosts = given_hosts[:10]
    division = divide(given_hosts, parity=parity, group_size=group_size)
    level, every = division.level, [host.id for host in given_hosts]

    def survives_any(count: int) -> bool:
        return all(division.survives(set(lost)) for lost in combinations(every, count))

    assert survives_any(level.hosts)
    assert level.hosts == len(every) or not survives_any(level.hosts + 1)
    by_label: dict[object, set[str]] = {}
    for host in given_hosts:
        by_label.setdefault(host.label, set()).add(host.id)

    def survives_domains(count: int) -> bool:
        return all(
            division.survives(set().union(*lost)) for lost in combinations(by_label.values(), count)
        )

    assert survives_domains(level.domains)
    assert level.domains == len(by_label) or not survives_domains(level.domains + 1)


@given(hosts, parities, group_sizes)
def test_no_division_spreads_a_domain_wider(
    given_hosts: list[GroupHost], parity: int, group_size: int
) -> None:
    division = divide(given_hosts, parity=parity, group_size=group_size)
    labels = [host.label for host in given_hosts]
    for label in set(labels):
        counts = [[h.label for h in group.hosts].count(label) for group in division.groups]
        assert max(counts) == -(-labels.count(label) // len(division.groups))


@pytest.mark.parametrize(
    ("count", "parity", "group_size", "sizes"),
    [
        (7, 1, 4, [4, 3]),
        (8, 1, 4, [4, 4]),
        (4, 1, 4, [4]),
        (5, 1, 4, [5]),
        (6, 1, 4, [3, 3]),
        (9, 1, 4, [5, 4]),
        (5, 2, 3, [5]),
        (6, 2, 3, [3, 3]),
        (3, 1, 8, [3]),
        (2, 1, 4, [2]),
        (2, 2, 4, [2]),
        (1, 1, 4, [1]),
        (17, 2, 16, [17]),
        (128, 4, 128, [128]),
    ],
)
def test_sizes_are_as_close_to_the_preferred_as_can_be(
    count: int, parity: int, group_size: int, sizes: list[int]
) -> None:
    found = divide(named(count), parity=parity, group_size=group_size)
    assert sorted((len(group.hosts) for group in found.groups), reverse=True) == sizes


# ── what is said ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("given_hosts", "parity", "text", "missing"),
    [
        (named(4), 1, "any 1 of 4 hosts", ""),
        (named(5), 2, "any 2 of 5 hosts", ""),
        (named(7), 1, "any 1 of 7 hosts (1 in each of 2 groups)", ""),
        (named(8, 4), 1, "any 1 of 8 hosts (1 in each of 2 groups), any 1 of 4 domains", ""),
        (named(8, 4), 2, "any 2 of 8 hosts (2 in each of 2 groups), any 2 of 4 domains", ""),
        (named(2), 1, "any 1 of 2 hosts", ""),
        (named(1), 1, "no loss of a host", "one host alone has nobody to keep its parity"),
        (named(3), 3, "any 2 of 3 hosts", "parity=3 needs 4 hosts, there are 3"),
        (named(4, 2), 1, "any 1 of 4 hosts", "r1 has 2 hosts of one group of 4, and parity=1"),
        (named(4, 2), 2, "any 2 of 4 hosts, any 1 of 2 domains", ""),
        (named(4, 1), 1, "any 1 of 4 hosts", "r0 has 4 hosts of one group of 4"),
    ],
)
def test_what_is_reached_and_what_is_not_is_said(
    given_hosts: list[GroupHost], parity: int, text: str, missing: str
) -> None:
    level = divide(given_hosts, parity=parity, group_size=4).level
    assert level.text == text
    assert len(level.missing) == bool(missing)
    assert all(missing in sentence for sentence in level.missing)


def test_a_label_is_not_taken_for_an_id() -> None:
    division = divide([GroupHost("a"), GroupHost("b", "a")], parity=1, group_size=4)
    assert division.level.text == "any 1 of 2 hosts"


# ── hosts come and go ────────────────────────────────────────────────────────────────────────


def moved(earlier: Sequence[Sequence[str]], groups: Sequence[Sequence[str]]) -> int:
    """Hosts that were there and are in another group now, by the kindest way to count."""
    before = [set(group) for group in earlier]
    after = [set(group) for group in groups]
    width = max(len(before), len(after))
    before += [set()] * (width - len(before))
    after += [set()] * (width - len(after))
    stayed = max(
        sum(len(a & b) for a, b in zip(before, order, strict=True)) for order in permutations(after)
    )
    old, new = set().union(*before), set().union(*after)
    return len(old & new) - stayed


def divisions(every: list[str], sizes: Sequence[int]) -> list[list[list[str]]]:
    """All ways to divide hosts into groups of these sizes."""
    if not sizes:
        return [[]]
    return [
        [list(first), *rest]
        for first in combinations(every, sizes[0])
        for rest in divisions([one for one in every if one not in first], sizes[1:])
    ]


@given(st.data(), parities)
def test_nobody_moves_who_need_not(data: st.DataObject, parity: int) -> None:
    """Against all divisions of the same sizes that survive as many domains."""
    labels = data.draw(st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=2, max_size=8))
    everyone = [GroupHost(f"h{n}", label) for n, label in enumerate(labels)]
    before = data.draw(st.sets(st.sampled_from(everyone), min_size=1))
    after = data.draw(st.sets(st.sampled_from(everyone), min_size=1, max_size=7))
    size = data.draw(st.integers(parity + 1, 5))
    earlier = ids(divide(before, parity=parity, group_size=size))
    fresh = divide(after, parity=parity, group_size=size)
    found = divide(after, parity=parity, group_size=size, earlier=earlier)
    sizes = sorted(len(group.hosts) for group in fresh.groups)
    assert sorted(len(group.hosts) for group in found.groups) == sizes
    assert found.level.domains >= fresh.level.domains
    by_id = {host.id: host for host in after}
    least = min(
        moved(earlier, groups)
        for groups in divisions(sorted(by_id), sizes)
        if divide_level(groups, by_id, fresh) >= fresh.level.domains
    )
    assert moved(earlier, ids(found)) == least


def divide_level(groups: list[list[str]], by_id: dict[str, GroupHost], like: Division) -> int:
    parity = like.groups[0].parity
    made = tuple(HostGroup(tuple(by_id[one] for one in group), parity) for group in groups)
    return Division(made, parity).level.domains


@pytest.mark.parametrize("gone", range(12))
def test_a_host_that_is_lost_moves_nobody_and_one_that_replaces_it_takes_its_place(
    gone: int,
) -> None:
    before = divide(named(12, 4), parity=1, group_size=4)
    left = [host for host in named(12, 4) if host.id != f"h{gone:02}"]
    without = divide(left, parity=1, group_size=4, earlier=ids(before))
    assert moved(ids(before), ids(without)) == 0
    new = GroupHost("new", f"r{gone % 4}")
    again = divide([*left, new], parity=1, group_size=4, earlier=ids(without))
    assert moved(ids(without), ids(again)) == 0
    assert again.level == before.level
    place = next(n for n, group in enumerate(ids(before)) if f"h{gone:02}" in group)
    staying = set(ids(before)[place]) - {f"h{gone:02}"}
    assert any(set(group) == staying | {"new"} for group in ids(again))


def test_the_same_hosts_stay_as_they_are() -> None:
    odd = [["h00", "h05", "h06"], ["h01", "h02", "h03", "h04"]]
    found = divide(named(7), parity=1, group_size=4, earlier=odd)
    assert ids(found) == odd


def test_a_group_too_small_to_protect_itself_joins_another() -> None:
    before = ids(divide(named(6), parity=2, group_size=3))
    left = [host for host in named(6) if host.id != before[0][0]]
    found = divide(left, parity=2, group_size=3, earlier=before)
    assert [len(group) for group in ids(found)] == [5]


@pytest.mark.parametrize(
    ("now", "earlier", "group_size", "moves", "stay_together"),
    [
        # Two racks, each a group: one host of each changes places.
        ("a=x b=x c=y d=y", ["ab", "cd"], 2, 2, []),
        # Of many that could change places, two do.
        ("a=x b=x c=1 d=2 e=3 f=5 g=4 h=6", ["abcd", "efgh"], 4, 2, ["cd"]),
        # A host of the larger group moves to the smaller one, and nobody moves back.
        ("a=x b=x c=y d=y e=z", ["abc", "de"], 2, 1, ["de"]),
        # A group grew too large: of the rack that it has most of, one leaves.
        ("a=x b=x c=y d=z e=z f=w", ["abcd"], 3, 1, ["cd"]),
        # Each rack a group: what a group could give the others changes with every step of theirs.
        ("a=x b=x c=y d=y e=z f=z", ["ab", "cd", "ef"], 2, 3, []),
        ("a=x b=x c=y d=y e=z f=z g=w h=w", ["ab", "cd", "ef", "gh"], 2, 4, []),
        # What two groups exchange changes nothing between the two others.
        (
            "a=x b=x c=z d=y e=y f=z g=z h=z i=1 j=5 k=6 l=7",
            ["abc", "def", "ghi", "jkl"],
            3,
            4,
            [],
        ),
    ],
)
def test_as_few_hosts_move_as_let_a_domain_be_lost_again(
    now: str, earlier: list[str], group_size: int, moves: int, stay_together: list[str]
) -> None:
    those = [GroupHost(one[0], one[2:]) for one in now.split()]
    found = divide(those, parity=1, group_size=group_size, earlier=earlier)
    assert found.level.domains == 1
    assert moved([list(group) for group in earlier], ids(found)) == moves
    for together in stay_together:
        assert any(set(together) <= set(group) for group in ids(found))


def test_where_no_step_spreads_the_domains_the_fresh_groups_are_taken() -> None:
    labels = {"a": (True, "r"), "b": (True, "r")}
    fresh = [["a", "b"]]
    room = HostRoom(1, 2, 2)
    assert settle(labels, [["a", "b"]], room, fresh, parity=1, level=2) is fresh


@given(st.data(), st.integers(1, 3))
def test_every_host_is_where_the_search_through_all_steps_puts_it(
    data: st.DataObject, parity: int
) -> None:
    labels = data.draw(st.lists(st.sampled_from(["", *"abcdefgh"]), min_size=2, max_size=40))
    hosts = [GroupHost(f"h{n:02}", label) for n, label in enumerate(labels)]
    order = data.draw(st.permutations([host.id for host in hosts]))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(order)), max_size=8)))
    earlier = [order[a:b] for a, b in pairwise(cuts)]
    size = data.draw(st.integers(parity + 1, 9))
    now = data.draw(st.lists(st.sampled_from(hosts), min_size=1, unique=True))
    found = divide(now, parity=parity, group_size=size, earlier=earlier)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "settle", slow_groups.settle)
        assert divide(now, parity=parity, group_size=size, earlier=earlier) == found


# ── what it costs ────────────────────────────────────────────────────────────────────────────


def lines_of(work: Callable[[], object]) -> int:
    """How many lines run in the planning of parity: each time the same."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if "planning" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def exponent(costs: dict[int, int]) -> float:
    """The b of cost = a n^b that fits best."""
    n, cost = np.log([*costs]), np.log([*costs.values()])
    return float(np.polyfit(n, cost, 1)[0])


def in_racks(count: int) -> list[GroupHost]:
    return [GroupHost(f"h{n:05}", f"r{n // 16}") for n in range(count)]


def test_a_lost_rack_is_regrouped_at_a_cost_linear_in_the_hosts() -> None:
    """And a coordinator that takes over finds at such a cost what was protected."""
    regrouped, taken_over = {}, {}
    for count in (1024, 2048):
        earlier = ids(divide(in_racks(count), parity=2, group_size=8))
        left = [host for host in in_racks(count) if host.domain != "r3"]
        there = {host.id for host in left}
        rows = [
            HostShards(one, 0, "a", 2, frozenset(group), frozenset({number}))
            for number, group in enumerate(earlier)
            for one in group
            for _ in range(2)
            if one in there
        ]
        snapshot = HeldSnapshot(CaptureDone(Generation(1, 1), "a"), len(earlier), True)

        def take(rows: Any = rows, there: Any = there, snapshot: Any = snapshot) -> None:
            found = take_over(
                frozenset(there), [snapshot], rows, restored="", incarnation=1, round_id=0
            )
            assert len(found.groups) == snapshot.world

        def divide_again(left: Any = left, earlier: Any = earlier) -> None:
            level = divide(left, parity=2, group_size=8, earlier=earlier).level
            assert level.hosts == 2

        regrouped[count], taken_over[count] = lines_of(divide_again), lines_of(take)
    assert exponent(regrouped) < 1.1 and exponent(taken_over) < 1.1


# ── what is refused ──────────────────────────────────────────────────────────────────────────


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(UsageError, match="there are no hosts"):
        divide([], parity=1, group_size=4)
    with pytest.raises(UsageError, match="several hosts are called 'h00'"):
        divide([*named(2), GroupHost("h00")], parity=1, group_size=4)
    with pytest.raises(UsageError, match="parity=0: groups are for a parity of 1 or more"):
        divide(named(2), parity=0, group_size=4)
    for size in (2, 129):
        with pytest.raises(UsageError, match=f"group_size={size}: with parity=2, a group has 3"):
            divide(named(2), parity=2, group_size=size)
    with pytest.raises(UsageError, match="'h01' is in several of the earlier groups"):
        divide(named(2), parity=1, group_size=4, earlier=[["h00", "h01"], ["h01", "h01"]])
