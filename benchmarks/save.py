"""What a save costs: how long it holds the training, and how long until the state is durable.

``make bench``, or ``python benchmarks/save.py --help``. What is measured and how to read it stands
in docs/performance.md.
"""

from __future__ import annotations

import argparse
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
import tables
import torch.distributed as dist
from limits import Limits
from systems import DcpAsync, DcpSave, Holdfast, Safetensors, Saving, System, TorchSave
from training import WIDTH, Training, fingerprints, verdict

clock = time.perf_counter
DOCUMENT = Path(__file__).parents[1] / "docs" / "performance.md"
FORWARD_BACKWARD_S = 0.4
STEPS = 3
WARM_UP_SAVES = 3
ALONE, COPY, WRITE = "training alone", "memory copy", "direct write"


def show(line: str) -> None:
    """Progress, for whoever watches."""
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


# ── one save ─────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Bench:
    """The training, the disk, and what was measured: ``found[system][figure]`` in seconds."""

    training: Training
    root: Path
    patience_s: float
    found: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    verdicts: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    idle: list[float] = field(default_factory=list)
    steps_saved: int = 0
    watcher: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def at_once(self, system: System, *, check: bool = True) -> tuple[dict[str, float], str]:
        """Save, and update as soon as the system allows: nothing overlaps with its copying."""
        before, step = self.training.fingerprints() if check else {}, self._next()
        self.settle()
        self._prime()
        began = clock()
        saving = system.save(step)
        saving.wait_safe()
        free = clock()
        durable = self._watch(saving)
        self.training.update()
        times = {"blocked": free - began, "durable": durable.result() - began}
        stored = self._check(system, step, before) if check else ""
        system.discard(step)
        return times, stored

    def in_training(self, system: System, *, check: bool = True) -> tuple[dict[str, float], str]:
        """Save between two steps; the next update comes after a forward and a backward.

        What is lost is what the steps took longer than the same steps just before, alone.
        """
        self.settle()
        training, step, alone = self.training, self._next(), self._alone()
        before = training.fingerprints() if check else {}
        self._prime()
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
            "lost": (clock() - began) - steps * alone,
            "steps": steps,
            "forward and backward": worked - returned,
            "durable in training": durable.result() - began,
        }
        stored = self._check(system, step, before) if check else ""
        system.discard(step)
        return times, stored

    def _alone(self) -> float:
        """Seconds a step takes without a save."""
        computing, began = 0.0, clock()
        for _ in range(STEPS):
            step_began = clock()
            self.training.forward_backward()
            computing += clock() - step_began
            self.training.update()
        step = (clock() - began) / STEPS
        self.note(ALONE, ({"step": step, "forward and backward": computing / STEPS}, ""))
        return step

    def settle(self) -> None:
        """Let others finish: their work would be in the next figure."""
        self.idle.append(harness.wait_until_idle(self.patience_s))

    def _prime(self) -> None:
        harness.prime_page_cache(self.root, self.training.size_bytes)

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
        return verdict(fingerprints(system.read(step)), saved, updated)

    def note(self, name: str, measured: tuple[dict[str, float], str]) -> None:
        """Keep one measurement."""
        times, stored = measured
        for figure, value in times.items():
            self.found[name][figure].append(value)
        if stored:
            self.verdicts[name].append(stored)


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
            for n in (2, 4)  # one thread was never the best, and each try takes its time
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
            runs = [bench.at_once(system, check=False)[0]["durable"] for _ in range(3)]
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
        times, _ = bench.in_training(system, check=False)
        bench.found[name]["blocked, first saves"].append(times["blocked in training"])


def run_series(bench: Bench, systems: dict[str, System], limits: Limits, rounds: int) -> None:
    """Every system and limit once a round, never two rounds in the same order."""
    for turn, name in harness.alternate([COPY, WRITE, *systems], rounds):
        if name in (COPY, WRITE):
            bench.settle()
        if name == COPY:
            bench.note(name, ({"elapsed": limits.copy()}, ""))
        elif name == WRITE:
            bench.note(name, ({"elapsed": limits.write()}, ""))
        else:
            bench.note(name, bench.at_once(systems[name]))
            if systems[name].is_async:
                bench.note(name, bench.in_training(systems[name]))
        last = {figure: round(values[-1], 3) for figure, values in bench.found[name].items()}
        show(f"round {turn + 1}: {name}: {last} {''.join(bench.verdicts[name][-1:])}")


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


def collect(
    bench: Bench, systems: dict[str, System], limits: Limits, **more: Any
) -> dict[str, Any]:
    """Everything measured, as it is kept."""
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
                "stored": harness.counted(bench.verdicts[name]),
                "exact": set(bench.verdicts[name]) == {"exact"},
                "figures": summaries[name],
            }
            for name, system in systems.items()
        },
        "limits": {
            "copy by one thread into touched memory": summaries[COPY]["elapsed"],
            f"direct write ({limits.settings})": summaries[WRITE]["elapsed"],
        },
        "idle_before": harness.summary(bench.idle),
        "direct_writes_tried": limits.tried,
        "alone": summaries[ALONE],
        **more,
    }


# ── the command ──────────────────────────────────────────────────────────────────────────────


def measure(root: Path, options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """Run everything; the result and the facts of the machine."""
    training = Training(options.width)
    if harness.available_bytes() < 9 * training.size_bytes:
        raise SystemExit("too little free memory: nine copies of the state must fit; see --width")
    training.enlarge_batch(FORWARD_BACKWARD_S)
    facts = harness.machine_facts(root, ["torch", "safetensors"])
    bench, limits = (
        Bench(training, root, options.patience),
        Limits(list(training.leaves.values()), root),
    )
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
        bench.idle.clear()
        run_series(bench, systems, limits, options.rounds)
    finally:
        for system in systems.values():
            system.close()
    result = collect(
        bench, systems, limits, rounds=options.rounds, settings_tried=tried, control=found
    )
    return result, facts


def main() -> int:
    """Exit 1 when anything was stored that was not saved."""
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
        "--width", type=int, default=WIDTH, help=f"width of the 16 layers ({WIDTH})"
    )
    parser.add_argument(
        "--document", action="store_true", help="put the tables into docs/performance.md"
    )
    options = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # DCP's saving process asks for it
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with harness.scratch(options.dir, 8 * 48 * options.width**2 * 4) as root:
        result, facts = measure(root, options)
    shown = tables.save(result, facts)
    print(f"\n{shown}\n")
    print(f"results/{harness.write_results('save', facts, result, shown).name}")
    if options.document:
        harness.replace_block(DOCUMENT, "save", shown)
    return 0 if all(entry["exact"] for entry in result["systems"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
