"""Ranks with the same parameters update the same elements in the same place, whatever they measure.

A device whose kernel has other last bits than the host's is the thread of its lane.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import UsageError
from holdfast.events import Event, subscribe
from holdfast.offload import HybridAdamW, kernels
from holdfast.offload import placement as placing
from holdfast.offload.planning.schedule import Schedule
from holdfast.offload.planning.simulate import Rates
from holdfast.offload.update import DeviceSlot
from support.models import hybrids
from support.runs.launch import run_ranks

DEVICE_IS_FAST = Rates(1e12, 1e12, 1e6, 1e12)
HOST_IS_FAST = Rates(1e6, 1e6, 1e12, 1e6)
Found = tuple[tuple[int, ...], tuple[int, ...], list[bytes]]


def _fake_device(rates: Rates, monkeypatch: pytest.MonkeyPatch) -> None:
    real = kernels._fused_adamw

    def fused(masters: list[torch.Tensor], *given: Any, **options: Any) -> None:
        real(masters, *given, **options)
        if threading.current_thread().name.startswith("holdfast-compute"):
            torch._foreach_mul_(masters, 1 + 2**-20)

    monkeypatch.setattr(kernels, "_fused_adamw", fused)
    monkeypatch.setattr(placing, "_REPLAN_STEPS", 1)
    monkeypatch.setattr(placing, "measure", lambda *_: rates)


def _make_room(slots: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For so many slots at a time. What is returned grows by one for each slot made."""
    made: list[int] = []
    living: weakref.WeakSet[DeviceSlot] = weakref.WeakSet()

    def slot(*given: Any) -> DeviceSlot:
        if len(living) >= slots:
            raise torch.OutOfMemoryError("CUDA out of memory")
        made.append(1)
        one = DeviceSlot(*given)
        living.add(one)
        return one

    monkeypatch.setattr(placing, "DeviceSlot", slot)
    return made


def _model(kind: str, world: int) -> tuple[nn.Module, nn.Module]:
    model = hybrids.tiny(seed=3)
    if kind == "ddp":
        return model, DistributedDataParallel(model)
    shape = (world, 1) if kind == "hsdp" else (1, world)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    fully_shard(model, mesh=mesh)
    return model, model


def _all_on_host(_: Schedule, sizes: Sequence[int], *__: Any, **___: Any) -> Iterator[Schedule]:
    yield Schedule(tuple(range(len(sizes))), (), 0.0)


def _train(
    rank: int, world: int, kind: str, share: float | None, room: int | None
) -> tuple[Found, bool, int]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        is_slow = rank == 1 and room is None
        _fake_device(HOST_IS_FAST if is_slow else DEVICE_IS_FAST, monkeypatch)
        if rank == 1 and kind != "fsdp":
            monkeypatch.setattr(placing, "replanning", _all_on_host)
        made = _make_room(2 if room is None or rank == 0 else room, monkeypatch)
        model, around = _model(kind, world)
        optimizer = HybridAdamW(model.parameters(), subgroup_elements=700, device_share=share)
        if share is None:
            optimizer._placing._set(None)  # as on a GPU before the first step
        slots = 0
        for step in range(6):
            if step == 4 and kind != "fsdp":  # memory for these comes when they are first updated
                added = nn.Parameter(torch.ones(2000))
                optimizer.add_param_group({"params": [added]})
                if share is None:
                    optimizer._placing._set(None)
                added.grad = torch.ones(2000)
            generator = torch.Generator().manual_seed(step * world + rank)
            around(torch.randn(3, 33, generator=generator)).square().mean().backward()
            made.clear()
            optimizer.step()
            if rank == 1:  # its host becomes fast
                optimizer._placing.learn("host_update", 1e15, 1.0)
            slots = len(made)
            optimizer.zero_grad()
        schedule = optimizer._placing.schedule
        assert schedule is not None
        local = [_bits(p) for p in model.parameters()]
        return (schedule.host, schedule.device, local), bool(schedule.device), slots


