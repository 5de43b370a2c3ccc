"""Load a directory of ``torch_dist`` by Megatron-Core into ranks of given sizes.

    python tests/golden/foreign/read_megatron_core.py DIRECTORY OUT '{"tp": 1, "pp": 2, ...}'

What it has then goes to OUT, as `golden.foreign.kit` writes it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state

from golden.foreign.kit import run_ranks, save_expected
from golden.foreign.write_megatron_core import Sizes, model_of, shards, state_of, train


def read(rank: int, world: int, where: str, out: str, sizes: Sizes) -> None:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        sizes["tp"], sizes["pp"], expert_model_parallel_size=sizes["ep"]
    )
    model, optimizer = model_of(sizes, 2)
    train(model, optimizer)
    state = state_of(model, optimizer, sizes, is_loading=True)
    del state["place"]  # of the ranks that wrote it
    loaded = dist_checkpointing.load(state, where)
    if optimizer is not None:
        found = dist_checkpointing.load_plain_tensors(where)
        whole = {name: one for name, one in found.items() if isinstance(one, torch.Tensor)}
    else:
        model.module.load_state_dict(loaded["model"], strict=False)
        every: list[Any] = [None] * world
        dist.all_gather_object(every, shards(state_of(model, None, sizes, is_loading=False)))
        whole = {}
        for key, shape, offset, data in (one for some in every for one in some):
            target = whole.setdefault(key, torch.zeros(shape, dtype=data.dtype))
            target[tuple(slice(a, a + b) for a, b in zip(offset, data.shape, strict=True))] = data
    if rank == 0:
        Path(out).mkdir(parents=True, exist_ok=True)
        save_expected(Path(out), whole, {"notes": loaded["notes"]})
    dist.barrier()


if __name__ == "__main__":
    given = json.loads(sys.argv[3])
    run_ranks(given["tp"] * given["pp"] * given["ep"], read, sys.argv[1], sys.argv[2], given)
