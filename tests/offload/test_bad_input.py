"""What cannot be updated is refused by name, before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import UsageError
from holdfast.events import Event, subscribe
from holdfast.offload import HybridAdamW, HybridSGD, kernels
from holdfast.offload import placement as placing
from support.models import hybrids


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(7, 4, sparse=True)
    optimizer = HybridAdamW(model.named_parameters())
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(UsageError, match=r"weight has a gradient of the layout torch.sparse_coo"):
        optimizer.step()


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.zeros(3, dtype=torch.float64), "is of torch.float64, and masters are FP32"),
        (torch.zeros(3, dtype=torch.complex64), "is of torch.complex64"),
        (torch.zeros(3, device="meta"), "is on the meta device"),
        (torch.zeros(1).expand(4), "has gaps in its memory, or elements that share it"),
        (torch.zeros(4, 6)[:, ::2], "has gaps in its memory"),
    ],
)
def test_parameters_it_cannot_hold_are_refused_and_the_group_is_not_added(
    tensor: torch.Tensor, said: str
) -> None:
    optimizer = HybridAdamW([nn.Parameter(torch.ones(5))])
    with pytest.raises(UsageError, match=said):
        optimizer.add_param_group({"params": [nn.Parameter(tensor)]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(UsageError, match=said):
        HybridAdamW([nn.Parameter(torch.ones(5)), nn.Parameter(tensor)])


def test_a_module_converted_afterwards_is_refused() -> None:
    model = hybrids.tiny()
    optimizer = HybridAdamW(model.parameters())
    model.bfloat16()
    hybrids.loss_of(model, 0).backward()
    with pytest.raises(UsageError, match=r"is torch.bfloat16 on cpu now, and was torch.float32"):
        optimizer.step()


def test_a_parameter_of_another_shape_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = HybridAdamW([parameter])
    parameter.data = torch.ones(6)
    parameter.grad = torch.ones(6)
    with pytest.raises(UsageError, match=r"has the shape \[6\] here now, and had \[4\]"):
        optimizer.step()


def test_a_parameter_whose_elements_lie_in_another_order_is_refused() -> None:
    model = nn.Conv2d(3, 8, 3)
    optimizer = HybridAdamW(model.named_parameters())
    model(torch.ones(1, 3, 4, 4)).sum().backward()
    optimizer.step()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before = model.weight.detach().clone()
    model(torch.ones(1, 3, 4, 4)).sum().backward()
    with pytest.raises(UsageError, match=r"weight lies in memory with the strides \[27, 1, 9, 3\]"):
        optimizer.step()
    assert torch.equal(model.weight, before)


def test_unknown_options_and_impossible_ones_are_refused() -> None:
    parameters = [nn.Parameter(torch.ones(4))]
    unknown: dict[str, Any] = {"fused": True}
    with pytest.raises(TypeError, match="HybridAdamW has no option 'fused'"):
        HybridAdamW(parameters, **unknown)
    with pytest.raises(UsageError, match="subgroup_elements=0"):
        HybridAdamW(parameters, subgroup_elements=0)
    with pytest.raises(UsageError, match=r"device_share=1\.5"):
        HybridAdamW(parameters, device_share=1.5)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        HybridAdamW(parameters, lr=-1.0)
    with pytest.raises(ValueError, match="Nesterov"):
        HybridSGD(parameters, nesterov=True)


def test_without_room_on_the_device_all_is_updated_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    said: list[Event] = []
    end = subscribe(lambda event, _: said.append(event))
    monkeypatch.setattr(placing, "DeviceSlot", full)
    ours, theirs = hybrids.tiny(), hybrids.tiny()
    one = HybridAdamW(ours.parameters(), subgroup_elements=700, device_share=0.5)
    other = torch.optim.AdamW(theirs.parameters(), fused=True)
    hybrids.train(ours, one, range(3))
    hybrids.train(theirs, other, range(3))
    one.add_param_group({"params": [nn.Parameter(torch.ones(900))]})
    hybrids.train(ours, one, range(3, 4))
    hybrids.train(theirs, other, range(3, 4))
    end()
    assert hybrids.differences((ours, one), (theirs, other)) == []
    assert [getattr(event, "message", "")[:7] for event in said] == ["no room"]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_an_update_that_broke_off_is_never_gone_on_from(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hybrids.tiny()
    optimizer = HybridAdamW(
        model.parameters(), subgroup_elements=700, device_share=share, lane_delay_s=0.005
    )
    hybrids.train(model, optimizer, range(1))
    calls = []

    def failing(*_: object, **__: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the third call")

    monkeypatch.setattr(kernels, "_fused_adamw", failing)
    hybrids.loss_of(model, 1).backward()
    with pytest.raises(RuntimeError, match="the third call"):
        optimizer.step()
    ended = len(calls)  # nothing is updated any more when it is raised
    lanes = optimizer._started()[0]
    for lane in (lanes.host, lanes.compute):
        lane.run(lambda: None).wait()
    assert len(calls) == ended
    monkeypatch.undo()
    with pytest.raises(UsageError, match=r"broke off .RuntimeError: the third call"):
        optimizer.step()


def test_memory_that_cannot_be_pinned_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.accelerator import vendors
    from holdfast.offload import host_state as rows

    cleared: list[torch.device] = []

    class Refusing(vendors.Vendor):
        def register(self, address: int, size_bytes: int) -> int:
            return 2

        def clear_error(self, device: torch.device) -> None:
            cleared.append(device)

    said: list[Event] = []
    end = subscribe(lambda event, _: said.append(event))
    monkeypatch.setitem(vendors._vendors, "cpu", Refusing())
    rows.FlatBufferRow([rows.ParamSlot(torch.ones(40), "w")], 0, is_pinned=True)
    end()
    assert "could not be pinned for cpu (error 2 of its driver)" in getattr(said[0], "message", "")
    assert cleared, "the next who launches gets an error that is none of theirs"


def test_a_device_without_the_fused_kernel_is_refused_by_name_unless_all_is_updated_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise NotImplementedError(
            "Could not run 'aten::_fused_adamw_' with arguments of 'xla'\n..."
        )

    monkeypatch.setattr(kernels, "_fused_adamw", missing)
    monkeypatch.setattr(
        placing.SubgroupPlacement, "uses_device", lambda self, _: self._may_use_device
    )
    parameters = [nn.Parameter(torch.ones(4))]
    with pytest.raises(UsageError, match=r"no fused kernel of AdamW for cpu .*aten::_fused_adamw_"):
        HybridAdamW(parameters)
    HybridAdamW(parameters, device_share=0.0)
    HybridAdamW(parameters, device_slots=0)


def test_an_update_needs_no_work_where_nothing_has_a_gradient() -> None:
    model = hybrids.tiny()
    optimizer = HybridAdamW(model.parameters())
    optimizer.step()
    assert not optimizer.state
