"""Small messages between ranks: everybody hears everybody, or who is missing, or the same error."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import msgspec
import pytest
import torch.distributed

import holdfast
from holdfast.errors import DeadlineExceeded, HoldfastError, StorageError, UsageError
from holdfast.transport.wire.rank_tree import Join, Said
from holdfast.world import (
    Conclude,
    TorchWorld,
    World,
    all_said_or_raise,
    current_world,
    from_rank0,
    reduce_or_raise,
)
from support.runs.agreement import agree_or_raise
from support.runs.launch import run_ranks


def _talk(rank: int, world: int) -> list[object]:
    ours = current_world()
    assert isinstance(ours, TorchWorld)
    found: list[object] = [_names(ours, f"rank {rank}".encode())]
    found.append(from_rank0(ours, "from 0", lambda: b"hello" if rank == 0 else b"", timeout_s=20))

    def act() -> None:
        if rank == 1:
            raise StorageError("the disk is gone", path="a", tried={1, 2}, disk=World)

    with pytest.raises(StorageError, match="the disk is gone") as failed:
        agree_or_raise(ours, "act", act, timeout_s=20)
    if rank != 1:  # its facts come along; what is not plain as text
        assert failed.value.fields["path"] == "a"
        assert failed.value.fields["tried"] == [1, 2]
        assert "World" in failed.value.fields["disk"]
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


def _lose(rank: int, world: int) -> dict[str, object]:
    """Ranks in a chain; signals while they wait, and one between two others that ends."""
    os.environ["HOLDFAST_HOST_ID"] = f"host-{rank}"
    store = torch.distributed.distributed_c10d._get_default_store()
    found: dict[str, object] = {}

    def note(*_: object) -> None:
        store.set("a handler ran", "yes")

    signal.signal(signal.SIGALRM, note)
    if rank == 1:  # it waits for rank 0, which comes once the handler of rank 1 has run
        signal.setitimer(signal.ITIMER_REAL, 0.3, 0.3)
    if rank == 0:
        store.wait(["a handler ran"])
    ours = TorchWorld(timeout_s=20, fan_out=1)
    signal.setitimer(signal.ITIMER_REAL, 0)
    found["first"] = _names(ours, b"word")

    store.delete_key("a handler ran") if rank == 0 else None
    ours.reduce("ready", b"", max, timeout_s=20)
    if rank == 2:
        signal.setitimer(signal.ITIMER_REAL, 0.3, 0.3)
    if rank == 3:
        store.wait(["a handler ran"])
    ours.reduce("handled", b"", max, timeout_s=20)
    signal.setitimer(signal.ITIMER_REAL, 0)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    if rank == 1:  # inside the phase, waiting for rank 3, which does not come before it hears of it
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    if rank != 3:
        with pytest.raises(KeyboardInterrupt if rank == 1 else HoldfastError) as interrupted:
            agree_or_raise(ours, "interrupted", bytes, timeout_s=20)
        found["interrupted"] = str(interrupted.value)
    if rank == 0:
        store.set("rank 0 knows", "yes")
    if rank == 3:
        store.wait(["rank 0 knows"])
        with pytest.raises(HoldfastError) as interrupted:
            agree_or_raise(ours, "interrupted", bytes, timeout_s=20)
        found["interrupted"] = str(interrupted.value)
    found["again"] = _names(ours, b"again")

    if rank == 1:
        ours.close()
    else:
        with pytest.raises(DeadlineExceeded, match=r"ranks \[1\] ended before .*'without'") as lost:
            ours.reduce("without", b"", max, timeout_s=20)
        found["lost"] = lost.value.fields
    ours.close()
    ours.close()
    found["threads"] = [one.name for one in threading.enumerate() if "ranks" in one.name]
    return found


@pytest.mark.promise
def test_a_rank_that_is_interrupted_or_ends_is_heard_of_at_once() -> None:
    """A handler that ran only at the end of a wait would let these ranks wait for each other."""
    for rank, found in enumerate(run_ranks(4, _lose)):
        assert found["first"] == [(b"word", [(0, 4)])]
        assert found["again"] == [(b"again", [(0, 4)])]
        assert rank == 1 or "rank 1: KeyboardInterrupt" in str(found["interrupted"])
        assert rank == 1 or found["lost"] == {"ranks": [1], "phase": "without"}
        assert found["threads"] == []


def _call_wrongly(rank: int, world: int) -> list[str]:
    """What is raised where machines differ and a parent is at loopback; and by a second call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.meeting.boot_id", lambda: f"machine {rank}")
        patch.setenv("HOLDFAST_HOST_ADDRESS", "127.0.0.1")
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        with pytest.raises(UsageError) as refused:
            TorchWorld(timeout_s=20)
    found = [str(refused.value), *_call_twice(rank)]
    del refused
    _drop_a_world()
    return found


