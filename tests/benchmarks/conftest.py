"""Tests run benchmarks through their door, in a process of their own, or import the modules."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from support.project.code_blocks import PROJECT

Bench = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def bench() -> Bench:
    """Run ``python -m benchmarks`` with these arguments."""

    def run(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "benchmarks", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=PROJECT, **more
        )

    return run


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of benchmarks can be imported."""
    monkeypatch.syspath_prepend(str(PROJECT))
