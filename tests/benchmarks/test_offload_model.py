"""The page about the model shows what the model says, and that is near what was published."""

from __future__ import annotations

import re
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

from support.project.code_blocks import PROJECT

PAGE = PROJECT / "docs" / "offload-model.md"


@pytest.fixture(scope="module")
def printed(bench: Callable[..., CompletedProcess[str]]) -> dict[str, str]:
    """What the script prints: the name of each block, and its table."""
    ended = bench("offload_model")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return dict(re.findall(r"^(\w+)\n\n((?:\|.*\n)+)", ended.stdout, re.MULTILINE))


def test_the_page_shows_what_the_model_says(printed: dict[str, str]) -> None:
    page = re.findall(r"<!-- (\w+) -->\n(.*?)<!-- /\1 -->", PAGE.read_text(), re.DOTALL)
    assert dict(page) == printed, "run `python -m benchmarks offload_model --document`"


def test_steps_of_one_host_come_out_within_a_twentieth_of_what_was_published(
    printed: dict[str, str],
) -> None:
    rows = [line.strip("| ").split(" | ") for line in printed["comparison"].splitlines()[2:]]
    off = {name: int(last.rstrip("%")) for name, *_, last in rows}
    on_one = {name: by for name, by in off.items() if "on 8" not in name and "on 16" not in name}
    assert len(on_one) == 8
    assert all(abs(by) <= 5 for by in on_one.values()), on_one