def _call_twice(rank: int) -> list[str]:
    ours, found = TorchWorld(timeout_s=20), []

    def call_again(*_: object) -> None:
        try:
            agree_or_raise(ours, "inner", bytes, timeout_s=20)
        except UsageError as error:
            found.append(str(error))

    signal.signal(signal.SIGALRM, call_again)
    if rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    if rank == 1:
        time.sleep(0.6)
    agree_or_raise(ours, "outer", bytes, timeout_s=20)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    ours.close()
    return found


def _drop_a_world() -> None:
    """Nobody closes it, and its own thread is the one that finds it gone."""
    world = TorchWorld(timeout_s=20)
    loop, cycle = world._channels._loop, [world]
    cycle.append(cycle)  # type: ignore[arg-type]
    del world, cycle
    loop.call_soon_threadsafe(gc.collect)
    end_s = time.monotonic() + 20
    while any("holdfast-ranks" in one.name for one in threading.enumerate()):
        assert time.monotonic() < end_s, "the thread waits for itself"
        time.sleep(0.01)


def test_calls_that_cannot_be_answered_are_refused_and_a_dropped_world_ends() -> None:
    (one, second), (other,) = run_ranks(2, _call_wrongly)
    assert one == other
    assert "rank 0 does not know by which address rank 1 reaches it" in one
    assert "'inner' was called while another call of Holdfast waits" in second


def _conclude(rank: int, world: int) -> dict[str, object]:
    """Rank 0 makes the word of all from what they said, at once, wrongly, too late, and never."""
    ours = TorchWorld(timeout_s=20)
    acted: list[str] = []

    def conclude_with(act: Callable[[], object], timeout_s: float = 20) -> object:
        def conclude(columns: list[list[Said]]) -> bytes:
            acted.append(threading.current_thread().name)
            act()
            return b"%d values" % len(columns[0])

        def say() -> tuple[bytes]:
            return (b"rank %d" % rank,)

        try:
            said = all_said_or_raise(ours, "told", say, timeout_s=timeout_s, conclude=conclude)
        except (HoldfastError, KeyboardInterrupt) as error:
            return f"{type(error).__name__}: {error}"
        return said[1]

    def refuse() -> None:
        raise StorageError("the disk is gone")

    def interrupt() -> None:
        raise KeyboardInterrupt

    def fail() -> bytes:
        if rank == 2:
            raise StorageError("no disk")
        return b""

    def note(word: bytes) -> bytes:
        acted.append("it acted")
        return word

    found: dict[str, object] = {"well": conclude_with(lambda: None)}
    found["refused"] = conclude_with(refuse)
    found["late"] = conclude_with(lambda: time.sleep(1.5), timeout_s=0.5)
    found["interrupted"] = conclude_with(interrupt)
    acted_before = len(acted)
    with pytest.raises(StorageError, match="no disk"):
        reduce_or_raise(ours, "failed", fail, max, timeout_s=20, conclude=note)
    found["acted after a failure"] = len(acted) - acted_before
    found["again"] = conclude_with(lambda: None)
    found["threads"] = set(acted)
    ours.close()
    return found


@pytest.mark.promise
def test_what_rank_0_concludes_from_the_words_of_all_reaches_all_or_its_error_does() -> None:
    ranks = run_ranks(3, _conclude)
    for rank, found in enumerate(ranks):
        assert found["well"] == found["again"] == [Said(b"3 values", [(0, 1)])]
        told_by = "rank 0: " if rank else ""
        assert found["refused"] == f"StorageError: {told_by}the disk is gone"
        assert "DeadlineExceeded: ranks [0] did not reach 'told' within 0.5 s" in str(found["late"])
        assert found["interrupted"] == (
            "HoldfastError: rank 0: KeyboardInterrupt: " if rank else "KeyboardInterrupt: "
        )
        assert found["acted after a failure"] == 0
        assert found["threads"] == (set() if rank else {"MainThread"})


class Told(World):
    """A world in which this rank has heard what the others say before it speaks."""

    nonce, address = "n", "127.0.0.1"

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
        return reduce(join, (*self._others[: self.rank], mine, *self._others[self.rank :]))

    def leave(self, phase: str, mine: bytes) -> None:
        raise AssertionError("nobody is interrupted")

    def end(self) -> None:
        raise AssertionError("nobody ends it")

    def close(self) -> None:
        raise AssertionError("nobody closes it")


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
    world = World()
    said = reduce_or_raise(world, "any", lambda: b"x", max, timeout_s=1)
    assert said == b"x"
    with pytest.raises(UsageError, match="no"):
        agree_or_raise(world, "any", _refuse, timeout_s=1)


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
