"""``holdfast demo``: only the way in; the demo itself has tests of its own."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from holdfast.cli import main


def test_demo_hands_its_options_on_and_its_exit_code_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[argparse.Namespace] = []

    def demo(args: argparse.Namespace) -> int:
        given.append(args)
        return 1

    fake = ModuleType("holdfast.demo")
    vars(fake)["main"] = demo
    monkeypatch.setitem(sys.modules, "holdfast.demo", fake)
    assert main(["demo", "--out", "somewhere", "--seed", "7"]) == 1
    assert (given[0].out, given[0].seed, given[0].json) == ("somewhere", 7, False)
    assert given[0].hosts is None
    assert main(["demo", "--hosts", "4"]) == 1
    assert given[1].hosts == 4
    assert main(["demo", "--hosts", "2"]) == 2


WITHOUT_MATPLOTLIB = """
import importlib.util, sys
from importlib.machinery import PathFinder

class Hidden(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] == "matplotlib":
            return None
        return super().find_spec(name, path, target)

sys.meta_path = [Hidden if finder is PathFinder else finder for finder in sys.meta_path]
from holdfast.cli import main
raise SystemExit(main(["demo", "--out", sys.argv[1]]))
"""


def test_a_demo_without_matplotlib_says_what_to_install(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_MATPLOTLIB, str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "pip install 'holdfast[demo]'" in ended.stderr
    assert not (tmp_path / "out").exists()
