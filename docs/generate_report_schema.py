"""Write the schemas of what `holdfast report --json` prints, without and with `--by`: `make docs`.

The files docs/format/report-v1.schema.json and report-by-v1.schema.json are checked in, and
tests/observe/test_report_schema.py fails when they are not current.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import msgspec

from holdfast.observe.findings import RunFinding
from holdfast.observe.report import Figures, Report
from holdfast.observe.report_rows import LinkTable, SaveTable

PAGE = Path(__file__).parent / "format" / "report-v1.schema.json"
BY_PAGE = PAGE.with_name("report-by-v1.schema.json")
_SCHEMA = "https://json-schema.org/draft/2020-12/schema"
_REF = "#/$defs/{name}"
_NUMBER_OR_NULL = {"anyOf": [{"type": "number"}, {"type": "null"}], "default": None}


def document() -> dict[str, Any]:
    """Returns the schema: that of the report's classes, and what is computed from them."""
    _, parts = msgspec.json.schema_components([Report, RunFinding, Figures], ref_template=_REF)
    parts["Save"]["properties"]["throughput_bytes_per_s"] = _NUMBER_OR_NULL
    for name in ("goodput", "ettr"):
        parts["Ledger"]["properties"][name] = {"type": "number"}
    report = parts.pop("Report")
    report["properties"]["findings"] = _array_of("RunFinding")
    report["properties"]["figures"] = {
        "type": "object",
        "additionalProperties": {"$ref": _REF.format(name="Figures")},
    }
    return {
        "$schema": _SCHEMA,
        "title": "holdfast report --json",
        **{name: value for name, value in report.items() if name != "title"},
        "$defs": dict(sorted(parts.items())),
    }


def _array_of(name: str) -> dict[str, Any]:
    return {"type": "array", "items": {"$ref": _REF.format(name=name)}}


def by_document() -> dict[str, Any]:
    """Returns the schema of a table."""
    tables, parts = msgspec.json.schema_components([SaveTable, LinkTable], ref_template=_REF)
    return {
        "$schema": _SCHEMA,
        "title": "holdfast report --by --json",
        "anyOf": list(tables),
        "$defs": dict(sorted(parts.items())),
    }


def render(schema: dict[str, Any]) -> str:
    """Returns a file."""
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(document()))
    BY_PAGE.write_text(render(by_document()))
