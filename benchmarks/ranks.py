"""Several ranks of one measurement, in processes of their own: started together, ended together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing import get_context
from multiprocessing.connection import wait
from typing import Any

import harness
import torch.distributed as dist


def run_ranks(name: str, main: Callable[..., object], arguments: Sequence[tuple[Any, ...]]) -> None:
    """Run ``main`` once with each of the arguments; SystemExit when one fails, which ends all.

    The others would wait for it until their own patience is over.
    """
    context = get_context("spawn")
    ranks = [context.Process(target=main, args=some) for some in arguments]
    for rank in ranks:
        rank.start()
    try:
        at_work = {rank.sentinel: rank for rank in ranks}
        while at_work:
            for ended in wait(list(at_work)):
                if at_work.pop(ended).exitcode:  # type: ignore[call-overload]
                    raise SystemExit(f"{name}: a rank failed")
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


@contextmanager
def machine_alone() -> Iterator[None]:
    """As ``harness.machine_alone``, for all ranks together."""
    with harness.machine_alone() if dist.get_rank() == 0 else nullcontext():
        dist.barrier()
        yield
        dist.barrier()
