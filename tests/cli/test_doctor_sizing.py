"""``holdfast doctor --for``: what a run needs, computed as the run itself would take it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Any

import pytest

from holdfast.cli import main
from holdfast.cli.doctor.rules.sizing import compute_sizing, parse_size, sizing_rows
from holdfast.errors import UsageError
from holdfast.parity.planning.placement import StripePlacement, stored_by
from holdfast.persist.commit import SWEPT_AFTER
from holdfast.protocol.arena import IMAGE_START

Out = pytest.CaptureFixture[str]
GB = 10**9
MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("40GB", 40 * GB),
        ("40 GB", 40 * GB),
        ("40g", 40 * GB),
        ("1.5TB", 1500 * GB),
        ("0.5 kb", 500),
        ("64GiB", 64 << 30),
        ("1.5KiB", 1536),
        ("2PB", 2 * 10**15),
        ("7", 7),
        ("7B", 7),
    ],
)
def test_a_size_is_read_as_people_write_it(text: str, size: int) -> None:
    assert parse_size("--for", text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GB",
        "-1GB",
        "1e9",
        "1,5GB",
        "40GBps",
        "0",
        "0.0GB",
        "0.1B",
        "iB",
        "5iB",
        "40XB",
        "9" * 20,
        "1001PB",
        "nan",
        "١GB",
        "4" * 5000,
    ],
)
def test_a_size_that_means_nothing_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"--for=.*such as 40GB") as caught:
        parse_size("--for", text)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        ({"hosts": 0}, "--hosts=0"),
        ({"hosts": -3}, "--hosts=-3"),
        ({"hosts": 10**9}, "--hosts=1000000000"),
        ({"parity": -1}, "--parity=-1"),
        ({"parity": 128}, "--parity=128"),
        ({"ranks_per_host": 0}, "--ranks=0"),
        ({"ranks_per_host": 10**6}, "--ranks=1000000"),
        ({"keep_last": -1}, "--keep=-1"),
    ],
)
def test_a_number_that_no_run_can_have_is_refused_by_name(
    numbers: dict[str, int], named: str
) -> None:
    with pytest.raises(UsageError, match=f"{named}: a whole number"):
        compute_sizing(GB, **numbers)


def test_without_parity_there_are_three_slots_and_no_network() -> None:
    needs = compute_sizing(40 * GB, hosts=8, ranks_per_host=2)
    assert (needs.slots_per_image, needs.parity_bytes, needs.network_bytes) == (3, 0, 0)
    assert needs.shared_bytes == 3 * 2 * needs.slot_bytes
    assert needs.least_bytes == 2 * 2 * needs.slot_bytes
    assert 1 <= needs.slot_bytes / needs.image_bytes < 1.02
    assert 40 * GB <= needs.checkpoint_bytes < 40.01 * GB
    assert needs.written_bytes * 8 == needs.checkpoint_bytes
    assert needs.storage_bytes is None and needs.survives == "no loss of a host"


@pytest.mark.parametrize(
    ("hosts", "parity", "members"), [(2, 1, 2), (8, 1, 8), (8, 2, 8), (16, 3, 8), (12, 2, 6)]
)
def test_parity_takes_m_of_n_less_m_of_an_image_twice_and_a_fourth_slot(
    hosts: int, parity: int, members: int
) -> None:
    needs = compute_sizing(hosts * 10 * GB, hosts=hosts, parity=parity)
    share = parity / (members - parity)
    assert needs.slots_per_image == 4
    assert needs.parity_bytes == pytest.approx(2 * share * 10 * GB, rel=0.02)
    moved = (members - 1) / (members - parity)
    assert needs.network_bytes == pytest.approx(moved * 10 * GB, rel=0.02)
    assert needs.shared_bytes == 4 * needs.slot_bytes + needs.parity_bytes
    assert needs.survives.startswith(f"any {parity} of {hosts} hosts")


def test_parity_is_what_the_placement_of_a_group_stores() -> None:
    needs = compute_sizing(5 * GB, hosts=5, parity=1, ranks_per_host=2)
    coded = needs.image_bytes - 4096
    rows = stored_by(StripePlacement(((coded, coded),) * 5, 1), 0)
    assert needs.parity_bytes == pytest.approx(2 * sum(row.size_bytes for row in rows), abs=8 * MIB)


def test_more_parity_than_hosts_is_computed_as_the_run_would_take_it_and_said() -> None:
    alone = compute_sizing(GB, parity=1)
    assert (alone.parity, alone.slots_per_image, alone.parity_bytes) == (0, 3, 0)
    assert "only storage protects it" in alone.missing[0]
    three = compute_sizing(GB, hosts=3, parity=5)
    assert three.parity == 2 and "parity=5 needs 6 hosts" in three.missing[0]


def test_beside_the_kept_checkpoints_there_are_the_new_one_and_those_not_yet_deleted() -> None:
    needs = compute_sizing(GB, keep_last=3, swept_after=SWEPT_AFTER)
    assert needs.checkpoints == 3 + 2 + 1
    assert needs.storage_bytes == 6 * needs.checkpoint_bytes


def test_thousands_of_hosts_are_computed_at_once() -> None:
    begun = time.process_time()
    needs = compute_sizing(10_000 * GB, hosts=16_384, ranks_per_host=8, parity=2)
    assert needs.survives == "any 2 of 16384 hosts (2 in each of 2048 groups)"
    assert time.process_time() - begun < 10


def test_every_size_has_a_line_and_it_says_what_it_is_made_of() -> None:
    rows = sizing_rows(compute_sizing(40 * GB, hosts=8, parity=1, keep_last=2))
    about = [row[0].strip() for row in rows]
    assert about == [
        "state",
        "shared memory of each host",
        "the least for snapshots",
        "memory of each keeper",
        "network of each host",
        "storage of a checkpoint",
        "storage of the run",
        "memory survives",
    ]
    assert all(row[2] for row in rows)
    assert "network of each host" not in {row[0] for row in sizing_rows(compute_sizing(GB))}


def test_the_command_prints_the_table_and_examines_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    monkeypatch.setattr("holdfast.cli.doctor.examine", lambda *_, **__: pytest.fail("examined"))
    assert main(["doctor", "--for", "40GB", "--hosts", "8", "--parity", "1"]) == 0
    said = capsys.readouterr().out
    assert "4 slots of 5.08 GB for each rank, and 1.43 GB for parity" in said
    assert "any 1 of 8 hosts" in said and "grows" in said
    assert main(["doctor", "--for", "40GB", "--parity", "1"]) == 0
    assert "warn  one host alone has nobody" in capsys.readouterr().out


def test_the_same_is_in_json(capsys: Out) -> None:
    options = ["--hosts", "8", "--ranks", "4", "--parity", "2", "--keep", "3"]
    assert main(["doctor", "--json", "--for", "40GB", *options]) == 0
    expected: dict[str, Any] = asdict(
        compute_sizing(
            40 * GB,
            hosts=8,
            ranks_per_host=4,
            parity=2,
            keep_last=3,
            slot_head_bytes=IMAGE_START,
            swept_after=SWEPT_AFTER,
        )
    )
    document = json.loads(capsys.readouterr().out)
    assert document == {"sizing": {**expected, "missing": []}}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--for", "much"], "--for='much'"),
        (["--for", "40GB", "--hosts", "0"], "--hosts=0"),
        (["--for", "40GB", "--parity", "-1"], "--parity=-1"),
        (["--for", "40GB", "--clean"], "--for computes only"),
        (["--for", "40GB", "runs/gpt"], "--for computes only"),
        (["--hosts", "8"], "--hosts goes with --for"),
        (["--ranks", "8"], "--ranks goes with --for"),
        (["--parity", "0"], "--parity goes with --for"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: list[str], said: str, capsys: Out) -> None:
    assert main(["doctor", *options]) == UsageError.exit_code
    assert said in capsys.readouterr().err
