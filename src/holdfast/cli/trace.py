"""Runs ``holdfast trace``: writes what happened in a run as a trace for Perfetto."""

from __future__ import annotations

import argparse
from pathlib import Path

from holdfast.cli.command import Commands, add_command, print_json
from holdfast.cli.output import SlowProgress, stdout
from holdfast.errors import UsageError
from holdfast.observe.perfetto_trace import require_perfetto, write_trace
from holdfast.observe.spans import read_spans, select


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    command = add_command(
        commands,
        "trace",
        "write a timeline of saves and restores, which ui.perfetto.dev shows",
        "holdfast trace runs/gpt --save 3-1200",
        "holdfast trace runs/gpt --since 10m --output gpt.perfetto-trace",
    )
    command.add_argument("root", metavar="ROOT", help="the directory given to Checkpointer")
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument("--save", metavar="GEN", help="one save, such as 3-1200, or a step")
    which.add_argument(
        "--since",
        metavar="TIME",
        help="the last of the run: 90s, 10m, 2h or 1d before its end; or from a date on",
    )
    command.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        default=Path("holdfast.perfetto-trace"),
        help="the file to write (default holdfast.perfetto-trace)",
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Writes the trace, and says where it is."""
    require_perfetto()
    with SlowProgress("reading events") as progress:
        chosen = select(args.root, args.save, args.since, progress)
        found = read_spans(args.root, chosen, progress)
    try:
        with args.output.open("wb") as file:
            spans = write_trace(found, file)
    except OSError as error:
        raise UsageError(f"{args.output} cannot be written: {error.strerror}") from error
    if args.json:
        hosts = sorted({span.host for span in found.spans})
        print_json({"file": str(args.output), "spans": spans, "hosts": hosts})
    else:
        stdout().print(
            f"{args.output}: {spans} spans; open it at https://ui.perfetto.dev, which reads it in "
            "the browser and uploads nothing",
            markup=False,
        )
    return 0
