"""One process: what is saved through rules, and what a restore through them gives and refuses."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast import rules as r
from holdfast.catalogue import catalogue
from holdfast.errors import HoldfastError, RestoreError, StateMismatch, UnsupportedState, UsageError
from holdfast.state.describe import Describer
from holdfast.storage.open import open_store

State = dict[str, Any]
QKV = ("qkv.{what}", r.fused(0, (8, 4, 4), into=("q.{what}", "k.{what}", "v.{what}")))
EMBED = ("embed.weight", r.padded(0, 17))
HEAD = ("head.weight", r.padded(0, 17))
STACK = ("layers.{i}.weight", r.stack("all.weight", 0, count=3, at="{i}"))


class Net(nn.Module):
    """Fused, padded, tied, and layers that are one leaf in the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.qkv = nn.Linear(8, 16)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight


def rules(*others: Any) -> r.Rules:
    return r.Rules([QKV, EMBED, HEAD, STACK, *others])


def build(seed: int, *, steps: int = 0, kind: Any = torch.optim.AdamW) -> State:
    torch.manual_seed(seed)
    model = Net()
    optimizer = kind(model.parameters(), lr=0.5)
    for _ in range(steps):
        sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()
    return {"model": model, "optimizer": optimizer, "seen": steps}


def elements(state: State) -> dict[str, torch.Tensor]:
    """All tensors, with the padding of the vocabulary as it is after a restore."""
    found = {}
    for name, parameter in state["model"].named_parameters():
        kept = state["optimizer"].state[parameter]
        for kind, tensor in [("", parameter.detach()), *kept.items()]:
            found[f"{name}.{kind}"] = tensor.clone()
            if name == "embed.weight" and tensor.ndim:
                found[f"{name}.{kind}"][17:] = 0
    return found


def steps(root: Path) -> list[int]:
    found = catalogue(open_store(str(root)))
    return sorted(manifest.step for manifest in found.manifests)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_parameters_and_their_state_come_back_through_rules(tmp_path: Path, kind: Any) -> None:
    state = build(0, steps=2, kind=kind)
    holdfast.save(tmp_path, state, rules=rules())
    again = build(1, kind=kind)
    holdfast.load(tmp_path, again, rules=rules())
    assert same(elements(again), elements(state)) and again["seen"] == 2
    assert again["model"].head.weight is again["model"].embed.weight
    assert not again["model"].embed.weight[17:].any()


def test_what_is_stored_has_the_names_and_shapes_of_the_rules_and_no_padding(
    tmp_path: Path,
) -> None:
    state = build(0, steps=1)
    holdfast.save(tmp_path, state, rules=rules())
    with holdfast.open(tmp_path) as checkpoint:
        shapes = {name: leaf.shape for name, leaf in checkpoint.leaves.items()}
        stored = torch.as_tensor(checkpoint.read("optimizer.all.weight.exp_avg"))
    names = ("embed.weight", "all.weight", *(f"{x}.{y}" for x in "qkv" for y in ("weight", "bias")))
    kinds = ("exp_avg", "exp_avg_sq", "step")
    assert shapes.keys() == {
        *(f"model.{name}" for name in names),
        *(f"optimizer.{name}.{kind}" for name in names for kind in kinds),
    }
    assert shapes["model.embed.weight"] == (17, 8) and shapes["model.k.weight"] == (4, 8)
    assert shapes["optimizer.all.weight.exp_avg_sq"] == (3, 8, 8)
    for n, layer in enumerate(state["model"].layers):
        assert torch.equal(stored[n], state["optimizer"].state[layer.weight]["exp_avg"])


def test_a_checkpoint_of_before_the_rules_is_read_through_stored_rules(tmp_path: Path) -> None:
    state = build(0, steps=1)
    holdfast.save(tmp_path, state)
    apart: Any = nn.ModuleDict({"q": nn.Linear(8, 8), "k": nn.Linear(8, 4), "v": nn.Linear(8, 4)})
    part = {"model": apart}
    holdfast.load(
        tmp_path, part, stored_rules=rules(), only=["model.q.*", "model.k.*", "model.v.*"]
    )
    assert torch.equal(apart["k"].weight, state["model"].qkv.weight[8:12])
    again = build(1)
    holdfast.load(tmp_path, again, rules=rules(), stored_rules=rules())
    assert same(elements(again), elements(state))


def test_only_what_is_asked_for_is_restored(tmp_path: Path) -> None:
    state, again = build(0, steps=1), build(1)
    holdfast.save(tmp_path, state, rules=rules())
    before = elements(again)
    holdfast.load(tmp_path, again, rules=rules(), only=["model.layers.*.weight", "seen"])
    after = elements(again)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {f"layers.{n}.weight." for n in range(3)} and again["seen"] == 1
    weights = build(2)
    holdfast.load(tmp_path, weights, rules=rules(), only=["model.**"])
    assert torch.equal(weights["model"].qkv.weight, state["model"].qkv.weight)
    assert not weights["optimizer"].state and weights["seen"] == 0


def test_a_pattern_of_only_that_means_nothing_is_refused(tmp_path: Path) -> None:
    holdfast.save(tmp_path, build(0))
    with pytest.raises(UsageError, match=r"only='modle\.\*\*' means no leaf and no key"):
        holdfast.load(tmp_path, build(1), only=["model.**", "modle.**"])
    holdfast.save(tmp_path, build(0, steps=1), 1)
    with pytest.raises(UsageError, match="restored whole or not at all"):
        holdfast.load(tmp_path, build(1), only=["optimizer.qkv.*.exp_avg"])


