"""Lives of a training run: processes that train, are killed, and are started again.

The training is real (hooked optimizer steps on sharded parameters through a Checkpointer), but
its gradients are all -1, so that after step s every element of every tensor is a known whole
number. One look at the elements therefore tells which step each of them is of: a mixture of two
steps, a stale block or a lost update cannot hide.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import holdfast
from launch import PRELOADED

ROWS = 61  # divides by neither 2 nor 3
COLUMNS = 8192


@dataclass(frozen=True)
class Life:
    """How one start of the run is to go."""

    root: str
    directory: str
    world: int
    steps: int
    storage: int | None = 7
    layout: str = "fsdp"
    pause_s: float = 0.002
    options: dict[str, Any] = field(default_factory=dict)


class Net(nn.Module):
    """Two large parameters, one small one, a buffer that changes at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.zeros(ROWS, COLUMNS))
        self.two = nn.Parameter(torch.zeros(ROWS, COLUMNS))
        self.small = nn.Parameter(torch.zeros(5))
        self.register_buffer("seen", torch.zeros(3))


def build(layout: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model and the state around it."""
    model: Any = Net()
    if layout == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=1.0)
    return model, {"model": model, "optimizer": optimizer, "count": -1, "rng": holdfast.Rng()}


def take_step(model: Any, state: dict[str, Any], step: int) -> None:
    """After it, every parameter element is triangle(step + 1), every momentum -(step + 1)."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, -1.0)
    state["optimizer"].step()
    model.seen.fill_(float(step))
    state["count"] = step


def wrong_elements(model: Any, state: dict[str, Any], step: int) -> list[str]:
    """Leaves of this rank with elements that are not of ``step``."""
    parameter, momentum = (step + 1) * (step + 2) / 2, -(step + 1)
    expected: list[tuple[str, torch.Tensor, float]] = [("seen", model.seen, float(step))]
    for name, tensor in model.named_parameters():
        local = getattr(tensor, "_local_tensor", tensor)
        kept = state["optimizer"].state[tensor]["momentum_buffer"]
        expected.append((name, local, parameter))
        expected.append((f"{name}.momentum", getattr(kept, "_local_tensor", kept), momentum))
    wrong = [
        f"{name}: {sorted(set(tensor.flatten().tolist()))[:4]} instead of {value}"
        for name, tensor, value in expected
        if not bool((tensor == value).all())
    ]
    return wrong + ([] if state["count"] == step else [f"count is {state['count']}"])


def _progress_path(directory: str, rank: int) -> Path:
    return Path(directory) / f"progress-{rank}"


def read_progress(directory: str, world: int) -> int:
    """The last step that every rank completed in this life; -1 when there is none."""
    found = []
    for rank in range(world):
        try:
            text = _progress_path(directory, rank).read_text()
            found.append(int(text or -1))
        except FileNotFoundError:
            found.append(-1)
    return min(found)


def _live(rank: int, life: Life, store: str, path: list[str], environment: dict[str, str]) -> None:
    sys.path[:] = path
    for name in [n for n in os.environ if n.startswith("HOLDFAST_")]:
        del os.environ[name]
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        if life.world > 1 or life.layout == "fsdp":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            dist.init_process_group(
                "gloo", store=dist.FileStore(store, life.world), rank=rank, world_size=life.world
            )
        _train(rank, life)
    except BaseException:
        (Path(life.directory) / f"error-{rank}").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def _train(rank: int, life: Life) -> None:
    directory = Path(life.directory)
    model, state = build(life.layout)
    storage = None if life.storage is None else holdfast.Every(steps=life.storage)
    checkpointer = holdfast.Checkpointer(life.root, state, storage=storage, **life.options)
    restored = checkpointer.restore()
    first = restored.step + 1 if restored else 0
    wrong = wrong_elements(model, state, restored.step) if restored else []
    source = restored.source if restored else ""
    report = f"{first - 1} {source} {wrong}"
    (directory / f"restored-{rank}.tmp").write_text(report)
    (directory / f"restored-{rank}.tmp").rename(directory / f"restored-{rank}")
    with _progress_path(life.directory, rank).open("w", buffering=1) as progress:
        for step in range(first, first + life.steps):
            if dist.is_initialized():
                dist.barrier()  # stands for the collectives of a backward
            time.sleep(random.random() * life.pause_s)
            take_step(model, state, step)
            progress.seek(0)
            progress.write(f"{step:08d}")
            progress.flush()
            checkpointer.step(step)
    checkpointer.close()


class Lives:
    """Starts lives of one run, one after the other, and tells how each went."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.random = random.Random(seed)
        self.completed = -1
        self._processes: list[BaseProcess] = []
        self.directory = ""

    def start(self, world: int, steps: int, **options: Any) -> Life:
        """Begin a life; its processes run until they end or are killed."""
        self.directory = tempfile.mkdtemp(prefix="life-", dir=self.root.parent)
        life = Life(str(self.root), self.directory, world, steps, **options)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        environment = {n: v for n, v in os.environ.items() if n.startswith("HOLDFAST_")}
        store = str(Path(self.directory) / "store")
        self._processes = []
        for rank in range(world):
            arguments = (rank, life, store, list(sys.path), environment)
            process = context.Process(target=_live, args=arguments)
            process.start()
            self._processes.append(process)
        return life

    def wait_restored(self, world: int, timeout_s: float = 60.0) -> tuple[int, str]:
        """(step, source) the life went on from; AssertionError when any element was wrong."""
        deadline = time.monotonic() + timeout_s
        paths = [Path(self.directory) / f"restored-{rank}" for rank in range(world)]
        while not all(path.exists() for path in paths):
            errors = list(Path(self.directory).glob("error-*"))
            assert not errors, errors[0].read_text()
            assert time.monotonic() < deadline, "the ranks did not restore in time"
            time.sleep(0.01)
        reports = [path.read_text().split(" ", 2) for path in paths]
        for rank, (step, _, wrong) in enumerate(reports):
            assert wrong == "[]", f"rank {rank} restored step {step} wrongly: {wrong}"
        assert len({report[0] for report in reports}) == 1, f"different steps: {reports}"
        return int(reports[0][0]), reports[0][1]

    def kill(self, ranks: list[int]) -> None:
        """SIGKILL these ranks."""
        for rank in ranks:
            if self._processes[rank].is_alive():
                os.kill(self._processes[rank].pid or 0, signal.SIGKILL)

    def end(self, world: int) -> int:
        """Kill what still runs, as a launcher does; the last step all ranks completed."""
        self.kill(list(range(world)))
        for process in self._processes:
            process.join(10)
        return read_progress(self.directory, world)

    def __enter__(self) -> Lives:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(list(range(len(self._processes))))

    def wait_end(self, timeout_s: float = 60.0) -> None:
        """Wait for a life that ends by itself."""
        for process in self._processes:
            process.join(timeout_s)
        errors = [p.read_text() for p in Path(self.directory).glob("error-*")]
        alive = [n for n, p in enumerate(self._processes) if p.is_alive()]
        self.kill(alive)
        assert not errors, "\n".join(errors)
        assert not alive, f"ranks {alive} did not end"
