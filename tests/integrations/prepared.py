"""Runs scripts in processes of their own that have a framework loaded already.

usage: prepared.py MODULE[,MODULE]; reads a JSON list of (arguments, environment, file) from each
line, and answers with the exit status of the script, whose output is in the file. Loading a
framework takes longer than most runs: here it is done once, and each run is a fork of that.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from pathlib import Path


def run(arguments: list[str], environment: dict[str, str], output: str) -> None:
    """Becomes the script: returns as a process of its own ends."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = arguments
    sys.path[:0] = [str(Path(arguments[0]).parent)]
    runpy.run_path(arguments[0], run_name="__main__")


def main() -> None:
    for name in sys.argv[1].split(","):
        importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            run(*json.loads(line))
            return
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
