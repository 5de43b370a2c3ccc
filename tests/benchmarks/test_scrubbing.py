"""The benchmark of looking for damage still runs, and what it shows gets into the document."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from code_blocks import PROJECT


def test_the_quick_benchmark_of_scrubbing_runs() -> None:
    ended = subprocess.run(
        [sys.executable, str(PROJECT / "benchmarks" / "scrubbing.py"), "--quick"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "| share of a core that takes |" in ended.stdout


def test_its_table_gets_a_section_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))
    scrubbing = importlib.import_module("scrubbing")
    page = tmp_path / "page.md"
    page.write_text((PROJECT / "docs" / "performance.md").read_text())
    for text in ("one", "two"):
        scrubbing.put_into(page, text)
    written = page.read_text()
    assert written.count(scrubbing.TITLE) == 1
    assert "<!-- scrubbing -->\ntwo\n<!-- /scrubbing -->" in written
