"""Lives of a training run: processes that train, are killed, and are started again.

The training is real (hooked optimizer steps on sharded parameters through a Checkpointer), but
its gradients are all -1, so that after step s every element of every tensor is a known whole
number. One look at the elements therefore tells which step each of them is of: a mixture of two
steps, a stale block or a lost update cannot hide. Each rank leaves a signpost that says what it
is doing, and that still says so when it was killed there.

As a script (``lives.py LIFE.json``) this file is one rank of a life under a launcher, or alone.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.capture.task import Timeouts
from holdfast.events import ImageCaptured
from holdfast.protocol.messages import PREEMPTED
from holdfast.testing.runs.journals import Journal
from holdfast.testing.runs.processes import HOST, ForkedRanks
from support.runs.launch import LOOPBACK, PRELOADED
from support.runs.networks import enter

T = TypeVar("T")

ROWS = 61  # divides by neither 2 nor 3
COLUMNS = 8192
#: What a rank is doing, in the order of a life. A kill is aimed at one of them.
PHASES = ("construct", "restore", "meet", "update", "save", "close")


#: Where a program that torchrun started leaves its error.
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


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
    rows: int = ROWS
    #: Whether the ranks meet before each update, as in a backward; without, one may run ahead.
    meets: bool = True
    #: Shorter than the default, where a test would otherwise wait for it.
    patience: dict[str, float] = field(default_factory=dict)
    #: How long every report of a sealed image takes: room to kill between two acts of a save.
    report_s: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    #: On which host each rank is, where they are to be on several.
    hosts: tuple[str, ...] = ()
    #: What is in the environment of each rank alone.
    settings: tuple[dict[str, str], ...] = ()
    #: The network namespace that each rank is in.
    namespaces: tuple[str, ...] = ()
    #: A rank whose state cannot be had at the last step of a run that was told to end, and what
    #: it does instead: "raises" or "stops".
    moody: tuple[int, str] = (-1, "")
    #: A rank that comes so many seconds late to each save.
    late: tuple[int, float] = (-1, 0.0)
    #: A rank with twice the bytes of the others, which has a table alone.
    heavy: int = -1
    #: Where each rank writes a journal of what it does; "": in the directory of the life.
    journals: str = ""
    #: Each rank leaves its error where torchrun reads it.
    leaves_errors: bool = False
    #: A rank whose program ends with an error at this step, each time that it comes there.
    fails: tuple[int, int] = (-1, -1)


class Moody:
    """Part of a state that acts up when the run's last step is saved."""

    def __init__(self, act: str) -> None:
        self._act = act
        self.checkpointer: holdfast.Checkpointer | None = None

    def state_dict(self) -> dict[str, int]:
        if self._act and self._is_last():
            if self._act == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            raise RuntimeError("this cannot be had now")
        return {"mood": 1}

    def _is_last(self) -> bool:
        preemption = self.checkpointer and self.checkpointer._preemption
        if not preemption or preemption._progress is None:
            return False
        return preemption._saver.announcements.was_announced(preemption._progress[0], PREEMPTED)

    def load_state_dict(self, _: dict[str, int]) -> None:
        """There is nothing to it."""


class Net(nn.Module):
    """Two large parameters, one small one, a buffer that changes at every step."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.zeros(rows, COLUMNS))
        self.two = nn.Parameter(torch.zeros(rows, COLUMNS))
        self.small = nn.Parameter(torch.zeros(5))
        self.register_buffer("seen", torch.zeros(3))


def build(layout: str, rows: int = ROWS) -> tuple[nn.Module, dict[str, Any]]:
    """The model and the state around it."""
    model: Any = Net(rows)
    if layout == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=1.0)
    return model, {"model": model, "optimizer": optimizer, "count": -1, "rng": holdfast.Rng()}


def make_table(rank: int, life: Life) -> dict[str, Any]:
    """A table as large as the share of each rank of all else, which one rank has alone, and what
    updates it.
    """
    rows = -(-4 * life.rows // life.world)
    own, first = (rows, 0) if rank == life.heavy else (0, rows if rank > life.heavy else 0)
    table = nn.Embedding(own, COLUMNS)
    holdfast.declare(table.weight, holdfast.Shard((rows, COLUMNS), (first, 0)))
    return {"table": table, "table_optimizer": torch.optim.SGD(table.parameters(), lr=0.0)}


def take_step(model: Any, state: dict[str, Any], step: int) -> None:
    """After it, every parameter element is triangle(step + 1), every momentum -(step + 1)."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, -1.0)
    state["optimizer"].step()
    if "table" in state:
        state["table"].weight.grad = torch.zeros_like(state["table"].weight)
        state["table_optimizer"].step()
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


class Signpost:
    """A rank's last completed step and what it is doing now, readable also after its death."""

    def __init__(self, directory: str | Path, rank: int) -> None:
        path = Path(directory) / f"signpost-{rank}"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._completed = -1

    def say(self, phase: str, completed: int | None = None) -> None:
        """One write, so that a kill leaves the old or the new."""
        self._completed = self._completed if completed is None else completed
        os.pwrite(self._file, f"{self._completed:8d} {phase:<12}".encode(), 0)


