"""Save a training state by Holdfast, torch and safetensors, each at its best settings.

Each is brought to the same promise: when ``wait_durable`` returns, every file and every directory
it made is fsynced. Where a library leaves that to the user, it is done here, inside the measured
time. State is handed to the rivals as one flat dict made beforehand, which is the least work for
them.
"""

from __future__ import annotations

import io
import logging
import mmap
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

import holdfast
from benchmarks.kit.disk import remove, sync_directories

warnings.filterwarnings("ignore", module="torch.distributed")
logging.disable(logging.INFO)  # DCP's saving process, which imports this, tells of every save


def nothing() -> None:
    """There is nothing to wait for."""


@dataclass(frozen=True, slots=True)
class Saving:
    """One save that was begun. After ``wait_safe`` the tensors may be overwritten.

    ``wait_captured`` is there where more than that makes the copy complete.
    """

    wait_safe: Callable[[], None] = nothing
    wait_durable: Callable[[], None] = nothing
    wait_captured: Callable[[], None] | None = None


class System(Protocol):
    """One way to save. ``save`` returns when the training thread gets its way back.

    ``early`` says what is wrong with an update that does not wait for ``wait_safe``: such a save is
    tried too, and what it stored is shown. Empty where there is nothing to wait for, or no way
    around the wait.
    """

    settings: str
    is_async: bool
    early: str

    def save(self, step: int) -> Saving: ...

    def read(self, step: int) -> Iterator[tuple[str, Tensor]]:
        """What was stored, leaf by leaf."""
        ...

    def discard(self, step: int) -> None:
        """Free the disk again."""
        ...

    def close(self) -> None: ...


class TorchSave:
    """``torch.save`` into a file."""

    settings = "one file, then fsync"
    is_async = False
    early = ""

    def __init__(self, root: Path, leaves: dict[str, Tensor]) -> None:
        self._root, self._leaves = root / "torch", leaves
        self._root.mkdir()

    def save(self, step: int) -> Saving:
        path = self._root / f"{step}.pt"
        with path.open("wb") as file:
            torch.save(self._leaves, file)
            file.flush()
            os.fsync(file.fileno())
        sync_directories(self._root)
        return Saving()

    def read(self, step: int) -> Iterator[tuple[str, Tensor]]:
        yield from torch.load(self._root / f"{step}.pt", mmap=True).items()

    def discard(self, step: int) -> None:
        (self._root / f"{step}.pt").unlink()
        sync_directories(self._root)

    def close(self) -> None:
        shutil.rmtree(self._root)


