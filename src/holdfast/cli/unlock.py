"""Runs ``holdfast unlock``: frees the lock of a bucket whose holder is gone and can't say so."""

from __future__ import annotations

import argparse
import sys

from holdfast.catalogue import LOCK
from holdfast.cli.command import Commands, add_command, confirmed, print_json
from holdfast.cli.output import stdout
from holdfast.errors import UsageError
from holdfast.observe.text import on_one_line
from holdfast.storage.open import normal_root, open_lock


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    command = add_command(
        commands,
        "unlock",
        "free the lock of a bucket whose holder was lost with its host",
        "holdfast unlock s3://bucket/runs/gpt",
    )
    command.add_argument("root", metavar="ROOT", help="the bucket given to Checkpointer")
    command.add_argument("--yes", action="store_true", help="do not ask")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Shows the holder, asks, and frees the lock; returns 5 when the holder renews it."""
    lock = open_lock(args.root, LOCK)
    if lock is None:
        raise UsageError(
            f"{normal_root(args.root)} is no bucket: the system frees the lock of a directory when "
            "the process that holds it ends. `holdfast prune --dry-run` names that process."
        )
    holder = lock.holder()
    if holder is not None:
        print(
            f"held by {on_one_line(holder.owner)}, renewed {holder.renewed} by the server's clock; "
            "waiting to see whether it is renewed again",
            file=sys.stderr,
        )
        holder = lock.require_silent()
    is_free = holder is None
    if not is_free and confirmed("Free this lock?", yes=args.yes, as_json=args.json):
        lock.free()
        is_free = True
    if args.json:
        signed = None if holder is None else holder.owner
        print_json({"root": args.root, "freed": signed if is_free else None, "free": is_free})
    else:
        stdout().print("the lock is free" if is_free else "nothing was changed")
    return 0
