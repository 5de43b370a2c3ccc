"""Measure a training step with the optimizer's state in host memory, beside other ways.

It takes a machine with an accelerator: models of 1 to 7 billion parameters in bfloat16, each system
in a process of its own. ``--quick`` tries everything with a tiny model, both ends on the CPU, and
says nothing about speed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import holdfast
from benchmarks.kit import gpt, machine, markdown, results, series
from benchmarks.kit.hosting import door
from benchmarks.kit.options import Parser
from benchmarks.kit.results import PROJECT
from holdfast.offload import HybridAdamW

DEVICE, LATE, HOST, HYBRID, SAVED, DEEPSPEED = (
    "all on the device",
    "host, gradients late",
    "host",
    "hybrid",
    "hybrid, snapshot every step",
    "DeepSpeed ZeRO-Offload",
)
#: Name -> (width, blocks); 12 x width² x blocks parameters.
MODELS = {"1B": (2048, 20), "3B": (2560, 38), "7B": (4096, 35)}
QUICK = {"tiny": (128, 2)}
WARM, MEASURED = 4, 12
LR = 1e-4
#: (what, of which, over which, at most): the targets of the issue, by medians.
TARGETS = (
    ("twice as fast as the host with late gradients", HYBRID, LATE, 0.5),
    ("never slower than the host with early ones", HYBRID, HOST, 1.02),
    ("within 1.5 of all on the device", HYBRID, DEVICE, 1.5),
    ("a snapshot every step costs at most 2 %", SAVED, HYBRID, 1.02),
)


class Masters(torch.optim.Optimizer):
    """FP32 masters and moments beside 16-bit parameters, on the device: as fast as it can be."""

    def __init__(self, parameters: list[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.narrow = parameters
        self.masters = [p.detach().float() for p in parameters]
        self.inner = torch.optim.AdamW(self.masters, lr, fused=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for narrow, master in zip(self.narrow, self.masters, strict=True):
            master.grad = None if narrow.grad is None else narrow.grad.float()
        self.inner.step()
        self.inner.zero_grad()
        torch._foreach_copy_(self.narrow, self.masters)


class Training:
    """A GPT that learns bytes it makes up, by one system."""

    def __init__(self, system: str, size: tuple[int, int], batch: int, device: str) -> None:
        torch.set_default_device(device)
        torch.manual_seed(0)
        self.batch, self.is_on_host = batch, device == "cpu"
        self.model: Any = gpt.GPT(*size).to(torch.bfloat16)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.engine: Any = None
        self.checkpointer: holdfast.Checkpointer | None = None
        self.optimizer = self._optimizer(system)
        if system == SAVED:
            state = {"model": self.model, "optimizer": self.optimizer}
            self._root = tempfile.TemporaryDirectory(prefix="holdfast-bench-")
            self.checkpointer = holdfast.Checkpointer(
                self._root.name, state, memory=holdfast.Every(steps=1), storage=None
            )

    def _optimizer(self, system: str) -> Any:
        parameters = list(self.model.parameters())
        share = 0.4 if self.is_on_host else None
        small = {"subgroup_elements": 30_000} if self.is_on_host else {}
        ways: dict[str, Callable[[], Any]] = {
            DEVICE: lambda: Masters(parameters, LR),
            LATE: lambda: HybridAdamW(parameters, LR, device_share=0.0, early_gradients=False),
            HOST: lambda: HybridAdamW(parameters, LR, device_share=0.0),
            HYBRID: lambda: HybridAdamW(parameters, LR, device_share=share, **small),
            SAVED: lambda: HybridAdamW(parameters, LR, device_share=share, **small),
            DEEPSPEED: self._deepspeed,
        }
        return ways[system]()

    def _deepspeed(self) -> Any:
        import deepspeed  # type: ignore[import-not-found]

        self.engine, optimizer, _, _ = deepspeed.initialize(
            model=self.model,
            model_parameters=list(self.model.parameters()),
            config={
                "train_micro_batch_size_per_gpu": self.batch,
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
                "zero_optimization": {
                    "stage": 2,
                    "overlap_comm": True,
                    "offload_optimizer": {"device": "cpu", "pin_memory": True},
                },
            },
        )
        return optimizer

    def step(self, number: int) -> float:
        """One step; its loss."""
        generator = torch.Generator(device=torch.get_default_device()).manual_seed(number)
        text = torch.randint(0, gpt.BYTES, (self.batch, gpt.CONTEXT), generator=generator)
        around = self.engine or self.model
        logits = around(text)[:, :-1].flatten(0, 1).float()
        loss = nn.functional.cross_entropy(logits, text[:, 1:].flatten())
        if self.engine is not None:
            self.engine.backward(loss)
            self.engine.step()
        else:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.checkpointer is not None:
            self.checkpointer.step(number)
        return float(loss.item())

    def measure(self) -> dict[str, Any]:
        """Seconds of every step after the first few, and what they took of the device's memory."""
        for number in range(WARM):
            self.step(number)
        if not self.is_on_host:
            torch.accelerator.reset_peak_memory_stats()
        seconds, loss = [], 0.0
        for number in range(WARM, WARM + MEASURED):
            began_s = time.perf_counter()
            loss = self.step(number)
            if not self.is_on_host:
                torch.accelerator.synchronize()
            seconds.append(time.perf_counter() - began_s)
        if self.checkpointer is not None:
            self.checkpointer.close()
        schedule = getattr(getattr(self.optimizer, "_placing", None), "schedule", None)
        return {
            "step": series.summary(seconds),
            "loss": loss,
            "parameters": self.parameters,
            "device_bytes": 0 if self.is_on_host else torch.accelerator.max_memory_allocated(),
            "device_share": getattr(schedule, "share", None),
        }


