"""What can be restored, and from where, follows from what the hosts hold, whoever asks."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.errors import FormatError, NotFound, PeerError
from holdfast.format.manifest import AttemptId, ImageId
from holdfast.parity.planning.placement import stored_by
from holdfast.protocol.messages import HoldingPart, Inventory
from holdfast.restore.planning.candidates import Candidate
from holdfast.restore.planning.holdings import (
    CodedGroup,
    GroupCoding,
    GroupMember,
    Recovery,
    ShardHolding,
    decode_choice,
    encode_choice,
    image_name,
)
from holdfast.restore.planning.selection import Inventories, find_all
from support.peers.lost_hosts import origins

BLOCK = 1 << 20


class Part(HoldingPart, frozen=True):
    """A part with the parity shards that its host holds, as their records describe them."""

    rows: tuple[ShardHolding, ...] = ()


def rows_of(part: HoldingPart) -> tuple[ShardHolding, ...]:
    return part.rows if isinstance(part, Part) else ()


def known_of(
    holdings: Iterable[Inventory], stored: Iterable[Candidate] = (), **line: Any
) -> Inventories:
    """What is known when the records of all parity shards are read."""
    there = tuple(holdings)
    parts = [(one.host, part) for one in there for part in one.parts]
    rows = {(host, part.attempt_id): rows_of(part) for host, part in parts}
    return Inventories(there, tuple(stored), rows=rows, **line)


def image(rank: int, blocks: int = 3, seal: str = "a") -> ImageId:
    return ImageId(
        rank, 4096 + blocks * BLOCK - 4096 * (rank % 3), f"h{seal}{rank}", f"t{seal}{rank}"
    )


def coding(hosts: dict[str, list[ImageId]], parity: int) -> GroupCoding:
    members = (
        GroupMember(host, tuple(CodedGroup(one, 4096) for one in images))
        for host, images in sorted(hosts.items())
    )
    return GroupCoding(tuple(members), parity)


def group(
    hosts: dict[str, list[ImageId]],
    parity: int,
    *,
    step: int = 7,
    attempt: str = "a7",
    world: int = 0,
) -> list[Inventory]:
    """What the hosts of one group hold when all is well."""
    made = coding(hosts, parity)
    holdings = []
    for number, (host, images) in enumerate(sorted(hosts.items())):
        rows = tuple(
            ShardHolding(made, kept.stripe, kept.row) for kept in stored_by(made.placement, number)
        )
        count = world or sum(map(len, hosts.values()))
        part = Part(AttemptId(1, step, attempt, count, "layout"), tuple(images), rows=rows)
        holdings.append(Inventory(host, (part,), {1: None}))
    return holdings


def groups(*shapes: tuple[int, int], per_host: int = 1) -> list[Inventory]:
    """Groups of (hosts, parity), with images of so many ranks on each host."""
    world = per_host * sum(size for size, _ in shapes)
    ranks, found = iter(range(world)), list[Inventory]()
    for number, (size, parity) in enumerate(shapes):
        hosts = {
            f"{chr(97 + number)}{n}": [image(next(ranks)) for _ in range(per_host)]
            for n in range(size)
        }
        found += group(hosts, parity, world=world)
    return found


def find(holdings: list[Inventory], *stored: Candidate) -> list[Recovery]:
    return list(known_of(holdings, stored, parents={1: None}).find().recoveries)


def less(holdings: list[Inventory], lost: Any) -> list[Inventory]:
    return [one for one in holdings if one.host not in lost]


def without_images(holding: Inventory, *ranks: int) -> Inventory:
    (part,) = holding.parts
    kept = tuple(one for one in part.images if one.rank not in ranks)
    return replace(holding, parts=(replace(part, images=kept),))


def told(recovery: Recovery, holdings: list[Inventory]) -> tuple[Recovery, list[str]]:
    """The recovery as another rank has it from rank 0 and from hosts, and the hosts it asks."""
    asked: list[str] = []

    def ask(host: str, attempt: str) -> dict[int, ImageId]:
        asked.append(host)
        parts = [part for one in holdings if one.host == host for part in one.parts]
        return {
            i.rank: i for part in parts if part.attempt_id.attempt == attempt for i in part.images
        }

    return decode_choice(encode_choice(recovery), ask), asked


def check_told(recovery: Recovery, holdings: list[Inventory]) -> None:
    found, _ = told(recovery, holdings)
    assert replace(found, sources=tuple(found.sources)) == recovery


def check_sources(recovery: Recovery, holdings: list[Inventory]) -> None:
    """Every image comes from where it is, or from enough that is there, all of one attempt."""
    check_told(recovery, holdings)
    there = {one.host: one for one in holdings}
    part_of = {
        host: next(p for p in one.parts if p.attempt_id.attempt == recovery.candidate.attempt)
        for host, one in there.items()
        if any(p.attempt_id.attempt == recovery.candidate.attempt for p in one.parts)
    }
    assert set(recovery.holders) == part_of.keys()
    assert [one.rank for one in recovery.sources] == list(range(recovery.world))
    for source in recovery.sources:
        for host in source.hosts:
            assert source.image in part_of[host].images
        if source.decoding is None:
            continue
        way = source.decoding
        assert not source.hosts
        assert way.coding.members[way.member].images[way.image].image == source.image
        assert way.member in way.absent
        for row in way.rows:
            for host in row.hosts:
                assert ShardHolding(way.coding, row.stripe, row.row) in rows_of(part_of[host])
        placement = way.coding.placement
        kept = {(row.stripe, row.row) for row in way.rows}
        for stripe in range(placement.members):
            numbers = [placement.number(n, stripe) for n in range(placement.members)]
            data = [n for n in range(placement.members) if n not in way.absent]
            columns = placement.columns
            usable = [
                k
                for n, k in enumerate(numbers)
                if (n in data if k < columns else (stripe, k - columns) in kept)
            ]
            assert len(usable) >= columns


# ── it is restorable when the mathematics says so ────────────────────────────────────────────

SHAPES = [
    [(2, 1)],
    [(3, 1)],
    [(4, 1)],
    [(3, 2)],
    [(4, 2)],
    [(5, 2)],
    [(5, 3)],
    [(2, 1), (3, 1)],
    [(3, 1), (4, 2)],
    [(3, 2), (3, 2)],
]


@pytest.mark.parametrize("per_host", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_of_every_set_of_lost_hosts_just_those_within_parity_are_survived(
    shape: list[tuple[int, int]], per_host: int
) -> None:
    holdings = groups(*shape, per_host=per_host)
    names = [one.host for one in holdings]
    for count in range(len(names) + 1):
        for lost in combinations(names, count):
            left = less(holdings, lost)
            of_group = [
                sum(host.startswith(chr(97 + n)) for host in lost) for n in range(len(shape))
            ]
            holds = all(k <= m for k, (_, m) in zip(of_group, shape, strict=True))
            found = find_all(known_of(left))
            assert bool(found.recoveries) == holds, (lost, found)
            if left:
                assert bool(found.refusals) != holds
            for recovery in found.recoveries:
                check_sources(recovery, left)
                spare = (m - k for k, (_, m) in zip(of_group, shape, strict=True))
                assert recovery.survives == min(spare)
                assert recovery.candidate.held == recovery.world - per_host * count


def test_a_second_loss_is_the_same_question_with_one_host_fewer() -> None:
    known = known_of(groups((5, 2)), parents={1: None})
    (first,) = known.find().recoveries
    assert (first.survives, origins(first)) == (2, "1-7: 5 of 5 images from memory")
    for lost in ("a1", "a3"):
        error = PeerError("gone", peer=lost, path="/images/a7/1")
        known = known.without(first.candidate, error.told_fields)
        (first,) = known.find().recoveries
    assert first.survives == 0
    assert origins(first) == "1-7: 3 of 5 images from memory, of ranks 1, 3 decoded from parity"
    known = known.without(first.candidate, {"peer": "a0"})
    found = known.find()
    assert not found.recoveries
    assert "a0, a1, a3 did not answer" in found.refusals[0].reason


@settings(max_examples=150)
@given(st.data())
def test_what_is_said_to_be_survived_is(data: st.DataObject) -> None:
    """Also where rows and images are missing here and there, or were made anew elsewhere."""
    shape = data.draw(st.sampled_from(SHAPES))
    holdings = groups(*shape)
    draw = random.Random(data.draw(st.integers(0, 1 << 32)))
    holdings = [_with_gaps(one, draw, share=0.15) for one in holdings]
    copied = draw.choice(holdings)
    at = draw.randrange(len(holdings))
    holdings[at] = _with_images(holdings[at], copied.parts[0].images)
    for recovery in find(holdings):
        check_sources(recovery, holdings)
        for lost in combinations([one.host for one in holdings], recovery.survives):
            assert find(less(holdings, lost)), (lost, recovery)


def _with_gaps(holding: Inventory, draw: random.Random, *, share: float) -> Inventory:
    (part,) = holding.parts
    images = tuple(one for one in part.images if draw.random() > share)
    rows = tuple(one for one in rows_of(part) if draw.random() > share)
    return replace(holding, parts=(replace(part, images=images, rows=rows),))


def _with_images(holding: Inventory, images: tuple[ImageId, ...]) -> Inventory:
    (part,) = holding.parts
    both = tuple(dict.fromkeys((*part.images, *images)))
    return replace(holding, parts=(replace(part, images=both),))


def test_a_copy_on_another_host_survives_one_loss_without_parity() -> None:
    both = Part(AttemptId(1, 7, "a7", 1, "layout"), (image(0),))
    (found,) = find([Inventory("a", (both,)), Inventory("b", (both,))])
    assert (found.sources[0].hosts, found.survives) == (("a", "b"), 1)
    assert not found.candidate.is_spread


def test_an_image_that_lies_on_one_host_of_two_is_not_near_to_all_ranks() -> None:
    part = Part(AttemptId(1, 7, "a7", 1, "layout"), (image(0),))
    (found,) = find([Inventory("a", (part,)), Inventory("b")])
    assert found.candidate.is_spread
    (found,) = find([Inventory("a", (part,))])
    assert not found.candidate.is_spread


def test_a_host_that_lost_its_image_still_gives_its_parity() -> None:
    holdings = groups((4, 2))
    holdings[1] = without_images(holdings[1], 1)
    (found,) = find(holdings)
    way = found.sources[1].decoding
    assert way is not None
    assert (way.absent, len(way.rows), found.survives) == ((1,), 8, 1)


def test_a_row_that_is_lost_counts_in_its_stripe_alone() -> None:
    holdings = groups((3, 1))
    (part,) = holdings[2].parts
    holdings[2] = replace(holdings[2], parts=(replace(part, rows=()),))
    (found,) = find(holdings)
    assert found.survives == 0
    made = rows_of(part)[0].coding
    for lost in (0, 1, 2):
        # What is in stripe 2, whose parity was on host 2, cannot be decoded.
        needs = {n for n in range(3) if made.placement.number(lost, n) < 2}
        left = less(holdings, [f"a{lost}"])
        assert bool(find(left)) == (2 not in needs or lost == 2)


def test_a_host_without_images_is_no_loss_where_it_keeps_nothing() -> None:
    hosts = {"a": [image(0)], "b": [image(1)], "c": []}
    left = less(group(hosts, 1), ["c"])
    (found,) = find(left)
    assert found.candidate.held == 2


def test_a_host_alone_with_its_parity_elsewhere_survives_the_loss_of_any_one() -> None:
    holdings = group({"a": [image(0)], "b": []}, 1)
    (found,) = find(holdings)
    assert found.survives == 1
    made = rows_of(holdings[1].parts[0])[0].coding
    assert [made.row_bytes(stripe) for stripe in (0, 1)] == [0, image(0).image_bytes - 4096]
    (found,) = find(holdings[1:])
    assert (found.candidate.held, found.candidate.where) == (0, "memory")
    known = known_of(holdings[1:], parents={1: None})
    assert known.without(found.candidate, {}).find().recoveries == ()


def test_of_two_codings_of_one_attempt_rows_are_not_mixed_and_the_better_is_taken() -> None:
    """The attempt was coded again by the hosts that were left: the old rows are still there."""
    holdings = groups((4, 1))
    second = {f"a{n}": [image(n)] for n in (0, 1, 2)} | {"e0": [image(3)]}
    again = {one.host: one.parts[0] for one in group(second, 2, world=4)}
    more = {host: rows_of(part) for host, part in again.items()}
    both = [
        Inventory(
            host,
            tuple(replace(part, rows=(*rows_of(part), *more.get(host, ()))) for part in one.parts),
        )
        for one in holdings
        for host in [one.host]
    ] + [Inventory("e0", (again["e0"],))]
    for lost in combinations(["a0", "a1", "a2"], 2):  # too many for the first, not for the second
        left = less(both, lost)
        (found,) = find(left)
        check_sources(found, left)
        assert {one.decoding.coding.parity for one in found.sources if one.decoding} == {2}
    assert not find(less(both, ["a0", "a1", "a2"]))


# ── never a mixture ──────────────────────────────────────────────────────────────────────────


def test_images_and_parity_of_two_attempts_never_meet() -> None:
    old = {f"a{n}": [image(n, seal="o")] for n in range(3)}
    new = {f"a{n}": [image(n, seal="n")] for n in range(3)}
    before, after = group(old, 1, attempt="old"), group(new, 1, attempt="new")
    for lost in product([False, True], repeat=6):
        holdings = [
            Inventory(
                f"a{n}",
                (*(() if lost[n] else before[n].parts), *(() if lost[n + 3] else after[n].parts)),
            )
            for n in range(3)
        ]
        survived = {("old", "new")[half] for half in (0, 1) if sum(lost[3 * half :][:3]) <= 1}
        found = find(holdings)
        assert {one.candidate.attempt for one in found} == survived
        for one in found:
            check_sources(one, holdings)
            assert {(s.image or image(0)).header_xxh3[1] for s in one.sources} == {
                one.candidate.attempt[0]
            }


def test_parts_that_contradict_each_other_are_different_attempts() -> None:
    first = Part(AttemptId(1, 7, "a7", 2, "layout"), (image(0),))
    for other in (
        replace(first.attempt_id, layout="another"),
        replace(first.attempt_id, step=8),
        replace(first.attempt_id, incarnation=2),
        replace(first.attempt_id, world=3),
    ):
        holdings = [
            Inventory("a", (first,)),
            Inventory("b", (Part(other, (image(1),)),)),
        ]
        assert find(holdings) == []


@pytest.mark.promise
def test_images_of_one_rank_that_differ_are_both_left_alone() -> None:
    holdings = groups((3, 1))
    (part,) = holdings[0].parts
    holdings[0] = replace(holdings[0], parts=(replace(part, images=(image(1, seal="x"),)),))
    assert find(holdings) == []
    (refusal,) = find_all(known_of(holdings)).refusals
    assert refusal.reason.endswith("a0, a1 hold different images of rank 1")


def test_not_even_decoded_when_hosts_hold_different_images_of_a_rank() -> None:
    holdings = groups((4, 2))
    holdings[3] = _with_images(holdings[3], (image(1, seal="x"),))
    assert find(holdings) == []
    assert find(less(holdings, ["a3"]))


def test_a_group_that_coded_another_image_does_not_vouch_for_this_one() -> None:
    holdings = groups((4, 2))
    (part,) = holdings[0].parts
    holdings[0] = replace(holdings[0], parts=(replace(part, images=(image(0, seal="x"),)),))
    (found,) = find(holdings)
    assert found.sources[0].image == image(0, seal="x")
    assert found.survives == 0
    (found,) = find(less(holdings, ["a1"]))  # to the group, image 0 is lost as well
    assert found.sources[1].decoding is not None
    assert found.sources[1].decoding.absent == (0, 1)
    assert not find(less(holdings, ["a1", "a2"]))


def test_a_short_image_needs_the_parity_of_its_own_stripe_only() -> None:
    hosts = {"a": [image(0, blocks=1)], "b": [image(1)], "c": [image(2)]}
    holdings = group(hosts, 1)
    (part,) = holdings[2].parts
    holdings[2] = replace(holdings[2], parts=(replace(part, rows=()),))
    assert find(less(holdings, ["a"]))  # all of it is in stripe 1, whose parity is on b
    assert not find(less(holdings, ["b"]))


# ── order ────────────────────────────────────────────────────────────────────────────────────


def stored(step: int, attempt: str, incarnation: int = 1) -> Candidate:
    return Candidate(incarnation, step, "storage", attempt, "seal")


def test_memory_comes_before_storage_and_a_newer_step_before_both() -> None:
    holdings = groups((3, 1))
    found = find(holdings, stored(7, "a7"), stored(9, "a9"), stored(5, "a5"))
    assert [(one.candidate.step, one.candidate.where) for one in found] == [
        (9, "storage"),
        (7, "memory"),
        (7, "storage"),
        (5, "storage"),
    ]
    assert origins(found[0]) == "1-9 from storage"


@pytest.mark.promise
def test_what_cannot_be_decoded_comes_from_storage_if_it_is_of_this_attempt() -> None:
    left = less(groups((3, 1)), ["a0", "a1"])
    first, second = find(left, stored(7, "a7"))
    assert (first.candidate.where, first.candidate.held, first.candidate.seal) == (
        "storage",
        1,
        "seal",
    )
    assert origins(first) == "1-7: 1 of 3 images from memory, of ranks 0, 1 from storage"
    assert second == Recovery(stored(7, "a7"))
    assert [one.sources for one in find(left, stored(7, "another"))] == [()]
    assert [one.sources for one in find(left, stored(8, "a7"))] == [()]


def test_abandoned_generations_are_left_out_and_can_be_asked_for_by_name() -> None:
    holdings = tuple(groups((3, 1)))
    known = known_of(holdings, (stored(6, "a6"),), parents={1: None, 2: (1, 6)})
    assert [one.candidate.step for one in known.find().recoveries] == [6]
    assert [one.candidate.step for one in known.find("1-7").recoveries] == [7]
    assert known.find(7).recoveries == ()
    assert {one.step for one in known.candidates()} == {6, 7}
    lacking = replace(known, holdings=tuple(less(list(holdings), ["a0", "a1"])))
    assert lacking.find().refusals == lacking.find(7).refusals == ()
    assert len(lacking.find("1-7").refusals) == 1


def test_the_line_is_known_by_storage_first_and_by_every_host() -> None:
    """A host that was not told where an incarnation went on from does not hide that it did."""
    holdings = groups((3, 1))
    told = [
        replace(holdings[0], parents={1: None, 2: (1, 7)}),
        replace(holdings[1], parents={2: None}),
        holdings[2],
    ]
    for order in (told, told[::-1]):
        assert len(known_of(order).find().recoveries) == 1
        assert (1, 7) in known_of(order).line
    by_storage = known_of(told, parents={2: (1, 6)})
    assert not by_storage.find().recoveries
    assert by_storage.line.is_abandoned((1, 7))
    assert Inventories(parents={1: None}, unreadable=(2,)).line.missing == 2


@given(st.randoms(use_true_random=False))
def test_the_answer_is_the_same_in_any_order_of_what_is_told(draw: random.Random) -> None:
    holdings = less(groups((4, 2), (3, 1), per_host=2), [draw.choice(["a0", "b1", "a3"])])
    older = group({f"a{n}": [image(n)] for n in range(4)}, 1, step=6, attempt="a6")
    listed = [stored(6, "a6"), stored(7, "x"), stored(4, "a4")]
    first = known_of((*holdings, *older), listed, parents={1: None}).find()
    assert len(first.recoveries) == 5
    shuffled = [_shuffled(one, draw) for one in draw.sample([*holdings, *older], len(holdings) + 4)]
    draw.shuffle(listed)
    again = known_of(shuffled, listed, parents={1: None}).find()
    assert again == first
    for recovery in first.recoveries:
        check_told(recovery, [*holdings, *older])


def _shuffled(holding: Inventory, draw: random.Random) -> Inventory:
    parts = [
        replace(
            part,
            images=tuple(draw.sample(part.images, len(part.images))),
            rows=tuple(draw.sample(rows_of(part), len(rows_of(part)))),
        )
        for part in holding.parts
    ]
    return replace(holding, parts=tuple(parts))


# ── what is left when a source failed ────────────────────────────────────────────────────────


def test_an_image_whose_bytes_are_wrong_is_decoded_instead() -> None:
    known = known_of(groups((3, 1)), parents={1: None})
    (first,) = known.find().recoveries
    name = image_name("a1", "a7", 1)
    for key in ("image", "path"):
        (second,) = known.without(first.candidate, {key: name}).find().recoveries
        assert [one.rank for one in second.sources if one.decoding] == [1]
        assert second.holders == ("a0", "a1", "a2")


def test_a_host_that_has_an_image_no_more_is_not_dropped_with_it() -> None:
    known = known_of(groups((3, 1)), parents={1: None})
    (first,) = known.find().recoveries
    fields = {"peer": "a1", "path": "/images/a7/1"}
    # 503: it never had a place for a connection, see tests/transport/test_lines.py
    for status, holders in ((410, 3), (404, 3), (0, 2), (503, 2)):
        less_known = known.without(first.candidate, fields | {"status": status})
        (second,) = less_known.find().recoveries
        assert len(second.holders) == holders
        assert [one.rank for one in second.sources if one.decoding] == [1]
    gone = {"peer": "a1", "path": "/parity/a7/1/0", "status": 410}
    assert len(known.without(first.candidate, gone).holdings) == 2


def test_an_error_that_names_nothing_speaks_against_all_of_the_candidate() -> None:
    holdings = groups((3, 1)) + groups((3, 1))
    old = group({f"a{n}": [image(n)] for n in range(3)}, 1, step=6, attempt="a6")
    known = known_of((*holdings, *old), (stored(7, "a7"),), parents={1: None})
    steps = []
    while found := known.find().recoveries:
        candidate = found[0].candidate
        steps.append((candidate.step, candidate.where))
        known = known.without(candidate, NotFound("gone", path="/somewhere").told_fields)
    assert steps == [(7, "memory"), (7, "storage"), (6, "memory")]


def test_what_failed_in_part_from_storage_is_tried_from_storage_alone() -> None:
    known = known_of(less(groups((3, 1)), ["a0", "a1"]), (stored(7, "a7"),), parents={1: None})
    (mixed, alone) = known.find().recoveries
    known = known.without(mixed.candidate, {})
    assert known.find().recoveries == (alone,)
    assert known.without(alone.candidate, {}).find().recoveries == ()


@settings(max_examples=60)
@given(st.data())
def test_there_is_always_less_than_before(data: st.DataObject) -> None:
    known = known_of(groups((4, 2)), (stored(7, "a7"), stored(3, "a3")), parents={1: None})
    names = [None, "a0", "a1", "a2", "nobody"]
    images = [None, image_name("a1", "a7", 1), image_name("a1", "a7", 2), "elsewhere"]
    for _ in range(20):
        found = known.find().recoveries
        if not found:
            return
        fields = {
            "peer": data.draw(st.sampled_from(names)),
            "image": data.draw(st.sampled_from(images)),
        }
        fewer = known.without(found[0].candidate, fields)
        assert fewer != known
        known = fewer
    pytest.fail("it never ended")


# ── why not ──────────────────────────────────────────────────────────────────────────────────


def test_the_reason_names_the_hosts_that_are_missing_and_what_parity_replaces() -> None:
    holdings = less(groups((4, 1)), ["a1"])
    holdings[0] = without_images(holdings[0], 0)
    (refusal,) = find_all(known_of(holdings)).refusals
    assert refusal.reason == (
        "the image of rank 0 was on a0; of its group (a0, a1, a2, a3) a1 did not answer and a0 no "
        "longer had what was captured there, and its parity replaces 1; the image of rank 1 was on "
        "a1; of its group (a0, a1, a2, a3) a1 did not answer and a0 no longer had what was "
        "captured there, and its parity replaces 1"
    )


def test_the_reason_says_when_there_is_no_parity_at_all_and_does_not_go_on_for_ever() -> None:
    part = Part(AttemptId(1, 7, "a7", 10**15, "layout"), (image(0),))
    (refusal,) = find_all(known_of([Inventory("a", (part,))])).refusals
    assert "rank 1 was in the memory of no host that answered, and no parity" in refusal.reason
    assert refusal.reason.endswith("; and so on")


def test_the_reason_says_when_it_is_parity_that_is_lacking() -> None:
    holdings = [without_images(one, 0) for one in groups((3, 1))]
    for at, holding in enumerate(holdings):
        (part,) = holding.parts
        holdings[at] = replace(holding, parts=(replace(part, rows=rows_of(part)[: at == 0]),))
    (refusal,) = find_all(known_of(holdings)).refusals
    assert refusal.reason.endswith(
        "of its group (a0, a1, a2) a0 no longer had what was captured there and too little of its "
        "parity was left, and its parity replaces 1"
    )


def test_a_part_of_no_ranks_is_nothing() -> None:
    assert find([Inventory("a", (Part(AttemptId(1, 7, "a7", 0, "layout")),))]) == []


@pytest.mark.parametrize(
    ("hosts", "parity"),
    [
        ({"a": [0]}, 1),
        ({"a": [0], "b": [1]}, 2),
        ({"a": [0], "b": [1]}, 0),
        ({"a": [0], "b": [0]}, 1),
    ],
)
def test_what_is_no_group_cannot_be_told(hosts: dict[str, list[int]], parity: int) -> None:
    with pytest.raises(FormatError, match="are no group"):
        coding({host: [image(rank) for rank in ranks] for host, ranks in hosts.items()}, parity)


def test_a_group_codes_something_of_every_image() -> None:
    with pytest.raises(FormatError, match="cannot have coded"):
        GroupCoding((GroupMember("a", (CodedGroup(image(0), 1 << 40),)), GroupMember("b", ())), 1)


def test_the_choice_for_16384_ranks_is_told_in_less_than_50_kb() -> None:
    """Of the images of 2,048 hosts, a rank asks for those of the hosts it reads from."""
    holdings = []
    for n in range(2048):
        images = tuple(
            ImageId(rank, 10**9 + rank * 4096, *(f"{hash((rank, x)):016x}" for x in "ht"))
            for rank in range(8 * n, 8 * n + 8)
        )
        part = Part(AttemptId(1, 7, "a7", 16384, "f" * 16), images)
        holdings.append(Inventory(f"gpu-node-{n:05}", (part,), {1: None}))
    (recovery,) = find(holdings)
    size_bytes = len(encode_choice(recovery))
    assert size_bytes <= 50_000
    found, asked = told(recovery, holdings)
    for rank in (4711, 4712, 16383):
        assert found.sources[rank] == recovery.sources[rank]
    assert found.sources[4711:4713] == list(recovery.sources[4711:4713])
    assert asked == ["gpu-node-00588", "gpu-node-00589", "gpu-node-02047"]
    assert len(found.sources) == 16384
    with pytest.raises(IndexError):
        found.sources[16384]


def test_where_nothing_is_chosen_nothing_is_told() -> None:
    assert encode_choice(None) == b""


def test_a_host_that_has_other_images_than_rank_0_chose_is_not_read_from() -> None:
    holdings = groups((3, 1), per_host=2)
    (recovery,) = find(holdings)
    known = known_of(holdings)
    changed = [_with_images(holdings[0], (image(0), image(1, seal="b"))), *holdings[1:]]
    with pytest.raises(PeerError, match="no longer has the images of attempt a7") as raised:
        _ = told(recovery, changed)[0].sources[0]
    left = known.without(recovery.candidate, raised.value.told_fields)
    assert left.holdings == known.holdings[1:]
    gone = [without_images(holdings[0], 1), *holdings[1:]]
    with pytest.raises(NotFound, match="no longer in the memory of a0") as lacking:
        _ = told(recovery, gone)[0].sources[0]
    left = known.without(recovery.candidate, lacking.value.told_fields)
    assert left.holdings == tuple(gone)
