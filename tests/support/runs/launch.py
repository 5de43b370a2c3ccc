"""Run a function on several real ranks, and get every process back whatever happens.

Ranks are forked from a server that has torch imported already, so a launch costs about a second
after the first. Each rank gets the environment, directory and import path of the calling test;
what it prints is printed by the caller, so that pytest shows it with the right test.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from holdfast.testing.runs.processes import ForkedRanks, tail

T = TypeVar("T")

PRELOADED = [
    "torch",
    "torch._dynamo",  # every rank would load it at its first DTensor or optimizer step: 1 s each
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "pytest",
]
#: Below pytest's own limit of 120 s, which would end the test without saying which rank hangs.
TIMEOUT_S = 100.0
#: How long the others may go on when one rank failed: most of them then fail too, and say where.
GRACE_S = 3.0
#: Every rank computes with one thread: more only fight for the cores, and sums stay the same.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
#: The host name need not resolve on a test machine; all ranks are on this one.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}


def run_ranks(
    world: int, fn: Callable[..., T], *args: Any, timeout_s: float = TIMEOUT_S
) -> list[T]:
    """``fn(rank, world, *args)`` on ``world`` processes with a default gloo group; its results.

    ``fn`` is a function at the top of its module; arguments and results are pickled. Raises
    AssertionError with the tracebacks of the ranks that failed, or the names and stacks of those
    that did not finish in ``timeout_s``. When it returns or raises, no rank is running.
    """
    __tracebackhide__ = True  # the traceback of interest is a rank's
    directory = Path(tempfile.mkdtemp(prefix="hf-ranks-"))
    ranks: list[_Rank] = []
    try:
        (directory / "call").write_bytes(_pack_call(world, fn, args, timeout_s))
        forked = _fork(world, directory)
        ranks = [_Rank(n, process, directory) for n, process in enumerate(forked.processes)]
        hung = _wait_for(ranks, timeout_s)
        stacks = _stop(ranks, ask_where=bool(hung))
        _show_logs(ranks)
        _raise_failures(ranks, hung, stacks, timeout_s)
        return [pickle.loads(rank.result_path.read_bytes()) for rank in ranks]
    finally:
        _stop(ranks, ask_where=False)
        shutil.rmtree(directory, ignore_errors=True)


# ── the caller's side ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Rank:
    """One process, and where it leaves its result, its traceback and its output."""

    number: int
    process: BaseProcess
    directory: Path

    @property
    def result_path(self) -> Path:
        return self.directory / f"result-{self.number}"

    @property
    def error_path(self) -> Path:
        return self.directory / f"error-{self.number}"

    @property
    def stack_path(self) -> Path:
        return self.directory / f"stack-{self.number}"

    @property
    def log_path(self) -> Path:
        return self.directory / f"output-{self.number}"

    @property
    def succeeded(self) -> bool:
        return self.result_path.exists() and not self.error_path.exists()


def _pack_call(
    world: int, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float
) -> bytes:
    # The function goes by name, and its module's file with it: pytest gives test modules names
    # that cannot be imported from elsewhere.
    where = (fn.__module__, getattr(sys.modules[fn.__module__], "__file__", None), fn.__qualname__)
    if "<locals>" in fn.__qualname__:
        raise TypeError(f"{fn.__qualname__} must stand at the top of its module to run on ranks")
    return pickle.dumps((world, timeout_s, os.getcwd(), list(sys.path), where, pickle.dumps(args)))


def _fork(world: int, directory: Path) -> ForkedRanks:
    here = [LOOPBACK | os.environ | ONE_THREAD] * world
    with _environment(ONE_THREAD):  # read by numpy and torch when the server imports them
        return ForkedRanks(directory, _rank_main, directory, environments=here, preload=PRELOADED)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _wait_for(ranks: list[_Rank], timeout_s: float) -> list[_Rank]:
    """Wait until all ended or one failed and the grace is over; the ranks that still run."""
    deadline_s = time.monotonic() + timeout_s
    running = list(ranks)
    while running and (left_s := deadline_s - time.monotonic()) > 0:
        wait([rank.process.sentinel for rank in running], left_s)
        ended = [rank for rank in running if not rank.process.is_alive()]
        running = [rank for rank in running if rank not in ended]
        if not all(rank.succeeded for rank in ended):
            deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
    return running


def _stop(ranks: list[_Rank], *, ask_where: bool) -> dict[int, str]:
    """End the ranks that still run; with ``ask_where`` they first say what they are doing."""
    running = [rank for rank in ranks if rank.process.is_alive()]
    if ask_where:
        for rank in running:
            _signal(rank, signal.SIGUSR1)
        time.sleep(0.3 if running else 0)  # the handler writes its file at once, but not atomically
    for rank in running:
        _signal(rank, signal.SIGKILL)
    for rank in ranks:
        rank.process.join(10)
    return {rank.number: _read(rank.stack_path) for rank in running}


def _signal(rank: _Rank, number: int) -> None:
    # A process that is not joined keeps its number only until the server has reaped it.
    if rank.process.is_alive() and rank.process.pid is not None:
        try:
            os.kill(rank.process.pid, number)
        except ProcessLookupError:
            return


def _show_logs(ranks: list[_Rank]) -> None:
    for rank in ranks:
        for line in _read(rank.log_path).splitlines():
            print(f"[rank {rank.number}] {line}")


def _raise_failures(
    ranks: list[_Rank], hung: list[_Rank], stacks: dict[int, str], timeout_s: float
) -> None:
    __tracebackhide__ = True
    failed = [r for r in ranks if r not in hung and not r.succeeded]
    # After a failure the others may wait in vain at the end; alone, that is a fault too.
    late = [r for r in hung if not (failed and r.succeeded)]
    if not failed and not late:
        return
    parts = [_failure_text(r) for r in sorted(failed, key=_failed_at_s)]
    if late and failed:
        parts.append(f"ranks {_numbers(late)} were still running {GRACE_S:g} s after that, in:")
    elif late:
        parts.append(f"ranks {_numbers(late)} did not finish in {timeout_s:g} s; they were in:")
    parts += [f"rank {r.number}: {stacks.get(r.number) or '(unknown)'}" for r in late]
    raise AssertionError("\n\n".join(parts))


def _failure_text(rank: _Rank) -> str:
    if text := _read(rank.error_path):
        return f"rank {rank.number} failed:\n{text}"
    code = rank.process.exitcode
    how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
    return f"rank {rank.number} ended without a result: {how}\n{_read(rank.log_path)}"


def _failed_at_s(rank: _Rank) -> float:
    path = rank.error_path
    return path.stat().st_mtime if path.exists() else 0.0  # it just died: the others follow from it


def _numbers(ranks: list[_Rank]) -> str:
    return ", ".join(str(rank.number) for rank in ranks)


def _read(path: Path) -> str:
    """The end of a text that may not be there."""
    return tail(path) if path.exists() else ""


# ── the rank's side ──────────────────────────────────────────────────────────────────────────


def _rank_main(rank: int, directory: Path) -> None:
    """What a forked process does: all it has to say goes into files of ``directory``."""
    files = _Rank(rank, multiprocessing.current_process(), directory)
    with files.stack_path.open("w") as stack_file:
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
        _write(files.result_path, pickle.dumps(_call(rank, directory)))
        _leave_group()


def _write(path: Path, data: bytes) -> None:
    """All of it or nothing: this process may be killed in the middle."""
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.rename(path)


def _call(rank: int, directory: Path) -> Any:
    world, timeout_s, working_directory, import_path, where, packed_args = pickle.loads(
        (directory / "call").read_bytes()
    )
    os.chdir(working_directory)
    sys.path[:] = import_path

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    fn = _find(*where)
    args = pickle.loads(packed_args)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(directory / "store"), world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    return fn(rank, world, *args)


def _find(module_name: str, file: str | None, qualname: str) -> Any:
    """The function, by its module's name, or by its file where the name cannot be imported."""
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError:
        if file is None:
            raise
        found = _load(module_name, file)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def _load(module_name: str, file: str) -> types.ModuleType:
    packages = module_name.split(".")[:-1]
    for depth in range(1, len(packages) + 1):  # pickle imports a module's parents by name
        parent = ".".join(packages[:depth])
        sys.modules.setdefault(parent, types.ModuleType(parent)).__path__ = []
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{module_name} is not Python: {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


def _leave_group() -> None:
    """End together, so that no rank sees another's sockets close in its last operation."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    try:
        dist.barrier()
        dist.destroy_process_group()
    except RuntimeError:  # another rank failed; it is the one to say so
        return
