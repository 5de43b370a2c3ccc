"""What saves cost training, beside collectives and captured graphs too, and on which device."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from benchmarks.gpu import copying
from benchmarks.gpu.copying import state_of
from benchmarks.gpu.findings import Finding, at_most
from benchmarks.gpu.lab import Lab, Unseen, blocks, listening, make_lab, saving, size_of
from benchmarks.gpu.offloading import train_offloaded
from benchmarks.kit.ranks import run_ranks
from holdfast.errors import HoldfastError
from holdfast.events import ImageCaptured, SaveReturned, SnapshotMissed

GB = 10**9
#: Copying at this rate takes less than this part of a step.
RATE, SHARE, COST = 48 * GB, 0.6, 1.02
GRAPH_SAVES = 100
SAMPLE_SAVE_S, SAMPLE_BEHIND_S = 0.0002, 0.001


class Loop:
    """Training whose steps take long enough for its snapshots."""

    def __init__(self, lab: Lab, size_bytes: int) -> None:
        self._lab = lab
        width = 4096 if not lab.is_simulated else 64
        count = max(2, size_bytes // (3 * 4 * width * width))
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(count)]
        self.model = torch.nn.Sequential(*layers).to(lab.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, fused=True)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.size_bytes = 3 * size_of(self.model)  # with two moments
        self._input = torch.randn(64, width, device=lab.device)
        self._repeats = 1

    def step(self) -> None:
        """Forward and backward several times, then one update."""
        for _ in range(self._repeats):
            self.model(self._input).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def lengthen(self) -> float:
        """Make steps long enough for a snapshot each; seconds of one."""
        needed_s = self.size_bytes / RATE / SHARE
        self.step()
        while True:
            step_s = self.timed(3)
            if step_s >= needed_s or self._lab.is_simulated:
                return step_s
            more = min(needed_s / step_s * 1.1, 8.0)
            self._repeats = int(self._repeats * more) + 1

    def timed(self, count: int, each: Callable[[], object] = lambda: None) -> float:
        """Seconds of a step, with ``each`` after every one."""
        self._lab.synchronize()
        began_s = time.perf_counter()
        for _ in range(count):
            self.step()
            each()
        self._lab.synchronize()
        return (time.perf_counter() - began_s) / count


def training(lab: Lab) -> None:
    """Steps with a snapshot each, in turns with steps without."""
    loop = Loop(lab, lab.size(5 * GB))
    lab.require_memory(4 * loop.size_bytes)
    step_s = loop.lengthen()
    with saving(loop.state) as ckpt, listening() as heard:
        number = 0

        def save() -> None:
            nonlocal number
            number += 1
            ckpt.save(number)

        loop.timed(5, save)
        plain, saved = [], []
        for _ in range(lab.rounds(6)):
            plain.append(loop.timed(5))
            saved.append(loop.timed(5, save))
            if lab.left_s() < 10 * step_s + 3:
                break
        missed = len(heard.all(SnapshotMissed))
    cost = statistics.median(saved) / statistics.median(plain)
    note = f"steps of {step_s * 1e3:.0f} ms, {loop.size_bytes / GB:.3g} GB each"
    lab.tell("a step with a snapshot, of one without", cost, "", at_most(COST), note)
    lab.tell("snapshots that were missed", missed, "", at_most(0), note, counts=True)


def collectives(lab: Lab) -> None:
    """Copies beside all-reduces on all GPUs."""
    count = lab.device_count()
    if lab.is_simulated or not lab.is_cuda():
        raise Unseen("collectives of several GPUs need NCCL")
    with tempfile.TemporaryDirectory() as root:
        found = run_ranks("collectives", count, Path(root), _beside_collectives, root)
    for name, value, unit in found:
        lab.tell(name, value, unit, note=f"{count} GPUs")


def _beside_collectives(root: str) -> list[tuple[str, float, str]]:
    rank = dist.get_rank()
    lab = make_lab("collectives", 60, lambda _: None, is_simulated=False)
    lab.use(rank)
    group = dist.new_group(backend="nccl")
    module, row = blocks(lab, 4 * GB), torch.ones(64 << 20, device=lab.device)

    def reduce() -> float:
        lab.synchronize()
        dist.barrier()
        began_s = time.perf_counter()
        for _ in range(50):
            dist.all_reduce(row, group=group)
        lab.synchronize()
        return time.perf_counter() - began_s

    reduce()
    alone_s = min(reduce() for _ in range(3))
    with listening() as heard, saving(state_of(module), Path(root, "run")) as ckpt:
        for step in range(4):
            ckpt.save(step).wait_captured(60)
        times = []
        for step in range(4, 8):
            handle = ckpt.save(step)
            times.append(reduce())
            handle.wait_captured(60)
        copied_s = heard.last(ImageCaptured)[1].copy_s
    return [
        ("all-reduces beside a snapshot, of those without", min(times) / alone_s, ""),
        ("copies beside all-reduces", size_of(module) / copied_s / GB, "GB/s"),
    ]


def graphs(lab: Lab) -> None:
    """Capture a graph beside each save; every call of our threads could end it."""
    module = blocks(lab, lab.size(GB))
    row = torch.ones(1 << 10, device=lab.device)
    broken, missed = [], []
    count = lab.rounds(GRAPH_SAVES)
    with saving(state_of(module)) as ckpt:
        for step in range(count):
            handle = ckpt.save(step)
            try:
                with lab.graph():
                    for _ in range(10):
                        row.add_(1)
                        time.sleep(0.001)
            except RuntimeError as error:
                broken.append(str(error).splitlines()[0])
            try:
                handle.wait_captured(60)
            except HoldfastError as error:
                missed.append(str(error).splitlines()[0])
    for what, them in (("captures that were ended", broken), ("saves that were missed", missed)):
        note = them[0] if them else f"{count} saves, a capture in global mode beside each"
        lab.tell(what, len(them), "", at_most(0), note, counts=True)


def samples(lab: Lab) -> None:
    """Two ranks with the same parameters on one device, compared and not."""
    with tempfile.TemporaryDirectory() as root:
        plain, compared = run_ranks("samples", 2, Path(root), _compared, root, lab.is_simulated)
    if not compared["bytes"]:
        raise Unseen("the two ranks compared nothing")
    note = f"median of {lab.rounds(20)} saves, {compared['bytes'] / 1e6:.3g} MB compared at each"
    for name, most_s in (("save", SAMPLE_SAVE_S), ("behind it", SAMPLE_BEHIND_S)):
        cost_ms = (compared[name] - plain[name]) * 1e3
        lab.tell(f"comparing replicas, {name}", cost_ms, "ms", at_most(most_s * 1e3), note)


def _compared(root: str, is_simulated: bool) -> list[dict[str, float]]:
    """Medians of saves without comparing, and with it."""
    lab = make_lab("samples", 60, _nothing, is_simulated=is_simulated)
    state = state_of(blocks(lab, lab.size(GB)))
    found = []
    for compare in (0, None):
        place = Path(root, f"run-{compare}")
        with listening() as heard, saving(state, place, compare_replicas=compare) as ckpt:
            for step in range(lab.rounds(20) + 3):
                ckpt.save(step).wait_captured(60)
        captured = heard.all(ImageCaptured)[3:]
        found.append(
            {
                "save": statistics.median(one.held_s for one in heard.all(SaveReturned)[3:]),
                "behind it": statistics.median(one.copy_s for one in captured),
                "bytes": statistics.median(one.compared_bytes for one in captured),
            }
        )
    return found


def _nothing(_: Finding) -> None:
    """Report nothing: rank 0 hands its values back."""


def contexts(lab: Lab) -> None:
    """Everything that copies, on the second device: the first must stay unused."""
    lab.use(1)
    if lab.contexts() - {1}:
        raise Unseen("another device has a context before anything was done")
    state = state_of(blocks(lab, lab.size(GB)))
    with tempfile.TemporaryDirectory() as root:
        ways: dict[str, Callable[[], Any]] = {
            "capture, and restore from memory": lambda: copying.restored_s(Path(root), state),
            "restore from storage": lambda: holdfast.load(root, state),
            "a ring": lambda: copying.ring(lab.quiet()),
            "offload": lambda: train_offloaded(lab, steps=2),
        }
        for name, way in ways.items():
            way()
            others = sorted(lab.contexts() - {1})
            lab.tell(f"contexts of others after {name}", len(others), "", at_most(0), counts=True)