def _bits(parameter: torch.Tensor) -> bytes:
    local = getattr(parameter, "_local_tensor", parameter).detach()
    return bytes(local.contiguous().view(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("kind", ["ddp", "hsdp"])
def test_replicas_plan_by_the_rates_of_one_of_them_and_stay_the_same(kind: str) -> None:
    (one, uses_device, _), (other, *_) = run_ranks(2, _train, kind, None, None)
    assert uses_device
    assert one[:2] == other[:2]
    assert one[2] == other[2]


@pytest.mark.parametrize("share", [None, 0.5])
@pytest.mark.parametrize("room", [0, 1])
def test_replicas_use_as_many_slots_as_all_of_them_have_room_for(
    share: float | None, room: int
) -> None:
    (one, uses_device, slots), (other, *_) = run_ranks(2, _train, "ddp", share, room)
    assert uses_device == bool(room)
    assert one == other
    assert slots == room


def _at_odds(rank: int, world: int) -> list[Any]:
    """Sharded: nobody has the same elements, each plans by its own rates."""
    return list(_train(rank, world, "fsdp", None, None))


def test_with_shards_each_rank_plans_for_itself() -> None:
    first, second = run_ranks(2, _at_odds)
    assert first[1] != second[1]


def _without_gradient(rank: int, world: int) -> list[str]:
    """One rank has nothing to do in its first step, and one never uses its device."""
    found = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        _fake_device((DEVICE_IS_FAST, HOST_IS_FAST)[rank], monkeypatch)
        parameter = nn.Parameter(torch.ones(3000))
        optimizer = HybridAdamW([parameter], subgroup_elements=700)
        optimizer._placing._set(None)
        parameter.grad = None if rank else torch.ones(3000)
        optimizer.step()
        optimizer.step()
        if optimizer._placing.measured is None:
            found.append("it did not agree")
        if rank == 0:  # a collective would wait for the other
            alone = nn.Parameter(torch.ones(3000))
            alone.grad = torch.ones(3000)
            HybridAdamW([alone], device_share=0.0).step()
            HybridAdamW([alone]).step()
            optimizer = HybridAdamW([alone], device_slots=0)
            optimizer._placing._set(None)
            optimizer.step()
    return found


def test_a_rank_without_a_gradient_takes_part_and_without_a_device_nobody_is_asked() -> None:
    assert run_ranks(2, _without_gradient) == [[], []]


def _frozen(rank: int, world: int) -> list[Any]:
    """All that one rank has is frozen in the first steps."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        _fake_device(DEVICE_IS_FAST, monkeypatch)
        model = hybrids.tiny().requires_grad_(rank == 0)
        optimizer = HybridAdamW(model.parameters(), subgroup_elements=700)
        optimizer._placing._set(None)  # as on a GPU before the first step
        for step in range(3):
            if rank == 0:
                hybrids.loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer._placing._is_on_device = True
        hybrids.loss_of(model.requires_grad_(), 3).backward()
        optimizer.step()
        schedule = optimizer._placing.schedule
        assert schedule is not None
        return [schedule.host, schedule.device, optimizer._placing._room]


def test_a_rank_of_which_all_is_frozen_takes_part_and_plans_as_the_others_later() -> None:
    one, other = run_ranks(2, _frozen, timeout_s=40)
    assert one == other and one[1]


def _all_frozen(rank: int, world: int) -> list[Any]:
    """All that any rank has is frozen in the first steps; the ranks' devices are not alike."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        _fake_device((DEVICE_IS_FAST, HOST_IS_FAST)[rank], monkeypatch)
        model = hybrids.tiny().requires_grad_(False)
        optimizer = HybridAdamW(model.parameters(), subgroup_elements=700)
        optimizer._placing._is_on_device = True
        optimizer._placing._set(None)  # as on a GPU before the first step
        for _ in range(2):
            optimizer.step()
        hybrids.loss_of(model.requires_grad_(), 3).backward()
        optimizer.step()
        schedule = optimizer._placing.schedule
        assert schedule is not None
        return [schedule.host, schedule.device, optimizer._placing._room]


def test_replicas_that_begin_frozen_plan_alike_once_they_are_not() -> None:
    one, other = run_ranks(2, _all_frozen, timeout_s=40)
    assert one == other and one[2] is not None


def _uneven(rank: int, world: int, share: float | None) -> tuple[bytes, int, list[str]]:
    """Beside a shard that has a row more on one rank, cuts of what both have fall elsewhere."""
    said: list[Event] = []
    subscribe(lambda event, _: said.append(event))
    mesh = init_device_mesh("cpu", (world,))
    laid = [((201, 40), Shard(0)), ((20_000,), Replicate())]
    generator = torch.Generator().manual_seed(0)

    def some() -> list[torch.Tensor]:
        made = [(torch.randn(shape, generator=generator), [how]) for shape, how in laid]
        return [distribute_tensor(one, mesh, how) for one, how in made]

    with pytest.MonkeyPatch.context() as monkeypatch:
        _fake_device(Rates(2e10, 2e10, 1e9, 1e11), monkeypatch)
        parameters = [nn.Parameter(one) for one in some()]
        optimizer = HybridAdamW(parameters, subgroup_elements=700, device_share=share)
        if share is None:
            optimizer._placing._set(None)  # as on a GPU before the first step
        for _ in range(6):
            for parameter, gradient in zip(parameters, some(), strict=True):
                parameter.grad = gradient
            optimizer.step()
    schedule = optimizer._placing.schedule
    assert schedule is not None
    return _bits(parameters[1]), len(schedule.device), [str(event) for event in said]


@pytest.mark.parametrize("share", [None, 0.5])
def test_replicas_that_lie_elsewhere_on_another_rank_are_updated_on_the_host(
    share: float | None,
) -> None:
    one, other = run_ranks(2, _uneven, share)
    assert one[0] == other[0]
    assert one[1] and other[1], "shards go to the device all the same"
    assert one[2] == other[2] and len(one[2]) == 1
    assert "Give them an optimizer of their own" in one[2][0]


def _full_later(rank: int, world: int) -> list[str]:
    said: list[Event] = []
    subscribe(lambda event, _: said.append(event))
    found = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        _fake_device(DEVICE_IS_FAST, monkeypatch)
        model = hybrids.tiny()
        optimizer = HybridAdamW(model.parameters(), subgroup_elements=700, device_share=0.5)
        hybrids.train(model, optimizer, range(2))
        if rank == 1:
            _make_room(1, monkeypatch)
        hybrids.train(model, optimizer, range(2, 3))  # with one slot, the same elements
        if rank == 1:
            _make_room(0, monkeypatch)
            hybrids.loss_of(model, 3).backward()
            try:
                optimizer.step()
                found.append("not refused")
            except UsageError as error:
                if "no room on cpu for the state of one subgroup (704 elements)" not in str(error):
                    found.append(str(error))
            found += [optimizer.broken_off] if optimizer.broken_off else []
            _make_room(2, monkeypatch)
        else:
            hybrids.loss_of(model, 3).backward()
        optimizer.step()
    bits = [_bits(p).hex() for p in model.parameters()]
    return found + [str(event) for event in said] + bits


def test_a_device_that_is_full_later_on_one_rank_does_not_change_where_replicas_update() -> None:
    one, other = run_ranks(2, _full_later)
    assert one == other and len(one) == len(list(hybrids.tiny().parameters()))
