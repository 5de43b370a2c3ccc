"""Runs ``holdfast sync``: copies all that another root lacks, and removes nothing."""

from __future__ import annotations

import argparse

from holdfast.cli.checkpoints import open_root
from holdfast.cli.command import Commands, add_command
from holdfast.cli.copy import add_roots, run_copy


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    command = add_command(
        commands,
        "sync",
        "copy every checkpoint, pin and record that another root lacks; nothing there is removed",
        "holdfast sync runs/gpt /archive/gpt --dry-run",
        "holdfast sync runs/gpt /archive/gpt",
    )
    add_roots(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Copies all; returns 4 when anything of the source is damaged."""
    return run_copy(args, open_root(args.root, is_brief=True), None)
