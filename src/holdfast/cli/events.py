"""Runs ``holdfast events``: hands a run's records out as lines, as a table, or as traces."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from holdfast.cli.command import Commands, add_command, print_json
from holdfast.cli.output import SlowProgress, stdout
from holdfast.errors import UsageError
from holdfast.events import AnyEvent
from holdfast.observe.export import require_pyarrow, rows_of, write_jsonl, write_parquet
from holdfast.observe.records import RecordReader
from holdfast.observe.spans import select

_KINDS = tuple(kind.__name__ for kind in AnyEvent.__args__)


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    command = add_command(
        commands,
        "events",
        "write a run's records as JSON lines or Parquet, or send them to OpenTelemetry",
        "holdfast events runs/gpt --to parquet --output gpt.parquet",
        "holdfast events runs/gpt --to jsonl --kind SnapshotMissed --since 1h",
        "holdfast events runs/gpt --to otlp --endpoint http://127.0.0.1:4318",
    )
    command.add_argument("root", metavar="ROOT", help="the directory given to Checkpointer")
    command.add_argument(
        "--to", choices=("jsonl", "parquet", "otlp"), default="jsonl", help="default jsonl"
    )
    command.add_argument(
        "--output", metavar="FILE", type=Path, help="the file to write; jsonl: stdout by default"
    )
    command.add_argument(
        "--kind", metavar="EVENT", action="append", default=[], help="these events alone"
    )
    command.add_argument("--endpoint", metavar="URL", help="of the OTLP/HTTP receiver, for otlp")
    which = command.add_mutually_exclusive_group()
    which.add_argument("--save", metavar="GEN", help="of one save alone, such as 3-1200")
    which.add_argument(
        "--since", metavar="TIME", help="the last 90s, 10m, 2h or 1d of the run, or from a date on"
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Writes or sends the records."""
    _require_kinds(args.kind)
    if args.to == "otlp":
        return _send(args)
    if args.to == "parquet":
        require_pyarrow()
        if args.output is None:
            raise UsageError("--to parquet writes a file: give --output FILE")
    with SlowProgress("reading events") as progress:
        chosen = select(args.root, args.save, args.since, progress)
        rows = rows_of(RecordReader(args.root, progress), chosen, frozenset(args.kind))
        if args.output is None:
            if args.json:
                raise UsageError("--json says what was written: give --output FILE with it")
            write_jsonl(rows, sys.stdout.buffer)
            return 0
        try:
            if args.to == "parquet":
                count = write_parquet(rows, args.output)
            else:
                with args.output.open("wb") as file:
                    count = write_jsonl(rows, file)
        except OSError as error:
            raise UsageError(f"{args.output} cannot be written: {error.strerror}") from error
    if args.json:
        print_json({"file": str(args.output), "records": count})
    else:
        stdout().print(f"{args.output}: {count} records", markup=False)
    return 0


def _send(args: argparse.Namespace) -> int:
    from holdfast.observe.spans import read_spans
    from holdfast.observe.telemetry import require_telemetry, send_traces

    if args.kind or args.output is not None:
        raise UsageError("--to otlp sends whole saves and recoveries: give no --kind or --output")
    if not args.endpoint:
        raise UsageError(
            "--to otlp sends to a receiver: give --endpoint, such as http://127.0.0.1:4318"
        )
    require_telemetry()
    with SlowProgress("reading events") as progress:
        chosen = select(args.root, args.save, args.since, progress)
        found = read_spans(args.root, chosen, progress)
    sent = send_traces(found, args.endpoint)
    if args.json:
        print_json({"endpoint": args.endpoint, "traces": sent.traces, "spans": sent.spans})
    else:
        stdout().print(f"{args.endpoint}: {sent.spans} spans in {sent.traces} traces", markup=False)
    return 0


def _require_kinds(names: Sequence[str]) -> None:
    for name in names:
        if name not in _KINDS:
            near = difflib.get_close_matches(name, _KINDS, n=1)
            hint = f"did you mean {near[0]}?" if near else "docs/reference/events.md lists them"
            raise UsageError(f"no event is called {name!r}: {hint}")
