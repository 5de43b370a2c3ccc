"""What a coordinator that takes over finds protected: complete rows, of one turn, in one half."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.format.manifest import Generation
from holdfast.parity.planning.protection import (
    CaptureDone,
    Cover,
    HeldSnapshot,
    HostShards,
    Takeover,
    take_over,
)


def what(name: str, incarnation: int = 1) -> CaptureDone:
    return CaptureDone(Generation(incarnation, int(name[1:])), name)


def whole(name: str, hosts: str, incarnation: int = 1) -> HeldSnapshot:
    """Each of these hosts had one rank when it was captured: a rank 0, b rank 1."""
    return HeldSnapshot(what(name, incarnation), len(hosts), True)


def part(name: str, hosts: str, incarnation: int = 1) -> HeldSnapshot:
    return whole(name, hosts, incarnation)._replace(is_whole=False)


def rows(
    name: str, half: int, keepers: str, members: str, *, parity: int = 1, ranks: str = ""
) -> list[HostShards]:
    """All the rows that these keepers have to have; ``ranks``: of others than the members."""
    of = frozenset("abcd".index(one) for one in ranks or members)
    return [
        HostShards(host, half, name, parity, frozenset(members), of)
        for host in keepers
        for _ in range(parity)
    ]


def taken(
    members: str,
    presents: Iterable[HeldSnapshot],
    *held: list[HostShards],
    restored: str = "",
    incarnation: int = 2,
) -> Takeover:
    return take_over(
        frozenset(members),
        tuple(presents),
        [row for some in held for row in some],
        restored=restored,
        incarnation=incarnation,
        round_id=7,
    )


def test_the_half_is_the_one_where_all_rows_are() -> None:
    for half in (0, 1):
        found = taken(
            "abcd",
            [whole("p5", "abc")],
            rows("p5", half, "abc", "abc"),
            rows("p5", 1 - half, "ad", "abcd"),
            restored="p5",
        )
        assert found.state.protected == Cover(what("p5"), frozenset("abc"))
        assert (found.state.half, found.state.round_id) == (half, 7)
        assert found.groups == (frozenset("abc"),)
        assert found.state.next == Cover(what("p5"), frozenset("abcd")), "and it is coded anew"


def test_of_two_that_are_complete_it_is_that_of_the_hosts_of_now() -> None:
    for half in (0, 1):
        found = taken(
            "abc",
            [whole("p5", "ab")],
            rows("p5", half, "abc", "abc"),
            rows("p5", 1 - half, "ab", "ab"),
        )
        assert found.state.half == half and found.state.next is None


def test_the_half_that_is_being_written_over_does_not_count() -> None:
    found = taken("abc", [whole("p5", "ab")], rows("p5", 1, "abc", "abc"), rows("p5", 0, "b", "ab"))
    assert found.state.half == 1


def test_a_host_counts_with_all_of_its_rows_or_not() -> None:
    torn = rows("p5", 0, "ab", "abc", parity=2) + rows("p5", 0, "c", "abc", parity=2)[:1]
    found = taken(
        "abc", [whole("p5", "abc"), whole("p3", "abc")], torn, rows("p3", 1, "abc", "abc", parity=2)
    )
    assert found.state.protected == Cover(what("p3"), frozenset("abc"))
    assert found.state.half == 1


def test_what_survives_more_losses_counts_and_of_equals_the_newer_one() -> None:
    presents = [whole("p3", "abc"), whole("p5", "abc")]
    older, newer = rows("p3", 0, "abc", "abc"), rows("p5", 1, "abc", "abc")
    assert taken("abc", presents, older, newer).state.half == 1
    assert taken("abc", presents, older, newer[:2]).state.half == 0
    assert taken("abc", presents, newer[:1]).state.protected is None


def test_with_hosts_lost_what_was_restored_from_stays_unless_something_own_is_protected() -> None:
    lost = [part("p5", "abc"), whole("p3", "ab"), whole("q6", "ab", incarnation=2)]
    old, parent = rows("p3", 0, "ab", "ab"), rows("p5", 1, "ab", "abc")
    found = taken("ab", lost, old, parent, restored="p5")
    assert found.state.protected == Cover(what("p5"), frozenset())
    assert found.state.half == 1
    own = rows("q6", 0, "ab", "ab")
    found = taken("ab", lost, own, parent, restored="p5")
    assert found.state.protected == Cover(what("q6", 2), frozenset("ab"))
    assert found.state.half == 0


def test_what_can_be_rebuilt_stays_although_something_newer_is_whole_and_not_protected() -> None:
    found = taken(
        "ab",
        [part("p5", "abc"), whole("q6", "ab", incarnation=2)],
        rows("p5", 0, "ab", "abc"),
        restored="q6",
        incarnation=3,
    )
    assert found.state.protected == Cover(what("p5"), frozenset()) and found.state.half == 0


def test_every_group_has_to_have_its_rows() -> None:
    two = rows("p5", 0, "ab", "ab") + rows("p5", 0, "cd", "cd")
    found = taken("abcd", [whole("p5", "abcd")], two)
    assert found.state.protected == Cover(what("p5"), frozenset("abcd"))
    assert set(found.groups) == {frozenset("ab"), frozenset("cd")}
    assert taken("abcd", [whole("p5", "abcd")], two[:2]).state.protected is None
    assert taken("abcd", [whole("p5", "abcd")], two[2:]).state.protected is None
    assert taken("abcd", [part("p5", "abcd")], two[:1]).state.protected is None
    found = taken("abcd", [whole("p5", "abcd")], two[1:])
    assert found.state.protected == Cover(what("p5"), frozenset()), "one row less, and no more"


def test_nothing_is_protected_where_nothing_can_be_rebuilt() -> None:
    assert taken("ab", []).state.protected is None
    found = taken("ab", [part("p5", "abc")], rows("p5", 1, "a", "abc"), restored="p5")
    assert found.state.protected is None and found.state.half == 1


def test_a_row_that_is_missing_is_made_anew_also_by_the_same_hosts() -> None:
    for restored, incarnation in (("", 1), ("p5", 2)):
        found = taken(
            "abc",
            [whole("p5", "abc")],
            rows("p5", 0, "ab", "abc"),
            restored=restored,
            incarnation=incarnation,
        )
        assert found.state.next == Cover(what("p5"), frozenset("abc"))
        assert (found.state.half, found.state.coding_half) == (0, 1), "what there is stays"
    torn = rows("p5", 0, "ab", "abc", parity=2) + rows("p5", 0, "c", "abc", parity=2)[:1]
    found = taken("abc", [whole("p5", "abc")], torn)
    assert found.state.next == Cover(what("p5"), frozenset("abc"))


def test_rows_of_all_ranks_count_wherever_their_images_are_looked_for() -> None:
    # c was lost, b has its image decoded, and it was coded with that; then c came back with its own
    # image and row.
    found = taken(
        "abc",
        [whole("p5", "abc")],
        rows("p5", 0, "ab", "ab", ranks="abc"),
        rows("p5", 1, "c", "abc"),
        restored="p5",
    )
    assert found.state.protected == Cover(what("p5"), frozenset("ab"))
    assert (found.state.half, found.state.coding_half) == (0, 1)
    assert found.state.next == Cover(what("p5"), frozenset("abc"))


def test_rows_that_lack_an_image_protect_nothing() -> None:
    found = taken("abc", [whole("p5", "abc")], rows("p5", 0, "ab", "ab"))
    assert found.state.protected is None
