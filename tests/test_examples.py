"""The examples do what they say, started as a reader would start them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SOURCES = EXAMPLES.parent / "src"


def _environment() -> dict[str, str]:
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return {**os.environ, **quiet, "PYTHONPATH": str(SOURCES)}


def _start_minimal(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / "minimal.py"), str(root)],
        env=_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )


def _torchrun(ranks: int, root: Path, steps: int) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)]
    command += [str(EXAMPLES / "fsdp2.py"), str(root), str(steps)]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("name", ["minimal.py", "fsdp2.py"])
def test_an_example_is_read_at_a_glance(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 60


def test_the_minimal_example_killed_and_started_again_ends_as_if_it_had_not_been(
    tmp_path: Path,
) -> None:
    with _start_minimal(tmp_path / "whole") as whole, _start_minimal(tmp_path / "killed") as killed:
        assert killed.stdout is not None
        before = [killed.stdout.readline() for _ in range(4)]
        killed.send_signal(signal.SIGKILL)
        with _start_minimal(tmp_path / "killed") as again:
            after = again.communicate(timeout=60)[0].splitlines()
        expected = whole.communicate(timeout=60)[0].splitlines()
    assert before[-1].startswith("step 39: ")
    resumed, _, source = after[0].removeprefix("resumed after step ").partition(" from ")
    assert int(resumed) >= 38
    assert source == "memory"
    assert again.returncode == whole.returncode == 0
    assert after[1:] == expected[-len(after[1:]) :]
    assert len(after) > 6


@pytest.mark.slow
def test_the_fsdp2_example_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    assert "done: 12 batches" in _torchrun(2, tmp_path, 12)
    found = _torchrun(3, tmp_path, 20)
    assert "resumed after step 11 from storage on 3 ranks" in found
    assert "done: 20 batches" in found
