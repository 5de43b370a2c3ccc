"""Entry point of the keeper process, ``python -m holdfast.keeper``, started by a host's first
trainer.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import sys
from pathlib import Path

#: A thread that computes lets the keeper's loop go on after this time. With the interpreter's own
#: 5 ms, four that read headers held it for 20 ms each time it had anything to do.
SWITCH_S = 0.0005


def main(argv: list[str] | None = None) -> int:
    """Serve one arena until the run ends.

    Exit 0 in order or when told to stop, 3 when another keeper has it, 8 when it is not ours.
    """
    parser = argparse.ArgumentParser(prog="holdfast.keeper")
    parser.add_argument("--arena", required=True, type=Path)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--root", required=True)
    parser.add_argument("--root-id", default="", help="which root it is, by Store.identity")
    parser.add_argument("--host-id", required=True)
    parser.add_argument("--arena-bytes", type=int, help="the most that slots take together")
    parser.add_argument("--idle-s", type=float, default=3600.0)
    # Time to stop after SIGTERM: less than the 30 s that most senders wait before they kill.
    parser.add_argument("--stop-s", type=float, default=20.0)
    parser.add_argument("--scrub-s", type=float, default=60.0, help="between two looks at memory")
    options = parser.parse_args(argv)

    gc.disable()  # what is imported stays for good: it is not passed through, now or later
    from holdfast.errors import ArenaError
    from holdfast.keeper.process import Keeper
    from holdfast.protocol.arena import lock_dir, make_private_dir
    from holdfast.protocol.client import LOCK_TAKEN

    gc.freeze()
    gc.enable()
    # The terminal's Ctrl-C and a launcher's SIGHUP are meant for the trainers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.umask(0o077)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy only does small computations here
    sys.setswitchinterval(SWITCH_S)
    try:
        make_private_dir(options.arena)
    except ArenaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    lock = lock_dir(options.arena)
    if lock is None:
        print("another keeper holds this arena", file=sys.stderr)
        return LOCK_TAKEN

    async def serve() -> None:
        keeper = Keeper(
            options.arena,
            run_id=options.run_id,
            root=options.root,
            root_id=options.root_id,
            host_id=options.host_id,
            idle_s=options.idle_s,
            stop_s=options.stop_s,
            arena_bytes=options.arena_bytes,
            scrub_s=options.scrub_s,
        )
        await keeper.run()

    asyncio.run(serve())
    # Threads that still write after a deadline are not waited for; the process exit frees the lock.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
