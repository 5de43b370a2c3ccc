"""What a save costs: how long it holds the training, and how long until the state is durable.

``make bench``, or ``python benchmarks/save.py --help``. What is measured and how to read it stands
in docs/performance.md.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch.distributed as dist
from systems import (
    DcpAsync,
    DcpSave,
    Holdfast,
    Safetensors,
    Saving,
    System,
    TorchSave,
)
from training import WIDTH, Training, fingerprints, verdict

from holdfast.storage import LocalStore

clock = time.perf_counter
DOCUMENT = Path(__file__).parents[1] / "docs" / "performance.md"
FORWARD_BACKWARD_S = 0.5
STEPS = 4
WARM_UP_SAVES = 3
ALONE, COPY, WRITE = "training alone", "memory copy", "direct write"
CHUNKS = [(mebibytes << 20, threads) for mebibytes in (4, 8, 16) for threads in (1, 2, 4)]
libc = ctypes.CDLL(None)
libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


# ── one save ─────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Bench:
    """The training, the disk, and what was measured: ``found[system][figure]`` in seconds."""

    training: Training
    root: Path
    found: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    verdicts: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    steps_saved: int = 0
    watcher: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def at_once(self, system: System) -> tuple[dict[str, float], str]:
        """Save, and update as soon as the system allows: nothing overlaps with its copying."""
        before, step = self.training.fingerprints(), self._next()
        began = clock()
        saving = system.save(step)
        saving.wait_safe()
        free = clock()
        durable = self._watch(saving)
        self.training.update()
        times = {"blocked": free - began, "durable": durable.result() - began}
        return times, self._check(system, step, before)

    def in_training(self, system: System) -> tuple[dict[str, float], str]:
        """Save between two steps; the next update comes after a forward and a backward."""
        training, step, before = self.training, self._next(), self.training.fingerprints()
        began = clock()
        saving = system.save(step)
        returned = clock()
        durable = self._watch(saving)
        training.forward_backward()
        worked = clock()
        saving.wait_safe()
        free = clock()
        training.update()
        steps = 1
        while steps < STEPS or not durable.done():
            training.step()
            steps += 1
        times = {
            "blocked in training": (returned - began) + (free - worked),
            "forward and backward": worked - returned,
            "elapsed": clock() - began,
            "steps": steps,
            "durable in training": durable.result() - began,
        }
        return times, self._check(system, step, before)

    def alone(self) -> dict[str, float]:
        """The same steps without a save."""
        began = clock()
        for _ in range(STEPS):
            self.training.step()
        whole = (clock() - began) / STEPS
        began = clock()
        self.training.forward_backward()
        return {"step": whole, "forward and backward": clock() - began}

    def _next(self) -> int:
        self.steps_saved += 1
        return self.steps_saved

    def _watch(self, saving: Saving) -> Future[float]:
        def wait() -> float:
            saving.wait_durable()
            return clock()

        return self.watcher.submit(wait)

    def _check(self, system: System, step: int, saved: dict[str, str]) -> str:
        updated = self.training.fingerprints()
        assert all(updated[name] != saved[name] for name in saved), "the update changed too little"
        found = verdict(fingerprints(system.read(step)), saved, updated)
        system.discard(step)
        return found

    def note(self, name: str, measured: tuple[dict[str, float], str]) -> None:
        """Keep one measurement."""
        times, stored = measured
        for figure, value in times.items():
            self.found[name][figure].append(value)
        if stored:
            self.verdicts[name].append(stored)


# ── limits ───────────────────────────────────────────────────────────────────────────────────


class Limits:
    """What memory and disk can do with as many bytes: one thread's copy, and the best write."""

    def __init__(self, training: Training, root: Path) -> None:
        self._sources = [leaf for leaf in training.leaves.values() if leaf.ndim]
        # Whole pages, as an image has them: the one before the last may be half empty.
        self._size = -(-training.size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, self._size)
        self._view = memoryview(self._memory)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._store = LocalStore(root / "limits")
        self.copy()  # touches every page
        found = {chunk: min(self._write(*chunk) for _ in range(2)) for chunk in CHUNKS}
        self.tried = {f"{size >> 20} MiB x {n}": round(s, 4) for (size, n), s in found.items()}
        self._best = min(found, key=found.__getitem__)
        self.settings = f"{self._best[0] >> 20} MiB x {self._best[1]} threads"

    def copy(self) -> float:
        """Seconds for one thread to copy the state into touched memory."""
        began, at = clock(), self._address
        for leaf in self._sources:
            libc.memcpy(at, leaf.data_ptr(), leaf.nbytes)
            at += leaf.nbytes
        return clock() - began

    def write(self) -> float:
        """Seconds to write as many bytes with direct I/O, file and directory synced."""
        return self._write(*self._best)

    def _write(self, chunk: int, threads: int) -> float:
        began = clock()
        sink = self._store.create("image", self._size)
        with ThreadPoolExecutor(threads) as pool:
            parts = range(0, self._size, chunk)
            list(pool.map(lambda at: sink.write(at, self._view[at : at + chunk]), parts))
        sink.finish()
        elapsed = clock() - began
        self._store.remove("image")
        return elapsed


