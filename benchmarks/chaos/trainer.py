"""Train the demo's GPT as one rank under chaos, with fingerprints of its state at each step.

That of the tensors is a sum over all elements of all parameters and moments, each mixed with its
name and its place in the whole tensor. Every rank sums its own elements and writes that down; the
sum of all ranks is that of the state, however it is cut, and costs no collective. One bit that
differs anywhere changes it. Generators are each rank's own, drawn from at each step, and have a
fingerprint for each rank: it goes on with its own, however many ranks there are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PRELOADED = ["torch", "torch._dynamo", "torch.distributed.fsdp", "holdfast.demo.train"]


def train(rank: int, life: dict[str, Any]) -> None:
    """From wherever the run stands, for ``steps`` steps in all; a line for each."""
    import torch
    import torch.distributed as dist

    import holdfast
    from holdfast.demo.train import batch, corpus, losses_by_sequence, make_mesh, make_model
    from holdfast.testing.runs.journals import Journal

    torch.set_num_threads(1)  # sums in one order
    directory, world = Path(life["directory"]), life["world"]
    store = dist.FileStore(str(directory / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model = make_model(make_mesh("fsdp", world), life["seed"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer, "rng": holdfast.Rng(), "tokens": 0}
    seed_all(life["seed"], rank)
    checkpointer, first = None, 0
    if life["root"]:
        checkpointer = holdfast.Checkpointer(
            life["root"],
            state,
            storage=holdfast.Every(steps=life["storage"]),
            parity=life["parity"],
            cache=life["cache"],
        )
    journal = Journal(directory, rank, incarnation=checkpointer.incarnation if checkpointer else 0)
    journal.write("start", world=world, pid=os.getpid())
    if checkpointer is not None:
        restored = checkpointer.restore()
        first = restored.step + 1 if restored else 0
        found = {"source": restored.source, "parent": restored.generation} if restored else {}
        sums = {"share": fingerprint(state), "drawn": drawn(state)} if restored else {}
        journal.write("restored", step=first - 1, **sums, **found)
    text = corpus()
    for step in range(first, life["steps"]):
        inputs, targets = batch(text, step, rank, world)
        loss = losses_by_sequence(model(inputs), targets).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state["tokens"] += inputs.numel() * world
        draw()
        journal.write("update", step=step, share=fingerprint(state), drawn=drawn(state))
        if checkpointer is not None:
            checkpointer.step(step)
    if checkpointer is not None:
        checkpointer.close()
    journal.write("end")


def seed_all(seed: int, rank: int) -> None:
    """What ``holdfast.Rng`` keeps: other numbers on each rank, and the same ones each time."""
    import random

    import numpy as np
    import torch

    random.seed(f"{seed} {rank}")
    np.random.seed(1000 * seed + rank)
    torch.manual_seed(1000 * seed + rank)


def draw() -> None:
    """As shuffling, augmentation and dropout do."""
    import random

    import numpy as np
    import torch

    random.random(), np.random.normal(), torch.rand(3)


def drawn(state: dict[str, Any]) -> int:
    """What the generators of this rank are at."""
    import xxhash

    return xxhash.xxh3_64_intdigest(repr(state["rng"].state_dict()).encode())


def fingerprint(state: dict[str, Any]) -> int:
    """This rank's share of the sum over the state, modulo 2^64."""
    import numpy as np
    import xxhash

    total = 0
    for name, values, place in _own_tensors(state):
        salt = xxhash.xxh3_64_intdigest(name.encode())
        bits = values.view(np.uint32).astype(np.uint64)
        bits |= np.arange(place, place + bits.size, dtype=np.uint64) << np.uint64(32)
        bits ^= np.uint64(salt)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            bits ^= bits >> np.uint64(shift)
            bits *= np.uint64(factor)
        bits ^= bits >> np.uint64(31)
        total += int(bits.sum(dtype=np.uint64))
    return total % (1 << 64)


def _own_tensors(state: dict[str, Any]) -> Iterator[tuple[str, Any, int]]:
    """(name, elements, place of the first in the whole tensor) of what this rank answers for.

    Everything is cut by rows here; what is not cut at all is alike on all ranks, and the first's.
    """
    import numpy as np
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    is_first = dist.get_rank() == 0
    for name, parameter in state["model"].named_parameters():
        moments = state["optimizer"].state.get(parameter, {})
        for kind, tensor in {"": parameter, **moments}.items():
            found = tensor.detach()
            if isinstance(found, DTensor):
                _, offset = compute_local_shape_and_global_offset(
                    found.shape, found.device_mesh, found.placements
                )
                place = offset[0] * (found.numel() // found.shape[0])
                yield f"{name} {kind}", found.to_local().contiguous().view(-1).numpy(), place
            elif is_first:
                yield f"{name} {kind}", found.contiguous().view(-1).numpy(), 0
    if is_first:
        yield "tokens", np.array([state["tokens"]], np.float32), 0
