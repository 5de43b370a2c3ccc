"""A state_dict that shows parameters otherwise costs nothing: they are stored all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from holdfast.errors import UnsupportedState, UsageError
from holdfast.state import modules
from holdfast.state.modules import check_storable
from support.models.models import differences
from support.runs.launch import run_ranks

Show = Callable[[torch.Tensor], dict[str, Any]]


def views(w: torch.Tensor) -> dict[str, Any]:
    q, k, v = w.split(4)
    return {"wq": q, "wk": k, "wv": v}


def copies(w: torch.Tensor) -> dict[str, Any]:
    """As fused attention is shown: the rows by head, gathered by what they are."""
    heads = w.reshape(2, 3, 2, -1)
    return {name: heads[:, n].reshape(4, -1).contiguous() for n, name in enumerate(("q", "k", "v"))}


def both(w: torch.Tensor) -> dict[str, Any]:
    return {**views(w), "again": w[2:5]}


class Fused(nn.Module):
    def __init__(self, show: Show, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.wqkv = nn.Parameter(torch.randn(12, 4))
        self.bias = nn.Parameter(torch.zeros(12, dtype=torch.bfloat16))
        self.show = show
        hooked: Any = self
        hooked.register_state_dict_post_hook(self._shown)

    @staticmethod
    def _shown(module: Any, found: dict[str, Any], prefix: str, _: Any) -> None:
        for name in ("wqkv", "bias"):
            for new, tensor in module.show(found.pop(prefix + name).view(12, -1)).items():
                found[f"{prefix}{name}.{new}"] = tensor


@pytest.mark.parametrize("show", [views, copies, both])
def test_parameters_that_hooks_show_otherwise_are_stored_as_they_are(
    show: Show, tmp_path: Path
) -> None:
    saved, back = Fused(show), Fused(show, 1)
    holdfast.save(tmp_path, {"model": nn.Sequential(saved)})
    with holdfast.open(tmp_path) as checkpoint:
        assert set(checkpoint.leaves) == {"model.0.wqkv", "model.0.bias"}
    holdfast.load(tmp_path, {"model": nn.Sequential(back)})
    found, expected = (dict(each.named_parameters()) for each in (back, saved))
    assert differences(found, expected) == []


MORE: dict[str, Show] = {
    "changed": lambda w: {"w": w + 1},
    "one more": lambda w: {**views(w), "w": torch.ones(2)},
    "a part": lambda w: {"w": w[:3].clone()},
    "no tensor": lambda w: {**copies(w), "step": 3},
    "other type": lambda w: {"w": w.double()},
}


@pytest.mark.parametrize("what", MORE)
def test_what_is_not_among_the_parameters_elements_is_refused(what: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedState, match="beside its parameters and buffers"):
        holdfast.save(tmp_path, {"model": Fused(MORE[what])})


@pytest.fixture
def _declarations() -> Iterator[None]:
    there = dict(modules._derived)
    yield
    modules._derived.clear()
    modules._derived.update(there)


@pytest.mark.usefixtures("_declarations")
@pytest.mark.parametrize("what", ["changed", "other type"])
def test_what_was_declared_to_show_stored_elements_is_no_reason_to_refuse(
    what: str, tmp_path: Path
) -> None:
    class Shown(Fused):
        pass

    saved, back = (Fused(MORE[what], seed) for seed in (0, 1))
    with pytest.raises(UnsupportedState, match=r"holdfast\.derived"):
        holdfast.save(tmp_path, {"model": nn.Sequential(saved)})
    holdfast.derived(Shown, ["wqkv.w", "bias.w"])
    with pytest.raises(UnsupportedState, match=r"wqkv\.w"):  # declared of another class
        holdfast.save(tmp_path, {"model": nn.Sequential(saved)})
    holdfast.derived(Fused, ["wqkv.w", "bias.w"])
    inherited = Shown(MORE[what])
    holdfast.save(tmp_path, {"model": nn.Sequential(inherited)})
    holdfast.load(tmp_path, {"model": nn.Sequential(back)})
    found, expected = (dict(each.named_parameters()) for each in (back, inherited))
    assert differences(found, expected) == []


@pytest.mark.usefixtures("_declarations")
def test_what_was_not_declared_is_refused_beside_what_was(tmp_path: Path) -> None:
    holdfast.derived(Fused, ["wqkv.w", "bias.w"])
    show: Show = lambda w: {"w": w + 1, "more": torch.ones(2)}  # noqa: E731
    with pytest.raises(UnsupportedState, match=r"has bias\.more, wqkv\.more beside"):
        holdfast.save(tmp_path, {"model": nn.Sequential(Fused(show))})


def test_declarations_that_mean_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match=r"not a subclass of torch\.nn\.Module"):
        holdfast.derived(dict, ["w"])  # type: ignore[arg-type]
    for names in ("wq.weight", [], [3], [""]):
        with pytest.raises(UsageError, match="are not names in a state_dict"):
            holdfast.derived(Fused, names)  # type: ignore[arg-type]


def test_what_lies_between_the_elements_of_a_parameter_is_none_of_them(tmp_path: Path) -> None:
    wide = torch.randn(12, 8)
    model = Fused(lambda w: {"w": w})
    model.wqkv = nn.Parameter(wide[:, :4])
    model.show = lambda w: {"w": w, "more": wide[1:5, 4:]}
    with pytest.raises(UnsupportedState, match=r"wqkv\.more"):
        holdfast.save(tmp_path, {"model": model})


def _sharded(rank: int, world: int) -> None:
    def gathered(w: Any) -> dict[str, Any]:
        whole = w.redistribute(w.device_mesh, [Replicate()])
        return {n: t for n, t in copies(whole).items() if isinstance(t, DTensor)}

    mesh = init_device_mesh("cpu", (world,))
    model = Fused(gathered)
    for name in ("wqkv", "bias"):
        sharded = distribute_tensor(getattr(model, name).detach(), mesh, [Shard(0)])
        setattr(model, name, nn.Parameter(sharded))
    check_storable("model", model)


def test_parameters_in_shards_that_hooks_gather_are_stored_as_they_are() -> None:
    run_ranks(2, _sharded)
