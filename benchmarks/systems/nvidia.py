"""Save by Megatron's dist_checkpointing and NVIDIA's resiliency extension.

Both are made for GPUs: ``torch.cuda.synchronize`` and ``current_device`` are made to do nothing
and to name the CPU, which is all they need here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from benchmarks.kit.disk import remove, sync_tree
from benchmarks.systems.saving import DcpSave, Saving

torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]


class Megatron(DcpSave):
    """``dist_checkpointing.save`` with each leaf as a ShardedTensor of one rank."""

    is_async = False

    def __init__(self, root: Path, leaves: dict[str, Tensor], *, threads: int) -> None:
        from megatron.core.dist_checkpointing import ShardedTensor
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

        super().__init__(root, leaves, threads=threads)
        self.settings = f"sync, torch_dist, thread_count={threads}, cached_metadata"
        self._sharded = {
            name: ShardedTensor.from_rank_offsets(name, leaf, replica_id=0)
            for name, leaf in leaves.items()
        }
        self._strategy = TorchDistSaveShardedStrategy(
            "torch_dist", 1, thread_count=threads, cached_metadata=True
        )

    def save(self, step: int) -> Saving:
        from megatron.core import dist_checkpointing

        self._path(step).mkdir()
        dist_checkpointing.save(
            dict(self._sharded),
            str(self._path(step)),
            sharded_strategy=self._strategy,
            validate_access_integrity=False,
        )
        sync_tree(self._path(step))
        return Saving()


class AsyncTorch:
    """``TorchAsyncCheckpoint``: ``torch.save`` in another process.

    The process is forked for each save, and sees the memory of that moment, or it is kept and
    handed the tensors, which it shares with the training: an update has to wait for its end.
    """

    is_async = True

    def __init__(self, root: Path, leaves: dict[str, Tensor], *, persistent: bool) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

        self._root, self._leaves, self._persistent = root / "nvrx", leaves, persistent
        self._root.mkdir()
        self._saver = TorchAsyncCheckpoint(persistent_queue=persistent)
        self.settings = "kept process" if persistent else "forked process"
        self.early = "as documented: no wait after async_save" if persistent else ""

    def save(self, step: int) -> Saving:
        path = self._path(step)
        path.mkdir()
        self._saver.async_save(self._leaves, str(path / "state.pt"))

        def finish() -> None:
            self._saver.finalize_async_save(blocking=True, no_dist=True)

        return _saving(finish, path, self._persistent)

    def _path(self, step: int) -> Path:
        return self._root / str(step)

    def read(self, step: int) -> Iterator[tuple[str, Tensor]]:
        yield from torch.load(self._path(step) / "state.pt", mmap=True).items()

    def discard(self, step: int) -> None:
        remove(self._path(step))

    def close(self) -> None:
        self._saver.finalize_async_save(blocking=True, no_dist=True, terminate=True)
        remove(self._root)


class AsyncWriter(DcpSave):
    """``FileSystemWriterAsync``: DCP's format, planned here and written by other processes."""

    is_async = True

    def __init__(
        self, root: Path, leaves: dict[str, Tensor], *, threads: int, persistent: bool
    ) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
        from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
            CheckpointMetadataCache,
        )

        super().__init__(root, leaves, threads=threads)
        self._persistent = persistent
        self._queue = AsyncCallsQueue(persistent=persistent)
        self._cache = CheckpointMetadataCache()
        process = "kept process" if persistent else "forked process"
        self.settings = f"{process}, thread_count={threads}, cached plan"
        self.early = "no wait after schedule_async_request" if persistent else ""

    def save(self, step: int) -> Saving:
        from nvidia_resiliency_ext.checkpointing.async_ckpt import state_dict_saver
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
        from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import (
            FileSystemWriterAsync,
        )

        writer = FileSystemWriterAsync(self._path(step), thread_count=self._threads)
        plan = state_dict_saver.save_state_dict_async_plan(
            self._leaves,
            writer,
            None,
            0,
            planner=DefaultSavePlanner(),
            enable_cache=True,
            metadata_cache=self._cache,
        )
        write, _, arguments = writer.get_save_function_and_args()

        def finalize() -> None:
            state_dict_saver.save_state_dict_async_finalize(*plan)

        # Without its way from the GPU to the host: that has a synchronize of its own, in the
        # process that writes.
        self._queue.schedule_async_request(AsyncRequest(write, tuple(arguments), [finalize]))

        def finish() -> None:
            self._queue.maybe_finalize_async_calls(blocking=True, no_dist=True)

        return _saving(finish, self._path(step), self._persistent)

    def close(self) -> None:
        self._queue.close()
        super().close()


class Local:
    """``LocalCheckpointManager``; its state dict takes tensors on a GPU only."""

    def __init__(self, root: Path, leaves: dict[str, Tensor]) -> None:
        from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import (
            BasicTensorAwareStateDict,
        )

        BasicTensorAwareStateDict(dict(leaves))
        raise NotImplementedError("it took tensors on the CPU, which it did not when this was made")


def _saving(finish: Callable[[], None], path: Path, shares_memory: bool) -> Saving:
    """``finish`` may be called once only, and by one thread."""
    lock, finished = Lock(), False

    def finish_once() -> None:
        nonlocal finished
        with lock:
            if not finished:
                finish()
                finished = True

    def wait_durable() -> None:
        finish_once()
        sync_tree(path)

    return Saving(finish_once if shares_memory else lambda: None, wait_durable)


def make_megatron(root: Path, training: Any, **settings: Any) -> Any:
    return Megatron(root, training.leaves, **settings)


def make_async_torch(root: Path, training: Any, **settings: Any) -> Any:
    return AsyncTorch(root, training.leaves, **settings)


def make_async_writer(root: Path, training: Any, **settings: Any) -> Any:
    return AsyncWriter(root, training.leaves, **settings)


def make_local(root: Path, training: Any) -> Any:
    return Local(root, training.leaves)
