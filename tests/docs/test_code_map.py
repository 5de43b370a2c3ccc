"""The tree can be read from its names: one subject a file, one name for one thing."""

from __future__ import annotations

import ast
import importlib.util
from collections import defaultdict
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
SOURCE = PROJECT / "src" / "holdfast"
FILES = sorted(SOURCE.rglob("*.py"))
#: An event and a result that users know by this name.
SHARED_CLASS_NAMES = {"Restored"}
MOST_LINES = 600


def test_the_code_map_is_what_the_captions_say() -> None:
    script = PROJECT / "docs" / "generate_code_map.py"
    spec = importlib.util.spec_from_file_location("generate_code_map", script)
    assert spec is not None and spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.PAGE.read_text() == generator.render(), "run `make docs`"


def test_every_file_has_a_caption() -> None:
    assert not [path for path in FILES if not ast.get_docstring(ast.parse(path.read_text()))]


def test_no_file_name_is_there_twice_within_a_top_level_package() -> None:
    places = defaultdict(list)
    for path in FILES:
        inside = path.relative_to(SOURCE)
        if path.name not in ("__init__.py", "__main__.py") and len(inside.parts) > 1:
            places[inside.parts[0], path.name].append(str(inside))
    assert not [same for same in places.values() if len(same) > 1]


def test_no_class_name_is_there_twice() -> None:
    places = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(SOURCE)))
    twice = {name: same for name, same in places.items() if len(same) > 1}
    assert not {name: twice[name] for name in twice.keys() - SHARED_CLASS_NAMES}


def test_no_file_is_too_long_to_be_read_in_one_sitting() -> None:
    lengths = {str(path): path.read_text().count("\n") for path in FILES}
    assert not {path: lines for path, lines in lengths.items() if lines > MOST_LINES}
