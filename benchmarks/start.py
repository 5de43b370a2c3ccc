"""Measure how long `import holdfast` and the start of a keeper take.

With `--before DIRECTORY`, the `src` of another version, both versions are measured in one
alternating series and compared round by round.
"""

from __future__ import annotations

import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import holdfast
from benchmarks.kit import machine, markdown, results, series
from benchmarks.kit.disk import MEMORY
from benchmarks.kit.options import Parser
from holdfast.persist import commit
from holdfast.protocol.client import SOCKET_NAME
from holdfast.storage.local import LocalStore

SOURCE = Path(holdfast.__file__).parents[1]
SECTION = results.Section(
    "Starting",
    "`python -m benchmarks start`: a new process imports Holdfast, and a keeper is started until\n"
    "it takes a connection.",
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
    return os.environ | {"PYTHONPATH": str(source)}


def interval(ratios: Sequence[float], samples: int = 5000) -> tuple[float, float]:
    """The 95 % interval of the median of paired ratios, by resampling."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(samples))
    return medians[samples // 40], medians[-samples // 40 - 1]


def measure(sources: dict[str, Path], rounds: int) -> dict[str, Any]:
    """Both acts of each version in one alternating series."""
    found = series.timed(
        {
            f"{act.__name__} {name}": lambda act=act, source=source: act(source)
            for act in (import_package, start_keeper)
            for name, source in sources.items()
        },
        rounds,
    )
    return {"ways": series.summaries(found)}


def shown(found: dict[str, Any]) -> str:
    """The table, and the ratios where two versions were measured."""
    ways = found["ways"]
    lines = [markdown.table(["", "s"], [[way, markdown.spread(ways[way])] for way in ways])]
    for act in ("import_package", "start_keeper"):
        if f"{act} before" in ways:
            pairs = zip(ways[f"{act} now"]["values"], ways[f"{act} before"]["values"], strict=True)
            ratios = [now / before for now, before in pairs]
            low, high = interval(ratios)
            median = statistics.median(ratios)
            lines.append(f"\n{act}: {median:.3f} of before (95 %: {low:.3f} to {high:.3f})")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Measure, print what was, and keep it."""
    parser = Parser("start", __doc__, quick="three rounds, nothing kept")
    parser.add_rounds(30)
    parser.add_document()
    parser.add_argument("--before", type=Path, metavar="DIRECTORY", help="src of another version")
    options = parser.parse(arguments)
    sources = {"now": SOURCE, **({"before": options.before.resolve()} if options.before else {})}
    found = measure(sources, 3 if options.quick else options.rounds)
    text = shown(found)
    print(text)
    if not (options.quick or options.before):
        facts = machine.facts(MEMORY, ["msgspec"])
        results.keep("start", facts, found, text, document=options.document, section=SECTION)
    return 0
