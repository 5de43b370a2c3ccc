"""The calls of ``torch.distributed.checkpoint``, for a changed import: they save and load here."""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_loader import load as _load
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
)

# These are torch's own, whatever the names in torch.distributed.checkpoint are made to mean.
from torch.distributed.checkpoint.state_dict_saver import async_save as _async_save
from torch.distributed.checkpoint.state_dict_saver import save as _save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from holdfast.dcp.checkpoint_ids import place_of
from holdfast.dcp.dcp_reader import Reader
from holdfast.dcp.dcp_writer import Writer
from holdfast.errors import UsageError
from holdfast.interop.dcp import METADATA

CheckpointId = str | os.PathLike[str]


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Save a state dict as ``dcp.save`` does, as a checkpoint of a root here.

    ``checkpoint_id``: a root and a step, as ``runs/gpt/step-500``, or a root alone. A step is a
    number, alone or after ``step``, ``epoch``, ``checkpoint``, ``iter`` or ``global_step``; the
    steps of a root have one such name.
    ``storage_writer``: a Writer, in its place. ``state_dict``, ``planner``, ``process_group``,
    ``no_dist``: as for torch. ``use_collectives``: only True.

    Durable on return. Raises what torch's call raises with a ``Writer``.
    """
    metadata: Metadata = _save(
        state_dict,
        storage_writer=_writer(checkpoint_id, storage_writer),
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
        use_collectives=use_collectives,
    )
    return metadata


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[Any] | AsyncSaveResponse:
    """Save a state dict as ``dcp.async_save`` does: a copy of it, behind the training.

    ``async_checkpointer_type``: what writes, a thread or a process. ``async_stager``: what copies;
    a ``Stager`` copies into shared memory, from which the keeper writes. ``state_dict``,
    ``checkpoint_id``, ``storage_writer``, ``planner``, ``process_group``, ``no_dist``,
    ``use_collectives``: as for ``save``.

    The state dict may be changed when it returns. The future is done when the checkpoint is
    durable, and raises what ``save`` would.
    """
    writer = _writer(checkpoint_id, storage_writer)
    found: Future[Any] | AsyncSaveResponse = _async_save(
        state_dict,
        checkpoint_id=checkpoint_id,  # for the thread that saves: the next one may be another
        storage_writer=writer,
        planner=planner,
        process_group=process_group,
        async_checkpointer_type=async_checkpointer_type,
        async_stager=async_stager,
        no_dist=no_dist,
        use_collectives=use_collectives,
    )
    return found


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Fill a state dict as ``dcp.load`` does, from a checkpoint of a root here.

    ``checkpoint_id``: a root and a step, as ``runs/gpt/step-500``; or a root alone, of which the
    newest is loaded; or a directory that DCP itself wrote. ``storage_reader``: a Reader, in its
    place. ``state_dict``, ``planner``, ``process_group``, ``no_dist``: as for torch.

    Raises what torch's call raises with a ``Reader``.
    """
    _load(
        state_dict,
        storage_reader=_reader(checkpoint_id, storage_reader),
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
    )


def _writer(checkpoint_id: CheckpointId | None, writer: StorageWriter | None) -> StorageWriter:
    if writer is None:
        given = _given(checkpoint_id, "storage_writer")
        made = Writer(place_of(given).root)
        made.reset(given)
        return made
    if not isinstance(writer, Writer):
        raise UsageError(
            f"a {type(writer).__qualname__} does not save here: give a holdfast.dcp.Writer, or "
            "call torch's own function"
        )
    if checkpoint_id is not None:
        writer.reset(checkpoint_id)
    return writer


def _reader(checkpoint_id: CheckpointId | None, reader: StorageReader | None) -> StorageReader:
    if reader is None:
        given = _given(checkpoint_id, "storage_reader")
        if Path(os.fsdecode(given), METADATA).is_file():  # a directory that DCP wrote
            return Reader(given)
        made = Reader(place_of(given).root)
        made.reset(given)
        return made
    if not isinstance(reader, Reader):
        raise UsageError(
            f"a {type(reader).__qualname__} does not load from here: give a holdfast.dcp.Reader, "
            "or call torch's own function"
        )
    if checkpoint_id is not None:
        reader.reset(checkpoint_id)
    return reader


def _given(checkpoint_id: CheckpointId | None, instead: str) -> CheckpointId:
    if checkpoint_id is None:
        raise UsageError(f"give a checkpoint_id, such as runs/gpt/step-500, or a {instead}")
    return checkpoint_id
