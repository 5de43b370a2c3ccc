"""All hosts of a run call their coordinator at once, and all are attached."""

from __future__ import annotations

import asyncio
import importlib
import resource
from pathlib import Path
from types import ModuleType

import pytest

from holdfast.keeper.hosts import open_files
from holdfast.transport.channel import MOST_STRANGERS


@pytest.fixture
def script(importable: None) -> ModuleType:
    return importlib.import_module("benchmarks.storm")


def check(script: ModuleType, root: Path, hosts: int, *, strangers: int, within_s: float) -> None:
    with script.coordinated(root, hosts) as there:
        found = asyncio.run(script.storms(there, strangers, within_s))
    assert [one.hosts for one in found] == [hosts - 1] * 2


def test_hosts_that_all_call_at_once_are_attached_and_again_after_the_coordinator_was_killed(
    script: ModuleType, tmp_path: Path, arena_dir: Path
) -> None:
    """Its keeper is allowed fewer open files than there are hosts, until it asks for more."""
    assert script.FEW_FILES < 400
    check(script, tmp_path, 400, strangers=0, within_s=60)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strangers", [0, 2 * MOST_STRANGERS], ids=["alone", "among strangers"])
def test_thousands_of_hosts_are_attached_whoever_else_calls(
    script: ModuleType, tmp_path: Path, arena_dir: Path, strangers: int
) -> None:
    check(script, tmp_path, 2048, strangers=strangers, within_s=200)


def test_the_limit_of_open_files_is_raised_to_what_is_needed_and_no_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: dict[str, tuple[int, int]] = {"now": (1024, 9000)}
    told: list[str] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, found: limits.update(now=found))
    monkeypatch.setattr(open_files, "warn", told.append)
    needed = open_files.FILES + 2048 * open_files.FILES_OF_HOST
    open_files.allow_open_files(2048)
    assert limits["now"] == (needed, 9000) and not told
    open_files.allow_open_files(2)
    assert limits["now"] == (needed, 9000), "what was raised is not lowered"
    open_files.allow_open_files(8192)
    assert limits["now"] == (9000, 9000)
    (warned,) = told
    assert "may open 9000 files, and with 8192 hosts" in warned
