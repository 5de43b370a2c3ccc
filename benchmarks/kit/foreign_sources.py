"""Makes the states that the benchmark of foreign checkpoints reads, and what others write of them.

What needs another library runs in an environment that has it: DeepSpeed's checkpoint is written by
DeepSpeed itself, on two ranks on this machine.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kit.results import PROJECT

LAYERS = 12
#: What another library's part of the benchmark needs, by the name of the group of ways.
PACKAGES = {
    "torch": "torch",
    "deepspeed": "deepspeed",
    "transformers": "transformers",
    "megatron": "megatron",
}
ZERO_RANKS = 2


def interpreters(given: Sequence[str], groups: Sequence[str]) -> dict[str, str]:
    """For each group the first interpreter that has what it needs; none for those without one."""
    found: dict[str, str] = {}
    for group in groups:
        package = PACKAGES[group]
        if importlib.util.find_spec(package) is not None:
            found[group] = sys.executable
            continue
        asks = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
        for python in given:
            if subprocess.run([python, "-c", asks], check=False).returncode == 0:
                found[group] = python
                break
    return found


def environment(**more: str) -> dict[str, str]:
    """That of a process in another interpreter, which has not this project."""
    paths = [str(PROJECT / "src"), str(PROJECT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **more}


def build(size_bytes: int) -> dict[str, Any]:
    """A model and AdamW, which together have about so many bytes."""
    import torch

    rows = max(4, size_bytes // (3 * 4 * LAYERS * 1024))
    model = torch.nn.ParameterDict(
        {f"layer{n}": torch.nn.Parameter(torch.randn(rows, 1024)) for n in range(LAYERS)}
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def dcp_state(state: dict[str, Any]) -> dict[str, Any]:
    """The state dict that torchtitan would give to DCP."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(state["model"], state["optimizer"])
    return {"model": model, "optimizer": optimizer}


def llama(size_bytes: int) -> Any:
    """A model of transformers whose weights have about so many bytes in F32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width = 1024 if size_bytes > 1 << 28 else 64
    layer_bytes = 4 * (4 * width * width + 3 * width * 4 * width)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=max(1, size_bytes // layer_bytes),
            num_attention_heads=8,
            vocab_size=1000,
        )
    )


def start_megatron() -> None:
    """A group of one rank; what Megatron-Core asks of a GPU is answered with the CPU."""
    import torch
    import torch.distributed as dist

    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def megatron_shards(size_bytes: int) -> dict[str, Any]:
    """The tensors of a model and of AdamW, each whole on the one rank, as Megatron-Core saves them.

    All are called as those of a model are: what is measured is how they are read.
    """
    from megatron.core.dist_checkpointing import ShardedTensor

    state = build(size_bytes)
    tensors = {name: one.data for name, one in state["model"].items()}
    for name, one in state["model"].items():
        kinds = state["optimizer"].state[one]
        tensors |= {f"{name}_{kind}": kinds[kind] for kind in ("exp_avg", "exp_avg_sq")}
    return {name: ShardedTensor.from_rank_offsets(name, one) for name, one in tensors.items()}


# ── what is written before anything is measured ──────────────────────────────────────────────


def write_torch(directory: Path, size_bytes: int) -> int:
    """A directory of DCP, and a root of ours. Returns the bytes of the state."""
    import torch.distributed.checkpoint as dcp

    import holdfast

    state = build(size_bytes)
    dcp.save(dcp_state(state), checkpoint_id=directory / "step-1", no_dist=True)
    holdfast.save(directory / "root", state, step=1)
    return sum(leaf.size_bytes for leaf in holdfast.open(directory / "root").leaves.values())


def write_deepspeed(directory: Path, size_bytes: int) -> None:
    """A checkpoint of ZeRO-1 on two ranks, by DeepSpeed in this interpreter."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "benchmarks.kit.foreign_sources",
        str(directory),
        str(size_bytes),
    ]
    more = {"WORLD_SIZE": str(ZERO_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    more |= {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            command,
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **more),
            stdout=subprocess.DEVNULL,
        )
        for rank in range(ZERO_RANKS)
    ]
    if any(rank.wait() for rank in ranks):
        raise SystemExit("DeepSpeed did not write its checkpoint")


def _zero_rank(directory: Path, size_bytes: int) -> None:
    import deepspeed
    import torch

    class Sums(torch.nn.Module):
        """Has a gradient for every element, and next to no arithmetic."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = build(size_bytes)["model"]

        def forward(self, factor: torch.Tensor) -> torch.Tensor:
            return factor * torch.stack([one.sum() for one in self.inner.values()]).sum()

    deepspeed.init_distributed("gloo")
    torch.manual_seed(1)
    model = Sums()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    optimizer = torch.optim.AdamW(model.parameters())
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(engine(torch.ones(())))
    engine.step()
    engine.save_checkpoint(directory / "zero", tag="global_step1")


def write_transformers(directory: Path, size_bytes: int) -> None:
    """Weights that ``save_pretrained`` wrote, and a root of ours with the same."""
    import holdfast

    model = llama(size_bytes // 3)
    model.save_pretrained(directory / "pretrained")
    holdfast.save(directory / "weights", {"model": model}, step=1)


def write_megatron(directory: Path, size_bytes: int) -> None:
    """A directory of ``torch_dist`` that Megatron-Core wrote in this interpreter."""
    start_megatron()
    from megatron.core import dist_checkpointing

    (directory / "megatron").mkdir()
    state = {**megatron_shards(size_bytes), "iteration": 1}
    dist_checkpointing.save(state, str(directory / "megatron"))


#: By the name of the group of ways that read it.
WRITERS: dict[str, Callable[[Path, int], object]] = {
    "torch": write_torch,
    "deepspeed": write_deepspeed,
    "transformers": write_transformers,
    "megatron": write_megatron,
}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _zero_rank(Path(sys.argv[1]), int(sys.argv[2]))
