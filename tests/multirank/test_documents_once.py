"""The documents of a checkpoint are read by one rank, and reach the others with what is chosen."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import holdfast
from holdfast.errors import HoldfastError, StorageError
from holdfast.format.manifest import FRONT_BYTES
from holdfast.geometry.rank_ranges import union
from holdfast.restore.planning.candidates import Candidate
from holdfast.restore.storage_hold import StorageHold
from holdfast.storage.local import LocalStore
from support.runs.launch import run_ranks

HOSTS = "aabc"
Reads = list[tuple[str, int, int]]


@contextmanager
def noting_reads(reads: Reads, fail: Callable[[str], bool] = lambda _: False) -> Iterator[None]:
    """Every read of a store's file by this rank; those that ``fail`` names fail."""
    real_read, real_into = LocalStore.read, LocalStore.read_into
    real_bounded = LocalStore.read_at_most

    def refuse(path: str) -> None:
        if fail(path):
            raise StorageError(f"read of {path} failed: this host's line is down", path=path)

    def read(store: LocalStore, path: str, offset: int = 0, size: int | None = None) -> bytes:
        refuse(path)
        found = real_read(store, path, offset, size)
        reads.append((path, offset, len(found)))
        return found

    def read_at_most(store: LocalStore, path: str, limit_bytes: int) -> bytes | int:
        refuse(path)
        found = real_bounded(store, path, limit_bytes)
        reads.append((path, 0, len(found) if isinstance(found, bytes) else 0))
        return found

    def read_into(
        store: LocalStore, path: str, offset: int, buffer: memoryview, **how: bool
    ) -> None:
        refuse(path)
        reads.append((path, offset, buffer.nbytes))
        real_into(store, path, offset, buffer, **how)

    with (
        mock.patch.object(LocalStore, "read", read),
        mock.patch.object(LocalStore, "read_at_most", read_at_most),
        mock.patch.object(LocalStore, "read_into", read_into),
    ):
        yield


def folders(reads: Reads) -> Counter[str]:
    """The bytes read below each folder of a root."""
    found: Counter[str] = Counter()
    for path, _, size in reads:
        found[path.split("/")[0]] += size
    return found


def state_of(step: int) -> dict[str, Any]:
    """Every rank has the same model, of which each stores a part, and numbers of its own."""
    model = torch.nn.Linear(300, 200)
    for parameter in model.parameters():
        parameter.data.fill_(step)
    return {"model": model, "rng": holdfast.Rng(), "n": step}


def filled(state: dict[str, Any]) -> set[float]:
    return {float(x) for one in state["model"].parameters() for x in one.detach().unique()}


def _restore(root: str, reads: Reads, fail: Callable[[str], bool] = lambda _: False) -> Any:
    """(step, what fills the state, the bytes read by folder)."""
    state = state_of(0)
    with (
        noting_reads(reads, fail),
        holdfast.Checkpointer(root, state, storage=None, timeout_s=30) as checkpointer,
    ):
        restored = checkpointer.restore()
    dist.barrier()
    assert restored is not None and restored.source == "storage"
    return restored.step, filled(state), folders(reads)


def _load(root: str, reads: Reads, fail: Callable[[str], bool] = lambda _: False) -> Any:
    state = state_of(0)
    with noting_reads(reads, fail):
        restored = holdfast.load(root, state)
    return restored.step, filled(state), folders(reads)


@contextmanager
def damaged_on_the_way() -> Iterator[None]:
    """One byte of what this rank is told is another."""
    take = StorageHold.take

    def damage(hold: StorageHold, candidate: Candidate, documents: bytes) -> None:
        assert documents
        half = len(documents) // 2
        flipped = bytes([documents[half] ^ 4])
        take(hold, candidate, documents[:half] + flipped + documents[half + 1 :])

    with mock.patch.object(StorageHold, "take", damage):
        yield


def _reads(rank: int, world: int, root: str) -> dict[str, Any]:
    os.environ["HOLDFAST_HOST_ID"] = HOSTS[rank]
    found: dict[str, Any] = {}
    holdfast.save(root, state_of(7), step=7)
    found["restored"] = _restore(root, [])
    found["loaded"] = _load(root, [])
    layouts = iter([True])  # the first read fails, as for a moment

    def fails_once(path: str) -> bool:
        return rank == 0 and path.startswith("layouts/") and next(layouts, False)

    found["refused"] = _load(root, [], fails_once)
    with damaged_on_the_way() if rank == 3 else nullcontext():
        found["damaged"] = _load(root, [])
    try:
        _load(root, [], lambda path: rank == 0 and path.startswith("layouts/"))
    except HoldfastError as error:
        found["error"] = type(error).__name__, str(error)
    return found


