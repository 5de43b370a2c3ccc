"""Measure one system in the process of a visit: its saves, and what was stored.

Started by watch.py with a specification; answers in lines of JSON. ``window`` asks the watcher to
note the highest memory from now on under a name, ``result`` and ``failed`` end the visit.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import statistics
import sys
import time
import traceback
import warnings
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.kit import disk, machine, processes
from benchmarks.systems import contenders

clock = time.perf_counter
STEPS = 3
FIRST_SAVES = 2
#: Long enough for a copy by one thread, on any machine that trains.
FORWARD_BACKWARD_S_PER_GB = 0.25


class Visit:
    """The measurements of one system, on one training."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.root = Path(spec["root"])
        self.figures: dict[str, list[float]] = defaultdict(list)
        self.verdicts: dict[str, list[str]] = defaultdict(list)
        self.idle: list[float] = []
        self._saved = 0
        self._watcher = ThreadPoolExecutor(1)

    def run(self) -> dict[str, Any]:
        """Everything asked for; what is measured."""
        from benchmarks.kit.training import Training

        # Libraries first: their memory is not that of a save.
        make = contenders.load(self.spec["system"])
        self.training = Training(self.spec["width"], self.spec["kind"])
        if self.spec["rows"]:
            self.training.use_batch(self.spec["rows"])
        else:
            wanted_s = FORWARD_BACKWARD_S_PER_GB * self.training.size_bytes / 1e9
            self.training.enlarge_batch(max(0.05, wanted_s))
        if self.spec["system"] == contenders.LIMITS:
            settings, more = self._limits()
        else:
            settings, more = self._system(make)
        return {
            "rows": self.training.rows,
            "size_bytes": self.training.size_bytes,
            "leaves": len(self.training.leaves),
            "settings": settings,
            "figures": self.figures,
            "verdicts": self.verdicts,
            "idle": self.idle,
            **more,
        }

    # ── limits ───────────────────────────────────────────────────────────────────────────

    def _limits(self) -> tuple[str, dict[str, Any]]:
        from benchmarks.save.save_limits import Limits

        limits = Limits(
            list(self.training.leaves.values()),
            self.root,
            self.spec["settings"],
            sweep=self.spec["trial"],
        )
        for _ in range(self.spec["repeat"]):
            for name, measured in limits.measures():
                self.settle()
                self.figures[name].append(measured())
        return limits.settings, {"best": limits.best, "tried": limits.tried}

    # ── a system ─────────────────────────────────────────────────────────────────────────

    def _system(self, make: contenders.Make) -> tuple[str, dict[str, Any]]:
        self._alone()
        tell(window="without saves")
        self._alone()
        tell(window="with saves")
        self.system = system = make(self.root, self.training, **self.spec["settings"])
        try:
            if self.spec["trial"]:
                self._trial()
            else:
                self._measure()
        finally:
            tell(window="")
            system.close()
        return system.settings, {"is_async": system.is_async, "early": system.early}

    def _trial(self) -> None:
        """The best of two saves after one that is not counted."""
        durable = [self.at_once(f"trial {n}")["durable"] for n in range(3)]
        self.figures["durable"].append(min(durable[1:]))

    def _measure(self) -> None:
        system = self.system
        if system.is_async:
            for _ in range(FIRST_SAVES):
                self.figures["blocked, first saves"].append(
                    self.in_training()["blocked in training"]
                )
                self._discard()
        else:
            self.quietly()
            self._discard()
        self._note(self.quietly())
        self._discard()
        for _ in range(self.spec["repeat"]):
            self._note(self.at_once("at once"), checked="stored")
            if system.is_async:
                self._note(self.in_training(), checked="stored")
        if system.is_async and system.early:
            times = self.at_once("early", hold=False)
            self._note({"blocked, not waiting": times["blocked"]}, checked="stored early")

    def quietly(self) -> dict[str, float]:
        """Save, and do nothing until it is durable: what it costs the processors."""
        step = self._prepare()
        own, others = time.process_time(), self._others_s()
        saving = self.system.save(step)
        saving.wait_safe()
        saving.wait_durable()
        return {
            "processor, trainer": time.process_time() - own,
            "processor, others": max(0.0, self._others_s() - others),
        }

    def _others_s(self) -> float:
        """Of all processes this visit started, those that ended too."""
        family = processes.descendants(self.spec["family"]) - {os.getpid()}
        spent = os.times()
        return processes.processor_s(family) + spent.children_user + spent.children_system

    def at_once(self, what: str, *, hold: bool = True) -> dict[str, float]:
        """Save, and update as soon as the system allows: nothing overlaps with its copying."""
        step = self._prepare()
        before = {} if self.spec["trial"] else self.training.fingerprints()
        disk.prime_page_cache(self.root, self.training.size_bytes)
        began = clock()
        saving = self.system.save(step)
        returned = clock()
        if hold:
            saving.wait_safe()
        free = clock()
        durable = self._watch(saving)
        self.training.update()
        captured, stored = durable.result()
        self._before = before
        if not before:
            self._discard()
        return {
            "host": returned - began,
            "blocked": free - began,
            "captured": (captured or free) - began,
            "durable": stored - began,
        }

    def in_training(self) -> dict[str, float]:
        """Save between two steps; the next update comes after a forward and a backward.

        What is lost is what the steps took longer than the same steps just before, alone.
        """
        training, step, alone = self.training, self._prepare(), self._alone()
        self._before = training.fingerprints()
        disk.prime_page_cache(self.root, training.size_bytes)
        began = clock()
        saving = self.system.save(step)
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
        captured, stored = durable.result()
        return {
            "host in training": returned - began,
            "blocked in training": (returned - began) + (free - worked),
            "lost": (clock() - began) - steps * alone,
            "forward and backward": worked - returned,
            "captured in training": (captured or free) - began,
            "durable in training": stored - began,
        }

    def _alone(self) -> float:
        """Seconds a step takes without a save."""
        steps: list[float] = []
        for _ in range(STEPS):
            began = clock()
            self.training.forward_backward()
            computed = clock()
            self.training.update()
            steps.append(clock() - began)
            self.figures["forward and backward, alone"].append(computed - began)
        self.figures["step, alone"].append(statistics.median(steps))
        return sum(steps) / len(steps)

    def settle(self) -> None:
        """Let others finish: their work would be in the next figure."""
        self.idle.append(machine.wait_until_idle(self.spec["patience_s"]))

    def _prepare(self) -> int:
        self.settle()
        self._saved += 1
        return self._saved

    def _watch(self, saving: Any) -> Future[tuple[float, float]]:
        def wait() -> tuple[float, float]:
            captured = 0.0
            if saving.wait_captured is not None:
                saving.wait_captured()
                captured = clock()
            saving.wait_durable()
            return captured, clock()

        return self._watcher.submit(wait)

    def _note(self, times: dict[str, float], *, checked: str = "") -> None:
        for figure, value in times.items():
            self.figures[figure].append(value)
        if checked:
            tell(window="")
            self.verdicts[checked].append(self._check())
            self._discard()

    def _check(self) -> str:
        from benchmarks.kit.training import fingerprints, verdict

        saved, updated = self._before, self.training.fingerprints()
        assert all(updated[name] != saved[name] for name in saved), "the update changed too little"
        try:
            return verdict(fingerprints(self.system.read(self._saved)), saved, updated)
        except Exception as error:
            return f"not readable: {short(error)}"

    def _discard(self) -> None:
        self.system.discard(self._saved)


# ── answers ──────────────────────────────────────────────────────────────────────────────────


def tell(**message: Any) -> None:
    """One line to the watcher."""
    os.write(ANSWER, json.dumps(message).encode() + b"\n")


def short(error: BaseException) -> str:
    """An error in a table's cell."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else text[:297] + "..."


def main() -> int:
    """Exit 1 when the system failed; its error was told."""
    spec = json.loads(sys.argv[1])
    missing = [
        name
        for name in contenders.CONTENDERS[spec["system"]].needs
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        tell(failed=f"not installed: {', '.join(missing)}")
        return 1
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    # DCP's saving process asks for a place to meet; DLRover's asks who it is.
    for name, value in {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    try:
        import torch.distributed as dist

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        tell(**Visit(spec).run())
    except BaseException as error:
        traceback.print_exc()
        tell(failed=short(error))
        return 1
    return 0


if __name__ == "__main__":
    processes.end_with_parent()
    ANSWER = json.loads(sys.argv[1])["answer"]
    os.set_inheritable(ANSWER, False)
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # some libraries leave threads that never end
