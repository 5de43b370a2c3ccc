"""Tests and sanitizers, run as they are: their verdicts are findings."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.findings import at_most
from benchmarks.gpu.lab import Lab, OutOfTime, Unseen, command
from benchmarks.kit.results import PROJECT

#: The project's own settings name plugins that a machine for a day may not have.
_SETTINGS = """[pytest]
addopts = --import-mode=importlib -ra
pythonpath = . src tests
markers =
    gpu: needs a CUDA device
    slow: takes more than a few seconds
    untimed: takes as long as the machine needs
    one_seed: takes one seed of each profile
    promise: breaks a promise on purpose
    unordered: accesses of the simulated device that may be unordered
"""
_COUNTED = re.compile(r"(\d+) (passed|failed|skipped|xfailed|xpassed|errors?)\b")


def tests(lab: Lab) -> None:
    """All of ``tests/gpu``; of it a file, where the device is simulated."""
    what = ["tests/gpu/test_rewind.py", "--device=sim"] if lab.is_simulated else ["tests/gpu"]
    with tempfile.TemporaryDirectory() as made:
        settings = Path(made, "pytest.ini")
        settings.write_text(_SETTINGS)
        words = [sys.executable, "-m", "pytest", "-q", "-c", str(settings), "--rootdir", "."]
        words += [
            "--confcutdir",
            "tests/gpu",
            "-p",
            "benchmarks.gpu.fixtures",
            "-m",
            "not slow",
            *what,
        ]
        words += ["-p", "no:cacheprovider", "-m", "not slow"]
        done = _run(words, lab.left_s() - 1)
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]]
    counts = {kind.rstrip("s"): int(n) for n, kind in _COUNTED.findall(lines[-1])}
    if not counts:
        raise RuntimeError(f"pytest said nothing that could be counted: {lines[-1]}")
    failed = counts.get("failed", 0) + counts.get("error", 0)
    note = ", ".join(line for line in lines if line.startswith(("FAILED", "ERROR")))
    lab.tell("tests that passed", counts.get("passed", 0))
    lab.tell("tests that failed", failed, "", at_most(0), note[:800], counts=True)
    lab.tell("tests that were skipped", counts.get("skipped", 0), note=lines[-1])


def _run(
    words: list[str], timeout_s: float, **environment: str
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words,
            capture_output=True,
            text=True,
            check=False,
            cwd=PROJECT,
            timeout=max(1.0, timeout_s),
            env=os.environ | environment,
        )
    except subprocess.TimeoutExpired:
        raise OutOfTime(f"{words[0]} was not done after {timeout_s:.0f} s") from None


def sanitizer(lab: Lab) -> None:
    """torch's own sanitizer sees what one thread enqueues, so the copy is made on it."""
    if lab.is_simulated:
        capture_on_this_thread(lab)
        found = lab.unordered()
        note = "; ".join(found)[:400]
        lab.tell("unordered accesses", len(found), "", at_most(0), note, counts=True)
        return
    if not lab.is_cuda():
        raise Unseen("TORCH_CUDA_SANITIZER is for CUDA")
    words = [*command(), "--body", "capture"]
    done = _run(words, lab.left_s() - 1, TORCH_CUDA_SANITIZER="1")
    races = done.stderr.count("CSAN detected")
    note = done.stderr.strip()[-400:] if races or done.returncode else ""
    lab.tell("races that TORCH_CUDA_SANITIZER found", races, "", at_most(0), note)
    lab.tell("the capture under it ended with", done.returncode, "", at_most(0), note)


def compute_sanitizer(lab: Lab) -> None:
    """NVIDIA's sanitizer, where the machine has it and it works beside the driver."""
    found = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if found is None or lab.is_simulated:
        raise Unseen("compute-sanitizer is not installed")
    words = [found, "--tool", "memcheck", *command(), "--body", "capture"]
    done = _run(words, lab.left_s() - 1)
    summary = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line]
    if not summary:
        said = (done.stdout + done.stderr).strip()[-300:]
        raise Unseen(f"compute-sanitizer does not work here: {said}")
    errors = int(re.findall(r"\d+", summary[-1].partition("SUMMARY")[2])[0])
    lab.tell("errors that compute-sanitizer found", errors, "", at_most(0), summary[-1])


def capture_on_this_thread(lab: Lab) -> str:
    """Copy a small model into an image on this thread, several times, with updates between."""
    from support.runs.replicas import Replica

    tensors: dict[str, Any] = {
        f"p{n}": torch.full((64, 64), float(n), device=lab.device) for n in range(8)
    }
    replica = Replica(0, tensors)
    for turn in range(4):
        replica.capture(replica.sample(turn, 4))
        with torch.no_grad():
            for binding in replica.described.bindings:
                if binding.local.is_floating_point():
                    binding.local.add_(1)
    lab.synchronize()
    return "done"
