"""Run commands of the command line in this process, and damage what they look at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import holdfast
from holdfast.catalogue import catalogue
from holdfast.cli import main
from holdfast.storage.local import LocalStore
from support.models.models import LAYOUTS, build, fill_with_numbers, make_optimizer_state

Out = pytest.CaptureFixture[str]
SOURCE = str(Path(holdfast.__file__).parents[1])


def json_of(capsys: Out, *argv: str | Path, code: int = 0) -> dict[str, Any]:
    """What a command prints with ``--json``."""
    capsys.readouterr()
    assert main([*map(str, argv), "--json"]) == code
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def text_of(capsys: Out, *argv: str | Path, code: int = 0) -> str:
    """What a command prints for people."""
    capsys.readouterr()
    assert main([*map(str, argv)]) == code
    return capsys.readouterr().out


def error_of(capsys: Out, *argv: str | Path, code: int) -> str:
    """What a command says on stderr when it fails: one line, no trace."""
    capsys.readouterr()
    assert main([*map(str, argv)]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    return said.err


def run_alone(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own; it exits with 99 if that loads torch."""
    script = (
        "import sys; from holdfast.cli import main; code = main(sys.argv[1:]);"
        "sys.exit(99 if 'torch' in sys.modules else code)"
    )
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, argv)],
        env=os.environ | {"PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=60,
    )


def image_of(root: Path, step: int) -> Path:
    """The one image of a step."""
    store = LocalStore(root)
    (manifest,) = (m for m in catalogue(store).manifests if m.step == step)
    return root / manifest.images[0].path


def damage(path: Path, offset_bytes: int) -> None:
    """Flip one bit, as a bad disk does."""
    data = bytearray(path.read_bytes())
    data[offset_bytes] ^= 1
    path.write_bytes(data)


def tied_model() -> nn.Sequential:
    """A model whose two weights are one tensor."""
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    weight: Any = model[0].weight
    model[1].weight = weight
    return model


# ── one state, saved by several ranks in several layouts ────────────────────────────────────────

CHANGED = "blocks.0.up.weight"
CHANGED_AT = [7, 3]
LARGE = (64, 1024)  # of float32: enough that two ranks divide each half between them


def state_in(layout: str) -> dict[str, Any]:
    """The same numbers in any layout; without the generators, which every rank has its own of."""
    _, state = build(layout, seed=1)
    make_optimizer_state(state)
    fill_with_numbers(state)
    del state["rng"]
    return state


def save_on_ranks(rank: int, world: int, root: str) -> None:
    """Every layout of this many ranks, and a weight that is repeated and cut.

    As step 3, once more with one element of ``fsdp_tp`` changed, and rank 1 one random number on.
    """
    for layout in LAYOUTS[world]:
        holdfast.save(f"{root}/{layout}", state_in(layout), step=2)
    _change_one(state := state_in("fsdp_tp"))
    holdfast.save(f"{root}/fsdp_tp", state, step=3)
    state = {"model": _repeated_and_cut(), "rng": holdfast.Rng()}
    holdfast.save(f"{root}/hsdp", state, step=2)
    if rank == 1:
        torch.rand(1)
    holdfast.save(f"{root}/hsdp", state, step=3)


def _change_one(state: dict[str, Any]) -> None:
    weight: Any = dict(state["model"].named_parameters())[CHANGED]
    whole = weight.full_tensor().detach().clone()
    whole[tuple(CHANGED_AT)] += 1
    with torch.no_grad():
        replicated = DTensor.from_local(whole, weight.device_mesh, [Replicate(), Replicate()])
        weight._local_tensor.copy_(
            replicated.redistribute(placements=weight.placements)._local_tensor
        )


def _repeated_and_cut() -> nn.Module:
    """One weight, cut in two over pairs of ranks that repeat each other."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    model = nn.Module()
    weight = torch.arange(LARGE[0] * LARGE[1], dtype=torch.float32).reshape(LARGE)
    placed = DTensor.from_local(weight, mesh, [Replicate(), Replicate()])
    model.weight = nn.Parameter(placed.redistribute(placements=[Replicate(), Shard(0)]))
    return model
