"""``holdfast demo``: only the way in; the demo itself has tests of its own."""

from __future__ import annotations

import argparse
import sys
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
