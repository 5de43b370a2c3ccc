"""One visit to one version, run as a script: train and save, or restore what the last visit left.

Uses public names only, which versions share. Before each act it prints ``TURN`` and waits for a
line, so that two versions act by turns. At its end it prints the least seconds of each, as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

#: mallopt(3): memory that an update frees stays in its process. By itself the C library gives it
#: back or not, as other blocks happen to lie, and an update takes twice as long where it does.
MALLOC_OPTIONS = {-1: 1 << 30, -3: 32 << 20}  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
#: Name -> (number of square weights, their width); with AdamW each makes four leaves.
STATES = {"large": (12, 1024), "many": (750, 16)}
SAVES, DURABLE_SAVES, LOADS = 32, 12, 6
TURN = "turn"


def await_turn() -> None:
    """Return when the other version has ended its act."""
    print(TURN, flush=True)
    sys.stdin.readline()


#: Where in its page each tensor begins, as one does that has pages of its own.
PLACE_BYTES, PAGE_BYTES = 64, 4096


def place(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that begins at ``PLACE_BYTES`` of a page.

    The heap puts tensors at places that follow from all that was taken from it before, the length
    of a path included, and how fast they are copied follows from the place: by 2 to 3 %.
    """
    room = torch.empty(tensor.nbytes + 2 * PAGE_BYTES, dtype=torch.uint8)
    start = (PLACE_BYTES - room.data_ptr()) % PAGE_BYTES
    placed = room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return placed.copy_(tensor)


Built = tuple[dict[str, Any], Callable[[], object]]


def build(name: str) -> Built:
    """The state, and one update of it. Nothing of Holdfast is imported for it: what a version takes
    from the heap decides where tensors lie that are made behind it, and how fast they are copied.
    """
    count, width = STATES[name]
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.data = place(parameter.data)
        parameter.grad = torch.full_like(parameter, 1e-3)
    return {"model": model, "optimizer": optimizer, "count": 0}, optimizer.step


def train(name: str, directory: Path, built: Built) -> dict[str, float]:
    """Save again and again; the last snapshot stays in memory when the process ends."""
    import holdfast

    (state, update), targets = built, [build(name)[0] for _ in range(LOADS)]
    state["rng"] = holdfast.Rng()
    checkpointer = holdfast.Checkpointer(directory / name, state, storage=None)
    checkpointer.restore()
    found: dict[str, list[float]] = defaultdict(list)
    for step in range(SAVES):
        await_turn()
        update()
        began = time.perf_counter()
        handle = checkpointer.save(step)
        found["save returns"].append(time.perf_counter() - began)
        handle.wait_captured(60)
        found["captured"].append(time.perf_counter() - began)
        began = time.perf_counter()
        update()
        found["update behind it"].append(time.perf_counter() - began)
    for step in range(SAVES, SAVES + DURABLE_SAVES):
        await_turn()
        update()
        began = time.perf_counter()
        checkpointer.save(step, durable=True).wait_durable(120)
        found["durable"].append(time.perf_counter() - began)
    for target in targets:
        target["rng"] = holdfast.Rng()
        await_turn()
        began = time.perf_counter()
        holdfast.load(directory / name, target)
        found["load from storage"].append(time.perf_counter() - began)
    return {f"{name}: {what}": min(values) for what, values in found.items()}


def restore(name: str, directory: Path, built: Built, *, is_last: bool = False) -> dict[str, float]:
    """Restore out of memory, as after a crash of the trainer."""
    import holdfast

    state, _ = built
    state["rng"] = holdfast.Rng()
    await_turn()
    began = time.perf_counter()
    checkpointer = holdfast.Checkpointer(directory / name, state, storage=None)
    restored = checkpointer.restore()
    took = time.perf_counter() - began
    if is_last:
        checkpointer.close()
    assert restored is not None
    assert restored.source == "memory", restored.source
    return {f"{name}: start and restore from memory": took}


def main() -> None:
    acts: dict[str, Callable[[str, Path, Built], dict[str, float]]]
    acts = {"train": train, "restore": restore, "end": partial(restore, is_last=True)}
    act, directory = acts[sys.argv[1]], Path(sys.argv[2])
    torch.set_num_threads(1)
    for option, size_bytes in MALLOC_OPTIONS.items():
        ctypes.CDLL(None).mallopt(option, size_bytes)
    found: dict[str, float] = {}
    built = {name: build(name) for name in STATES}
    if act is train:
        for state, update in built.values():
            update()  # makes the moments
            for moments in state["optimizer"].state.values():
                moments |= {name: place(moments[name]) for name in ("exp_avg", "exp_avg_sq")}
    for name in STATES:
        found.update(act(name, directory, built.pop(name)))
        await_turn()
    print(json.dumps(found), flush=True)
    os._exit(0)  # nothing is closed: the keepers keep what they have


if __name__ == "__main__":
    main()