def test_a_leaf_may_be_missing_only_if_it_is_named(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"model": nn.ModuleDict({"a": nn.Linear(2, 2)})})
    more: Any = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    kept = more["b"].weight.detach().clone()
    with pytest.raises(
        StateMismatch, match=r"model\.b\.weight: in the model, but not in the check"
    ):
        holdfast.load(tmp_path, {"model": more})
    with pytest.raises(StateMismatch, match=r"model\.b\.bias"):
        holdfast.load(tmp_path, {"model": more}, allow_missing=["model.b.weight"])
    state = {"model": more, "seen": 3}
    holdfast.load(tmp_path, state, allow_missing=["model.b.*", "seen"])
    assert torch.equal(more["b"].weight, kept) and state["seen"] == 3


def test_a_parameter_that_is_new_to_the_optimizer_may_be_missing(tmp_path: Path) -> None:
    state = build(0, steps=1)
    holdfast.save(tmp_path, state)
    again = build(1)
    extra: Any = nn.Linear(3, 3)
    again["model"].extra = extra
    again["optimizer"].add_param_group({"params": extra.parameters(), "lr": 0.125})
    with pytest.raises(StateMismatch, match=r"optimizer\.extra\.weight: not in the saved"):
        holdfast.load(tmp_path, again, allow_missing=["model.extra.*"])
    holdfast.load(tmp_path, again, allow_missing=["model.extra.*", "optimizer.extra.**"])
    assert again["optimizer"].param_groups[1]["lr"] == 0.125
    assert torch.equal(again["model"].qkv.weight, state["model"].qkv.weight)


def test_elements_are_converted_where_a_rule_says_so_and_nowhere_else(tmp_path: Path) -> None:
    state = build(0, steps=1)
    holdfast.save(tmp_path, state, rules=rules())
    half = Net().bfloat16()
    with pytest.raises(StateMismatch, match=r"qkv\.weight: .* model\.k\.weight, .* F32 .* BF16"):
        holdfast.load(tmp_path, {"model": half}, rules=rules())
    cast = r.Rules(
        [(pattern, *kinds, r.cast("bfloat16")) for pattern, *kinds in (QKV, EMBED, HEAD, STACK)]
    )
    holdfast.load(tmp_path, {"model": half}, rules=cast)
    for name, parameter in state["model"].named_parameters():
        wanted = parameter.detach().bfloat16()
        if name == "embed.weight":
            wanted[17:] = 0
        assert torch.equal(half.get_parameter(name), wanted)


def test_numbers_that_are_joined_must_agree_before_anything_is_read(tmp_path: Path) -> None:
    state = build(0, steps=1)
    model, optimizer = state["model"], state["optimizer"]
    apart: Any = nn.ModuleDict({x: nn.Linear(8, n) for x, n in (("q", 8), ("k", 4), ("v", 4))})
    separate = torch.optim.AdamW(apart.parameters())
    sum(p.sum() for p in apart.parameters()).backward()
    separate.step()
    separate.state[apart["k"].weight]["step"].fill_(9)
    holdfast.save(tmp_path, {"model": apart, "optimizer": separate})
    fused: Any = nn.ModuleDict({"qkv": model.qkv})
    before = model.qkv.weight.detach().clone()
    one = {"model": fused, "optimizer": torch.optim.AdamW(fused.parameters())}
    with pytest.raises(
        StateMismatch,
        match=r"qkv\.weight\.step: one number .*\.q\.weight\.step is 1\.0, .*k\.weight\.step is 9",
    ):
        holdfast.load(tmp_path, one, rules=r.Rules([QKV]))
    assert torch.equal(model.qkv.weight, before) and optimizer is state["optimizer"]


@pytest.mark.parametrize("number", ["nan", "-0.0"])
def test_numbers_that_are_joined_are_compared_bit_for_bit(tmp_path: Path, number: str) -> None:
    def fused() -> State:
        model: Any = nn.ModuleDict({"qkv": nn.Linear(8, 16)})
        optimizer = torch.optim.AdamW(model.parameters())
        sum(p.sum() for p in model.parameters()).backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    state = fused()
    counts = [kept["step"] for kept in state["optimizer"].state.values()]
    for count in counts:
        count.fill_(float(number))
    apart: Any = nn.ModuleDict({x: nn.Linear(8, n) for x, n in (("q", 8), ("k", 4), ("v", 4))})
    separate = torch.optim.AdamW(apart.parameters())
    sum(p.sum() for p in apart.parameters()).backward()
    separate.step()
    for kept in separate.state.values():
        kept["step"].fill_(float(number))
    holdfast.save(tmp_path, {"model": apart, "optimizer": separate}, step=1)
    again = fused()
    holdfast.load(tmp_path, again, rules=r.Rules([QKV]))
    for kept in again["optimizer"].state.values():
        assert bits(kept["step"]) == bits(counts[0])
    separate.state[apart["k"].weight]["step"].fill_(0.0)
    holdfast.save(tmp_path, {"model": apart, "optimizer": separate}, step=2)
    with pytest.raises(StateMismatch, match=r"qkv\.weight\.step: one number .* is 0\.0"):
        holdfast.load(tmp_path, fused(), rules=r.Rules([QKV]))


