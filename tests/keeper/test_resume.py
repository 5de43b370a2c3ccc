"""A keeper started in the middle of an incarnation: what it keeps, and which slots it has."""

from __future__ import annotations

import queue
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import holdfast
from holdfast.capture import copier as copier_module
from holdfast.capture.progress import GpuCopyStuck
from holdfast.protocol import messages as m
from holdfast.protocol.arena import SlotFile
from support.runs.gates import Gate, capture_at_last
from support.runs.keepers import (
    IMAGE_BYTES,
    X,
    ask,
    begin,
    capture,
    connect,
    end,
    hear,
    join,
    kill_keeper,
    slots_of,
)


def build() -> dict[str, Any]:
    return {"model": nn.Linear(50, 50)}


def steps_in_memory(arena_home: Path) -> set[int]:
    return {r.step for r in slots_of(arena_home).values() if r and r.state == "captured"}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def test_what_was_restored_from_survives_a_keeper_that_dies_before_the_first_save(
    tmp_path: Path, arena_dir: Path
) -> None:
    state = build()
    first = holdfast.Checkpointer(tmp_path, state, storage=None)
    step = 0
    while len(held := steps_in_memory(arena_dir) if step else set()) < 3:
        step += 1
        first.save(step).wait_captured(60)
    oldest, newest = min(held), max(held)
    first.__exit__(RuntimeError, RuntimeError(), None)
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        restored = checkpointer.restore(oldest)
        assert restored is not None and restored.source == "memory"
        kill_keeper(arena_dir)
        capture_at_last(checkpointer, oldest + 1)
        found = {(r.incarnation, r.step) for r in slots_of(arena_dir).values() if r}
        assert {(1, oldest), (2, oldest + 1)} <= found
        # After a new snapshot is whole, neither must stay: a second try of it may need the room.
        assert found <= {(1, oldest), (1, newest), (2, oldest + 1)}


def test_a_grant_says_which_request_it_answers(tmp_path: Path, arena_dir: Path) -> None:
    heard: queue.SimpleQueue[m.Message] = queue.SimpleQueue()
    line = connect(tmp_path, listener=heard.put)
    begin(line)
    for step, turn in ((1, 6), (2, 7)):
        line.send(ask(step, turn=turn))
        grant = hear(heard, m.Grant)
        assert (grant.step, grant.request_number) == (step, turn)
        line.send(
            m.Captured(attempt=grant.attempt, image_bytes=IMAGE_BYTES, header_xxh3=X, table_xxh3=X)
        )
        hear(heard, m.Complete)
    end(line)


def test_a_keeper_lost_before_the_restore_ended_is_told_with_what_to_do(
    tmp_path: Path, arena_dir: Path
) -> None:
    checkpointer = holdfast.Checkpointer(tmp_path, build(), storage=None)
    kill_keeper(arena_dir)
    with pytest.raises(holdfast.Fenced, match="Start the run again"):
        checkpointer.restore()
    checkpointer.__exit__(RuntimeError, RuntimeError(), None)
    holdfast.Checkpointer(tmp_path, build(), storage=None).close()


@pytest.mark.promise
def test_an_older_start_writes_to_no_slot_that_a_newer_one_may_read_whose_keeper_died(
    tmp_path: Path, arena_dir: Path
) -> None:
    heard: queue.SimpleQueue[m.Message] = queue.SimpleQueue()
    older, newer = connect(tmp_path, listener=heard.put), connect(tmp_path)
    n = begin(older)
    capture(older, heard, 1)
    newer.request(m.Begin(nonce="newer", world=1), m.Begun, timeout_s=10)
    kill_keeper(arena_dir)  # before it is known what the newer one goes on from
    older.close()
    newer.close()
    line = connect(tmp_path)
    with pytest.raises(holdfast.Fenced, match="newer start"):
        join(line, n)
    assert begin(line) == n + 2
    end(line)


