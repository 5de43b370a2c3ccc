"""torchsnapshot and torch_checkpointing, each at its best settings on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torchsnapshot
from harness import remove, sync_tree
from systems import Saving
from torch import Tensor
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig


class Take:
    """``Snapshot.take``; files and directories synced here."""

    settings = "defaults"
    is_async = False
    early = ""

    def __init__(self, root: Path, leaves: dict[str, Tensor]) -> None:
        self._root = root / "torchsnapshot"
        self._root.mkdir()
        self._state = {"state": torchsnapshot.StateDict(**leaves)}

    def save(self, step: int) -> Saving:
        torchsnapshot.Snapshot.take(str(self._path(step)), self._state)
        sync_tree(self._path(step))
        return Saving()

    def _path(self, step: int) -> Path:
        return self._root / str(step)

    def read(self, step: int) -> Iterator[tuple[str, Tensor]]:
        found = {name: torch.empty_like(leaf) for name, leaf in self._state["state"].items()}
        stored = torchsnapshot.StateDict(**found)
        torchsnapshot.Snapshot(str(self._path(step))).restore({"state": stored})
        yield from stored.items()

    def discard(self, step: int) -> None:
        remove(self._path(step))

    def close(self) -> None:
        remove(self._root)


class AsyncTake(Take):
    """``Snapshot.async_take``. It takes no copy of tensors on the CPU, so that an update has to
    wait until all is written."""

    settings = "defaults; the update waits for PendingSnapshot.wait()"
    is_async = True
    early = "as documented: no wait after async_take"

    def save(self, step: int) -> Saving:
        pending = torchsnapshot.Snapshot.async_take(str(self._path(step)), self._state)

        def wait_safe() -> None:
            pending.wait()

        def wait_durable() -> None:
            pending.wait()
            sync_tree(self._path(step))

        return Saving(wait_safe, wait_durable)


class Manager:
    """``CheckpointManager`` with a sync saver; direct I/O fails on most file systems (EINVAL)."""

    settings = "sync, use_direct_io=False"
    is_async = False
    early = ""

    def __init__(self, root: Path, leaves: dict[str, Tensor]) -> None:
        self._root, self._leaves = root / "torch_checkpointing", leaves
        self._root.mkdir()
        self._manager = CheckpointManager(CheckpointManager.Config(
            save=self._saver(), storage_config=LocalFileSystemStorageConfig(use_direct_io=False)
        ))  # fmt: skip

    def _saver(self) -> Any:
        return SyncCheckpointSaverConfig()

    def save(self, step: int) -> Saving:
        self._manager.save(str(self._path(step)), {"state": self._leaves})
        sync_tree(self._path(step))
        return Saving()

    def _path(self, step: int) -> Path:
        return self._root / str(step)

    def read(self, step: int) -> Iterator[tuple[str, Tensor]]:
        yield from torch.load(self._path(step) / "state_0.pt", mmap=True).items()

    def discard(self, step: int) -> None:
        remove(self._path(step))

    def close(self) -> None:
        self._manager.close()
        remove(self._root)


class AsyncManager(Manager):
    """The same with kept shared staging memory, staged behind the training thread, and a process
    that writes."""

    settings = "async, kept shared staging, use_direct_io=False; the update takes manager.lock()"
    is_async = True
    early = "manager.lock() not taken"

    def _saver(self) -> Any:
        config = AsyncCheckpointSaverConfig()
        staging = config.staging_config
        staging.use_pinned_memory = staging.use_non_blocking_copy = False
        return config

    def save(self, step: int) -> Saving:
        written: Future[Any] | None = self._manager.save(
            str(self._path(step)), {"state": self._leaves}
        )
        assert written is not None

        def wait_safe() -> None:
            with self._manager.lock():
                pass

        def wait_durable() -> None:
            written.result()
            sync_tree(self._path(step))

        return Saving(wait_safe, wait_durable)


def make_take(root: Path, training: Any) -> Take:
    return Take(root, training.leaves)


def make_async_take(root: Path, training: Any) -> Take:
    return AsyncTake(root, training.leaves)


def make_sync_manager(root: Path, training: Any) -> Manager:
    return Manager(root, training.leaves)


def make_async_manager(root: Path, training: Any) -> Manager:
    return AsyncManager(root, training.leaves)
