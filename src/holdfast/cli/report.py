"""Runs ``holdfast report``: shows the cost of saving in a run, and its benefit."""

from __future__ import annotations

import argparse

from holdfast.cli.command import Commands, add_command, print_json
from holdfast.cli.output import SlowProgress, stdout
from holdfast.errors import UsageError
from holdfast.observe.report import to_json
from holdfast.observe.report_builder import read_report
from holdfast.observe.tables import render


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    command = add_command(
        commands,
        "report",
        "show what each save cost, and what was restored, from a run's events",
        "holdfast report runs/gpt",
        "holdfast report runs/gpt --last 50",
    )
    command.add_argument("root", metavar="ROOT", help="the directory given to Checkpointer")
    command.add_argument(
        "--last",
        metavar="N",
        type=int,
        default=20,
        help="show the last N saves one by one (default 20; 0: all); sums are over all",
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the report, of a run that has ended or of one that trains right now."""
    if args.last < 0:
        raise UsageError(f"--last {args.last}: give a number of saves, or 0 for all")
    with SlowProgress("reading events") as progress:
        report = read_report(args.root, progress=progress)
    if args.json:
        print_json(to_json(report))
    else:
        render(report, stdout(), last=args.last)
    return 0
