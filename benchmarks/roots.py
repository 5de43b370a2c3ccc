"""Count what a start, a list and a publication cost in a root of very many checkpoints.

The root has one real checkpoint, which the start restores, and manifests of others before it. As a
directory, and as a bucket on a server that keeps all in memory: with the index that keepers write,
without it, and with a million foreign objects below the prefix.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import holdfast
from benchmarks.kit import machine, markdown, results
from benchmarks.kit.object_server import BUCKET, Server, serving
from benchmarks.kit.options import Parser
from holdfast.catalogue import catalogue, image_path, manifest_path
from holdfast.format.manifest import Generation, ImageRef, Manifest, seal
from holdfast.storage.local import LocalStore

SECTION = results.Section(
    "Roots of many checkpoints",
    "`python -m benchmarks roots`: a start that restores, `holdfast ls`, and publications; "
    "requests beside the probe of the server and the reading of images.",
)
#: As many publications follow the start.
SAVES = 24
START = """
import json, os, sys, time, torch, holdfast
from benchmarks.roots import state
made, root = state(), sys.argv[1]
begun = time.perf_counter()
with holdfast.Checkpointer(root, made, keep=holdfast.Keep(last=int(sys.argv[2])),
                           storage=holdfast.Every(steps=1)) as ckpt:
    found = ckpt.restore()
    print(json.dumps({"step": found.step, "seconds": time.perf_counter() - begun}), flush=True)
    sys.stdin.readline()
    for step in range(found.step + 1, found.step + 1 + int(sys.argv[3])):
        ckpt.step(step).wait_durable(60)
        print(step, flush=True)
        sys.stdin.readline()
"""


def state() -> dict[str, Any]:
    """A state of a few kilobytes."""
    torch.manual_seed(0)
    return {"model": torch.nn.Linear(16, 16)}


def build(directory: Path, count: int, ranks: int) -> None:
    """Makes a root with ``count`` checkpoints, of which the newest is real."""
    holdfast.save(directory, state(), step=count)
    store = LocalStore(directory)
    (real,) = catalogue(store).manifests
    for step in range(1, count):
        generation, attempt = Generation(real.incarnation, step), f"planted{step:025d}"
        images = tuple(
            ImageRef(
                path=image_path(generation, attempt, rank),
                rank=rank,
                size_bytes=1 << 30,
                header_xxh3="0" * 16,
                table_xxh3="0" * 16,
            )
            for rank in range(ranks)
        )
        planted = Manifest(
            run_id=real.run_id,
            incarnation=real.incarnation,
            step=step,
            attempt=attempt,
            parent=real.parent,
            world=ranks,
            layout=real.layout,
            images=images,
            values={"loss": 1.0 / step},
            created_s=real.created_s,
        )
        (directory / manifest_path(generation)).write_bytes(seal(planted))


class Start:
    """A process that starts on a root, restores, and then saves when it is told to."""

    def __init__(self, root: str, keep: int, saves: int, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, root, str(keep), str(saves)],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.found: dict[str, Any] = json.loads(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def go_on(self) -> None:
        """Has it save once more, or end."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._line()

    def end(self) -> None:
        """Waits for its end."""
        self._process.communicate("\n" * SAVES, timeout=120)


def list_s(root: str, environment: Mapping[str, str]) -> tuple[float, int]:
    """Returns how long ``holdfast ls`` takes as a process, and how many checkpoints it lists."""
    begun = time.perf_counter()
    said = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "ls", root],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return time.perf_counter() - begun, len(said.stdout.splitlines()) - 1


def index_all(server: Server, root: str) -> None:
    """Has the bucket's index made of all that is there, as keepers leave it that saw all made."""
    script = (
        "import sys; from holdfast.overview import leave_index, overview;"
        "from holdfast.storage.open import open_store; store = open_store(sys.argv[1]);"
        "leave_index(store, overview(store))"
    )
    environment = {**os.environ, **server.environment}
    subprocess.run([sys.executable, "-c", script, root], env=environment, check=True)


