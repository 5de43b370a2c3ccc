"""Measure what snapshots cost a training: steps with them against the same steps without.

A real GPT on the CPU learns from real text, on one rank and on two; blocks of steps with a save
and blocks without alternate in one process, and each block with saves is compared with the blocks
before and after it, so that what others do on the machine meets both alike. All of a save's work
counts: a block ends when its last save is done.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.kit import disk, machine, results, series
from benchmarks.kit.gpt import FULL, QUICK, GptTraining
from benchmarks.kit.options import Parser
from benchmarks.kit.ranks import machine_alone, run_ranks, show
from benchmarks.kit.training import fingerprints, verdict
from benchmarks.systems.in_training import DURABLE, MEMORY, PROTECTED, Make, keepers, ways_to_save
from benchmarks.systems.saving import System
from benchmarks.train import train_tables
from holdfast.errors import HoldfastError
from holdfast.parity.planning.budget import TOO_SLOW

clock = time.perf_counter
#: One rank computes with all cores; two have half of them each.
WORLDS = {
    "1 rank": ("plain", 1),
    "2 ranks, DDP": ("ddp", 2),
    "2 ranks, FSDP2": ("fsdp", 2),
    "2 hosts, FSDP2": ("fsdp", 2),
}
HOSTS = ("2 hosts, FSDP2",)
"""Each rank is a host, with a keeper of its own, on this one machine."""
INTERVALS = (1, 10)
SAVES = {1: 4, 10: 1}
"""How many saves a block has."""
ALONE_STEPS = 4
WARM_UP_SAVES = 4
NOT_CHECKED, OK = "–", ("–", "exact")
INFLATION_TARGET, SHARE_TARGET, PARITY_TARGET = 0.05, 0.3, TOO_SLOW


# ── one block of steps ───────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Bench:
    """One rank's training and what was measured on it: ``found[system][figure]``."""

    training: GptTraining
    root: Path
    found: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    steps_saved: int = 0
    watcher: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def alone(self, steps: int) -> tuple[float, float]:
        """Seconds, and processor seconds of this process, that a step takes without saves."""
        began, worked = clock(), time.process_time()
        for _ in range(steps):
            self.training.step()
        return (clock() - began) / steps, (time.process_time() - worked) / steps

    def with_saves(self, system: System, saves: int, interval: int) -> dict[str, float]:
        """Steps with a save at every ``interval``-th, until the last is done."""
        training, done, held, steps = self.training, list[Future[bool]](), 0.0, 0
        helped, began, worked = helper_cpu_s(self.root), clock(), time.process_time()
        for _ in range(saves):
            called = clock()
            saving = system.save(self._next())
            held += clock() - called
            done.append(self.watcher.submit(_succeeds, saving.wait_durable))
            for number in range(interval):
                training.forward_backward()
                if number == 0:
                    waits = clock()
                    saving.wait_safe()
                    held += clock() - waits
                training.update()
                steps += 1
        late = 0
        while not all_ranks(all(one.done() for one in done)):
            training.step()
            late += 1
        return {
            "elapsed": clock() - began,
            "steps": steps + late,
            "steps to done": late,
            "blocked": held / saves,
            "trainer cpu": time.process_time() - worked,
            "helper cpu": (helper_cpu_s(self.root) - helped) / saves,
            "done": sum(one.result() for one in done),
        }

    def _next(self) -> int:
        self.steps_saved += 1
        return self.steps_saved

    def discard(self, system: System) -> None:
        """Free the disk of the saves of the last block."""
        for step in range(max(1, self.steps_saved - max(SAVES.values())), self.steps_saved + 1):
            system.discard(step)

    def check(self, system: System) -> str:
        """Save, update as soon as the system allows, and compare what it stored bit for bit."""
        training = self.training
        before, step = training.fingerprints(), self._next()
        saving = system.save(step)
        training.forward_backward()
        saving.wait_safe()
        training.update()
        saving.wait_durable()
        updated = training.fingerprints()
        dist.barrier()
        found = ""
        if dist.get_rank() == 0:
            found = verdict(fingerprints(system.read(step)), before, updated)
        dist.barrier()
        system.discard(step)
        return found


def _succeeds(wait: Any) -> bool:
    try:
        wait()
    except HoldfastError as error:
        show(f"not done: {error}")
        return False
    return True


def all_ranks(is_true: bool) -> bool:
    """Whether it is so on every rank."""
    told = torch.tensor([int(is_true)])
    dist.all_reduce(told, dist.ReduceOp.MIN)
    return bool(told.item())


