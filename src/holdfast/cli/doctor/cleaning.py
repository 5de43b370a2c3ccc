"""Give back the shared memory of dead runs: first what would go is shown, and what stays, and why.

Never an arena that a keeper or a trainer has, and none with a snapshot newer than storage unless
it was said that those may be lost.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from rich.markup import escape

from holdfast.cli.ask import confirmed
from holdfast.cli.doctor.arena_facts import NEWS, clear, probe_arenas
from holdfast.cli.doctor.facts import Arena
from holdfast.cli.output import print_json, stdout
from holdfast.observe.units import count_text, size_text
from holdfast.snapshot.arena import arena_home


def clean(args: argparse.Namespace) -> int:
    """Remove what may go, with ``lose_snapshots`` all that is stale; 0."""
    may_lose = args.lose_snapshots
    stale = [one for one in probe_arenas(arena_home()) if one.is_stale or one.is_grave]
    going = [one for one in stale if may_lose or one.may_go]
    left = {one.path: NEWS for one in stale if one not in going}
    if not args.json:
        _show(stale, going)
    question = "Clear this, and lose the snapshots in it?" if may_lose else "Clear this?"
    if going and not confirmed(question, yes=args.yes, as_json=args.json):
        return 0
    refused = {one.path: why for one in going if (why := clear(one, may_lose=may_lose))}
    cleared = [one for one in going if one.path not in refused]
    freed = sum(one.size_bytes for one in cleared)
    if args.json:
        rows = [{"path": x.path, "newest": x.newest, "size_bytes": x.size_bytes} for x in cleared]
        print_json({"cleared": rows, "left": {**left, **refused}, "size_bytes": freed})
        return 0
    for path, reason in refused.items():
        stdout().print(f"{escape(path)} was left alone: {reason}", soft_wrap=True)
    none = "nothing is stale" if not stale else ""
    stdout().print(none or f"{count_text(len(cleared), 'arena')} cleared, {size_text(freed)} freed")
    if left:
        held = count_text(len(left), "arena")
        remedy = "start their runs again, or give them up: holdfast doctor --clean --lose-snapshots"
        stdout().print(f"{held} left for the snapshots there: {remedy}", soft_wrap=True)
    return 0


def _show(stale: Iterable[Arena], going: list[Arena]) -> None:
    for one in stale:
        fate = "goes " if one in going else "stays"
        text = f"{fate}  {escape(one.path)}  {size_text(one.size_bytes)}  {_held(one)}"
        stdout().print(text, soft_wrap=True)


def _held(arena: Arena) -> str:
    if arena.is_grave:
        return "half removed"
    if not (arena.newest or arena.part):
        return "no whole snapshot"
    if arena.newest:
        durable = {True: "in storage too", False: "NOT in storage", None: "perhaps not in storage"}
        text = f"newest snapshot {arena.newest}, {durable[arena.newest_is_durable]}"
    else:
        text = ""
    if arena.part and arena.part != arena.newest:
        newer = {True: "NOT in storage", False: "not newer than storage",
                 None: "perhaps not in storage"}  # fmt: skip
        text += f"{', ' * bool(text)}part of snapshot {arena.part}, {newer[arena.has_news]}"
    return text
