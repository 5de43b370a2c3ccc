"""What is exported is what torch, DCP and safetensors read, bit for bit, and comes back."""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import holdfast
from holdfast.cli.checkpoints import open_checkpoint, open_readable
from holdfast.errors import UsageError
from holdfast.interop.writing import export_files
from holdfast.interop.writing.chosen_leaves import ChosenLeaf, LeafReader
from holdfast.interop.writing.formats import plan_format
from holdfast.interop.writing.saved_state import saved_state
from holdfast.interop.writing.state_tree import SavedState, state_tree
from support.checkpoints.commands import error_of, json_of, run_alone, text_of

Out = pytest.CaptureFixture[str]
FORMATS = ("dcp", "torch", "safetensors")
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu),
)


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, whatever its type is."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def same(one: Any, other: Any) -> bool:
    """True for equal values, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        is_alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return is_alike and bits(one) == bits(other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        alike = len(one) == len(other) and type(one) is type(other)
        return alike and all(map(same, one, other))
    return bool(one == other)


def of_every_type(more: tuple[torch.dtype, ...] = ()) -> torch.nn.Module:
    """A module with a tensor of each type: a matrix, a scalar and an empty one."""
    module = torch.nn.Module()
    raw = torch.randint(0, 256, (6, 7, 16), generator=torch.Generator().manual_seed(3))
    for dtype in (*DTYPES, *more):
        item = torch.empty((), dtype=dtype).element_size()
        name = str(dtype).removeprefix("torch.")
        some = raw[..., :item].to(torch.uint8).contiguous()
        if dtype is torch.bool:
            some = some % 2
        whole = some.view(dtype).reshape(6, 7)
        module.register_buffer(f"{name}_matrix", whole)
        module.register_buffer(f"{name}_scalar", whole[2, 3].clone())
        module.register_buffer(f"{name}_empty", whole[:0].clone())
    return module


@pytest.fixture
def every_root(tmp_path: Path) -> tuple[Path, torch.nn.Module]:
    module = of_every_type()
    holdfast.save(tmp_path / "root", {"model": module}, step=4)
    return tmp_path / "root", module


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4))
    groups = [
        {"params": [model[0].weight], "weight_decay": 0.1},
        {"params": [model[0].bias, model[1].weight, model[1].bias], "lr": 0.5},
    ]
    optimizer = torch.optim.AdamW(groups)
    for _ in range(2):
        step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    inputs = torch.linspace(0, 1, 30).reshape(6, 5)
    model(inputs).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "n": 3, "s": "text"}
    state |= {"more": {"a": torch.zeros(0, 2), "b": (1, torch.tensor(2.0)), "c": [None, b"\0x"]}}
    holdfast.save(tmp_path / "root", state, step=5)
    return tmp_path / "root"


def load_dcp(path: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path, no_dist=True)


# ── what others read ─────────────────────────────────────────────────────────────────────────


def test_torch_load_reads_every_type(
    every_root: tuple[Path, torch.nn.Module], tmp_path: Path, capsys: Out
) -> None:
    source, module = every_root
    text_of(capsys, "export", source, tmp_path / "out.pt", "--to", "torch")
    for mapped in (False, True):
        read = torch.load(tmp_path / "out.pt", weights_only=True, mmap=mapped)
        assert same(dict(module.state_dict()), read["model"])
    assert zipfile.ZipFile(tmp_path / "out.pt").testzip() is None


def test_dcp_load_reads_every_type(
    every_root: tuple[Path, torch.nn.Module], tmp_path: Path, capsys: Out
) -> None:
    source, module = every_root
    text_of(capsys, "export", source, tmp_path / "out", "--to", "dcp")
    read = {name: torch.zeros_like(one) for name, one in module.state_dict().items()}
    load_dcp(tmp_path / "out", {"model": read})
    assert same(dict(module.state_dict()), read)


def test_safetensors_reads_every_type(
    every_root: tuple[Path, torch.nn.Module], tmp_path: Path, capsys: Out
) -> None:
    source, module = every_root
    text_of(capsys, "export", source, tmp_path / "out", "--to", "safetensors")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        read = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert same(dict(module.state_dict()), read)


@pytest.mark.parametrize("to", FORMATS)
def test_what_is_exported_comes_back_as_it_was(
    every_root: tuple[Path, torch.nn.Module], tmp_path: Path, capsys: Out, to: str
) -> None:
    module = torch.nn.Module()
    for name, one in every_root[1].state_dict().items():
        if "fnu" not in name or to == "safetensors":
            module.register_buffer(name, one)
    holdfast.save(tmp_path / "some", {"model": module})
    wanted = dict(module.state_dict())
    out = tmp_path / "out.pt"
    text_of(capsys, "export", tmp_path / "some", out, "--to", to)
    for one in module.buffers():
        one.view(torch.uint8).zero_() if one.ndim else one.reshape(1).view(torch.uint8).zero_()
    wanted = {name: one.clone() for name, one in wanted.items()}
    fresh = torch.nn.Module()
    for name, one in wanted.items():
        fresh.register_buffer(name, torch.zeros_like(one))
    holdfast.load(out, {"model": fresh})
    with holdfast.open(tmp_path / "some") as ours:
        for name, one in fresh.state_dict().items():
            assert bits(one) == bits(ours.read(f"model.{name}")), name


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_a_type_that_a_format_has_no_name_for_is_refused_by_leaf(
    tmp_path: Path, capsys: Out, to: str
) -> None:
    module = torch.nn.Module()
    module.register_buffer("odd", torch.zeros(3, dtype=torch.complex128))
    holdfast.save(tmp_path / "root", {"model": module})
    if to == "dcp":  # torch has them all
        text_of(capsys, "export", tmp_path / "root", tmp_path / "out", "--to", to)
        return
    said = error_of(capsys, "export", tmp_path / "root", tmp_path / "out", "--to", to, code=2)
    assert "model.odd" in said or "odd is C128" in said
    assert not (tmp_path / "out").exists()


# ── optimizers and values ────────────────────────────────────────────────────────────────────


def test_torch_load_gives_the_state_that_torch_takes(
    root: Path, tmp_path: Path, capsys: Out
) -> None:
    text_of(capsys, "export", root, tmp_path / "out.pt", "--to", "torch")
    read = torch.load(tmp_path / "out.pt", weights_only=True)
    model, optimizer = trained()
    assert same(dict(model.state_dict()), read["model"])
    wanted = optimizer.state_dict()
    assert same(wanted["state"], read["optimizer"]["state"])
    assert read["scheduler"]["step_size"] == 3 and read["n"] == 3 and read["s"] == "text"
    assert same(read["more"]["b"], (1, torch.tensor(2.0))) and read["more"]["c"] == [None, b"\0x"]
    again, resumed = trained()
    for one in again.state_dict().values():
        one.zero_()
    resumed.state.clear()
    again.load_state_dict(read["model"])
    resumed.load_state_dict(read["optimizer"])
    step(again, resumed)
    step(model, optimizer)
    assert same(dict(model.state_dict()), dict(again.state_dict()))


def test_dcp_load_gives_the_state_that_set_state_dict_takes(
    root: Path, tmp_path: Path, capsys: Out
) -> None:
    text_of(capsys, "export", root, tmp_path / "out", "--to", "dcp")
    model, optimizer = trained()
    again, resumed = trained()
    step(again, resumed)  # another state
    state: dict[str, Any] = {
        "model": get_model_state_dict(again),
        "optimizer": get_optimizer_state_dict(again, resumed),
        "n": 0,
        "more": {"a": torch.ones(0, 2), "c": []},
    }
    load_dcp(tmp_path / "out", state)
    set_optimizer_state_dict(again, resumed, state["optimizer"])
    assert state["n"] == 3 and state["more"]["c"] == [None, b"\0x"]
    assert same(get_model_state_dict(model), state["model"])
    assert same(
        get_optimizer_state_dict(model, optimizer), get_optimizer_state_dict(again, resumed)
    )
    step(again, resumed)
    step(model, optimizer)
    assert same(dict(model.state_dict()), dict(again.state_dict()))


@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_a_whole_state_comes_back_into_live_objects(
    root: Path, tmp_path: Path, capsys: Out, to: str
) -> None:
    text_of(capsys, "export", root, tmp_path / "out.pt", "--to", to)
    model, optimizer = trained()
    again, resumed = trained()
    step(again, resumed)
    state = {"model": again, "optimizer": resumed, "n": 0, "s": ""}
    holdfast.load(tmp_path / "out.pt", state)
    assert (state["n"], state["s"]) == (3, "text")
    step(again, resumed)
    step(model, optimizer)
    assert same(dict(model.state_dict()), dict(again.state_dict()))


# ── windows, shards, names ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("to", FORMATS)
def test_the_bytes_are_the_same_whatever_the_windows_are(
    every_root: tuple[Path, torch.nn.Module],
    root: Path,
    tmp_path: Path,
    capsys: Out,
    monkeypatch: pytest.MonkeyPatch,
    to: str,
) -> None:
    text_of(capsys, "export", root, tmp_path / "one", "--to", to)
    monkeypatch.setattr(export_files, "window_bytes", lambda *_: 37)
    text_of(capsys, "export", root, tmp_path / "other", "--to", to)
    assert contents(tmp_path / "one") == {
        name.replace("other", "one"): data for name, data in contents(tmp_path / "other").items()
    }


def contents(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {path.name: path.read_bytes()}
    return {str(one.relative_to(path)): one.read_bytes() for one in path.rglob("*")}


def test_shards_and_index_are_those_of_transformers(tmp_path: Path, capsys: Out) -> None:
    model = torch.nn.ParameterDict(
        {f"layer{n}": torch.nn.Parameter(torch.randn(10, 10)) for n in range(5)}
    )
    holdfast.save(tmp_path / "root", {"model": model})
    out = tmp_path / "out"
    text_of(capsys, "export", tmp_path / "root", out, "--to", "safetensors", "--shard-size", "1000")
    index = json.loads((out / "model.safetensors.index.json").read_bytes())
    assert index["metadata"] == {"total_size": 2000}
    files = {f"layer{n}": f"model-0000{n // 2 + 1}-of-00003.safetensors" for n in range(5)}
    assert index["weight_map"] == files
    assert sorted(one.name for one in out.iterdir()) == sorted(
        {*files.values(), "model.safetensors.index.json"}
    )
    for name, file in files.items():
        with safe_open(out / file, "pt") as opened:
            assert same(opened.get_tensor(name), model[name].data)


def test_tied_tensors_are_stored_once_under_the_embeddings_name(
    tmp_path: Path, capsys: Out
) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Module()
            self.model.embed_tokens = torch.nn.Embedding(6, 3)
            self.lm_head = torch.nn.Linear(3, 6, bias=False)
            self.lm_head.weight = self.model.embed_tokens.weight

    model = Tied()
    holdfast.save(tmp_path / "root", {"model": model})
    text_of(capsys, "export", tmp_path / "root", tmp_path / "out", "--to", "safetensors")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert list(file.keys()) == ["model.embed_tokens.weight"]
    text_of(capsys, "export", tmp_path / "root", tmp_path / "out.pt", "--to", "torch")
    read = torch.load(tmp_path / "out.pt", weights_only=True)["model"]
    one, other = read["lm_head.weight"], read["model.embed_tokens.weight"]
    assert one.data_ptr() == other.data_ptr() and same(one, model.lm_head.weight.data)


def test_large_tensors_of_dcp_are_cut_into_items(
    tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.interop.writing import dcp_format

    monkeypatch.setattr(dcp_format, "ITEM_BYTES", 100)
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.randn(7, 9))})
    holdfast.save(tmp_path / "root", {"model": model})
    text_of(
        capsys, "export", tmp_path / "root", tmp_path / "out", "--to", "dcp", "--shard-size", "1500"
    )
    assert len(list((tmp_path / "out").glob("*.distcp"))) > 1
    read = {"model": {"w": torch.zeros(7, 9)}}
    load_dcp(tmp_path / "out", read)
    assert same(read["model"]["w"], model["w"].data)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_casts_round_as_torch_does(tmp_path: Path, capsys: Out, dtype: torch.dtype) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    edge = torch.randint(0, 1 << 32, (40000,), generator=torch.Generator().manual_seed(1))
    edge |= torch.where(torch.arange(40000) % 2 == 0, 0x8000, 0x7FFF)
    wide = torch.randn(5000, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    module = torch.nn.Module()
    module.register_buffer("a_half", every.view(torch.float16))
    module.register_buffer("brain", every.view(torch.bfloat16))
    module.register_buffer("single", edge.to(torch.uint32).view(torch.float32))
    module.register_buffer("a_double", wide * 10.0 ** torch.linspace(-60, 60, 5000).double())
    module.register_buffer("count", torch.arange(3))
    holdfast.save(tmp_path / "root", {"model": module})
    name = {torch.float16: "f16", torch.bfloat16: "BF16", torch.float32: "F32"}.get(dtype, "f64")
    text_of(capsys, "export", tmp_path / "root", tmp_path / "o", "--to", "torch", "--cast", name)
    read = torch.load(tmp_path / "o", weights_only=True)["model"]
    for key, one in module.state_dict().items():
        wanted = one.to(dtype) if one.is_floating_point() else one
        numbers = ~wanted.isnan()
        assert read[key].dtype == wanted.dtype and same(read[key].isnan(), wanted.isnan())
        assert same(read[key][numbers], wanted[numbers]), key


def test_rules_give_the_names_and_shapes_of_another(tmp_path: Path, capsys: Out) -> None:
    torch.manual_seed(1)
    names = ("wq", "wk", "wv", "norm")
    shapes = {"wq": (8, 4), "wk": (2, 4), "wv": (2, 4), "norm": (4,)}
    model = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(torch.randn(shapes[name])) for name in names}
    )
    optimizer = torch.optim.AdamW(model.parameters())
    torch.stack([one.square().sum() for one in model.parameters()]).sum().backward()
    optimizer.step()
    holdfast.save(tmp_path / "root", {"model": model, "optimizer": optimizer})
    rules = tmp_path / "rules.py"
    rules.write_text(
        "from holdfast import rules as r\n"
        "rules = [('wq', r.transpose(1, 0), r.rename('attn.q')), ('norm', r.rename('ln')),\n"
        "         ('wk', r.part_of('attn.kv', 0, at=0, whole=4)),\n"
        "         ('wv', r.part_of('attn.kv', 0, at=2, whole=4))]\n"
    )
    out = tmp_path / "out"
    text_of(capsys, "export", tmp_path / "root", out, "--to", "torch", "--rules", rules)
    read = torch.load(out, weights_only=True)
    of = {name: one.data for name, one in model.items()}
    wanted = {
        "attn.kv": torch.cat([of["wk"], of["wv"]]),
        "attn.q": of["wq"].T,
        "ln": of["norm"],
    }
    assert same(wanted, read["model"])
    (group,) = read["optimizer"]["param_groups"]
    number = {name: at for at, name in enumerate(group["param_names"])}
    first = {name: optimizer.state[model[name]]["exp_avg"] for name in names}
    state = read["optimizer"]["state"]
    assert same(state[number["attn.kv"]]["exp_avg"], torch.cat([first["wk"], first["wv"]]))
    assert same(state[number["attn.q"]]["exp_avg"], first["wq"].T)
    assert same(state[number["attn.kv"]]["step"], torch.tensor(1.0))


def test_only_takes_a_part(root: Path, tmp_path: Path, capsys: Out) -> None:
    text_of(capsys, "export", root, tmp_path / "o", "--to", "torch", "--only", "model.**")
    assert torch.load(tmp_path / "o", weights_only=True).keys() == {"model"}
    said = error_of(
        capsys, "export", root, tmp_path / "p", "--to", "torch", "--only", "nothing.**", code=2
    )
    assert "nothing is called so" in said


# ── mistakes ─────────────────────────────────────────────────────────────────────────────────


def test_a_dry_run_names_the_files_and_writes_none(root: Path, tmp_path: Path, capsys: Out) -> None:
    shown = json_of(capsys, "export", root, tmp_path / "out", "--to", "dcp", "--dry-run")
    assert [one["path"] for one in shown["files"]] == ["__0_0.distcp", ".metadata"]
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    done = json_of(capsys, "export", root, tmp_path / "out", "--to", "dcp")
    sizes = {one["path"]: one["size_bytes"] for one in done["files"]}
    assert sizes == {one.name: one.stat().st_size for one in (tmp_path / "out").iterdir()}
    assert done["plan_bytes"] == done["written_bytes"] == sum(sizes.values())


@pytest.mark.parametrize("to", FORMATS)
def test_nothing_is_written_over_what_is_there(
    root: Path, tmp_path: Path, capsys: Out, to: str
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "file").write_text("mine")
    said = error_of(capsys, "export", root, out, "--to", to, code=2)
    assert "give another place" in said
    assert contents(out) == {"file": b"mine"} and not list(tmp_path.glob(".out*"))


def test_a_damaged_source_leaves_no_file(root: Path, tmp_path: Path, capsys: Out) -> None:
    (image,) = root.glob("steps/*/*.safetensors")
    data = bytearray(image.read_bytes())
    data[-5000] ^= 1
    image.write_bytes(data)
    said = error_of(capsys, "export", root, tmp_path / "out", "--to", "dcp", code=4)
    assert "stored" in said and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--to", "numpy"), "there are dcp"),
        (("--to", "dcp", "--cast", "I8"), "nothing can be converted to 'I8'"),
        (("--to", "dcp", "--memory", "1"), "MiB are needed"),
        (("--to", "dcp", "--memory", "much"), "give a number of bytes"),
        (("--to", "dcp", "--rules", "nowhere.py"), "nowhere.py"),
    ],
)
def test_a_mistake_is_one_error(
    root: Path, tmp_path: Path, capsys: Out, argv: tuple[str, ...], said: str
) -> None:
    assert said in error_of(capsys, "export", root, tmp_path / "out", *argv, code=2)
    assert not (tmp_path / "out").exists()


def test_no_torch_is_loaded(root: Path, tmp_path: Path) -> None:
    for to in FORMATS:
        done = run_alone("export", str(root), str(tmp_path / to), "--to", to)
        assert done.returncode == 0, done.stderr


def test_rules_that_leave_a_hole_are_refused(tmp_path: Path, capsys: Out) -> None:
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.randn(2, 3))})
    holdfast.save(tmp_path / "root", {"model": model})
    (tmp_path / "r.py").write_text(
        "from holdfast import rules as r\nrules = [('w', r.part_of('v', 0, at=1, whole=4))]\n"
    )
    argv = ("--to", "torch", "--rules", tmp_path / "r.py")
    said = error_of(capsys, "export", tmp_path / "root", tmp_path / "out", *argv, code=2)
    assert "model.v: the rules give nothing for its elements [" in said


def test_state_of_no_parameter_is_refused_by_its_name() -> None:
    leaf = ChosenLeaf("F32", (2,), "F32", ())
    group = {"params": ["a"], "options": {}}
    value = {"class": "", "groups": [group], "state": {}}
    leaves = {f"optimizer.{name}.exp_avg": leaf for name in ("a", "b.c")}
    saved = SavedState(leaves, values={"optimizer": value})
    with pytest.raises(UsageError, match=r"optimizer\.b\.c\.exp_avg belongs to no parameter"):
        state_tree(saved, numbered=True)


def test_safetensors_refuse_what_ranks_do_not_agree_on_in_the_model_alone(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "root", {"model": torch.nn.Linear(2, 3), "n": 3}, step=1)
    checkpoint = open_checkpoint(open_readable(str(tmp_path / "root")), None).checkpoint
    saved = saved_state(checkpoint)
    reader = LeafReader(checkpoint, saved.leaves)
    plan_format("safetensors", replace(saved, refused={"n": "others"}), 1 << 20, 1, reader)
    unlike = replace(saved, refused={"model.weight": "ranks have others"})
    with pytest.raises(UsageError, match=r"model\.weight: ranks have others"):
        plan_format("safetensors", unlike, 1 << 20, 1, reader)
