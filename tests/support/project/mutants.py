"""Breaks Holdfast on purpose, one fault at a time, and has a test notice each.

``python tests/support/project/mutants.py [NAME ...]`` copies the project for every mutant of
tests/mutants.toml, changes the copy, and runs there the test that must fail. A mutant that survives
is a promise that nobody keeps. Nothing of the project itself is changed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[3]
TABLE = PROJECT / "tests" / "mutants.toml"
PAGE = PROJECT / "docs" / "invariants.md"
BEGIN, END = "<!-- mutants: written by `make docs` -->\n", "<!-- end of mutants -->\n"
_SOURCES = Path("src", "holdfast")
_COPIED = ("src", "tests", "pyproject.toml")
#: A mutant may make its test wait for ever: pytest ends a test after two minutes.
_TEST_S = 600.0
#: Tests in these folders run on the simulated device, which no other test shares a process with.
_ON_DEVICE = ("tests/gpu/", "tests/device/")
_PASSED, _FAILED = 0, 1  # as pytest exits; whatever else there is tells nothing of the mutant


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: ``old`` becomes ``new`` in ``file``, and ``test`` must fail.

    ``promise``: the number of the broken promise; 0 if what is told of a run is wrong.
    ``breaks``: what would happen to a run.
    ``device``: the simulated device, if the test needs it.
    """

    name: str
    promise: int
    breaks: str
    file: str
    old: str
    new: str
    test: str
    device: str = ""

    @property
    def tests(self) -> list[str]:
        """The test, and the options that it needs."""
        options = [f"--device={self.device}", "--profiles=every", "--seeds=2"]
        return [self.test, *(options if self.device else [])]

    def source(self, project: Path) -> Path:
        """Returns the file to be changed."""
        return project / _SOURCES / self.file

    def occurrences(self, project: Path) -> int:
        """Counts ``old`` in its file; the mutant is applicable if it is there once."""
        path = self.source(project)
        return path.read_text().count(self.old) if self.old and path.is_file() else 0

    def apply(self, project: Path) -> None:
        """Changes the file in this copy of the project."""
        path = self.source(project)
        path.write_text(path.read_text().replace(self.old, self.new))


def read_mutants() -> list[Mutant]:
    """Returns the table, in its order."""
    return [Mutant(**row) for row in tomllib.loads(TABLE.read_text())["mutant"]]


def render(mutants: Sequence[Mutant]) -> str:
    """Returns the mutants as a table for docs/invariants.md."""
    lines = ["| promise | mutant | what it breaks | test that notices |", "|---|---|---|---|"]
    for one in sorted(mutants, key=lambda one: one.promise):
        lines.append(f"| {one.promise or 'told'} | {one.name} | {one.breaks} | `{one.test}` |")
    return "\n".join(lines) + "\n"


def put(page: str, mutants: Sequence[Mutant]) -> str:
    """Returns the page with the table between its two marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{render(mutants)}\n{END}{tail}"


def copy_project(to: Path) -> Path:
    """Copies sources and tests into the new directory ``to``."""
    to.mkdir()
    for name in _COPIED:
        if (PROJECT / name).is_dir():
            shutil.copytree(PROJECT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(PROJECT / name, to / name)
    return to


def run_tests(
    project: Path, tests: Sequence[str], timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs tests of a copy against the sources of that copy, also in the processes they start."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    if tests[0].startswith(_ON_DEVICE):
        command += ["--device=sim", "--profiles=every"]
    there = os.environ | {"PYTHONPATH": str(project / "src"), "COLUMNS": "400"}
    return subprocess.run(
        command, cwd=project, env=there, capture_output=True, text=True, timeout=timeout_s
    )


def try_mutant(mutant: Mutant, directory: Path) -> tuple[bool, str]:
    """Returns True if its test noticed the mutant, and how it went in words."""
    found = mutant.occurrences(PROJECT)
    if found != 1:
        return False, f"not applicable: its old text is {found} times in {mutant.file}"
    project = copy_project(directory / mutant.name)
    mutant.apply(project)
    try:
        done = run_tests(project, mutant.tests, _TEST_S)
    except subprocess.TimeoutExpired:
        return False, f"not applicable: {mutant.test} did not end within {_TEST_S:.0f} s"
    finally:
        shutil.rmtree(project)
    if done.returncode == _FAILED:
        return True, f"caught by {mutant.test}{_reason(done.stdout)}"
    if done.returncode < 0:  # memory was written to that is not there any more
        return True, f"caught by {mutant.test}: its process ended by signal {-done.returncode}"
    if done.returncode == _PASSED:
        return False, f"SURVIVED {mutant.test}"
    return False, f"not applicable: {mutant.test} could not be run\n{done.stdout}{done.stderr}"


def _reason(output: str) -> str:
    """Returns why the first test failed, from pytest's summary."""
    found = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    # The failure comes before what the test leaves behind because of it.
    _, _, reason = max(found, key=lambda line: line.startswith("FAILED"), default="").partition(
        " - "
    )
    return f": {reason:.100}" if reason else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Tries mutants, prints a line for each, and returns 0 if all were caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these mutants")
    parser.add_argument("--list", action="store_true", help="print their names only")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument("--write", action="store_true", help=f"write the table of {PAGE.name} anew")
    options = parser.parse_args(arguments)
    mutants = read_mutants()
    if options.write:
        PAGE.write_text(put(PAGE.read_text(), mutants))
        return 0
    unknown = {*options.names} - {one.name for one in mutants}
    if unknown:
        parser.error(f"no mutant is called {', '.join(sorted(unknown))}")
    chosen = [one for one in mutants if one.name in options.names or not options.names]
    if options.list:
        print("\n".join(one.name for one in chosen))
        return 0
    return _try_all(chosen, options.jobs)


def _try_all(mutants: Sequence[Mutant], jobs: int) -> int:
    width = max(len(one.name) for one in mutants)
    with tempfile.TemporaryDirectory(prefix="holdfast-mutants-") as name:
        project = copy_project(Path(name, "unchanged"))
        tests = sorted({m.test for m in mutants}, key=lambda test: test.startswith(_ON_DEVICE))
        for _, some in groupby(tests, key=lambda test: test.startswith(_ON_DEVICE)):
            unchanged = run_tests(project, list(some))
            if unchanged.returncode != _PASSED:
                print(f"the tests fail without any mutant:\n{unchanged.stdout}{unchanged.stderr}")
                return 2
        with ThreadPoolExecutor(jobs) as pool:
            tries = [pool.submit(_try_and_print, one, Path(name), width) for one in mutants]
        caught = sum(done.result() for done in tries)
    print(f"{caught} of {len(mutants)} mutants were caught")
    return 0 if caught == len(mutants) else 1


def _try_and_print(mutant: Mutant, directory: Path, width: int) -> bool:
    started_s = time.monotonic()
    is_caught, result = try_mutant(mutant, directory)
    elapsed_s = time.monotonic() - started_s
    print(f"{mutant.name:{width}}  {elapsed_s:4.1f} s  {result}", flush=True)
    return is_caught


if __name__ == "__main__":
    sys.exit(main())
