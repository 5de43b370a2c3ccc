"""Figures of the optimizer in host memory: checksums, launches, targets of its benchmark."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from benchmarks import offload as benchmark
from benchmarks.gpu.findings import at_most
from benchmarks.gpu.lab import Lab, OutOfTime, Unseen
from holdfast.offload import HybridAdamW
from holdfast.offload.bit_sums import checksum

CHECKSUM_S, LAUNCHES = 0.002, 40
PARAMETERS = 10**9
_SUBGROUP = 1 << 20


def sums(lab: Lab) -> None:
    """Checksums of as many elements as a model has, and launches of a whole step."""
    flat = torch.zeros(lab.size(PARAMETERS), dtype=torch.bfloat16, device=lab.device)
    checksum(flat)
    times = []
    for _ in range(5):
        lab.synchronize()
        began_s = time.perf_counter()
        checksum(flat)
        lab.synchronize()
        times.append(time.perf_counter() - began_s)
    note = f"{flat.numel():.2g} elements in bfloat16"
    took_ms = statistics.median(times) * 1e3
    lab.tell("checksums of all parameters", took_ms, "ms", at_most(CHECKSUM_S * 1e3), note)
    if not lab.is_cuda():
        lab.tell("launches a subgroup", "unseen", note="counted by torch's profiler of CUDA only")
        return
    lab.tell("launches a subgroup", _launches(lab), "", at_most(LAUNCHES))


def _launches(lab: Lab, subgroups: int = 16) -> float:
    parameters = [
        torch.nn.Parameter(torch.zeros(_SUBGROUP, dtype=torch.bfloat16, device=lab.device))
        for _ in range(subgroups)
    ]
    optimizer = HybridAdamW(parameters, 1e-4, subgroup_elements=_SUBGROUP, device_share=1.0)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    for number in range(3):
        for one in parameters:
            (one.sum() * 1.0).backward()
        lab.synchronize()
        if number < 2:
            optimizer.step()
            optimizer.zero_grad()
    with torch.profiler.profile(activities=activities) as profile:
        optimizer.step()
        lab.synchronize()
    calls: dict[str, int] = {one.key: one.count for one in profile.key_averages()}
    return sum(n for key, n in calls.items() if "LaunchKernel" in key) / subgroups


def train_offloaded(lab: Lab, steps: int) -> None:
    """A small model with its optimizer's state on the host."""
    model = torch.nn.Linear(64, 64).to(lab.device)
    optimizer = HybridAdamW(model.parameters(), 1e-3, device_share=0.5, subgroup_elements=1000)
    for _ in range(steps):
        model(torch.ones(8, 64, device=lab.device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    lab.synchronize()


def offload(lab: Lab) -> None:
    """A model of a billion parameters, each way in a process of its own."""
    if not lab.is_simulated and not lab.is_cuda():
        raise Unseen("benchmarks/offload.py measures a CUDA GPU")
    systems = dict.fromkeys(one for _, which, over, _ in benchmark.TARGETS for one in (which, over))
    found: dict[str, Any] = {}
    model = "tiny" if lab.is_simulated else "1B"
    for system in systems:
        if lab.left_s() < 3:
            raise OutOfTime(f"{len(systems) - len(found)} systems were not measured")
        options = argparse.Namespace(batch=8, quick=lab.is_simulated, minutes=lab.left_s() / 60)
        found[system] = benchmark.one(system, model, options)
        median = found[system].get("step", {}).get("median")
        if median is None:
            lab.tell(f"{model}: {system}", "failed", note=found[system]["failed"])
        else:
            lab.tell(f"{model}: {system}", median, "s a step")
    for what, which, over, most in benchmark.TARGETS:
        pair = [found.get(one, {}).get("step") for one in (which, over)]
        if pair[0] and pair[1]:
            ratio = pair[0]["median"] / pair[1]["median"]
            lab.tell(f"{model}: {what}", ratio, "", at_most(most))
        else:
            lab.tell(f"{model}: {what}", "unseen", note="one of the two was not measured")
