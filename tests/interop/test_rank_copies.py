"""What several ranks hold of one value is compared: where copies differ, none is taken silently."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import holdfast
from holdfast.cli import main
from holdfast.errors import ForeignFormatError, HoldfastError, NotFound
from holdfast.geometry.box import Box
from holdfast.interop import deepspeed_directories
from holdfast.interop.foreign import Extent, ForeignCheckpoint, ForeignLeaf, StoredBox
from holdfast.interop.foreign_store import ForeignStore
from holdfast.interop.opening import open_source
from holdfast.interop.rank_copies import RankCopies
from holdfast.interop.source_files import SourceFiles
from holdfast.protocol.image_plan import plan_rank
from support.checkpoints.dcp_ways import quietly

GOLDEN = Path(__file__).parents[1] / "golden" / "foreign"
DEEPSPEED = GOLDEN / "deepspeed-0.19.8"


def copied(tmp_path: Path, case: str) -> Path:
    return Path(shutil.copytree(DEEPSPEED / case / "checkpoint", tmp_path / case))


def store_of(root: Path) -> ForeignStore:
    store = open_source(root)
    assert isinstance(store, ForeignStore)
    return store


def change(file: Path, **entries: Any) -> None:
    torch.save({**torch.load(file, weights_only=False), **entries}, file)


# ── parameters ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise
@pytest.mark.parametrize("case", ["tensor-zero1-fp32-4", "tensor-zero3-bf16-4"])
def test_a_parameter_that_is_another_on_a_second_tensor_rank_is_refused_by_name(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = copied(tmp_path, case)
    leaves = store_of(root).found.leaves
    copies = {name for name, leaf in leaves.items() if leaf.copies}
    for kind in ("model.{}", "optimizer.{}.exp_avg", "optimizer.{}.exp_avg_sq"):
        for name in ("norm.weight", "norm.bias", "down.bias"):
            assert kind.format(name) in copies
    assert not any("qkv" in name or "up." in name for name in copies), "each rank has its own"
    assert main(["verify", str(root), "--deep"]) == 0
    name = "optimizer.norm.bias.exp_avg"
    place = leaves[name].copies[-1].extent
    raw = bytearray((root / place.file).read_bytes())
    raw[place.offset] ^= 1
    (root / place.file).write_bytes(raw)
    said = rf"{Path(place.file).name}: '{name}' is on several ranks.*other bytes here than on the"
    with holdfast.open(root) as opened:
        with pytest.raises(ForeignFormatError, match=said):
            opened.read(name)
        opened.read("model.norm.bias"), opened.read("model.up.weight")
    capsys.readouterr()
    assert main(["verify", str(root), "--deep"]) != 0
    assert f"'{name}' is on several ranks" in capsys.readouterr().out
    assert main(["import", str(root), str(tmp_path / "root")]) != 0
    with pytest.raises(NotFound):
        holdfast.open(tmp_path / "root")


@given(st.data())
def test_every_byte_of_every_copy_is_compared_whatever_is_read(data: st.DataObject) -> None:
    """Copies that are cut otherwise, with strides, and reads of any range of elements."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    whole = Box.whole(shape)
    values = torch.arange(max(1, whole.volume), dtype=torch.float32).reshape(shape)
    dim = data.draw(st.integers(0, max(0, len(shape) - 1)))
    boxes = [whole]
    if shape:
        cut = data.draw(st.integers(0, shape[dim]))
        boxes = [whole.between(dim, 0, cut), whole.between(dim, cut, shape[dim])]
    is_turned = data.draw(st.booleans())
    memory, copies = b"", []
    for box in boxes:
        part = values[box.slices()] if shape else values
        strides = None
        if is_turned and len(shape) > 1 and not box.is_empty:
            turned = part.transpose(0, 1).contiguous()
            strides = turned.transpose(0, 1).stride()
            part = turned
        copies.append(StoredBox(box, Extent("file", len(memory), strides)))
        memory += part.numpy().tobytes()
    first = data.draw(st.integers(0, whole.volume - 1))
    stop = data.draw(st.integers(first + 1, whole.volume))
    raw = values.numpy().tobytes()[4 * first : 4 * stop]
    compare = RankCopies(_Memory(memory))
    compare.require_same("w", "F32", whole, 4 * first, memoryview(raw), copies)
    at = data.draw(st.integers(0, len(raw) - 1))
    changed = bytearray(raw)
    changed[at] ^= 4
    with pytest.raises(ForeignFormatError, match="'w' is on several ranks"):
        compare.require_same("w", "F32", whole, 4 * first, memoryview(changed), copies)