def one(system: str, model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a system in a process of its own; what went wrong, where it could not be."""
    command = door("offload", "--one", system, "--model", model)
    command += ["--batch", str(options.batch)] + (["--quick"] if options.quick else [])
    try:
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=options.minutes * 60,
            cwd=PROJECT,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {options.minutes} minutes"}
    lines = ended.stdout.strip().splitlines()
    if ended.returncode or not lines:
        said = ended.stderr.strip().splitlines() or ["nothing was said"]
        return {"failed": said[-1][:160]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def shown(found: dict[str, dict[str, Any]], facts: dict[str, str]) -> str:
    """Tables, and whether the targets are met."""
    parts = [f"{results.today()}: " + ", ".join(f"{k} {v}" for k, v in facts.items())]
    for model, systems in found.items():
        rows = []
        for system, one in systems.items():
            if "failed" in one:
                rows.append([system, "failed: " + one["failed"], "", "", ""])
                continue
            share = "" if one["device_share"] is None else f"{one['device_share']:.2f}"
            rows.append(
                [
                    system,
                    markdown.spread(one["step"]),
                    f"{one['device_bytes'] / 1e9:.1f}",
                    share,
                    f"{one['loss']:.4f}",
                ]
            )
        head = [model, "seconds a step", "device memory, GB", "on the device", "loss"]
        parts += [markdown.table(head, rows), *_targets(systems)]
    return "\n\n".join(parts)


def _targets(systems: dict[str, dict[str, Any]]) -> list[str]:
    said = []
    for what, which, over, most in TARGETS:
        pair = systems.get(which, {}).get("step"), systems.get(over, {}).get("step")
        if pair[0] and pair[1]:
            ratio = pair[0]["median"] / pair[1]["median"]
            said.append(f"- {what}: {ratio:.2f}, {'met' if ratio <= most else '**missed**'}")
    return ["\n".join(said)] if said else []


def _systems(options: argparse.Namespace) -> list[str]:
    if options.only:
        return list(options.only)
    return [DEVICE, LATE, HOST, HYBRID, SAVED] + ([] if options.quick else [DEEPSPEED])


def main(arguments: Sequence[str]) -> int:
    """Exit 1 where a system other than DeepSpeed failed."""
    parser = Parser("offload", __doc__, quick="a tiny model on the CPU, no figures")
    parser.add_argument("--models", nargs="*", help=f"of {', '.join(MODELS)} (all)")
    parser.add_argument("--only", nargs="*", help="these systems")
    parser.add_argument("--batch", type=int, default=8, help="sequences of 128 bytes a step")
    parser.add_argument("--minutes", type=float, default=10.0, help="for one system (10)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse(arguments)
    device = torch.accelerator.current_accelerator(check_available=True)
    if not options.quick and device is None:
        raise SystemExit("this measures a device, and there is none; --quick tries it without")
    sizes = QUICK if options.quick else MODELS
    if options.one:
        where = "cpu" if options.quick or device is None else device.type
        training = Training(options.one, sizes[options.model], options.batch, where)
        print(json.dumps(training.measure()))
        return 0
    found = {
        model: {system: one(system, model, options) for system in _systems(options)}
        for model in options.models or sizes
    }
    facts = machine.facts(Path(__file__).parent, ["torch", "deepspeed"])
    if device is not None:
        named = getattr(torch.get_device_module(device), "get_device_name", lambda: device.type)
        facts["device"] = named()
    text = shown(found, facts)
    print(text)
    if not options.quick:
        results.keep("offload", facts, {"models": found}, text)
    return int(any("failed" in s.get(k, {}) for s in found.values() for k in s if k != DEEPSPEED))
