"""``holdfast dump``: the elements of a leaf, or a value, on the terminal or in a file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from rich.markup import escape

from holdfast.cli import tree
from holdfast.cli.boxes import box_text, parse_box
from holdfast.cli.checkpoints import STEP_HELP, Chosen, open_checkpoint, open_root, unknown
from holdfast.cli.differences import rank_values
from holdfast.cli.elements import as_bytes, element, has_numbers, numbers, short_text
from holdfast.cli.export import header, refuse_existing, write_file
from holdfast.cli.output import (
    Commands,
    SlowProgress,
    add_command,
    plain_table,
    print_json,
    stdout,
)
from holdfast.cli.portions import BATCH_BYTES, Read, cut, read
from holdfast.cli.statistics import Statistics
from holdfast.errors import UsageError
from holdfast.geometry.box import Box
from holdfast.geometry.dtypes import ITEMSIZE
from holdfast.geometry.layout import LeafSpec
from holdfast.load.plan import Want
from holdfast.load.read import Array
from holdfast.observe.units import NOTHING, size_text

#: Larger boxes are shown by their first elements only, unless --head says otherwise.
SHOWN_WHOLE = 1000
SHOWN_FIRST = 8


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = add_command(
        commands,
        "dump",
        "print the elements of a leaf and what they are like, or a plain value; or write them out",
        "holdfast dump runs/gpt model.layers.0.wq",
        "holdfast dump runs/gpt model.layers.0.wq --step 1200 --box '0:4,:' --json",
        "holdfast dump runs/gpt model.layers.0.wq --out wq.safetensors",
        "holdfast dump runs/gpt 'optimizer.groups[0].options.lr'",
    )
    command.add_argument("root", metavar="ROOT", help="the directory given to Checkpointer")
    command.add_argument(
        "leaf", metavar="LEAF", help="a leaf, or a value, such as optimizer.groups[0].options.lr"
    )
    command.add_argument("--step", metavar="STEP", help=STEP_HELP + "; the newest without it")
    command.add_argument(
        "--box", metavar="BOX", help="only these indices, a range or a number for each dimension"
    )
    command.add_argument(
        "--head", metavar="N", type=int, help="only the first N elements, and read no others"
    )
    command.add_argument(
        "--rank", metavar="N", type=int, default=0, help="whose value, where each has its own"
    )
    command.add_argument(
        "--out", metavar="FILE", help="write to this .npy or .safetensors (a value: .json) file"
    )
    command.add_argument("--force", action="store_true", help="write over FILE if it is there")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print or write what was asked for; 3 when there is no such leaf or value."""
    if args.head is not None and (args.head < 0 or args.out):
        raise UsageError("--head takes a number of elements to print, and does not go with --out")
    chosen = open_checkpoint(open_root(args.root), args.step)
    if args.leaf not in chosen.leaves:
        return _dump_value(args, chosen)
    leaf = chosen.checkpoint.layout.leaves[chosen.leaves[args.leaf]]
    source = Source(chosen, leaf, parse_box(args.box, leaf.shape))
    if args.out:
        return _write(args, source)
    record = {
        **chosen.facts,
        "name": args.leaf,
        "dtype": leaf.dtype,
        "shape": list(leaf.shape),
        "box": {"start": list(source.box.start), "stop": list(source.box.stop)},
        **(facts(source) if args.head is None else {}),
        "first": first_elements(source, SHOWN_FIRST if args.head is None else args.head),
    }
    print_json(record) if args.json else _print(args, source, record)
    return 0


