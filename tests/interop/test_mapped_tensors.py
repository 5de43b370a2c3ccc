"""Tensors for transformers map the images that they lie in: verified, and each its own memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.cli import main
from holdfast.errors import ChecksumMismatch, StorageError
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.interop.hugging_face import state_dict
from holdfast.restore.reading.mapped_leaves import MappedLeaves
from holdfast.restore.reading.reader import CheckpointReader
from holdfast.rules import Rules, rename, transpose
from holdfast.storage import files, local
from holdfast.storage.files import MappedFile
from holdfast.storage.open import open_store
from support.runs.launch import run_ranks

PAGE = 4096


@pytest.fixture(autouse=True)
def on_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tests' own directory lies on."""
    monkeypatch.setattr(local, "mounted_at", lambda path: ("ext4", "/"))


def model_of(kind: torch.dtype = torch.float32) -> torch.nn.Module:
    """Tensors of several blocks, of none, without dimensions, of other types, and a tied one."""
    torch.manual_seed(3)
    model = torch.nn.Module()
    model.large = torch.nn.Parameter(torch.randn(700, 600).to(kind))
    model.tied = model.large
    model.small = torch.nn.Parameter(torch.randn(3, 5, dtype=torch.bfloat16))
    model.scale = torch.nn.Parameter(torch.tensor(2.5, dtype=torch.float64))
    model.nothing = torch.nn.Parameter(torch.zeros(0, 4))
    model.register_buffer("flags", torch.tensor([True, False, True]))
    model.register_buffer("codes", torch.arange(6, dtype=torch.uint8).view(torch.float8_e4m3fn))
    return model


def image_of(root: Path) -> Path:
    return max(root.rglob("*.safetensors"), key=lambda path: path.stat().st_size)


def is_mapped(tensor: torch.Tensor, image: Path) -> bool:
    """True if the elements lie in a mapping of the file."""
    inode = str(image.stat().st_ino)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, _, _, number, *_ = line.split()
        first, last = (int(one, 16) for one in span.split("-"))
        if first <= tensor.data_ptr() < last:
            assert number != inode or rights == "rw-p", "writes stay in the process"
            return number == inode
    return False


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def check(found: dict[str, torch.Tensor], model: torch.nn.Module) -> None:
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


def saved(root: Path, model: torch.nn.Module) -> Path:
    holdfast.save(root, {"model": model}, step=1)
    return image_of(root)


def test_whole_tensors_map_the_image_and_have_its_bits(tmp_path: Path) -> None:
    model = model_of()
    image = saved(tmp_path, model)
    found = state_dict(tmp_path)
    check(found, model)
    assert found["tied"] is found["large"]
    for name, tensor in found.items():
        assert is_mapped(tensor, image) == (name != "nothing"), name
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, "each has its own storage"


def test_what_is_written_to_a_tensor_stays_in_the_process(tmp_path: Path) -> None:
    model = model_of()
    before = saved(tmp_path, model).read_bytes()
    found = state_dict(tmp_path)
    for name, tensor in found.items():
        if name != "tied":
            tensor.copy_(torch.ones(tensor.shape).to(tensor.dtype))
    assert bits(found["small"]) != bits(model.state_dict()["small"])
    assert image_of(tmp_path).read_bytes() == before
    assert main(["verify", str(tmp_path), "--deep"]) == 0
    check(state_dict(tmp_path), model)


def test_tensors_outlive_the_checkpoint_that_retention_removes(tmp_path: Path) -> None:
    model = model_of()
    saved(tmp_path / "root", model)
    found = state_dict(tmp_path / "root")
    shutil.rmtree(tmp_path / "root")
    check(found, model)


def test_a_changed_byte_is_found_before_a_tensor_is_given_out(tmp_path: Path) -> None:
    model = model_of()
    image = saved(tmp_path, model)
    data = bytearray(image.read_bytes())
    at = data.index(bits(model.state_dict()["large"])[:64])
    data[at] ^= 1
    image.write_bytes(data)
    with pytest.raises(ChecksumMismatch, match="block 0 of"):
        state_dict(tmp_path)


def test_a_file_that_is_cut_is_an_error_and_ends_no_process(tmp_path: Path) -> None:
    """Behind the mapping: before it, its length is compared with the manifest."""
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * PAGE))
    with path.open("rb") as file:
        mapped = MappedFile(file.fileno(), 3 * PAGE)
    mapped.load(0, 3 * PAGE)
    with path.open("r+b") as file:
        file.truncate(PAGE)
    mapped.load(0, PAGE)
    with pytest.raises(OSError, match="Input/output error"):
        mapped.load(PAGE + 7, 3 * PAGE)


def test_a_page_that_the_disk_cannot_read_is_an_error_of_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, model_of())
    load = MappedFile.load

    def failing(self: MappedFile, start: int, stop: int) -> None:
        load(self, start, stop)
        if stop > BLOCK_BYTES:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(MappedFile, "load", failing)
    with pytest.raises(StorageError, match=r"read of .* failed: Input/output error"):
        state_dict(tmp_path)


def on_nfs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(local, "mounted_at", lambda path: ("nfs4", "/"))
    return {}


def on_an_old_kernel(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(files, "_MADV_POPULATE_READ", 1 << 20)
    return {}


def asked_not_to(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"copy": True}


@pytest.mark.parametrize("reason", [on_nfs, on_an_old_kernel, asked_not_to])
def test_where_a_mapping_is_no_copy_tensors_are_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reason: Callable[[pytest.MonkeyPatch], dict[str, Any]],
) -> None:
    model = model_of()
    image = saved(tmp_path, model)
    found = state_dict(tmp_path, **reason(monkeypatch))
    check(found, model)
    assert not any(is_mapped(tensor, image) for tensor in found.values())


def test_rules_that_rename_keep_a_mapping_and_others_read(tmp_path: Path) -> None:
    model = torch.nn.Linear(5, 3)
    image = saved(tmp_path, model)
    found = state_dict(tmp_path, rules=Rules([("weight", rename("inner.weight"))]))
    assert torch.equal(found["inner.weight"], model.weight)
    assert is_mapped(found["inner.weight"], image) and is_mapped(found["bias"], image)
    turned = state_dict(tmp_path, rules=Rules([("weight", transpose(1, 0))]))
    assert torch.equal(turned["weight"], model.weight.T)
    assert not is_mapped(turned["weight"], image) and is_mapped(turned["bias"], image)


def test_a_leaf_is_given_out_once(tmp_path: Path) -> None:
    saved(tmp_path, model_of())
    with CheckpointReader(open_store(tmp_path), 1) as opened:
        leaves = MappedLeaves(opened.checkpoint)
        assert leaves.take("model.small") is not None
        assert leaves.take("model.small") is None, "two tensors in one memory would change together"
        assert leaves.take("model.other") is None
        assert 0 < leaves.verify() <= BLOCK_BYTES and leaves.verify() == 0


def halves(rank: int, world: int, root: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(6, 8)
    torch.nn.init.constant_(model.weight, 0.5)
    torch.nn.init.constant_(model.bias, 0.25)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    holdfast.save(root, {"model": model}, step=1)


def test_a_leaf_in_two_images_is_read(tmp_path: Path) -> None:
    run_ranks(2, halves, str(tmp_path))
    found = state_dict(tmp_path)
    assert torch.equal(found["weight"], torch.full((8, 6), 0.5))
    images: Iterator[Path] = tmp_path.rglob("*.safetensors")
    assert not any(is_mapped(found["weight"], image) for image in images)
