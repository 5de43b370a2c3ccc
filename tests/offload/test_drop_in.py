"""It takes the place of torch's optimizer: all that is done with one of those is done with it."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import UsageError
from holdfast.offload import HybridAdamW
from holdfast.offload import state_dict as states
from holdfast.offload.host_state import FlatBufferRow, ParamSlot
from support.models import hybrids

SMALL: dict[str, Any] = {"subgroup_elements": 700, "device_share": 0.5}


def ours(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, HybridAdamW]:
    model = hybrids.tiny(dtype)
    return model, HybridAdamW(hybrids.groups(model), 1e-2, **{**SMALL, **options})


def theirs() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = hybrids.tiny()
    return model, torch.optim.AdamW(hybrids.groups(model), 1e-2, fused=True)


# ── state dicts ──────────────────────────────────────────────────────────────────────────────


def test_a_state_dict_of_torchs_adamw_is_taken_and_training_goes_on_as_there() -> None:
    there, here = theirs(), ours()
    hybrids.train(*there, range(3))
    here[0].load_state_dict(there[0].state_dict())
    here[1].load_state_dict(copy.deepcopy(there[1].state_dict()))
    assert hybrids.train(*here, range(3, 6)) == hybrids.train(*there, range(3, 6))
    assert hybrids.differences(here, there) == []


def test_torchs_adamw_takes_its_state_dict_and_goes_on_as_here() -> None:
    there, here = theirs(), ours()
    hybrids.train(*here, range(3))
    there[0].load_state_dict(here[0].state_dict())
    there[1].load_state_dict(copy.deepcopy(here[1].state_dict()))
    for group in there[1].param_groups:
        group["fused"] = True
    assert hybrids.train(*here, range(3, 6)) == hybrids.train(*there, range(3, 6))
    assert hybrids.differences(here, there) == []


def test_its_groups_say_what_torchs_say() -> None:
    here, there = ours()[1].state_dict(), theirs()[1].state_dict()
    told = [{**group, "fused": True} for group in here["param_groups"]]
    assert told == there["param_groups"]
    assert here["state"] == there["state"] == {}


@pytest.mark.parametrize("order", ["model_first", "optimizer_first"])
def test_masters_of_16_bits_go_with_the_state_dict(order: str) -> None:
    one, other = ours(torch.bfloat16), ours(torch.bfloat16)
    hybrids.train(*one, range(3))
    loads: list[Any] = [
        lambda: other[0].load_state_dict(one[0].state_dict()),
        lambda: other[1].load_state_dict(copy.deepcopy(one[1].state_dict())),
    ]
    for load in loads if order == "model_first" else reversed(loads):
        load()
    assert hybrids.train(*one, range(3, 6)) == hybrids.train(*other, range(3, 6))
    assert hybrids.differences(one, other) == []


def test_hooks_on_loading_see_plain_state_dicts() -> None:
    model, optimizer = ours()
    hybrids.train(model, optimizer, range(1))
    seen = []

    def look(_: object, given: dict[str, Any]) -> None:
        seen.append(type(given["state"][0]["exp_avg"]))

    optimizer.register_load_state_dict_pre_hook(look)
    optimizer.register_load_state_dict_post_hook(
        lambda o: seen.append(type(o.state[o.param_groups[0]["params"][0]]["exp_avg"]))
    )
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [torch.Tensor, torch.Tensor]


def test_a_state_of_another_shape_is_refused_by_name() -> None:
    model, optimizer = ours()
    hybrids.train(model, optimizer, range(1))
    given = copy.deepcopy(optimizer.state_dict())
    given["state"][0]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"'exp_avg' given for parameter 0 of group 0 has"):
        optimizer.load_state_dict(given)


# ── parameters that change elsewhere ─────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_loaded_between_steps_is_what_is_trained_on(dtype: torch.dtype) -> None:
    one, other = ours(dtype), ours(dtype)
    hybrids.train(*one, range(2))
    with torch.no_grad():
        for parameter in one[0].parameters():
            parameter.fill_(0.25)
    for parameter in other[0].parameters():
        parameter.data = torch.full_like(parameter, 0.25)
    for parameter in one[0].parameters():
        one[1].state[parameter].clear()
    hybrids.train(*one, range(2, 4))
    hybrids.train(*other, range(2, 4))
    assert hybrids.differences(one, other) == []


def test_masters_are_compared_with_their_parameters_only_where_those_were_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    followed = []
    follow = states.follow_parameter

    def count(row: FlatBufferRow, place: ParamSlot, *, keep: bool) -> None:
        followed.append(place.parameter)
        follow(row, place, keep=keep)

    monkeypatch.setattr(states, "follow_parameter", count)
    model, optimizer = ours(torch.bfloat16)
    parameters = list(model.parameters())
    hybrids.train(model, optimizer, range(3))
    assert len(followed) == len(parameters)
    with torch.no_grad():
        parameters[1].mul_(2)
    hybrids.train(model, optimizer, range(3, 6))
    assert len(followed) == len(parameters) + 1 and followed[-1] is parameters[1]


def _by_data(parameter: torch.Tensor) -> None:
    parameter.data.clamp_(-0.01, 0.01)


def _by_another_optimizer(parameter: torch.Tensor) -> None:
    torch.optim.SGD([parameter], 0.5, fused=True).step()


def _by_new_memory(parameter: torch.Tensor) -> None:
    for _ in range(2):  # the second is apt to get the memory that the first gave back
        parameter.data = parameter.data * 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", [_by_data, _by_another_optimizer, _by_new_memory])
def test_parameters_that_others_change_behind_versions_stay_changed(
    change: Callable[[torch.Tensor], None], dtype: torch.dtype
) -> None:
    here, there = ours(dtype), ours(dtype)
    for step in range(3):
        for model, optimizer in (here, there):
            hybrids.loss_of(model, step).backward()
            optimizer.step()
            for parameter in model.parameters():
                change(parameter)
                if model is there[0]:  # told
                    parameter.data = parameter.data.clone()
                    optimizer._places[parameter][1].seen = ()
            optimizer.zero_grad()
    hybrids.train(*here, range(3, 4))
    hybrids.train(*there, range(3, 4))
    assert hybrids.differences(here, there) == []


def test_digits_below_16_bits_are_kept_where_the_parameter_did_not_change() -> None:
    model, optimizer = ours(torch.bfloat16)
    hybrids.train(model, optimizer, range(3))
    parameter = next(model.parameters())
    before = optimizer.state[parameter]["master"].clone()
    with torch.no_grad():
        parameter[0].fill_(2.0)
    for one in model.parameters():
        one.grad = torch.zeros_like(one)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert hybrids.same(optimizer.state[parameter]["master"][1:], before[1:])
    assert (optimizer.state[parameter]["master"][0] == 2.0).all()


def test_state_that_others_put_there_is_taken() -> None:
    one, other = ours(), ours()
    hybrids.train(*one, range(2))
    hybrids.train(*other, range(2))
    for parameter in one[0].parameters():
        kept = one[1].state[parameter]
        kept["exp_avg"] = kept["exp_avg"].double().bfloat16().float() * 1.5
    for parameter in other[0].parameters():
        kept = other[1].state[parameter]
        kept["exp_avg"].copy_(kept["exp_avg"].bfloat16().float() * 1.5)
    hybrids.train(*one, range(2, 4))
    hybrids.train(*other, range(2, 4))
    assert hybrids.differences(one, other) == []


# ── gradients ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("delay_s", [0.0, 0.002])
def test_micro_batches_and_clipping_are_seen_by_the_update(delay_s: float) -> None:
    here, there = ours(lane_delay_s=delay_s), theirs()
    hybrids.train(*here, range(4), clip=0.1, micro=3)
    hybrids.train(*there, range(4), clip=0.1, micro=3)
    assert hybrids.differences(here, there) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipping_by_the_optimizer_is_torchs_and_sends_nothing_again(dtype: torch.dtype) -> None:
    one, other = ours(dtype), ours(dtype)
    losses = hybrids.train(*one, range(5), clip=0.1, micro=2, clips_itself=True)
    assert losses == hybrids.train(*other, range(5), clip=0.1, micro=2)
    assert hybrids.differences(one, other) == []
    assert one[1]._started()[1].sent_again == 0 < other[1]._started()[1].sent_again


def test_an_optimizer_loaded_without_its_model_leaves_the_parameters_what_they_are() -> None:
    one, other = ours(torch.bfloat16), ours(torch.bfloat16)
    hybrids.train(*one, range(2))
    hybrids.train(*other, range(20, 25))
    before = [p.detach().clone() for p in one[0].parameters()]
    one[1].load_state_dict(other[1].state_dict())
    for group in one[1].param_groups:
        group["lr"] = 0.0
    hybrids.train(*one, range(2, 3))
    for was, now in zip(before, one[0].parameters(), strict=True):
        assert hybrids.same(was, now)


def test_clipping_holds_for_one_step() -> None:
    here, there = ours(), theirs()
    for step in range(3):
        hybrids.loss_of(here[0], step).backward()
        hybrids.loss_of(there[0], step).backward()
        if step == 1:
            here[1].clip_grad_norm_(0.01)
            order = [one for group in there[1].param_groups for one in group["params"]]
            nn.utils.clip_grad_norm_(order, 0.01)
        here[1].step()
        there[1].step()
        here[0].zero_grad()
        there[0].zero_grad()
    assert hybrids.differences(here, there) == []


def test_clipping_is_forgotten_with_the_gradients() -> None:
    one, other = ours(), ours()
    for model, optimizer in (one, other):
        hybrids.loss_of(model, 0).backward()
        if optimizer is one[1]:
            norm = optimizer.clip_grad_norm_(1e-6)
            assert norm > 1e-3
            optimizer.zero_grad()
            hybrids.loss_of(model, 0).backward()
        optimizer.step()
    assert hybrids.differences(one, other) == []


@pytest.mark.parametrize("how", ["mul_", "neg_", "turned"])
def test_gradients_changed_behind_versions_are_noticed(how: str) -> None:
    here, there = ours(device_share=0.0), theirs()
    for model, optimizer in (here, there):
        hybrids.loss_of(model, 0).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            if how == "mul_":
                parameter.grad.data.mul_(0.5)
            elif how == "neg_":  # with as many negative as positive the sum stays
                parameter.grad.data.neg_()
            else:
                parameter.grad.data.copy_(parameter.grad.flip(0))
        optimizer.step()
        optimizer.zero_grad()
    assert hybrids.differences(here, there) == []


@pytest.mark.parametrize("how", ["in_place", "another"])
def test_gradients_whose_bits_only_changed_places_are_noticed(how: str) -> None:
    here, there = ours(device_share=0.0), theirs()
    pairs: list[tuple[nn.Module, Any]] = [here, there]
    for model, optimizer in pairs:
        hybrids.loss_of(model, 0).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            turned = parameter.grad.flip(0)
            if how == "in_place":
                parameter.grad.copy_(turned)
            else:
                parameter.grad = turned
        optimizer.step()
    assert hybrids.differences(here, there) == []


def test_gradients_are_sent_during_the_backward_and_only_once() -> None:
    model, optimizer = ours(device_share=0.0)
    hybrids.train(model, optimizer, range(2))
    hybrids.loss_of(model, 2).backward()
    gradients = optimizer._started()[1]
    large = [place for _, place in optimizer._places.values() if place.small is None]
    assert len(gradients._sent) == len(large) > 3
    optimizer.step()
    assert gradients.sent_again == 0
    assert not gradients._sent


def test_gradients_in_place_zeroed_and_parameters_without_any() -> None:
    here, there = ours(), theirs()
    for model, optimizer in (here, there):
        hybrids.train(model, optimizer, range(1))
        hybrids.loss_of(model, 7).backward()  # of a batch that is thrown away
        optimizer.zero_grad(set_to_none=False)
        frozen = list(model.parameters())[2]
        frozen.requires_grad_(False)
        frozen.grad = None
        hybrids.train(model, optimizer, range(1, 3))
        frozen.requires_grad_(True)
        hybrids.train(model, optimizer, range(3, 5))
    assert hybrids.differences(here, there) == []


@pytest.mark.parametrize("unscales", [False, True])
def test_a_gradient_scaler_scales_and_skips_as_with_torch(unscales: bool) -> None:
    here, there = ours(), theirs()
    scalers = []
    for model, optimizer in (here, there):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        scalers.append(scaler)
        for step in range(6):
            loss = hybrids.loss_of(model, step)
            if step == 3:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scalers[0].state_dict() == scalers[1].state_dict()
    assert hybrids.differences(here, there) == []


# ── the rest of an optimizer ─────────────────────────────────────────────────────────────────


def test_step_hooks_closures_and_schedulers_work() -> None:
    here, there = ours(), theirs()
    heard = []
    here[1].register_step_pre_hook(lambda *_: heard.append("before"))
    here[1].register_step_post_hook(lambda *_: heard.append("after"))
    pairs: list[tuple[nn.Module, Any]] = [here, there]
    for model, optimizer in pairs:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=10)
        for step in range(5):

            def closure(
                model: nn.Module = model, optimizer: Any = optimizer, step: int = step
            ) -> torch.Tensor:
                optimizer.zero_grad()
                loss = hybrids.loss_of(model, step)
                loss.backward()
                return loss

            assert optimizer.step(closure).requires_grad
            scheduler.step()
    assert heard == ["before", "after"] * 5
    assert hybrids.differences(here, there) == []


def test_parameters_added_later_are_trained_from_then_on() -> None:
    results = []
    for make in (
        lambda p: HybridAdamW(p, 1e-2, **SMALL),
        lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    ):
        model = hybrids.tiny()
        parameters = list(model.parameters())
        optimizer = make(parameters[:4])
        hybrids.train(model, optimizer, range(2))
        hybrids.loss_of(model, 2).backward()
        optimizer.add_param_group({"params": parameters[4:], "lr": 5e-3, "weight_decay": 0.0})
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        hybrids.train(model, optimizer, range(3, 5))
        results.append((model, optimizer))
    assert hybrids.differences(*results) == []


def test_it_is_collected_and_its_hooks_do_nothing_then() -> None:
    model, optimizer = ours()
    hybrids.train(model, optimizer, range(1))
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    hybrids.loss_of(model, 1).backward()
    for parameter in model.parameters():
        assert not getattr(parameter, "_post_accumulate_grad_hooks", None)


FORKS = """
import os, signal, sys
import torch
torch.set_num_threads(1)
from holdfast.offload import HybridAdamW
parameter = torch.nn.Parameter(torch.ones(40))
optimizer = HybridAdamW([parameter], 0.1, threads=1)
parameter.sum().backward()
optimizer.step()
if os.fork() == 0:
    signal.alarm(30)
    before = parameter.detach().clone()
    optimizer.step()
    os._exit(int(torch.equal(before, parameter)))
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_forked_process_steps_with_threads_of_its_own() -> None:
    assert subprocess.run([sys.executable, "-c", FORKS], timeout=60, check=False).returncode == 0


def test_it_cannot_be_copied() -> None:
    _, optimizer = ours()
    with pytest.raises(UsageError, match="cannot be pickled or copied"):
        copy.deepcopy(optimizer)