@dataclass(frozen=True, slots=True)
class Source:
    """A box of a leaf, and what reads it."""

    chosen: Chosen
    leaf: LeafSpec
    box: Box
    read: Read = read

    def portions(self) -> Iterator[Array]:
        """All of it, in row-major order, as carriers; with progress where it takes a while."""
        done, total = 0, self.box.volume * ITEMSIZE[self.leaf.dtype]
        with SlowProgress(f"reading {self.leaf.name}") as progress:
            for part in cut(self.box, BATCH_BYTES // ITEMSIZE[self.leaf.dtype]):
                yield self.elements(part)
                done += part.volume * ITEMSIZE[self.leaf.dtype]
                progress(done, total)

    def elements(self, box: Box) -> Array:
        """The carriers of a small box."""
        (array,) = self.read(self.chosen.checkpoint, [Want(self.leaf.name, box, 0)])
        return array


def facts(source: Source) -> dict[str, Any]:
    """Checksum and statistics of a box: xxh3-64 of its elements' bytes in row-major order."""
    dtype = source.leaf.dtype
    found = Statistics(dtype) if has_numbers(dtype) else None
    checksum = xxhash.xxh3_64()
    for array in source.portions():
        checksum.update(as_bytes(array))
        if found is not None:
            found.add(array)
    record = None if found is None else found.record()
    return {"checksum_xxh3": checksum.hexdigest(), "statistics": record}


def first_elements(source: Source, count: int) -> list[dict[str, Any]]:
    """The first elements of a box in row-major order, read by as few reads as rows allow."""
    found: list[dict[str, Any]] = []
    for part in cut(source.box, max(1, count)):
        if len(found) >= count:
            break
        raw = source.elements(part).reshape(-1)
        indices = product(*map(range, part.start, part.stop))
        for index, each in islice(zip(indices, raw, strict=True), count - len(found)):
            value = element(np.asarray(each), source.leaf.dtype)
            found.append({"index": list(index), "value": value})
    return found


def _write(args: argparse.Namespace, source: Source) -> int:
    head = header(args.out, args.leaf, source.leaf.dtype, source.box.shape)
    size_bytes = write_file(args.out, head, source.portions(), force=args.force)
    if args.json:
        facts = {"name": args.leaf, "out": args.out, "size_bytes": size_bytes}
        print_json({**source.chosen.facts, **facts})
    else:
        stdout().print(f"{escape(args.out)}: {size_text(size_bytes)}", soft_wrap=True)
    return 0


def _print(args: argparse.Namespace, source: Source, record: dict[str, Any]) -> None:
    console, leaf = stdout(), source.leaf
    shape = " x ".join(map(str, leaf.shape)) or "scalar"
    which = "" if args.box is None else f", box {box_text(source.box)}"
    step = f"{record['checkpoint']} of {record['root']}"
    console.print(
        f"[bold]{escape(args.leaf)}[/] {leaf.dtype} {shape}{escape(which)}, {escape(step)}",
        soft_wrap=True,
    )
    if args.head is None:
        console.print(_facts_table(record))
        console.print()
    if args.head is None and source.box.volume <= SHOWN_WHOLE and has_numbers(leaf.dtype):
        whole = numbers(source.elements(source.box), leaf.dtype)
        if leaf.dtype == "BOOL":
            whole = whole.astype(bool)
        console.print(np.array2string(whole, threshold=SHOWN_WHOLE), markup=False, soft_wrap=True)
        return
    for each in record["first"]:
        index = f"[{', '.join(map(str, each['index']))}]"
        console.print(f"{index:>12}  {short_text(each['value'], leaf.dtype)}", markup=False)
    if len(record["first"]) < source.box.volume:
        console.print(f"{'...':>12}  of {source.box.volume} elements", soft_wrap=True)


def _facts_table(record: dict[str, Any]) -> Any:
    table = plain_table("statistic", "is")
    found = record["statistics"] or {}
    for name in ("min", "max", "mean", "std"):
        value = found.get(name)
        table.add_row(name, NOTHING if value is None else _number_text(value))
    for name, title in (
        ("zeros", "zeros"),
        ("nan", "nan"),
        ("inf", "inf"),
        ("negative_inf", "-inf"),
    ):
        table.add_row(title, str(found.get(name, NOTHING)))
    table.add_row("checksum", record["checksum_xxh3"])
    return table


def _number_text(value: Any) -> str:
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def _dump_value(args: argparse.Namespace, chosen: Chosen) -> int:
    if not 0 <= args.rank < chosen.manifest.world:
        raise UsageError(
            f"--rank {args.rank}: it was saved by ranks 0 to {chosen.manifest.world - 1}"
        )
    values = rank_values(chosen, args.rank)
    value = tree.find(values, args.leaf)
    if value is tree.ABSENT:
        raise unknown("leaf or value", args.leaf, [*chosen.leaves, *values], args.root)
    if args.box is not None or args.head is not None:
        raise UsageError(f"{args.leaf} is a plain value: --box and --head are for leaves")
    text = json.dumps(value, indent=2, ensure_ascii=False)
    if args.out:
        return _write_value(args, chosen, text)
    if args.json:
        print_json({**chosen.facts, "name": args.leaf, "rank": args.rank, "value": value})
    else:
        stdout().print(text, markup=False, soft_wrap=True)
    return 0


def _write_value(args: argparse.Namespace, chosen: Chosen, text: str) -> int:
    if Path(args.out).suffix != ".json":
        raise UsageError(f"--out {args.out}: {args.leaf} is a plain value; write a .json file")
    refuse_existing(args.out, force=args.force)
    size_bytes = write_file(args.out, f"{text}\n".encode(), (), force=args.force)
    if args.json:
        facts = {"name": args.leaf, "out": args.out, "size_bytes": size_bytes}
        print_json({**chosen.facts, **facts})
    else:
        stdout().print(f"{escape(args.out)}: {size_text(size_bytes)}", soft_wrap=True)
    return 0
