"""Runs ``holdfast pin``: keeps a checkpoint whatever retention says."""

from __future__ import annotations

import argparse
from typing import Any

from rich.markup import escape

from holdfast.cli.checkpoints import OpenedRoot, choose, open_root
from holdfast.cli.command import Commands, add_command, print_json
from holdfast.cli.output import plain_table, stdout
from holdfast.errors import NotFound, UsageError
from holdfast.format.manifest import Generation
from holdfast.observe.text import NOTHING, moment_text, on_one_line
from holdfast.persist.pins import PinnedGenerations, pin, read_pins, unpin


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    command = add_command(
        commands,
        "pin",
        "keep a checkpoint whatever retention says, or let it go again; a run may be training",
        'holdfast pin runs/gpt 1200 --note "before the learning rate was raised"',
        "holdfast pin runs/gpt --list",
        "holdfast pin runs/gpt 2-1200 --remove",
    )
    command.add_argument("root", metavar="ROOT", help="the directory given to Checkpointer")
    command.add_argument(
        "step",
        metavar="STEP",
        nargs="?",
        help="a step as restore() takes it, or INCARNATION-STEP for any that `holdfast ls` shows",
    )
    command.add_argument(
        "--note", metavar="TEXT", default=None, help="why, for those who ask later"
    )
    command.add_argument("--remove", action="store_true", help="give it back to retention")
    command.add_argument("--list", action="store_true", help="show what is pinned")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Pins, unpins or lists; returns 3 when there is no such checkpoint or pin."""
    _refuse_contradictions(args)
    opened = open_root(args.root, is_brief=args.list or args.remove)
    if args.list:
        return _list(opened, as_json=args.json)
    if args.remove:
        generation = _pinned_as(opened, args.step)
        unpin(opened.store, generation)
        done = "not pinned any more"
    else:
        generation = choose(opened, args.step).generation
        pin(opened.store, generation, args.note or "")
        done = "pinned"
    if args.json:
        print_json({"root": args.root, "checkpoint": str(generation), "pinned": not args.remove})
    else:
        stdout().print(f"{generation}: {done}", soft_wrap=True)
    return 0


def _refuse_contradictions(args: argparse.Namespace) -> None:
    if args.list and (args.step or args.remove or args.note is not None):
        raise UsageError("--list stands alone: it shows what is pinned and changes nothing")
    if args.remove and args.note is not None:
        raise UsageError("--remove takes no --note: the pin goes, and its note with it")
    if not args.list and not args.step:
        raise UsageError("say which STEP to pin, or --list for what is pinned")


def _pinned_as(opened: OpenedRoot, name: str) -> Generation:
    """Returns the pin that a user named, also when its checkpoint is gone."""
    pins = list(read_pins(opened.store))
    meant = [g for g in pins if name in (str(g), str(g.step))]
    if len(meant) > 1:  # a restore takes the one of the lineage; so does this
        meant = [g for g in meant if g in opened.lineage] or meant
    if len(meant) == 1:
        return meant[0]
    listed = ", ".join(map(str, pins)) or "none"
    if meant:
        raise UsageError(f"{name} is pinned more than once: give one of {listed}")
    raise NotFound(f"{name} is not pinned in {opened.root}; pinned are: {listed}", step=name)


def _list(opened: OpenedRoot, *, as_json: bool) -> int:
    rows = [_record(opened, one) for one in read_pins(opened.store).values()]
    if as_json:
        print_json({"root": opened.root, "pins": rows})
        return 0
    table = plain_table("checkpoint", "pinned", "state", "note")
    for row in rows:
        note = on_one_line(row["reason"]) or row["note"] or NOTHING
        table.add_row(row["checkpoint"], moment_text(row["created_s"]), row["state"], escape(note))
    none = f"nothing is pinned in {escape(opened.root)}"
    stdout().print(table if rows else none, soft_wrap=not rows)
    return 0


def _record(opened: OpenedRoot, one: PinnedGenerations) -> dict[str, Any]:
    is_there = one.generation in opened.catalogue.generations
    return {
        "checkpoint": str(one.generation),
        "state": opened.state_of(one.generation) if is_there else "gone",
        "created_s": 0.0 if one.pin is None else one.pin.created_s,
        "note": one.note,
        "reason": one.reason,
    }
