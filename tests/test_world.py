"""Small messages between ranks: everybody hears everybody, or who is missing, or the same error."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

import holdfast
from holdfast.errors import DeadlineExceeded, StorageError, UsageError
from holdfast.world import SoloWorld, TorchWorld, all_gather_or_raise, current_world, from_rank0
from support.runs.launch import run_ranks


def _talk(rank: int, world: int) -> list[object]:
    ours = current_world()
    assert isinstance(ours, TorchWorld)
    found: list[object] = [ours.gather("names", f"rank {rank}".encode(), timeout_s=20)]
    found.append(from_rank0(ours, "from 0", lambda: b"hello" if rank == 0 else b"", timeout_s=20))

    def act() -> bytes:
        if rank == 1:
            raise StorageError("the disk is gone", path="a", tried={1, 2}, disk=SoloWorld)
        return b"fine"

    with pytest.raises(StorageError, match="the disk is gone") as failed:
        all_gather_or_raise(ours, "act", act, timeout_s=20)
    if rank != 1:  # its facts come along; what is not plain as text
        assert failed.value.fields["path"] == "a"
        assert failed.value.fields["tried"] == [1, 2]
        assert "SoloWorld" in failed.value.fields["disk"]
    if rank != 2:  # it never comes to this phase
        with pytest.raises(DeadlineExceeded, match=r"ranks \[2\] did not reach 'late'") as caught:
            ours.gather("late", b"", timeout_s=0.5)
        assert caught.value.fields == {"ranks": [2], "phase": "late"}
    else:
        time.sleep(1.0)
    again = TorchWorld()
    assert again.nonce != ours.nonce
    found.append(again.gather("names", b"new", timeout_s=20))
    return found


def test_ranks_hear_each_other_and_who_is_missing_is_named() -> None:
    for found in run_ranks(3, _talk):
        assert found == [[b"rank 0", b"rank 1", b"rank 2"], b"hello", [b"new"] * 3]


class Told:
    """A world in which this rank has heard what the others say before it speaks."""

    nonce = "n"

    def __init__(self, rank: int, *others: bytes) -> None:
        self.rank, self.size, self._others = rank, len(others) + 1, others

    def gather(self, phase: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        return [*self._others[: self.rank], payload, *self._others[self.rank :]]


def say(kind: str, payload: bytes) -> bytes:
    return msgspec.msgpack.encode([kind, kind and "why", payload])


@pytest.mark.promise
@pytest.mark.parametrize("rank", [1, 2])
def test_every_rank_goes_on_with_what_rank_0_chose_whatever_it_would_have_chosen(rank: int) -> None:
    world = Told(rank, say("", b"1-7"), say("", b"1-9"))
    assert from_rank0(world, "choose", lambda: b"1-8", timeout_s=1) == b"1-7"


@pytest.mark.promise
@pytest.mark.parametrize("failed", [0, 1])
def test_no_rank_goes_on_when_another_failed(failed: int) -> None:
    others = [say("", b""), say("", b"")]
    others[failed] = say("StorageError", b"")
    with pytest.raises(StorageError, match="why"):
        all_gather_or_raise(Told(1, *others), "read", lambda: b"good", timeout_s=1)


def test_a_process_alone_is_a_world_of_one() -> None:
    world = SoloWorld()
    assert all_gather_or_raise(world, "any", lambda: b"x", timeout_s=1) == [b"x"]
    with pytest.raises(UsageError, match="no"):
        all_gather_or_raise(world, "any", _refuse, timeout_s=1)


def _refuse() -> bytes:
    raise UsageError("no")


def test_a_rank_that_has_no_group_is_refused_and_not_taken_for_a_run_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"rank 1 of 2.*init_process_group"):
        holdfast.save(tmp_path / "run", {"x": 1})
    with pytest.raises(UsageError, match=r"rank 1 of 2.*init_process_group"):
        holdfast.Checkpointer(tmp_path / "run", {"x": 1})
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("WORLD_SIZE", "1")
    holdfast.save(tmp_path / "run", {"x": 1})
