"""The table of adapters is what integrations.toml says, and says nothing that no test shows."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from support.project.code_blocks import PROJECT


@pytest.fixture
def generator() -> ModuleType:
    script = PROJECT / "docs" / "generate_integrations.py"
    spec = importlib.util.spec_from_file_location("generate_integrations", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_integrations_is_what_was_written_down(generator: ModuleType) -> None:
    assert generator.PAGE.read_text() == generator.render(), "run `make docs`"


def test_every_adapter_and_every_list_of_packages_has_a_row(generator: ModuleType) -> None:
    lists = {path.stem for path in generator.TESTS.glob("*.txt")}
    lists -= {"across", "optimizers", "accelerate_deepspeed"}  # of several, or of none
    modules = PROJECT / "src" / "holdfast" / "integrations"
    assert set(generator.rows()) == lists
    for name, row in generator.rows().items():
        assert (modules / f"{name}.py").is_file()
        assert (PROJECT / "docs" / "guides" / f"{row['guide']}.md").is_file()
        assert generator.tried(row).startswith(generator.least(row))


def test_a_refusal_that_no_test_makes_is_not_told(
    generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = generator.ROWS.read_text()
    assert "overlap_param_gather=True" in text
    (tmp_path / "rows.toml").write_text(text.replace("overlap_param_gather=True", "full moon"))
    monkeypatch.setattr(generator, "ROWS", tmp_path / "rows.toml")
    with pytest.raises(SystemExit, match="megatron: no test has 'full moon'"):
        generator.render()


def test_every_framework_of_the_table_is_killed(generator: ModuleType) -> None:
    kills = (generator.TESTS / "test_random_kills.py").read_text()
    for name in generator.rows():
        assert f'"{name}"' in kills or f"play_{name}" in kills


def test_a_framework_without_a_measurement_says_so(
    generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "RESULTS", tmp_path)
    assert generator.render().count("not measured") == 2 * len(generator.rows())
    figures = {"over_checkpointer": 1.004, "over_checkpointer_s": 0.0002, "over_framework": 1.1}
    found = {"date": "2026-01-01", "frameworks": {"ray": {"thread": figures, "step": figures}}}
    (tmp_path / "adapters_x.json").write_text(json.dumps(found))
    assert "| 1.00 (+0.2 ms); 1.10, 1.10 |" in generator.render()
    work = {"step_s": 0.04, "own_s": 0.0003}
    work |= {"checkpointer_s": 0.001, "checkpointer_below_s": 0.0011}
    found["frameworks"] = {"ray": {"work": work}}
    (tmp_path / "adapters_x.json").write_text(json.dumps(found))
    assert "| adds 0.40 ms of 40 |" in generator.render()
