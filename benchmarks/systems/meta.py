"""Save by torchsnapshot and torch_checkpointing, each at its best settings on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torchsnapshot
from torch import Tensor
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from benchmarks.kit.disk import remove, sync_tree
from benchmarks.systems.saving import Saving


class Take:
    """``Snapshot.take``; files and directories synced here.

    ``batching`` copies tensors of less than 128 MiB together into slabs, which is its default:
    fewer files, more copying.
    """

    is_async = False
    early = ""

    def __init__(self, root: Path, leaves: dict[str, Tensor], *, batching: bool) -> None:
        os.environ["TORCHSNAPSHOT_DISABLE_BATCHING"] = str(not batching)
        self.settings = f"batching={batching}"
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
    """``Snapshot.async_take``. By its words an update need not wait.

    It stored torn tensors of 128 MiB all the same, so it is also tried with an update that waits
    until all is written.
    """

    is_async = True

    def __init__(
        self, root: Path, leaves: dict[str, Tensor], *, batching: bool, hold: bool
    ) -> None:
        super().__init__(root, leaves, batching=batching)
        self._hold = hold

    def save(self, step: int) -> Saving:
        pending = torchsnapshot.Snapshot.async_take(str(self._path(step)), self._state)

        def wait_safe() -> None:
            if self._hold:
                pending.wait()

        def wait_durable() -> None:
            pending.wait()
            sync_tree(self._path(step))

        return Saving(wait_safe, wait_durable)


class Manager:
    """``CheckpointManager`` with a sync saver; its direct I/O fails on ext4 (EINVAL).

    ``parts``: how many items, and so files and writing threads, the state is given as.
    """

    how = "sync"
    is_async = False
    early = ""

    def __init__(self, root: Path, leaves: dict[str, Tensor], *, parts: int) -> None:
        self._root = root / "torch_checkpointing"
        names = list(leaves)
        self._items = {
            f"part{number}": {name: leaves[name] for name in names[number::parts]}
            for number in range(parts)
        }
        self._root.mkdir()
        self.settings = f"{self.how}, {parts} items and threads, use_direct_io=False"
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = CheckpointManager(
            CheckpointManager.Config(save=self._saver(parts), storage_config=storage)
        )

    def _saver(self, threads: int) -> Any:
        config = SyncCheckpointSaverConfig()
        config.writer_config.file_write_max_threads = threads
        return config

    def save(self, step: int) -> Saving:
        self._manager.save(str(self._path(step)), self._items)
        sync_tree(self._path(step))
        return Saving()

    def _path(self, step: int) -> Path:
        return self._root / str(step)

    def read(self, step: int) -> Iterator[tuple[str, Tensor]]:
        for item in self._items:
            yield from torch.load(self._path(step) / f"{item}_0.pt", mmap=True).items()

    def discard(self, step: int) -> None:
        remove(self._path(step))

    def close(self) -> None:
        self._manager.close()
        remove(self._root)


class AsyncManager(Manager):
    """The same with kept shared staging memory, staged behind the training thread, and a process
    that writes."""

    how = "async, kept shared staging"
    is_async = True
    early = "manager.lock() not taken"

    def _saver(self, threads: int) -> Any:
        config = AsyncCheckpointSaverConfig()
        config.writer_config.file_write_max_threads = threads
        staging = config.staging_config
        staging.use_pinned_memory = staging.use_non_blocking_copy = False
        return config

    def save(self, step: int) -> Saving:
        written: Future[Any] | None = self._manager.save(str(self._path(step)), self._items)
        assert written is not None

        def wait_safe() -> None:
            with self._manager.lock():
                pass

        def wait_durable() -> None:
            written.result()
            sync_tree(self._path(step))

        return Saving(wait_safe, wait_durable)


def make_take(root: Path, training: Any, *, batching: bool) -> Take:
    return Take(root, training.leaves, batching=batching)


def make_async_take(root: Path, training: Any, *, batching: bool, hold: bool) -> Take:
    return AsyncTake(root, training.leaves, batching=batching, hold=hold)


def make_sync_manager(root: Path, training: Any, *, parts: int) -> Manager:
    return Manager(root, training.leaves, parts=parts)


def make_async_manager(root: Path, training: Any, *, parts: int) -> Manager:
    return AsyncManager(root, training.leaves, parts=parts)
