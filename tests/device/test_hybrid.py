"""Every wait, mark and lifetime of an optimizer whose parameters are on a device.

Work of the simulated device is late, and accesses that nothing orders are reported however they
went. `tests/mutants.toml` leaves out one after the other.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.accelerator import devices, pinnable_pages
from holdfast.offload import HybridAdamW, bit_sums
from support.models import hybrids

DTYPES = [torch.float32, torch.bfloat16]
SHARES = [0.0, 0.5, 1.0]


def made(device: str, dtype: torch.dtype, share: float, **options: Any) -> Any:
    model = hybrids.wide(dtype).to(device)
    given = {"device_share": share, "subgroup_elements": 700, "threads": 1, **options}
    return model, HybridAdamW(model.parameters(), 1e-3, **given)


def backward(model: nn.Module, step: int) -> torch.Tensor:
    parameter = next(model.parameters())
    chance = torch.Generator().manual_seed(step)
    x = torch.randn(4, 33, generator=chance).to(parameter.dtype).to(parameter.device)
    loss: torch.Tensor = (model(x) - x.roll(1, -1)).float().square().mean()
    loss.backward()
    return loss


def content(model: nn.Module, optimizer: HybridAdamW) -> dict[str, torch.Tensor]:
    """Parameters and state of this moment; what is on the host is read without any wait."""
    found = {}
    for name, parameter in model.named_parameters():
        for kind, tensor in optimizer.state[parameter].items():
            found[f"{name}.{kind}"] = tensor.clone()
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach().cpu()
    return found


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in one if not hybrids.same(one[name], other[name])]


@pytest.mark.promise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", SHARES)
def test_state_is_final_when_step_returns_and_no_access_is_unordered(
    dtype: torch.dtype, share: float, device: str
) -> None:
    one = made(device, dtype, share, device_slots=1)
    other = made("cpu", dtype, share, device_slots=1)
    for step in range(3):
        for model, _ in (one, other):
            backward(model, step)
        one[1].step()
        there = content(*one)
        torch.accelerator.synchronize()
        assert differences(there, content(*one)) == []
        other[1].step()
        if device == "sim":  # it computes by the CPU's kernels
            assert differences(there, content(*other)) == []
        one[1].zero_grad()
        other[1].zero_grad()


@pytest.mark.promise
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_that_is_dropped_while_it_is_sent_leaves_its_memory_alone(
    dtype: torch.dtype, device: str
) -> None:
    model, optimizer = made(device, dtype, 0.0, early_gradients=True)
    for step in range(4):
        backward(model, step)
        optimizer.zero_grad()
        reused = [torch.zeros_like(parameter) for parameter in model.parameters()]
        del reused
    torch.accelerator.synchronize()


@pytest.mark.promise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_sending", [False, True])
def test_an_optimizer_that_is_dropped_frees_nothing_that_is_copied(
    is_sending: bool, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "sim":  # so that a copy that is under way is reported, and ends no test
        monkeypatch.setattr(pinnable_pages.libc, "munmap", lambda *_: 0)
    for _ in range(4):
        model, optimizer = made(device, dtype, 0.0)
        for step in range(2):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        if is_sending:
            backward(model, 2)
        del optimizer
        gc.collect()
    torch.accelerator.synchronize()


@pytest.mark.promise
@pytest.mark.unordered(r"aten::mul writes on .* what copy down reads")
def test_a_gradient_that_changed_and_changed_back_while_it_was_sent_is_sent_again(
    device: str,
) -> None:
    """Its bits are the same, and what arrived are those in between: the copies are held until they
    are there.
    """
    found, there = [], torch.device(device, 0)
    for times in (1.0, 2.0):
        model, optimizer = made(device, torch.float32, 0.0, early_gradients=True)
        for step in range(4):
            is_held = step == 2
            if is_held:
                sending: Any = optimizer._streams.gradients
                with devices.use_stream(sending._stream):
                    devices.delay(there, 0.1)
            backward(model, step)
            gradients = [parameter.grad for parameter in model.parameters()]
            for gradient in gradients:
                assert gradient is not None
                gradient.mul_(times)
            if is_held:
                devices.delay(there, 0.3)
            for gradient in gradients:
                assert gradient is not None
                gradient.mul_(1 / times)
            optimizer.step()
            optimizer.zero_grad()
        found.append(content(model, optimizer))
    assert differences(*found) == []


@pytest.mark.promise
@pytest.mark.parametrize("share", SHARES)
def test_a_gradient_that_was_written_to_after_it_was_sent_is_sent_again(
    share: float, device: str
) -> None:
    """By a write that moves no version."""
    found = []
    for is_late in (False, True):
        model, optimizer = made(device, torch.float32, share, early_gradients=is_late)
        backward(model, 0)
        torch.accelerator.synchronize()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.data.mul_(3)
        optimizer.step()
        found.append(content(model, optimizer))
    assert differences(*found) == []


@pytest.mark.promise
def test_a_parameter_that_another_wrote_to_leads_its_master(device: str) -> None:
    """By a write that moves no version."""
    model, optimizer = made(device, torch.float32, 0.5)
    for step in range(2):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.data.fill_(0.25)
    other, plain = made(device, torch.float32, 0.5)
    plain.load_state_dict(optimizer.state_dict())
    other.load_state_dict(model.state_dict())
    for each in (model, other):
        backward(each, 5)
    optimizer.step()
    plain.step()
    assert differences(content(model, optimizer), content(other, plain)) == []


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("elements", [0, 1, 77, bit_sums.BLOCK + 5, 5 * bit_sums.BLOCK])
def test_checksums_of_a_device_are_those_of_the_host(
    elements: int, offset: int, device: str
) -> None:
    chance = torch.Generator().manual_seed(elements)
    bits = torch.randint(-(2**15), 2**15, (elements + 1,), generator=chance, dtype=torch.int16)
    here, there = (
        each.view(torch.bfloat16)[offset : offset + elements] for each in (bits, bits.to(device))
    )
    found = bit_sums.checksums([there, there[:3]])
    expected = [bit_sums.sums(here), bit_sums.sums(here[:3])]
    assert all(isinstance(one, torch.Tensor) and one.device.type == device for one in found)
    assert [int(one) for one in found] == [int(one) for one in expected]
