"""Workers of Ray Train in real processes: one is killed, Ray starts all again, and they go on to
the bit. Without Ray, which `make integrations` installs, these are skipped.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import holdfast
from holdfast.errors import UsageError
from integrations.real_runs import check_same, needs, said
from support.project.code_blocks import PROJECT

needs_it = needs("ray")
RUN = Path(__file__).with_name("ray_run.py")
SOURCES = os.pathsep.join(str(PROJECT / name) for name in ("src", "tests"))


def run(
    root: Path, step: int = -1, place: str = "none", **options: Any
) -> tuple[list[str], dict[str, Any]]:
    """Runs two workers to their end; returns what they say, and what Ray has as its result."""
    env = os.environ | {"PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"}
    # Ray ends workers where the machine's memory is nearly full, whoever has it.
    env["RAY_memory_monitor_refresh_ms"] = "0"
    command = [sys.executable, str(RUN), str(root), str(step), place, json.dumps(options)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (line.partition(" ") for line in done.stdout.splitlines())
    result = {name: json.loads(rest) for name, _, rest in lines if name in ("reference", "metrics")}
    return said(root), result


def steps_of(lines: list[str]) -> list[str]:
    return [line for line in lines if "restored" not in line and ": killed " not in line]


def restores_of(lines: list[str]) -> list[str]:
    return sorted(line for line in lines if "restored" in line)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("unbroken") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_ARENA_DIR", str(root.parent))
        lines, result = run(root)
    assert result["reference"][1:2] == ["1-19"], "the newest that was durable before the last step"
    return lines


@needs_it
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("step", "place", "victim"),
    [
        (9, "update", 0),
        pytest.param(14, "report", 1, marks=pytest.mark.slow),
        pytest.param(20, "forward", 1, marks=pytest.mark.slow),
    ],
)
def test_a_killed_worker_of_ray_goes_on_from_memory(
    step: int, place: str, victim: int, tmp_path: Path, unbroken: list[str]
) -> None:
    root = tmp_path / "run"
    found, result = run(root, step, place, victim=victim)
    assert Path(f"{root}.died").exists(), "it was killed"
    check_same(steps_of(found), unbroken)
    (one, other) = (line.split()[2:4] for line in restores_of(found))
    assert one == other and one[1] == "memory" and 0 <= step - int(one[0]) <= 1
    assert result["reference"][0] == f"{root}-ray/run/holdfast", "below the storage path"


@needs_it
@pytest.mark.timeout(600)
def test_workers_of_ray_whose_memory_is_gone_go_on_from_storage(
    tmp_path: Path, unbroken: list[str]
) -> None:
    found, _ = run(tmp_path / "run", 13, "update", clear=True)
    check_same(steps_of(found), unbroken)
    assert [line.split()[2:4] for line in restores_of(found)] == [["9", "storage"]] * 2


@needs_it
@pytest.mark.timeout(600)
def test_a_checkpoint_of_ray_stands_for_one_of_holdfast(tmp_path: Path) -> None:
    root, own = tmp_path / "run", str(tmp_path / "own")
    _, result = run(root, own=own, wait=12, steps=12)
    path, generation, metrics = result["reference"]
    assert (path, generation) == (own, "1-12"), "a step that was waited for, in a root of its own"
    assert metrics == result["metrics"]
    with holdfast.open(path, generation) as checkpoint:
        assert checkpoint.values["seen"] == {"samples": 48}


@needs_it
def test_mistakes_with_ray_are_named(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyarrow import fs
    from ray.train import Checkpoint

    from holdfast.integrations import ray as adapter

    state = {"model": nn.Linear(2, 2)}
    with pytest.raises(UsageError, match="is no worker of Ray Train"):
        adapter.checkpointer(state)
    with pytest.raises(
        UsageError, match=r"call holdfast\.integrations\.ray\.checkpointer\(state\)"
    ):
        adapter.report({})
    with pytest.raises(UsageError, match="stands for no checkpoint of Holdfast"):
        adapter.reference(Checkpoint.from_directory(tmp_path))

    storage = SimpleNamespace(storage_filesystem=fs.LocalFileSystem())
    storage.experiment_fs_path = f"{Path.home()}/ray_results/run"
    context = SimpleNamespace(
        get_storage=lambda: storage, get_world_size=lambda: 4, get_local_world_size=lambda: 2
    )
    monkeypatch.setattr(adapter, "_context", lambda: context)
    with pytest.raises(UsageError, match="several nodes and no storage_path"):
        adapter.checkpointer(state)
    storage.storage_filesystem = SimpleNamespace(type_name="hdfs")
    with pytest.raises(UsageError, match="filesystem of type hdfs, where Holdfast has no store"):
        adapter.checkpointer(state)
    storage.storage_filesystem = SimpleNamespace(type_name="gcs")
    assert adapter._root_of(context) == f"gs://{storage.experiment_fs_path}/holdfast"
    with pytest.raises(UsageError, match="keys ray, which are the adapter's own"):
        adapter.checkpointer({**state, "ray": 1}, tmp_path)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "x.ckpt").touch()
    with pytest.raises(UsageError, match="a file of Lightning, and is no root"):
        adapter.checkpointer(state, tmp_path / "foreign")
    holdfast.save(tmp_path / "other", state, step=3)
    with pytest.raises(UsageError, match=r"not written by holdfast\.integrations\.ray"):
        adapter.checkpointer(state, tmp_path / "other")
    with ThreadPoolExecutor(1) as thread:  # where Ray calls a training function
        made = thread.submit(adapter.checkpointer, state, tmp_path / "a", grace_s=30.0)
        with pytest.raises(UsageError, match="Python allows on the main thread only"):
            made.result()
    with adapter.checkpointer(state, tmp_path / "a") as ckpt:
        assert ckpt.steps == 0 and ckpt.restored is None
        with pytest.raises(UsageError, match="attached to this TrainWorker already"):
            adapter.checkpointer(state, tmp_path / "b")
        monkeypatch.setattr("ray.train.report", lambda *given, **named: None)
        for step in range(1, 4):
            ckpt.report({"loss": 1.0}, step=step)
        assert ckpt._values == {}, "metrics of steps that become no checkpoint are not kept"
    monkeypatch.setattr("ray.__version__", "2.59.0")
    with pytest.raises(UsageError, match=r"needs ray 2\.60 or later, got 2\.59\.0"):
        adapter.checkpointer(state, tmp_path / "a")


@needs_it
@pytest.mark.timeout(600)
def test_the_script_of_rays_page_goes_on_with_the_same_losses(
    tmp_path: Path, arena_dir: Path
) -> None:
    whole, _ = losses_of(tmp_path / "whole")
    found, killed = losses_of(tmp_path / "run", kill_at=17)
    assert killed and found == whole and len(whole) == 30


def losses_of(root: Path, kill_at: int = -1) -> tuple[dict[int, str], bool]:
    """Runs the script of the page, and kills the first worker at a step, once."""
    env = os.environ | {"PYTHONPATH": SOURCES, "RAY_DEDUP_LOGS": "0"}
    script = PROJECT / "examples" / "integrations" / "ray_train.py"
    found: dict[int, str] = {}
    killed = False
    with subprocess.Popen(
        [sys.executable, str(script), str(root)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as driver:
        assert driver.stdout is not None
        for line in driver.stdout:
            match = re.search(
                r"\) (?:\x1b\[0m )?(\d+) (\d+) ([\d.]+)$", line.replace("\x1b[0m", "")
            )
            if match is None:
                continue
            pid, step, loss = int(match[1]), int(match[2]), match[3]
            assert found.get(step, loss) == loss, "a step that was made twice is the same"
            found[step] = loss
            if step == kill_at and not killed:
                killed = True
                os.kill(pid, signal.SIGKILL)
    assert driver.returncode == 0
    return found, killed
