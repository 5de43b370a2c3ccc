"""The matrix of faults in the failure model is what is written in faults.toml, and has no gaps."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from code_blocks import PROJECT


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    script = PROJECT / "docs" / "generate_faults.py"
    spec = importlib.util.spec_from_file_location("generate_faults", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_matrix_of_faults_is_what_was_written_down(generator: ModuleType) -> None:
    page = generator.PAGE.read_text()
    assert page == generator.put(page), "run `make docs`"


def test_no_fault_is_told_twice_and_none_diverges_in_silence(generator: ModuleType) -> None:
    told = [(about, row.fault) for about, rows in generator.rows().items() for row in rows]
    assert len(set(told)) == len(told) > 40
    verdicts = {row.verdict for rows in generator.rows().values() for row in rows}
    assert "SILENT_DIVERGENCE" not in verdicts
