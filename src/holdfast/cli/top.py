"""Runs ``holdfast top``: shows what a run is doing now, until q or Ctrl-C."""

from __future__ import annotations

import argparse
import os
import select
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.live import Live
from rich.text import Text

from holdfast.cli.command import Commands, add_command, print_json
from holdfast.cli.output import stdout
from holdfast.errors import NotFound, UsageError
from holdfast.observe.findings import to_plain as to_findings
from holdfast.observe.keeper_samples import KeeperSamples
from holdfast.observe.live_findings import LiveFindings
from holdfast.observe.live_run import FileTails, LiveRun
from holdfast.observe.top_screen import screen_lines, to_plain


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    command = add_command(
        commands,
        "top",
        "show what a run is doing now: newest saves, phases, hosts, troubles",
        "holdfast top runs/gpt",
        "holdfast top runs/gpt --once",
    )
    command.add_argument("root", metavar="ROOT", help="the directory given to Checkpointer")
    command.add_argument("--once", action="store_true", help="print it once, and stop")
    command.add_argument(
        "--every", metavar="SECONDS", type=float, default=1.0, help="between two looks (default 1)"
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Shows the run until it is told to stop; where nobody watches, once."""
    if not 0.1 <= args.every <= 3600:
        raise UsageError(f"--every {args.every:g}: give seconds from 0.1 to 3600")
    tails, state, found = FileTails(args.root), LiveRun(), LiveFindings(args.root)
    keepers = KeeperSamples(args.root)

    def take_new() -> None:
        for event, head in tails.read():
            state.take(event, head)
            found.take(event, head)
        for sample, head in keepers.read():
            state.take(sample, head)

    take_new()
    if not tails.files:
        raise NotFound(
            f"no events in {args.root}/events: a run writes them as it trains; is this the "
            "directory given to Checkpointer?",
            root=str(args.root),
        )
    if args.json:
        print_json(to_plain(state, time.time(), found) | {"found": to_findings(found.found)})
    elif args.once or not sys.stdout.isatty():
        for line in _lines(args.root, state, found):
            stdout().print(line, markup=False, soft_wrap=True)
    else:
        _follow(take_new, lambda: _lines(args.root, state, found), args.every)
    tails.close()
    keepers.close()
    return 0


def _lines(root: str, state: LiveRun, found: LiveFindings) -> list[str]:
    width, height = shutil.get_terminal_size((80, 24))
    return screen_lines(root, state, time.time(), width=width, height=height, findings=found)


def _follow(take_new: Callable[[], object], lines: Callable[[], list[str]], every_s: float) -> None:
    live = Live(screen=True, auto_refresh=False, console=stdout())
    with suppress(KeyboardInterrupt), _keys() as is_ended, live:  # also while it draws or reads
        while True:
            live.update(Text("\n".join(lines()), no_wrap=True), refresh=True)
            if is_ended(every_s):
                return
            take_new()


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Gives what waits so many seconds, and returns True when q was pressed."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield _key_pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _key_pressed(within_s: float) -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], within_s)
    return bool(ready) and os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b"")


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False
