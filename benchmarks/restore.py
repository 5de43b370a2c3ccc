"""What a restore costs, verified, beside what disk and memory can do and beside other ways to load.

``python benchmarks/restore.py``; ``--quick`` is a first look in a few minutes. Two states: few
large tensors, and thousands of leaves of a GPT with AdamW. From storage with a cold and a warm
page cache, from the arena, on another number of ranks, one leaf, one box.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import xxhash
from harness import drop, warm
from systems import DcpSave
from torch import Tensor, nn
from training import LAYERS, WIDTH, Fingerprints, fingerprints

import holdfast
from holdfast.geometry.box import Box

clock = time.perf_counter
STATES = ("48 tensors", "3,000 leaves")
CHUNKS = [(mebibytes << 20, threads) for mebibytes in (1, 4, 8, 16) for threads in (1, 2, 4)]
BLOCK = 1 << 20
libc = ctypes.CDLL(None)
libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def show(line: str) -> None:
    """Progress, for whoever watches."""
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


# ── states ───────────────────────────────────────────────────────────────────────────────────


def build(kind: str, share: float, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with AdamW moments; ``share`` of the full size of 1.6 GB."""
    torch.manual_seed(seed)
    if kind == STATES[0]:
        width = round(WIDTH * share**0.5)
        model: nn.Module = nn.Sequential(
            *(nn.Linear(width, width, bias=False) for _ in range(LAYERS))
        )
    else:
        # 62 blocks of 12 parameters and 6 more: 750, and with moments and step counts 3,000.
        width = round(424 * share**0.5)
        blocks = [_gpt_block(width) for _ in range(62)]
        ends = [nn.Embedding(600, width), nn.Embedding(64, width), nn.Linear(width, 600)]
        model = nn.Sequential(*blocks, *ends, nn.LayerNorm(width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _gpt_block(width: int) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width),
        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width),
    )  # fmt: skip


def leaves_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors, by the names Holdfast gives them."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        found[f"model.{name}"] = parameter.data
        for key, moment in optimizer.state[parameter].items():
            found[f"optimizer.{name}.{key}"] = moment
    return found


# ── one state and its copies ─────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Bench:
    """A state, where it is stored, and what was measured: ``found[system]`` in seconds."""

    kind: str
    root: Path
    share: float
    patience_s: float
    found: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    verdicts: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    settings: dict[str, str] = field(default_factory=dict)
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    leaves: dict[str, Tensor] = field(init=False)
    saved: Fingerprints = field(init=False)

    def __post_init__(self) -> None:
        self.model, self.optimizer = build(self.kind, self.share, 0)
        self.leaves = leaves_of(self.model, self.optimizer)
        self.saved = fingerprints(self.leaves.items())
        self.root.mkdir()

    @property
    def size_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves.values())

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def save_all(self) -> None:
        """The state as every system stores it."""
        holdfast.save(self.root / "holdfast", self.state)
        torch.save(self.leaves, self.root / "torch.pt")
        safetensors.torch.save_file(self.leaves, self.root / "state.safetensors")
        DcpSave(self.root, self.leaves, threads=2).save(0)
        os.sync()

    def image(self) -> Path:
        return next((self.root / "holdfast" / "steps").rglob("*.safetensors"))

    def files(self) -> list[Path]:
        return [path for path in self.root.rglob("*") if path.is_file()]

    def scribble(self) -> None:
        """Other bytes in every tensor: what is not restored is seen."""
        with torch.no_grad():
            for leaf in self.leaves.values():
                leaf.fill_(-1)

    def measure(self, name: str, act: Callable[[], Any], *, cold: bool = False) -> None:
        """One restore into the state's own tensors, and what it made of them."""
        self.scribble()
        drop(self.files(), cold=cold)
        harness.wait_until_idle(self.patience_s)
        began = clock()
        act()
        self.found[name].append(clock() - began)
        now = fingerprints(self.leaves.items())
        wrong = sum(now[leaf] != self.saved[leaf] for leaf in now)
        self.verdicts[name].append("exact" if not wrong else f"{wrong} leaves differ")

    def limit(self, name: str, act: Callable[[], Any], *, cold: bool = False) -> None:
        """One measurement of what the machine can do."""
        drop(self.files(), cold=cold)
        harness.wait_until_idle(self.patience_s)
        began = clock()
        act()
        self.found[name].append(clock() - began)


