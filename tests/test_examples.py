"""The examples do what they say, started as a reader would start them."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast

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


def _run(name: str, *arguments: object, ranks: int = 0) -> str:
    """What an example prints, started by python or, on ``ranks``, by torchrun."""
    command = [sys.executable]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", str(ranks)]
    command += [str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: str(path.name))
def test_an_example_is_read_at_a_glance_and_says_how_it_is_started(path: Path) -> None:
    text = path.read_text()
    lines = 100 if path.name == "read_with_only_safetensors.py" else 60
    assert len(text.splitlines()) < lines
    described = ast.get_docstring(ast.parse(text)) or ""
    assert f"examples/{path.name}" in described


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
    assert "done: 12 batches" in _run("fsdp2.py", tmp_path, 12, ranks=2)
    found = _run("fsdp2.py", tmp_path, 20, ranks=3)
    assert "resumed after step 11 from storage on 3 ranks" in found
    assert "done: 20 batches" in found


@pytest.mark.slow
def test_the_tensor_parallel_example_goes_on_with_a_second_dimension(tmp_path: Path) -> None:
    assert "done: step 11 on (1, 2) ranks" in _run("tensor_parallel.py", tmp_path, 12, ranks=2)
    found = _run("tensor_parallel.py", tmp_path, 20, ranks=4)
    assert "resumed after step 11 from storage on (2, 2) ranks" in found
    assert "done: step 19 on (2, 2) ranks" in found


@pytest.mark.slow
def test_the_killed_run_of_the_example_ends_as_the_one_that_was_not() -> None:
    killed, resumed = _run("kill_and_resume.py").splitlines()
    last = re.fullmatch(r"killed after step (\d+): exit code -9", killed)
    found = re.fullmatch(
        r"resumed after step (\d+) from memory; (\d+) losses, identical; step 59: loss .+", resumed
    )
    assert last is not None and found is not None, (killed, resumed)
    assert int(last[1]) - 1 <= int(found[1]) <= int(last[1]) + 1
    assert int(found[2]) == 59 - int(found[1])


@pytest.mark.slow
def test_the_reshard_example_reads_the_same_bits_in_every_layout(tmp_path: Path) -> None:
    root = tmp_path / "run"
    printed = [_run("reshard.py", root, "fsdp", ranks=4), _run("reshard.py", root, "tp", ranks=2)]
    printed.append(_run("reshard.py", root, "plain", ranks=1))
    lines = [line.split(": ") for line in "".join(printed).splitlines()]
    assert [what for what, _ in lines] == [
        "saving step 0 as fsdp on 4 ranks",
        "loaded step 0 as tp on 2 ranks",
        "saving step 1 as tp on 2 ranks",
        "loaded step 1 as plain on 1 ranks",
        "saving step 2 as plain on 1 ranks",
    ]
    bits = [fingerprint for _, fingerprint in lines]
    assert bits[0] == bits[1]
    assert bits[2] == bits[3]
    assert len(set(bits)) == 3


def test_the_reading_example_shows_what_a_checkpoint_holds(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    for step, tokens in ((4, 40), (9, 90)):
        holdfast.save(tmp_path, {"weight": weight + step, "tokens": tokens}, step=step)
    newest, older = (_run("read_a_checkpoint.py", tmp_path, *which) for which in ([], [4]))
    assert newest.startswith("step 9, saved on 1 ranks\n")
    assert re.search(r"weight +F32 +2x3 +first row: mean \+10\.000000\n", newest)
    assert "tokens = 90" in newest
    assert "tokens = 40" in older
