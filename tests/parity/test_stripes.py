"""Every byte lies in one stripe, away from its parity, and comes back through the real code."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import TooManyLost, UsageError
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.parity.coding.backends import chosen
from holdfast.parity.coding.codes import Coder
from holdfast.parity.planning.placement import (
    RepairStep,
    StripePart,
    StripePlacement,
    StripeSource,
    needed_for,
    needed_for_parity,
    stored_by,
    stripes,
)

BLOCK = 4


@st.composite
def placements(draw: st.DrawFn, most: int = 7) -> StripePlacement:
    """Groups of any shape; images of any sizes, some empty, not as many on each host."""
    members = draw(st.integers(2, most))
    parity = draw(st.integers(1, min(4, members - 1)))
    images = st.lists(st.integers(0, 60), max_size=3).map(tuple)
    sizes = draw(st.lists(images, min_size=members, max_size=members))
    return StripePlacement(tuple(sizes), parity, BLOCK)


class Hosts:
    """Toy images, and the parity that the members of a group made of them."""

    def __init__(self, placement: StripePlacement) -> None:
        draw = random.Random(5)
        self.placement = placement
        self.images = [[draw.randbytes(size) for size in sizes] for sizes in placement.image_bytes]
        self.coder = Coder(placement.columns, placement.parity, chosen().backend)
        self.kept: dict[tuple[int, int], bytearray] = {}
        for stripe in stripes(placement):
            rows = [bytearray(stripe.size_bytes) for _ in stripe.parity]
            for source in stripe.data:
                for part in source.parts:
                    views = [
                        memoryview(row)[part.at : part.at + part.stop - part.start] for row in rows
                    ]
                    self.coder.add(source.number, self.read(source, part, stripe.number), views)
            for member, row in zip(stripe.parity, rows, strict=True):
                self.kept[member, stripe.number] = row

    def read(self, source: StripeSource, part: StripePart, stripe: int) -> bytes:
        whole = (
            self.kept[source.member, stripe]
            if part.image is None
            else self.images[source.member][part.image]
        )
        assert 0 <= part.start < part.stop <= len(whole)
        return bytes(whole[part.start : part.stop])

    def rebuilt(self, member: int, image: int, start: int, stop: int, lost: set[int]) -> bytes:
        """A degraded read, as a keeper does it."""
        found = b""
        for step in needed_for(self.placement, member, image, start, stop, lost):
            assert step.start == start + len(found)
            assert not {one.member for one in step.sources} & (lost | {member})
            found += self.decoded(step)
        return found

    def decoded(self, step: RepairStep) -> bytes:
        output = bytearray(step.stop - step.start)
        factors = self.coder.solve([one.number for one in step.sources], [step.wanted])
        for source in step.sources:
            for part in source.parts:
                view = memoryview(output)[part.at : part.at + part.stop - part.start]
                data = self.read(source, part, step.stripe)
                self.coder.accumulate(factors[source.number], data, [view])
        return bytes(output)


@given(placements())
def test_every_byte_is_in_exactly_one_stripe(placement: StripePlacement) -> None:
    seen: Counter[tuple[int, int, int]] = Counter()
    for stripe in stripes(placement):
        taken: Counter[tuple[int, int]] = Counter()
        for source in stripe.data:
            for part in source.parts:
                assert part.image is not None
                assert part.start % BLOCK == part.at % BLOCK == 0
                for byte in range(part.start, part.stop):
                    seen[source.member, part.image, byte] += 1
                    taken[source.member, part.at + byte - part.start] += 1
        assert not taken or max(taken.values()) == 1
        assert stripe.size_bytes == max((place + 1 for _, place in taken), default=0)
    assert set(seen.values()) <= {1}
    assert len(seen) == sum(map(sum, placement.image_bytes))


@given(placements())
def test_no_member_keeps_parity_of_its_own_data(placement: StripePlacement) -> None:
    for stripe in stripes(placement):
        members = [source.member for source in stripe.data] + list(stripe.parity)
        assert sorted(members) == list(range(placement.members))
        assert [source.number for source in stripe.data] == list(range(placement.columns))
        for member in members:
            assert members[placement.number(member, stripe.number)] == member


@given(placements())
def test_every_member_keeps_one_row_of_each_kind_and_no_more_than_its_share(
    placement: StripePlacement,
) -> None:
    """m/(n - m) of the largest member's bytes, up to a block for each image and row."""
    largest = max(sum(map(placement.segment_bytes, sizes)) for sizes in placement.image_bytes)
    for member in range(placement.members):
        kept = stored_by(placement, member)
        assert [one.row for one in kept] == list(range(placement.parity))
        for one in kept:
            stripe = stripes(placement)[one.stripe]
            assert stripe.parity[one.row] == member
            assert stripe.size_bytes == one.size_bytes <= largest
        exact = placement.parity / placement.columns * max(map(sum, placement.image_bytes))
        images = max(map(len, placement.image_bytes))
        bound = exact + placement.parity * images * BLOCK
        assert sum(one.size_bytes for one in kept) <= bound


@given(placements(6))
def test_all_bytes_come_back_whatever_members_are_lost(placement: StripePlacement) -> None:
    hosts = Hosts(placement)
    for lost in map(set, combinations(range(placement.members), placement.parity)):
        for member in lost:
            for image, whole in enumerate(hosts.images[member]):
                assert hosts.rebuilt(member, image, 0, len(whole), lost) == whole