@pytest.mark.timeout(300)
def test_a_manifest_and_a_layout_are_read_by_one_rank_and_by_others_where_it_fails(
    tmp_path: Path,
) -> None:
    ranks = run_ranks(len(HOSTS), _reads, str(tmp_path / "run"))
    (manifest,) = (tmp_path / "run" / "manifests").iterdir()
    (layout,) = (tmp_path / "run" / "layouts").iterdir()
    documents, layout_bytes = manifest.stat().st_size, layout.stat().st_size
    elsewhere = sum(host != HOSTS[0] for host in HOSTS)
    for way in ("restored", "loaded", "refused", "damaged"):
        assert [found[way][:2] for found in ranks] == [(7, {7.0})] * len(HOSTS), way
    for way in ("restored", "loaded"):
        read = [found[way][2] for found in ranks]
        assert [one["manifests"] for one in read] == [documents, 0, FRONT_BYTES, FRONT_BYTES]
        assert [one["layouts"] for one in read] == [layout_bytes, 0, 0, 0]
    assert elsewhere == 2
    # What rank 0 could not read for all, each reads for itself, and rank 0 once more.
    assert [found["refused"][2]["layouts"] for found in ranks] == [layout_bytes] * len(HOSTS)
    # What came to one rank damaged, that rank reads for itself.
    damaged = [found["damaged"][2] for found in ranks]
    assert [one["layouts"] for one in damaged] == [layout_bytes, 0, 0, layout_bytes]
    assert damaged[3]["manifests"] >= documents
    # What rank 0 cannot read at all is the error of all ranks, with its name.
    errors = {found["error"] for found in ranks}
    ((kind, text),) = {(kind, re.sub(r"rank 0: ", "", text)) for kind, text in errors}
    assert kind == "RestoreError" and "this host's line is down" in text
    assert all("rank 0: " in found["error"][1] for found in ranks[1:])


def _other_disk(rank: int, world: int, directory: str) -> str:
    """The same path leads rank 1, on another host, to a directory of its own."""
    os.environ["HOLDFAST_HOST_ID"] = HOSTS[-rank]
    make = LocalStore.__init__

    def elsewhere(self: LocalStore, root: str | os.PathLike[str]) -> None:
        make(self, os.fspath(root).replace("/own", f"/disk-{rank}"))

    with mock.patch.object(LocalStore, "__init__", elsewhere):
        try:
            holdfast.load(f"{directory}/own", {"w": torch.zeros(2)})
        except holdfast.UsageError as error:
            return str(error)
    return ""


def test_a_rank_of_another_host_that_sees_another_manifest_says_so(tmp_path: Path) -> None:
    for rank in range(2):
        holdfast.save(tmp_path / f"disk-{rank}", {"w": torch.full((2,), float(rank))}, step=3)
    for told in run_ranks(2, _other_disk, str(tmp_path)):
        assert "the ranks see different directories" in told and "on rank 1" in told


# ── a whole restore ──────────────────────────────────────────────────────────────────────────

MIB = 1 << 20


def _replicated(way: str) -> dict[str, Any]:
    """Rows and small leaves of which each rank stores an equal share, in whole blocks."""
    model, generator = torch.nn.Module(), torch.Generator().manual_seed(1)
    rows = torch.rand((16, MIB // 4), generator=generator)
    if way == "hsdp":
        grid = init_device_mesh("cpu", (2, 2))
        rows = distribute_tensor(rows, grid, [Replicate(), Shard(0)])
    model.register_parameter("rows", torch.nn.Parameter(rows))
    for number in range(2048):  # headers name each of them
        small = torch.nn.Parameter(torch.rand(512, generator=generator))
        model.register_parameter(f"small_{number:04}", small)
    return {"model": model, "rng": holdfast.Rng()}


def _sums(state: dict[str, Any]) -> list[str]:
    local = [getattr(one, "to_local", lambda one=one: one)() for one in state["model"].parameters()]
    return [xxhash.xxh3_64_hexdigest(one.detach().contiguous().numpy()) for one in local]


def _all_read(rank: int, world: int, root: str, way: str) -> dict[str, Any]:
    os.environ["HOLDFAST_HOST_ID"] = f"host-{rank}"
    os.environ["HOLDFAST_EXCHANGE"] = "always"
    state = _replicated(way)
    expected = _sums(state)
    holdfast.save(root, state, step=5)
    for parameter in state["model"].parameters():
        parameter.data.zero_()
    reads: Reads = []
    with (
        noting_reads(reads),
        holdfast.Checkpointer(root, state, storage=None, timeout_s=60) as checkpointer,
    ):
        assert checkpointer.restore() is not None
    return {"reads": reads, "is_same": _sums(state) == expected}


def _union(reads: Reads) -> int:
    """The bytes that are among those read, each once."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for path, at, size in reads:
        spans.setdefault(path, []).append((at, at + size))
    return sum(stop - start for some in spans.values() for start, stop in union(some))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["ddp", "hsdp"])
def test_a_whole_restore_of_replicas_on_several_hosts_reads_hardly_a_byte_twice(
    way: str, tmp_path: Path
) -> None:
    """Images are some whole blocks and a short one with the values, which is read for itself."""
    ranks = run_ranks(4, _all_read, str(tmp_path / "run"), way)
    reads = [read for found in ranks for read in found["reads"]]
    read_bytes, unique = sum(size for _, _, size in reads), _union(reads)
    assert all(found["is_same"] for found in ranks)
    assert unique > 20 * MIB
    assert read_bytes <= 1.02 * unique, folders(reads)
