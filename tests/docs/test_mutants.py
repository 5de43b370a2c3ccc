"""The table of mutants fits the sources, the tests and the page of invariants.

What it says of the tests, that each notices its mutant, is tried by `make mutants`.
"""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from support.project import mutants
from support.project.mutants import PROJECT, Mutant, read_mutants

MUTANTS = [pytest.param(mutant, id=mutant.name) for mutant in read_mutants()]


@cache
def decorators(path: Path) -> dict[str, list[str]]:
    """The decorators of every test of a file, by its name as in a node id."""
    tree = ast.parse(path.read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    bodies = [("", tree.body), *((f"{one.name}::", one.body) for one in classes)]
    return {
        prefix + node.name: [ast.unparse(one) for one in node.decorator_list]
        for prefix, body in bodies
        for node in body
        if isinstance(node, ast.FunctionDef)
    }


def marks_of(test: str) -> list[str] | None:
    """The decorators of the test with this node id; None where there is none."""
    path, _, name = test.partition("::")
    return decorators(PROJECT / path).get(name) if (PROJECT / path).is_file() else None


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_changes_one_place_of_its_file_and_leaves_python(mutant: Mutant) -> None:
    assert mutant.occurrences(PROJECT) == 1
    source = mutant.source(PROJECT).read_text()
    changed = ast.dump(ast.parse(source.replace(mutant.old, mutant.new)))
    assert changed != ast.dump(ast.parse(source))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_test_that_notices_a_mutant_is_marked_and_always_runs(mutant: Mutant) -> None:
    found = marks_of(mutant.test)
    assert found is not None, f"there is no test {mutant.test}"
    assert "pytest.mark.promise" in found
    assert "pytest.mark.slow" not in found


def test_every_mutant_has_a_name_of_its_own() -> None:
    names = [mutant.name for mutant in read_mutants()]
    assert len({*names}) == len(names) >= 18
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in names)


def test_every_promise_is_broken_by_a_mutant() -> None:
    promises = map(int, re.findall(r"^\*\*(\d+)\.", mutants.PAGE.read_text(), re.MULTILINE))
    # 0 stands for what is told of a run.
    broken = {mutant.promise for mutant in read_mutants()} - {0}
    assert broken == {*promises} == {*range(1, 8)}


def test_the_page_lists_the_mutants() -> None:
    page = mutants.PAGE.read_text()
    assert mutants.BEGIN in page and mutants.END in page
    assert page == mutants.put(page, read_mutants()), "run `make docs`"


@pytest.mark.parametrize(
    ("exit_status", "is_caught", "said"),
    [(1, True, "caught by"), (0, False, "SURVIVED"), (2, False, "not applicable")],
)
def test_only_a_test_that_ran_and_failed_has_caught_a_mutant(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    exit_status: int,
    is_caught: bool,
    said: str,
) -> None:
    mutant = read_mutants()[0]
    seen: list[int] = []

    def run(project: Path, tests: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        assert tests == mutant.tests and timeout_s > 0
        seen.append(mutant.occurrences(project))
        return subprocess.CompletedProcess([], exit_status, "FAILED test - why", "")

    monkeypatch.setattr(mutants, "run_tests", run)
    found = mutants.try_mutant(mutant, tmp_path)
    assert found[0] is is_caught and found[1].startswith(said)
    assert seen == [0] and mutant.occurrences(PROJECT) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("file", ["errors.py", "no_such_file.py"])
def test_a_mutant_whose_place_is_gone_is_not_applicable(tmp_path: Path, file: str) -> None:
    lost = Mutant("lost", 1, "", file, "no such text", "", "tests/test_x.py::test_x")
    is_caught, said = mutants.try_mutant(lost, tmp_path)
    assert not is_caught and said.startswith("not applicable: its old text is 0 times")
