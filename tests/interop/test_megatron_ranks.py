"""Megatron's file for each rank is joined as Megatron-Core itself says, or refused by name."""

from __future__ import annotations

import enum
import io
import json
import re
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.cli import main
from holdfast.errors import ForeignFormatError, HoldfastError
from holdfast.interop.opening import open_source
from support.checkpoints.megatron_names import give_extra_state, rank_files_expected

GOLDEN = Path(__file__).parents[1] / "golden" / "foreign" / "megatron-core-0.16.1"
#: All with state of an optimizer but the last, whose distributed optimizer has a file of its own.
WHOLE = ("ranks-tp2-pp2", "ranks-pp2-vp2", "ranks-tp2")
CASES = (*WHOLE, "ranks-buckets")
FILE = "mp_rank_{}/model_optim_rng.pt"
Change = Callable[[dict[str, Any]], None]


@pytest.fixture(autouse=True)
def enums_of_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``torch.load`` needs of a library that is not there, to change files of its."""
    for module, kind in (("enums", "ModelType"), ("transformer.enums", "AttnBackend")):
        name = f"megatron.core.{module}"
        made = ModuleType(name)
        values = {f"n{n}": n for n in range(1, 9)}
        whole = enum.Enum(kind, values, module=name)  # type: ignore[misc]
        setattr(made, kind, whole)
        parts = name.split(".")
        for count in range(1, len(parts)):
            outer = ".".join(parts[:count])
            monkeypatch.setitem(sys.modules, outer, sys.modules.get(outer) or ModuleType(outer))
        monkeypatch.setitem(sys.modules, name, made)


def notes_of(path: Path) -> str:
    return "\n".join(open_source(path).notes)  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", CASES)
def test_each_tensor_is_what_its_own_loader_and_its_own_description_of_shards_give(
    case: str,
) -> None:
    expected = rank_files_expected(GOLDEN / case)
    values = json.loads((GOLDEN / case / "expected.json").read_text())
    with holdfast.open(GOLDEN / case / "checkpoint") as opened:
        assert opened.step == 20
        steps = {name for name in opened.leaves if name.endswith(".step")}
        assert {name for name in opened.leaves if name.startswith(("model.", "optimizer."))} == (
            expected.keys() | steps
        )
        assert bool(steps) == (case in WHOLE)
        for name, tensor in expected.items():
            found = opened.read(name)
            assert found.dtype == tensor.dtype and found.shape == tensor.shape, name
            assert torch.equal(found, tensor), name
        assert {opened.read(name).item() for name in steps} == (
            {values["step"]} if steps else set()
        )
        assert opened.values["opt_param_scheduler"] == values["scheduler"]
        assert opened.values["args"]["swiglu"] is (case != "ranks-tp2")


@pytest.mark.parametrize("case", WHOLE)
def test_options_of_groups_and_random_states_come_along(case: str) -> None:
    with holdfast.open(GOLDEN / case / "checkpoint") as opened:
        groups = opened.values["optimizer"]["groups"]
        decay = {bool(group["options"]["wd_mult"]): set(group["params"]) for group in groups}
        shapes = {n.removeprefix("model."): leaf.shape for n, leaf in opened.leaves.items()}
        moved = {n.removesuffix(".exp_avg")[10:] for n in opened.leaves if n.endswith(".exp_avg")}
        assert decay[True] | decay[False] == moved
        assert decay[False] == {name for name in moved if len(shapes[name]) == 1}
        ranks = opened.values["objects"]["rng_state"]
        assert set(ranks) == {"0.0", "0.1", "1.0", "1.1"} if case == WHOLE[0] else len(ranks) == 2
        assert all("rng_tracker_states" in one[0] for one in ranks.values())


@pytest.mark.parametrize("case", CASES)
def test_commands_take_it_where_they_take_a_root(
    case: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    where = str(GOLDEN / case / "checkpoint")
    for command in (["ls"], ["show"], ["verify"], ["verify", "--deep"]):
        assert main([command[0], where, *command[1:]]) == 0, capsys.readouterr()
    assert main(["import", where, str(tmp_path / "root")]) == 0
    assert main(["verify", str(tmp_path / "root"), "--deep"]) == 0


def test_it_fills_a_model_and_its_optimizer() -> None:
    """In F32, whose parameters are no copies of 16 bits: by names, in groups of other orders."""
    expected = rank_files_expected(GOLDEN / "ranks-pp2-vp2")
    model = nn.Module()
    for name, one in expected.items():
        if name.startswith("model."):
            *path, last = name.removeprefix("model.").split(".")
            at = model
            for part in path:
                if part not in dict(at.named_children()):
                    at.add_module(part, nn.Module())
                at = at.get_submodule(part)
            at.register_parameter(last, nn.Parameter(torch.zeros_like(one)))
    give_extra_state(model, GOLDEN / "ranks-pp2-vp2")
    named = sorted(model.named_parameters(), reverse=True)
    bare, wide = ([one for _, one in named if (one.ndim > 1) is many] for many in (False, True))
    optimizer = torch.optim.AdamW([{"params": bare}, {"params": wide}])
    holdfast.load(GOLDEN / "ranks-pp2-vp2" / "checkpoint", {"model": model, "optimizer": optimizer})
    for name, one in model.named_parameters():
        assert torch.equal(one, expected[f"model.{name}"]), name
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[one][kind], expected[f"optimizer.{name}.{kind}"])
        assert optimizer.state[one]["step"] == 2


def test_buckets_of_a_distributed_optimizer_are_left_out_by_name() -> None:
    said = notes_of(GOLDEN / "ranks-buckets" / "checkpoint" / "iter_0000020")
    assert "distrib_optim.pt has its state in buckets" in said and "torch_dist" in said
    assert "parameters are the copies of 16 bits" in said


# ── wrong inputs ─────────────────────────────────────────────────────────────────────────────────


def changed(case: str, to: Path, which: str, change: Change) -> Path:
    """A copy of a checkpoint, with what is in the files of some ranks changed."""
    shutil.copytree(GOLDEN / case / "checkpoint" / "iter_0000020", to)
    files = list(to.glob(FILE.format(which)))
    assert files
    for file in files:
        state = torch.load(file, weights_only=False)
        change(state)
        torch.save(state, file)
    return to


def args_set(**given: Any) -> Change:
    return lambda state: state["args"].__dict__.update(given)


def doubled() -> list[Any]:
    """Of a few lists; to print it, or to compare it with another, takes for ever."""
    found: list[Any] = [1]
    for _ in range(60):
        found = [found, found]
    return found


def doubled_args(name: str) -> Change:
    return lambda state: args_set(**{name: doubled()})(state)


def first_layer(name: str, new: Any) -> Change:
    def change(state: dict[str, Any]) -> None:
        key = f"decoder.layers.0.{name}"
        state["model"][key] = new(state["model"][key])

    return change


def renamed(old: str, new: str) -> Change:
    def change(state: dict[str, Any]) -> None:
        found = {name.replace(old, new): one for name, one in state["model"].items()}
        state["model"].clear()
        state["model"].update(found)

    return change


REFUSED: dict[str, tuple[str, Change, str]] = {
    "no args": ("*", lambda s: s.pop("args"), "has no args"),
    "experts": ("*", args_set(num_experts=4), "of a model with experts"),
    "expert ranks": ("*", args_set(expert_model_parallel_size=2), "of a model with experts"),
    "another rank count": ("*", args_set(tensor_model_parallel_size=3), "mp_rank_02.*not there"),
    "fewer ranks": ("*", args_set(tensor_model_parallel_size=1), "mp_rank_01.*of another one"),
    "more stages": ("*", args_set(pipeline_model_parallel_size=2), "mp_rank_00_000.*not there"),
    "an old order": ("*", lambda s: s.update(checkpoint_version=1.0), "checkpoint_version 1.0"),
    "a size without end": ("*", doubled_args("tensor_model_parallel_size"), "size a list"),
    "layers without end": ("*", doubled_args("num_layers"), "of decoder, the args a list"),
    "a version without end": (
        "*",
        lambda s: s.update(checkpoint_version=doubled()),
        "checkpoint_version a list",
    ),
    "another step": ("01", lambda s: s.update(iteration=21), "its iteration is 21"),
    "another version": ("01", lambda s: s.update(checkpoint_version=2.0), "checkpoint_version is"),
    "other arguments": ("01", args_set(ffn_hidden_size=24), "its ffn_hidden_size is 24"),
    "gated or not": ("*", args_set(swiglu=True), "12 rows of it together, the args say 24"),
    "gates unknown": ("*", args_set(swiglu="yes"), "do not say whether units are gated"),
    "other heads": ("*", args_set(kv_channels=4), "rows of it together, the args say"),
    "odd groups": ("*", args_set(num_query_groups=1), "not cut evenly"),
    "more layers": ("*", args_set(num_layers=3), "the stages have 2 layers"),
    "an unknown module": (
        "*",
        renamed("mlp.linear_fc2", "mlp.linear_fc3"),
        "along which dimension is not known",
    ),
    "a gap of layers": ("*", renamed("layers.1.", "layers.2."), r"its layers are \[0, 2\]"),
    "another name": ("01", renamed("final_layernorm", "final_norm"), "not all tensor-parallel"),
    "another stack": ("*", renamed("layers.1.", "x.layers.1."), "can't be joined|layers"),
    "a whole model": (
        "*",
        lambda s: s.update(model={"language_model": {}}),
        "before Megatron-Core",
    ),
    "no model": ("*", lambda s: s.pop("model"), "its parts of the model are called"),
    "a cut norm": (
        "01",
        first_layer("input_layernorm.weight", lambda one: one[:4].clone()),
        "should be whole on all ranks",
    ),
    "another type": (
        "01",
        first_layer("self_attention.linear_proj.weight", lambda one: one.half()),
        "different element types",
    ),
    "another lr": (
        "01",
        lambda s: s["optimizer"]["optimizer"]["param_groups"][0].update(lr=9.0),
        "its hyperparameters are not those",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_known_for_certain_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    which, change, said = REFUSED[kind]
    where = changed("ranks-tp2", tmp_path / "iter_0000020", which, change)
    with pytest.raises(HoldfastError, match=said):
        holdfast.open(where)


def _swapped(state: dict[str, Any]) -> None:
    masters = state["optimizer"]["fp32_from_fp16_params"][0]
    shapes = [tuple(one.shape) for one in masters]
    one = next(n for n, shape in enumerate(shapes) if shape in shapes[n + 1 :])
    other = shapes.index(shapes[one], one + 1)
    masters[one], masters[other] = masters[other], masters[one]


def _moved(state: dict[str, Any]) -> None:
    first, second = state["optimizer"]["optimizer"]["param_groups"]
    second["params"].insert(0, first["params"].pop())


LEFT_OUT: dict[str, tuple[Change, str]] = {
    "another order": (_swapped, "another order than Megatron's"),
    "another group": (_moved, "that Megatron puts into it"),
    "other groups": (
        lambda s: s["optimizer"]["optimizer"]["param_groups"][1].update(wd_mult=1.0),
        "not those of weight decay alone",
    ),
    "a moment of another shape": (
        lambda s: s["optimizer"]["optimizer"]["state"][0].update(exp_avg=torch.ones(3)),
        "'exp_avg' of parameter 0 .* is not that of it",
    ),
    "a chain": (lambda s: s.update(optimizer=[s["optimizer"]]), "has no state and groups"),
    "fewer masters": (
        lambda s: s["optimizer"]["fp32_from_fp16_params"][0].pop(),
        "the masters in .* are not those of its groups",
    ),
}


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_an_optimizer_whose_numbers_are_not_certain_is_left_out_whole(
    kind: str, tmp_path: Path
) -> None:
    change, said = LEFT_OUT[kind]
    where = changed("ranks-tp2", tmp_path / "iter_0000020", "*", change)
    with holdfast.open(where) as opened:
        assert not any(name.startswith("optimizer") for name in (*opened.leaves, *opened.values))
        expected = {
            n: one
            for n, one in rank_files_expected(GOLDEN / "ranks-tp2").items()
            if n.startswith("model.")
        }
        assert all(torch.equal(opened.read(name), one) for name, one in expected.items())
    assert re.search(f"the optimizer is left out: .*{said}", notes_of(where))


def _turned(state: dict[str, Any]) -> None:
    inner = state["optimizer"]["optimizer"]
    inner["param_groups"].reverse()
    order = [number for group in inner["param_groups"] for number in group["params"]]
    inner["state"] = {number: inner["state"][old] for number, old in enumerate(order)}
    begin = 0
    for group in inner["param_groups"]:
        group["params"] = [*range(begin, begin + len(group["params"]))]
        begin += len(group["params"])
    state["optimizer"]["fp32_from_fp16_params"].reverse()


@pytest.mark.promise
def test_groups_that_a_stage_has_in_another_order_are_those_of_their_weight_decay(
    tmp_path: Path,
) -> None:
    """A stage whose first parameter is that of a norm has that group first in older versions."""
    where = changed("ranks-tp2-pp2", tmp_path / "iter_0000020", "*_001", _turned)
    with (
        holdfast.open(where) as opened,
        holdfast.open(GOLDEN / "ranks-tp2-pp2" / "checkpoint") as known,
    ):
        assert set(opened.leaves) == set(known.leaves)
        for name in known.leaves:
            assert torch.equal(opened.read(name), known.read(name)), name
        groups, expected = (
            {one["options"]["wd_mult"]: one for one in each.values["optimizer"]["groups"]}
            for each in (opened, known)
        )
        assert groups == expected


def test_copies_that_differ_are_refused_when_they_are_read(tmp_path: Path) -> None:
    norm = first_layer("input_layernorm.weight", lambda one: one + 1)
    where = changed("ranks-tp2", tmp_path / "iter_0000020", "01", norm)
    with (
        holdfast.open(where) as opened,
        pytest.raises(ForeignFormatError, match="on several ranks, which should have it alike"),
    ):
        opened.read("model.decoder.layers.0.input_layernorm.weight")

    def other(state: dict[str, Any]) -> None:
        state["model"]["output_layer.weight"] = state["model"]["output_layer.weight"] + 1

    where = changed("ranks-tp2-pp2", tmp_path / "tied" / "iter_0000020", "01_001", other)
    with (
        holdfast.open(where) as opened,
        pytest.raises(ForeignFormatError, match="on several ranks, which should have it alike"),
    ):
        opened.read("model.embedding.word_embeddings.weight")


def test_a_missing_rank_and_a_file_too_many_are_named(tmp_path: Path) -> None:
    where = tmp_path / "iter_0000020"
    shutil.copytree(GOLDEN / "ranks-tp2-pp2" / "checkpoint" / "iter_0000020", where)
    shutil.copytree(where / "mp_rank_01_001", where / "mp_rank_02_001")
    with pytest.raises(ForeignFormatError, match=r"mp_rank_02_001.* is of another one"):
        holdfast.open(where)
    shutil.rmtree(where / "mp_rank_02_001")
    shutil.rmtree(where / "mp_rank_00_001")
    with pytest.raises(ForeignFormatError, match=r"mp_rank_00_001.*: it is not there"):
        holdfast.open(where)


def test_values_of_arguments_and_extra_states_of_modules(tmp_path: Path) -> None:
    """Modules get back what they gave, None too; what is no value is left out by name."""
    inner = "decoder.layers.{}.mlp.linear_fc1._extra_state"

    def change(state: dict[str, Any]) -> None:
        state["args"].run = Namespace(inner=[1, 2])
        state["model"][inner.format(0)] = io.BytesIO(b"x")
        state["model"][inner.format(1)] = torch.full((2,), float(state["args"].rank))

    where = changed("ranks-tp2", tmp_path / "iter_0000020", "*", change)
    with holdfast.open(where) as opened:
        assert opened.values["args"]["run"] == {"inner": [1, 2]}
        assert opened.values["args"]["exit_signal"] == {"value": 15}
        assert set(opened.values["objects"][inner.format(1)]) == {"0.0", "0.1"}
        prefix = "decoder.layers.1.mlp.linear_fc2"
        assert opened.values["model"][prefix] is None, "as Megatron's own linear layers have"
    assert "_io.BytesIO" in notes_of(where)
