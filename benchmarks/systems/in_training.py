"""Save from a training loop and on several ranks, by Holdfast and by DCP.

A rival that is still writing when the next save is due is waited for, inside the measured time, as
its documentation asks for; Holdfast is called as in any run, and decides by itself.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

import holdfast
from benchmarks.kit.disk import sync_directories
from benchmarks.kit.gpt import GptTraining
from benchmarks.systems.saving import DcpAsync, Saving, System


class HoldfastInTraining:
    """``Checkpointer.step`` by policy: the optimizer's own hook is all that an update waits for."""

    is_async = True

    def __init__(
        self,
        root: Path,
        training: GptTraining,
        *,
        durable: bool,
        nice: tuple[int, int] = (0, 0),
        is_held: bool = False,
        parity: int = 0,
    ) -> None:
        self._root = root / f"holdfast-{durable}-{nice[0]}-{nice[1]}-{is_held}-{parity}"
        every_step = holdfast.Every(steps=1)
        self._checkpointer = holdfast.Checkpointer(
            self._root,
            {"model": training.model, "optimizer": training.optimizer},
            memory=every_step,
            storage=every_step if durable else None,
            keep=holdfast.Keep(last=1),
            parity=parity,
        )
        self._durable, self._parity = durable, parity
        self._nice, self._is_held = nice, is_held
        self.settings = "Checkpointer.step, defaults"
        if is_held:
            self.settings = "Checkpointer.step, then before_update(): copied at once, by all cores"
        if any(nice):
            self.settings = f"copying at nice {nice[0]}, writing at nice {nice[1]}"

    def save(self, step: int) -> Saving:
        if any(self._nice):
            lower_priorities(self._root, *self._nice)
        handle = self._checkpointer.step(step)
        assert handle is not None
        if self._is_held:
            self._checkpointer.before_update()
        wait = handle.wait_durable if self._durable else handle.wait_captured
        if self._parity:
            wait = handle.wait_protected
        return Saving(self._checkpointer.before_update, wait)

    def read(self, step: int) -> Iterator[tuple[str, Tensor]]:
        with holdfast.open(self._root, step) as checkpoint:
            for name in checkpoint.leaves:
                yield name, checkpoint.read(name)

    def discard(self, step: int) -> None:
        """Its retention policy removes what is old, at the next saves."""

    def close(self) -> None:
        self._checkpointer.close()


def lower_priorities(root: Path, copying: int, writing: int) -> None:
    """Of the thread that copies, and of all threads of this root's keeper but its first.

    The first answers the ranks; those that write come from the others, and are as they are.
    """
    for thread in threading.enumerate():
        if thread.name == "holdfast-capture":
            os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, copying)
    for pid in keepers(root):
        for task in os.listdir(f"/proc/{pid}/task"):
            if int(task) != pid:
                with suppress(OSError):  # it has just ended
                    os.setpriority(os.PRIO_PROCESS, int(task), writing)


def keepers(root: Path) -> list[int]:
    """The processes that keep what is saved below ``root``."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has just ended
            command = Path(f"/proc/{name}/cmdline").read_bytes()
            if b"holdfast.keeper" in command and os.fsencode(root) in command:
                found.append(int(name))
    return found


class DcpInTraining(DcpAsync):
    """``async_save`` on all ranks, into one directory, over a process group of its own.

    Its collectives run beside the training's, which one group does not allow.
    """

    def __init__(self, root: Path, training: GptTraining, *, process: bool, threads: int) -> None:
        super().__init__(root, training.leaves, process=process, shared=process, threads=threads)
        self._together = root / f"dcp-{'process' if process else 'thread'}"
        self._group = dist.new_group(backend="gloo")
        self._before: Future[Any] | None = None

    def save(self, step: int) -> Saving:
        if self._before is not None:
            self._before.result()  # or its staging memory would be overwritten
        answer = dcp.async_save(
            self._leaves,
            storage_writer=self._writer(step),
            async_stager=self._stager,
            async_checkpointer_type=self._kind,
            process_group=self._group,
            planner=DefaultSavePlanner(enable_plan_caching=True),
        )
        assert isinstance(answer, AsyncSaveResponse)
        staged: Future[Any] = answer.staging_completion
        stored: Future[Any] = answer.upload_completion
        self._before = stored

        def wait_safe() -> None:
            staged.result()

        def wait_durable() -> None:
            stored.result()
            sync_directories(self._path(step))

        return Saving(wait_safe, wait_durable)

    def read(self, step: int) -> Iterator[tuple[str, Tensor]]:
        """Whole leaves, put together by ``dcp.load``."""
        reader = dcp.FileSystemReader(self._path(step))
        found = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in reader.read_metadata().state_dict_metadata.items()
        }  # type: ignore[union-attr]
        dcp.load(found, storage_reader=reader, no_dist=True)
        yield from found.items()

    def discard(self, step: int) -> None:
        if dist.get_rank() == 0:
            super().discard(step)

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._together, ignore_errors=True)

    def _path(self, step: int) -> Path:
        return self._together / str(step)


Make = Callable[[Path, GptTraining], System]


def ways_to_save(
    threads: int, nice: tuple[int, int] | None, *, tries_held: bool = False, hosts: bool = False
) -> dict[str, Make]:
    """Every system by its name in the tables; ``threads``: what DCP writes with on each rank.

    ``hosts``: what protecting each other costs hosts; the others know nothing like it.

    ``nice``: try Holdfast with these priorities as well, of what copies and of what writes.
    ``tries_held``: and with training held until the copy is done.
    """
    if hosts:
        return {
            MEMORY: partial(HoldfastInTraining, durable=False),
            PROTECTED: partial(HoldfastInTraining, durable=False, parity=1),
        }
    ways: dict[str, Make] = {
        MEMORY: lambda root, training: HoldfastInTraining(root, training, durable=False),
        DURABLE: lambda root, training: HoldfastInTraining(root, training, durable=True),
        "DCP async_save, THREAD": lambda root, training: DcpInTraining(
            root, training, process=False, threads=threads
        ),
        "DCP async_save, PROCESS": lambda root, training: DcpInTraining(
            root, training, process=True, threads=threads
        ),
    }
    if nice is not None:
        for durable in (False, True):
            ways[f"Holdfast, nice, {'durable' if durable else 'memory only'}"] = partial(
                HoldfastInTraining, durable=durable, nice=nice
            )
    if tries_held:
        for durable in (False, True):
            ways[f"Holdfast, held, {'durable' if durable else 'memory only'}"] = partial(
                HoldfastInTraining, durable=durable, is_held=True
            )
    return ways


MEMORY, DURABLE = "Holdfast, memory only", "Holdfast, durable"
PROTECTED = "Holdfast, memory only, parity=1"
