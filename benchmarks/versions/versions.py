"""Measure what a user waits for: import, a keeper's start, saves, restores.

With `--before DIRECTORY`, the `src` of another version, both versions act by turns, save by save,
and are compared round by round.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import holdfast
from benchmarks.kit import machine, markdown, results, series
from benchmarks.kit.disk import MEMORY
from benchmarks.kit.options import Parser
from benchmarks.versions.visit import TURN
from holdfast.persist import commit
from holdfast.protocol.client import SOCKET_NAME
from holdfast.storage.local import LocalStore

SOURCE = Path(holdfast.__file__).parents[1]
#: A visit counts the least of so many: what else the machine does only adds to it.
TIMES, RESTARTS = 4, 2
VISIT = Path(__file__).with_name("visit.py")
SECTION = results.Section(
    "One version",
    "`python -m benchmarks versions`: a new process imports Holdfast, a keeper is started until\n"
    "it takes a connection, and two states are saved and restored: 12 large weights (200 MB with\n"
    "their moments), and 750 small ones (3,000 leaves). Each visit counts its least times.",
)


def import_package(source: Path) -> None:
    """Import it in a new interpreter, without torch, as the commands do."""
    subprocess.run([sys.executable, "-c", "import holdfast"], check=True, env=_environment(source))


def start_keeper(source: Path) -> None:
    """Start a keeper on a new root, until a connection to it is accepted; then end it."""
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="hf-start-") as directory:
        root, arena = Path(directory, "root"), Path(directory, "arena")
        commit.open_root(LocalStore(root), "start")
        arena.mkdir(mode=0o700)
        command = [sys.executable, "-m", "holdfast.keeper", "--arena", str(arena)]
        command += ["--run-id", "start", "--root", str(root), "--host-id", "host"]
        keeper = subprocess.Popen(command, env=_environment(source))
        try:
            _connect(arena / SOCKET_NAME, keeper)
        finally:
            keeper.kill()
            keeper.wait()


def _connect(path: Path, keeper: subprocess.Popen[bytes]) -> None:
    while keeper.poll() is None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            try:
                line.connect(str(path))
            except OSError:
                time.sleep(0.001)
            else:
                return
    raise SystemExit(f"the keeper ended with {keeper.returncode} before it took a connection")


def _environment(source: Path) -> dict[str, str]:
    """Both versions run as they do once installed: compiled, by the first round."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPATH": str(source), "PYTHONPYCACHEPREFIX": compiled()}


@functools.cache
def compiled() -> str:
    """Where what was compiled of both is kept until this process ends."""
    directory = tempfile.mkdtemp(prefix="hf-compiled-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def interval(ratios: Sequence[float], samples: int = 5000) -> tuple[float, float]:
    """The 95 % interval of the median of paired ratios, by resampling."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(samples))
    return medians[samples // 40], medians[-samples // 40 - 1]


def visit(sources: dict[str, Path], *, first: str) -> dict[str, dict[str, float]]:
    """Seconds by name of all acts, by version. The versions act by turns; ``first`` begins."""
    names = sorted(sources, key=lambda name: name != first)
    found: dict[str, dict[str, float]] = {name: {} for name in names}
    for act in (import_package, start_keeper):
        for name in names * TIMES:
            took = min(_time(act, sources[name]), found[name].get(act.__name__, math.inf))
            found[name][act.__name__] = took
    with ExitStack() as stack:
        directories, environments = {}, {}
        for name in names:
            directory = tempfile.TemporaryDirectory(prefix="hf-versions-")
            arena = tempfile.TemporaryDirectory(dir=MEMORY, prefix="hf-versions-")
            directories[name] = stack.enter_context(directory)
            arena_path = stack.enter_context(arena)
            environments[name] = _environment(sources[name]) | {"HOLDFAST_ARENA_DIR": arena_path}
        for act_name in ("train", *["restore"] * RESTARTS, "end"):
            children = {
                name: subprocess.Popen(
                    [sys.executable, str(VISIT), act_name, directories[name]],
                    env=environments[name],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for name in names
            }
            for name, seconds in play(children).items():
                for what, took in seconds.items():
                    found[name][what] = min(took, found[name].get(what, math.inf))
    return found


def play(children: dict[str, subprocess.Popen[str]]) -> dict[str, dict[str, float]]:
    """Give each child its turn until all have ended; what each found. Who begins changes."""
    said = {name: _said(child) for name, child in children.items()}
    order = list(children)
    while waiting := [name for name in order if said[name] == TURN]:
        for name in waiting:
            order_pipe = children[name].stdin
            assert order_pipe is not None
            order_pipe.write("\n")
            order_pipe.flush()
            said[name] = _said(children[name])
        order.reverse()
    for name, child in children.items():
        child.communicate()
        if child.returncode:
            raise SystemExit(f"the visit to {name!r} ended with {child.returncode}")
    return {name: json.loads(text) for name, text in said.items()}


def _said(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    line = child.stdout.readline().strip()
    if not line:
        raise SystemExit(f"a visit ended with {child.wait()} before its time")
    return line


def _time(act: Callable[[Path], object], source: Path) -> float:
    began = time.perf_counter()
    act(source)
    return time.perf_counter() - began


def measure(sources: dict[str, Path], rounds: int) -> dict[str, Any]:
    """Seconds of each act of each version; the first round warms up."""
    found: dict[str, dict[str, list[float]]] = {}
    names = list(sources)
    for turn in range(rounds + 1):
        with machine.alone():
            seconds = visit(sources, first=names[turn % len(names)])
        for name, acts in seconds.items() if turn else ():
            for act, took in acts.items():
                found.setdefault(act, {one: [] for one in names})[name].append(took)
    return {"acts": {act: series.summaries(by_name) for act, by_name in found.items()}}


def shown(found: dict[str, Any]) -> str:
    """The table, with the ratios where two versions were measured."""
    rows = []
    for act, ways in found["acts"].items():
        row = [act, *(markdown.spread(one) for one in ways.values())]
        if "before" in ways:
            pairs = zip(ways["now"]["values"], ways["before"]["values"], strict=True)
            ratios = [now / before for now, before in pairs]
            low, high = interval(ratios)
            row.append(f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})")
        rows.append(row)
    names = list(next(iter(found["acts"].values())))
    ratio = ["now / before (95 %)"] if "before" in names else []
    return markdown.table(["", *(f"{name}, s" for name in names), *ratio], rows)


def main(arguments: Sequence[str]) -> int:
    """Measure, print what was, and keep it."""
    parser = Parser("versions", __doc__, quick="one round, nothing kept")
    parser.add_rounds(12)
    parser.add_document()
    parser.add_argument("--before", type=Path, metavar="DIRECTORY", help="src of another version")
    options = parser.parse(arguments)
    sources = {"now": SOURCE, **({"before": options.before.resolve()} if options.before else {})}
    found = measure(sources, 1 if options.quick else options.rounds)
    text = shown(found)
    print(text)
    if not (options.quick or options.before):
        facts = machine.facts(MEMORY, ["msgspec"])
        results.keep("versions", facts, found, text, document=options.document, section=SECTION)
    return 0
