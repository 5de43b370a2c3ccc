"""What hosts took with them comes back bit for bit from those that are left, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from holdfast import events
from holdfast.errors import (
    ChecksumMismatch,
    Fenced,
    FormatError,
    NotFound,
    PeerError,
    TooManyLost,
)
from holdfast.format.checksum import checksum
from holdfast.parity.planning.record import seal, unseal
from holdfast.restore.cluster import decode as decoding
from holdfast.restore.cluster.decode import DegradedImage
from holdfast.restore.cluster.open import open_recovery
from holdfast.restore.cluster.peer_images import PeerImage, PeerRanges
from holdfast.restore.reading.images import SlotImage
from support.peers.lost_hosts import (
    Hosts,
    fetch,
    identity_of,
    sealed_unseen,
    set_sizes,
    split_layout,
)
from support.peers.peering import close_pullers, puller, wait_for

BLOCK, BATCH = 1024, 4096


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        set_sizes(patch, BLOCK, BATCH)
        yield
    close_pullers()


@pytest.fixture
def hosts(arena_dir: Path) -> Iterator[Hosts]:
    with Hosts(arena_dir / "hosts", 4, 2) as made:
        yield made


def degraded(hosts: Hosts, rank: int, *lost: str, here: str = "h3") -> DegradedImage:
    """The lost image of a rank, opened."""
    file = hosts.open(here, lost=lost).files[rank]
    assert isinstance(file, DegradedImage)
    file.open(identity_of(hosts, rank))
    return file


def whole(file: DegradedImage) -> bytes:
    return bytes(file.view(0, file.size_bytes, bytearray()))


# ── all losses that parity replaces ──────────────────────────────────────────────────────────

SHAPES = [(3, 1, 1), (4, 1, 2), (3, 2, 1), (4, 2, 1), (5, 2, 2)]
MORE = [(n, m, k) for n in (3, 4, 5) for m in (1, 2) for k in (1, 2, 3)]


def check_losses(directory: Path, count: int, parity: int, per_host: int, every: int) -> None:
    with Hosts(directory, count, parity, per_host=per_host) as hosts:
        sets = [lost for k in range(parity + 1) for lost in combinations(hosts.names, k)]
        for lost in sets[::every]:
            here = next(host for host in reversed(hosts.names) if host not in lost)
            checkpoint = hosts.open(here, lost=lost)
            kinds = {SlotImage: 0, PeerImage: 0, DegradedImage: 0}
            for file in checkpoint.files.values():
                kinds[type(file)] += 1
            assert kinds == {
                SlotImage: per_host,
                DegradedImage: per_host * len(lost),
                PeerImage: per_host * (count - 1 - len(lost)),
            }
            hosts.check_all(checkpoint)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_restore_after_losses_is_bit_for_bit(
    arena_dir: Path, shape: tuple[int, int, int]
) -> None:
    check_losses(arena_dir / "hosts", *shape, every=3)


@pytest.mark.slow
@pytest.mark.parametrize("shape", MORE, ids=str)
def test_a_restore_after_any_losses_is_bit_for_bit(
    arena_dir: Path, shape: tuple[int, int, int]
) -> None:
    check_losses(arena_dir / "hosts", *shape, every=1)


def test_a_host_that_came_new_reads_all_from_the_others(hosts: Hosts) -> None:
    hosts.check_all(hosts.open("new", lost=["h1"]))


def test_where_in_memory_a_generation_is_depends_on_the_host(hosts: Hosts) -> None:
    assert hosts.open("h0").origin == "memory"
    assert hosts.open("new").origin == "peers"
    assert hosts.open("h0", lost=["h1"]).origin == "decoded"


def test_every_group_gives_its_own_lost_images(arena_dir: Path) -> None:
    with Hosts(arena_dir / "hosts", 6, 1, groups=2, per_host=2) as hosts:
        hosts.check_all(hosts.open("h0", lost=["h1", "h4"]))
        assert hosts.known(lost=["h1", "h2"]).find().recoveries == ()


def test_blocks_of_the_real_size_are_coded_alike(
    arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_sizes(monkeypatch, 1 << 20, 8 << 20)
    with Hosts(arena_dir / "hosts", 3, 1, layout=split_layout(3, rows=40_000)) as hosts:
        assert len(hosts.images[0]) > 5 << 20
        hosts.check_all(hosts.open("h0", lost=["h1"]))


# ── any range ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with pytest.MonkeyPatch.context() as patch:
        set_sizes(patch, BLOCK, BATCH)
        with Hosts(tmp_path_factory.mktemp("lasting") / "hosts", 4, 2, per_host=2) as made:
            yield made


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_range_of_a_lost_image_is_what_was_captured(
    lasting: Hosts, data: st.DataObject
) -> None:
    rank = data.draw(st.sampled_from([0, 1]))
    image = lasting.images[rank]
    lost = data.draw(st.sampled_from([("h0",), ("h0", "h1"), ("h0", "h2")]))
    file = degraded(lasting, rank, *lost)
    start = data.draw(st.integers(0, len(image)))
    stop = data.draw(st.integers(start, len(image)))
    room = bytearray(data.draw(st.sampled_from([0, len(image)])))
    view = file.view(start, stop, room)
    assert view == image[start:stop]
    assert (view.obj is room) == (len(room) >= stop - start)


def test_many_threads_read_one_lost_image(hosts: Hosts) -> None:
    file, found = degraded(hosts, 1, "h1"), {}

    def run(n: int) -> None:
        found[n] = whole(file)

    threads = [Thread(target=run, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found.values()) == {hosts.images[1]}


def test_memory_is_bounded_however_much_is_asked_for(
    arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_sizes(monkeypatch, 256, 1024)  # the block table alone is longer than a batch
    taken: list[int] = []

    def take(size_bytes: int) -> memoryview:
        taken.append(size_bytes)
        return memoryview(bytearray(size_bytes))

    monkeypatch.setattr(decoding, "aligned_memory", take)
    with Hosts(arena_dir / "hosts", 3, 1) as hosts:
        assert len(hosts.images[1]) > 8 * 1024
        found: list[bytes] = []
        thread = Thread(target=lambda: found.append(whole(degraded(hosts, 1, "h1", here="h0"))))
        thread.start()
        thread.join()
        assert found == [hosts.images[1]]
    assert taken
    assert max(taken) <= 1024


def test_a_range_outside_of_an_image_is_refused(hosts: Hosts) -> None:
    checkpoint = hosts.open("h3", lost=["h1"])
    for file in (checkpoint.files[0], degraded(hosts, 1, "h1")):
        with pytest.raises(Exception, match="were asked for"):
            file.view(0, file.size_bytes + 1, bytearray())


# ── a source that breaks ─────────────────────────────────────────────────────────────────────


def test_a_peer_that_dies_in_the_middle_of_a_range_is_given_up_by_name(arena_dir: Path) -> None:
    with Hosts(arena_dir / "hosts", 3, 1, layout=split_layout(3, rows=3000)) as hosts:
        # Less than one request asks for: one connection, which is in the middle of a body.
        file, got = hosts.open("h2").files[0], bytearray(200_000)
        assert isinstance(file, PeerImage)
        served = hosts.served["h0"]
        served.do(served.server.set_rate, 50_000)  # four seconds

        def kill() -> None:
            wait_for(lambda: any(got), "the first bytes")
            hosts.die("h0")

        killer = Thread(target=kill)
        killer.start()
        with pytest.raises(PeerError) as raised:
            file.view(0, len(got), got)
        killer.join()
        assert (raised.value.fields["peer"], raised.value.fields["phase"]) == ("h0", "body")
        assert got != hosts.images[0][: len(got)]


def test_a_restore_whose_peer_dies_goes_on_with_what_its_group_has(hosts: Hosts) -> None:
    known = hosts.known(lost=["h1"])
    (first,) = known.find().recoveries
    checkpoint = open_recovery(first, hosts.reach("h3"))
    hosts.die("h0")
    with pytest.raises(PeerError) as raised:
        fetch(checkpoint, hosts.layout)
    known = known.without(first.candidate, raised.value.told_fields)
    (second,) = known.find().recoveries
    assert [one.rank for one in second.sources if one.decoding] == [0, 1]
    hosts.check_all(open_recovery(second, hosts.reach("h3")))


def test_a_source_of_a_decoded_range_that_dies_is_replaced_on_the_way(hosts: Hosts) -> None:
    file = degraded(hosts, 1, "h1")
    assert whole(file) == hosts.images[1]
    hosts.die("h0")
    told: list[events.Event] = []
    unsubscribe = events.subscribe(lambda event, _: told.append(event))
    assert whole(file) == whole(file) == hosts.images[1]
    unsubscribe()
    (event,) = told
    assert isinstance(event, events.SourceDropped)
    assert event.source == "h0, for what its group lost"
    hosts.die("h2")
    with pytest.raises(TooManyLost, match=r"h0 .*h1 .lost.*h2 .*Its parity replaces 2") as raised:
        whole(file)
    assert raised.value.fields == {"missing": [0, 1, 2], "parity": 2}


def test_a_connection_that_breaks_once_costs_no_member_of_the_group(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = degraded(hosts, 1, "h1")
    broken, view = set[str](), PeerRanges.view

    def fragile(self: PeerRanges, *asked: Any, **named: Any) -> memoryview:
        if self.name not in broken:
            broken.add(self.name)
            raise PeerError("the connection broke", peer="h0", status=0)
        return view(self, *asked, **named)

    monkeypatch.setattr(PeerRanges, "view", fragile)
    told: list[events.Event] = []
    unsubscribe = events.subscribe(lambda event, _: told.append(event))
    assert whole(file) == hosts.images[1]
    unsubscribe()
    assert len(broken) > 1 and not told


def test_an_offer_that_was_withdrawn_is_not_used(hosts: Hosts) -> None:
    file = hosts.open("h3").files[0]
    hosts.withdraw("h0", "/images/a7/0")
    with pytest.raises(PeerError, match="withdrawn"):
        file.open(identity_of(hosts, 0))


def test_another_generation_under_the_same_name_is_not_used(hosts: Hosts) -> None:
    lost = degraded(hosts, 1, "h1")
    hosts.offer_image("h0", 0, generation="3-1201")
    with pytest.raises(PeerError, match="another generation"):
        hosts.open("h3").files[0].open(identity_of(hosts, 0))
    assert whole(lost) == hosts.images[1]  # by the other parity


def test_who_belongs_to_an_older_incarnation_is_told_to_end(hosts: Hosts) -> None:
    old = open_recovery(hosts.recovery(), hosts.reach("h3", puller(incarnation=3)))
    with pytest.raises(Fenced):
        old.files[0].open(identity_of(hosts, 0))


def test_a_slot_that_is_gone_speaks_against_its_image_alone(hosts: Hosts) -> None:
    hosts.slots[3].path.unlink()
    known = hosts.known()
    (first,) = known.find().recoveries
    with pytest.raises(NotFound, match="no longer in this host's memory") as raised:
        open_recovery(first, hosts.reach("h3"))
    (second,) = known.without(first.candidate, raised.value.told_fields).find().recoveries
    hosts.check_all(open_recovery(second, hosts.reach("h3")))


def test_nobody_is_asked_whose_place_is_unknown(hosts: Hosts) -> None:
    recovery = hosts.recovery()
    reach = hosts.reach("h3")
    del reach.peers["h0"]  # type: ignore[attr-defined]
    checkpoint = open_recovery(recovery, reach)
    checkpoint.header(3)
    with pytest.raises(NotFound, match="where the keeper of h0"):
        checkpoint.header(0)


def test_the_layout_is_taken_from_whoever_gives_it_rightly(hosts: Hosts) -> None:
    path = f"/layouts/{hosts.layout.hash}"
    for host in hosts.names:
        served = hosts.served[host]
        served.do(served.server.offer_document, path, b"something else")
    recovery, reach = hosts.recovery(), hosts.reach("new")
    with pytest.raises(ChecksumMismatch, match=r"layout .* on h3: its bytes have the hash"):
        open_recovery(recovery, reach)
    served.do(served.server.offer_document, path, hosts.layout.to_json())
    hosts.check_all(open_recovery(recovery, reach))
    (hosts.directory / "h0" / "layouts" / f"{hosts.layout.hash}.json").write_bytes(b"torn")
    hosts.check_all(open_recovery(recovery, hosts.reach("h0")))


# ── bytes that changed ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("here", ["h0", "h3"])  # the one that has it, and another one
def test_a_flipped_bit_in_a_slot_is_found_and_its_image_decoded(hosts: Hosts, here: str) -> None:
    hosts.flip(0, len(hosts.images[0]) // 2)
    known = hosts.known()
    (first,) = known.find().recoveries
    with pytest.raises(ChecksumMismatch) as raised:
        fetch(open_recovery(first, hosts.reach(here)), hosts.layout)
    (second,) = known.without(first.candidate, raised.value.told_fields).find().recoveries
    assert [one.rank for one in second.sources if one.decoding] == [0]
    hosts.check_all(open_recovery(second, hosts.reach(here)))


@pytest.mark.promise
@pytest.mark.parametrize("place", ["first", "middle", "table"])
def test_a_flipped_bit_in_the_data_of_a_source_is_found_and_gone_round(
    hosts: Hosts, place: str
) -> None:
    size = len(hosts.images[0])
    file = degraded(hosts, 1, "h1")
    assert whole(file) == hosts.images[1]
    for rank in (0, 3):  # of a peer, and of this host itself
        hosts.flip(rank, {"first": 4096, "middle": size // 2, "table": size - 4096}[place])
        assert whole(degraded(hosts, 1, "h1")) == hosts.images[1]
        hosts.flip(rank, {"first": 4096, "middle": size // 2, "table": size - 4096}[place])


def test_flipped_bits_beyond_what_parity_replaces_are_named(hosts: Hosts) -> None:
    for rank in (0, 2, 3):
        for at in range(4096, len(hosts.images[rank]), BLOCK):
            hosts.flip(rank, at)
    for (host, stripe, row), path in list(hosts.row_files.items()):
        for at in range(0, path.stat().st_size if row else 0, BLOCK):
            hosts.flip_row(host, stripe, row, at)
    with pytest.raises(TooManyLost, match=r"h0 \(block \d+ of .*h1 \(lost\), h2 \(block "):
        whole(degraded(hosts, 1, "h1"))


@pytest.mark.promise
@pytest.mark.parametrize("here", ["h3", "new"])
def test_a_flipped_bit_in_parity_is_found_and_gone_round(hosts: Hosts, here: str) -> None:
    for (host, stripe, row), path in list(hosts.row_files.items()):
        if row == 0:
            for at in range(0, path.stat().st_size, BLOCK):
                hosts.flip_row(host, stripe, row, at)
    assert whole(degraded(hosts, 1, "h1", here=here)) == hosts.images[1]
    with pytest.raises(TooManyLost, match=r"block \d+ of "):
        whole(degraded(hosts, 1, "h1", "h2", here=here))


def test_a_header_that_is_wrong_in_one_record_is_taken_from_another(hosts: Hosts) -> None:
    *others, last = hosts.records.items()
    for at, data in others:
        hosts.change_record(*at, data[:400] + bytes([data[400] ^ 1]) + data[401:])
    assert whole(degraded(hosts, 1, "h1")) == hosts.images[1]
    at, data = last
    hosts.change_record(*at, data[:-1])
    with pytest.raises(FormatError, match=r"its bytes changed|cut short"):
        degraded(hosts, 1, "h1")


def test_a_header_that_is_wrong_in_every_record_is_not_believed(hosts: Hosts) -> None:
    for at, data in hosts.records.items():
        record = unseal(data, "")
        head = bytes(record.members[1].images[0].head)
        forged = data.replace(head, head[:50] + bytes([head[50] ^ 1]) + head[51:])
        body = forged[24:]
        hosts.change_record(*at, forged[:16] + checksum(body).to_bytes(8, "little") + body)
    with pytest.raises(FormatError, match="header of the image of rank 1 is not the one"):
        degraded(hosts, 1, "h1")


def test_parity_of_other_images_is_never_taken_for_that_of_these(hosts: Hosts) -> None:
    """Every source is as its own checksums say, and yet they do not belong together."""
    for (host, stripe, row), path in list(hosts.row_files.items()):
        data = bytes(len(path.read_bytes()))
        path.write_bytes(data)
        record = unseal(hosts.records[host, stripe, row], "")
        ends = [min(at + BLOCK, len(data)) for at in range(0, len(data), BLOCK)]
        sums = b"".join(
            checksum(data[at : ends[n]]).to_bytes(8, "little")
            for n, at in enumerate(range(0, len(data), BLOCK))
        )
        hosts.change_record(host, stripe, row, seal(structs.replace(record, sums=sums)))
    with pytest.raises(ChecksumMismatch, match="the parity is not of these images"):
        degraded(hosts, 1, "h1", "h2")


@pytest.mark.parametrize("change", ["attempt", "row", "members", "sums"])
def test_a_record_of_another_row_does_not_vouch_for_this_one(hosts: Hosts, change: str) -> None:
    for at, data in list(hosts.records.items()):
        record = unseal(data, "")
        wrong = {
            "attempt": record.attempt + "x",
            "row": 1 - record.row,
            "members": record.members[:3],
            "sums": record.sums[:-8],
        }
        changed = structs.replace(record, **{change: wrong[change]})
        hosts.change_record(*at, sealed_unseen(changed))
    why = r"is no longer that of attempt a7|there is no row|bytes of checksums are not one for"
    with pytest.raises(FormatError, match=why):
        degraded(hosts, 1, "h1")


def test_what_was_wrong_on_the_way_only_is_read_again(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, turns = degraded(hosts, 1, "h1"), iter([True])
    fill = decoding.GroupReader.fill

    def spoilt(self: decoding.GroupReader, step: object, into: memoryview) -> None:
        fill(self, step, into)  # type: ignore[arg-type]
        into[0] ^= next(turns, False)

    monkeypatch.setattr(decoding.GroupReader, "fill", spoilt)
    assert whole(file) == hosts.images[1]
