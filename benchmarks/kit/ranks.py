"""Run the ranks of one measurement, each in a process: started together, ended together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.kit import machine, series


def run_ranks(
    name: str, world: int, root: Path, measure: Callable[..., object], *arguments: Any
) -> Any:
    """Run ``measure(*arguments)`` on all ranks of a group; what rank 0 found.

    ``root`` is a directory for them to meet in. SystemExit when one fails, which ends all: the
    others would wait for it until their own patience is over.
    """
    context = get_context("spawn")
    here, there = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=_run, args=(rank, world, str(root), there, measure, arguments))
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    there.close()
    found = None
    try:
        at_work: dict[Any, Any] = {rank.sentinel: rank for rank in ranks}
        while at_work:
            for ready in wait([*at_work, here] if found is None else list(at_work)):
                if ready is here:
                    found = _heard(here)
                elif at_work.pop(ready).exitcode:
                    raise SystemExit(f"{name}: a rank failed")
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    return found[0] if found else _heard(here)[0]


def _heard(here: Connection) -> tuple[Any]:
    """What rank 0 sent; (None,) when it ended without an answer."""
    try:
        return (here.recv(),)
    except EOFError:
        return (None,)


def _run(
    rank: int,
    world: int,
    root: str,
    answer: Connection,
    measure: Callable[..., object],
    arguments: tuple[Any, ...],
) -> None:
    """A process: join the group, measure, and send what rank 0 found."""
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    store = dist.FileStore(f"{root}/store-{world}", world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=5)
    )
    found = measure(*arguments)
    if rank == 0:
        answer.send(found)
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def machine_alone() -> Iterator[None]:
    """As ``machine.alone``, for all ranks together."""
    with machine.alone() if dist.get_rank() == 0 else nullcontext():
        dist.barrier()
        yield
        dist.barrier()


def show(line: str) -> None:
    """Print progress, by one rank."""
    if dist.get_rank() == 0:
        series.show(line)
