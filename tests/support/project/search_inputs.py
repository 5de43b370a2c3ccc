"""Searches, with atheris, inputs on which a parser raises what it should not.

``SECONDS [PARSER]`` prints a line for each parser, with the number of inputs. ``PARSER SECONDS
CORPUS`` fuzzes one in its own process, as atheris wants it: inputs that reach new code are kept in
CORPUS.
"""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve()
TESTS = HERE.parents[2]
#: A parser may take so much memory and time for one input.
MOST_MIB, MOST_S = 1024, 10
MOST_BYTES = 4096


def run_one(name: str, seconds: int, corpus: Path) -> None:
    """Fuzzes one parser in this process, which ends with it."""
    import atheris

    with atheris.instrument_imports(include=["holdfast"]):
        from fuzz.parsers import PARSERS

    parser = PARSERS[name]
    options = [
        f"-max_total_time={seconds}",
        f"-max_len={MOST_BYTES}",
        f"-rss_limit_mb={MOST_MIB}",
        f"-timeout={MOST_S}",
        "-print_final_stats=1",
        "-verbosity=1",
    ]
    atheris.Setup([sys.argv[0], *options, str(corpus)], parser)
    atheris.Fuzz()


def run_all(seconds: int, names: list[str]) -> int:
    """Fuzzes each parser for a share of this time; returns the number of those that failed."""
    from fuzz.parsers import CORPUS, PARSERS

    failed = 0
    wanted = names or list(PARSERS)
    for name in wanted:
        with tempfile.TemporaryDirectory() as directory:
            corpus = Path(directory, "corpus")
            shutil.copytree(CORPUS / name, corpus)
            share = max(1, seconds // len(wanted))
            command = [sys.executable, str(HERE), name, str(share), str(corpus)]
            done = subprocess.run(command, capture_output=True, text=True, cwd=directory)
            tried = re.search(r"number_of_executed_units: (\d+)", done.stderr)
            kept = len(list(corpus.iterdir()))
            print(f"{name:16} {share:4} s  {tried[1] if tried else '?':>9} inputs, {kept} kept")
            if done.returncode:
                failed += 1
                sys.stdout.write(done.stderr[-4000:])
                for crash in Path(directory).glob("*-*"):
                    if crash.is_file():
                        print(f"{crash.name}: {crash.read_bytes()!r}")
    return failed


def main() -> int:
    """Runs one parser where one is named with a corpus, else all."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path[:0] = [str(TESTS), str(TESTS.parent / "src")]
    if len(sys.argv) == 4:
        run_one(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
        return 0
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    return run_all(seconds, sys.argv[2:3])


if __name__ == "__main__":
    sys.exit(main())
