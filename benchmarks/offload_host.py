"""Measure what the hybrid optimizer's own work costs on the host, beside torch's fused AdamW.

No GPU is needed: a thousand small parameters, a few large ones, checksums, and state of which a
part lies on a disk. Systems take turns step by step. ``--quick`` tries everything with little, and
says nothing about speed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.kit import machine, markdown, results, series
from benchmarks.kit.options import Parser
from holdfast.offload import HybridAdamW
from holdfast.offload.bit_sums import checksum

LR = 1e-4
TORCH, OURS = "torch, fused", "hybrid"
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Trained:
    """Parameters with gradients made up, and an optimizer that steps them."""

    def __init__(self, count: int, size: int, make: Make, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = [
            nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for _ in range(count)
        ]
        self.given = [torch.randn(size, generator=generator).to(dtype) for _ in range(count)]
        self.optimizer = make(self.parameters)

    def step(self) -> tuple[float, float]:
        """Seconds of the step, and of the backward before it; its gradients are what was given."""
        loss = sum((p * g).sum() for p, g in zip(self.parameters, self.given, strict=True))
        assert isinstance(loss, torch.Tensor)
        began_s = time.perf_counter()
        loss.backward()
        between_s = time.perf_counter()
        self.optimizer.step()
        ended_s = time.perf_counter()
        self.optimizer.zero_grad()
        return ended_s - between_s, between_s - began_s


def fused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Torch's own."""
    return torch.optim.AdamW(parameters, LR, fused=True)


def hybrid(**options: Any) -> Make:
    """Ours."""
    return lambda parameters: HybridAdamW(parameters, LR, **options)


def turns(systems: dict[str, Trained], rounds: int) -> dict[str, Any]:
    """Seconds of all steps and backwards, by turns, after three that are not counted."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
    for turn, name in series.alternate(list(systems), rounds + 3):
        took_s = systems[name].step()
        if turn >= 3:
            found[name].append(took_s)
    return {
        name: {
            "step": series.summary([step_s for step_s, _ in took]),
            "backward": series.summary([backward_s for _, backward_s in took]),
        }
        for name, took in found.items()
    }


def compare(count: int, size: int, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """The same parameters under both."""
    makes = {TORCH: fused, OURS: hybrid()}
    systems = {name: Trained(count, size, make, dtype) for name, make in makes.items()}
    found = turns(systems, rounds)
    ratio = found[OURS]["step"]["median"] / found[TORCH]["step"]["median"]
    return {"seconds": found, "ratio": round(ratio, 3), "count": count, "size": size}


def summing(size: int, rounds: int) -> dict[str, float]:
    """Bytes a second of a checksum, by dtype."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.randn(size).to(dtype)
        times = []
        for _ in range(rounds):
            began_s = time.perf_counter()
            checksum(tensor)
            times.append(time.perf_counter() - began_s)
        found[str(dtype).partition(".")[2]] = round(tensor.nbytes / sorted(times)[rounds // 2])
    return found


def beyond(elements: int, parts: tuple[float, ...], rounds: int, path: str) -> dict[str, Any]:
    """State in memory, and state of which only a part is: the same steps."""
    state_bytes, subgroup = 12 * elements, max(1 << 10, elements // 24)
    systems = {"all in memory": Trained(8, elements // 8, hybrid(), torch.bfloat16)}
    for part in parts:
        make = hybrid(
            subgroup_elements=subgroup, host_memory_bytes=int(part * state_bytes), storage_path=path
        )
        systems[f"{part:.0%} in memory"] = Trained(8, elements // 8, make, torch.bfloat16)
    found = turns(systems, rounds)
    first, *others = systems.values()
    for other in others:
        for a, b in zip(first.parameters, other.parameters, strict=True):
            assert torch.equal(a, b), "other bits than with all of it in memory"
    return {"seconds": found, "state_bytes": state_bytes}


def shown(found: dict[str, Any], facts: dict[str, str]) -> str:
    """Tables of it all."""
    parts = [f"{results.today()}: " + ", ".join(f"{k} {v}" for k, v in facts.items())]
    rows = [
        [
            f"{one['count']} of {one['size']}, {name}",
            *(
                markdown.spread(one["seconds"][system][part])
                for part in ("step", "backward")
                for system in (TORCH, OURS)
            ),
            f"{one['ratio']:.2f}",
        ]
        for name, one in found["compared"].items()
    ]
    head = ["parameters", f"step: {TORCH}, s", f"{OURS}, s", "backward: with it, s", "s", "steps"]
    parts.append(markdown.table(head, rows))
    rows = [[dtype, f"{rate / 1e9:.1f}"] for dtype, rate in found["checksums"].items()]
    parts.append(markdown.table(["checksum of", "GB/s"], rows))
    if "beyond" in found:
        one = found["beyond"]
        rows = [[name, markdown.spread(took["step"])] for name, took in one["seconds"].items()]
        head = [f"{one['state_bytes'] / 1e9:.2f} GB of state", "seconds a step"]
        parts.append(markdown.table(head, rows))
    return "\n\n".join(parts)


def main(arguments: Sequence[str]) -> int:
    """Print, and write the results unless it was only tried."""
    parser = Parser("offload_host", __doc__, quick="little of everything, no figures")
    parser.add_rounds(15, "steps of each that count")
    parser.add_argument("--path", help="a directory on the disk for state beyond memory")
    parser.add_argument("--small-only", action="store_true", help="not what lies on a disk")
    options = parser.parse(arguments)
    rounds = 2 if options.quick else options.rounds
    scale = 16 if options.quick else 1
    cases = {
        "float32, small": (1000 // scale, 256, torch.float32),
        "bfloat16, small": (1000 // scale, 256, torch.bfloat16),
        "float32, large": (8, (1 << 22) // scale, torch.float32),
        "bfloat16, large": (8, (1 << 22) // scale, torch.bfloat16),
    }
    found: dict[str, Any] = {
        "compared": {name: compare(*case, rounds) for name, case in cases.items()},
        "checksums": summing((1 << 24) // scale, 5),
    }
    if not options.small_only:
        with tempfile.TemporaryDirectory(dir=options.path, prefix="holdfast-bench-") as path:
            elements = (1 << 26) // scale
            found["beyond"] = beyond(elements, (0.25, 0.5, 0.75), max(2, rounds // 3), path)
    facts = machine.facts(Path(options.path or tempfile.gettempdir()), ["torch"])
    text = shown(found, facts)
    print(text)
    if not options.quick:
        results.keep("offload_host", facts, found, text)
    return 0
