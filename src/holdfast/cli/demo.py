"""Runs ``holdfast demo``: a training run is killed, and resumes exactly."""

from __future__ import annotations

import argparse
import importlib

from holdfast.cli.command import Commands, add_command


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    command = add_command(
        commands,
        "demo",
        "train a small GPT, kill it in several ways, and show that it resumes exactly",
        "holdfast demo --out runs/demo",
        "holdfast demo --hosts 4",
        "holdfast demo --root s3://bucket/demo --cache",
    )
    command.add_argument(
        "--out", metavar="DIR", help="where the runs, the table and the plot go", default=None
    )
    command.add_argument("--seed", type=int, default=0, help="decides when to kill (default 0)")
    command.add_argument(
        "--hosts",
        type=int,
        choices=(4,),
        help="train on so many simulated hosts instead; lose one of them, then two at once",
    )
    command.add_argument(
        "--root", metavar="URL", default="", help="a bucket, below which the checkpoints go"
    )
    command.add_argument(
        "--cache", action="store_true", help="give every host a cache, which is lost with the host"
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the demo; its exit code says whether every line of its table is as promised."""
    # Imported by name: no other part of the command line may load torch, and the demo does.
    code: int = importlib.import_module("holdfast.demo").main(args)
    return code