def helper_cpu_s(root: Path) -> float:
    """Processor seconds of this process's children and, on rank 0, of the keepers below root."""
    serving, found = keepers(root) if dist.get_rank() == 0 else [], 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has just ended
            parent, *times = _stat(name)
            if parent == os.getpid() or int(name) in serving:
                found += sum(times)
    return found / os.sysconf("SC_CLK_TCK")


def _stat(pid: str) -> tuple[int, int, int]:
    """Parent, and clock ticks spent in user and system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1]), int(fields[11]), int(fields[12])


# ── the series of one world ──────────────────────────────────────────────────────────────────


def run_series(bench: Bench, systems: dict[str, System], rounds: int, intervals: list[int]) -> None:
    """Every system at every interval once a round, between blocks without saves."""
    names = [f"{interval}|{name}" for interval in intervals for name in systems]
    with machine_alone():
        before = bench.alone(ALONE_STEPS)
    for turn, key in series.alternate(names, rounds):
        interval, name = int(key.partition("|")[0]), key.partition("|")[2]
        with machine_alone():
            if dist.get_rank() == 0:
                disk.prime_page_cache(bench.root, SAVES[interval] * bench.training.size_bytes)
            dist.barrier()
            block = bench.with_saves(systems[name], SAVES[interval], interval)
            bench.discard(systems[name])
            after = bench.alone(ALONE_STEPS)
        figures = compare(block, before, after, SAVES[interval], interval)
        before = after
        for figure, value in figures.items():
            bench.found[key][figure].append(value)
        told = {figure: round(value, 3) for figure, value in figures.items()}
        show(f"round {turn + 1}: every {interval}: {name}: {told}")


def compare(
    block: dict[str, float],
    before: tuple[float, float],
    after: tuple[float, float],
    saves: int,
    interval: int,
) -> dict[str, float]:
    """What a save cost, by what the steps around take without."""
    step_s, step_cpu_s = ((one + other) / 2 for one, other in zip(before, after, strict=True))
    lost = block["elapsed"] - block["steps"] * step_s
    return {
        "step alone": step_s,
        "lost": lost / saves,
        "inflation": lost / saves / (interval * step_s),
        "trainer cpu": (block["trainer cpu"] - block["steps"] * step_cpu_s) / saves,
        **{name: block[name] for name in ("blocked", "helper cpu", "steps to done", "done")},
    }


def measure(name: str, root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One world's figures, on each of its ranks."""
    if name in HOSTS:
        os.environ["HOLDFAST_HOST_ID"] = f"host-{dist.get_rank()}"
    os.environ["HOLDFAST_KEEPER_IDLE_S"] = "60"  # of a benchmark that was interrupted
    kind = WORLDS[name][0]
    with machine_alone():
        training = GptTraining(kind, QUICK if options.quick else FULL)
    bench = Bench(training, root)
    show(f"{kind}: {training.size_bytes / 1e9:.2f} GB, {training.sequences} sequences a rank")
    systems: dict[str, System] = {}
    failed: dict[str, str] = {}
    stored: dict[str, str] = {}
    for name, make in chosen(options).items():
        try:
            with machine_alone():
                systems[name] = make(root, training)
                for _ in range(WARM_UP_SAVES):
                    bench.with_saves(systems[name], 1, 1)
                    bench.discard(systems[name])
                stored[name] = NOT_CHECKED if "memory only" in name else bench.check(systems[name])
        except Exception as error:  # shown as failed, the others go on
            failed[name] = f"{type(error).__name__}: {error}"
            systems.pop(name, None)
        show(f"{name}: {failed.get(name) or 'stored ' + stored[name]}")
    intervals = [interval for interval in INTERVALS if interval in options.every]
    run_series(bench, systems, options.rounds, intervals)
    for system in systems.values():
        system.close()
    return {
        "size_bytes": training.size_bytes,
        "sequences": training.sequences,
        "leaves": len(training.leaves),
        "threads": torch.get_num_threads(),
        "stored": stored,
        "failed": failed,
        "settings": {name: system.settings for name, system in systems.items()},
        "figures": {key: series.summaries(figures) for key, figures in bench.found.items()},
    }


def chosen(options: argparse.Namespace) -> dict[str, Make]:
    """The systems to compare."""
    every = ways_to_save(
        options.threads,
        options.nice and tuple(options.nice),
        tries_held=options.held,
        hosts="HOLDFAST_HOST_ID" in os.environ,
    )
    return {name: make for name, make in every.items() if options.only.lower() in name.lower()}