class _Memory(SourceFiles):
    """One file, in memory."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def where(self, name: str) -> str:
        return name

    def read_into(self, name: str, offset_bytes: int, buffer: memoryview) -> None:
        buffer[:] = self.data[offset_bytes : offset_bytes + len(buffer)]


def test_values_that_contain_themselves_are_compared_to_an_end() -> None:
    one: list[Any] = [1, float("nan")]
    other: list[Any] = [1, float("nan")]
    one.append(one)
    other.append(other)
    leaf = ForeignLeaf("F32", (1,), (StoredBox(Box.whole((1,)), Extent("file", 0)),))
    compare = RankCopies(_Memory(bytes(8)))
    assert compare.differing([{"a": one, "b": leaf}, {"a": other, "b": leaf}, {}]) == []
    other[0] = 1.0
    assert compare.differing([{"a": one}, {"a": other}]) == ["a"]


def test_values_that_are_nested_deep_are_compared_to_the_end() -> None:
    def nested(innermost: int) -> Any:
        value: Any = [innermost]
        for _ in range(5000):
            value = [value]
        return value

    compare = RankCopies(_Memory(bytes(8)))
    assert compare.differing([{"a": nested(1)}, {"a": nested(1)}]) == []
    assert compare.differing([{"a": nested(1)}, {"a": nested(2)}]) == ["a"]


# ── buffers and values ───────────────────────────────────────────────────────────────────────────


@pytest.mark.promise
@pytest.mark.parametrize(
    ("case", "file"),
    [
        ("tensor-zero1-fp32-4", "mp_rank_01_model_states.pt"),
        ("zero3-bf16-2", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
    ],
)
def test_buffers_and_client_states_that_differ_between_ranks_are_named(
    case: str, file: str, tmp_path: Path
) -> None:
    root = copied(tmp_path, case)
    assert not any("not the same" in note for note in store_of(root).notes)
    path = root / "global_step3" / file
    module = torch.load(path, weights_only=False)["module"]
    change(path, module={**module, "mean": module["mean"] + 1}, note="y")
    notes = store_of(root).notes
    for what in ("the buffer mean", "note of the client state"):
        assert any(f"{what} is not the same on all ranks: that of" in note for note in notes), notes
    first = store_of(root).found.leaves["model.mean"].parts[0].extent.file
    assert Path(first).name != file


@pytest.mark.promise
def test_a_single_value_that_ranks_have_of_their_own_is_no_state_of_a_parameter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the mean of squares that some optimizers keep of each flat group."""
    read = deepspeed_directories._Checkpoint._zero_state

    def with_single(self: deepspeed_directories._Checkpoint, name: str) -> dict[str, Any]:
        found = read(self, name)
        found["base_optimizer_state"]["state"][0]["rms"] = 0.5 if "pp_rank_0" in name else 1.5
        return found

    monkeypatch.setattr(deepspeed_directories._Checkpoint, "_zero_state", with_single)
    store = store_of(DEEPSPEED / "zero1-fp32-2" / "checkpoint")
    assert not any(name.startswith("optimizer") for name in store.found.leaves)
    assert any("the optimizer is left out: rms in" in note for note in store.notes)


# ── files of two saves ───────────────────────────────────────────────────────────────────────────


