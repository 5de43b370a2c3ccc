"""The hybrid optimizer with the model on a device: streams and events instead of threads."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.accelerator import devices
from holdfast.capture.device_copies import side_stream
from holdfast.events import Event, subscribe
from holdfast.offload import HybridAdamW, streams
from holdfast.offload.bit_sums import sums
from holdfast.offload.host_state import MASTER
from support.models import hybrids
from support.runs.accelerators import join_alone, limited_memory

pytestmark = pytest.mark.gpu

#: A gradient that is sent to the host early may be added to, unscaled or zeroed meanwhile: that is
#: found by its version or its checksum, and it is sent again.
sent_early = pytest.mark.unordered(r"aten::(add|_amp_\w+) writes on .* what copy down reads")
#: Of a layer, and of a subgroup of the optimizer; the simulated device computes on the host.
SIZE = {"cuda": 512, "sim": 64}
SUBGROUP = {"cuda": 100_000, "sim": 1_700}
LAYERS = {"cuda": 6, "sim": 3}


def build(device: str, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(SIZE[device], SIZE[device]) for _ in range(LAYERS[device])]
    return nn.Sequential(*layers, nn.LayerNorm(SIZE[device])).to(device, dtype)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    parameter = next(model.parameters())
    device = parameter.device.type
    generator = torch.Generator(device).manual_seed(step)
    x = torch.randn(64, SIZE[device], device=device, generator=generator)
    x = x.to(parameter.dtype)
    loss: torch.Tensor = (model(x) - x.roll(1, -1)).float().square().mean()
    return loss


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    clip: float = 0.0,
    micro: int = 1,
) -> list[float]:
    losses = []
    for step in steps:
        for part in range(micro):
            loss = loss_of(model, step * micro + part)
            loss.backward()
        if clip and isinstance(optimizer, HybridAdamW):
            optimizer.clip_grad_norm_(clip)
        elif clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def hybrid(model: nn.Module, share: float | None, **options: Any) -> HybridAdamW:
    elements = SUBGROUP[next(model.parameters()).device.type]
    return HybridAdamW(
        model.parameters(), 1e-3, device_share=share, subgroup_elements=elements, **options
    )


@pytest.fixture
def short_rates(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of a simulated device mean nothing: they are measured with a few elements."""
    if device == "sim":
        monkeypatch.setattr(streams.measure, "__defaults__", (1 << 16,))


@pytest.mark.promise
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_streams_that_dawdle_change_nothing(dtype: torch.dtype, share: float, device: str) -> None:
    pairs, losses = [], []
    for delay_s in (0.0, 0.003):
        model = build(device, dtype)
        optimizer = hybrid(model, share, lane_delay_s=delay_s)
        losses.append(train(model, optimizer, range(5)))
        pairs.append((model, optimizer))
    assert losses[0] == losses[1]
    assert hybrids.differences(*pairs) == []


@pytest.mark.usefixtures("short_rates")
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0, None])
def test_it_learns_as_torchs_adamw_does(share: float | None, device: str) -> None:
    ours, theirs = build(device, torch.float32), build(device, torch.float32)
    one = hybrid(ours, share)
    other = torch.optim.AdamW(theirs.parameters(), 1e-3, fused=True)
    assert train(ours, one, range(12)) == pytest.approx(train(theirs, other, range(12)), rel=1e-4)
    if share == 1.0:
        assert hybrids.differences((ours, one), (theirs, other)) == []


@pytest.mark.promise
@sent_early
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_streams_that_dawdle_change_no_clipped_sum_of_gradients(
    dtype: torch.dtype, share: float, device: str
) -> None:
    pairs = []
    for delay_s in (0.0, 0.003):
        model = build(device, dtype)
        pairs.append((model, hybrid(model, share, lane_delay_s=delay_s)))
        train(model, pairs[-1][1], range(4), clip=0.1, micro=3)
    assert hybrids.differences(*pairs) == []


