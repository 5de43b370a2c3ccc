"""The tree can be read from its names: one subject a file, one name for one thing."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections import defaultdict
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
SOURCE = PROJECT / "src" / "holdfast"
FILES = sorted(SOURCE.rglob("*.py"))
#: An event and a result that users know by this name.
SHARED_CLASS_NAMES = {"Restored"}
MOST_LINES = 600
#: Packages of which a trainer's or keeper's start imports more than a file or two.
LOADED_BY_TRAINING = ["accelerator", "capture", "coordinator", "format", "geometry", "keeper"]
LOADED_BY_TRAINING += ["parity", "persist", "policy", "protocol", "restore", "state", "storage"]
LOADED_BY_TRAINING += ["transport"]
PUBLIC_DATACLASSES = ["Every", "FlatBuffer", "FlatShard", "Keep", "LocalPatch", "Patch"]
PUBLIC_DATACLASSES += ["RestorePlan", "Restored", "Seen", "Shard"]


def test_the_code_map_is_what_the_captions_say() -> None:
    script = PROJECT / "docs" / "generate_code_map.py"
    spec = importlib.util.spec_from_file_location("generate_code_map", script)
    assert spec is not None and spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.PAGE.read_text() == generator.render(), "run `make docs`"


def test_the_formatters_style_is_the_style() -> None:
    written = [
        path
        for name in ("src", "tests", "benchmarks", "docs", "examples")
        for path in (PROJECT / name).rglob("*.py")
    ]
    mark = re.compile(r"#\s*fmt: (skip|off)")
    assert written and not [path for path in written if mark.search(path.read_text())]


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


def test_values_that_training_loads_are_structs() -> None:
    """Each dataclass takes 0.5 ms of every start (docs/design/0021-values.md)."""
    plain = re.compile(r"dataclass(\((frozen|slots|eq|, |=True|=False)+\))?")
    only_dataclasses_can = re.compile(
        r"cached_property|init=False|repr=False|compare=False|InitVar"
    )
    found = [
        f"{path.relative_to(SOURCE)}: {node.name}"
        for path in FILES
        if path.relative_to(SOURCE).parts[0] in LOADED_BY_TRAINING
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and any(plain.fullmatch(ast.unparse(one)) for one in node.decorator_list)
        and node.name not in PUBLIC_DATACLASSES
        and not only_dataclasses_can.search(ast.unparse(node))
    ]
    assert found == []


def test_no_file_is_too_long_to_be_read_in_one_sitting() -> None:
    lengths = {str(path): path.read_text().count("\n") for path in FILES}
    assert not {path: lines for path, lines in lengths.items() if lines > MOST_LINES}
