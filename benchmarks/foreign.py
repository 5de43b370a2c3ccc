"""Measure import, export and load without conversion, beside torch's own loaders and converters.

A model with AdamW's state is written by DCP once. Each way then reads it, or a checkpoint of ours,
in a process of its own, in an alternating order: seconds without the imports of Python, the highest
memory beyond them, and the bytes that went through calls of the system. All files are durable at
the end of each way, those of the rivals too.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.kit import disk, machine, markdown, processes, results, series
from benchmarks.kit.options import Parser

GIB = 1 << 30
#: By what each has to do: ours first, then the rivals.
WAYS = {
    "import of DCP": ("import",),
    "from DCP into live objects": ("load", "dcp-load"),
    "to one torch.save file": ("export-torch", "dcp-to-torch-save", "torch-save"),
    "to safetensors": ("export-safetensors", "save-file"),
    "to DCP": ("export-dcp", "dcp-save"),
}
NAMES = [name for some in WAYS.values() for name in some]
TITLES = {
    "import": "`holdfast import`",
    "load": "`holdfast.load` of the DCP directory",
    "dcp-load": "`dcp.load`",
    "export-torch": "`holdfast export --to torch`",
    "dcp-to-torch-save": "`dcp_to_torch_save`",
    "torch-save": "`torch.save` from memory",
    "export-safetensors": "`holdfast export --to safetensors`",
    "save-file": "safetensors' `save_file` from memory",
    "export-dcp": "`holdfast export --to dcp`",
    "dcp-save": "`dcp.save` from memory",
}
LAYERS = 12
SECTION = results.Section(
    "Checkpoints of others",
    "`python -m benchmarks foreign`: a model with AdamW's state comes in and leaves again, beside\n"
    "torch's own ways; files in the page cache, all durable at the end.",
)


def build(size_bytes: int) -> dict[str, Any]:
    """A model and AdamW, which together have about so many bytes."""
    import torch

    rows = max(4, size_bytes // (3 * 4 * LAYERS * 1024))
    model = torch.nn.ParameterDict(
        {f"layer{n}": torch.nn.Parameter(torch.randn(rows, 1024)) for n in range(LAYERS)}
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def _dcp_state(state: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(state["model"], state["optimizer"])
    return {"model": model, "optimizer": optimizer}


def prepare(directory: Path, size_bytes: int) -> int:
    """What the ways read: a directory of DCP and a root of ours. Returns the bytes of the state."""
    import torch.distributed.checkpoint as dcp

    import holdfast

    state = build(size_bytes)
    dcp.save(_dcp_state(state), checkpoint_id=directory / "step-1", no_dist=True)
    holdfast.save(directory / "root", state, step=1)
    return sum(leaf.size_bytes for leaf in holdfast.open(directory / "root").leaves.values())


# ── the ways ─────────────────────────────────────────────────────────────────────────────────


def _command(*argv: str | Path) -> Callable[[], object]:
    from holdfast.cli import main as run
    from holdfast.cli import parser

    parser(("import", "export"))  # loads what they need
    return lambda: _require(run([*map(str, argv)]) == 0)


def _require(is_done: bool) -> None:
    if not is_done:
        raise SystemExit("a command failed")


def way(name: str, directory: Path, size_bytes: int, out: Path) -> Callable[[], object]:
    """What is measured: everything that it needs is loaded, and its state built."""
    if name == "import":
        return _command("import", directory / "step-1", out)
    if name.startswith("export"):
        return _command("export", directory / "root", out, "--to", name.partition("-")[2])
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    import holdfast

    if name == "dcp-to-torch-save":
        return lambda: dcp_to_torch_save(directory / "step-1", out)
    state = build(size_bytes)
    if name == "load":
        return lambda: holdfast.load(directory / "step-1", state)
    flat = _dcp_state(state)
    if name == "dcp-load":
        return lambda: dcp.load(flat, checkpoint_id=directory / "step-1", no_dist=True)
    if name == "dcp-save":
        return lambda: dcp.save(flat, checkpoint_id=out, no_dist=True)
    whole = {key: one.state_dict() for key, one in state.items()}
    if name == "torch-save":
        return lambda: torch.save(whole, out)
    model = {key: one.data for key, one in state["model"].items()}
    return lambda: save_file(model, out)


def _counts() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {key: int(value) for key, _, value in (line.partition(": ") for line in lines)}


def measure(name: str, directory: Path, size_bytes: int) -> dict[str, float]:
    """One way in this process."""
    warnings.simplefilter("ignore")
    out = directory / "out"
    act = way(name, directory, size_bytes, out)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the highest sum counts from here
    begin, held = _counts(), processes.memory(os.getpid())["highest"]
    started_s = time.perf_counter()
    act()
    if out.is_dir():
        disk.sync_tree(out)
    elif out.exists():
        disk.sync_file(out)
    elapsed_s = time.perf_counter() - started_s
    end, highest = _counts(), processes.memory(os.getpid())["highest"]
    return {
        "elapsed_s": elapsed_s,
        "peak_bytes": highest - held,
        "read_bytes": end["rchar"] - begin["rchar"],
        "written_bytes": end["wchar"] - begin["wchar"],
    }


# ── the series ───────────────────────────────────────────────────────────────────────────────


def run_series(directory: Path, size_bytes: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Every way in a process of its own, ``rounds`` times, after one round that does not count."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
    if not rounds:  # only whether it works: in this process
        for name in NAMES:
            _clear(directory / "out")
            found[name].append(measure(name, directory, size_bytes))
        return found
    for turn, name in series.alternate(NAMES, rounds + 1):
        _clear(directory / "out")
        disk.warm(path for path in directory.rglob("*") if path.is_file())
        options = ["--way", name, "--dir", str(directory), "--bytes", str(size_bytes)]
        ended = subprocess.run(
            [sys.executable, "-m", "benchmarks", "foreign", *options],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        if turn:
            found[name].append(json.loads(ended.stdout.splitlines()[-1]))
    return found


def _clear(out: Path) -> None:
    if out.is_dir():
        shutil.rmtree(out)
    out.unlink(missing_ok=True)


def shown(facts: dict[str, str], found: dict[str, Any]) -> str:
    """The table."""
    rows = []
    for title, names in WAYS.items():
        for name in names:
            of = {
                key: median(one[key] for one in found["ways"][name])
                for key in found["ways"][name][0]
            }
            sizes = [
                f"{of[key] / 1e6:.0f}" for key in ("peak_bytes", "read_bytes", "written_bytes")
            ]
            rows.append([title, TITLES[name], f"{of['elapsed_s']:.2f}", *sizes])
    head = ["", "", "s", "peak memory MB", "read MB", "written MB"]
    size = f"{found['size_bytes'] / 1e9:.2f} GB"
    lead = f"A state of {size}, the medians of {found['rounds'] or 1} rounds."
    return f"{markdown.heading(facts)}\n\n{lead}\n\n{markdown.table(head, rows)}"


def main(arguments: Sequence[str]) -> int:
    """Measure, print what was, and keep it."""
    parser = Parser(
        "foreign",
        __doc__,
        quick="a state of 6 MB, each once in one process, nothing kept",
        quick_settings={"gib": 6 / 1024, "rounds": 0},
    )
    parser.add_rounds(3)
    parser.add_directory()
    parser.add_document()
    parser.add_argument("--gib", type=float, default=0.25, help="the size of the state (0.25)")
    parser.add_argument("--way", choices=NAMES, help="measure this one here; --dir has its files")
    parser.add_bytes(0, "the size of the state of --way")
    options = parser.parse(arguments)
    if options.way:
        print()
        print(json.dumps(measure(options.way, Path(options.dir), options.bytes)))
        return 0
    size_bytes = int(options.gib * GIB)
    with disk.scratch(options.dir, 6 * size_bytes + (64 << 20)) as directory:
        facts = machine.facts(directory, ["torch", "safetensors"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stored_bytes = prepare(directory, size_bytes)
        ways = run_series(directory, size_bytes, options.rounds)
    found = {"size_bytes": stored_bytes, "rounds": options.rounds, "ways": ways}
    text = shown(facts, found)
    print(text)
    if not options.quick:
        results.keep("foreign", facts, found, text, document=options.document, section=SECTION)
    return 0
