"""Runs ``holdfast verify``: proves that checkpoints can be restored, or reports their faults."""

from __future__ import annotations

import argparse
from typing import Any

from rich.markup import escape

from holdfast.cli.checkpoints import STEP_HELP, OpenedRoot, choose, open_root
from holdfast.cli.command import Commands, add_command, print_json
from holdfast.cli.output import SlowProgress, stdout
from holdfast.errors import FormatError
from holdfast.format.manifest import Manifest
from holdfast.leases import ReadLease
from holdfast.observe.text import count_text, rate_text, seconds_text, size_text
from holdfast.restore.reading.verify import verify


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    command = add_command(
        commands,
        "verify",
        "check that checkpoints are whole: images, checksums, every element exactly once",
        "holdfast verify runs/gpt --deep",
        "holdfast verify runs/gpt --step 1200",
    )
    command.add_argument("root", metavar="ROOT", help="the directory given to Checkpointer")
    command.add_argument("--step", metavar="STEP", help=STEP_HELP + "; without it, all are checked")
    command.add_argument(
        "--deep", action="store_true", help="read every block, not only headers and block tables"
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Checks one checkpoint or all; returns 4 when any of them has a fault."""
    opened = open_root(args.root)
    rows = _check_all(opened, args.step, deep=args.deep)
    is_sound = all(not row["faults"] for row in rows)
    if args.json:
        print_json({"root": args.root, "deep": args.deep, "ok": is_sound, "checkpoints": rows})
    else:
        _print(args.root, rows)
    return 0 if is_sound else FormatError.exit_code


def _check_all(opened: OpenedRoot, step: str | None, *, deep: bool) -> list[dict[str, Any]]:
    lease = ReadLease(opened.store)
    try:
        if step is not None:
            manifest = choose(opened, step)
            lease.take(manifest)
            return [_check(opened, manifest, deep=deep)]
        rows = [
            _check(opened, manifest, deep=deep)
            for manifest in opened.catalogue.manifests
            if lease.take(manifest)  # else it was pruned since it was listed
        ]
    finally:
        lease.end()
    return rows + [
        {"checkpoint": path, "faults": [reason]} for path, reason in opened.catalogue.broken
    ]


def _check(opened: OpenedRoot, manifest: Manifest, *, deep: bool) -> dict[str, Any]:
    with SlowProgress(f"verifying {manifest.generation}") as progress:
        found = verify(opened.store, manifest, deep=deep, progress=progress)
    return {
        "checkpoint": str(manifest.generation),
        "faults": list(found.faults),
        "images": found.images,
        "blocks": found.blocks,
        "size_bytes": found.size_bytes,
        "elapsed_s": found.elapsed_s,
    }


def _print(root: str, rows: list[dict[str, Any]]) -> None:
    console = stdout()
    for row in rows:
        colour, word = ("red", "FAULTY") if row["faults"] else ("green", "ok")
        console.print(
            f"{escape(row['checkpoint'])}  [{colour}]{word}[/]{_amount(row)}", soft_wrap=True
        )
        for fault in row["faults"]:
            for line in fault.split("\n"):
                console.print(f"    {escape(line)}", soft_wrap=True)
    if not rows:
        console.print(f"no checkpoints in {escape(root)} yet", soft_wrap=True)


def _amount(row: dict[str, Any]) -> str:
    """Formats how much was checked; bytes only where all of them were read."""
    if "images" not in row:
        return ""
    text = f"  {count_text(row['images'], 'image')}"
    if not row["blocks"]:
        return f"{text} in {seconds_text(row['elapsed_s'])}"
    size_bytes, elapsed_s = row["size_bytes"], row["elapsed_s"]
    return (
        f"{text}, {count_text(row['blocks'], 'block')}, {size_text(size_bytes)}"
        f" in {seconds_text(elapsed_s)} ({rate_text(size_bytes / elapsed_s)})"
    )
