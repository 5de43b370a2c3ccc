"""Starts the scripts of this folder in real processes, kills them, and compares what they said."""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.observe.report_builder import read_report

#: One rank without torchrun, on a CPU.
ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "0",
    "DS_ACCELERATOR": "cpu",
    "DS_SKIP_CUDA_CHECK": "1",
}


def environment() -> dict[str, str]:
    """Returns what a script needs: the tests on its path, and torchrun's store for itself."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return os.environ | {
        "PYTHONPATH": path,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": "1",
    }


def needs(*frameworks: str) -> pytest.MarkDecorator:
    """Returns the mark of a test that is skipped where one of these is missing."""
    is_missing = any(importlib.util.find_spec(one) is None for one in frameworks)
    names = " and ".join(frameworks)
    return pytest.mark.skipif(is_missing, reason=f"needs {names}: make integrations")


#: What a script loads first, which takes long.
FRAMEWORK_OF = {
    "accelerate_run.py": "accelerate",
    "deepspeed_run.py": "deepspeed",
    "lightning_run.py": "lightning.pytorch",
    "torchtitan_run.py": "integrations.torchtitan_on_cpu",
    "trainer_run.py": "transformers.trainer,transformers.models.gpt2.modeling_gpt2",
}
_prepared: dict[str, subprocess.Popen[str]] = {}


def _prepare(script: str) -> subprocess.Popen[str]:
    """Returns a process that has loaded what a script needs; see ``prepared.py``."""
    if script not in _prepared:
        command = [sys.executable, str(Path(__file__).with_name("prepared.py"))]
        _prepared[script] = subprocess.Popen(
            [*command, FRAMEWORK_OF[script]],
            env=environment() | ALONE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        atexit.register(_end, _prepared[script])
    return _prepared[script]


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()  # waits, and closes its pipes


def start(
    script: str,
    root: Path,
    step: int = -1,
    place: str = "none",
    *,
    ranks: int = 1,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Runs a script to its end, which may be the kill at ``place`` of ``step``."""
    path = Path(__file__).with_name(script)
    arguments = [str(path), str(root), str(step), place, json.dumps(options)]
    if ranks == 1 and script in FRAMEWORK_OF:
        return _start_prepared(script, arguments, root)
    command = [sys.executable, *arguments]
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--max-restarts=1"]
        meeting = ["--monitor-interval=0.2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        command[1:1] = [*launcher, *meeting]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280)


def _start_prepared(
    script: str, arguments: list[str], root: Path
) -> subprocess.CompletedProcess[str]:
    process = _prepare(script)
    assert process.stdin is not None and process.stdout is not None
    output = Path(f"{root}.out")
    begin = output.stat().st_size if output.exists() else 0
    process.stdin.write(json.dumps([arguments, environment(), str(output)]) + "\n")
    process.stdin.flush()
    status = process.stdout.readline()
    assert status, f"{script}: the process that starts it has ended"
    told = output.read_text()[begin:]
    return subprocess.CompletedProcess(arguments, int(status), told, told)


def said(root: Path) -> list[str]:
    """Returns what a run wrote down, of all its starts."""
    return Path(f"{root}.log").read_text().splitlines()


def whole(script: str, root: Path, **options: Any) -> list[str]:
    """Returns what a run says that is never killed."""
    done = start(script, root, **options)
    assert done.returncode == 0, done.stderr
    return said(root)


def killed_and_resumed(script: str, root: Path, step: int, place: str, **options: Any) -> list[str]:
    """Returns what a run says that is killed once, and started again."""
    done = start(script, root, step, place, **options)
    if options.get("ranks", 1) == 1:
        assert done.returncode == -9, done.stderr
        done = start(script, root, step, place, **options)
    assert done.returncode == 0, done.stderr
    assert Path(f"{root}.died").exists(), "it was killed"
    return said(root)


def check_same(found: list[str], unbroken: list[str]) -> None:
    """What was said twice was said alike; nothing is said that an unbroken run does not say."""
    assert [line for line in unbroken if line not in found] == []
    assert [line for line in found if line not in unbroken] == []


def check_resumed(root: Path) -> None:
    """The second start lost one step at most."""
    starts = read_report(root).starts
    assert len(starts) == 2 and (starts[1].lost_steps or 0) <= 1


def page_script(command: list[str], root: Path, kill_at: str = "") -> tuple[list[str], int]:
    """Runs the script of a page; returns its lines that begin with a number, and its exit status.

    ``kill_at``: kills it and what it started when a line begins so.
    """
    with subprocess.Popen(
        [sys.executable, *command, str(root)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as run:
        assert run.stdout is not None
        lines = []
        for line in run.stdout:
            lines.append(line.strip())
            if kill_at and line.startswith(kill_at):
                for each in [run.pid, *descendants(run.pid)]:
                    os.kill(each, signal.SIGKILL)
    return [line for line in lines if line[:1].isdigit()], run.returncode


def descendants(pid: int) -> list[int]:
    """Returns the processes that a process started, and those started by them, but not keepers."""
    parents: dict[int, int] = {}
    for each in Path("/proc").glob("[0-9]*"):
        try:
            is_keeper = b"holdfast.keeper" in (each / "cmdline").read_bytes()
            parent = int((each / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if not is_keeper:
            parents[int(each.name)] = parent
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def check_page_script(command: list[str], where: Path, kill_at: str = "17 ") -> None:
    """The script of a page that is killed and started again has the losses of an unbroken run."""
    whole, status = page_script(command, where / "whole")
    assert status == 0 and len(whole) >= 30
    first, status = page_script(command, where / "run", kill_at)
    assert status == -9
    again, status = page_script(command, where / "run")
    assert status == 0 and 0 < len(again) < len(whole), "it went on"
    assert {*first, *again} == set(whole)
