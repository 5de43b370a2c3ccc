"""Save by DLRover's flash checkpoint, DeepSpeed's checkpoint engines and Orbax."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kit.disk import remove, sync_file, sync_tree
from benchmarks.systems.saving import Saving

os.environ.setdefault("DS_ACCELERATOR", "cpu")


def _no_wait() -> None:
    """There is nothing to wait for."""


class DLRover:
    """``DdpCheckpointer.save_checkpoint`` to DISK: copied into shared memory by the caller, and
    written from there by another process.

    ``wait_latest_checkpoint`` looks every three seconds; here the file it looks at is looked at
    every two milliseconds.
    """

    settings = "DdpCheckpointer, StorageType.DISK"
    is_async = True
    early = ""
    patience_s = 60.0

    def __init__(self, root: Path, leaves: dict[str, Tensor]) -> None:
        # Names in shared memory and of sockets that no other run on this machine has.
        job = os.environ["TORCHELASTIC_RUN_ID"] = f"bench{os.getpid()}"
        from dlrover.python.common.constants import CheckpointConstant
        from dlrover.python.common.multi_process import SOCKET_TMP_DIR
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        self._root, self._leaves, self._disk = root / "dlrover", leaves, StorageType.DISK
        self._root.mkdir()
        self._tracker = self._root / CheckpointConstant.TRACER_FILE_NAME
        self._sockets = Path(SOCKET_TMP_DIR) / job
        self._saver = DdpCheckpointer(str(self._root))

    def save(self, step: int) -> Saving:
        self._saver.save_checkpoint(step, self._leaves, storage_type=self._disk)
        if self._saver._engine.latest_step != step:
            raise RuntimeError("the save was skipped: the one before is still being written")

        def wait_durable() -> None:
            began = time.monotonic()
            while not (self._tracker.is_file() and self._tracker.read_text() == str(step)):
                if time.monotonic() - began > self.patience_s:
                    raise TimeoutError(f"step {step} was not written in {self.patience_s:.0f} s")
                time.sleep(0.002)
            sync_tree(self._root / str(step))  # beside it a directory of theirs is being emptied
            sync_file(self._tracker)

        return Saving(_no_wait, wait_durable)

    def read(self, step: int) -> Iterator[tuple[str, Tensor]]:
        stored = torch.load(self._root / str(step) / "rank_0.pt", mmap=True, weights_only=False)
        yield from stored.items()

    def discard(self, step: int) -> None:
        remove(self._root / str(step))

    def close(self) -> None:
        with suppress(OSError):
            self._saver._engine._shm_handler.unlink()
        shutil.rmtree(self._sockets, ignore_errors=True)
        remove(self._root)


class DeepSpeed:
    """A checkpoint engine's ``save`` of the whole state; file and directory synced here."""

    is_async = False
    early = ""

    def __init__(
        self, root: Path, leaves: dict[str, Tensor], engine: Any, settings: str, *, zipped: bool
    ) -> None:
        self._root, self._leaves, self._engine = root / "deepspeed", leaves, engine
        self._root.mkdir()
        self.settings, self._zipped = settings, zipped

    def save(self, step: int) -> Saving:
        path = self._root / str(step)
        path.mkdir()
        self._engine.save(self._leaves, str(path / "state.pt"))
        sync_tree(path)
        return Saving()

    def read(self, step: int) -> Iterator[tuple[str, Tensor]]:
        path = self._root / str(step) / "state.pt"
        yield from torch.load(path, mmap=self._zipped).items()

    def discard(self, step: int) -> None:
        remove(self._root / str(step))

    def close(self) -> None:
        remove(self._root)


class Orbax:
    """``AsyncCheckpointer`` of a tree of numpy arrays: views of the training's tensors.

    It copies before ``save`` returns.
    """

    is_async = True
    early = ""

    def __init__(self, root: Path, leaves: dict[str, Tensor], *, ocdbt: bool) -> None:
        import orbax.checkpoint as ocp

        self._root, self._ocp = root / "orbax", ocp
        self._root.mkdir()
        self._arrays = {name: leaf.numpy() for name, leaf in leaves.items()}
        self._saver = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt))
        self.settings = f"numpy arrays, use_ocdbt={ocdbt}"

    def save(self, step: int) -> Saving:
        path = self._root / str(step)
        self._saver.save(path, args=self._ocp.args.PyTreeSave(self._arrays))

        def wait_durable() -> None:
            self._saver.wait_until_finished()
            sync_tree(path)

        return Saving(_no_wait, wait_durable)

    def read(self, step: int) -> Iterator[tuple[str, Tensor]]:
        with self._ocp.PyTreeCheckpointer() as reader:
            for name, array in reader.restore(self._root / str(step)).items():
                yield name, torch.from_numpy(array)

    def discard(self, step: int) -> None:
        remove(self._root / str(step))

    def close(self) -> None:
        self._saver.close()
        remove(self._root)


def make_dlrover(root: Path, training: Any) -> Any:
    return DLRover(root, training.leaves)


def make_deepspeed(root: Path, training: Any) -> Any:
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    engine = TorchCheckpointEngine()
    engine.zipfile_serialization = True  # the format torch reads fastest, and its default
    return DeepSpeed(
        root, training.leaves, engine, "TorchCheckpointEngine (torch.save)", zipped=True
    )


def make_fast_persist(root: Path, training: Any) -> Any:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine import FastCheckpointEngine
    from deepspeed.runtime.model_checkpointing.config import get_checkpoint_config
    from deepspeed.runtime.model_checkpointing.data_parallel_writer_factory import (
        DataParallelWriterConfig,
    )
    from deepspeed.runtime.swap_tensor.aio_config import get_aio_config

    get_accelerator().is_pinned = lambda _: True  # there is nothing to pin memory for

    class Config:
        checkpoint_config = get_checkpoint_config(
            {
                "checkpoint": {
                    "checkpoint_serialization": False,
                    "writer": {"type": "FAST", "decoupled": False},
                }
            }
        )
        aio_config = get_aio_config({})

    alone = DataParallelWriterConfig(
        world_size=1, rank=0, global_rank=0, local_rank=0, pure_dp=True
    )
    engine = FastCheckpointEngine(Config, alone, False)
    return DeepSpeed(
        root, training.leaves, engine, "FastCheckpointEngine (FastPersist)", zipped=False
    )


def make_orbax(root: Path, training: Any, **settings: Any) -> Any:
    return Orbax(root, training.leaves, **settings)
