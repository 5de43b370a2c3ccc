"""``holdfast demo``: only the way in; the demo itself has tests of its own."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from holdfast.cli import main
from support.checkpoints.commands import SOURCE


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


def test_without_matplotlib_the_demo_says_what_to_install(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['matplotlib'] = None\n"
        f"from holdfast.cli import main; sys.exit(main(['demo', '--out', {str(tmp_path)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (
        2,
        "holdfast: UsageError: the demo draws with matplotlib: pip install 'holdfast[demo]'\n",
    )
    assert list(tmp_path.iterdir()) == []
