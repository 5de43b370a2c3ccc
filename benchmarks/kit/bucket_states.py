"""Save and restore a state in a bucket: by Holdfast, and by DCP through two other clients."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.kit.ranks import run_ranks

State = Mapping[str, Tensor]
THREADS = 4


class Writer(NamedTuple):
    """Saves a state of tensors at a place, and loads it into tensors that are there."""

    save: Callable[[str, State], object]
    load: Callable[[str, State], object]


def writers(below: str) -> dict[str, Writer]:
    """All of them, by name; ``below``: bucket and prefix."""
    return {
        "Holdfast": Writer(partial(_save, below), partial(_load, below)),
        "DCP, s3fs": Writer(partial(_save_dcp, _s3fs, below), partial(_load_dcp, _s3fs, below)),
        "DCP, s3torchconnector": Writer(
            partial(_save_dcp, _connector, below), partial(_load_dcp, _connector, below)
        ),
    }


def _save(below: str, place: str, state: State) -> None:
    import holdfast

    holdfast.save(f"s3://{below}/{place}", dict(state), step=1)


def _load(below: str, place: str, state: State) -> None:
    import holdfast

    holdfast.load(f"s3://{below}/{place}", dict(state))


def _s3fs(path: str) -> tuple[Any, Any]:
    import s3fs  # noqa: F401  (else torch says it later)
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    options = {"client_kwargs": {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}}
    writer = FsspecWriter(path, thread_count=THREADS, sync_files=False, **options)
    return writer, FsspecReader(path, **options)


def _connector(path: str) -> tuple[Any, Any]:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client
    from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

    settings = S3ClientConfig(force_path_style=True)
    client = S3Client(
        "us-east-1", endpoint=os.environ["AWS_ENDPOINT_URL"], s3client_config=settings
    )
    writer = S3StorageWriter("us-east-1", path, settings, thread_count=THREADS)
    reader = S3StorageReader("us-east-1", path, settings)
    writer.fs._client = reader.fs._client = client
    return writer, reader


def _save_dcp(
    client: Callable[[str], tuple[Any, Any]], below: str, place: str, state: State
) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(dict(state), storage_writer=client(f"s3://{below}/{place}")[0], no_dist=True)


def _load_dcp(
    client: Callable[[str], tuple[Any, Any]], below: str, place: str, state: State
) -> None:
    import torch.distributed.checkpoint as dcp

    reader = client(f"s3://{below}/{place}")[1]
    dcp.load(dict(state), storage_reader=reader, no_dist=not dist.is_initialized())


def restores_by_two(name: str, below: str, place: str, state: State) -> float:
    """Returns the seconds in which two ranks restore it, each half of each tensor's rows."""
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    with tempfile.TemporaryDirectory() as root:
        found: float = run_ranks(name, 2, Path(root), _restore_halves, name, below, place, shapes)
    return found


def _restore_halves(name: str, below: str, place: str, shapes: Mapping[str, Any]) -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    there = {
        key: distribute_tensor(torch.zeros(shape), mesh, [Shard(0)])
        for key, shape in shapes.items()
    }
    dist.barrier()
    began_s = time.perf_counter()
    writers(below)[name].load(place, there)
    dist.barrier()
    return time.perf_counter() - began_s
