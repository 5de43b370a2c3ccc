"""The benchmark of looking for damage still runs, and what it shows gets into the document."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from support.project.code_blocks import PROJECT


def test_the_quick_benchmark_of_scrubbing_runs(bench: Callable[..., CompletedProcess[str]]) -> None:
    ended = bench("scrubbing", "--quick")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "| share of a core that takes |" in ended.stdout


@pytest.mark.usefixtures("importable")
def test_its_table_gets_a_section_once(tmp_path: Path) -> None:
    results = importlib.import_module("benchmarks.kit.results")
    scrubbing = importlib.import_module("benchmarks.scrubbing")
    page = tmp_path / "page.md"
    page.write_text((PROJECT / "benchmarks" / "results" / "README.md").read_text())
    for text in ("one", "two"):
        results.put(page, "scrubbing", text, scrubbing.SECTION)
    written = page.read_text()
    assert written.count(f"## {scrubbing.SECTION.title}\n") == 1
    assert "<!-- scrubbing -->\ntwo\n<!-- /scrubbing -->" in written


@pytest.mark.usefixtures("importable")
def test_a_section_is_made_where_there_is_none(tmp_path: Path) -> None:
    results = importlib.import_module("benchmarks.kit.results")
    scrubbing = importlib.import_module("benchmarks.scrubbing")
    page = tmp_path / "page.md"
    page.write_text("# Figures\n\n## The keeper\n\nIt starts soon.\n")
    for text in ("one", "two"):
        results.put(page, "scrubbing", text, scrubbing.SECTION)
    written = page.read_text()
    assert written.count(f"## {scrubbing.SECTION.title}\n") == 1
    assert written.index("two\n<!-- /scrubbing -->\n\n## The keeper") > 0
    assert "one" not in written
