"""``python -m holdfast.keeper``: started by the first trainer on a host, detached from it."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    """Serve one arena until the run ends. Exit 0 in order, 3 when another keeper has it."""
    parser = argparse.ArgumentParser(prog="holdfast.keeper")
    parser.add_argument("--arena", required=True, type=Path)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--root", required=True)
    parser.add_argument("--host-id", required=True)
    parser.add_argument("--idle-s", type=float, default=3600.0)
    options = parser.parse_args(argv)

    from holdfast.keeper.server import Keeper
    from holdfast.snapshot.arena import lock_dir
    from holdfast.snapshot.client import LOCK_TAKEN

    # The terminal's Ctrl-C and a launcher's hang-up are for the trainers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.umask(0o077)
    lock = lock_dir(options.arena)
    if lock is None:
        print("another keeper holds this arena", file=sys.stderr)
        return LOCK_TAKEN
    keeper = Keeper(
        options.arena,
        run_id=options.run_id,
        root=options.root,
        host_id=options.host_id,
        idle_s=options.idle_s,
    )
    asyncio.run(keeper.run())
    os.close(lock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
