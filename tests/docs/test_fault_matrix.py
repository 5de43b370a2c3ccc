"""The matrix of faults in the failure model is what is written in faults.toml, and has no gaps."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from support.project.code_blocks import PROJECT


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


@pytest.mark.parametrize(("moment", "is_met"), [("capture", True), ("full moon", False)])
def test_chaos_is_no_proof_of_what_its_newest_results_did_not_meet(
    generator: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    moment: str,
    is_met: bool,
) -> None:
    one = {"date": "2026-01-01", "hosts": 3, "parity": 1, "verdicts": {"PASS": 1}}
    result = json.dumps(one | {"losses": [{"moment": "capture", "lost": ["a"], "then": "left"}]})
    (tmp_path / "chaos-x.json").write_text(result)
    faults = tmp_path / "faults.toml"
    faults.write_text(
        f"[[fault]]\nabout = 'A'\nwhat = 'b'\nthen = 'c'\nclass = 'PASS'\n"
        f"chaos = {{ moment = '{moment}' }}\n"
    )
    monkeypatch.setattr(generator, "FAULTS", faults)
    monkeypatch.setattr(generator, "RESULTS", tmp_path)
    if is_met:
        assert "| b | c | PASS | `python -m benchmarks chaos` |" in generator.render()
    else:
        with pytest.raises(SystemExit, match=r"'b' is to be shown by python -m benchmarks chaos"):
            generator.render()