def read_signpost(directory: str | Path, rank: int) -> tuple[int, str]:
    """(last completed step, phase) of a rank; (-1, "") before it said anything."""
    try:
        words = (Path(directory) / f"signpost-{rank}").read_text().split()
    except FileNotFoundError:
        words = []
    return (int(words[0]), words[1]) if words else (-1, "")


def read_progress(directory: str, world: int) -> int:
    """The last step that every rank completed in this life; -1 when there is none."""
    return min(read_signpost(directory, rank)[0] for rank in range(world))


def read_restored(directory: str | Path, world: int) -> tuple[int, str] | None:
    """(step, source) that the ranks went on from, once all have restored.

    AssertionError when ranks that have restored hold wrong elements or different steps.
    """
    paths = [Path(directory) / f"restored-{rank}" for rank in range(world)]
    reports = [path.read_text().split(" ", 2) for path in paths if path.exists()]
    assert all(wrong == "[]" for _, _, wrong in reports), f"restored wrongly: {reports}"
    assert len({step for step, _, _ in reports}) <= 1, f"restored different steps: {reports}"
    return (int(reports[0][0]), reports[0][1]) if len(reports) == world else None


def wait_for(
    found: Callable[[], T | None],
    what: str,
    *,
    timeout_s: float,
    pause_s: float = 0.02,
    check: Callable[[], object] = lambda: None,
) -> T:
    """What ``found`` returns once that is something; AssertionError when it does not come.

    ``check`` is called meanwhile, and raises when it can no longer come.
    """
    deadline = time.monotonic() + timeout_s
    while (one := found()) is None:
        check()
        assert time.monotonic() < deadline, f"{what} did not come in time"
        time.sleep(pause_s)
    return one


def _live(rank: int, life: Life) -> None:
    if life.namespaces:
        enter(life.namespaces[rank])
    torch.set_num_threads(1)
    if life.world > 1 or life.layout == "fsdp":
        store = dist.FileStore(f"{life.directory}/store", life.world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=life.world)
    try:
        _train(rank, life)
    except Exception as error:
        if life.leaves_errors:
            said = {"message": {"message": f"{type(error).__name__}: {error}"}}
            _write(Path(os.environ[_ERROR_FILE]), json.dumps(said))
        raise


def _train(rank: int, life: Life) -> None:
    signpost = Signpost(life.directory, rank)
    model, state = build(life.layout, life.rows)
    signpost.say("construct")
    storage = None if life.storage is None else holdfast.Every(steps=life.storage)
    moody = Moody(life.moody[1] if rank == life.moody[0] else "")
    if life.moody[1]:
        state["moody"] = moody
    if life.heavy >= 0:
        state |= make_table(rank, life)
    moody.checkpointer = checkpointer = holdfast.Checkpointer(
        life.root, state, storage=storage, **life.options
    )
    checkpointer._saver.timeouts = Timeouts(**life.patience)
    holdfast.subscribe(lambda event, _: _report(event, life.report_s))
    signpost.say("restore")
    where = Path(life.journals or life.directory)
    journal = Journal(where, rank, incarnation=checkpointer.incarnation)
    journal.write("start", world=life.world, pid=os.getpid())
    restored = checkpointer.restore()
    if restored:
        journal.write(
            "restored",
            step=restored.step,
            parent=restored.generation,
            source=restored.source,
            elapsed_s=restored.elapsed_s,
        )
    first = restored.step + 1 if restored else 0
    wrong = wrong_elements(model, state, restored.step) if restored else []
    source, handle = restored.source if restored else "", None
    _write(Path(life.directory) / f"restored-{rank}", f"{first - 1} {source} {wrong}")

    def advance(step: int) -> holdfast.SaveHandle | None:
        signpost.say("meet")
        if dist.is_initialized() and life.meets:
            dist.barrier()  # stands for the collectives of a backward
        time.sleep(random.random() * life.pause_s)
        if rank == life.late[0]:
            time.sleep(life.late[1])
        if (rank, step) == life.fails:
            raise RuntimeError(f"the loss of step {step} is not a number")
        signpost.say("update")
        take_step(model, state, step)
        signpost.say("save", step)
        journal.write("update", step=step)
        handle = checkpointer.step(step)
        journal.write("over", step=step)
        return handle

    last = first + life.steps
    for step in range(first, last):
        handle = advance(step)
    while handle is not None and life.options.get("parity"):
        try:
            handle.wait_protected(60)
        except holdfast.SnapshotSkipped:  # of a step; not of many in a row
            last += 1
            assert last < first + life.steps + 50
            handle = advance(last - 1)
        else:
            assert handle.state in ("protected", "durable"), handle.state
            break
    signpost.say("close")
    checkpointer.close()
    journal.write("end")
    signpost.say("closed")


