"""The tree of errors, its page and the command line's exit codes say the same."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import cli, errors
from holdfast.errors import HoldfastError

PROJECT = Path(__file__).resolve().parents[2]
SOURCES = sorted((PROJECT / "src" / "holdfast").rglob("*.py"))
CLASSES = {
    name: one
    for name, one in vars(errors).items()
    if isinstance(one, type) and issubclass(one, HoldfastError)
}


def test_the_page_of_errors_is_what_the_classes_say() -> None:
    script = PROJECT / "docs" / "generate_errors.py"
    spec = importlib.util.spec_from_file_location("generate_errors", script)
    assert spec is not None and spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.PAGE.read_text() == generator.render(), "run `make docs`"


def test_the_drawn_tree_is_the_tree_of_classes() -> None:
    drawn: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.cleandoc(errors.__doc__ or "").splitlines():
        found = re.match(r"((?:[│ ] {3})*)(?:[├└]── )?([A-Z]\w+)(?= {2,}|$)", line)
        if found and found[2] in CLASSES:
            depth = len(found[1]) // 4 + ("── " in line)
            above = [*above[:depth], found[2]]
            drawn[found[2]] = above[-2] if depth else "Exception"
    assert drawn == {name: one.__mro__[1].__name__ for name, one in CLASSES.items()}


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_an_error_says_its_cause_what_to_do_and_its_facts(name: str) -> None:
    one = CLASSES[name]
    assert one.__doc__
    assert {"cause", "remedy"} <= one.__dict__.keys()
    for text in (one.cause, one.remedy, *one.keys.values()):
        assert text
        assert text == text.strip()


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_an_exit_code_stands_in_the_command_lines_table(name: str) -> None:
    table = {
        int(code): meaning
        for code, meaning in re.findall(r"^ +(\d+)  (.+)$", cli.EXIT_CODES, re.MULTILINE)
    }
    one = CLASSES[name]
    assert one.exit_code in table
    if one is not HoldfastError and "exit_code" in one.__dict__:
        assert name in table[one.exit_code]


def test_an_error_keeps_its_fields_between_processes() -> None:
    error = errors.DeadlineExceeded("ranks [1] did not come", ranks=[1], phase="join")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.fields == {"ranks": [1], "phase": "join"}


def _raised() -> Iterator[tuple[str, str, set[str]]]:
    """(place, class, names of the fields given) of every error made in the sources."""
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                if name in CLASSES:
                    given = {keyword.arg for keyword in node.keywords if keyword.arg}
                    yield f"{source.relative_to(PROJECT)}:{node.lineno}", name, given


def _explained(one: type[HoldfastError]) -> set[str]:
    return {key for above in one.__mro__ for key in getattr(above, "keys", {})}


def test_every_field_that_is_given_is_explained() -> None:
    unknown = [
        f"{place}: {name} has no field {sorted(given - _explained(CLASSES[name]))}"
        for place, name, given in _raised()
        if given - _explained(CLASSES[name])
    ]
    assert not unknown, "explain it in errors.py, then `make docs`:\n" + "\n".join(unknown)


def test_every_field_that_is_explained_is_given_somewhere() -> None:
    given: dict[str, set[str]] = {name: set() for name in CLASSES}
    for _, name, fields in _raised():
        for above in CLASSES[name].__mro__:
            if above.__name__ in given:
                given[above.__name__] |= fields
    nowhere = {
        name: set(one.__dict__.get("keys", {})) - given[name] for name, one in CLASSES.items()
    }
    assert not {name: keys for name, keys in nowhere.items() if keys}