# ── the best settings ────────────────────────────────────────────────────────────────────────


def candidates(bench: Bench) -> dict[str, list[Callable[[], System]]]:
    """The settings tried for each rival that has some."""
    root, leaves = bench.root, bench.training.leaves
    shared = (False, True)
    return {
        "DCP save": [partial(DcpSave, root, leaves, threads=n) for n in (1, 2, 4)],
        "DCP async_save, THREAD": [
            partial(DcpAsync, root, leaves, process=False, shared=False, threads=n)
            for n in (1, 2, 4)
        ],
        "DCP async_save, PROCESS": [
            partial(DcpAsync, root, leaves, process=True, shared=s, threads=n)
            for s in shared
            for n in (1, 2, 4)
        ],
    }  # fmt: skip


def choose_settings(bench: Bench) -> tuple[dict[str, Callable[[], System]], dict[str, Any]]:
    """The fastest settings of each rival: best of two saves after one that is not counted."""
    chosen: dict[str, Callable[[], System]] = {}
    tried: dict[str, Any] = {}
    for name, makers in candidates(bench).items():
        heats: list[tuple[float, str, Callable[[], System]]] = []
        for make in makers:
            system = make()
            runs = [bench.at_once(system)[0]["durable"] for _ in range(3)]
            heats.append((min(runs[1:]), system.settings, make))
            system.close()
        chosen[name] = min(heats, key=lambda heat: heat[0])[2]
        tried[name] = {settings: round(best, 4) for best, settings, _ in heats}
        show(f"{name}: {tried[name]}")
    return chosen, tried


# ── the series ───────────────────────────────────────────────────────────────────────────────


def warm_up(bench: Bench, name: str, system: System) -> None:
    """First saves, which allocate, start processes and touch memory: told apart from the rest."""
    for _ in range(WARM_UP_SAVES):
        times, _ = bench.in_training(system)
        bench.found[name]["blocked, first saves"].append(times["blocked in training"])


def run_series(bench: Bench, systems: dict[str, System], limits: Limits, rounds: int) -> None:
    """Every system and limit once a round, never two rounds in the same order."""
    for turn, name in harness.alternate([ALONE, COPY, WRITE, *systems], rounds):
        if name == ALONE:
            bench.note(name, (bench.alone(), ""))
        elif name == COPY:
            bench.note(name, ({"elapsed": limits.copy()}, ""))
        elif name == WRITE:
            bench.note(name, ({"elapsed": limits.write()}, ""))
        else:
            bench.note(name, bench.at_once(systems[name]))
            if systems[name].is_async:
                bench.note(name, bench.in_training(systems[name]))
        last = {figure: round(values[-1], 3) for figure, values in bench.found[name].items()}
        show(f"round {turn + 1}: {name}: {last} {''.join(bench.verdicts[name][-1:])}")


def add_lost(bench: Bench, systems: dict[str, System]) -> None:
    """Training time lost to a save: what the steps took longer than in the same round alone."""
    alone = bench.found[ALONE]["step"]
    for name, system in systems.items():
        found = bench.found[name]
        if system.is_async:
            runs = zip(found["elapsed"], found["steps"], alone, strict=True)
            found["lost"] = [elapsed - steps * step for elapsed, steps, step in runs]
        else:
            found["lost"] = found["blocked in training"] = found["blocked"]


def control(bench: Bench) -> str:
    """What the check says of an asynchronous save whose update does not wait."""
    system = DcpAsync(
        bench.root, bench.training.leaves, process=False, shared=False, threads=2,
        hold_update=False,
    )  # fmt: skip
    try:
        bench.at_once(system)
        return bench.at_once(system)[1]
    finally:
        system.close()


# ── what is shown ────────────────────────────────────────────────────────────────────────────