def bits(tensor: torch.Tensor) -> bytes:
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8)
    return bytes(flat.numpy())


class Copied(nn.Module):
    """One averaged tensor of any dtype, and another tensor."""

    free: torch.Tensor

    def __init__(self, free: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))
        self.register_buffer("free", free)


NO_MEAN = (torch.int64, torch.uint8, torch.bool, torch.complex32, torch.float8_e8m0fnu)
AVERAGED = r.Rules([("free", r.averaged)], {"dp": 1})


@pytest.mark.parametrize("dtype", NO_MEAN, ids=str)
@pytest.mark.parametrize("shape", [(), (1 << 16,)], ids=str)
def test_copies_that_have_no_mean_are_taken_as_they_are_or_refused_by_name(
    tmp_path: Path, dtype: Any, shape: tuple[int, ...]
) -> None:
    size = max(1, shape[0] if shape else 1) * dtype.itemsize
    copy = torch.randint(0, 2, (size,), dtype=torch.uint8)
    copies = torch.stack([copy] * 3)
    holdfast.save(tmp_path, {"model": Copied(copies.view(dtype).view(3, *shape))}, step=1)
    again = Copied(torch.zeros(size, dtype=torch.uint8).view(dtype).view(shape))
    holdfast.load(tmp_path, {"model": again}, rules=AVERAGED)
    assert bits(again.free) == bytes(copy.numpy())

    copies[2, -1] ^= 1
    holdfast.save(tmp_path, {"model": Copied(copies.view(dtype).view(3, *shape))}, step=2)
    weight = bits(again.weight)
    with pytest.raises(StateMismatch, match=r"model\.free: averaged by its rule, and the 3 copies"):
        holdfast.load(tmp_path, {"model": again}, rules=AVERAGED)
    assert bits(again.free) == bytes(copy.numpy()) and bits(again.weight) == weight
    holdfast.load(tmp_path, {"model": again}, rules=AVERAGED, only=["model.weight"])
    assert bits(again.free) == bytes(copy.numpy()) and bits(again.weight) != weight
    holdfast.save(tmp_path, {"model": again}, step=3, rules=AVERAGED)  # as a row of all copies
    with holdfast.open(tmp_path) as checkpoint:
        assert checkpoint.leaves["model.free"].shape == (1, *shape)


def test_copies_of_an_optimizers_whole_numbers_have_no_mean_either(tmp_path: Path) -> None:
    def build(*rows: int) -> State:
        model = nn.ParameterDict({"free": nn.Parameter(torch.zeros(*rows, 4))})
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.5)
        counts = torch.arange(4).expand(*rows, 4).clone()
        optimizer.state[model["free"]] = {"momentum_buffer": torch.ones(*rows, 4), "seen": counts}
        return {"model": model, "optimizer": optimizer}

    saved, again = build(2), build()
    holdfast.save(tmp_path, saved, step=1)
    kept = again["optimizer"].state[again["model"]["free"]]
    kept["seen"].zero_()
    holdfast.load(tmp_path, again, rules=AVERAGED)
    kept = again["optimizer"].state[again["model"]["free"]]
    assert kept["seen"].tolist() == [0, 1, 2, 3]
    saved["optimizer"].state[saved["model"]["free"]]["seen"][1, 0] = 7
    holdfast.save(tmp_path, saved, step=2)
    with pytest.raises(StateMismatch, match=r"optimizer\.free\.seen: averaged by its rule"):
        holdfast.load(tmp_path, again, rules=AVERAGED)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_copies_that_have_a_mean_are_averaged(tmp_path: Path, dtype: Any) -> None:
    copies = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to(dtype)
    holdfast.save(tmp_path, {"model": Copied(copies)})
    again = Copied(torch.zeros(2).to(dtype))
    holdfast.load(tmp_path, {"model": again}, rules=AVERAGED)
    assert again.free.double().tolist() == [2.0, 3.0]


def test_a_missing_part_is_told_with_both_names(tmp_path: Path) -> None:
    apart: Any = nn.ModuleDict({x: nn.Linear(8, n) for x, n in (("q", 8), ("k", 4))})
    holdfast.save(tmp_path, {"model": apart})
    fused: Any = nn.ModuleDict({"qkv": nn.Linear(8, 16)})
    with pytest.raises(StateMismatch) as caught:
        holdfast.load(tmp_path, {"model": fused}, rules=r.Rules([QKV]))
    told = "model.qkv.weight: by the rules made of model.v.weight, which is not in the checkpoint"
    assert any(problem.startswith(told) for problem in caught.value.fields["problems"])
    before = fused["qkv"].weight.detach().clone()
    holdfast.load(tmp_path, {"model": fused}, rules=r.Rules([QKV]), allow_missing=["model.v.*"])
    assert torch.equal(fused["qkv"].weight[:8], apart["q"].weight)
    assert torch.equal(fused["qkv"].weight[12:], before[12:])


def test_a_rule_for_no_leaf_is_refused_at_save_and_at_restore(tmp_path: Path) -> None:
    wrong = rules(("qvk.weight", r.replicated))
    with pytest.raises(UsageError, match=r"the rule for 'qvk\.weight' is for no leaf of any rank"):
        holdfast.save(tmp_path, build(0), rules=wrong)
    holdfast.save(tmp_path, build(0), rules=rules())
    with pytest.raises(UsageError, match=r"qvk\.weight"):
        holdfast.load(tmp_path, build(0), rules=wrong)
    with pytest.raises(UsageError, match=r"rules is a list: give a holdfast\.rules\.Rules"):
        holdfast.save(tmp_path, build(0), rules=[QKV])  # type: ignore[arg-type]


