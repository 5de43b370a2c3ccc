"""Small parameters are handled together, and everything is as if each were alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.offload import HybridAdamW, kernels
from holdfast.offload.host_state import FlatBufferRow, ParamSlot
from support.models import hybrids

SIZES = (1, 16, 33, 48, 5, 64, 160, 7, 32, 16, 2000, 3000)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in SIZES]


class Pair:
    """The same parameters, ours with small ones (under 187 elements) and without."""

    def __init__(self, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.ours, self.theirs = parameters(dtype), parameters(dtype)
        given = {"subgroup_elements": 3000, "device_share": 0.0, **options}
        self.one = HybridAdamW(self.ours, 1e-2, **given)
        places = {place.size: place for _, place in self.one._places.values()}
        assert [size for size, place in places.items() if place.small is None] in ([2000, 3000], [])
        self.other: torch.optim.Optimizer = torch.optim.AdamW(self.theirs, 1e-2, fused=True)
        if dtype != torch.float32:
            alone = {**given, "subgroup_elements": 15}  # none is small
            self.other = HybridAdamW(self.theirs, 1e-2, **alone)
            assert not any(p.small for _, p in self.other._places.values())

    def step(
        self,
        step: int,
        leave_out: set[int] = frozenset(),  # type: ignore[assignment]
        before: Callable[[list[nn.Parameter], torch.optim.Optimizer], object] | None = None,
    ) -> None:
        for of, optimizer in ((self.ours, self.one), (self.theirs, self.other)):
            generator = torch.Generator().manual_seed(step)
            for number, parameter in enumerate(of):
                gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                parameter.grad = None if number in leave_out else gradient
            if before is not None:
                before(of, optimizer)
            optimizer.step()

    def differences(self) -> list[str]:
        def module(of: list[nn.Parameter]) -> nn.Module:
            return nn.ParameterList(of)

        return hybrids.differences((module(self.ours), self.one), (module(self.theirs), self.other))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_ones_are_updated_as_if_each_were_alone(dtype: torch.dtype, share: float) -> None:
    pair = Pair(dtype, device_share=share, lane_delay_s=0.001)
    for step in range(4):
        pair.step(step)
    assert pair.differences() == []


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_those_without_a_gradient_stay_and_count_no_step(dtype: torch.dtype, share: float) -> None:
    pair = Pair(dtype, device_share=share)
    for step, out in enumerate([{1, 4}, set(), {3, 10}, {0, 1, 2, 3, 4}, set()]):
        pair.step(step, leave_out=out)
        assert pair.differences() == []


def _by_data(of: list[nn.Parameter], _: object) -> None:
    of[3].data.add_(1)
    of[8].data[5] = 2.0


@pytest.mark.parametrize("left_out", [set(), {3, 8, 9}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_others_write_to_them_is_seen_though_no_version_moves(
    dtype: torch.dtype, left_out: set[int]
) -> None:
    pair = Pair(dtype)
    pair.step(0)
    pair.step(1, leave_out=left_out, before=_by_data)
    pair.step(2)
    assert pair.differences() == []


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_master_that_was_changed_by_hand_is_kept_though_its_neighbours_are_updated(
    share: float,
) -> None:
    pair = Pair(torch.bfloat16, device_share=share)
    pair.step(0)

    def change(of: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        optimizer.state[of[3]]["master"].mul_(2)

    pair.step(1, leave_out={3}, before=change)
    pair.step(2)
    assert pair.differences() == []


def test_a_loaded_state_and_one_of_another_count_are_its_own() -> None:
    pair = Pair()
    pair.step(0)

    def count(of: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        optimizer.state[of[1]]["step"].fill_(50)
        optimizer.state[of[3]]["exp_avg"] = torch.full((48,), 0.5)

    pair.step(1, before=count)
    pair.step(2)
    assert pair.differences() == []


def test_one_call_of_the_kernel_gets_them_as_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(subgroup_elements=1 << 20)
    pair.step(0)
    lengths: list[list[int]] = []
    real = kernels._fused_adamw

    def spy(masters: list[torch.Tensor], *args: Any, **options: Any) -> None:
        lengths.append([one.numel() for one in masters])
        real(masters, *args, **options)

    monkeypatch.setattr(kernels, "_fused_adamw", spy)
    pair.step(1)
    whole = sum(size for size in SIZES if size % 16 == 0)
    odd = [size for size in SIZES if size % 16]
    assert len(lengths) == 1 and sum(lengths[0]) == whole + sum(odd)
    assert len(lengths[0]) <= len(odd) + 1


def test_gradients_of_all_go_to_the_host_in_one_piece_of_work() -> None:
    pair = Pair()
    lanes, _ = pair.one._started()
    given = []
    real = lanes.gradients.run

    def run(*args: Any, **options: Any) -> Any:
        given.append(args)
        return real(*args, **options)

    object.__setattr__(lanes.gradients, "run", run)
    pair.step(0)
    assert len(given) == 3  # two large ones, and the others


def test_they_lie_last_in_their_row_and_those_that_fill_vectors_first() -> None:
    places = [ParamSlot(p, "") for p in parameters()]
    row = FlatBufferRow(places, 0, is_pinned=False, small=187)
    assert [place.size for place in row.places] == [
        2000,
        3000,
        16,
        48,
        64,
        160,
        32,
        16,
        1,
        33,
        5,
        7,
    ]
    assert row.small is not None and (row.small.start, row.small.stop) == (5008, row.elements)
