"""The rounds in which ranks meet from the start of a run until it is restored are few."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import holdfast
from holdfast.restore import read_once
from holdfast.world import TorchWorld
from support.runs.launch import run_ranks

#: From the construction of a Checkpointer until its ``restore`` returns.
MOST_ROUNDS = 6
MIB = 1 << 20


@contextmanager
def counting() -> Iterator[list[str]]:
    """The phases in which this rank meets the others."""
    phases: list[str] = []
    reduce = TorchWorld.reduce

    def count(world: TorchWorld, phase: str, *rest: Any, **options: Any) -> bytes:
        phases.append(phase)
        return reduce(world, phase, *rest, **options)

    with mock.patch.object(TorchWorld, "reduce", count):
        yield phases


def _state(rank: int, world: int, rows: int) -> dict[str, Any]:
    """A model that every rank has, and large rows of which each rank has its own."""
    torch.manual_seed(1)
    model = torch.nn.Linear(30, 20)
    optimizer = torch.optim.AdamW(model.parameters())
    mesh = init_device_mesh("cpu", (world,))
    own = torch.full((rows, MIB // 4), float(rank))
    model.rows = torch.nn.Parameter(DTensor.from_local(own, mesh, [Shard(0)]))
    return {"model": model, "optimizer": optimizer, "rng": holdfast.Rng()}


def _lives(rank: int, world: int, root: str, hosts: tuple[str, ...], rows: int) -> dict[str, Any]:
    os.environ["HOLDFAST_HOST_ID"] = hosts[rank]
    found: dict[str, Any] = {}
    for life, source in enumerate(("", "memory", "storage"), 1):
        state = _state(rank, world, rows)
        if source:  # what is restored is to be seen
            state["model"].rows.data.to_local().zero_()
        dist.barrier()
        with counting() as phases:
            checkpointer = holdfast.Checkpointer(root, state, storage=None, timeout_s=30)
            restored = checkpointer.restore()
        found[source or "anew"] = list(phases)
        assert (restored.source if restored else "") == source
        assert bool((state["model"].rows.to_local() == rank).all())
        checkpointer.save(life, durable=life == 2).wait_captured(30)
        if life == 1:
            dist.barrier()  # all have captured it
            checkpointer._hang_up()
        else:
            checkpointer.close()
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("hosts", "rows"), [("aaa", 1), ("aab", 1), ("aab", 24)], ids=["one-host", "hosts", "much"]
)
def test_a_run_is_restored_after_few_rounds_of_its_ranks(
    tmp_path: Path, hosts: str, rows: int
) -> None:
    """On one host and on several, also where so much is read that ranks would read for others."""
    for found in run_ranks(3, _lives, str(tmp_path / "run"), tuple(hosts), rows):
        for source, phases in found.items():
            assert len(phases) <= MOST_ROUNDS, (source, phases)
        print(found)
    assert rows == 1 or rows * 3 * 3 * MIB > read_once.WORTH_BYTES


def _save_twice(rank: int, world: int, root: str) -> list[str]:
    checkpointer = holdfast.Checkpointer(root, _state(rank, world, 1), storage=None, timeout_s=30)
    for step in (1, 2):
        checkpointer.save(step).wait_captured(30)
    end_s = time.monotonic() + 20
    while (left := _threads_of_ranks()) and time.monotonic() < end_s:
        time.sleep(0.01)  # the end is not waited for while training
    checkpointer.close()
    return left


def _threads_of_ranks() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "holdfast-ranks"]


def test_a_training_that_goes_on_keeps_no_line_between_its_ranks(tmp_path: Path) -> None:
    assert run_ranks(2, _save_twice, str(tmp_path / "run")) == [[], []]


class CountedStore:
    """A store that counts what is asked of it, and of each of its clients."""

    def __init__(self, store: Any, asked: list[str]) -> None:
        self.store, self.asked = store, asked

    def clone(self) -> CountedStore:
        return CountedStore(self.store.clone(), self.asked)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.store, name)
        if not callable(found) or name == "set_timeout":  # that one is of the client alone
            return found

        def ask(*arguments: Any) -> Any:
            self.asked.append(name)
            return found(*arguments)

        return ask


def _meet(rank: int, world: int) -> tuple[list[str], list[str]]:
    store = dist.distributed_c10d._get_default_store()
    asked: list[str] = []
    counted = CountedStore(store, asked)
    with mock.patch.object(dist.distributed_c10d, "_get_default_store", return_value=counted):
        met = TorchWorld(timeout_s=20)
    met.reduce("all have met", b"", max, timeout_s=20)
    left = [key for key in store.list_keys() if "holdfast" in key]
    met.reduce("all have looked", b"", max, timeout_s=20)
    met.close()
    return asked, left


def test_ranks_meet_with_few_requests_to_the_store_and_leave_nothing_there() -> None:
    for asked, left in run_ranks(4, _meet):
        assert len(asked) <= 6, asked
        assert left == []


def _one_shot(rank: int, world: int, root: str) -> tuple[list[str], list[str]]:
    state = _state(rank, world, 1)
    with counting() as saving:
        holdfast.save(root, state)
    with counting() as loading:
        holdfast.load(root, state)
    return list(saving), list(loading)


def test_a_save_of_one_call_takes_two_rounds_and_a_load_four(tmp_path: Path) -> None:
    for saving, loading in run_ranks(2, _one_shot, str(tmp_path / "run")):
        assert saving == ["save: state", "save: write"]
        assert len(loading) == 4, loading
