"""The day with a GPU: its findings, its time, and all of it on the simulated device."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType

import pytest
import torch

from support.project.code_blocks import PROJECT

Bench = Callable[..., CompletedProcess[str]]
FIELDS = (
    "section",
    "name",
    "value",
    "unit",
    "target",
    "met",
    "note",
    "date",
    "device",
    "torch",
    "driver",
)
needs_simulated = pytest.mark.skipif(
    not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")),
    reason="the simulated device needs a C++ compiler",
)


@pytest.fixture
def findings(importable: None) -> ModuleType:
    return importlib.import_module("benchmarks.gpu.findings")


@pytest.fixture
def sections(importable: None) -> ModuleType:
    return importlib.import_module("benchmarks.gpu.sections")


def lines(output: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def test_all_sections_fit_into_its_minutes_and_lead_somewhere(sections: ModuleType) -> None:
    assert sum(one.budget_s for one in sections.SECTIONS) <= 60 * sections.MINUTES
    names = [one.name for one in sections.SECTIONS]
    assert len(set(names)) == len(names)
    for one in sections.SECTIONS:
        module, _, function = one.place.partition(":")
        assert callable(getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function))


def test_a_target_is_met_on_its_side(findings: ModuleType) -> None:
    assert findings.at_most(2).is_met(2) and not findings.at_most(2).is_met(2.1)
    assert findings.at_least(2).is_met(2) and not findings.at_least(2).is_met(1.9)
    assert str(findings.at_most(0.5)) == "at most 0.5"


def test_of_each_section_the_last_run_counts_and_a_line_cut_off_does_not(
    findings: ModuleType, tmp_path: Path
) -> None:
    about = {"device": "d", "torch": "t", "driver": "v"}

    def value(section: str, number: int) -> str:
        return str(
            findings.Finding(section, "x", number, "", "", None, "", "2026-11-01", **about).line()
        )

    def end(section: str, how: str) -> str:
        return str(findings.ending(section, how, "", about).line())

    said = [
        value("a", 1),
        end("a", "out of time"),
        value("b", 2),
        end("b", "done"),
        value("a", 3),
        value("a", 4),
        end("a", "unseen"),
        value("c", 5),
    ]
    path = tmp_path / "found.jsonl"
    path.write_text("\n".join([*said, value("d", 6)[:-5]]))
    found = findings.read(path)
    assert [one.value for one in found if one.name == "x"] == [3, 4, 2, 5]
    assert findings.ended_sections(found) == {"a", "b"}
    assert findings.read(tmp_path / "none") == []


SECTIONS_THAT_FAIL = """
import json, multiprocessing, os, sys, time
from benchmarks.gpu import gpu, lab
from benchmarks.gpu.sections import Section

def found(lab): lab.tell("one", 1)
def raises(lab): lab.tell("one", 1); raise ValueError("broken")
def dies(lab): lab.tell("one", 1); os.kill(os.getpid(), 9)
def hangs(lab): lab.tell("one", 1); time.sleep(60)
def cannot(lab): raise gpu_lab.Unseen("not here")

class Any_(lab.Lab):
    def __init__(self, section, seconds, send): self._section, self._send = section, send
    def about(self): return {"device": "d", "torch": "t", "driver": "v"}
    def device_count(self): return 1

gpu_lab = lab
lab.make_lab = lambda name, seconds, send, is_simulated: Any_(name, seconds, send)
gpu._named = lambda place: globals()[place]
context = multiprocessing.get_context("fork")
for name in ("found", "raises", "dies", "hangs", "cannot"):
    section = Section(name, "", name, 1)
    gpu._run_one(context, section, 3.0, False, lambda one: print(one.line(), flush=True))
gpu._run_one(context, section._replace(name="late"), 0.5, False, lambda one: print(one.line()))
two = section._replace(name="two", devices=2)
gpu._run_one(context, two, 3.0, False, lambda one: print(one.line()))
"""


def test_a_section_that_fails_dies_or_hangs_keeps_what_it_found_and_stops_no_other() -> None:
    paths = [str(PROJECT), str(PROJECT / "src"), str(PROJECT / "tests")]
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SECTIONS_THAT_FAIL)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    said = lines(ended.stdout)
    how = {one["section"]: one["value"] for one in said if one["name"] == "ended"}
    assert how == {
        "found": "done",
        "raises": "failed",
        "dies": "failed",
        "hangs": "out of time",
        "cannot": "unseen",
        "late": "out of time",
        "two": "unseen",
    }, ended.stdout + ended.stderr
    kept = [one["section"] for one in said if one["name"] == "one"]
    assert kept == ["found", "raises", "dies", "hangs"]
    assert all(tuple(one) == FIELDS for one in said)
    assert [one["note"] for one in said if one["section"] == "raises"][-1] == "ValueError: broken"


@needs_simulated
def test_sections_run_on_the_simulated_device_and_are_not_run_again(
    bench: Bench, tmp_path: Path
) -> None:
    file = tmp_path / "found.jsonl"
    options = ["gpu", "--simulated", "--resume", str(file), "--only", "saves", "ring", "contexts"]
    first = bench(*options)
    said = lines(first.stdout)
    assert first.returncode == 0, first.stdout + first.stderr
    how = {one["section"]: one["value"] for one in said if one["name"] == "ended"}
    assert set(how) == {"saves", "ring", "contexts"} and set(how.values()) == {"done"}, said
    assert all(tuple(one) == FIELDS and one["device"] == "simulated" for one in said)
    counted = [one for one in said if "contexts of others" in str(one["name"])]
    assert len(counted) == 4 and all(one["met"] is True for one in counted)
    speeds = [one for one in said if one["section"] in ("saves", "ring") and one["target"]]
    assert speeds and all(one["met"] is None for one in speeds)
    assert lines(file.read_text()) == said
    again = bench(*options)
    assert lines(again.stdout) == [] and again.returncode == 0
    assert "contexts of others" in again.stdout  # in the table
    assert lines(file.read_text()) == said


@needs_simulated
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_day_runs_on_the_simulated_device(bench: Bench) -> None:
    ended = bench("gpu", "--simulated")
    how = {one["section"]: one["value"] for one in lines(ended.stdout) if one["name"] == "ended"}
    assert set(how.values()) <= {"done", "unseen"}, ended.stdout + ended.stderr
    assert len([one for one in how.values() if one == "done"]) >= 16
    missed = [one for one in lines(ended.stdout) if one["met"] is False]
    assert not missed and ended.returncode == 0  # of captures, contexts, accesses: counts


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_it_refuses_politely(bench: Bench) -> None:
    ended = bench("gpu", "--only", "memlock")
    assert ended.returncode == 1
    assert "there is none; --simulated tries it" in ended.stderr
    (only,) = lines(ended.stdout)
    assert (only["value"], only["note"]) == ("unseen", "there is no accelerator")


def test_the_sections_are_listed(bench: Bench, sections: ModuleType) -> None:
    ended = bench("gpu", "--list")
    names = [line.split()[0] for line in ended.stdout.splitlines()]
    assert names == [one.name for one in sections.SECTIONS]
