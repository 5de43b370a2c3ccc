"""Runs ``holdfast dump``: prints the elements of a leaf, or a value, or writes them to a file."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from rich.markup import escape

from holdfast.cli import value_tree as tree
from holdfast.cli.checkpoints import (
    STEP_HELP,
    ChosenCheckpoint,
    hold_checkpoint,
    open_readable,
    unknown,
)
from holdfast.cli.command import Commands, add_command, print_json
from holdfast.cli.diff import rank_values
from holdfast.cli.leaf_reader import (
    BATCH_BYTES,
    NATIVE,
    Read,
    Statistics,
    as_bytes,
    cut,
    element,
    has_numbers,
    numbers,
    read,
    short_text,
)
from holdfast.cli.output import SlowProgress, plain_table, stdout
from holdfast.cli.pictures import box_text, parse_box
from holdfast.errors import StorageError, UsageError
from holdfast.geometry.box import ITEMSIZE, STORED_AS_BYTES, Box
from holdfast.geometry.layout import LeafSpec
from holdfast.observe.text import NOTHING, printable, size_text
from holdfast.restore.planning.plan import Want
from holdfast.restore.reading.read import Array

#: Larger boxes are shown by their first elements only, unless --head says otherwise.
SHOWN_WHOLE = 1000
SHOWN_FIRST = 8


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    """Declares the command."""
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
    """Prints or writes the elements or the value; returns 3 when there is no such leaf or value."""
    if args.head is not None and (args.head < 0 or args.out):
        raise UsageError("--head takes a number of elements to print, and does not go with --out")
    chosen = hold_checkpoint(open_readable(args.root), args.step)
    if args.leaf not in chosen.leaves:
        return _dump_value(args, chosen)
    leaf = chosen.checkpoint.layout.leaves[chosen.leaves[args.leaf]]
    source = DumpSource(chosen, leaf, parse_box(args.box, leaf.shape))
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
class DumpSource:
    """A box of a leaf, and its reader."""

    chosen: ChosenCheckpoint
    leaf: LeafSpec
    box: Box
    read: Read = read

    def portions(self) -> Iterator[Array]:
        """Yields all of it, in row-major order, as carriers; with progress where it takes long."""
        done, total = 0, self.box.volume * ITEMSIZE[self.leaf.dtype]
        with SlowProgress(f"reading {self.leaf.name}") as progress:
            for part in cut(self.box, BATCH_BYTES // ITEMSIZE[self.leaf.dtype]):
                yield self.elements(part)
                done += part.volume * ITEMSIZE[self.leaf.dtype]
                progress(done, total)

    def elements(self, box: Box) -> Array:
        """Returns the carriers of a small box."""
        (array,) = self.read(self.chosen.checkpoint, [Want(self.leaf.name, box, 0)])
        return array


def facts(source: DumpSource) -> dict[str, Any]:
    """Returns checksum and statistics of a box: xxh3-64 of its elements' bytes in row-major
    order.
    """
    dtype = source.leaf.dtype
    found = Statistics(dtype) if has_numbers(dtype) else None
    checksum = xxhash.xxh3_64()
    for array in source.portions():
        checksum.update(as_bytes(array))
        if found is not None:
            found.add(array)
    record = None if found is None else found.record()
    return {"checksum_xxh3": checksum.hexdigest(), "statistics": record}


def first_elements(source: DumpSource, count: int) -> list[dict[str, Any]]:
    """Returns the first elements of a box in row-major order, read by as few reads as rows
    allow.
    """
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


def _write(args: argparse.Namespace, source: DumpSource) -> int:
    head = header(args.out, args.leaf, source.leaf.dtype, source.box.shape)
    size_bytes = write_file(args.out, head, source.portions(), force=args.force)
    return _report_file(args, source.chosen, size_bytes)


def _report_file(args: argparse.Namespace, chosen: ChosenCheckpoint, size_bytes: int) -> int:
    if args.json:
        facts = {"name": args.leaf, "out": args.out, "size_bytes": size_bytes}
        print_json({**chosen.facts, **facts})
    else:
        stdout().print(f"{escape(args.out)}: {size_text(size_bytes)}", soft_wrap=True)
    return 0


def _print(args: argparse.Namespace, source: DumpSource, record: dict[str, Any]) -> None:
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
        for line in np.array2string(whole, threshold=SHOWN_WHOLE).split("\n"):
            console.print(line, markup=False, soft_wrap=True)
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


def _dump_value(args: argparse.Namespace, chosen: ChosenCheckpoint) -> int:
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
        lines = text.split("\n")
        if any(line != printable(line) for line in lines):  # JSON's own escapes, then
            lines = json.dumps(value, indent=2).split("\n")
        for line in lines:
            stdout().print(line, markup=False, soft_wrap=True)
    return 0


def _write_value(args: argparse.Namespace, chosen: ChosenCheckpoint, text: str) -> int:
    if Path(args.out).suffix != ".json":
        raise UsageError(f"--out {args.out}: {args.leaf} is a plain value; write a .json file")
    refuse_existing(args.out, force=args.force)
    size_bytes = write_file(args.out, f"{text}\n".encode(), (), force=args.force)
    return _report_file(args, chosen, size_bytes)


# Writes one box of a leaf to a file of its own: whole or not at all, and never over another file.
#
# Both formats are a header and the elements in row-major order, so the file is written portion by
# portion without a library: safetensors takes every dtype, .npy those that numpy has.


SUFFIXES = (".npy", ".safetensors")


def header(path: str, name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Returns the first bytes of the file ``path``; raises UsageError when its format has no such
    dtype.
    """
    suffix = Path(path).suffix
    if suffix not in SUFFIXES:
        raise UsageError(f"--out {path}: the name must end in {' or '.join(SUFFIXES)}")
    if suffix == ".safetensors":
        return _safetensors_header(name, dtype, shape)
    if dtype not in NATIVE:
        raise UsageError(f"--out {path}: numpy has no {dtype}; write a .safetensors file")
    descr = "|b1" if dtype == "BOOL" else np.dtype(NATIVE[dtype]).str
    head = BytesIO()
    described = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, described)
    return head.getvalue()


