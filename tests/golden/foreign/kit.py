"""What the scripts that write golden checkpoints share: ranks, and the form of what is expected.

It runs in the environments of other libraries, so it takes torch and safetensors alone.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from safetensors.torch import save_file


def run_ranks(world: int, fn: Callable[..., None], *args: Any) -> None:
    """Call ``fn(rank, world, *args)`` in new processes, with what init_process_group needs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (world, port, fn, args), nprocs=world)


def _rank(rank: int, world: int, port: int, fn: Callable[..., None], args: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    fn(rank, world, *args)


def save_expected(
    case: Path, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]
) -> None:
    """Write what the writer's own loader gave: tensors by the names that leaves have here."""
    whole = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    save_file(whole, case / "expected.safetensors")
    text = json.dumps(values, indent=1, sort_keys=True, default=str)
    (case / "expected.json").write_text(text + "\n")
