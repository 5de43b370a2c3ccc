"""Measure how long a save holds the training, and how long until the state is durable.

``make bench`` runs all of it. What is measured and how to read it stands in docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.kit import disk, machine, processes, results, series
from benchmarks.kit.options import Parser
from benchmarks.kit.results import PROJECT
from benchmarks.save import save_tables
from benchmarks.save.watch import Outcome, visit
from benchmarks.systems import contenders

RIVALS = PROJECT / ".venv-rivals" / "bin" / "python"


@dataclass(frozen=True, slots=True)
class State:
    """What is saved. ``copies``: how many of it must fit into the memory, staging included."""

    title: str
    kind: str
    width: int
    size_bytes: int
    environment: dict[str, str] = field(default_factory=dict)
    copies: float = 5.0


STATES = {
    "tensors": State("1.6 GB in 48 tensors", "layers", 2887, 1_600_000_000),
    "leaves": State("1.6 GB in 3,000 leaves", "gpt", 416, 1_600_000_000),
    "ring": State(
        "6 GB, 4 GiB of arena",
        "layers",
        5590,
        6_000_000_000,
        {"HOLDFAST_ARENA_BYTES": str(4 << 30)},
        copies=3.0,
    ),
}
SMALL = {
    "tensors": State("39 MB in 48 tensors", "layers", 451, 39_000_000),
    "leaves": State("0.1 GB in 3,000 leaves", "gpt", 104, 107_000_000),
    "ring": State(
        "39 MB, 32 MiB of arena",
        "layers",
        451,
        39_000_000,
        {"HOLDFAST_ARENA_BYTES": str(32 << 20)},
    ),
}
QUICK_STATES = ["tensors"]
QUICK_SYSTEMS = [contenders.LIMITS, contenders.OURS, "torch.save", "DCP async_save, THREAD"]


class Series:
    """All visits to one state: the settings of each system, then round after round."""

    def __init__(self, state: State, names: list[str], root: Path, options: Any) -> None:
        self.state, self.names, self.root, self.options = state, names, root, options
        self.settings: dict[str, dict[str, Any]] = {}
        self.tried: dict[str, Any] = {}
        self.failed: dict[str, str] = {}
        self.visits: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.peaks: dict[str, list[dict[str, dict[str, int]]]] = defaultdict(list)
        self.took_s: dict[str, float] = {}
        self.rows = 0
        self.rounds = 0

    def run(self) -> dict[str, Any]:
        """Everything; what was found."""
        began = time.monotonic()
        self._calibrate()
        series.show(f"about {self._guess_s() / 60:.0f} minutes for {self.options.rounds} rounds")
        self._recall()
        for name in self.names:
            self._choose(name)
        self._remember()
        for turn in range(self.options.rounds):
            left_s = self.options.minutes * 60 - (time.monotonic() - began)
            if turn and left_s < sum(self.took_s.values()):
                series.show(f"{self.options.minutes:.0f} minutes are over: {turn} rounds")
                break
            self._round(turn)
            rounds_left = self.options.rounds - turn - 1
            per_round = sum(self.took_s.values())
            series.show(
                f"a round takes {per_round / 60:.1f} minutes; {rounds_left} to go: "
                f"{rounds_left * per_round / 60:.0f} minutes"
            )
            self.rounds = turn + 1
        return self._collect()

    def _recall(self) -> None:
        """Settings that an earlier run found best on this machine, where a file has them."""
        if (file := self.options.settings) and Path(file).exists():
            found = json.loads(Path(file).read_text()).get(self.state.title, {})
            self.settings |= found["settings"] if found else {}
            self.tried |= found["tried"] if found else {}

    def _remember(self) -> None:
        if not (file := self.options.settings):
            return
        found = json.loads(Path(file).read_text()) if Path(file).exists() else {}
        before = found.get(self.state.title, {"settings": {}, "tried": {}})
        known = {name: one for name, one in self.settings.items() if name != contenders.LIMITS}
        tried = {name: one for name, one in self.tried.items() if name != contenders.LIMITS}
        found[self.state.title] = {
            "settings": before["settings"] | known,
            "tried": before["tried"] | tried,
        }
        Path(file).write_text(json.dumps(found, indent=1) + "\n")

    def _guess_s(self) -> float:
        """How long all visits take on a machine that does nothing else, roughly."""
        heats = (
            0
            if self.options.quick
            else sum(len(contenders.CONTENDERS[name].tried) for name in self.names)
        )
        gigabytes = self.state.size_bytes / 1e9
        visits = self.options.rounds * len(self.names)
        visit_s = 12 + (4 + 4 * self.options.repeat) * gigabytes
        return visits * visit_s + heats * (8 + 4 * gigabytes)

    def _round(self, turn: int) -> None:
        for name in series.rotated(self.names, turn):
            if name in self.failed:
                continue
            outcome = self._visit(name, self.settings[name])
            self.took_s[name] = outcome.elapsed_s
            if outcome.failed:
                self.took_s.pop(name)
                if name == contenders.LIMITS:
                    raise SystemExit(f"the limits could not be measured: {outcome.failed}")
                self.failed[name] = outcome.failed + (f" (round {turn + 1})" if turn else "")
                series.show(f"round {turn + 1}: {name}: failed: {outcome.failed}")
                continue
            self.visits[name].append(outcome.result)
            self.peaks[name].append(outcome.peaks)
            figures = outcome.result["figures"]
            last = {key: round(figures[key][-1], 3) for key in _SHOWN if key in figures}
            series.show(f"round {turn + 1}: {name}: {last} {outcome.result['verdicts'] or ''}")

    def _calibrate(self) -> None:
        """The limits' best settings, and a batch that computes longer than a copy takes."""
        outcome = self._visit(contenders.LIMITS, {}, trial=True)
        if outcome.failed:
            raise SystemExit(f"the limits could not be measured: {outcome.failed}")
        self.rows = outcome.result["rows"]
        self.settings[contenders.LIMITS] = outcome.result["best"]
        self.tried[contenders.LIMITS] = outcome.result["tried"]
        series.show(f"{self.state.title}: {outcome.result['settings']}; batch of {self.rows}")

    def _choose(self, name: str) -> None:
        """The settings that make a system durable soonest."""
        candidates = contenders.CONTENDERS[name].tried
        if name in self.settings or len(candidates) == 1 or self.options.quick:
            self.settings.setdefault(name, candidates[-1])
            return
        heats: list[tuple[float, int]] = []
        self.tried[name] = {}
        why = ""
        for number, settings in enumerate(candidates):
            outcome = self._visit(name, settings, trial=True)
            label = ", ".join(f"{key}={value}" for key, value in settings.items())
            if outcome.failed:
                why = self.tried[name][label] = outcome.failed
                continue
            heats.append((outcome.result["figures"]["durable"][0], number))
            self.tried[name][outcome.result["settings"]] = round(heats[-1][0], 4)
        if heats:
            self.settings[name] = candidates[min(heats)[1]]
        else:
            self.failed[name] = why
        series.show(f"{name}: {self.tried[name]}")

    def _visit(self, name: str, settings: dict[str, Any], *, trial: bool = False) -> Outcome:
        spec = {
            "system": name,
            "settings": settings,
            "trial": trial,
            "kind": self.state.kind,
            "width": self.state.width,
            "rows": self.rows,
            "repeat": 1 if trial else self.options.repeat,
            "patience_s": self.options.patience,
            "environment": self.state.environment,
        }
        deadline_s = self.options.deadline or 90 + 60 * self.state.size_bytes / 1e9
        return visit(self.options.python, spec, self.root, deadline_s=deadline_s)

    def _collect(self) -> dict[str, Any]:
        one = self.visits[contenders.LIMITS][0]
        return {
            "title": self.state.title,
            "size_bytes": one["size_bytes"],
            "leaves": one["leaves"],
            "rounds": self.rounds,
            "repeat": self.options.repeat,
            "environment": self.state.environment,
            "settings_tried": self.tried,
            "idle_before": series.summary(
                [
                    value
                    for visits in self.visits.values()
                    for one in visits
                    for value in one["idle"]
                ]
            ),
            "limits": {"settings": one["settings"], "figures": self._summaries(contenders.LIMITS)},
            "systems": {
                name: self._entry(name) for name in self.names if name != contenders.LIMITS
            },
        }

    def _entry(self, name: str) -> dict[str, Any]:
        if name in self.failed:
            return {"failed": self.failed[name]}
        if name == contenders.OURS and (why := self._too_large()):
            return {"failed": why}
        visits = self.visits[name]
        verdicts = {
            key: [verdict for one in visits for verdict in one["verdicts"].get(key, [])]
            for key in ("stored", "stored early")
        }
        return {
            "settings": visits[0]["settings"],
            "is_async": visits[0]["is_async"],
            "early": visits[0]["early"],
            "stored": series.counted(verdicts["stored"]),
            "exact": set(verdicts["stored"]) == {"exact"},
            "stored early": series.counted(verdicts["stored early"]),
            "figures": self._summaries(name),
            "memory": {
                kind: series.summary([_extra(peaks, kind) for peaks in self.peaks[name]])
                for kind in ("private", "shared", "files", "highest")
            },
        }

    def _too_large(self) -> str:
        """Whether the arena was not bounded as asked: the figures would be of another mode."""
        bound = int(self.state.environment.get("HOLDFAST_ARENA_BYTES", 0))
        took = max(_extra(peaks, "shared") * 1e6 for peaks in self.peaks[contenders.OURS])
        if bound and took > 1.05 * bound + (8 << 20):
            return (
                f"{took / 1e6:.0f} MB of arena, where HOLDFAST_ARENA_BYTES is {bound / 1e6:.0f} MB"
            )
        return ""

    def _summaries(self, name: str) -> dict[str, Any]:
        """By figure, over all rounds."""
        figures: dict[str, list[float]] = defaultdict(list)
        for one in self.visits[name]:
            for figure, values in one["figures"].items():
                figures[figure] += values
        return series.summaries(figures)