def _safetensors_header(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    size_bytes = int(np.prod(shape, dtype=object)) * ITEMSIZE[dtype]
    as_bytes = dtype in STORED_AS_BYTES  # as in an image: safetensors has no name for it
    tensor = {
        "dtype": "U8" if as_bytes else dtype,
        "shape": [size_bytes] if as_bytes else list(shape),
        "data_offsets": [0, size_bytes],
    }
    true = {"dtype": dtype, "shape": ",".join(map(str, shape))}
    text = json.dumps({"__metadata__": true, name: tensor}).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # the data begins on a multiple of eight bytes
    return len(text).to_bytes(8, "little") + text


def write_file(path: str, head: bytes, arrays: Iterable[Array], *, force: bool) -> int:
    """Writes ``head`` and the elements; returns the bytes. Raises UsageError when the file exists.

    The file gets its name when it is complete: an interrupted command leaves nothing.
    """
    target = Path(path)
    refuse_existing(path, force=force)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as file:
            file.write(head)
            for array in arrays:
                file.write(as_bytes(array))
            size_bytes = file.tell()
        _give_name(part, target, force=force)
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror}; choose another place with --out", path=path
        ) from error
    finally:
        part.unlink(missing_ok=True)
    return size_bytes


def refuse_existing(path: str, *, force: bool) -> None:
    """Raises UsageError when ``path`` exists and may not be overwritten."""
    if Path(path).exists() and not force:
        raise UsageError(f"{path} exists already; --force writes over it")


def _give_name(part: Path, target: Path, *, force: bool) -> None:
    if force:
        part.replace(target)
        return
    try:
        os.link(part, target)  # unlike a rename, this fails when somebody was faster
    except FileExistsError:
        raise UsageError(f"{target} exists already; --force writes over it") from None
    except PermissionError:  # a file system without links
        part.rename(target)