@given(placements(), st.data())
def test_any_range_of_a_lost_image_comes_back(
    placement: StripePlacement, data: st.DataObject
) -> None:
    hosts = Hosts(placement)
    everyone = list(range(placement.members))
    lost = data.draw(st.sets(st.sampled_from(everyone), min_size=1, max_size=placement.parity))
    member = data.draw(st.sampled_from(sorted(lost)))
    for image, whole in enumerate(hosts.images[member]):
        start = data.draw(st.integers(0, len(whole)))
        stop = data.draw(st.integers(start, len(whole)))
        assert hosts.rebuilt(member, image, start, stop, lost) == whole[start:stop]


@given(placements(), st.data())
def test_lost_parity_comes_back_too(placement: StripePlacement, data: st.DataObject) -> None:
    hosts = Hosts(placement)
    everyone = list(range(placement.members))
    lost = data.draw(st.sets(st.sampled_from(everyone), min_size=1, max_size=placement.parity))
    for member in lost:
        for one in stored_by(placement, member):
            start = data.draw(st.integers(0, max(0, one.size_bytes - 1)))
            stop = data.draw(st.integers(min(start + 1, one.size_bytes), one.size_bytes))
            if start == stop:
                continue
            step = needed_for_parity(placement, member, one.stripe, start, stop, lost)
            assert not {source.member for source in step.sources} & lost
            assert hosts.decoded(step) == hosts.kept[member, one.stripe][start:stop]


@pytest.mark.parametrize(
    ("stripe", "start", "stop"), [(2, 0, 1), (0, 0, 11), (0, -1, 1), (0, 2, 1)]
)
def test_parity_that_a_member_has_not_is_refused(stripe: int, start: int, stop: int) -> None:
    placement = StripePlacement(((10,),) * 3, 1, BLOCK)
    with pytest.raises(UsageError, match=f"member 0 keeps no parity from {start} to {stop} of"):
        needed_for_parity(placement, 0, stripe, start, stop, ())


@given(placements())
def test_one_member_more_than_the_parity_is_refused(placement: StripePlacement) -> None:
    placement = StripePlacement(((9,), *placement.image_bytes[1:]), placement.parity, BLOCK)
    lost = set(range(placement.parity + 1))
    with pytest.raises(TooManyLost, match="storage in the end") as raised:
        needed_for(placement, 0, 0, 0, 9, lost)
    assert raised.value.fields == {"missing": sorted(lost), "parity": placement.parity}
    with pytest.raises(TooManyLost, match="storage in the end"):
        needed_for_parity(placement, 0, 0, 0, 0, lost)


def test_a_mirror_is_a_copy() -> None:
    placement = StripePlacement(((10,), (7,)), 1, BLOCK)
    hosts = Hosts(placement)
    assert hosts.kept[1, 1] == hosts.images[0][0]
    assert hosts.kept[0, 0] == hosts.images[1][0]


def test_alone_there_is_nothing_to_keep() -> None:
    placement = StripePlacement(((10, 4),), 0)
    assert not stripes(placement) and not stored_by(placement, 0)
    with pytest.raises(TooManyLost, match=r"members \[0\] of a group of 1"):
        needed_for(placement, 0, 0, 0, 1, ())


def test_the_placement_never_changes() -> None:
    """Keepers of one run may be of different versions: 5 members, 2 of which can be lost."""
    placement = StripePlacement(((8 * BLOCK_BYTES,), *[(5 * BLOCK_BYTES + 1,)] * 4), 2)
    mib = BLOCK_BYTES
    assert [
        (s.size_bytes, [one.member for one in s.data], s.parity) for s in stripes(placement)
    ] == [
        (2 * mib, [4, 3, 2], (0, 1)),
        (3 * mib, [0, 4, 3], (1, 2)),
        (3 * mib, [1, 0, 4], (2, 3)),
        (2 * mib, [2, 1, 0], (3, 4)),
        (2 * mib, [3, 2, 1], (4, 0)),
    ]
    assert [(k.stripe, k.row) for k in stored_by(placement, 0)] == [(0, 0), (4, 1)]
    (found,) = needed_for(placement, 0, 0, 6 * mib + 5, 7 * mib, {3})
    assert (found.stripe, found.wanted) == (3, 2)
    assert found.sources == (
        StripeSource(2, 0, (StripePart(0, 5, mib, 0),)),
        StripeSource(1, 1, (StripePart(0, 2 * mib + 5, 3 * mib, 0),)),
        StripeSource(4, 4, (StripePart(None, 5, mib, 0),)),
    )


@pytest.mark.parametrize("parity", [-1, 2, 3])
def test_a_group_with_fewer_members_than_it_can_lose_is_refused(parity: int) -> None:
    with pytest.raises(UsageError, match=f"parity={parity} in a group of 2"):
        StripePlacement(((1,), (1,)), parity)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 11)])
def test_bytes_that_an_image_has_not_are_refused(start: int, stop: int) -> None:
    with pytest.raises(UsageError, match="image 0 of member 1 has bytes 0 to 10, not"):
        needed_for(StripePlacement(((3,), (10,)), 1), 1, 0, start, stop, ())


def test_of_each_column_everybody_sends_one_and_receives_one() -> None:
    placement = StripePlacement(((1000,),) * 7, 2)
    for column in range(placement.columns):
        senders = [stripe.data[column].member for stripe in stripes(placement)]
        assert sorted(senders) == list(range(7))
        assert all(stripe.parity[0] == stripe.number for stripe in stripes(placement))
