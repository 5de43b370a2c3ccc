"""The names keepers ask each other for never change: keepers of one run may be of two versions."""

from __future__ import annotations

import re
from pathlib import Path

from holdfast.format.manifest import Generation
from holdfast.transport.wire import http as names
from holdfast.transport.wire.http import check_names

SOURCES = Path(__file__).parents[2] / "src" / "holdfast"


def test_the_names_are_these() -> None:
    assert names.generation_name(Generation(3, 1200)) == "3-1200"
    found = {
        names.INVENTORY: "/inventory",
        names.image_path("a0", 7): "/images/a0/7",
        names.layout_path("0f"): "/layouts/0f",
        names.parity_path("a0", 2, 1): "/parity/a0/2/1",
        names.record_path("a0", 2, 1): "/records/a0/2/1",
        names.manifest_path("a0", 9, 2, 1): "/windows/a0/9/2/1",
        names.window_path("a0", 9, 2, 1, 33): "/windows/a0/9/2/1/33",
    }
    for path, expected in found.items():
        assert path == expected
        check_names(path, "3-1200")
    check_names(names.window_path("A" * 128, 10**15, 127, 127, 10**9), "3-1200")


def test_they_are_written_down_in_one_place() -> None:
    literal = re.compile(r"""["'}]/(inventory|images|layouts|parity|records|windows)["'/]""")
    found = {source.name for source in SOURCES.rglob("*.py") if literal.search(source.read_text())}
    assert found == {"http.py"}
