"""``holdfast verify``: prove that checkpoints can be restored, or say what is wrong with them."""

from __future__ import annotations

import argparse
from typing import Any

from rich.markup import escape

from holdfast.cli.checkpoints import STEP_HELP, Opened, choose, open_root
from holdfast.cli.output import Commands, SlowProgress, add_command, print_json, stdout
from holdfast.errors import FormatError
from holdfast.format.manifest import Manifest
from holdfast.load.verify import verify
from holdfast.observe.units import count_text, rate_text, seconds_text, size_text


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    """Declare the command."""
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
    """Check one checkpoint or all; 4 when anything is wrong with any of them."""
    opened = open_root(args.root)
    rows = _check_all(opened, args.step, deep=args.deep)
    is_sound = all(not row["faults"] for row in rows)
    if args.json:
        print_json({"root": args.root, "deep": args.deep, "ok": is_sound, "checkpoints": rows})
    else:
        _print(args.root, rows)
    return 0 if is_sound else FormatError.exit_code


def _check_all(opened: Opened, step: str | None, *, deep: bool) -> list[dict[str, Any]]:
    if step is not None:
        return [_check(opened, choose(opened, step), deep=deep)]
    rows = [_check(opened, manifest, deep=deep) for manifest in opened.catalogue.manifests]
    return rows + [
        {"checkpoint": path, "faults": [reason]} for path, reason in opened.catalogue.broken
    ]


def _check(opened: Opened, manifest: Manifest, *, deep: bool) -> dict[str, Any]:
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
            console.print(f"    {escape(fault)}", soft_wrap=True)
    if not rows:
        console.print(f"no checkpoints in {escape(root)} yet", soft_wrap=True)


def _amount(row: dict[str, Any]) -> str:
    """How much was looked at; bytes only where all of them were read."""
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