def report(result: dict[str, Any], facts: dict[str, str]) -> str:
    """The tables of docs/performance.md."""
    rows = []
    for name, entry in result["systems"].items():
        figures = entry["figures"]
        first = figures.get("blocked, first saves")
        in_training = figures["durable in training"] if first else None
        rows.append([
            f"{name} ({entry['settings']})",
            harness.seconds(figures["blocked"]),
            harness.seconds(figures["blocked in training"]) if first else "the same",
            harness.seconds(figures["lost"]) if first else "the same",
            harness.seconds(figures["durable"]),
            harness.seconds(in_training) if in_training else "the same",
            " / ".join(f"{value:.2f}" for value in first["values"]) if first else "–",
            entry["stored"],
        ])  # fmt: skip
    size = result["size_bytes"]
    limits = [
        [label, harness.seconds(found), f"{size / found['median'] / 1e9:.1f} GB/s"]
        for label, found in result["limits"].items()
    ]
    alone = result["alone"]
    return "\n\n".join([
        f"{harness.today()}: {facts['processor']}, {facts['cores']} cores, {facts['memory']}, "
        f"{facts['disk']}; Linux {facts['kernel']}, Python {facts['python']}, torch "
        f"{facts['torch']}, safetensors {facts['safetensors']}. State: {size / 1e9:.2f} GB in "
        f"{result['leaves']} leaves. Medians of {result['rounds']} rounds (lowest–highest), in "
        f"seconds. Load of the machine before and after: {result['load']}.",
        harness.table(
            ["", "blocked, update at once", "blocked, in training", "lost in training",
             "durable", "durable, in training", "blocked at the first saves", "what was stored"],
            rows,
        ),
        harness.table(["limit, same series", "seconds", "rate"], limits),
        f"A training step alone takes {alone['step']['median']:.2f} s, of which forward and "
        f"backward {alone['forward and backward']['median']:.2f} s. The check itself was tried on "
        f"an asynchronous save whose update does not wait; it says: {result['control']}.",
    ])  # fmt: skip


def collect(bench: Bench, systems: dict[str, System], limits: Limits, **more: Any) -> dict[str, Any]:
    """Everything measured, as it is kept."""
    add_lost(bench, systems)
    summaries = {
        name: {figure: harness.summary(values) for figure, values in figures.items()}
        for name, figures in bench.found.items()
    }
    return {
        "size_bytes": bench.training.size_bytes,
        "leaves": len(bench.training.leaves),
        "systems": {
            name: {
                "settings": system.settings,
                "stored": _counted(bench.verdicts[name]),
                "figures": summaries[name],
            }
            for name, system in systems.items()
        },
        "limits": {
            "copy by one thread into touched memory": summaries[COPY]["elapsed"],
            f"direct write ({limits.settings})": summaries[WRITE]["elapsed"],
        },
        "direct_writes_tried": limits.tried,
        "alone": summaries[ALONE],
        **more,
    }


def _counted(verdicts: list[str]) -> str:
    return ", ".join(f"{verdicts.count(one)}x {one}" for one in sorted(set(verdicts)))


def show(line: str) -> None:
    """Progress, for whoever watches."""
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


# ── the command ──────────────────────────────────────────────────────────────────────────────


def measure(root: Path, options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """Run everything; the result and the facts of the machine."""
    load = harness.load()
    training = Training(options.width)
    if harness.available_bytes() < 9 * training.size_bytes:
        raise SystemExit("too little free memory: nine copies of the state must fit; see --width")
    training.enlarge_batch(FORWARD_BACKWARD_S)
    facts = harness.machine_facts(root, ["torch", "safetensors"])
    bench, limits = Bench(training, root), Limits(training, root)
    show(f"direct write: {limits.tried}")
    chosen, tried = choose_settings(bench)
    makers: dict[str, Callable[[], System]] = {
        "Holdfast": partial(Holdfast, root, training.model, training.optimizer),
        "torch.save": partial(TorchSave, root, training.leaves),
        "safetensors": partial(Safetensors, root, training.leaves),
        **chosen,
    }
    found = control(bench)
    systems: dict[str, System] = {}
    try:
        for name, make in makers.items():
            systems[name] = make()
            if systems[name].is_async:
                warm_up(bench, name, systems[name])
        run_series(bench, systems, limits, options.rounds)
    finally:
        for system in systems.values():
            system.close()
    result = collect(
        bench, systems, limits, rounds=options.rounds, settings_tried=tried, control=found,
        load=f"{load}, {harness.load()}",
    )  # fmt: skip
    return result, facts


def main() -> int:
    """Exit 1 when anything was stored that was not saved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="how often each is measured (7)")
    parser.add_argument("--dir", help="a directory on the disk to measure (default: the temporary one)")
    parser.add_argument("--width", type=int, default=WIDTH, help=f"width of the 16 layers ({WIDTH})")
    parser.add_argument("--document", action="store_true", help="put the tables into docs/performance.md")
    options = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # DCP's saving process asks for it
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with harness.scratch(options.dir, 8 * 48 * options.width**2 * 4) as root:
        result, facts = measure(root, options)
    shown = report(result, facts)
    print(f"\n{shown}\n")
    print(f"results/{harness.write_results('save', facts, result, shown).name}")
    if options.document:
        harness.replace_block(DOCUMENT, "save", shown)
    exact = all(set(e["stored"].split("x ")[1:]) == {"exact"} for e in result["systems"].values())
    return 0 if exact else 1


if __name__ == "__main__":
    raise SystemExit(main())