@sent_early
@pytest.mark.usefixtures("short_rates")
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0, None])
def test_it_clips_and_accumulates_as_torch_does(share: float | None, device: str) -> None:
    ours, theirs = build(device, torch.float32), build(device, torch.float32)
    one = hybrid(ours, share)
    other = torch.optim.AdamW(theirs.parameters(), 1e-3, fused=True)
    there = train(theirs, other, range(6), clip=0.1, micro=2)
    assert train(ours, one, range(6), clip=0.1, micro=2) == pytest.approx(there, rel=1e-4)
    if share == 1.0:
        assert hybrids.differences((ours, one), (theirs, other)) == []


@sent_early
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_gradient_scaler_scales_and_skips_and_leaves_gradients_as_they_are(
    share: float, device: str
) -> None:
    pairs: list[tuple[nn.Module, torch.optim.Optimizer]] = []
    losses: list[list[float]] = []
    for is_ours in (True, False):
        model = build(device, torch.float32)
        theirs = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
        optimizer = hybrid(model, share) if is_ours else theirs
        scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2)
        losses.append([])
        for step in range(8):
            loss = loss_of(model, step)
            scaler.scale(loss * (float("inf") if step == 3 else 1.0)).backward()
            given = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            scaler.step(optimizer)
            if is_ours:
                now = [p.grad for p in model.parameters() if p.grad is not None]
                assert all(hybrids.same(*pair) for pair in zip(given, now, strict=True))
            scaler.update()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
        pairs.append((model, optimizer))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    if share == 1.0:
        assert hybrids.differences(*pairs) == []


