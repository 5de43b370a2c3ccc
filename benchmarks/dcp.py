"""Measure saves and loads by torch.distributed.checkpoint's calls: its own files, and Holdfast.

One state dict, the same calls, in one alternating series: how long a call blocks, and until the
checkpoint is durable. DCP runs at its best settings here: two threads, synced files, and stagers
that keep their memory. Holdfast's checkpoints have checksums, DCP's have none.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import holdfast
from benchmarks.kit import disk, machine, markdown, results, series
from benchmarks.kit.options import Parser

TENSOR_BYTES = 16 << 20
THREADS = 2
_ASYNC = {"thread": AsyncCheckpointerType.THREAD, "process": AsyncCheckpointerType.PROCESS}


@dataclass
class System:
    """One way to save: DCP's files or Holdfast's. ``stager``: made at its first asynchronous save.

    ``stages``: how; None for torch's default, which is new at each save.
    """

    name: str
    root: Path
    writer: Callable[[Path, int], Any]
    stages: Callable[[Any], Any] | None = None
    stager: Any = None
    kept: Any = None
    found: dict[str, list[float]] = field(default_factory=dict)

    def save(self, call: str, state: dict[str, Any], step: int) -> tuple[float, float]:
        """Seconds that the call blocks, and until the checkpoint is durable."""
        writer = self._writer(step)
        began = time.perf_counter()
        if call == "sync":
            torch_dcp.save(state, storage_writer=writer)
            blocked = time.perf_counter() - began
        else:
            kind, stager = _ASYNC[call], self._stager(writer)
            future = torch_dcp.async_save(
                state, storage_writer=writer, async_checkpointer_type=kind, async_stager=stager
            )
            blocked = time.perf_counter() - began
            future.result()
        return blocked, time.perf_counter() - began

    def _writer(self, step: int) -> Any:
        if self.kept is None or self.stages is not holdfast.dcp.Stager:
            return self.writer(self.root, step)
        self.kept.step = step  # a Stager is for one writer
        return self.kept

    def _stager(self, writer: Any) -> Any:
        if self.stager is None and self.stages is not None:
            self.stager, self.kept = self.stages(writer), writer
        return self.stager

    def close(self) -> None:
        """End what its saves keep."""
        if self.stager is not None:
            self.stager.close()


def _files(root: Path, step: int) -> Any:
    return FileSystemWriter(root / f"step-{step}", thread_count=THREADS)


def _ours(root: Path, step: int) -> Any:
    return holdfast.dcp.Writer(root, step=step)


def _in_memory(_: Any) -> Any:
    return DefaultStager(StagingOptions(False, False, False, False))


def _in_shared_memory(_: Any) -> Any:
    return DefaultStager(StagingOptions(False, True, False, False))


def systems(call: str, directory: Path) -> list[System]:
    """The systems that a call is measured with."""
    root = directory / call
    if call == "sync":
        return [System("DCP", root / "dcp", _files), System("holdfast", root / "ours", _ours)]
    staging = _in_shared_memory if call == "process" else _in_memory
    return [
        System("DCP", root / "dcp", _files),
        System("DCP, memory kept", root / "kept", _files, staging),
        System("holdfast", root / "ours", _ours),
        System("holdfast, Stager", root / "staged", _ours, holdfast.dcp.Stager),
    ]


def state_of(size_bytes: int) -> dict[str, Any]:
    """Tensors of 16 MiB and a few values."""
    count = max(1, size_bytes // TENSOR_BYTES)
    tensors = {f"layer{n}.w": torch.randn(TENSOR_BYTES // 4096, 1024) for n in range(count)}
    return {"model": tensors, "step": 1, "notes": {"name": "bench", "rates": [0.1, 0.2]}}


def _empty(state: dict[str, Any]) -> dict[str, Any]:
    model = {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}
    return {"model": model, "step": 0, "notes": {"name": "", "rates": None}}


def measure_saves(
    call: str, state: dict[str, Any], directory: Path, rounds: int
) -> dict[str, dict[str, Any]]:
    """Summaries of both times by system."""
    there = {one.name: one for one in systems(call, directory)}
    step = 0
    for turn, name in series.alternate(list(there), rounds + 1):
        one, step = there[name], step + 1
        disk.prime_page_cache(directory, sum(t.nbytes for t in state["model"].values()))
        with machine.alone():
            blocked, durable = one.save(call, state, step)
        if turn:  # the first starts processes, and gets memory
            one.found.setdefault("blocked", []).append(blocked)
            one.found.setdefault("durable", []).append(durable)
        for path in one.root.rglob("*"):
            if path.suffix in (".distcp", ".safetensors") and step > 1:
                path.unlink()
    for one in there.values():
        one.close()
    return {name: series.summaries(one.found) for name, one in there.items()}


def measure_loads(state: dict[str, Any], directory: Path, rounds: int) -> dict[str, Any]:
    """Summaries of loads by system, with files in the page cache and without; all compared."""
    roots = {"DCP": directory / "load-dcp", "holdfast": directory / "load-ours"}
    torch_dcp.save(state, storage_writer=_files(roots["DCP"], 1))
    torch_dcp.save(state, storage_writer=_ours(roots["holdfast"], 1))
    readers: dict[str, Callable[[], Any]] = {
        "DCP": lambda: FileSystemReader(roots["DCP"] / "step-1"),
        "holdfast": lambda: holdfast.dcp.Reader(roots["holdfast"]),
    }
    files = {name: [p for p in root.rglob("*") if p.is_file()] for name, root in roots.items()}
    return {
        how: _timed_loads(state, readers, files, rounds, cold=how == "cold")
        for how in ("warm", "cold")
    }


def _timed_loads(
    state: dict[str, Any],
    readers: dict[str, Callable[[], Any]],
    files: dict[str, list[Path]],
    rounds: int,
    *,
    cold: bool,
) -> dict[str, Any]:
    into = _empty(state)

    def load(name: str) -> None:
        torch_dcp.load(into, storage_reader=readers[name]())

    def check(name: str) -> None:
        for key, tensor in into["model"].items():
            assert torch.equal(tensor, state["model"][key]), (name, key)
            tensor.zero_()

    took = series.timed(
        {name: partial(load, name) for name in readers},
        rounds,
        before=lambda name: disk.drop(files[name], cold=cold),
        after=check,
    )
    return series.summaries(took)


def shown(saves: dict[str, Any], loads: dict[str, Any], size_bytes: int) -> str:
    """The tables: medians with extremes, and the ratio to DCP's best."""
    rows = []
    for call, found in saves.items():
        best = {
            what: min(f[what]["median"] for name, f in found.items() if name.startswith("DCP"))
            for what in ("blocked", "durable")
        }
        for name, times in found.items():
            cells = [markdown.spread(times[what]) for what in ("blocked", "durable")]
            ratios = [f"{times[what]['median'] / best[what]:.2f}" for what in best]
            rows.append([call, name, *cells, *ratios])
    head = ["call", "system", "blocked s", "durable s", "blocked, of DCP's", "durable, of DCP's"]
    text = f"{size_bytes / 1e9:.2f} GB, one process:\n\n{markdown.table(head, rows)}\n\n"
    rows = [
        [how, name, markdown.spread(one), f"{one['median'] / found['DCP']['median']:.2f}"]
        for how, found in loads.items()
        for name, one in found.items()
    ]
    return text + markdown.table(["load", "system", "s", "of DCP's"], rows)


def main(arguments: Sequence[str]) -> int:
    """Measure each call, and print the tables."""
    parser = Parser(
        "dcp",
        __doc__,
        quick="64 MiB and one round",
        quick_settings={"bytes": 64 << 20, "rounds": 1},
    )
    parser.add_bytes(640 << 20, "bytes of the state dict (640 MiB)")
    parser.add_rounds(7)
    parser.add_directory()
    parser.add_argument("--calls", nargs="+", default=["sync", "thread", "process"])
    options = parser.parse(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    state = state_of(options.bytes)
    with disk.scratch(options.dir, 8 * options.bytes) as directory:
        saves = {}
        for call in options.calls:
            saves[call] = measure_saves(call, state, directory, options.rounds)
            series.show(f"{call} is measured")
        loads = measure_loads(state, directory, options.rounds)
        facts = machine.facts(directory, ("torch",))
    dist.destroy_process_group()
    text = shown(saves, loads, options.bytes)
    print(f"{markdown.heading(facts)}\n\n{text}")
    results.keep("dcp", facts, {"saves": saves, "loads": loads}, text)
    return 0
