"""The settings that the code reads, those on their page and those of ``doctor`` are the same."""

from __future__ import annotations

import re
from pathlib import Path

from holdfast.cli.doctor.rules.host_rules import SETTINGS

PROJECT = Path(__file__).parents[2]
_NAME = re.compile(r"HOLDFAST_[A-Z]+(?:_[A-Z]+)*")


def test_settings_in_the_sources_on_their_page_and_of_doctor_are_the_same() -> None:
    sources = (PROJECT / "src").rglob("*.py")
    named = {name for source in sources for name in _NAME.findall(source.read_text())}
    page = (PROJECT / "docs" / "operations" / "settings.md").read_text()
    table = re.findall(r"^\| `(HOLDFAST_[A-Z_]+)` \|", page, re.MULTILINE)
    assert named == set(SETTINGS) == set(table)
    assert len(table) == len(set(table)) and len(SETTINGS) == len(set(SETTINGS))