@pytest.fixture
def alone(device: str) -> Iterator[DeviceMesh]:
    """A process group of this process, and a mesh of its device."""
    join_alone(device)
    yield init_device_mesh(device, (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_gradients_of_fsdp2_are_waited_for(share: float, alone: DeviceMesh, device: str) -> None:
    pairs, losses, steps = [], [], range(5 if device == "sim" else 8)
    for delay_s in (0.0, 0.003):
        model = build(device, torch.float32)
        for layer in model.children():
            fully_shard(layer, mesh=alone)
        fully_shard(model, mesh=alone)
        pairs.append((model, hybrid(model, share, lane_delay_s=delay_s)))
        losses.append(train(model, pairs[-1][1], steps, clip=0.1))
    assert losses[0] == losses[1]
    assert hybrids.differences(*pairs) == []
    plain = build(device, torch.float32)
    assert losses[0] == pytest.approx(train(plain, hybrid(plain, share), steps, 0.1), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("room_bytes", [0, 1 << 20, 4 << 20, 16 << 20])
def test_a_device_that_is_full_at_a_step_breaks_none_off(
    room_bytes: int, dtype: torch.dtype, device: str
) -> None:
    model = build(device, dtype)
    optimizer = hybrid(model, 1.0)
    train(model, optimizer, range(2), clip=0.1)
    for step in range(2, 5):
        loss_of(model, step).backward()
        optimizer.clip_grad_norm_(0.1)
        try:
            with limited_memory(device, room_bytes):
                optimizer.step()
        except torch.OutOfMemoryError:
            assert not optimizer.broken_off
            optimizer.step()
        optimizer.zero_grad()
        assert not optimizer.broken_off
    assert {optimizer.state[p]["step"].item() for p in model.parameters()} == {5.0}


@pytest.mark.untimed
def test_a_checksum_takes_little_memory_for_a_moment(device: str) -> None:
    elements = 1 << (28 if device == "cuda" else 26)
    tensor = torch.empty(elements, dtype=torch.bfloat16, device=device)
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    sums(tensor)
    assert torch.accelerator.max_memory_allocated() - before < 64 << 20


@pytest.mark.untimed
def test_rows_that_share_a_page_are_both_pinned(device: str) -> None:
    said: list[Event] = []
    end = subscribe(lambda event, _: said.append(event))
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    parameters = [nn.Parameter(torch.ones(3, dtype=one, device=device)) for one in dtypes]
    optimizer = HybridAdamW([{"params": [one]} for one in parameters])
    end()
    assert said == []
    rows = [row for row, _ in optimizer._places.values()]
    assert all(row.transfer.is_pinned() and row.memory(MASTER).is_pinned() for row in rows)


def test_a_forked_worker_has_no_copy_of_the_state(device: str) -> None:
    if device == "sim":
        pytest.skip("what a driver does to pinned pages at a fork is not simulated")
    parameter = nn.Parameter(torch.zeros(16 << 20, device=device))
    optimizer = HybridAdamW([parameter])  # 256 MiB on the host
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, Path("/proc/self/smaps_rollup").read_bytes())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        lines = said.read().splitlines()
    os.waitpid(child, 0)
    private_kib = sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    assert optimizer.state is not None and private_kib < 128 << 10


@pytest.mark.promise
def test_a_gradient_that_is_dropped_while_it_is_sent_is_held_until_it_has_arrived(
    device: str,
) -> None:
    model = build(device, torch.float32)
    optimizer = hybrid(model, 0.0)
    train(model, optimizer, range(2))
    for step in range(2, 5):
        loss_of(model, step).backward()
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    plain = build(device, torch.float32)
    other = hybrid(plain, 0.0)
    train(plain, other, range(5))
    assert hybrids.differences((model, optimizer), (plain, other)) == []


@pytest.mark.promise
def test_new_parameters_arrive_behind_the_capture_of_the_old_ones(
    tmp_path: Path, device: str
) -> None:
    model = build(device, torch.float32)
    optimizer = hybrid(model, 0.0)
    there = torch.device(device, 0)
    state = {"model": model, "optimizer": optimizer}
    with holdfast.Checkpointer(tmp_path, state, storage=None) as ckpt:
        train(model, optimizer, range(2))
        ckpt.save(0).wait_captured(60)
        for step in range(1, 3):
            expected = content(model, optimizer)
            with devices.use_stream(side_stream(there)):
                devices.delay(there, 0.4)
            handle = ckpt.save(step, durable=True)
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            handle.wait_durable(60)
            again = build(device, torch.float32, seed=1)
            other = hybrid(again, 0.0)
            holdfast.load(tmp_path, {"model": again, "optimizer": other}, step)
            found = content(again, other)
            assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.promise
def test_memory_of_a_dropped_optimizer_is_freed_behind_its_copies(device: str) -> None:
    for _ in range(4):
        model = build(device, torch.bfloat16)
        optimizer = hybrid(model, 0.0)
        loss_of(model, 0).backward()
        optimizer.step()
        del optimizer
        gc.collect()


def test_its_state_is_pinned_on_the_host_and_what_is_there_after_a_step_is_final(
    device: str,
) -> None:
    model = build(device, torch.bfloat16)
    optimizer = hybrid(model, 0.5)
    train(model, optimizer, range(2))
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert all(tensor.device.type == "cpu" for tensor in state.values())
        assert state["master"].is_pinned()
        assert torch.equal(state["master"].bfloat16(), parameter.detach().cpu())


@pytest.mark.promise
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_snapshots_behind_training_are_of_the_step_they_name(
    tmp_path: Path, dtype: torch.dtype, device: str
) -> None:
    model = build(device, dtype)
    optimizer = hybrid(model, 0.5)
    truth = {}
    with holdfast.Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}) as ckpt:
        for step in range(5):
            train(model, optimizer, range(step, step + 1))
            truth[step] = content(model, optimizer)
            ckpt.save(step, durable=True)
    for step, expected in truth.items():
        again = build(device, dtype, seed=1)
        other = hybrid(again, 0.5)
        holdfast.load(tmp_path, {"model": again, "optimizer": other}, step)
        found = content(again, other)
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def content(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for kind, tensor in optimizer.state[parameter].items():
            found[f"{name}.{kind}"] = tensor.cpu().clone()
    return found


@pytest.mark.untimed
def test_a_module_moved_afterwards_is_refused(device: str) -> None:
    if device == "sim":
        pytest.skip("torch gives a module that is moved there other parameters")
    model = nn.Linear(4, 4)
    optimizer = HybridAdamW(model.parameters())
    model.to(device)
    model(torch.ones(1, 4, device=device)).sum().backward()
    with pytest.raises(
        holdfast.UsageError, match=rf"on {device}:0 now, and was torch.float32 on cpu"
    ):
        optimizer.step()


@pytest.mark.untimed
def test_parameters_on_two_devices_are_refused(device: str) -> None:
    parameters = [nn.Parameter(torch.ones(3, device=one)) for one in ("cpu", device)]
    with pytest.raises(holdfast.UsageError, match="one optimizer is for one device"):
        HybridAdamW(parameters)
