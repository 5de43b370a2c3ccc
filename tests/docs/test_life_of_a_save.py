"""The walk through the code names files, classes and methods that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
SOURCE = PROJECT / "src" / "holdfast"
TEXT = (PROJECT / "docs" / "life-of-a-save.md").read_text()
#: `path/file.py: Class.method`, `path/file.py: Class` or `path/file.py: function`.
_PLACE = re.compile(r"`([\w/]+\.py): ([\w.]+)`")
_CHAPTER = re.compile(r"^## (.+)$", re.MULTILINE)


@cache
def _names(path: Path) -> frozenset[str]:
    """Functions and classes of a file, and the methods of its classes as ``Class.method``."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, functions | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, functions)}
    return frozenset(found)


@pytest.mark.parametrize(("file", "name"), sorted(set(_PLACE.findall(TEXT))))
def test_every_file_class_and_method_that_is_named_exists(file: str, name: str) -> None:
    assert (SOURCE / file).is_file()
    assert name in _names(SOURCE / file)


def test_each_way_is_a_dozen_steps_and_each_step_names_a_place() -> None:
    chapters = dict(zip(_CHAPTER.findall(TEXT), _CHAPTER.split(TEXT)[2::2], strict=True))
    assert list(chapters) == ["A save", "A restore", "The loss of a host"]
    for text in chapters.values():
        steps = re.split(r"^\d+\. ", text, flags=re.MULTILINE)[1:]
        assert len(steps) == 12
        assert not [step for step in steps if not _PLACE.search(step.replace("\n   ", " "))]
