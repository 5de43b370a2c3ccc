"""Parameters that a framework has emptied are refused by name; those that are empty are stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import SnapshotSkipped, UnsupportedState
from support.models.models import differences


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))


class Layer(nn.Module):
    """No layer of torch's: nothing but the parameter itself can tell what it was."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, 5))


def noted_shape(p: Any) -> None:
    p.ds_shape, p.data = p.shape, torch.empty(0)


def noted_list(p: Any) -> None:
    p.full_size, p.data = list(p.shape), torch.empty(0)


def noted_part(p: Any) -> None:
    p.part, p.data = p.detach().flatten()[:3].clone(), torch.empty(0)


def with_gradient(p: Any) -> None:
    p.grad, p.data = torch.ones_like(p), torch.empty(0)


def without_memory(p: Any) -> None:
    p.untyped_storage().resize_(0)


EMPTIED: dict[str, tuple[Callable[[Any], None], str]] = {
    "shape": (noted_shape, r"has no elements, \[0\], but its ds_shape is \[3, 5\]"),
    "list": (noted_list, r".*but its full_size is \[3, 5\]"),
    "part": (noted_part, r".*but its part has \[3\]"),
    "gradient": (with_gradient, r".*but its gradient has \[3, 5\]"),
    "memory": (without_memory, r"is of shape \[3, 5\], and of its memory 0 of 60 bytes are left"),
}


@pytest.mark.parametrize("how", EMPTIED)
def test_a_parameter_that_was_emptied_is_refused_by_name(how: str, tmp_path: Path) -> None:
    empty, said = EMPTIED[how]
    model = nn.ModuleDict({"layer": Layer()})
    empty(model["layer"].table)
    with pytest.raises(UnsupportedState, match=rf"^model\.layer\.table {said}") as caught:
        holdfast.save(tmp_path, {"model": model})
    assert "holdfast.declare" in str(caught.value)
    with pytest.raises(UnsupportedState, match=r"^value\.0 "):
        holdfast.save(tmp_path, {"value": [model["layer"].table]})


def test_a_layer_of_torch_tells_by_its_sizes_that_it_was_emptied(tmp_path: Path) -> None:
    for number, size in enumerate(("in_features=4", r"normalized_shape=\(4,\)")):
        model = net()
        model[number].weight.data = torch.empty(0)
        with pytest.raises(
            UnsupportedState, match=rf"^model\.{number}\.weight .*made with.*{size}"
        ):
            holdfast.save(tmp_path, {"model": model})


def test_moments_tell_that_their_parameter_was_emptied(tmp_path: Path) -> None:
    model = Layer()
    optimizer = torch.optim.AdamW(model.parameters())
    model.table.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.table.data = torch.empty(0)
    with pytest.raises(UnsupportedState, match=r"optimizer\.table\.exp_avg has 15 elements"):
        holdfast.save(tmp_path, {"model": model, "optimizer": optimizer})


def test_what_is_emptied_between_two_saves_costs_the_second(tmp_path: Path) -> None:
    model = net()
    with holdfast.Checkpointer(tmp_path, {"model": model}) as ckpt:
        ckpt.save(0).wait_captured()
        whole = model[0].weight.data
        noted_shape(model[0].weight)
        with pytest.raises(UnsupportedState, match=r"^model\.0\.weight has no elements"):
            ckpt.save(1)
        handle = ckpt.step(2)
        assert handle is not None
        with pytest.raises(SnapshotSkipped, match=r"model\.0\.weight has no elements"):
            handle.wait_captured()
        model[0].weight.data = whole
        ckpt.save(3).wait_captured()


def test_nothing_is_loaded_into_what_was_emptied(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"model": Layer()})
    for empty, said in EMPTIED.values():
        back = Layer()
        empty(back.table)
        with pytest.raises(holdfast.errors.HoldfastError, match=rf"model\.table {said}"):
            holdfast.load(tmp_path, {"model": back})


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op:UserWarning")
def test_parameters_that_never_had_an_element_are_stored(tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(0, 3), nn.Linear(3, 0), nn.LayerNorm(0), nn.Embedding(0, 4))
        model.extra = nn.Parameter(torch.empty(0))
        model.extra.partition_stride, model.extra.is_expert = 1, False  # type: ignore[attr-defined]
        model.register_buffer("none", torch.empty(0, 2))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    saved, back = make(1), make(2)
    saved["model"][0](torch.ones(1, 0)).sum().backward()
    saved["optimizer"].step()
    holdfast.save(tmp_path, saved)
    holdfast.load(tmp_path, back)
    assert differences(back["model"].state_dict(), saved["model"].state_dict()) == []


def test_an_emptied_parameter_that_is_declared_says_itself_what_it_is(tmp_path: Path) -> None:
    model = Layer()
    model.table.page_size = (2, 2)  # type: ignore[attr-defined]
    model.table.data = torch.empty(0, 5)
    with pytest.raises(UnsupportedState, match="page_size"):
        holdfast.save(tmp_path, {"model": model})
    holdfast.declare(model.table, holdfast.Shard((0, 5), (0, 0)))
    holdfast.save(tmp_path, {"model": model})
    with holdfast.open(tmp_path) as checkpoint:
        assert checkpoint.leaves["model.table"].shape == (0, 5)