def _report(event: holdfast.Event, takes_s: float) -> None:
    if takes_s and isinstance(event, ImageCaptured):
        time.sleep(takes_s)


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


class Lives:
    """Starts lives of one run, one after the other, and tells how each went."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.random = random.Random(seed)
        self.completed = -1
        self._ranks: ForkedRanks | None = None
        self.directory = ""

    def plan(self, world: int, steps: int, **options: Any) -> Life:
        """A new life of this run, for whoever starts its processes."""
        self.directory = tempfile.mkdtemp(prefix="life-", dir=self.root.parent)
        return Life(str(self.root), self.directory, world, steps, **options)

    def start(self, world: int, steps: int, **options: Any) -> Life:
        """Begin a life; its processes run until they end or are killed."""
        life = self.plan(world, steps, **options)
        here = dict(os.environ) | LOOPBACK
        own = life.settings or ({},) * world
        if life.hosts:
            own = tuple({HOST: host} | one for host, one in zip(life.hosts, own, strict=True))
        if life.leaves_errors:
            files = (f"{self.directory}/reply-{rank}.json" for rank in range(world))
            own = tuple(one | {_ERROR_FILE: file} for one, file in zip(own, files, strict=True))
        self._ranks = ForkedRanks(
            Path(self.directory),
            _live,
            life,
            environments=[here | one for one in own],
            preload=PRELOADED,
        )
        return life

    def wait_restored(self, world: int, timeout_s: float = 60.0) -> tuple[int, str]:
        """(step, source) the life went on from; AssertionError when any element was wrong."""
        return self._wait(lambda: read_restored(self.directory, world), "a restore", timeout_s)

    def check_restored(self, world: int) -> None:
        """AssertionError when ranks that have restored hold wrong elements or different steps."""
        read_restored(self.directory, world)

    @property
    def pids(self) -> list[int]:
        """The process numbers of the ranks."""
        return self._ranks.pids if self._ranks else []

    def raise_errors(self) -> None:
        """AssertionError with the traceback of a rank that raised something."""
        errors = self._ranks.errors() if self._ranks else []
        assert not errors, "\n".join(text for _, text in errors)

    def wait_phase(self, rank: int, phases: tuple[str, ...], timeout_s: float = 60.0) -> None:
        """Wait until ``rank`` is in one of ``phases``, or has ended."""
        deadline = time.monotonic() + timeout_s
        while read_signpost(self.directory, rank)[1] not in (*phases, "closed"):
            assert time.monotonic() < deadline, f"rank {rank} did not come to {phases}"
            time.sleep(0.0005)

    def wait_progress(
        self, world: int, step: int, timeout_s: float = 60.0, pause_s: float = 0.01
    ) -> int:
        """Wait until every rank has completed ``step``; the last step all have completed."""

        def reached() -> int | None:
            found = read_progress(self.directory, world)
            return found if found >= step else None

        return self._wait(reached, f"step {step}", timeout_s, pause_s)

    def _wait(
        self, found: Callable[[], T | None], what: str, timeout_s: float, pause_s: float = 0.01
    ) -> T:
        return wait_for(found, what, timeout_s=timeout_s, pause_s=pause_s, check=self.raise_errors)

    def kill(self, ranks: list[int], number: int = signal.SIGKILL) -> None:
        """SIGKILL, or another signal, to these ranks."""
        assert self._ranks is not None
        self._ranks.kill(ranks, number)

    def join_rank(self, rank: int) -> None:
        """Wait until this rank has ended."""
        assert self._ranks is not None
        self._ranks.processes[rank].join(10)

    def join(self) -> None:
        """Wait until all ranks have ended, which were told to."""
        assert self._ranks is not None
        self._ranks.join()

    def end(self, world: int) -> int:
        """Kill what still runs, as a launcher does; the last step all ranks completed."""
        self.kill(list(range(world)))
        self.join()
        return read_progress(self.directory, world)

    def __enter__(self) -> Lives:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(list(range(len(self.pids))))

    def wait_end(self, timeout_s: float = 60.0) -> None:
        """Wait for a life that ends by itself."""
        assert self._ranks is not None
        alive = self._ranks.join(timeout_s)
        self._ranks.kill(alive)
        self.raise_errors()
        assert not alive, f"ranks {alive} did not end"


def main() -> None:
    """One rank of a life, started by a launcher: in its round's own directory, errors shown."""
    life = Life(**json.loads(Path(sys.argv[1]).read_text()))
    rank = int(os.environ.get("RANK", "0"))
    life = Life(**asdict(life) | {"directory": round_directory(life.directory)})
    Path(life.directory).mkdir(exist_ok=True)
    torch.set_num_threads(1)
    (Path(life.directory) / f"pid-{rank}").write_text(str(os.getpid()))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    _train(rank, life)
    if dist.is_initialized():
        dist.destroy_process_group()


def round_directory(directory: str) -> str:
    """Where this round of a launcher's workers leaves its signposts."""
    return f"{directory}/round-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


if __name__ == "__main__":
    main()
