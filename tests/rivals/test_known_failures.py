"""What torch.distributed.checkpoint was measured to do wrong (torch 2.13), and Holdfast does not.

One test for each finding, by its letter.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast import errors
from holdfast.catalogue import catalogue
from holdfast.errors import CoverageError, HoldfastError, StorageError
from holdfast.format.image import piece_name, plan_image
from holdfast.geometry.box import ITEMSIZE, Box, cover_fault
from holdfast.geometry.layout import Instance, Layout, LeafSpec, Mesh, Placement
from holdfast.protocol.image_plan import image_items
from holdfast.restore.planning.plan import Want
from holdfast.restore.reading.images import from_manifest
from holdfast.restore.reading.read import read_wants
from holdfast.storage.local import LocalStore
from holdfast.storage.memory import MemoryStore
from support.checkpoints.images import (
    assemble,
    images_of,
    publish_checkpoint,
    random_leaf,
    split_leaf,
)
from support.runs.launch import run_ranks

safetensors = pytest.importorskip("safetensors")


def test_a_scalars_and_integers_go_through_safetensors_as_they_are_with_their_metadata(
    tmp_path: Path,
) -> None:
    tensors = {
        "scalar": torch.tensor(3.5),
        "long": torch.arange(5),
        "flags": torch.tensor([True, False]),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "half": torch.randn(3, 2).bfloat16(),
    }
    holdfast.save(tmp_path, {"t": tensors}, step=4)
    (image,) = tmp_path.glob("steps/*/*.safetensors")
    with safetensors.safe_open(image, "pt") as file:
        assert file.metadata()["step"] == "4"
        for name, tensor in tensors.items():
            found = file.get_tensor(f"t.{name}")
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)


def test_b_several_parts_of_one_leaf_on_one_rank_are_all_stored(tmp_path: Path) -> None:
    # As FSDP2 over a fused, tensor parallel weight cuts it: each rank has two separate stripes.
    striped = Instance(Mesh((2,), (0, 1)), (Placement(0, split_factor=2),))
    layout = Layout(2, (LeafSpec("w", "F32", (8, 4), "split", (striped,)),))
    whole = random_leaf("F32", (8, 4), seed=1)
    names = [piece_name("w", (8, 4), piece.box) for piece in layout.pieces(0)]
    assert len(names) == len(set(names)) == 2
    store = LocalStore(tmp_path)
    manifest = publish_checkpoint(store, layout, images_of(layout, {"w": whole}))
    found = np.empty((8, 4), dtype=np.int32)
    read_wants(from_manifest(store, manifest), [Want("w", Box.whole((8, 4)), 0)], {0: found})
    assert found.tobytes() == whole.tobytes()


def test_d_a_flipped_bit_is_never_loaded(tmp_path: Path) -> None:
    model = nn.Linear(300, 300)
    holdfast.save(tmp_path, {"model": model})
    (image,) = tmp_path.glob("steps/*/*.safetensors")
    size = image.stat().st_size
    for at in (size // 3, size // 2, size - 5000):
        data = bytearray(image.read_bytes())
        data[at] ^= 4
        image.write_bytes(data)
        with pytest.raises(HoldfastError):
            holdfast.load(tmp_path, {"model": nn.Linear(300, 300)})
        data[at] ^= 4
        image.write_bytes(data)
    holdfast.load(tmp_path, {"model": nn.Linear(300, 300)})


def _overwrite(rank: int, world: int, root: str) -> list[Any]:
    """Save ones, then twos with a rank whose disk refuses, then look at what is there."""

    def state(value: float) -> dict[str, Any]:
        return {"x": _sharded(value, world)}

    holdfast.save(root, state(1), step=1)
    if rank == 1:
        _refuse_large_files()
    said = ""
    try:
        holdfast.save(root, state(2), step=1)
    except Exception as error:  # finding H: what a plain handler catches
        said = type(error).__name__
    back = state(0)
    holdfast.load(root, back)
    return [said, back["x"].full_tensor().unique().tolist()]


def _sharded(value: float, world: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.full((8, 65536), value)
    return distribute_tensor(whole, init_device_mesh("cpu", (world,)), [Shard(0)])


def _refuse_large_files() -> None:
    """This process writes no file larger than half a MiB from now on."""
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512 << 10, resource.RLIM_INFINITY))


def test_c_and_e_a_rank_that_cannot_write_fails_the_save_on_all_and_leaves_the_old_checkpoint_whole(
    tmp_path: Path,
) -> None:
    found = run_ranks(2, _overwrite, str(tmp_path))
    for said, elements in found:
        assert issubclass(getattr(errors, said), StorageError)
        assert elements == [1.0]
    assert len(catalogue(LocalStore(tmp_path)).manifests) == 1


def test_f_a_small_part_of_a_leaf_costs_a_small_read() -> None:
    layout = Layout(1, (split_leaf("w", "F32", (64, 65536), 1),))
    store = MemoryStore()
    whole = random_leaf("F32", (64, 65536), seed=1)
    checkpoint = from_manifest(
        store, publish_checkpoint(store, layout, images_of(layout, {"w": whole}))
    )
    row = Box((17, 0), (18, 65536))
    found = np.empty(row.shape, dtype=np.int32)
    read = read_wants(checkpoint, [Want("w", row, 0)], {0: found})
    assert found.tobytes() == whole[17:18].tobytes()
    assert read <= 2 << 20  # the blocks it lies in, of 16 MiB


def test_g_states_saved_in_turn_and_under_a_new_dtype_are_each_stored_as_they_are(
    tmp_path: Path,
) -> None:
    model = nn.Linear(3, 3)
    with holdfast.Checkpointer(tmp_path, {"model": model}) as checkpointer:
        checkpointer.restore()
        for step, dtype in enumerate([torch.float32, torch.bfloat16, torch.float32, torch.float64]):
            model.to(dtype)
            with torch.no_grad():
                model.weight.fill_(step)
            checkpointer.save(step, durable=True).wait_durable(timeout_s=60)
    for step, name in enumerate(["F32", "BF16", "F32", "F64"]):
        with holdfast.open(tmp_path, step=step) as checkpoint:
            assert checkpoint.leaves["model.weight"].dtype == name
            assert checkpoint.read("model.weight").unique().tolist() == [step]
    assert len(list((tmp_path / "layouts").iterdir())) == 3  # the first came back


def test_h_a_plain_handler_of_exceptions_catches_every_error() -> None:
    found = [e for e in vars(errors).values() if isinstance(e, type) and BaseException in e.mro()]
    assert len(found) > 15
    assert all(issubclass(error, Exception) for error in found)


def _calls(function: Callable[[], object]) -> int:
    """How many Python functions it calls: a measure of work that no busy machine changes."""
    count = 0

    def see(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("dim", [0, 1])
def test_i_proving_coverage_takes_no_longer_when_the_cut_dimension_is_not_the_longest(
    dim: int,
) -> None:
    shape = (2048, 1 << 20) if dim == 0 else (1 << 20, 2048)
    pieces = []
    for n in range(2048):
        start, stop = [0, 0], list(shape)
        start[dim], stop[dim] = n, n + 1
        pieces.append(Box(tuple(start), tuple(stop)))
    whole = Box.whole(shape)
    assert cover_fault(whole, pieces) is None
    assert cover_fault(whole, pieces[1:]) is not None
    assert _calls(lambda: cover_fault(whole, pieces)) < 20 * len(pieces)


def test_j_a_leaf_that_is_stored_in_part_is_refused_before_anything_is_read() -> None:
    whole = Layout(1, (split_leaf("w", "F32", (8, 4), 1),))
    half = Layout(1, (split_leaf("w", "F32", (4, 4), 1),))
    store = MemoryStore()
    leaf = random_leaf("F32", (8, 4), seed=1)
    # The layout, sound and agreed on by all, says there is more than the image holds.
    metadata = {
        "incarnation": "1",
        "step": "0",
        "attempt": "a0",
        "rank": "0",
        "world": "1",
        "layout": whole.hash,
    }
    plan = plan_image(image_items(half, 0))
    image = assemble(plan, {"w": leaf[:4].tobytes()}, metadata=metadata)
    manifest = publish_checkpoint(store, whole, {0: image})
    found = np.zeros((8, 4), dtype=np.int32)
    with pytest.raises(CoverageError, match="nothing was read"):
        read_wants(from_manifest(store, manifest), [Want("w", Box.whole((8, 4)), 0)], {0: found})
    assert not found.any()
    wanted, stored = Box.whole((8, 4)), [Box((0, 0), (4, 4))]
    fault = cover_fault(wanted, stored)
    assert fault is not None
    assert (fault.kind, fault.box) == ("missing", Box((4, 0), (8, 4)))


def _gpt(world: int, placement: Placement) -> Layout:
    """GPT-2 medium with AdamW: the names do not matter, the sizes do."""
    width = 1024
    rows: list[tuple[str, tuple[int, ...]]] = []
    for block in range(24):
        rows += [(f"h.{block}.attn", (3 * width, width)), (f"h.{block}.proj", (width, width))]
        rows += [(f"h.{block}.up", (4 * width, width)), (f"h.{block}.down", (width, 4 * width))]
        rows += [(f"h.{block}.norm.{n}", (width,)) for n in range(4)]
    rows += [("embed", (50257, width)), ("positions", (1024, width))]
    instances = (Instance(Mesh((world,), tuple(range(world))), (placement,)),)
    names = sorted(
        (f"{name}{kind}", shape) for name, shape in rows for kind in ("", ".exp_avg", ".exp_avg_sq")
    )
    return Layout(world, tuple(LeafSpec(n, "F32", s, "split", instances) for n, s in names))


@pytest.mark.parametrize("world", [2, 7, 8, 64])
def test_k_replicas_write_equal_shares(world: int) -> None:
    layout = _gpt(world, Placement(-1))
    loads = [
        sum(piece.box.volume * ITEMSIZE["F32"] for piece in layout.pieces(rank))
        for rank in range(world)
    ]
    assert max(loads) <= 1.003 * sum(loads) / world


def test_l_metadata_grow_with_leaves_and_not_with_ranks_times_leaves() -> None:
    sizes = {world: len(_gpt(world, Placement(0)).to_json()) for world in (8, 1024)}
    leaves = len(_gpt(8, Placement(0)).leaves)
    assert leaves > 300
    assert sizes[1024] - sizes[8] < 6 * 1024  # the ranks' numbers, once
    assert sizes[1024] < 128 * leaves
    assert json.loads(_gpt(1024, Placement(0)).to_json())["world"] == 1024
