"""The page of alerts is what the rules say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from holdfast.observe.findings import RULES

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "generate_alerts.py"


def test_the_page_is_what_the_rules_say() -> None:
    spec = importlib.util.spec_from_file_location("generate_alerts", SCRIPT)
    assert spec is not None and spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    page = generator.PAGE.read_text()
    assert page == generator.render(), "run `make docs`"
    assert all(f"## `{rule.name}`" in page for rule in RULES)


def test_every_rule_has_a_name_of_its_own_and_they_come_by_severity() -> None:
    severities = [rule.severity for rule in RULES]
    assert severities == sorted(severities, key=["critical", "warning", "notice"].index)
    assert len({rule.name for rule in RULES}) == len(RULES)
