"""Runs ``holdfast report``: shows the cost of saving in a run, and its benefit."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli.command import Commands, add_command, print_json
from holdfast.cli.output import SlowProgress, stdout
from holdfast.errors import StorageError, UsageError
from holdfast.geometry.parallelism import asked
from holdfast.observe.findings import find, to_plain
from holdfast.observe.report import Report, RunMesh, to_json
from holdfast.observe.report_builder import read_report
from holdfast.observe.report_rows import table_by
from holdfast.observe.save_view import find_save, render_by, render_save
from holdfast.observe.since import moment_of, of_start, since
from holdfast.observe.tables import render, render_links
from holdfast.observe.text import count_text

if TYPE_CHECKING:
    from holdfast.observe.spans import RunSpans


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    command = add_command(
        commands,
        "report",
        "show how a run is: where its time went, what is wrong, what each save cost",
        "holdfast report runs/gpt",
        "holdfast report runs/gpt --save 2-1200",
        "holdfast report runs/gpt --by host --since 2h",
        "holdfast report runs/gpt --by mesh",
        "holdfast report runs/gpt --html report.html",
    )
    command.add_argument("root", metavar="ROOT", help="the directory given to Checkpointer")
    command.add_argument(
        "--last",
        metavar="N",
        type=int,
        default=20,
        help="show the last N saves one by one (default 20; 0: all); sums are over all",
    )
    command.add_argument(
        "--save", metavar="STEP", help="show one save across its ranks; with --html, over time"
    )
    command.add_argument(
        "--by",
        choices=("rank", "host", "mesh", "link"),
        help="show the saves by rank, by host or by the axes of the device mesh, or what messages "
        "between hosts take",
    )
    command.add_argument(
        "--mesh",
        metavar="AXES",
        help="the device mesh, where the run did not report it, such as dp=4,tp=2, the last "
        "running fastest: for --by mesh and --html",
    )
    command.add_argument(
        "--incarnation", metavar="N", type=int, help="only this start; the division of time stays"
    )
    command.add_argument(
        "--since",
        metavar="WHEN",
        help="only what was since then: 90s, 30m, 2h or 3d before the newest record, or a date "
        "such as 2026-05-17T08:00; the division of time is always of the whole run",
    )
    command.add_argument("--html", metavar="FILE", help="write one page that needs nothing else")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the report, of a run that has ended or of one that trains right now."""
    if args.last < 0:
        raise UsageError(f"--last {args.last}: give a number of saves, or 0 for all")
    with SlowProgress("reading events") as progress:
        report = read_report(args.root, progress=progress)
    if args.since is not None:
        report = since(report, moment_of(args.since, report.last_s))
    if args.incarnation is not None:
        report = of_start(report, args.incarnation)
    if args.mesh is not None:
        mesh = asked(args.mesh)
        _require_fit(args.mesh, mesh.sizes, report)
        report = replace(report, mesh=RunMesh(mesh.names, mesh.sizes))
    if args.html is not None:
        _write_page(report, Path(args.html), _spans_of(report, args.save))
        if args.json:
            print_json({"file": args.html})
    elif args.save is not None:
        save = find_save(report, args.save)
        if args.json:
            print_json(to_json(replace(report, saves=(save,)))["saves"][0])
        else:
            render_save(report, save, stdout())
    elif args.by is not None:
        _print_by(report, args)
    elif args.json:
        print_json(to_json(report) | {"findings": to_plain(find(report, time.time()))})
    else:
        render(report, stdout(), last=args.last, now_s=time.time())
    return 0


def _print_by(report: Report, args: argparse.Namespace) -> None:
    if args.json:
        print_json(table_by(report, args.by))
    elif args.by == "link":
        render_links(report, stdout(), last=args.last)
    else:
        render_by(report, args.by, stdout(), last=args.last)


def _require_fit(given: str, sizes: Sequence[int], report: Report) -> None:
    """Raises UsageError for a mesh of other ranks than the newest start has."""
    world = report.starts[-1].world if report.starts else 0
    if world and math.prod(sizes) != world:
        raise UsageError(
            f"--mesh {given}: that is a mesh of {count_text(math.prod(sizes), 'rank')}, and start "
            f"{report.starts[-1].incarnation} has {world}"
        )


def _spans_of(report: Report, save: str | None) -> RunSpans | None:
    """Returns what the page shows over time of the save that is asked for, if one is."""
    if save is None:
        return None
    from holdfast.observe.spans import RecordChoice, SaveName, read_spans

    found = find_save(report, save)
    with SlowProgress("reading events of the save") as progress:
        chosen = RecordChoice(SaveName(found.incarnation, found.step))
        return read_spans(report.root, chosen, progress)


def _write_page(report: Report, path: Path, one_save: RunSpans | None) -> None:
    from holdfast.observe.report_page import render_page

    try:
        page = render_page(report, find(report, time.time()), one_save)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error