_SHOWN = (
    "host",
    "blocked",
    "blocked in training",
    "durable",
    "processor, trainer",
    "direct write",
    "direct read",
)


def _extra(peaks: dict[str, dict[str, int]], kind: str) -> float:
    """Highest memory with saves beyond the highest without, in MB."""
    return (peaks["with saves"][kind] - peaks["without saves"][kind]) / 1e6


# ── the command ──────────────────────────────────────────────────────────────────────────────


def chosen(options: argparse.Namespace) -> tuple[dict[str, State], list[str]]:
    """The states and the systems asked for."""
    states = SMALL if options.quick else STATES
    names = options.systems or (QUICK_SYSTEMS if options.quick else list(contenders.CONTENDERS))
    wanted = options.states or (QUICK_STATES if options.quick else list(states))
    unknown = [*(set(names) - contenders.CONTENDERS.keys()), *(set(wanted) - states.keys())]
    if unknown:
        raise SystemExit(f"unknown: {', '.join(unknown)}; see --help")
    names = [contenders.LIMITS, *(name for name in names if name != contenders.LIMITS)]
    return {name: states[name] for name in wanted}, names


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "save",
        __doc__,
        quick="small states, few systems, one round",
        quick_settings={"patience": 0},
    )
    parser.add_argument("--rounds", type=int, help="how often each is visited (2; 1 if --quick)")
    parser.add_argument(
        "--repeat", type=int, help="how often each is measured in a visit (4; 1 if --quick)"
    )
    parser.add_argument(
        "--states", nargs="+", metavar="STATE", help=f"of {', '.join(STATES)} (all)"
    )
    parser.add_argument(
        "--systems",
        nargs="+",
        metavar="NAME",
        help="of " + "; ".join(contenders.CONTENDERS) + " (all)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=120,
        metavar="M",
        help="begin no round of a state that would end later than this (120)",
    )
    parser.add_patience()
    parser.add_argument(
        "--deadline",
        type=float,
        metavar="S",
        help="what a system may take for one visit (90, and 60 for each GB)",
    )
    parser.add_argument(
        "--settings",
        metavar="FILE",
        help="take the best settings of each system from here, and add those found",
    )
    parser.add_argument("--out", help="where results go (benchmarks/results; nowhere if --quick)")
    parser.add_directory()
    parser.add_argument(
        "--python",
        default=str(RIVALS if RIVALS.exists() else sys.executable),
        help="the interpreter that has the rivals (`make bench-rivals`)",
    )
    parser.add_document()
    options = parser.parse(arguments)
    options.rounds = options.rounds or (1 if options.quick else 2)
    options.repeat = options.repeat or (1 if options.quick else 4)
    return options


