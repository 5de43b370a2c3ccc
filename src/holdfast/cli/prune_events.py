"""Removes full event files by hand, for ``holdfast prune --events``: a run goes on meanwhile."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.markup import escape

from holdfast.cli.command import confirmed, print_json
from holdfast.cli.output import plain_table, stdout
from holdfast.errors import NotFound, UsageError
from holdfast.observe.event_files import closed_files, give_up, trails
from holdfast.observe.text import size_text
from holdfast.storage.open import is_bucket


def prune_events(args: argparse.Namespace) -> int:
    """Removes the full event files of each writer but the first, which says how the run began.

    Those that are written stay, so that no lock is needed. Raises UsageError for other options
    beside it and for a bucket, NotFound where there are no events.
    """
    _refuse_others(args)
    writers = trails(args.root)
    if not writers:
        raise NotFound(f"no events in {args.root}/events: nothing was removed", root=args.root)
    sizes = {each: each.stat().st_size for one in writers for each in closed_files(one)[1:]}
    if args.dry_run:
        _tell(args, sizes, "would go")
        return 0
    if sizes and not args.yes:
        if not args.json:
            _tell(args, sizes, "would go")
        if not confirmed("Remove these events?", yes=False, as_json=args.json):
            stdout().print("nothing was removed")
            return 0
    gone = [each for one in writers for each in give_up(one, 0)]
    _tell(args, {each: sizes.get(each, 0) for each in gone}, "removed")
    return 0


def _refuse_others(args: argparse.Namespace) -> None:
    others = ("last", "every", "best", "by", "largest", "abandoned")
    if any(getattr(args, name) for name in others):
        raise UsageError(
            "--events removes event files and no checkpoints: give it without --last, --every, "
            "--best, --by, --largest and --abandoned"
        )
    if is_bucket(args.root):
        raise UsageError(
            f"the events of {args.root} are objects below events/, which nothing here removes: "
            "give the bucket a lifecycle rule for that prefix"
        )


def _tell(args: argparse.Namespace, sizes: dict[Path, int], verb: str) -> None:
    total_bytes = sum(sizes.values())
    if args.json:
        files = [{"path": f"events/{p.name}", "size_bytes": size} for p, size in sizes.items()]
        print_json(
            {"root": args.root, "dry_run": args.dry_run, "events": files, "size_bytes": total_bytes}
        )
        return
    console = stdout()
    if not sizes:
        console.print(f"no full event files to remove from {escape(args.root)}", soft_wrap=True)
        return
    table = plain_table(verb, "size", right=("size",))
    for path, size in sizes.items():
        table.add_row(escape(f"events/{path.name}"), size_text(size))
    console.print(table)
    console.print(f"{size_text(total_bytes)} {'would be freed' if verb == 'would go' else 'freed'}")