class Safetensors:
    """``safetensors.torch.save_file``."""

    settings = "save_file, then fsync"
    is_async = False
    early = ""

    def __init__(self, root: Path, leaves: dict[str, Tensor]) -> None:
        self._root, self._leaves = root / "safetensors", leaves
        self._root.mkdir()

    def save(self, step: int) -> Saving:
        path = self._root / f"{step}.safetensors"
        safetensors.torch.save_file(self._leaves, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        sync_directories(self._root)
        return Saving()

    def read(self, step: int) -> Iterator[tuple[str, Tensor]]:
        with safetensors.safe_open(self._root / f"{step}.safetensors", "pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                yield name, file.get_tensor(name)

    def discard(self, step: int) -> None:
        (self._root / f"{step}.safetensors").unlink()
        sync_directories(self._root)

    def close(self) -> None:
        shutil.rmtree(self._root)


class DcpSave:
    """``torch.distributed.checkpoint.save``, with its files synced and its plan cached."""

    is_async = False
    early = ""

    def __init__(self, root: Path, leaves: dict[str, Tensor], *, threads: int) -> None:
        self._root, self._leaves = Path(tempfile.mkdtemp(prefix="dcp-", dir=root)), leaves
        self._threads = threads
        self.settings = f"thread_count={threads}"

    def save(self, step: int) -> Saving:
        dcp.save(
            self._leaves,
            storage_writer=self._writer(step),
            planner=DefaultSavePlanner(enable_plan_caching=True),
        )
        sync_directories(self._path(step))
        return Saving()

    def _path(self, step: int) -> Path:
        return self._root / str(step)

    def _writer(self, step: int) -> dcp.FileSystemWriter:
        return dcp.FileSystemWriter(
            self._path(step), thread_count=self._threads, sync_files=True, overwrite=False
        )

    def read(self, step: int) -> Iterator[tuple[str, Tensor]]:
        """As ``dcp.load`` does, item by item, without its 4 s for 1.6 GB."""
        path = self._path(step)
        items = dcp.FileSystemReader(path).read_metadata().storage_data
        for index, item in items.items():
            with (
                (path / item.relative_path).open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory,
            ):
                stored = io.BytesIO(memory[item.offset : item.offset + item.length])
            yield index.fqn, torch.load(stored)

    def discard(self, step: int) -> None:
        remove(self._path(step))

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)


class DcpAsync(DcpSave):
    """``async_save`` into staging memory that is kept, staged behind the training thread.

    Pinned memory and copies that do not block need a GPU. An update has to wait for
    ``staging_completion``.
    """

    is_async = True
    early = "staging_completion not awaited"

    def __init__(
        self, root: Path, leaves: dict[str, Tensor], *, process: bool, shared: bool, threads: int
    ) -> None:
        super().__init__(root, leaves, threads=threads)
        kind = AsyncCheckpointerType
        self._kind = kind.PROCESS if process else kind.THREAD
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=shared,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
        )
        self.settings = f"kept {'shared' if shared else 'private'} staging, thread_count={threads}"

    def save(self, step: int) -> Saving:
        answer = dcp.async_save(
            self._leaves,
            storage_writer=self._writer(step),
            async_stager=self._stager,
            async_checkpointer_type=self._kind,
            planner=DefaultSavePlanner(enable_plan_caching=True),
        )
        assert isinstance(answer, AsyncSaveResponse)
        staged: Future[Any] = answer.staging_completion
        stored: Future[Any] = answer.upload_completion

        def wait_durable() -> None:
            stored.result()
            sync_directories(self._path(step))

        def wait_safe() -> None:
            staged.result()

        return Saving(wait_safe, wait_durable)

    def close(self) -> None:
        self._stager.close()
        super().close()


class Holdfast:
    """``Checkpointer.save(durable=True)``: capture, keeper and manifest as in a run."""

    settings = "defaults"
    is_async = True
    early = ""  # the fence is in the optimizer's step: there is no way around it

    def __init__(
        self, root: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self._root = root / "holdfast"
        self._checkpointer = holdfast.Checkpointer(
            self._root,
            {"model": model, "optimizer": optimizer},
            memory=None,
            storage=None,
            keep=holdfast.Keep(last=1),
        )

    def save(self, step: int) -> Saving:
        handle = self._checkpointer.save(step, durable=True)
        return Saving(self._checkpointer.before_update, handle.wait_durable, handle.wait_captured)

    def read(self, step: int) -> Iterator[tuple[str, Tensor]]:
        with holdfast.open(self._root, step) as checkpoint:
            for name in checkpoint.leaves:
                yield name, checkpoint.read(name)

    def discard(self, step: int) -> None:
        """Its retention policy removes what is old, at the next saves."""

    def close(self) -> None:
        self._checkpointer.close()
        shutil.rmtree(self._root)


# ── by name, for contenders.py ───────────────────────────────────────────────────────────────


def make_holdfast(root: Path, training: Any) -> System:
    return Holdfast(root, training.model, training.optimizer)


def make_torch_save(root: Path, training: Any) -> System:
    return TorchSave(root, training.leaves)


def make_safetensors(root: Path, training: Any) -> System:
    return Safetensors(root, training.leaves)


def make_dcp_save(root: Path, training: Any, **settings: Any) -> System:
    return DcpSave(root, training.leaves, **settings)


def make_dcp_async(root: Path, training: Any, **settings: Any) -> System:
    return DcpAsync(root, training.leaves, **settings)
