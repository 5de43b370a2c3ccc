"""Ranks that disagree or do not come: one error for all, with names, and nobody hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import holdfast
from holdfast.protocol import messages
from holdfast.world import World
from support.runs.launch import run_ranks
from support.runs.mishaps import build, content, dropped, flip, listening, train

PATIENCE_S = 3.0


def _error(act: Callable[[], object]) -> str:
    try:
        act()
    except holdfast.HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _disagree(rank: int, world: int, root: str) -> dict[str, Any]:
    """One launch, many disagreements; each must leave all ranks able to go on together."""
    found: dict[str, Any] = {}
    state = build()
    train(state, 0)

    def start(where: str = root, **options: Any) -> holdfast.Checkpointer:
        options = {"storage": None, "timeout_s": 30.0} | options
        return holdfast.Checkpointer(where, state, **options)

    found["root"] = _error(lambda: start(f"{root}-{rank}"))
    messages.PROTOCOL += rank
    found["version"] = _error(start)
    messages.PROTOCOL -= rank
    found["policy"] = _error(lambda: start(memory=holdfast.Every(steps=1 + rank)))
    state["odd"] = object() if rank == 1 else 1
    found["state"] = _error(start)
    found["one-shot state"] = _error(lambda: holdfast.save(root, state))
    del state["odd"]

    holdfast.save(root, state, 4, timeout_s=30)
    checkpointer = start()
    found["calls"] = _error(
        checkpointer.restore if rank == 0 else lambda: checkpointer._begin_anew()
    )
    other = build(wide=700 if rank == 0 else 701)
    before = content(other)
    found["mismatch"] = _error(lambda: holdfast.load(root, other, timeout_s=30))
    found["untouched"] = content(other) == before
    restored = checkpointer.restore()
    found["restored"] = restored and restored.step

    handle = checkpointer.save(5 + rank)
    found["step"] = _error(lambda: handle.wait_captured(30))
    state["only"] = [1.0] if rank else 1.0
    checkpointer.save(7, durable=rank == 0).wait_captured(30)
    checkpointer.save(8, durable=True).wait_durable(30)
    checkpointer.close()
    return found


def _late(rank: int, world: int, root: str) -> dict[str, Any]:
    """Rank 1 comes to none of rank 0's calls; it waits for the end of each."""
    found: dict[str, Any] = {}
    state = build()
    if rank == 0:
        calls = {
            "start": lambda: holdfast.Checkpointer(root, state, timeout_s=PATIENCE_S),
            "save": lambda: holdfast.save(root, state, timeout_s=PATIENCE_S),
            "load": lambda: holdfast.load(root, state, timeout_s=PATIENCE_S),
        }
        for name, call in calls.items():
            started_s = time.monotonic()
            found[name] = _error(call)
            found[f"{name}_s"] = time.monotonic() - started_s
    else:
        time.sleep(4 * PATIENCE_S)
    checkpointer = holdfast.Checkpointer(root, state, storage=None, timeout_s=60)
    assert checkpointer.restore() is None
    checkpointer.save(0).wait_captured(30)
    checkpointer.close()
    return found


def test_ranks_that_disagree_all_hear_the_same_and_go_on_together(tmp_path: Path) -> None:
    first, second = run_ranks(2, _disagree, str(tmp_path / "run"))
    for found in (first, second):
        assert "UsageError: the ranks disagree: root is" in found["root"]
        assert "on rank 1. Give every rank's Checkpointer the same arguments" in found["root"]
        assert "UsageError: the ranks disagree: the protocol of keepers is" in found["version"]
        assert "on rank 1. Install one version of Holdfast on all hosts" in found["version"]
        assert "the ranks disagree: memory is Every(steps=1" in found["policy"]
        assert found["state"].startswith("UnsupportedState: ")
        assert found["one-shot state"].startswith("UnsupportedState: ")
        assert "the ranks do different things" in found["calls"]
        assert "'restore 1-4 from storage: matched'" in found["calls"]
        assert found["mismatch"].startswith("StateMismatch: ")
        assert "[701, 33]" in found["mismatch"]
        assert found["untouched"]
        assert found["restored"] == 4
    assert "rank 1: odd is a" in first["state"]
    assert "rank 1: " in first["mismatch"]
    assert "rank 0: 5, rank 1: 6" in first["step"]


def test_a_rank_that_does_not_come_is_named_with_the_phase_and_holds_nobody_for_longer(
    tmp_path: Path,
) -> None:
    first, _ = run_ranks(2, _late, str(tmp_path / "run"))
    for name in ("start", "save", "load"):
        assert "DeadlineExceeded: ranks [1] did not reach" in first[name], first[name]
        assert "within 3 s; rank 0 gave up" in first[name]
        assert first[f"{name}_s"] < 4 * PATIENCE_S


def _one_source_fails(rank: int, world: int, root: str) -> dict[str, Any]:
    """Rank 1's image of step 1 is damaged; then every image."""
    state = build(wide=7000)
    before = []
    for step in range(2):
        train(state, step)
        before.append(content(state))
        holdfast.save(root, state, step)
    import torch.distributed as dist

    if rank == 0:
        for image in Path(root).glob("steps/2-1-*/live-00001.safetensors"):
            flip(image, 200_000)
    dist.barrier()
    into = build(1, wide=7000)
    with listening() as heard:
        restored = holdfast.load(root, into)
    found = {
        "step": restored.step,
        "same": content(into) == before[0],
        "dropped": dropped(heard),
    }
    dist.barrier()
    if rank == 0:
        for image in Path(root).glob("steps/1-0-*/live-00000.safetensors"):
            flip(image, 200_000)
    dist.barrier()
    found["none"] = _error(lambda: holdfast.load(root, into))
    return found


def test_a_source_that_one_rank_cannot_read_is_dropped_by_all(tmp_path: Path) -> None:
    for found in run_ranks(2, _one_source_fails, str(tmp_path / "run")):
        assert found["step"] == 0
        assert found["same"]
        assert found["dropped"] == ["storage 2-1"]
        assert found["none"].startswith("RestoreError: no generation could be restored")
        assert "storage 2-1" in found["none"] and "storage 1-0" in found["none"]


def _mixed_errors(rank: int, world: int) -> list[str]:
    from holdfast.world import current_world
    from support.runs.agreement import agree_or_raise

    ours = current_world(timeout_s=30)
    assert isinstance(ours, World)

    def act() -> None:
        if rank == 1:
            raise holdfast.ChecksumMismatch("block 3")
        if rank == 2:
            raise ValueError("mine")

    said = [_error(lambda: agree_or_raise(ours, "read", act, timeout_s=30))]

    def leave() -> None:
        if rank == 2:
            raise KeyboardInterrupt

    try:
        said.append(_error(lambda: agree_or_raise(ours, "left", leave, timeout_s=30)))
    except KeyboardInterrupt:
        said.append("left")
    return said


def test_of_several_errors_all_ranks_raise_one_and_ctrl_c_keeps_nobody_waiting() -> None:
    first, second, third = run_ranks(3, _mixed_errors)
    assert first[0] == third[0] == "ChecksumMismatch: rank 1: block 3"
    assert second[0] == "ChecksumMismatch: block 3"
    assert first[1] == second[1] == "HoldfastError: rank 2: KeyboardInterrupt: "
    assert third[1] == "left"
