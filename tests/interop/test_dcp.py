"""Directories of DCP: loaded into other layouts bit for bit; what is damaged is never used."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import holdfast
from holdfast.errors import CoverageError, ForeignFormatError, HoldfastError
from holdfast.interop.foreign_store import ForeignStore
from holdfast.interop.opening import open_source
from support.models.models import (
    build,
    differences,
    fill_with_numbers,
    make_optimizer_state,
    truth,
)
from support.runs.launch import run_ranks


def _loadable(state: dict[str, Any]) -> dict[str, Any]:
    """The part of a state that DCP stores too."""
    return {key: state[key] for key in ("model", "optimizer", "scheduler", "tokens", "notes")}


def _state_dict(state: dict[str, Any], *, flat: bool = False) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = get_state_dict(state["model"], state["optimizer"], options=options)
    rest = {"scheduler": state["scheduler"].state_dict(), "tokens": state["tokens"]}
    return {"model": model, "optimizer": optimizer, **rest, "notes": state["notes"]}


def _saved(rank: int, world: int, layout: str, root: str, flat: bool) -> dict[str, Any]:
    """Save by DCP; what its own loader gives back into another model."""
    _, state = build(layout, seed=1)
    make_optimizer_state(state)
    fill_with_numbers(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(_state_dict(state, flat=flat), checkpoint_id=root)
        _, other = build(layout, seed=2)
        make_optimizer_state(other)
        there = _state_dict(other, flat=flat)
        dcp.load(there, checkpoint_id=root)
        set_state_dict(
            other["model"],
            other["optimizer"],
            model_state_dict=there["model"],
            optim_state_dict=there["optimizer"],
            options=StateDictOptions(flatten_optimizer_state_dict=flat),
        )
    found = truth(other)
    return found | {"scheduler": there["scheduler"], "tokens": there["tokens"]}


def _loaded(rank: int, world: int, layout: str, root: str) -> dict[str, Any]:
    _, state = build(layout, seed=3)
    some = _loadable(state)
    assert holdfast.load(root, some).step == 12
    return truth({**state, **some})


@pytest.mark.parametrize(
    ("world", "layout", "flat"),
    [(2, "fsdp", False), (2, "tp", True), (4, "fsdp_tp", False)],
)
def test_what_dcp_saved_is_loaded_into_other_layouts_as_its_own_loader_gives_it(
    tmp_path: Path, world: int, layout: str, flat: bool
) -> None:
    root = str(tmp_path / "step-12")
    expected = run_ranks(world, _saved, layout, root, flat)[0]
    for other_world, other in ((1, "plain"), (2, "fsdp"), (2, "tp")):
        if (other_world, other) != (world, layout):
            for found in run_ranks(other_world, _loaded, other, root):
                assert differences(found, expected) == []


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(40, 6).to(torch.bfloat16))
        self.n = nn.Buffer(torch.tensor(3))
        self.empty = nn.Buffer(torch.zeros(0, 4))


def save(tree: dict[str, Any], root: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tree, checkpoint_id=root, no_dist=True)
    return root


def test_names_at_the_top_are_the_model_as_torchtitan_writes_them(tmp_path: Path) -> None:
    model = Plain()
    flat = {**model.state_dict(), "train_state": {"step": torch.tensor(7)}, "note": "x"}
    root = save(flat, tmp_path / "dcp")
    other = Plain()
    state: dict[str, Any] = {"model": other, "train_state": {"step": torch.tensor(0)}, "note": ""}
    holdfast.load(root, state)
    assert torch.equal(other.w, model.w) and torch.equal(other.n, model.n)
    assert state["train_state"]["step"] == 7 and state["note"] == "x"


class App:
    """A model and its optimizer in one object, as torch's own pages on DCP have them."""

    def __init__(self, seed: int, *, flat: bool = False) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(4, 3)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.1 + seed)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optim, 1)
        self.flat = flat
        self.model(torch.ones(4)).sum().backward()
        self.optim.step()
        self.schedule.step()

    def state_dict(self) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=self.flat)
        model, optim = get_state_dict(self.model, self.optim, options=options)
        rest = {"schedule": self.schedule.state_dict(), "epoch": 7}
        return {"model": model, "optim": optim, **rest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("it is not loaded by torch")


@pytest.mark.parametrize("writer", ["nested", "flat", "numbered"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_model_and_its_optimizer_in_a_dictionary_are_loaded_by_their_paths(
    tmp_path: Path, writer: str, depth: int
) -> None:
    one, other = App(1, flat=writer == "flat"), App(2)
    source = tmp_path / "step-5"
    held: Any = one
    if writer == "numbered":
        held = {**one.state_dict(), "model": one.model.state_dict()}
        held["optim"] = one.optim.state_dict()
        source = tmp_path / "step-5.pt"
    elif depth == 2:  # torch asks the objects at the top alone
        held = one.state_dict()
    state: dict[str, Any] = {"app": held if depth == 1 else {"main": held}}
    if writer == "numbered":
        torch.save(state, source)
    else:
        save(state, source)
    mine: dict[str, Any] = {"model": other.model, "optim": other.optim, "epoch": 0}
    mine["schedule"] = other.schedule
    state = {"app": mine if depth == 1 else {"main": mine}}
    assert holdfast.load(source, state).step == 5
    for name, parameter in one.model.named_parameters():
        there = other.model.get_parameter(name)
        assert torch.equal(parameter, there)
        for kind, moment in one.optim.state[parameter].items():
            assert torch.equal(moment, other.optim.state[there][kind])
    assert other.optim.param_groups[0]["lr"] == one.optim.param_groups[0]["lr"]
    assert mine["epoch"] == 7 and other.schedule.state_dict() == one.schedule.state_dict()


class TaughtApp(App):
    """The same as an object that is loaded as one, by torch and here."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optim,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=StateDictOptions(flatten_optimizer_state_dict=self.flat),
        )
        self.schedule.load_state_dict(state["schedule"])


@pytest.mark.promise
@pytest.mark.parametrize("writer", ["nested", "flat", "torch"])
@pytest.mark.parametrize("depth", [1, 2])
def test_an_object_that_holds_a_model_and_its_optimizer_is_loaded_as_one(
    tmp_path: Path, writer: str, depth: int
) -> None:
    one, other = (TaughtApp(seed, flat=writer == "flat") for seed in (1, 2))
    source = tmp_path / ("step-5.pt" if writer == "torch" else "step-5")
    held: Any = one if depth == 1 and writer != "torch" else one.state_dict()
    state: dict[str, Any] = {"app": held if depth == 1 else {"main": held, "n": 3}}
    if writer == "torch":
        torch.save(state, source)
    else:
        save(state, source)
    state = {"app": other if depth == 1 else {"main": other, "n": 0}}
    assert holdfast.load(source, state).step == 5
    for name, parameter in one.model.named_parameters():
        there = other.model.get_parameter(name)
        assert torch.equal(parameter, there)
        for kind, moment in one.optim.state[parameter].items():
            assert torch.equal(moment, other.optim.state[there][kind])
    assert other.optim.param_groups[0]["lr"] == one.optim.param_groups[0]["lr"]
    assert other.schedule.state_dict() == one.schedule.state_dict()
    assert depth == 1 or state["app"]["n"] == 3


def test_a_transposed_tensor_comes_back_in_its_order(tmp_path: Path) -> None:
    turned = torch.arange(24.0).reshape(4, 6).T
    root = save({"model": {"w": turned}, "a": {"t": turned[1:]}}, tmp_path / "dcp")
    with holdfast.open(root) as opened:
        assert torch.equal(opened.read("model.w"), turned)
        assert torch.equal(opened.read("model.w", (slice(2, 5), slice(1, 3))), turned[2:5, 1:3])
        assert torch.equal(opened.read("a.t"), turned[1:])


@pytest.mark.promise
def test_a_shard_of_another_save_is_found_before_its_bytes_are_used(tmp_path: Path) -> None:
    one = save({"w": torch.zeros(8, 8), "v": torch.zeros(4)}, tmp_path / "one")
    other = save({"w": torch.zeros(4), "v": torch.zeros(8, 8)}, tmp_path / "other")
    os.replace(other / "__0_0.distcp", one / "__0_0.distcp")
    with holdfast.open(one) as opened, pytest.raises(HoldfastError, match=r"byte \d+"):
        opened.read("model.w")


@pytest.mark.promise
def test_elements_that_no_file_has_are_an_error_before_anything_is_read(tmp_path: Path) -> None:
    root = save({"w": torch.ones(8, 8)}, tmp_path / "dcp")
    raw = pickle.loads((root / ".metadata").read_bytes())
    raw.state_dict_metadata["w"].chunks[0].sizes = torch.Size([4, 8])
    (root / ".metadata").write_bytes(pickle.dumps(raw))
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(8, 8))})
    with pytest.raises(HoldfastError, match="not at all") as error:
        holdfast.load(root, {"model": model})
    assert isinstance(error.value, CoverageError) or "model.w" in str(error.value)
    assert torch.equal(model["w"], torch.zeros(8, 8))


@pytest.mark.promise
def test_two_items_on_the_same_bytes_are_refused_by_name(tmp_path: Path) -> None:
    """An offset that is another's would give one tensor the elements of the other."""
    root = save({"w": torch.ones(4), "v": torch.zeros(4)}, tmp_path / "dcp")
    raw = pickle.loads((root / ".metadata").read_bytes())
    one, other = raw.storage_data.values()
    one.offset = other.offset
    (root / ".metadata").write_bytes(pickle.dumps(raw))
    with pytest.raises(HoldfastError, match=rf"{root}/\.metadata.* lie on the same bytes"):
        holdfast.open(root)


def test_a_short_file_is_named(tmp_path: Path) -> None:
    root = save({"w": torch.ones(64, 64)}, tmp_path / "dcp")
    file = root / "__0_0.distcp"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(HoldfastError, match=rf"not at all.*{file} has \d+ bytes, \d+ are named"):
        holdfast.load(root, {"model": nn.ParameterDict({"w": nn.Parameter(torch.zeros(64, 64))})})
    file.unlink()
    model = {"model": nn.ParameterDict({"w": nn.Parameter(torch.zeros(64, 64))})}
    with pytest.raises(HoldfastError, match=rf"{file} is not there\. Copy what is missing here"):
        holdfast.load(root, model)


def test_a_directory_without_metadata_says_so(tmp_path: Path) -> None:
    root = save({"w": torch.ones(3)}, tmp_path / "dcp")
    (root / ".metadata").unlink()
    with pytest.raises(holdfast.UsageError, match=r"no \.metadata: the save was not finished"):
        holdfast.open(root)


def test_metadata_that_name_a_file_outside_are_refused(tmp_path: Path) -> None:
    root = save({"w": torch.ones(3)}, tmp_path / "dcp")
    raw = pickle.loads((root / ".metadata").read_bytes())
    for info in raw.storage_data.values():
        info.relative_path = "../../etc/passwd"
    (root / ".metadata").write_bytes(pickle.dumps(raw))
    with pytest.raises(ForeignFormatError, match="not below its directory"):
        holdfast.open(root)


@pytest.mark.promise
def test_an_item_of_no_bytes_and_a_key_of_another_kind_are_refused(tmp_path: Path) -> None:
    for kind, words in (("empty", "item of 0 bytes"), ("key", "a key that is a tuple")):
        root = save({"w": torch.arange(6.0)}, tmp_path / kind)
        raw = pickle.loads((root / ".metadata").read_bytes())
        ((index, info),) = raw.storage_data.items()
        if kind == "empty":
            info.length = 0
        else:
            raw.storage_data = {("x", index.fqn, index.offset, index.index): info}
        (root / ".metadata").write_bytes(pickle.dumps(raw))
        with pytest.raises(ForeignFormatError, match=words):
            holdfast.open(root)


def test_there_are_as_many_images_as_ranks_with_files(tmp_path: Path) -> None:
    root = save({"w": torch.arange(6.0)}, tmp_path / "dcp")
    os.rename(root / "__0_0.distcp", root / "__65535_0.distcp")
    raw = pickle.loads((root / ".metadata").read_bytes())
    for info in raw.storage_data.values():
        info.relative_path = "__65535_0.distcp"
    (root / ".metadata").write_bytes(pickle.dumps(raw))
    found = open_source(root)
    assert isinstance(found, ForeignStore) and found.found.world == 1
    with holdfast.open(root) as opened:
        assert torch.equal(opened.read("model.w"), torch.arange(6.0))


def test_links_that_lead_nowhere_or_to_folders_are_no_matter(tmp_path: Path) -> None:
    root = save({"w": torch.arange(6.0)}, tmp_path / "dcp")
    os.symlink("/nonexistent", root / ".aa")
    os.symlink(tmp_path, root / ".bb")
    with holdfast.open(root) as opened:
        assert torch.equal(opened.read("model.w"), torch.arange(6.0))


def test_no_group_is_needed() -> None:
    assert not dist.is_initialized()


def test_a_tensor_of_an_unknown_type_is_left_out_with_its_name_and_file(tmp_path: Path) -> None:
    strange = torch.zeros(4, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": {"w": torch.ones(3), "x": strange}}, checkpoint_id=tmp_path, no_dist=True)
    store = open_source(tmp_path)
    (note,) = [one for one in store.notes if "left out" in one]  # type: ignore[attr-defined]
    file = tmp_path / "__0_0.distcp"
    assert note.startswith(f"a.x is a tensor of torch.float8_e8m0fnu in {file}")
    with holdfast.open(tmp_path) as opened:
        assert opened.read("a.w").tolist() == [1.0, 1.0, 1.0]