def run_world(name: str, options: argparse.Namespace, parent: Path) -> dict[str, Any]:
    """All ranks of one world, in processes of their own."""
    root = parent / name.replace(", ", "-").replace(" ", "-")
    root.mkdir()
    found: dict[str, Any] = run_ranks(name, WORLDS[name][1], root, measure, name, root, options)
    return found


# ── the command ──────────────────────────────────────────────────────────────────────────────


def verdicts(worlds: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(what, got, target) for every world that was measured at every step."""
    found = []
    for world, result in worlds.items():
        inflation = {
            key.partition("|")[2]: figures["inflation"]["median"]
            for key, figures in result["figures"].items()
            if key.startswith("1|")
        }
        if MEMORY in inflation:
            found.append((f"{world}: inflation, {MEMORY}", inflation[MEMORY], INFLATION_TARGET))
        if MEMORY in inflation and PROTECTED in inflation:
            added = (1 + inflation[PROTECTED]) / (1 + inflation[MEMORY]) - 1
            found.append((f"{world}: what parity adds to a step", added, PARITY_TARGET))
        exact = [
            inflation[name]
            for name, said in result["stored"].items()
            if said == "exact" and name in inflation and not name.startswith("Holdfast")
        ]
        if exact and DURABLE in inflation:
            share = inflation[DURABLE] / max(1e-9, min(exact))
            found.append((f"{world}: {DURABLE}, share of the best rival's", share, SHARE_TARGET))
    return found


def main(arguments: Sequence[str]) -> int:
    """Exit 1 when anything was stored that was not saved."""
    parser = Parser("train", __doc__, quick="a small model, two rounds: whether it works at all")
    parser.add_rounds(7)
    parser.add_argument("--every", type=int, nargs="*", default=INTERVALS, help="1, 10 or both")
    parser.add_argument(
        "--worlds",
        nargs="*",
        choices=list(WORLDS),
        help="which (all; quick: without DDP)",
    )
    parser.add_argument(
        "--join", action="store_true", help="show the worlds that were measured today before, too"
    )
    parser.add_argument("--only", default="", help="systems with this in their name")
    parser.add_argument("--threads", type=int, default=2, help="DCP's writing threads a rank (2)")
    parser.add_argument(
        "--nice",
        type=int,
        nargs=2,
        metavar=("COPYING", "WRITING"),
        help="two more systems: Holdfast with threads of these priorities",
    )
    parser.add_argument(
        "--held",
        action="store_true",
        help="two more systems: Holdfast, training held until all cores have copied",
    )
    parser.add_directory()
    parser.add_document()
    options = parser.parse(arguments)
    if options.quick:
        options.rounds = min(options.rounds, 2)
        options.worlds = options.worlds or ["1 rank", "2 ranks, FSDP2", *HOSTS]
    options.worlds = options.worlds or list(WORLDS)
    with disk.scratch(options.dir, (1 if options.quick else 16) << 30) as parent:
        facts = machine.facts(parent, ["torch"])
        worlds = {name: run_world(name, options, parent) for name in options.worlds}
    if options.join:
        before = results.read("train", facts)
        old = before["worlds"] if before.get("date") == results.today() else {}
        for name, found in worlds.items():  # at other intervals, say
            found["figures"] = old.get(name, {}).get("figures", {}) | found["figures"]
        worlds = {name: (old | worlds)[name] for name in WORLDS if name in old | worlds}
    checks = verdicts(worlds)
    result = {
        "rounds": options.rounds,
        "worlds": worlds,
        "targets": [{"what": what, "got": got, "target": most} for what, got, most in checks],
    }
    shown = train_tables.tables(result, facts)
    print(f"\n{shown}\n")
    if not options.quick:
        path = results.write("train", facts, result, shown)
        drawn = train_tables.svg(result)
        path.with_suffix(".svg").write_text(drawn)
        if options.document:
            (results.IMAGES / "train.svg").write_text(drawn)
            image = f"![step inflation by save]({results.IMAGE_LINK}/train.svg)"
            results.replace_block(results.DOCUMENT, "train", f"{shown}\n\n{image}")
        print(f"results/{path.name}")
    wrong = [one for world in worlds.values() for one in world["stored"].values() if one not in OK]
    return 1 if wrong else 0
