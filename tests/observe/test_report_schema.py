"""What ``holdfast report --json`` prints is what its schema says: every key, and its type."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.observe.clocks import ClockOffset
from holdfast.observe.findings import find, to_plain
from holdfast.observe.report import LinkFigures, RunMesh, to_json
from holdfast.observe.report_builder import read_report
from holdfast.observe.report_rows import table_by
from support.runs.told import tell_sick_run

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "generate_report_schema.py"
TYPES: dict[str, Any] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}


def generated() -> Any:
    spec = importlib.util.spec_from_file_location("generate_report_schema", SCRIPT)
    assert spec is not None and spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    return generator


def faults(value: Any, schema: dict[str, Any], parts: dict[str, Any], at: str) -> list[str]:
    """Where a document is not what a schema says; a key that the schema lacks is one."""
    if "$ref" in schema:
        schema = parts[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        found = [faults(value, each, parts, at) for each in schema["anyOf"]]
        return [] if [] in found else [f"{at}: {value!r} is none of these", *found[0]]
    if not isinstance(value, TYPES[schema["type"]]):
        return [f"{at}: {value!r} is no {schema['type']}"]
    if isinstance(value, list):
        items = schema.get("items", schema.get("prefixItems", {}))
        kinds = items if isinstance(items, list) else [items] * len(value)
        if not items:
            kinds = schema.get("prefixItems", [])
        return [
            each
            for n, (one, kind) in enumerate(zip(value, kinds, strict=True))
            for each in faults(one, kind, parts, f"{at}[{n}]")
        ]
    if not isinstance(value, dict):
        return []
    known = schema.get("properties", {})
    missing = [f"{at} lacks {name}" for name in schema.get("required", ()) if name not in value]
    rest = schema.get("additionalProperties")
    for name, one in value.items():
        kind = known.get(name, rest)
        missing += (
            [f"{at}.{name} is not in the schema"]
            if not isinstance(kind, dict)
            else faults(one, kind, parts, f"{at}.{name}")
        )
    return missing


def test_the_schema_is_what_the_classes_say() -> None:
    generator = generated()
    for page, schema in (
        (generator.PAGE, generator.document()),
        (generator.BY_PAGE, generator.by_document()),
    ):
        assert page.read_text() == generator.render(schema), "run `make docs`"


@pytest.mark.parametrize("by", ["rank", "host", "mesh", "link"])
def test_a_table_is_what_its_schema_says(by: str, tmp_path: Path) -> None:
    tell_sick_run(tmp_path)
    report = dataclasses.replace(
        read_report(tmp_path),
        mesh=RunMesh(("dp", "tp"), (2, 2)),
        links=(LinkFigures("b", "a", 4, 0.1, 0.2, 0.3),),
        clocks=(ClockOffset("b", 2.5, None),),
    )
    plain = json.loads(json.dumps(table_by(report, by)))
    schema = json.loads(generated().BY_PAGE.read_text())
    assert plain["rows"] and not faults(plain, schema, schema["$defs"], "table")
    assert faults(plain | {"new": 1}, schema, schema["$defs"], "table")


def test_the_document_is_what_the_schema_says(tmp_path: Path) -> None:
    tell_sick_run(tmp_path)
    report = read_report(tmp_path)
    document = to_json(report) | {"findings": to_plain(find(report))}
    schema = json.loads(generated().PAGE.read_text())
    plain = json.loads(json.dumps(document))
    assert plain["findings"] and plain["saves"] and plain["reliability"]["interruptions"]
    assert not faults(plain, schema, schema["$defs"], "report")
    assert set(schema["properties"]) == set(plain)
    plain["ledger"]["elapsed_s"] = "long"
    plain["new"] = 1
    found = faults(plain, schema, schema["$defs"], "report")
    assert any("elapsed_s" in each for each in found) and "report.new is not in the schema" in found
