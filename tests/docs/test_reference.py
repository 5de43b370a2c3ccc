"""The reference says what the signatures and docstrings say, of every public name."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pydoc
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import holdfast
from holdfast import errors, offload, rules

PROJECT = Path(__file__).resolve().parents[2]


def _generator() -> ModuleType:
    script = PROJECT / "docs" / "generate_reference.py"
    spec = importlib.util.spec_from_file_location("generate_reference", script)
    assert spec is not None and spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = generator  # its dataclasses look themselves up there
    spec.loader.exec_module(generator)
    return generator


GENERATOR = _generator()
#: Classes whose objects are given to users, who do not make them: their usage shows where from.
GIVEN = {
    *GENERATOR.RETURNED,
    *("Event", "Kernel", "Kind", "Local", "LocalPatch", "Patch", "Seen", "Table", "Tensors"),
}
NAMES = [
    pytest.param(page, name, one, id=f"{page.removesuffix('.md')}.{name}")
    for page in GENERATOR.PAGES
    for name, one in GENERATOR.public(page)
]


@pytest.mark.parametrize("page", GENERATOR.PAGES)
def test_a_page_is_what_signatures_and_docstrings_say(page: str) -> None:
    assert (GENERATOR.FOLDER / page).read_text() == GENERATOR.render(page), "run `make docs`"


def test_every_public_name_has_an_entry() -> None:
    pages = {page: (GENERATOR.FOLDER / page).read_text() for page in GENERATOR.PAGES}
    for name in holdfast.__all__:
        has_entry = f"\n## `{name}`\n" in pages["holdfast.md"]
        assert has_entry or (hasattr(errors, name) and f"\n* [{name}](" in pages["holdfast.md"])
    assert not [name for name in rules.__all__ if f"\n## `{name}`\n" not in pages["rules.md"]]
    assert not [name for name in offload.__all__ if f"\n## `{name}`\n" not in pages["offload.md"]]
    events = {one.__name__ for one in holdfast.Event.__subclasses__()}
    assert not [name for name in events if f"\n## `{name}`\n" not in pages["events.md"]]


@pytest.mark.parametrize(("page", "name", "one"), NAMES)
def test_every_parameter_is_explained(page: str, name: str, one: Any) -> None:
    calls = [(name, one)] if isinstance(one, type) or inspect.isfunction(one) else []
    if isinstance(one, type):
        if name == "Kind":
            return
        if name in GENERATOR.RETURNED and not hasattr(one, "__dataclass_fields__"):
            calls = []
        calls += [(f"{name}.{key}", of) for key, of in GENERATOR.members(one)]
    silent = [
        f"{where}: {parameter.name}"
        for where, call in calls
        if callable(call)
        for parameter in GENERATOR.described(call)[1]
        if not parameter.text
    ]
    assert not silent, 'say it in the docstring, as "``name``: ..."'


@pytest.mark.parametrize(("page", "name", "one"), NAMES)
def test_the_usage_of_a_name_is_a_call_that_its_signature_takes(
    page: str, name: str, one: Any
) -> None:
    prefix = GENERATOR.PAGES[page][1]
    if page == "events.md":
        return
    tree = ast.parse(GENERATOR.USAGE[prefix + name])
    spoken = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    free = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if free == {"rules"}:
        eval(compile(ast.parse(GENERATOR.USAGE[prefix + name], mode="eval"), name, "eval"))
    if name in GIVEN:
        return
    assert spoken & {f"holdfast.{name}", f"{prefix}{name}"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            f"holdfast.{name}",
            f"{prefix}{name}",
        ):
            keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg}
            if not hasattr(one, "__total__"):
                inspect.signature(one).bind(*node.args, **keywords)
            else:
                assert keywords.keys() <= one.__annotations__.keys()


PLAIN: Any = vars(pydoc)["plaintext"]


def test_help_shows_the_constants_of_rules_and_the_options_of_hybrid_optimizers() -> None:
    shown = pydoc.render_doc(rules, renderer=PLAIN)
    constants = [name for name in rules.__all__ if not callable(getattr(rules, name))]
    assert len(constants) == 7
    assert not [name for name in constants if f"``{name}``: " not in shown]
    adamw = pydoc.render_doc(offload.HybridAdamW, renderer=PLAIN)
    assert not [name for name in offload.Options.__annotations__ if f"``{name}``: " not in adamw]


def test_every_event_that_a_sink_is_handed_is_found_in_holdfast_events() -> None:
    for one in holdfast.Event.__subclasses__():
        if one.__module__.startswith("holdfast"):
            assert getattr(holdfast.events, one.__name__) is one