@pytest.mark.promise
@pytest.mark.parametrize(
    ("case", "file", "other"),
    [
        (
            "zero1-bf16-2",
            "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
            "zero_pp_rank_1_mp_rank_00_optim_states.pt",
        ),
        ("zero1-fp32-2", "mp_rank_00_model_states.pt", "mp_rank_0_model_states.pt"),
        (
            "zero3-bf16-2",
            "zero_pp_rank_0_mp_rank_00_model_states.pt",
            "mp_rank_00_model_states.pt",
        ),
    ],
)
def test_two_files_of_one_rank_are_refused(
    case: str, file: str, other: str, tmp_path: Path
) -> None:
    root = copied(tmp_path, case)
    shutil.copy(root / "global_step3" / file, root / "global_step3" / other)
    with pytest.raises(ForeignFormatError, match="files of two saves are mixed"):
        open_source(root)


@pytest.mark.promise
def test_metadata_of_dcp_that_place_one_item_twice_are_refused(tmp_path: Path) -> None:
    """Torch tells items apart by name and offset alone; of two it would take the last."""
    root = tmp_path / "step-1"
    quietly(dcp.save, {"ww": torch.ones(3), "xx": torch.ones(3)}, checkpoint_id=root)
    found = pickle.loads((root / ".metadata").read_bytes())
    found.storage_data = pickle.loads(pickle.dumps(found.storage_data))  # with names of its own
    before, name, behind = pickle.dumps(found).rpartition(b"\x8c\x02xx\x94")
    (root / ".metadata").write_bytes(before + name.replace(b"xx", b"ww") + behind)
    with pytest.raises(ForeignFormatError, match="a dictionary has a key twice"):
        open_source(root)
    at = behind.index(b"K\x00")  # the number of the shard, which torch does not compare
    behind = behind[:at] + b"K\x07" + behind[at + 2 :]
    (root / ".metadata").write_bytes(before + name.replace(b"xx", b"ww") + behind)
    with pytest.raises(ForeignFormatError, match="1 items of 'ww' are there twice"):
        open_source(root)


@pytest.mark.promise
def test_weights_beside_those_that_an_index_names_are_noted(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model-00001-of-00001.safetensors")
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    index = '{"weight_map": {"w": "model-00001-of-00001.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert any("model.safetensors is not read" in note for note in store_of(tmp_path).notes)


@pytest.mark.promise
def test_a_sharded_model_beside_a_whole_one_is_noted(tmp_path: Path) -> None:
    root = tmp_path / "state"
    shutil.copytree(GOLDEN / "accelerate-1.15.0" / "fsdp2" / "checkpoint", root)
    assert not any("is not read" in note for note in store_of(root).notes)
    torch.save({"w": torch.ones(2)}, root / "pytorch_model_fsdp.bin")
    notes = store_of(root).notes
    assert any("pytorch_model_fsdp_0/" in note and "is not read" in note for note in notes), notes
    with pytest.raises(HoldfastError), holdfast.open(root) as opened:
        opened.read("model.absent")


def test_parts_without_elements_are_in_no_image(tmp_path: Path) -> None:
    """Headers are computed from the layout too, which has none of them."""
    (tmp_path / "file").write_bytes(bytes(64))
    whole = Box.whole((3,))
    parts = [
        StoredBox(whole.between(0, min(rank, 3), min(rank + 1, 3)), Extent("file", 4 * rank), rank)
        for rank in range(4)
    ]
    nothing = ForeignLeaf("F32", (0,), (StoredBox(Box.whole((0,)), Extent("file", 0), 1),))
    leaves = {"n": nothing, "w": ForeignLeaf("F32", (3,), tuple(parts))}
    found = ForeignCheckpoint("x", 0, leaves, world=4)
    store = ForeignStore(SourceFiles(tmp_path), found)
    for rank in range(4):
        names = {entry.name for entry in store._parts.plan(rank)[0].entries}
        assert names == {entry.name for entry in plan_rank(store.layout, rank).entries}