# ── limits ───────────────────────────────────────────────────────────────────────────────────


def read_raw(path: Path, memory: mmap.mmap, chunk: int, threads: int, flags: int) -> None:
    """All of a file into touched memory."""
    descriptor = os.open(path, os.O_RDONLY | flags)
    view, size = memoryview(memory), os.fstat(descriptor).st_size

    def read(at: int) -> None:
        with view[at : min(at + chunk, size)] as part:
            assert os.preadv(descriptor, [part], at) == len(part)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(0, size, chunk)))
    view.release()
    os.close(descriptor)


def best_raw(path: Path, memory: mmap.mmap, flags: int) -> tuple[int, int, dict[str, float]]:
    """The best chunk and number of threads, of two tries each; all that was tried."""
    tried: dict[tuple[int, int], float] = {}
    for chunk, threads in CHUNKS:
        times = []
        for _ in range(2):
            drop([path], cold=bool(flags))
            began = clock()
            read_raw(path, memory, chunk, threads, flags)
            times.append(clock() - began)
        tried[chunk, threads] = min(times)
    chunk, threads = min(tried, key=tried.__getitem__)
    return chunk, threads, {f"{c >> 20} MiB x {t}": round(s, 4) for (c, t), s in tried.items()}


def copy_and_sum(source: mmap.mmap, leaves: Sequence[Tensor], threads: int) -> None:
    """xxh3 of every MiB, and its copy into the leaves, by so many threads: no restore is faster.

    Block by block, the checksum first: measured, that is the fastest order.
    """
    view = memoryview(source)
    begin = np.frombuffer(source, np.uint8).ctypes.data
    parts, at = [], 0
    for leaf in leaves:
        for start in range(0, leaf.nbytes, BLOCK):
            size = min(BLOCK, leaf.nbytes - start)
            parts.append((at, leaf.data_ptr() + start, size))
            at += size

    def work(some: list[tuple[int, int, int]]) -> None:
        for here, to, size in some:
            xxhash.xxh3_64_intdigest(view[here : here + size])
            libc.memcpy(to, begin + here, size)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, (parts[number::threads] for number in range(threads))))


# ── ways to load ─────────────────────────────────────────────────────────────────────────────


def fill(leaves: dict[str, Tensor], loaded: Iterable[tuple[str, Tensor]]) -> None:
    """Copy what was loaded into the state, as a user has to."""
    for name, tensor in loaded:
        leaves[name].copy_(tensor)


def load_torch(bench: Bench, *, mapped: bool) -> None:
    """``torch.load`` and the copy into the state."""
    fill(bench.leaves, torch.load(bench.root / "torch.pt", mmap=mapped).items())


def load_safetensors(bench: Bench) -> None:
    """``safe_open``, tensor by tensor into the state."""
    with safetensors.safe_open(bench.root / "state.safetensors", "pt") as file:
        fill(bench.leaves, ((name, file.get_tensor(name)) for name in file.keys()))  # noqa: SIM118


def load_dcp(bench: Bench) -> None:
    """``torch.distributed.checkpoint.load``, which fills the state's own tensors."""
    path = next(bench.root.glob("dcp-*/0"))
    dcp.load(bench.leaves, storage_reader=dcp.FileSystemReader(path))


def load_once(bench: Bench, label: str, load: Callable[[Bench], None], *, cold: bool) -> None:
    """One load, with all or nothing of the files in the page cache."""
    if not cold:
        warm(bench.files())
    bench.measure(label, lambda: load(bench), cold=cold)


def load_holdfast(bench: Bench) -> None:
    """``holdfast.load``."""
    holdfast.load(bench.root / "holdfast", bench.state)