def test_two_tensors_that_are_the_same_elements_are_refused(tmp_path: Path) -> None:
    model: Any = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    both = r.Rules([("{x}.weight", r.part_of("w", 0, at=1, whole=4))])
    with pytest.raises(UsageError, match=r"a\.weight and b\.weight are both seen as w\[1:3, 0:2\]"):
        holdfast.save(tmp_path, {"model": model}, rules=both)
    _declare(model, (4, 2), (0, 1))
    with pytest.raises(UsageError, match=r"model\.a\.weight, model\.b\.weight are the same elem"):
        holdfast.save(tmp_path, {"model": model})
    _declare(model, (4, 2), (0, 2))
    holdfast.declare(model["b"].weight, holdfast.Shard((5, 2), (2, 0), name="w"))
    with pytest.raises(UsageError, match=r"both seen as parts of model\.w, .* \[4, 2\].* \[5, 2\]"):
        holdfast.save(tmp_path, {"model": model})


def _declare(model: Any, shape: tuple[int, ...], begins: tuple[int, int]) -> None:
    for name, at in zip("ab", begins, strict=True):
        holdfast.declare(model[name].weight, holdfast.Shard(shape, (at, 0), name="w"))


def test_counts_of_joined_tensors_that_differ_are_not_lost_at_a_save(tmp_path: Path) -> None:
    model: Any = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    _declare(model, (4, 2), (0, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    holdfast.save(tmp_path, state)
    optimizer.state[model["b"].weight]["step"].fill_(4)
    told = r"a\.weight\.step is 1\.0 and .*b\.weight\.step is 4\.0"
    with pytest.raises(UsageError, match=told):
        holdfast.save(tmp_path, state, 1)
    optimizer.state[model["b"].weight]["step"].fill_(math.nan)
    optimizer.state[model["a"].weight]["step"].fill_(math.nan)
    holdfast.save(tmp_path, state, 1)  # the same bits
    assert steps(tmp_path) == [0, 1]


def test_counts_of_joined_tensors_that_come_to_differ_miss_a_later_save(tmp_path: Path) -> None:
    model: Any = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    _declare(model, (4, 2), (0, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    with holdfast.Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}) as checkpointer:
        for step in range(3):
            sum(p.sum() for p in model.parameters()).backward()
            optimizer.step()
            if step == 1:  # as where one part had no gradient
                optimizer.state[model["b"].weight]["step"].fill_(1)
            if step == 2:
                optimizer.state[model["b"].weight]["step"].fill_(3)
            handle = checkpointer.save(step, durable=True)
            if step != 1:
                handle.wait_durable(60)
                continue
            with pytest.raises(HoldfastError, match=r"a\.weight\.step is 2\.0 and .* is 1\.0"):
                handle.wait_durable(60)
    assert steps(tmp_path) == [0, 2]


def test_values_of_joined_parameters_that_differ_are_not_lost_at_a_save(tmp_path: Path) -> None:
    model: Any = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    _declare(model, (4, 2), (0, 2))
    optimizer = Counting(model.parameters(), lr=0.5)
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    holdfast.save(tmp_path, state)
    optimizer.state[model["b"].weight]["count"] = 5
    with pytest.raises(
        UsageError, match=r"'count' is 1 for one and 5 for another .* w by the rule"
    ):
        holdfast.save(tmp_path, state, 1)


def test_state_that_is_one_tensor_is_one_again_through_rules(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[State, list[Any]]:
        state = build(seed, steps=2)
        return state, list(state["optimizer"].state.values())

    saved, kinds = make(0)
    for kind in kinds[1:]:
        kind["step"] = kinds[0]["step"]
    weight = saved["model"].qkv.weight
    kinds[1]["slow"] = weight.detach()  # as an optimizer keeps that averages
    kinds[1]["other"] = kinds[1]["exp_avg"]
    holdfast.save(tmp_path, saved, rules=rules())
    back, _ = make(1)
    holdfast.load(tmp_path, back, rules=rules())
    kinds = [back["optimizer"].state[p] for p in back["model"].parameters()]
    assert len({id(kind["step"]) for kind in kinds}) == 1
    assert float(kinds[0]["step"]) == 2
    assert kinds[1]["slow"].data_ptr() == back["model"].qkv.weight.data_ptr()
    assert torch.equal(kinds[1]["slow"], weight)
    assert kinds[1]["other"] is kinds[1]["exp_avg"]


@pytest.mark.parametrize("more", [(), (r.padded(0, 3),)])
@pytest.mark.parametrize("kind", ["exp_avg", "step"])
def test_the_state_of_a_copy_is_not_that_of_the_original(
    tmp_path: Path, more: tuple[Any, ...], kind: str
) -> None:
    both = r.Rules(
        [*((("a.weight", *more),) if more else ()), ("b.weight", r.tied("a.weight"), *more)]
    )

    def make() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model: Any = nn.ModuleDict({"a": nn.Linear(3, 4, bias=False)})
        model["b"] = copy.deepcopy(model["a"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        learn(model, optimizer)
        for kept in optimizer.state.values():
            kept["other"] = kept[kind]
        return model, optimizer

    def learn(model: Any, optimizer: Any) -> None:
        sum(p.square().sum() for p in model.parameters()).backward()
        optimizer.step()

    model, optimizer = make()
    holdfast.save(tmp_path, {"model": model, "optimizer": optimizer}, rules=both)
    again, back = make()
    holdfast.load(tmp_path, {"model": again, "optimizer": back}, rules=both)
    one, other = (back.state[parameter] for parameter in again.parameters())
    assert one[kind] is not other[kind]
    assert one["other"] is one[kind] and other["other"] is other[kind]
    learn(model, optimizer)
    learn(again, back)
    assert torch.equal(model["b"].weight[:3], again["b"].weight[:3])


def test_a_master_that_was_the_parameter_is_none_where_the_parameter_has_fewer_digits(
    tmp_path: Path,
) -> None:
    def make(dtype: torch.dtype) -> tuple[Any, Any]:
        model: Any = nn.ModuleDict({"a": nn.Linear(3, 4, bias=False, dtype=dtype)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weight = model["a"].weight
        optimizer.state[weight]["main"] = weight.detach().float()
        return model, optimizer

    model, optimizer = make(torch.float32)
    kept = optimizer.state[model["a"].weight]["main"].clone()
    holdfast.save(tmp_path, {"model": model, "optimizer": optimizer})
    model, optimizer = make(torch.bfloat16)
    cast = r.Rules([("**", r.cast("BF16"))])
    holdfast.load(tmp_path, {"model": model, "optimizer": optimizer}, rules=cast)
    main = optimizer.state[model["a"].weight]["main"]
    assert main.dtype == torch.float32
    assert torch.equal(main, kept)


def test_a_number_inside_a_buffer_is_compared_where_it_lies(tmp_path: Path) -> None:
    model = nn.Module()
    model.a = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    model.b = nn.Parameter(torch.tensor([1.0, 5.0, 6.0]))
    one = holdfast.FlatBuffer([("x", (2,), 0, 2, 1), ("s", (1,), 0, 1, 0)])
    other = holdfast.FlatBuffer([("s", (1,), 0, 1, 1), ("y", (2,), 0, 1, 0), ("y", (2,), 1, 1, 2)])
    holdfast.declare(model.a, one)
    holdfast.declare(model.b, other)
    with pytest.raises(UsageError, match=r"model\.a is 1\.0 and model\.b is 5\.0"):
        holdfast.save(tmp_path, {"model": model})
    model.b.data[1] = 1.0
    holdfast.save(tmp_path, {"model": model})


def test_a_value_that_is_a_fused_tensor_is_refused_and_one_renamed_is_followed(
    tmp_path: Path,
) -> None:
    state = build(0)
    state["best"] = {"weight": state["model"].qkv.weight}
    with pytest.raises(UnsupportedState, match=r"a value in the state is model\.qkv\.weight"):
        holdfast.save(tmp_path, state, rules=rules())
    renamed = r.Rules([("qkv.weight", r.rename("other"))])
    holdfast.save(tmp_path, state, rules=renamed)
    again = build(1)
    again["best"] = {"weight": again["model"].qkv.weight}
    holdfast.load(tmp_path, again, rules=renamed)
    assert torch.equal(again["model"].qkv.weight, state["model"].qkv.weight)
    assert again["best"]["weight"] is again["model"].qkv.weight


def test_the_next_save_looks_only_whether_anything_changed(tmp_path: Path) -> None:
    from holdfast.state.mapped.mapper import RuleMapper

    describer = Describer(build(0, steps=1), 0, rules=rules())
    first = describer.describe()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RuleMapper, "sight", None)  # nothing is seen through rules again
        second = describer.describe()
    assert second.bindings is first.bindings and second.values == first.values


def test_what_is_declared_between_saves_counts_for_the_next() -> None:
    model: Any = nn.Linear(4, 4, bias=False)
    describer = Describer({"model": model}, 0)
    before = describer.describe().table_hash
    holdfast.declare(model.weight, holdfast.Shard((8, 4), (4, 0)))
    assert describer.describe().table_hash != before


def test_declared_shards_follow_into_optimizer_state_and_back(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    model = nn.ParameterDict(
        {"a": nn.Parameter(whole[:, :4].clone()), "b": nn.Parameter(whole[:, 4:].clone())}
    )
    for name, at in (("a", 0), ("b", 4)):
        holdfast.declare(model[name], holdfast.Shard((4, 6), (0, at), name="w"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    holdfast.save(tmp_path, {"model": model, "optimizer": optimizer})
    flat = nn.ParameterDict({"w": nn.Parameter(torch.full((26,), 7.0))})
    holdfast.declare(flat["w"], holdfast.FlatShard((4, 6), 0))
    there = torch.optim.SGD(flat.parameters(), lr=0.1, momentum=0.5)
    holdfast.load(tmp_path, {"model": flat, "optimizer": there})
    joined = torch.cat([model["a"].detach(), model["b"].detach()], 1)
    assert torch.equal(flat["w"][:24].detach(), joined.reshape(-1)) and not flat["w"][24:].any()
    momentum = there.state[flat["w"]]["momentum_buffer"]
    assert torch.equal(momentum[:24], 2 * whole.reshape(-1)) and not momentum[24:].any()


def test_an_entry_of_the_state_can_be_a_shard(tmp_path: Path) -> None:
    whole = torch.arange(10.0)
    first = holdfast.declare(whole.clone(), holdfast.FlatShard((10,), 0))
    holdfast.save(tmp_path, {"cache": first})
    part = holdfast.declare(torch.zeros(4), holdfast.Shard((10,), (3,)))
    holdfast.load(tmp_path, {"cache": part})
    assert torch.equal(part, whole[3:7])
    buffer = holdfast.declare(
        torch.arange(8.0),
        holdfast.FlatBuffer([("a", (2, 2), 0, 4, 0), ("b", (3,), 0, 3, 4)]),
    )
    holdfast.save(tmp_path, {"cache": buffer}, 1)
    with holdfast.open(tmp_path) as checkpoint:
        assert checkpoint.leaves["cache.a"].shape == (2, 2)
    again = holdfast.declare(
        torch.full((9,), 5.0),
        holdfast.FlatBuffer([("b", (3,), 0, 3, 0), ("a", (2, 2), 0, 4, 5)]),
    )
    holdfast.load(tmp_path, {"cache": again})
    assert again.tolist() == [4, 5, 6, 0, 0, 0, 1, 2, 3]


def test_a_run_of_elements_counts_through_a_box_of_the_leaf(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    holdfast.save(tmp_path, {"cache": whole})
    box = ((0, 2), (4, 3))  # columns 2 to 5, as a rank has that is one of two over columns
    for start, size in ((0, 12), (0, 4), (4, 5), (9, 3), (11, 4)):
        part = torch.full((size,), 7.0)
        holdfast.declare(part, holdfast.FlatShard((4, 6), start, within=box))
        holdfast.load(tmp_path, {"cache": part})
        wanted = whole[:, 2:5].reshape(-1)[start : start + size]
        assert torch.equal(part[: len(wanted)], wanted) and not part[len(wanted) :].any()
    left = holdfast.declare(torch.ones(12), holdfast.FlatShard((4, 6), 0, within=((0, 0), (4, 3))))
    with pytest.raises(HoldfastError, match="cache"):
        holdfast.save(tmp_path, {"cache": left}, 2)  # the other half is nowhere
    with pytest.raises(UsageError, match=r"shape \[4, 3\] is no part, from \[0, 4\] on"):
        holdfast.FlatShard((4, 6), 0, within=((0, 4), (4, 3)))


def test_masters_of_more_digits_stand_for_parameters_that_need_them(tmp_path: Path) -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.randn(3, 4).bfloat16())})
    master = nn.Parameter(model["w"].detach().float().reshape(-1) + 1e-4)
    holdfast.declare(master, holdfast.FlatShard((3, 4), 0, name="w"))
    optimizer = torch.optim.SGD([master], lr=0.5)
    state = {"model": model, "optimizer": optimizer}
    holdfast.save(tmp_path, state)
    with holdfast.open(tmp_path) as checkpoint:
        assert {n: leaf.dtype for n, leaf in checkpoint.leaves.items()} == {
            "model.w": "BF16",
            "optimizer.w.master": "F32",
        }
    wide = nn.ParameterDict({"w": nn.Parameter(torch.zeros(3, 4))})
    both = {"model": wide, "optimizer": torch.optim.SGD(wide.parameters(), lr=0.1)}
    holdfast.load(tmp_path, both)
    assert torch.equal(wide["w"].detach().reshape(-1), master.detach())
    again = {"model": nn.ParameterDict({"w": nn.Parameter(torch.zeros(3, 4).bfloat16())})}
    other = nn.Parameter(torch.zeros(12))
    holdfast.declare(other, holdfast.FlatShard((3, 4), 0, name="w"))
    again["optimizer"] = torch.optim.SGD([other], lr=0.1)  # type: ignore[assignment]
    holdfast.load(tmp_path, again)
    assert torch.equal(other.detach(), master.detach())
    assert torch.equal(again["model"]["w"], model["w"])


def test_factors_of_a_renamed_parameter_follow_it_and_of_a_fused_one_stay(tmp_path: Path) -> None:
    def factored() -> State:
        model = nn.ModuleDict({"qkv": nn.Linear(8, 16), "o": nn.Linear(8, 8)})
        return {"model": model, "optimizer": torch.optim.Adafactor(model.parameters(), lr=0.1)}

    state = factored()
    sum(p.square().sum() for p in state["model"].parameters()).backward()
    state["optimizer"].step()
    both = r.Rules([QKV, ("o.{what}", r.rename("out.{what}"))])
    holdfast.save(tmp_path, state, rules=both)
    with holdfast.open(tmp_path) as checkpoint:
        assert checkpoint.leaves["optimizer.out.weight.row_var"].shape == (8, 1)
        assert checkpoint.leaves["optimizer.qkv.weight.row_var"].shape == (16, 1)
    again = factored()
    holdfast.load(tmp_path, again, rules=both)
    for one, other in zip(state["model"].parameters(), again["model"].parameters(), strict=True):
        kept, there = state["optimizer"].state[one], again["optimizer"].state[other]
        assert kept.keys() == there.keys()
        assert all(torch.equal(kept[k], there[k]) for k in kept)


@pytest.mark.parametrize(
    ("tensor", "what", "message"),
    [
        (torch.zeros(3, 3), holdfast.Shard((4, 4), (2, 0)), "is no part, from .2, 0. on"),
        (torch.zeros(4), holdfast.Shard((4, 4), (0, 0)), "is no part"),
        (torch.zeros(3, 4).T, holdfast.FlatShard((12,), 0), "is no run of elements"),
        (torch.zeros(3), holdfast.FlatBuffer([("a", (4,), 0, 4, 0)]), "a buffer that has 3"),
        (torch.zeros(3), "first half", "declares no part of a leaf"),
        ([1.0], holdfast.FlatShard((1,), 0), "only plain tensors need it"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(tensor: Any, what: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        holdfast.declare(tensor, what)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: holdfast.Shard((4, 4), (2,)), "1 offsets for a leaf of 2 dimensions"),
        (lambda: holdfast.FlatShard((4, -4), 0), "global_shape is -4"),
        (lambda: holdfast.FlatBuffer([("a", (4,), 2, 4, 0)]), "elements 2 to 6 of a leaf"),
        (
            lambda: holdfast.FlatBuffer([("a", (4,), 0, 4, 0), ("b", (4,), 0, 4, 3)]),
            "a and b share elements of one buffer",
        ),
    ],
)
def test_a_declaration_that_means_nothing_is_refused(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_a_torn_restore_leaves_nothing_half_converted(tmp_path: Path) -> None:
    """The read that fails is told as any other: the state must not be used."""
    state = build(0, steps=1)
    holdfast.save(tmp_path, state, rules=rules())
    (image,) = tmp_path.glob("steps/*/*.safetensors")
    data = bytearray(image.read_bytes())
    data[4096 + 64] ^= 1
    image.write_bytes(data)
    with pytest.raises(RestoreError):
        holdfast.load(tmp_path, build(1), rules=rules())


def test_parts_of_what_is_frozen_are_frozen_and_those_of_what_is_stepped_are_lazy() -> None:
    from holdfast.geometry.layout import table_from_json

    model = nn.ModuleDict({"qkv": nn.Linear(8, 16), "o": nn.Linear(8, 8)}).requires_grad_(False)
    model["o"].requires_grad_(True)
    optimizer = torch.optim.SGD(model["o"].parameters(), lr=0.5)
    state = {"model": model, "optimizer": optimizer}
    renamed = ("o.{what}", r.rename("out.{what}"))
    describer = Describer(state, 0, mark_frozen=True, rules=r.Rules([QKV, renamed]))
    described = describer.describe()
    table = {entry.name: entry.is_frozen for entry in table_from_json(described.table)}
    parts = {f"model.{x}.{what}" for x in "qkv" for what in ("weight", "bias")}
    assert {name for name, is_frozen in table.items() if is_frozen} == parts
    assert table.keys() - parts == {"model.out.weight", "model.out.bias"}
    assert [binding.name for binding in described.bindings.lazy] == [
        "model.o.weight",
        "model.o.bias",
    ]


def test_a_parameter_that_an_optimizer_has_in_parts_is_stored_from_them_and_filled_whole(
    tmp_path: Path,
) -> None:
    def build_flat(value: float) -> State:
        model = nn.ParameterDict({n: nn.Parameter(torch.full((3, 2), value)) for n in "ab"})
        flat = nn.Parameter(torch.arange(14.0) + value)
        ranges = [("a", (3, 2), 0, 6, 0), ("b", (3, 2), 0, 6, 6)]
        holdfast.declare(flat, holdfast.FlatBuffer(ranges))
        return {"model": model, "optimizer": torch.optim.SGD([flat], lr=0.5, momentum=0.5)}

    state, again = build_flat(1.0), build_flat(0.0)
    (flat,) = state["optimizer"].param_groups[0]["params"]
    state["optimizer"].state[flat]["momentum_buffer"] = -flat.detach()
    holdfast.save(tmp_path, state)
    with holdfast.open(tmp_path) as checkpoint:
        assert set(checkpoint.leaves) == {
            f"{key}.{n}{kind}"
            for n in "ab"
            for key, kind in (("model", ""), ("optimizer", ".momentum_buffer"))
        }
    holdfast.load(tmp_path, again)
    (other,) = again["optimizer"].param_groups[0]["params"]
    momentum = again["optimizer"].state[other]["momentum_buffer"]
    assert torch.equal(other[:12], flat[:12]) and not other[12:].any()
    assert torch.equal(momentum[:12], -flat[:12]) and not momentum[12:].any()
    assert torch.equal(again["model"]["b"].reshape(-1), flat[6:12])


class Counting(torch.optim.SGD):
    """Counts in a plain number how often each parameter was stepped."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter]
                kept["count"] = kept.get("count", 0) + 1


def test_numbers_beside_tensors_are_those_of_every_part(tmp_path: Path) -> None:
    def make(model: Any) -> State:
        return {"model": model, "optimizer": Counting(model.parameters(), lr=0.5)}

    state = make(nn.ModuleDict({"qkv": nn.Linear(8, 16)}))
    sum(p.sum() for p in state["model"].parameters()).backward()
    state["optimizer"].step()
    holdfast.save(tmp_path, state, rules=r.Rules([QKV]))
    sizes = {"q": 8, "k": 4, "v": 4}
    apart = make(nn.ModuleDict({x: nn.Linear(8, n) for x, n in sizes.items()}))
    holdfast.load(tmp_path, apart)
    for parameter in apart["model"].parameters():
        assert apart["optimizer"].state[parameter]["count"] == 1
    fused = make(nn.ModuleDict({"qkv": nn.Linear(8, 16)}))
    apart["optimizer"].state[apart["model"]["k"].weight]["count"] = 5
    holdfast.load(tmp_path, fused, rules=r.Rules([QKV]))
    assert fused["optimizer"].state[fused["model"]["qkv"].weight]["count"] == 1
    holdfast.save(tmp_path, apart, 1)
    with pytest.raises(
        StateMismatch, match=r"qkv\.weight: what it is made of was saved with state"
    ):
        holdfast.load(tmp_path, fused, rules=r.Rules([QKV]))


class Tied(nn.Module):
    """An embedding and a head: two tensors, or one that is met under either name first."""

    def __init__(self, order: tuple[str, ...], *, is_one: bool) -> None:
        super().__init__()
        parts: dict[str, Any] = {"embed": nn.Embedding(16, 8), "head": nn.Linear(8, 16, bias=False)}
        for name in order:
            self.add_module(name, parts[name])
        if is_one:
            parts["head"].weight = parts["embed"].weight
        else:
            parts["head"].weight.data.copy_(parts["embed"].weight.data)


TIED = r.Rules([("head.weight", r.tied("embed.weight"))])


def stepped(seed: int, order: tuple[str, ...], *, is_one: bool) -> State:
    torch.manual_seed(seed)
    model = Tied(order, is_one=is_one)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("is_one", [True, False])
@pytest.mark.parametrize("order", [("embed", "head"), ("head", "embed")])
def test_what_a_rule_calls_a_copy_is_stored_once_under_the_name_of_the_other(
    tmp_path: Path, order: tuple[str, ...], is_one: bool
) -> None:
    saved, back = stepped(1, order, is_one=is_one), stepped(2, order, is_one=is_one)
    holdfast.save(tmp_path, saved, rules=TIED)
    with holdfast.open(tmp_path) as checkpoint:
        assert set(checkpoint.leaves) == {
            "model.embed.weight",
            *(f"optimizer.embed.weight.{kind}" for kind in ("exp_avg", "exp_avg_sq", "step")),
        }
    holdfast.load(tmp_path, back, rules=TIED)
    for one, other in zip(saved["model"].parameters(), back["model"].parameters(), strict=True):
        assert torch.equal(one, other)
        for kind, tensor in saved["optimizer"].state[one].items():
            assert torch.equal(tensor, back["optimizer"].state[other][kind])


def test_a_copy_of_what_no_optimizer_changes_is_saved_too(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Tied(("embed", "head"), is_one=False)
    holdfast.save(tmp_path, {"model": model}, rules=TIED)
    with holdfast.open(tmp_path) as checkpoint:
        found = torch.as_tensor(checkpoint.read("model.embed.weight"))
        assert torch.equal(found, model.get_parameter("embed.weight"))


def test_a_copy_of_what_nobody_has_is_refused_and_not_lost(tmp_path: Path) -> None:
    state = {"model": Tied(("embed", "head"), is_one=False)}
    wrong = r.Rules([("head.weight", r.tied("embedding.weight"))])
    with pytest.raises(UsageError, match=r"head\.weight is a copy of model\.embedding\.weight"):
        holdfast.save(tmp_path, state, rules=wrong)
    with pytest.raises(holdfast.errors.NotFound):
        holdfast.open(tmp_path)


@pytest.mark.parametrize("what", ["module", "entry"])
def test_a_declared_part_that_was_replaced_is_not_taken_for_a_whole(what: str) -> None:
    model = nn.Linear(4, 3, bias=False)
    state: State = {"model": model, "entry": torch.ones(40, 60)}
    shard = holdfast.Shard((6, 4), (3, 0)), holdfast.Shard((80, 60), (40, 0))
    holdfast.declare(model.weight, shard[0])
    holdfast.declare(state["entry"], shard[1])
    describer = Describer(state, 1, 2)
    before = describer.describe().table
    if what == "module":
        model.load_state_dict({"weight": torch.zeros(3, 4)}, assign=True)
    else:
        state["entry"] = torch.zeros(40, 60)
    with pytest.raises(UnsupportedState, match="another tensor of the same shape has taken"):
        describer.describe()
    if what == "module":
        holdfast.declare(model.weight, shard[0])
    else:
        holdfast.declare(state["entry"], shard[1])
    assert describer.describe().table == before


@pytest.mark.parametrize("keys", [("model", "ema"), ("ema", "model")])
def test_a_copy_of_a_declared_part_is_declared_too_or_refused(keys: tuple[str, str]) -> None:
    model = nn.Linear(4, 3, bias=False)
    shard = holdfast.Shard((6, 4), (3, 0))
    holdfast.declare(model.weight, shard)
    modules = {"model": model, "ema": copy.deepcopy(model)}
    describer = Describer({key: modules[key] for key in keys}, 1, 2)
    with pytest.raises(UnsupportedState, match=r"ema\.weight is called and shaped like model"):
        describer.describe()
    holdfast.declare(modules["ema"].weight, shard)
    assert len(describer.describe().bindings) == 2
    whole = nn.Linear(4, 6, bias=False)
    assert len(Describer({"model": model, "ema": whole}, 1, 2).describe().bindings) == 2
