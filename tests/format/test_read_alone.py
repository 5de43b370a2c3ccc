"""The reader that was written from the document alone gives what was saved, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.geometry.box import ITEMSIZE
from holdfast.geometry.layout import Layout
from holdfast.storage.local import LocalStore
from support.checkpoints.forge import GENERATION, LEAVES, copy_of, make_good
from support.checkpoints.images import images_of, publish_checkpoint, random_leaf, split_leaf
from support.models.models import build, make_optimizer_state, truth
from support.runs.launch import run_ranks

READER = Path(__file__).parents[2] / "examples" / "read_with_only_safetensors.py"

#: Runs a script where nobody can import holdfast or torch, however they are installed.
ALONE = """
import runpy, sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("holdfast", "torch"):
            raise ImportError(f"{name} is hidden")

sys.meta_path.insert(0, Nothing())
for name in ("holdfast", "torch"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise SystemExit(f"{name} is there")
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    assert not {"holdfast", "torch", "msgspec"} & set(sys.modules)
"""


def read_alone(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-c", ALONE, str(READER), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def leaf_alone(root: Path, name: str, where: Path) -> Any:
    done = read_alone(root, name, where)
    assert done.returncode == 0, done.stderr
    return np.load(where)


def _save_uneven(rank: int, world: int, root: str) -> dict[str, Any]:
    """Two checkpoints of a model cut in parts that do not divide; what is in the newest."""
    _, state = build("fsdp", seed=3)
    for step in (7, 8):
        make_optimizer_state(state)
        state["c"] = torch.arange(600).to(torch.complex128) * (1j + step)
        state["half"] = torch.arange(5000, dtype=torch.bfloat16) / 8
        holdfast.save(root, state, step=step)
    whole = {
        f"model.{name}": tensor
        for name, tensor in truth(state).items()
        if isinstance(tensor, torch.Tensor) and "exp_avg" not in name
    }
    found = {name: t.numpy() for name, t in whole.items() if not name.endswith(".step")}
    found["c"], found["half"] = state["c"].numpy(), state["half"].view(torch.int16).numpy()
    return found


def test_every_leaf_of_several_ranks_is_read_without_holdfast_bit_for_bit(tmp_path: Path) -> None:
    saved, *_ = run_ranks(3, _save_uneven, str(tmp_path / "root"))
    done = read_alone(tmp_path / "root")
    assert done.returncode == 0, done.stderr
    listed, *leaves = done.stdout.splitlines()
    assert listed == "checkpoints: 1-7 2-8"
    names = {line.split()[0] for line in leaves}
    assert set(saved) <= names
    assert "half BF16 [5000]" in leaves
    some = [
        "c",
        "half",
        "model.blocks.0.up.weight",
        "model.norm.running_var",
        "model.norm.num_batches_tracked",
        "model.blocks.1.seen",
    ]
    for name in some:
        found = leaf_alone(tmp_path / "root", name, tmp_path / "leaf.npy")
        assert found.shape == saved[name].shape
        assert found.tobytes() == saved[name].tobytes(), name


@pytest.mark.parametrize("name", ["fsdp-uneven", "fsdp-tensor-parallel"])
def test_a_golden_checkpoint_is_read_without_holdfast(name: str, tmp_path: Path) -> None:
    root = READER.parents[1] / "tests" / "golden" / "v1" / name
    tied = leaf_alone(root, "model.head.weight", tmp_path / "leaf.npy")
    start = sum(b"model.embed.weight")
    assert tied.tolist() == [
        [(start + 3 * (4 * row + column)) % 256 / 8 for column in range(4)] for row in range(5)
    ]


def test_a_frozen_leaf_is_read_without_holdfast_from_a_file_that_other_manifests_name(
    tmp_path: Path,
) -> None:
    root = READER.parents[1] / "tests" / "golden" / "v1-frozen-parts" / "frozen"
    found = leaf_alone(root, "model.base", tmp_path / "leaf.npy")
    places = np.arange(510 * 515).reshape(510, 515)
    assert np.array_equal(found, (sum(b"model.base") + 3 * places) % 256 / 8)
    assert leaf_alone(root, "model.adapter", tmp_path / "leaf.npy").tolist() == [[2.0] * 5] * 3


def test_leaves_that_no_mesh_describes_are_read_without_holdfast(tmp_path: Path) -> None:
    root = READER.parents[1] / "tests" / "golden" / "v1-listings" / "listed"
    for name, shape in (("copies", (5, 7)), ("flat", (5, 7)), ("stack", (4, 3, 5))):
        places = np.arange(np.prod(shape)).reshape(shape)
        found = leaf_alone(root, name, tmp_path / "leaf.npy")
        assert np.array_equal(found, (sum(name.encode()) + 3 * places) % 256 / 8)


def test_every_element_type_is_read_without_holdfast(tmp_path: Path) -> None:
    world = 3
    layout = Layout(world, tuple(split_leaf(d, d, (7, 2), world) for d in sorted(ITEMSIZE)))
    leaves = {name: random_leaf(name, (7, 2), seed) for seed, name in enumerate(sorted(ITEMSIZE))}
    publish_checkpoint(LocalStore(tmp_path / "root"), layout, images_of(layout, leaves))
    for name in ("BF16", "F32", "C128", "C32", "BOOL", "F8_E8M0", "INT3", "BITS16"):
        found = leaf_alone(tmp_path / "root", name, tmp_path / "leaf.npy")
        assert found.shape == (7, 2)
        assert found.tobytes() == leaves[name].tobytes(), name


def test_leaves_without_elements_or_dimensions_are_read_without_holdfast(tmp_path: Path) -> None:
    make_good(tmp_path / "root")
    for name in ("empty", "s"):
        found = leaf_alone(tmp_path / "root", name, tmp_path / "leaf.npy")
        assert found.shape == LEAVES[name].shape
        assert found.tobytes() == LEAVES[name].tobytes()


@pytest.mark.parametrize("at", [20, 4000, 4100, 8200])
def test_the_reader_alone_notices_what_changed(at: int, tmp_path: Path) -> None:
    make_good(tmp_path / "good")
    forger = copy_of(tmp_path / "good", tmp_path / "root")
    data = bytearray(forger.image_path(0).read_bytes())
    data[at] ^= 4
    forger.image_path(0).write_bytes(data)
    done = read_alone(tmp_path / "root", "w", tmp_path / "leaf.npy")
    assert done.returncode != 0
    assert not (tmp_path / "leaf.npy").exists()


def test_the_reader_alone_leaves_out_what_was_abandoned(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    layout = Layout(1, (split_leaf("w", "F32", (2,), 1),))
    leaves = {"w": random_leaf("F32", (2,), 0)}
    for generation, parent in (((1, 10), None), ((1, 30), None), ((2, 20), (1, 10))):
        made = type(GENERATION)(*generation)
        images = images_of(layout, leaves, generation=made)
        publish_checkpoint(store, layout, images, made, parent=parent)
    assert "checkpoints: 1-10 2-20\n" in read_alone(tmp_path).stdout
