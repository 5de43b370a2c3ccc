"""What parity is made of is asked for when it is needed, and only then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.errors import FormatError, PeerError
from holdfast.format.manifest import Generation
from holdfast.parity.planning.record import ParityRecord, unseal
from holdfast.restore.cluster.collect import InventoryCollector
from holdfast.restore.planning.holdings import GroupCoding, checked_record, shard_of
from holdfast.restore.planning.selection import Inventories
from support.peers.lost_hosts import GENERATION, Hosts, set_sizes
from support.peers.peering import close_pullers


class Asked:
    """Hosts that are asked for records, and which were."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.asked: list[tuple[str, int, int]] = []

    def fetch(
        self, host: str, attempt: str, generation: Generation, stripe: int, row: int
    ) -> ParityRecord:
        assert (attempt, generation) == (self.hosts.attempt, GENERATION)
        self.asked.append((host, stripe, row))
        return unseal(self.hosts.records[host, stripe, row], "a record")


@pytest.fixture
def asked(arena_dir: Path) -> Iterator[Asked]:
    with pytest.MonkeyPatch.context() as patch:
        set_sizes(patch, 1024, 4096)
        with Hosts(arena_dir / "hosts", 4, 2) as hosts:
            yield Asked(hosts)
    close_pullers()


def test_nothing_is_asked_for_while_every_image_is_there(asked: Asked) -> None:
    gathering = InventoryCollector(asked.hosts.told(), asked.fetch)
    known = gathering.with_parity(Inventories(gathering.holdings))
    assert known.holdings == gathering.holdings
    assert known.find().recoveries
    assert not asked.asked


def test_the_records_of_what_lacks_an_image_are_asked_for_once(asked: Asked) -> None:
    gathering = InventoryCollector(asked.hosts.told("h1"), asked.fetch)
    known = gathering.with_parity(Inventories(gathering.holdings))
    assert known == gathering.with_parity(known) == asked.hosts.known(lost=["h1"])
    assert len(asked.asked) == 6


def test_a_host_lost_on_the_way_makes_parity_needed(asked: Asked) -> None:
    gathering = InventoryCollector(asked.hosts.told(), asked.fetch)
    known = gathering.with_parity(Inventories(gathering.holdings))
    (first,) = known.find().recoveries
    known = known.without(first.candidate, {"peer": "h2"})
    assert not known.find().recoveries
    known = gathering.with_parity(known)
    assert known == asked.hosts.known(lost=["h2"])
    (second,) = known.find().recoveries
    assert second.survives == 1


def test_a_record_that_does_not_come_or_is_another_is_of_a_row_that_nobody_has(
    asked: Asked,
) -> None:
    def fetch(
        host: str, attempt: str, generation: Generation, stripe: int, row: int
    ) -> ParityRecord:
        if host == "h0":
            raise PeerError("gone", peer=host)
        if host == "h2":
            return asked.fetch("h3", attempt, generation, 3, 0)
        return asked.fetch(host, attempt, generation, stripe, row)

    gathering = InventoryCollector(asked.hosts.told("h1"), fetch)
    known = gathering.with_parity(Inventories(gathering.holdings))
    rows = [known.rows[one.host, one.parts[0].attempt_id] for one in known.holdings]
    assert [*map(len, rows)] == [0, 0, 2]


def test_the_record_of_another_row_or_with_other_sums_does_not_pass_for_the_row(
    asked: Asked,
) -> None:
    def fetched(stripe: int, row: int) -> ParityRecord:
        (host,) = (h for h, *at in asked.hosts.records if at == [stripe, row])
        return unseal(asked.hosts.records[host, stripe, row], "a record")

    record, other = fetched(0, 0), fetched(0, 1)
    coding, attempt = shard_of(record).coding, asked.hosts.attempt
    assert checked_record(record, coding, attempt, 0, 0, "h0") is record
    smaller = GroupCoding(coding.members, coding.parity - 1)
    shorter = msgspec.structs.replace(record, sums=record.sums[:-8])
    for found, of, name, match in [
        (other, coding, attempt, r"^the record of row 0 of stripe 0 on h0 is no longer .* row 1"),
        (record, coding, "another", "no longer that of attempt another"),
        (record, smaller, attempt, "no longer that of attempt"),
        (shorter, coding, attempt, "bytes of checksums, which do not fit its row"),
    ]:
        with pytest.raises(FormatError, match=match):
            checked_record(found, of, name, 0, 0, "h0")


def test_an_only_host_that_lost_an_image_is_asked_for_no_parity(asked: Asked) -> None:
    gathering = InventoryCollector(asked.hosts.told("h1"), None)
    known = Inventories(gathering.holdings)
    assert gathering.with_parity(known) == known
