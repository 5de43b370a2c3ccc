"""Measure how long the metadata of a DCP checkpoint of many ranks take, until a rank can read.

The metadata are written as DCP writes them: each rank's places came pickled. In a process of its
own, in an alternating order: the directory is opened and what one of as many ranks reads is
planned; and torch reads the same file, and plans nothing. Seconds of processor time, and the
highest memory beyond what the imports took. The files of the shards have no bytes.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kit import disk, machine, markdown, processes, results, series
from benchmarks.kit.foreign_sources import environment
from benchmarks.kit.options import Parser

WAYS = {
    "open-and-plan": "`holdfast`: opened, and planned for one rank",
    "read-metadata": "`FileSystemReader.read_metadata` of torch, which unpickles",
}
#: What a rank has of a tensor, in turn.
SHARDS = ((8, 64), (2,), (4, 128), (16, 32), (1, 7, 5), (3,))
SECTION = results.Section(
    "Metadata of many ranks",
    "`python -m benchmarks dcp_metadata`: the metadata of a DCP checkpoint of many ranks, until\n"
    "one rank of as many knows what it reads.",
)


def _again(value: Any) -> Any:
    """The same as other objects, as what came from another rank."""
    return pickle.loads(pickle.dumps(value))


def write_metadata(directory: Path, ranks: int, tensors: int) -> int:
    """Write the metadata, and files as long as they say. Returns the bytes of the metadata."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    directory.mkdir()
    described: dict[str, Any] = {}
    for number in range(tensors):
        shard = SHARDS[number % len(SHARDS)]
        starts = [torch.Size((rank * shard[0], *(0 for _ in shard[1:]))) for rank in range(ranks)]
        chunks = [_again(ChunkStorageMetadata(start, torch.Size(shard))) for start in starts]
        name = f"model.layers.{number // len(SHARDS)}.block.part{number % len(SHARDS)}.weight"
        described[name] = TensorStorageMetadata(
            TensorProperties(dtype=torch.float32),
            torch.Size((ranks * shard[0], *shard[1:])),
            chunks,
        )
    storage: dict[Any, Any] = {}
    for rank in range(ranks):
        at, mine = 0, []
        for name, one in described.items():
            chunk = one.chunks[rank]
            size = 1200 + 4 * chunk.sizes.numel()
            info = _StorageInfo(f"__{rank}_0.distcp", at, size)
            mine.append((MetadataIndex(name, chunk.offsets, rank), info))
            at += size
        storage.update(_again(mine))
        with (directory / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(at)
    metadata = Metadata(described, {name: (name,) for name in described}, storage)
    written = pickle.dumps(metadata)
    (directory / ".metadata").write_bytes(written)
    return len(written)


def _way(name: str, directory: Path) -> Callable[[], object]:
    """What is measured, with all loaded that it needs."""
    if name == "read-metadata":
        from torch.distributed.checkpoint import FileSystemReader

        return FileSystemReader(directory).read_metadata
    for module in ("directories", "foreign_store"):  # which are loaded when they are needed
        importlib.import_module(f"holdfast.interop.{module}")
    from holdfast.interop.opening import open_source
    from holdfast.restore.planning.plan import Want
    from holdfast.restore.reading.read import plan_reads
    from holdfast.restore.reading.reader import CheckpointReader

    def plan() -> int:
        with CheckpointReader(open_source(directory), None) as opened:
            layout = opened.layout
            mine = [
                Want(layout.leaves[piece.leaf].name, piece.box, number)
                for number, piece in enumerate(layout.pieces(layout.world // 2))
            ]
            plan_reads(opened.checkpoint, mine, flat=range(len(mine)))
        return len(mine)

    return plan


def measure(name: str, directory: Path) -> dict[str, float]:
    """One way in this process."""
    warnings.simplefilter("ignore")
    act = _way(name, directory)
    Path("/proc/self/clear_refs").write_text("5")  # the highest sum counts from here
    held = processes.memory(os.getpid())["highest"]
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    act()
    return {
        "elapsed_s": time.perf_counter() - began_s,
        "processor_s": time.process_time() - began_cpu_s,
        "peak_bytes": processes.memory(os.getpid())["highest"] - held,
    }


def run_series(directory: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Every way in a process of its own, ``rounds`` times, the files in the page cache."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    for _, name in series.alternate(list(WAYS), rounds):
        command = [sys.executable, "-m", "benchmarks", "dcp_metadata"]
        command += ["--way", name, "--dir", str(directory)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, env=environment()
        )
        found[name].append(json.loads(done.stdout.splitlines()[-1]))
    return found


def shown(facts: dict[str, str], found: dict[str, Any]) -> str:
    """The table."""
    rows = []
    for name, title in WAYS.items():
        of = {
            key: series.summary([one[key] for one in found["ways"][name]])
            for key in ("processor_s", "elapsed_s")
        }
        peak = max(one["peak_bytes"] for one in found["ways"][name])
        rows.append([title, *map(markdown.spread, of.values()), f"{peak / 1e6:.0f}"])
    lead = (
        f"{found['ranks']} ranks, {found['tensors']} tensors, {found['metadata_bytes'] / 1e6:.1f} "
        f"MB of metadata; the medians of {found['rounds']} rounds."
    )
    head = ["", "processor s", "s", "peak memory MB"]
    return f"{markdown.heading(facts)}\n\n{lead}\n\n{markdown.table(head, rows)}"


def main(arguments: Sequence[str]) -> int:
    """Measure, print what was, and keep it."""
    parser = Parser(
        "dcp_metadata",
        __doc__,
        quick="12 ranks with 12 tensors, one round, nothing kept",
        quick_settings={"ranks": 12, "tensors": 12, "rounds": 1},
    )
    parser.add_rounds(5)
    parser.add_directory()
    parser.add_document()
    parser.add_argument("--ranks", type=int, default=1024, help="of the checkpoint (1024)")
    parser.add_argument("--tensors", type=int, default=300, help="each on all ranks (300)")
    parser.add_argument("--way", choices=WAYS, help="measure this one here; --dir has the files")
    options = parser.parse(arguments)
    if options.way:
        print(json.dumps(measure(options.way, Path(options.dir))))
        return 0
    with disk.scratch(options.dir, 256 << 20) as directory:
        where = directory / "step-1"
        size = write_metadata(where, options.ranks, options.tensors)
        found = {
            "ranks": options.ranks,
            "tensors": options.tensors,
            "rounds": options.rounds,
            "metadata_bytes": size,
            "ways": run_series(where, options.rounds),
        }
        facts = machine.facts(directory, ["torch", "numpy"])
    text = shown(facts, found)
    print(text)
    if not options.quick:
        results.keep("dcp_metadata", facts, found, text, document=options.document, section=SECTION)
    return 0
