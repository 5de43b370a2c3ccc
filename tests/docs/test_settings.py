"""Every setting that the code reads is in the README's table, and known to ``holdfast doctor``."""

from __future__ import annotations

import re
from pathlib import Path

from holdfast.cli.doctor.host_findings import SETTINGS

PROJECT = Path(__file__).parents[2]
_NAME = re.compile(r"HOLDFAST_[A-Z]+(?:_[A-Z]+)*")


def test_settings_in_the_sources_in_the_readme_and_of_doctor_are_the_same() -> None:
    sources = (PROJECT / "src").rglob("*.py")
    named = {name for source in sources for name in _NAME.findall(source.read_text())}
    readme = (PROJECT / "README.md").read_text()
    table = re.findall(r"^\| `(HOLDFAST_[A-Z_]+)` \|", readme, re.MULTILINE)
    assert named == set(SETTINGS) == set(table)
    assert len(table) == len(set(table)) and len(SETTINGS) == len(set(SETTINGS))