def test_a_life_has_as_many_slots_after_each_death_of_a_keeper_as_before(
    tmp_path: Path, arena_dir: Path, gate: Gate
) -> None:
    counts = []
    with holdfast.Checkpointer(tmp_path, build(), storage=None) as checkpointer:
        step = 0
        for _ in range(3):
            for _ in range(3):
                step += 1
                checkpointer.save(step).wait_captured(60)
            counts.append(len(slots_of(arena_dir)))
            step += 1
            gate.shut()
            lost = checkpointer.save(step)
            assert gate.reached.wait(60)
            kill_keeper(arena_dir)
            with pytest.raises(holdfast.HoldfastError):
                lost.wait_captured(60)
            gate.is_open.set()
        step += 1
        checkpointer.save(step).wait_captured(60)
        counts.append(len(slots_of(arena_dir)))
        writing = [r for r in slots_of(arena_dir).values() if r and r.state == "writing"]
        assert steps_in_memory(arena_dir) >= {step}
        assert max(counts) <= 3
        # As many generations as there are slots can be in memory again.
        for more in range(step + 1, step + 4):
            checkpointer.save(more).wait_captured(60)
        assert steps_in_memory(arena_dir) >= {step + 1, step + 2, step + 3}, writing


def test_a_rank_says_that_it_copies_from_the_grant_until_its_worker_is_done(
    tmp_path: Path, arena_dir: Path, gate: Gate
) -> None:
    with holdfast.Checkpointer(tmp_path, build(), storage=None) as checkpointer:
        saver = vars(checkpointer)["_saver"]
        assert not saver.is_copying
        gate.shut()
        handle = checkpointer.save(1)
        assert gate.reached.wait(60)
        assert saver.is_copying
        kill_keeper(arena_dir)
        with pytest.raises(holdfast.HoldfastError):
            handle.wait_captured(60)
        assert saver.is_copying  # called off, but its worker is still in the copy
        gate.is_open.set()
        checkpointer.save(2).wait_captured(60)
        assert saver.previous_was_skipped() is False
        assert not saver.is_copying


def test_a_copy_out_of_control_is_never_said_to_have_stopped(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise GpuCopyStuck("CUDA error: an illegal memory access was encountered")

    with holdfast.Checkpointer(tmp_path, build(), storage=None) as checkpointer:
        checkpointer.save(1).wait_captured(60)
        with monkeypatch.context() as patch:
            patch.setattr(copier_module, "copy_image", fail)
            with pytest.raises(holdfast.SnapshotSkipped, match="illegal memory access"):
                checkpointer.save(2).wait_captured(60)
        assert vars(checkpointer)["_saver"].is_copying
        kept = [p for p, r in slots_of(arena_dir).items() if r and r.state == "writing"]
        for step in range(3, 9):
            checkpointer.save(step).wait_captured(60)
        records = slots_of(arena_dir)
        (slot,) = kept
        record = records[slot]
        assert record is not None and (record.state, record.step) == ("writing", 2)


def test_slots_the_keeper_has_removed_are_let_go_by_the_trainer(
    tmp_path: Path, arena_dir: Path
) -> None:
    state: dict[str, Any] = {"data": torch.zeros(1)}
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        for step in range(12):
            state["data"] = torch.zeros(1 << (16 + step))
            checkpointer.save(step).wait_captured(60)
        mapped = Path("/proc/self/maps").read_text()
        assert mapped.count(str(arena_dir)) <= 4, mapped


def test_a_slot_that_was_sealed_unheard_is_used_again_although_its_writer_lives(
    tmp_path: Path, arena_dir: Path
) -> None:
    heard: queue.SimpleQueue[m.Message] = queue.SimpleQueue()
    line = connect(tmp_path, listener=heard.put)
    n = begin(line)
    line.send(ask(1))
    path = Path(hear(heard, m.Grant).slot)
    line.close()  # in the middle of the capture: from now on the slot belongs to nobody
    slot = SlotFile.open(path, writable=True)
    record = slot.read_record()
    assert record is not None and record.state == "writing"
    slot.write_record(msgspec.structs.replace(record, state="captured"))
    line = connect(tmp_path, listener=heard.put)
    join(line, n)
    step, deadline = 1, time.monotonic() + 30
    while getattr(slot.read_record(), "attempt", "") == record.attempt:
        assert time.monotonic() < deadline, "the slot is quarantined for ever"
        step += 1
        capture(line, heard, step)
    end(line)
