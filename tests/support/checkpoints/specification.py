"""docs/format/v1.md as values: its tables, limits, rules and its hexdump."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[3] / "docs" / "format" / "v1.md"
_REQUIRED = object()

Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class Field:
    """One line of a table of fields."""

    name: str
    type: str
    is_required: bool
    default: Any


@cache
def text() -> str:
    return PAGE.read_text(encoding="utf-8")


@cache
def sections() -> dict[str, str]:
    """The text below each heading; the heading of a document is its first word."""
    found = {"": ""}
    heading, is_code = "", False
    for line in text().splitlines():
        is_code ^= line.startswith("```")
        if line.startswith("#") and not is_code:
            heading = line.lstrip("# ").split(":")[0]
            assert heading not in found, f"two sections are called {heading!r}"
            found[heading] = ""
        else:
            found[heading] += line + "\n"
    return found


def rows(heading: str, first_column: str) -> list[Row]:
    """The rows of the table below ``heading`` whose first column is called that."""
    lines = iter(sections()[heading].splitlines())
    for line in lines:
        if line.startswith(f"| {first_column} |"):
            names = _cells(line)
            next(lines)
            return [dict(zip(names, _cells(row), strict=True)) for row in _rest(lines)]
    raise AssertionError(f"no table of {first_column!r} below {heading!r}")


def _rest(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("|"):
            return
        yield line


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def fields(heading: str) -> dict[str, Field]:
    """A table of fields."""
    found = {}
    for row in rows(heading, "field"):
        name = row["field"].strip("`")
        is_required = row["required"] == "yes"
        default = None if is_required else json.loads(row["default"].strip("`"))
        assert is_required or row["required"] == "no"
        found[name] = Field(name, row["type"], is_required, default)
    return found


@cache
def limits() -> dict[str, int]:
    return {row["limit"]: int(row["value"]) for row in rows("10. Limits", "limit")}


@cache
def dtypes() -> dict[str, tuple[int, bool]]:
    """dtype -> (bytes of an element, whether it is stored as U8)."""
    return {
        row["dtype"].strip("`"): (
            int(row["bytes"]),
            {"U8": True, "itself": False}[row["stored as"]],
        )
        for row in rows("7. Element types", "dtype")
    }


@cache
def tags() -> tuple[str, ...]:
    return tuple(row["tag"].strip("`") for row in rows("6. Values", "tag"))


@cache
def metadata_keys() -> tuple[str, ...]:
    return tuple(row["key"].strip("`") for row in rows("5. Images", "key"))


@cache
def rules() -> tuple[int, ...]:
    """The numbers of all rules, in the order in which they are stated."""
    return tuple(int(number) for number in re.findall(r"^\*\*R(\d+)\*\* ", text(), re.MULTILINE))


def code_blocks(heading: str, language: str = "") -> list[str]:
    """What stands between fences below ``heading``."""
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, sections()[heading], re.MULTILINE | re.DOTALL)