def measure_directory(root: str, keep: int) -> dict[str, Any]:
    """Measures a directory."""
    start = Start(root, keep, 0, {})
    start.end()
    seconds, rows = list_s(root, {})
    return {"start": start.found["seconds"], "ls": seconds, "rows": rows}


def measure_bucket(server: Server, root: str, keep: int, saves: int) -> dict[str, Any]:
    """Measures a bucket."""
    server.requests()
    start = Start(root, keep, saves, server.environment)
    found: dict[str, Any] = {"start": start.found["seconds"], "start requests": server.requests()}
    published = []
    for _ in range(saves):
        start.go_on()
        published.append(server.requests())
    start.end()
    server.requests()
    found["ls"], found["rows"] = list_s(root, server.environment)
    found["ls requests"] = server.requests()
    found["publications"] = published
    return found


def counted(requests: Sequence[tuple[str, str]]) -> int:
    """Returns how many requests there were beside the probe and those for images."""
    return sum("/.probe-" not in key and "/live-" not in key for _, key in requests)


def _kept(one: Mapping[str, Any]) -> dict[str, Any]:
    """What was measured, with numbers of requests in the place of all requests."""
    kept = {
        name: counted(value) if name.endswith("requests") else value for name, value in one.items()
    }
    return {**kept, "publications": [counted(made) for made in one.get("publications", ())]}


def _spread(requests: Sequence[int]) -> str:
    """The first publication looks at what it has not seen."""
    if not requests:
        return "-"
    first, *others = requests
    return f"{first}, then {sorted(others)[len(others) // 2]}, at most {max(others)}"


def shown(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of what was measured."""
    rows = []
    for name, one in found.items():
        requests = [counted(made) for made in one.get("publications", ())]
        rows.append(
            [
                name,
                f"{one['start']:.2f} s",
                str(counted(one["start requests"])) if "start requests" in one else "-",
                f"{one['ls']:.2f} s",
                str(counted(one["ls requests"])) if "ls requests" in one else "-",
                _spread(requests),
            ]
        )
    head = ["root", "start", "requests", "ls", "requests", "requests of a publication"]
    return markdown.table(head, rows)


def main(arguments: Sequence[str]) -> int:
    """Measure, print, write."""
    parser = Parser(
        "roots", __doc__, quick="200 checkpoints", quick_settings={"count": 200, "foreign": 1000}
    )
    parser.add_argument(
        "--count", type=int, default=10_000, help="checkpoints of the root (10,000)"
    )
    parser.add_argument("--ranks", type=int, default=8, help="images of each (8)")
    parser.add_argument(
        "--foreign",
        type=int,
        default=1_000_000,
        help="foreign objects below the prefix (1,000,000)",
    )
    parser.add_document()
    args = parser.parse(arguments)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary, serving() as server:
        directory = Path(temporary, "root")
        build(directory, args.count, args.ranks)
        keep, url = args.count + 2 * SAVES, f"s3://{BUCKET}/runs/root"
        server.load(directory, "runs/root")
        found["directory"] = measure_directory(str(directory), keep)
        found["bucket without an index"] = measure_bucket(server, url, keep, SAVES)
        index_all(server, url)
        found["bucket with its index"] = measure_bucket(server, url, keep, SAVES)
        server.add_foreign("runs/root/data/", args.foreign)
        server.add_foreign("runs/another/", args.foreign)
        found["the same among foreign objects"] = measure_bucket(server, url, keep, 0)
    text = shown(found)
    print(text)
    results.keep(
        "roots",
        machine.facts(Path(__file__).parent, ["torch"]),
        {
            "count": args.count,
            "ranks": args.ranks,
            "found": {name: _kept(one) for name, one in found.items()},
        },
        text,
        document=args.document,
        section=SECTION,
    )
    return 0