def write(
    result: dict[str, Any], facts: dict[str, str], shown: str, options: argparse.Namespace
) -> None:
    """Raw values, tables and plots; into the document, if asked."""
    directory = Path(options.out) if options.out else results.RESULTS
    written = results.write("save", facts, result, shown, directory)
    print(f"{written.parent.name}/{written.name}")
    drawn = save_tables.images(result)
    for title, image in drawn.items():
        (results.IMAGES if options.document else directory).joinpath(title).write_text(image)
    if options.document:
        images = [f"![{_alternative(title)}]({results.IMAGE_LINK}/{title})" for title in drawn]
        results.replace_block(results.DOCUMENT, "save", "\n\n".join([shown, *images]))


def _alternative(title: str) -> str:
    _, state, what = title.removesuffix(".svg").split("-")
    return f"{what}: {STATES[state].title}"


def fits(state: State) -> str:
    """Why a state cannot be measured here, or nothing."""
    needed = state.copies * state.size_bytes
    if machine.available_bytes() < needed:
        return f"needs {needed / 1e9:.0f} GB of free memory"
    return ""


def main(arguments: Sequence[str]) -> int:
    """Exit 1 when Holdfast failed, or stored anything but what was saved."""
    options = parsed(arguments)
    states, names = chosen(options)
    processes.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and clean up
    found: dict[str, Any] = {}
    with disk.scratch(options.dir, 4 * max(state.size_bytes for state in states.values())) as root:
        facts = machine.facts(root, contenders.PACKAGES, options.python)
        for name, state in states.items():
            if why := fits(state):
                series.show(f"{state.title}: left out: {why}")
                continue
            found[name] = Series(state, names, root, options).run()
    result = {"quick": options.quick, "states": found}
    print(f"\n{save_tables.save(result, facts)}\n")
    if options.out or not options.quick:
        directory = Path(options.out) if options.out else results.RESULTS
        # What was measured of other states in the same month on the same machine stays.
        before = results.read("save", facts, directory).get("states", {})
        result["states"] = {**before, **found}
        write(result, facts, save_tables.save(result, facts), options)
    return 0 if all(save_tables.is_sound(entry) for entry in found.values()) else 1
