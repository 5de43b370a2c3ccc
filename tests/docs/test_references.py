"""What the documents point at exists: files, headings, tests, messages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from holdfast import errors
from support.project.code_blocks import PROJECT, name_of, pages

PAGES = [pytest.param(page, id=name_of(page)) for page in pages()]
SOURCES = PROJECT / "src" / "holdfast"
#: Where users' calls come in, and what is said to them about their state and their machine.
DOORS = (
    "checkpointer.py",
    "data/**/*.py",
    "oneshot.py",
    "preemption.py",
    "ranks.py",
    "world.py",
    "format/*.py",
    "policy/*.py",
    "rules/*.py",
    "geometry/leaf_maps.py",
    "offload/**/*.py",
    "transport/**/*.py",
    "state/**/*.py",
    "protocol/arena.py",
    "capture/copy_slot.py",
    "capture/overtaking.py",
    "capture/handles.py",
    "storage/open.py",
)
#: A file or directory of the project, or a test in it, in backticks.
_PATH = re.compile(r"`((?:src|tests|docs|examples|benchmarks)/[\w./*-]*)(?:::(\w+))?`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_every_path_and_every_test_that_is_named_exists(page: Path) -> None:
    missing = []
    for found in _PATH.finditer(page.read_text()):
        path, test = found.groups()
        if not list(PROJECT.glob(path)):
            missing.append(path)
        elif test and test not in _functions(PROJECT / path):
            missing.append(f"{path}::{test}")
    assert not missing


@cache
def _functions(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    dead = []
    for target in _LINK.findall(_FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in _anchors(there)):
            dead.append(target)
    assert not dead


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.strip().replace(" ", "-") for title in kept}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_found_from_the_index(page: Path) -> None:
    index = PROJECT / "docs" / "README.md"
    if page == index or PROJECT / "docs" not in page.parents:
        return
    linked = {
        (index.parent / link.partition("#")[0]).resolve()
        for link in _LINK.findall(index.read_text())
    }
    assert page in linked


def _with_ellipses(node: ast.AST) -> str | None:
    """A text of the sources, with an ellipsis where a value stands."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _calls(source: Path) -> Iterator[tuple[str, str]]:
    """(what is called, its first argument) of every call with a text."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            text = _with_ellipses(node.args[0])
            if text is not None:
                yield node.func.id, text


def _quoted() -> list[str]:
    page = PROJECT / "docs" / "operations" / "troubleshooting.md"
    return re.findall(r"\*\*`(.+?)`\*\*", page.read_text())


def test_every_message_in_troubleshooting_is_one_the_code_gives() -> None:
    found = [
        text
        for source in sorted(SOURCES.rglob("*.py"))
        for node in ast.walk(ast.parse(source.read_text()))
        if (text := _with_ellipses(node)) is not None
    ]
    assert len(_quoted()) > 100
    assert not [quote for quote in _quoted() if not any(quote in text for text in found)]


@pytest.mark.parametrize("door", DOORS)
def test_every_error_raised_at_a_users_door_is_in_troubleshooting(door: str) -> None:
    quotes = _quoted()
    left_out = [
        f"{source.name}: {text}"
        for source in sorted(SOURCES.glob(door))
        for name, text in _calls(source)
        if name in errors.__dict__ and name != "FormatError" and re.search(r"\w", text)
        if not any(quote in text for quote in quotes)
    ]
    assert not left_out, "say there why it comes, and what to do"
