"""A run that is killed and goes on with fewer ranks has trained on every sample once."""

from __future__ import annotations

import os
import signal
from itertools import chain
from pathlib import Path

import pytest
import torch.distributed as dist

import holdfast
from holdfast.data.planning.order import Order
from support.models.packing import SAMPLES, Packing, lines
from support.runs.launch import run_ranks

KILLED_AFTER = 9


def _train_until_killed(rank: int, world: int, directory: str) -> None:
    packing = Packing(directory, "first", rank)
    checkpointer = holdfast.Checkpointer(f"{directory}/run", packing.state, storage=None)
    checkpointer.restore()
    for step in packing.steps(100):
        dist.barrier()  # stands for the collectives of a backward
        handle = checkpointer.step(step)
        if rank == 1 and step == KILLED_AFTER:
            assert handle is not None
            handle.wait_captured(30)
            os.kill(os.getpid(), signal.SIGKILL)


def _go_on(rank: int, world: int, directory: str) -> tuple[int, str, list[int]]:
    packing = Packing(directory, "second", rank)
    checkpointer = holdfast.Checkpointer(f"{directory}/run", packing.state, storage=None)
    restored = checkpointer.restore()
    assert restored is not None
    assert bool((packing.weight == restored.step + 1).all())
    for step in packing.steps(100):
        checkpointer.step(step)
        if packing.sampler.epoch == 1:
            break
    checkpointer.close()
    return restored.step, restored.source, packing.waiting()


def test_a_killed_run_goes_on_with_fewer_ranks_and_misses_no_sample(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="SIGKILL"):
        run_ranks(3, _train_until_killed, str(tmp_path))
    told = run_ranks(2, _go_on, str(tmp_path))
    ((restored, source),) = {(step, source) for step, source, _ in told}
    assert source == "memory"
    assert restored >= KILLED_AFTER

    first = lines(str(tmp_path), "first", 3, range(restored + 1))
    done = max(len(p.read_text().splitlines()) for p in tmp_path.glob("second-*"))
    second = lines(str(tmp_path), "second", 2, range(restored + 1, restored + 1 + done))
    given = [*chain(*(line["given"] for step in first + second for line in step))]
    used = chain(*(line["used"] for step in first + second for line in step))
    left = chain(*(waiting for _, _, waiting in told))
    assert given == Order(SAMPLES, 11, shuffle=True).at(0, 0, SAMPLES)
    assert sorted([*used, *left]) == list(range(SAMPLES))
