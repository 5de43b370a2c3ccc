"""The guide's flat partition, saved by two ranks, comes back in any other layout bit for bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast
from support.project.code_blocks import PROJECT, blocks
from support.runs.launch import run_ranks

PAGE = PROJECT / "docs" / "guides" / "a-partition-of-your-own.md"
FLAT, EMPTIED = (block for block in blocks(PAGE) if block.ranks)


def _run(directory: str, code: Any, root: str) -> dict[str, Any]:
    """What a block leaves behind; its group is the one that is there, its root ``root``."""
    import torch.distributed as dist

    there = dist.init_process_group
    os.chdir(directory)
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        dist.init_process_group = lambda *_: None
        exec(compile(code.replace("runs/flat", root), "the guide", "exec"), names)
    finally:
        dist.init_process_group = there
    return names


def _numbers(names: dict[str, Any]) -> dict[str, bytes]:
    """All parameters and moments, whole: of every rank's partition those that are no padding."""
    import torch.distributed as dist

    kept = names["optimizer"].state[names["mine"]]
    found = {"step": kept["step"].numpy().tobytes()}
    for kind, tensor in (("p", names["mine"]), *((k, kept[k]) for k in ("exp_avg", "exp_avg_sq"))):
        parts = [torch.empty_like(tensor) for _ in range(names["world"])]
        dist.all_gather(parts, tensor)
        found[kind] = torch.cat(parts)[: names["total"]].numpy().tobytes()
    whole = torch.cat([p.detach().flatten() for p in names["model"].parameters()])
    assert whole.numpy().tobytes() == found["p"]
    return found


def _train(rank: int, world: int, directory: str) -> dict[str, bytes]:
    return _numbers(_run(directory, FLAT.text, "flat"))


def _only_restore(rank: int, world: int, directory: str) -> dict[str, bytes]:
    before, _, _ = FLAT.text.partition("with holdfast.Checkpointer")
    return _numbers(_run(directory, f"{before}holdfast.load('flat', state)\npublish()\n", "flat"))


def test_a_flat_partition_of_two_ranks_comes_back_on_any_number_bit_for_bit(
    tmp_path: Path,
) -> None:
    (saved, other) = run_ranks(2, _train, str(tmp_path))
    assert saved == other
    for world in (1, 2, 3):
        assert run_ranks(world, _only_restore, str(tmp_path)) == [saved] * world

    model = nn.Sequential(nn.Linear(8, 33), nn.GELU(), nn.Linear(33, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    holdfast.load(tmp_path / "flat", {"model": model, "optimizer": optimizer})
    rows = {"p": list(model.parameters())}
    for kind in ("exp_avg", "exp_avg_sq"):
        rows[kind] = [optimizer.state[p][kind] for p in model.parameters()]
    for kind, tensors in rows.items():
        whole = torch.cat([tensor.detach().flatten() for tensor in tensors])
        assert whole.numpy().tobytes() == saved[kind]


def _save_shards(rank: int, world: int, directory: str) -> list[bytes]:
    shards = _run(directory, EMPTIED.text, "")["shards"]
    return [shard.detach().numpy().tobytes() for shard in shards.parameters()]


def test_shards_of_emptied_parameters_are_a_whole_model(tmp_path: Path) -> None:
    saved = run_ranks(2, _save_shards, str(tmp_path))
    back = nn.Sequential(nn.Linear(8, 33), nn.GELU(), nn.Linear(33, 1))
    holdfast.load(tmp_path / "runs" / "emptied", {"model": back})
    for parameter, halves in zip(back.parameters(), zip(*saved, strict=True), strict=True):
        assert b"".join(halves).startswith(parameter.detach().numpy().tobytes())
