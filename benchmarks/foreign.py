"""Measure import, export and load without conversion, beside the others' loaders and converters.

A model with AdamW's state is written once by DCP and, where there are interpreters that have them,
by DeepSpeed and transformers. Each way then reads it, or a checkpoint of ours, in a process of its
own, in an alternating order: seconds without the imports of Python, the highest memory beyond them,
and the bytes that went through calls of the system. All files are durable at the end of each way,
those of the rivals too.
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
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.kit import disk, machine, markdown, processes, results, series
from benchmarks.kit.foreign_sources import (
    WRITERS,
    build,
    dcp_state,
    environment,
    interpreters,
    llama,
    megatron_shards,
    start_megatron,
)
from benchmarks.kit.options import Parser

GIB = 1 << 30
#: By what each has to do: ours first, then the rivals.
WAYS = {
    "import of DCP": ("import",),
    "from DCP into live objects": ("load", "dcp-load"),
    "to one torch.save file": ("export-torch", "dcp-to-torch-save", "torch-save"),
    "to safetensors": ("export-safetensors", "save-file"),
    "to DCP": ("export-dcp", "dcp-save"),
    "from ZeRO to what any layout reads": ("import-zero", "ds-to-universal"),
    "from ZeRO to one file of F32": ("export-zero", "zero-to-fp32"),
    "to transformers": ("export-pretrained", "save-pretrained"),
    "into transformers": ("load-pretrained", "from-pretrained"),
    "into transformers, and a first forward pass": ("forward-ours", "forward-pretrained"),
    "from Megatron's torch_dist into live tensors": ("load-megatron", "megatron-load"),
}
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
    "import-zero": "`holdfast import`",
    "ds-to-universal": "`ds_to_universal`, a process for each core",
    "export-zero": "`holdfast export --to torch --only 'model.**'`",
    "zero-to-fp32": "`zero_to_fp32`",
    "export-pretrained": "`holdfast export --to safetensors`",
    "save-pretrained": "`save_pretrained` from memory",
    "load-pretrained": "`hugging_face.state_dict` and `from_pretrained`",
    "from-pretrained": "`from_pretrained`",
    "forward-ours": "`hugging_face.state_dict` and `from_pretrained`",
    "forward-pretrained": "`from_pretrained`",
    "load-megatron": "`holdfast.load` of the directory",
    "megatron-load": "`dist_checkpointing.load`",
}
#: The ways that need another library, by the group of each.
GROUPS = {
    "deepspeed": ("import-zero", "ds-to-universal", "export-zero", "zero-to-fp32"),
    "transformers": (
        "export-pretrained",
        "save-pretrained",
        "load-pretrained",
        "from-pretrained",
        "forward-ours",
        "forward-pretrained",
    ),
    "megatron": ("load-megatron", "megatron-load"),
}
GROUPS = {"torch": tuple(TITLES.keys() - set(chain(*GROUPS.values()))), **GROUPS}
SECTION = results.Section(
    "Checkpoints of others",
    "`python -m benchmarks foreign`: a model with AdamW's state comes in and leaves again, beside\n"
    "the others' own ways; files in the page cache, all durable at the end.",
)


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
    if name == "import-zero":
        return _command("import", directory / "zero", out)
    if name == "export-zero":
        return _command("export", directory / "zero", out, "--to", "torch", "--only", "model.**")
    if name == "export-pretrained":
        return _command("export", directory / "weights", out, "--to", "safetensors")
    if name.startswith("export"):
        return _command("export", directory / "root", out, "--to", name.partition("-")[2])
    if name in GROUPS["deepspeed"]:
        return _way_of_deepspeed(name, directory, out)
    if name in GROUPS["transformers"]:
        return _way_of_transformers(name, directory, size_bytes, out)
    if name in GROUPS["megatron"]:
        return _way_of_megatron(name, directory, size_bytes)
    return _way_of_torch(name, directory, size_bytes, out)


def _way_of_deepspeed(name: str, directory: Path, out: Path) -> Callable[[], object]:
    if name == "zero-to-fp32":
        from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

        return lambda: convert_zero_checkpoint_to_fp32_state_dict(
            str(directory / "zero"), str(out), max_shard_size=None
        )
    from deepspeed.checkpoint import ds_to_universal

    cores = str(os.cpu_count() or 1)
    sys.argv = ["", "--input_folder", str(directory / "zero" / "global_step1")]
    sys.argv += ["--output_folder", str(out)]
    sys.argv += ["--num_extract_workers", cores, "--num_merge_workers", cores]
    sys.argv += ["--inject_missing_state"]  # what only models of its own launcher have
    given = ds_to_universal.parse_arguments()
    return lambda: ds_to_universal.main(given)


def _way_of_transformers(
    name: str, directory: Path, size_bytes: int, out: Path
) -> Callable[[], object]:
    from transformers import AutoConfig, LlamaForCausalLM

    import holdfast.interop.hugging_face as hugging_face

    if name == "save-pretrained":
        model = llama(size_bytes // 3)
        return lambda: model.save_pretrained(out)
    source = directory / "pretrained"
    config = AutoConfig.from_pretrained(source)

    def load() -> Any:
        if name not in ("load-pretrained", "forward-ours"):
            return LlamaForCausalLM.from_pretrained(source)
        state = hugging_face.state_dict(directory / "weights")
        return LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state)

    return (lambda: outputs_sum(load())) if name.startswith("forward") else load


def outputs_sum(model: Any) -> int:
    """A checksum of what a model makes of the same tokens: of all weights, which it reads."""
    import torch

    with torch.inference_mode():
        found = model(input_ids=torch.arange(16).reshape(1, 16)).logits
    return zlib.crc32(found.contiguous().view(torch.uint8).numpy().tobytes())


def _way_of_megatron(name: str, directory: Path, size_bytes: int) -> Callable[[], object]:
    import torch

    import holdfast

    start_megatron()
    from megatron.core import dist_checkpointing

    shards = megatron_shards(size_bytes)
    where = directory / "megatron"
    if name == "megatron-load":
        return lambda: dist_checkpointing.load(dict(shards), str(where))
    given = {key: torch.nn.Parameter(shard.data) for key, shard in shards.items()}
    model = torch.nn.ParameterDict(given)
    return lambda: holdfast.load(where, {"model": model})


def _way_of_torch(name: str, directory: Path, size_bytes: int, out: Path) -> Callable[[], object]:
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
    flat = dcp_state(state)
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
    result = act()
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
        **({"outputs": int(str(result))} if name.startswith("forward") else {}),
    }


# ── the series ───────────────────────────────────────────────────────────────────────────────


def run_series(
    directory: Path,
    size_bytes: int,
    rounds: int,
    pythons: Mapping[str, str],
    among: Sequence[str],
) -> dict[str, list[dict[str, float]]]:
    """Every way in a process of its own, ``rounds`` times, each with its files in the page cache.

    ``pythons``: the interpreter of each group of ways that is measured, of ``among`` alone.
    """
    names = [name for group in pythons for name in sorted(GROUPS[group]) if name in among]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    if not rounds:  # only whether it works: in this process
        for name in names:
            _clear(directory / "out")
            found[name].append(measure(name, directory, size_bytes))
        return found
    for _, name in series.alternate(names, rounds):
        _clear(directory / "out")
        python = next(pythons[group] for group in pythons if name in GROUPS[group])
        disk.warm(path for path in directory.rglob("*") if path.is_file())
        options = ["--way", name, "--dir", str(directory), "--bytes", str(size_bytes)]
        found[name].append(json.loads(_in(python, *options).splitlines()[-1]))
    return found


def require_same_outputs(found: Mapping[str, list[dict[str, float]]]) -> None:
    """A model goes on from any of the ways that end in the same, with the same outputs."""
    for title, names in WAYS.items():
        sums = {one["outputs"] for name in names for one in found.get(name, ()) if "outputs" in one}
        if len(sums) > 1:
            raise SystemExit(f"{title}: the ways gave models of other outputs")


def _in(python: str, *options: str) -> str:
    """Run this benchmark in another interpreter; what it prints."""
    command = [python, "-m", "benchmarks", "foreign", *options]
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=environment()
    ).stdout


def _clear(out: Path) -> None:
    if out.is_dir():
        shutil.rmtree(out)
    out.unlink(missing_ok=True)


def shown(facts: dict[str, str], found: dict[str, Any]) -> str:
    """The table."""
    rows = []
    for title, names in WAYS.items():
        for name in names:
            if name not in found["ways"]:
                continue
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
        quick_settings={"gib": 6 / 1024, "rounds": 0, "python": []},
    )
    parser.add_rounds(3)
    parser.add_directory()
    parser.add_document()
    parser.add_argument("--gib", type=float, default=0.25, help="the size of the state (0.25)")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        help="an interpreter that has deepspeed, transformers or megatron; may be given again",
    )
    parser.add_argument(
        "--group", choices=GROUPS, action="append", help="measure this group alone (all)"
    )
    parser.add_argument(
        "--among", choices=TITLES, action="append", help="measure this way of its group alone (all)"
    )
    parser.add_argument("--way", choices=TITLES, help="measure this one here; --dir has its files")
    parser.add_argument("--write", choices=GROUPS, help="write what this group reads into --dir")
    parser.add_bytes(0, "the size of the state of --way and --write")
    options = parser.parse(arguments)
    if options.way or options.write:
        warnings.simplefilter("ignore")
        where = Path(options.dir)
        done: object = measure(options.way, where, options.bytes) if options.way else None
        if options.write:
            done = WRITERS[options.write](where, options.bytes)
        print()
        print(json.dumps(done))
        return 0
    size_bytes = int(options.gib * GIB)
    pythons = interpreters(options.python, options.group or [*GROUPS])
    for group in options.group or GROUPS:
        if group not in pythons:
            print(f"left out: what needs {group}, which no interpreter here has (--python)")
    with disk.scratch(options.dir, 8 * size_bytes + (64 << 20)) as directory:
        facts = machine.facts(directory, ["torch", "safetensors"])
        sizes = ["--dir", str(directory), "--bytes", str(size_bytes)]
        for group, python in pythons.items():
            if options.rounds:
                _in(python, "--write", group, *sizes)
            else:
                WRITERS[group](directory, size_bytes)
        among = options.among or [*TITLES]
        ways = run_series(directory, size_bytes, options.rounds, pythons, among)
    require_same_outputs(ways)
    found = {"size_bytes": size_bytes, "rounds": options.rounds, "ways": ways}
    text = shown(facts, found)
    print(text)
    if not options.quick and not options.among:  # a part never takes the place of the whole
        results.keep("foreign", facts, found, text, document=options.document, section=SECTION)
    return 0
