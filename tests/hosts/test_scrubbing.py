"""Bits flip in the memory of hosts: they are found, made anew from the others, and told."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.observe.report_builder import read_report
from holdfast.parity.planning.record import ParityRecord, unseal
from holdfast.protocol.arena import SlotFile
from support.runs.leftovers import keeper_pids
from support.runs.lives import Lives
from support.runs.losing import arena_of, events_of, lose, protected, wait_protected

HOSTS = ("a", "b", "c")
PARITY = {"parity": 1}


@pytest.fixture(autouse=True)
def ending_keepers(arena_dir: Path) -> Iterator[None]:
    """Of runs that nobody closes: they are told to stop."""
    yield
    for pid in keeper_pids(arena_dir):
        os.kill(pid, signal.SIGTERM)


def slot_of(arena: Path, step: int) -> SlotFile:
    """The slot with the image of this step."""
    for path in sorted(arena.glob("*.slot")):
        slot = SlotFile.open(path, writable=True)
        record = slot.read_record()
        if record is not None and (record.state, record.step) == ("captured", step):
            return slot
    raise AssertionError(f"no image of step {step} in {arena}")


def row_of(arena: Path, step: int) -> tuple[SlotFile, int, ParityRecord]:
    """The half with the row of this step, and where in it the row lies."""
    for path in sorted((arena / "parity").glob("*.record")):
        half, _, offset = path.stem.partition("-")
        record = unseal(path.read_bytes(), str(path))
        if record.step == step:
            return SlotFile.open(path.with_name(f"{half}.rows"), writable=True), int(offset), record
    raise AssertionError(f"no row of step {step} in {arena}")


def settled(root: Path) -> int:
    """The step that is protected when nothing more is."""
    last, since_s = protected(root), time.monotonic()
    while time.monotonic() < since_s + 2.0:
        time.sleep(0.1)
        if protected(root) != last:
            last, since_s = protected(root), time.monotonic()
    return last[1]


def wait_damage(root: Path, count: int) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 30
    while len(found := list(damages(root))) < count:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return sorted(found, key=lambda event: (event["what"], event["host"]))


def damages(root: Path) -> Iterator[dict[str, Any]]:
    return events_of(root, "DamageFound")


@pytest.mark.timeout(200)
def test_flipped_bits_in_a_slot_and_in_a_row_are_found_and_made_anew_from_peers(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_KEEPER_SCRUB_S", "0.5")
    root = tmp_path / "run"
    with Lives(root, seed=36) as lives:
        lives.start(3, 100_000, storage=100_000, hosts=HOSTS, options=PARITY)
        lives.wait_restored(3)
        wait_protected(lives, root, 1)
        lives.end(3)  # the keepers stay
        step = settled(root)
        slot = slot_of(arena_of(arena_dir, "b"), step)
        half, offset, record = row_of(arena_of(arena_dir, "a"), step)
        image, row = bytes(slot.image), bytes(half.image)
        slot.image[9000] ^= 1
        wait_damage(root, 1)  # one parity repairs one host's damage at a time: each needs the other
        half.image[offset + record.size_bytes // 2] ^= 1
        found = wait_damage(root, 2)
        assert [(e["what"], e["host"], e["outcome"]) for e in found] == [
            ("image", "b", "repaired"),
            ("parity", "a", "repaired"),
        ]
        assert (bytes(slot.image), bytes(half.image)) == (image, row)
        assert {(e["incarnation"], e["step"]) for e in found} == {(1, step)}
        # Both are needed now.
        lose(lives, arena_dir, HOSTS, "c")
        lives.start(2, 100_000, storage=100_000, hosts=("a", "b"), options=PARITY)
        restored, source = lives.wait_restored(2)
        assert source == "memory" and restored >= step
        lives.end(2)
    listed = {(one.host, one.what, one.outcome) for one in read_report(root).damages}
    assert listed >= {("b", "image", "repaired"), ("a", "parity", "repaired")}


@pytest.mark.timeout(200)
def test_what_nobody_can_make_anew_is_dropped_and_the_run_goes_on_from_what_is_whole(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_KEEPER_SCRUB_S", "0.5")
    root, hosts = tmp_path / "run", ("a", "b")
    with Lives(root, seed=37) as lives:
        lives.start(2, 100_000, storage=100_000, hosts=hosts, options=PARITY)
        lives.wait_restored(2)
        wait_protected(lives, root, 1)
        lives.end(2)
        step = settled(root)
        slots = [slot_of(arena_of(arena_dir, host), step) for host in hosts]
        rows = [row_of(arena_of(arena_dir, host), step) for host in hosts]
        for half, offset, record in rows:  # all that there is of one place
            half.image[offset + record.size_bytes // 2] ^= 1
        for slot in slots:
            data = int.from_bytes(bytes(slot.image[:8]), "little") + 8
            slot.image[data + rows[0][2].size_bytes // 2] ^= 1
        found = wait_damage(root, 4)
        assert {e["outcome"] for e in found if e["what"] == "image"} == {"dropped"}
        completed = lives.end(2)
        lives.start(2, 100_000, storage=100_000, hosts=hosts, options=PARITY)
        restored, source = lives.wait_restored(2)
        assert restored < step <= completed and source == "memory"
