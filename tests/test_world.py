"""Small messages between ranks: everybody hears everybody, or who is missing, or the same error."""

from __future__ import annotations

import time
from functools import reduce
from pathlib import Path

import msgspec
import pytest

import holdfast
from holdfast.errors import DeadlineExceeded, StorageError, UsageError
from holdfast.world import (
    Conclude,
    Join,
    SoloWorld,
    TorchWorld,
    agree_or_raise,
    all_said_or_raise,
    current_world,
    from_rank0,
    reduce_or_raise,
)
from support.runs.launch import run_ranks


def _talk(rank: int, world: int) -> list[object]:
    ours = current_world()
    assert isinstance(ours, TorchWorld)
    found: list[object] = [_names(ours, f"rank {rank}".encode())]
    found.append(from_rank0(ours, "from 0", lambda: b"hello" if rank == 0 else b"", timeout_s=20))

    def act() -> None:
        if rank == 1:
            raise StorageError("the disk is gone", path="a", tried={1, 2}, disk=SoloWorld)

    with pytest.raises(StorageError, match="the disk is gone") as failed:
        agree_or_raise(ours, "act", act, timeout_s=20)
    if rank != 1:  # its facts come along; what is not plain as text
        assert failed.value.fields["path"] == "a"
        assert failed.value.fields["tried"] == [1, 2]
        assert "SoloWorld" in failed.value.fields["disk"]
    if rank != 2:  # it never comes to this phase
        with pytest.raises(DeadlineExceeded, match=r"ranks \[2\] did not reach 'late'") as caught:
            ours.reduce("late", b"", max, timeout_s=0.5)
        assert caught.value.fields == {"ranks": [2], "phase": "late"}
    else:
        time.sleep(1.0)
    again = TorchWorld()
    assert again.nonce != ours.nonce
    found.append(_names(again, b"new"))
    return found


def _names(world: TorchWorld, mine: bytes) -> list[tuple[bytes, list[tuple[int, int]]]]:
    [said] = all_said_or_raise(world, "names", lambda: (mine,), timeout_s=20)
    return [(one.value, one.ranks) for one in said]


def test_ranks_hear_each_other_and_who_is_missing_is_named() -> None:
    for found in run_ranks(3, _talk):
        names = [(f"rank {rank}".encode(), [(rank, rank + 1)]) for rank in range(3)]
        assert found == [names, b"hello", [(b"new", [(0, 3)])]]


class Told:
    """A world in which this rank has heard what the others say before it speaks."""

    nonce = "n"

    def __init__(self, rank: int, *others: bytes) -> None:
        self.rank, self.size, self._others = rank, len(others) + 1, others

    def reduce(
        self,
        phase: str,
        mine: bytes,
        join: Join,
        *,
        timeout_s: float,
        conclude: Conclude | None = None,
    ) -> bytes:
        joined = reduce(join, (*self._others[: self.rank], mine, *self._others[self.rank :]))
        return joined if conclude is None else conclude(joined)

    def leave(self, phase: str, mine: bytes) -> None:
        raise AssertionError("nobody is interrupted")


def say(rank: int, kind: str, payload: bytes) -> bytes:
    return msgspec.msgpack.encode([rank, kind, kind and "why", payload])


@pytest.mark.promise
@pytest.mark.parametrize("rank", [1, 2])
def test_every_rank_goes_on_with_what_rank_0_chose_whatever_it_would_have_chosen(rank: int) -> None:
    world = Told(rank, say(0, "", b"1-7"), say(3 - rank, "", b""))
    assert from_rank0(world, "choose", lambda: b"1-8", timeout_s=1) == b"1-7"


@pytest.mark.promise
@pytest.mark.parametrize("failed", [0, 1])
def test_no_rank_goes_on_when_another_failed(failed: int) -> None:
    others = [say(0, "", b""), say(2, "", b"")]
    others[failed] = say(2 * failed, "StorageError", b"")
    with pytest.raises(StorageError, match="why"):
        agree_or_raise(Told(1, *others), "read", lambda: b"good", timeout_s=1)


def test_a_process_alone_is_a_world_of_one() -> None:
    world = SoloWorld()
    said = reduce_or_raise(world, "any", lambda: b"x", max, timeout_s=1, conclude=bytes.upper)
    assert said == b"X"
    with pytest.raises(UsageError, match="no"):
        agree_or_raise(world, "any", _refuse, timeout_s=1)
    with pytest.raises(UsageError, match="no"):
        reduce_or_raise(world, "any", bytes, max, timeout_s=1, conclude=lambda _: _refuse())


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
