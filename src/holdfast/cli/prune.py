"""Runs ``holdfast prune``: removes checkpoints by hand, and files that killed attempts left
behind.
"""

from __future__ import annotations

import argparse
import difflib
import math
import sys
from typing import Any

from rich.markup import escape

from holdfast.catalogue import DAMAGED, LOCK
from holdfast.cli.checkpoints import OpenedRoot, open_root, root_holder
from holdfast.cli.command import Commands, add_command, confirmed, print_json
from holdfast.cli.output import SlowProgress, plain_table, stdout
from holdfast.cli.prune_events import prune_events
from holdfast.errors import NotFound, RootBusy
from holdfast.leases import LEASE_S, LeaseWatch
from holdfast.observe.text import moment_text, size_text
from holdfast.persist.pins import pinned
from holdfast.persist.removal import Removal, plan, remove
from holdfast.policy.when import Keep
from holdfast.storage.base import Lock

_HOW = (
    "A run prunes by itself: give its Checkpointer another keep= at its next start, such as "
    "keep=holdfast.Keep(last=3)."
)


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    command = add_command(
        commands,
        "prune",
        "remove the checkpoints that the options name, and what no checkpoint needs",
        "holdfast prune runs/gpt --last 3 --dry-run",
        "holdfast prune runs/gpt --last 3 --every 1000 --yes",
        "holdfast prune runs/gpt --last 3 --best 2 --by val_loss",
        "holdfast prune runs/gpt --abandoned",
        "holdfast prune runs/gpt --events",
    )
    command.add_argument("root", metavar="ROOT", help="the directory given to Checkpointer")
    command.add_argument("--last", metavar="N", type=int, help="keep the newest N")
    command.add_argument(
        "--every",
        metavar="N",
        type=int,
        help="keep those at multiples of N steps, counted from 0 or from 1",
    )
    command.add_argument(
        "--best", metavar="N", type=int, help="keep the N with the smallest value of --by"
    )
    command.add_argument(
        "--by", metavar="NAME", default="", help="a plain value that `holdfast show` lists"
    )
    command.add_argument("--largest", action="store_true", help="the largest are best")
    command.add_argument(
        "--abandoned", action="store_true", help="remove those of futures that were given up"
    )
    command.add_argument(
        "--events", action="store_true", help="remove full event files instead, but the first"
    )
    command.add_argument(
        "--dry-run", action="store_true", help="show what would go, change nothing"
    )
    command.add_argument("--yes", action="store_true", help="do not ask")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Removes, or shows the plan; returns 5 while a run is active, 4 when a file is unreadable.

    The newest of the lineage and pinned checkpoints always stay. Without --last, --every and
    --abandoned only leftovers are removed: they belong to no checkpoint.
    """
    if args.events:
        return prune_events(args)
    keep = Keep(last=args.last, every=args.every, best=args.best, by=args.by, largest=args.largest)
    opened = open_root(args.root)
    _require_value(opened, keep)
    leases = LeaseWatch(opened.store)
    if not args.dry_run:
        _settle(leases)
    shown = plan(opened.store, keep, abandoned=args.abandoned, leases=leases)
    if args.dry_run:
        _tell(args, opened, shown, "would go")
        return 0
    if not args.yes:
        _require_free(args.root)
        if not shown:
            _tell(args, opened, shown, "removed")
            return 0
        if not args.json:
            _print(args.root, opened, shown, "would go")
        if not confirmed("Remove this?", yes=False, as_json=args.json):
            stdout().print("nothing was removed")
            return 0
    with _lock(opened), SlowProgress("removing") as progress:
        removal = plan(opened.store, keep, abandoned=args.abandoned, leases=leases)
        if not args.yes and removal != shown:
            raise RootBusy(
                f"{args.root} changed while you looked at it, so nothing was removed: look again"
            )
        gone = remove(opened.store, removal, progress, leases=leases)
    _tell(args, opened, gone, "removed")
    return 0


def _require_value(opened: OpenedRoot, keep: Keep) -> None:
    if keep.best is None or opened.catalogue.values_of(keep.by):
        return
    names = sorted({name for m in opened.catalogue.manifests for name in m.values})
    close = ", ".join(difflib.get_close_matches(keep.by, names, n=3))
    hint = f"did you mean {close}?" if close else f"`holdfast show {opened.root}` lists the values"
    raise NotFound(
        f"no checkpoint of {opened.root} has a number under {keep.by!r}, so nothing is removed: "
        f"{hint}",
        root=opened.root,
    )


def _settle(leases: LeaseWatch) -> None:
    """Finds out which readers live: files held by a killed one may be removed."""
    held = leases.held()
    if held:
        text = ", ".join(sorted({str(one.generation) for one in held}))
        print(
            f"{text} may be in use by readers: waiting up to {LEASE_S:g} s to see whether "
            "they live",
            file=sys.stderr,
        )
        leases.settle()


def _require_free(root: str) -> None:
    """Checks before anybody is asked; the lock itself is only taken after."""
    holder = root_holder(root)
    if holder is not None and holder.pid:
        raise RootBusy(f"{root} is in use by {holder.signed}. {_HOW}", owner=holder.signed)


def _lock(opened: OpenedRoot) -> Lock:
    try:
        return opened.store.lock(LOCK, "holdfast prune")
    except RootBusy as busy:
        raise RootBusy(f"{busy} {_HOW}", **busy.fields) from None


def _tell(args: argparse.Namespace, opened: OpenedRoot, removal: Removal, verb: str) -> None:
    holder = root_holder(args.root) if args.dry_run else None
    if args.json:
        held_by = None if holder is None else {"pid": holder.pid, "signed": holder.signed}
        print_json(
            {"root": args.root, "dry_run": args.dry_run, "lock": held_by, **_record(removal)}
        )
        return
    _print(args.root, opened, removal, verb)
    _print_wait(removal.waits_s)
    if holder is not None and holder.pid:
        stdout().print(
            f"This root is in use by {escape(holder.signed)} now, so prune would remove nothing, "
            f"and an unfinished directory may be a save under way. {_HOW}",
            soft_wrap=True,
        )


def _record(removal: Removal) -> dict[str, Any]:
    return {
        "checkpoints": [
            {"checkpoint": str(m.generation), "size_bytes": m.image_bytes}
            for m in removal.checkpoints
        ],
        "directories": [{"path": x.path, "size_bytes": x.size_bytes} for x in removal.directories],
        "layouts": [{"path": x.path, "size_bytes": x.size_bytes} for x in removal.layouts],
        "parts": [{"path": x.path, "size_bytes": x.size_bytes} for x in removal.parts],
        "others": [{"path": x.path, "size_bytes": x.size_bytes} for x in removal.others],
        "size_bytes": removal.size_bytes,
        "waits_s": removal.waits_s,
    }


def _what(path: str) -> str:
    return "set aside by repair" if path.startswith(f"{DAMAGED}/") else "note of a copy"


def _print(root: str, opened: OpenedRoot, removal: Removal, verb: str) -> None:
    console = stdout()
    if not removal:
        pins = len(pinned(opened.store))
        stays = f" ({pins} pinned)" if pins else ""
        console.print(f"nothing to remove from {escape(root)}{stays}", soft_wrap=True)
        return
    table = plain_table(verb, "when", "what", "size", right=("size",))
    for m in removal.checkpoints:
        state = opened.state_of(m.generation)
        what = "abandoned checkpoint" if state == "abandoned" else "checkpoint"
        table.add_row(str(m.generation), moment_text(m.created_s), what, size_text(m.image_bytes))
    for one in removal.directories:
        table.add_row(escape(one.path), "-", "unfinished or pruned", size_text(one.size_bytes))
    for one in removal.parts:
        table.add_row(escape(one.path), "-", "frozen parts of none", size_text(one.size_bytes))
    for one in removal.layouts:
        table.add_row(escape(one.path), "-", "layout of none", size_text(one.size_bytes))
    for one in removal.others:
        table.add_row(escape(one.path), "-", _what(one.path), size_text(one.size_bytes))
    console.print(table)
    freed = "would be freed" if verb == "would go" else "freed"
    freed = "will be freed later" if removal.waits_s else freed
    console.print(f"{size_text(removal.size_bytes)} {freed}")


def _print_wait(waits_s: float) -> None:
    if waits_s:
        stdout().print(
            "Files that no checkpoint names stay for now: a request of the process that had the "
            "root before may still land and name them. Prune again in "
            f"{max(1, math.ceil(waits_s / 60))} minutes.",
            soft_wrap=True,
        )
