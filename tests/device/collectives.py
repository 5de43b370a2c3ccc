"""Collectives of the simulated device: ``fake`` for one rank, and gloo for several."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

#: Methods of a process group, each with the name that older versions of torch have for it.
_COLLECTIVES = {
    "allreduce": "",
    "allreduce_coalesced": "",
    "broadcast": "",
    "barrier": "",
    "reduce": "",
    "allgather": "",
    "gather": "",
    "scatter": "",
    "reduce_scatter": "",
    "alltoall": "",
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "send": "",
    "recv": "",
}
_COALESCED = {
    "all_gather_single_coalesced": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single",
    "reduce_scatter_single_coalesced": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single",
}


class StagedGroup(dist.ProcessGroup):
    """Waits for the stream, has gloo do the work with memory of the host, and copies it back."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "staged"

    @property
    def pg_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    group_name = pg_name  # type: ignore[assignment]


def _staged(name: str, old_name: str) -> Callable[..., Any]:
    def collective(group: StagedGroup, *given: Any, **options: Any) -> Any:
        results: list[tuple[torch.Tensor, torch.Tensor]] = []

        def to_host(value: Any, written: bool) -> Any:
            if isinstance(value, list):
                return [to_host(one, written) for one in value]
            if not isinstance(value, torch.Tensor) or value.is_cpu:
                return value
            results.extend([(value, host := value.cpu())] if written else [])
            return host if written else value.cpu()

        divisor = 1
        for one in [*given, *options.values()]:
            if getattr(one, "reduceOp", None) == dist.ReduceOp.AVG:
                one.reduceOp, divisor = dist.ReduceOp.SUM, group.size()
        work = getattr(group._gloo, name, None) or getattr(group._gloo, old_name)
        done = work(*(to_host(value, n == 0) for n, value in enumerate(given)), **options)
        done.wait()
        for there, host in results:
            there.copy_(host.div_(divisor) if divisor > 1 else host)
        return done

    return collective


def _one_by_one(name: str) -> Callable[..., Any]:
    def collective(group: StagedGroup, outputs: Any, inputs: Any, *options: Any) -> Any:
        call = getattr(group, name)
        return [call(*pair, *options) for pair in zip(outputs, inputs, strict=True)][-1]

    return collective


for _name, _old in _COLLECTIVES.items():
    for _known in filter(None, (_name, _old)):
        setattr(StagedGroup, _known, _staged(_name, _old))
for _name, _single in _COALESCED.items():
    setattr(StagedGroup, _name, _one_by_one(_single))


def join_alone() -> None:
    """Make this process a group of one."""
    capability = dist.Backend.backend_capability.setdefault("fake", [])
    if "sim" not in capability:
        capability.append("sim")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)


def join(store: dist.Store, rank: int, size: int) -> None:
    """Make this process one rank of ``size``."""
    if "staged" not in dist.Backend.backend_list:
        dist.Backend.register_backend("staged", StagedGroup, devices=["cpu", "sim"])
    dist.init_process_group("staged", store=store, rank=rank, world_size=size)