def read_part(bench: Bench, name: str, box: Box | None) -> None:
    """``holdfast.open(...).read`` of one leaf, or a box of it."""
    with holdfast.open(bench.root / "holdfast") as checkpoint:
        found = checkpoint.read(name, box)
    expected = bench.leaves[name][box.slices()] if box else bench.leaves[name]
    label = "one leaf" if box is None else "one box of one leaf"
    bench.verdicts[label].append("exact" if torch.equal(found, expected) else "differs")


# ── the arena ────────────────────────────────────────────────────────────────────────────────


class Arena:
    """A generation held by a real keeper; every restore is by a Checkpointer made anew."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._root = bench, bench.root / "run"
        checkpointer = self._open()
        checkpointer.save(1).wait_captured(120)
        checkpointer.__exit__(KeyboardInterrupt, None, None)  # as a crash leaves it

    def _open(self) -> holdfast.Checkpointer:
        return holdfast.Checkpointer(self._root, self._bench.state, memory=None, storage=None)

    def restore(self, name: str) -> None:
        """One restore, measured without the meeting of trainer and keeper."""
        checkpointer = self._open()

        def act() -> None:
            found = checkpointer.restore()
            assert found is not None and found.source == "memory"

        self._bench.measure(name, act)
        checkpointer.__exit__(KeyboardInterrupt, None, None)

    def close(self) -> None:
        """Let the keeper end."""
        checkpointer = self._open()
        checkpointer.restore()
        checkpointer.close()


# ── another number of ranks ──────────────────────────────────────────────────────────────────


def _rank(rank: int, world: int, root: str, share: float, act: str, out: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group(
        "gloo", init_method=f"file://{out}-{act}-meet", rank=rank, world_size=world
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    width = round(WIDTH * share**0.5)
    generator = torch.Generator().manual_seed(0)
    state: dict[str, Any] = {}
    for number in range(LAYERS):
        whole = torch.randn(3 * width, width, generator=generator)
        state[f"w{number:02}"] = distribute_tensor(whole, mesh, [Shard(0)])
    if act == "save":
        holdfast.save(root, state)
        return
    expected = {name: tensor.to_local().clone() for name, tensor in state.items()}
    times = []
    for _ in range(3):
        for tensor in state.values():
            tensor.to_local().fill_(-1)
        dist.barrier()
        began = clock()
        holdfast.load(root, state)
        times.append(clock() - began)
        same = all(torch.equal(state[name].to_local(), one) for name, one in expected.items())
        assert same, "the restored state differs"
    if rank == 0:
        Path(out).write_text(json.dumps(times))


def resharded(root: Path, share: float, saved: int, loaded: int) -> list[float]:
    """Seconds to load what ``saved`` ranks stored on ``loaded`` ranks, from a warm cache."""
    where, out = root / f"ranks-{saved}-{loaded}", root / f"times-{saved}-{loaded}"
    for act, world in (("save", saved), ("load", loaded)):
        mp.spawn(_rank, (world, str(where), share, act, str(out)), nprocs=world)
    times: list[float] = json.loads(out.read_text())
    shutil.rmtree(where)
    return times


# ── the series ───────────────────────────────────────────────────────────────────────────────

DIRECT, PREADV = "direct read", "plain preadv, warm"
SUMMED, SUMMED_NEW = "copy and xxh3", "copy and xxh3, newly mapped"


def series(bench: Bench, rounds: int) -> dict[str, Any]:
    """Everything of one state, alternating."""
    bench.save_all()
    image = bench.image()
    memory = mmap.mmap(-1, -(-image.stat().st_size // mmap.PAGESIZE) * mmap.PAGESIZE)
    memory[:] = bytes(len(memory))
    chunk, threads, tried = best_raw(image, memory, os.O_DIRECT)
    warm([image])
    warm_chunk, warm_threads, warm_tried = best_raw(image, memory, 0)
    show(f"direct reads: {tried}")
    cores = len(os.sched_getaffinity(0))
    order = list(bench.leaves.values())
    shared = os.memfd_create("limit")
    os.ftruncate(shared, bench.size_bytes)
    kept = mmap.mmap(shared, bench.size_bytes, access=mmap.ACCESS_WRITE)
    np.frombuffer(kept, np.uint8)[:] = 1
    arena = Arena(bench)
    leaf = max(bench.leaves, key=lambda name: bench.leaves[name].nbytes)
    size = bench.leaves[leaf].shape
    box = Box((size[0] // 4, size[1] // 4), (size[0] // 2, size[1] // 2))
    ways: dict[str, Callable[[], None]] = {
        DIRECT: lambda: bench.limit(
            DIRECT, lambda: read_raw(image, memory, chunk, threads, os.O_DIRECT), cold=True
        ),
        PREADV: lambda: bench.limit(
            PREADV, lambda: read_raw(image, memory, warm_chunk, warm_threads, 0)
        ),
        SUMMED: lambda: bench.limit(SUMMED, lambda: copy_and_sum(kept, order, cores)),
        SUMMED_NEW: lambda: bench.limit(
            SUMMED_NEW, lambda: copy_and_sum(mmap.mmap(shared, bench.size_bytes), order, cores)
        ),
        "Holdfast, arena": lambda: arena.restore("Holdfast, arena"),
        "one leaf": lambda: bench.limit("one leaf", lambda: read_part(bench, leaf, None)),
        "one box of one leaf": lambda: bench.limit(
            "one box of one leaf", lambda: read_part(bench, leaf, box)
        ),
    }
    loads = {
        "Holdfast": load_holdfast,
        "torch.load": lambda b: load_torch(b, mapped=False),
        "torch.load, mmap": lambda b: load_torch(b, mapped=True),
        "safetensors": load_safetensors,
        "DCP load": load_dcp,
    }  # fmt: skip
    for name, load in loads.items():
        for cold in (True, False):
            label = f"{name}, {'cold' if cold else 'warm'}"

            def way(
                label: str = label, load: Callable[[Bench], None] = load, cold: bool = cold
            ) -> None:
                if not cold:
                    warm(bench.files())
                bench.measure(label, lambda: load(bench), cold=cold)

            ways[label] = way
    for turn, name in harness.alternate(list(ways), rounds):
        if name in (PREADV, "one leaf", "one box of one leaf"):
            warm([image])
        if name.startswith("one "):
            load_holdfast(bench)  # what the parts are compared with
        ways[name]()
        shown = "".join(bench.verdicts[name][-1:])
        show(f"{bench.kind}, round {turn + 1}: {name}: {bench.found[name][-1]:.3f} {shown}")
    arena.close()
    os.close(shared)
    bench.settings = {
        DIRECT: f"{chunk >> 20} MiB x {threads}",
        PREADV: f"{warm_chunk >> 20} MiB x {warm_threads}",
        SUMMED: f"{cores} threads", SUMMED_NEW: f"{cores} threads",
    }  # fmt: skip
    return {
        "size_bytes": bench.size_bytes,
        "leaves": len(bench.leaves),
        "figures": {name: harness.summary(values) for name, values in bench.found.items()},
        "restored": {name: harness.counted(found) for name, found in bench.verdicts.items()},
        "exact": all(set(found) == {"exact"} for found in bench.verdicts.values()),
        "settings": bench.settings,
        "direct_reads_tried": tried,
        "warm_reads_tried": warm_tried,
        "ratios": ratios(bench.found),
    }


def ratios(found: dict[str, list[float]]) -> dict[str, float]:
    """How near the limits: medians of the ratios of one round each. More is better."""
    pairs = {
        "cold storage, of the direct read": (DIRECT, "Holdfast, cold"),
        "warm cache, of plain preadv": (PREADV, "Holdfast, warm"),
        "warm cache, times as fast as DCP load": ("DCP load, warm", "Holdfast, warm"),
        "cold storage, times as fast as DCP load": ("DCP load, cold", "Holdfast, cold"),
        "arena, of copy and xxh3": (SUMMED, "Holdfast, arena"),
        "arena, of copy and xxh3 out of newly mapped memory": (SUMMED_NEW, "Holdfast, arena"),
    }
    return {
        name: round(float(np.median([a / b for a, b in zip(found[x], found[y], strict=True)])), 3)
        for name, (x, y) in pairs.items()
    }


# ── the command ──────────────────────────────────────────────────────────────────────────────


def tables(result: dict[str, Any], facts: dict[str, str]) -> str:
    """All of it as markdown."""
    parts = [
        f"{harness.today()}: {facts['processor']}, {facts['cores']} cores, {facts['memory']}, "
        f"{facts['disk']}; Linux {facts['kernel']}, Python {facts['python']}, torch "
        f"{facts['torch']}, safetensors {facts['safetensors']}. Medians of {result['rounds']} "
        "rounds (lowest–highest), in seconds; every restore was compared bit for bit."
    ]
    for kind, found in result["states"].items():
        size = found["size_bytes"]
        rows = [
            [
                name + (f" ({found['settings'][name]})" if name in found["settings"] else ""),
                harness.seconds(figure),
                "–" if name.startswith("one ") else f"{size / figure['median'] / 1e9:.2f}",
                found["restored"].get(name, "–"),
            ]
            for name, figure in found["figures"].items()
        ]
        parts += [
            f"{kind}: {size / 1e9:.2f} GB, {found['leaves']} tensors.",
            harness.table(["", "seconds", "GB/s", "restored"], rows),
            harness.table(["ratio", ""], [[n, f"{r:.2f}"] for n, r in found["ratios"].items()]),
        ]
    rows = [[name, harness.seconds(found)] for name, found in result["ranks"].items()]
    parts.append(harness.table(["ranks, warm cache", "seconds"], rows))
    return "\n\n".join(parts)


def main() -> int:
    """Exit 1 when anything was restored that was not saved."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="how often each is measured (7)")
    parser.add_argument(
        "--patience", type=float, default=2, metavar="S",
        help="how long to wait for an idle machine before each measurement, in seconds (2)",
    )  # fmt: skip
    parser.add_argument(
        "--dir", help="a directory on the disk to measure (default: the temporary one)"
    )
    parser.add_argument(
        "--share", type=float, default=1.0, help="how much of the 1.6 GB of each state (1.0)"
    )
    harness.add_document_option(parser)
    parser.add_argument("--quick", action="store_true", help="--rounds 1 --share 0.1 --patience 0")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.share, options.patience = 1, 0.1, 0.0
    needed = round(10 * 1.7e9 * options.share)
    if harness.available_bytes() < needed:
        raise SystemExit("too little free memory: ten copies of a state must fit; see --share")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ["HOLDFAST_ARENA_DIR"] = tempfile.mkdtemp(prefix="hf-bench-", dir="/dev/shm")
    result: dict[str, Any] = {"rounds": options.rounds, "states": {}, "ranks": {}}
    try:
        with harness.scratch(options.dir, needed) as root:
            facts = harness.machine_facts(root, ["torch", "safetensors"])
            for number, kind in enumerate(STATES):
                bench = Bench(kind, root / str(number), options.share, options.patience)
                result["states"][kind] = series(bench, options.rounds)
                shutil.rmtree(bench.root)
            for saved, loaded in ((2, 2), (2, 1), (1, 2)):
                times = resharded(root, options.share, saved, loaded)
                result["ranks"][f"{saved} -> {loaded}"] = harness.summary(times)
                show(f"{saved} -> {loaded} ranks: {times}")
    finally:
        shutil.rmtree(os.environ["HOLDFAST_ARENA_DIR"], ignore_errors=True)
    shown = tables(result, facts)
    print(f"\n{shown}\n")
    kind = "restore-quick" if options.quick else "restore"
    print(f"results/{harness.write_results(kind, facts, result, shown).name}")
    if options.document:
        harness.replace_block(harness.DOCUMENT, "restore", shown)
    return 0 if all(found["exact"] for found in result["states"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
