"""What tests of an accelerator ask of it beyond torch's common names: a real one, or ``sim``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


def join_alone(device: str) -> None:
    """Makes this process a process group of its own, by the collectives of ``device``."""
    if device == "sim":
        from device import collectives

        collectives.join_alone()
        # FSDP2 frees memory that another stream reads, and has its next owner wait for that.
        sys.modules["simdev"].strict(False)
    else:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


@contextmanager
def limited_memory(device: str, room_bytes: int) -> Iterator[None]:
    """Leaves the device this many bytes beyond what is allocated now."""
    if device == "sim":
        simdev: Any = sys.modules["simdev"]
        simdev.fail(limit=torch.accelerator.memory_allocated() + room_bytes)
        try:
            yield
        finally:
            simdev.recover()
        return
    torch.cuda.empty_cache()
    limit_bytes = torch.cuda.memory_reserved() + room_bytes
    torch.cuda.set_per_process_memory_fraction(limit_bytes / torch.cuda.mem_get_info()[1])
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
