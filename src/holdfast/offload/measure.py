"""How fast this machine copies and updates, by trying: some tenths of a second, once."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import replace

import torch

from holdfast.offload.kernels import Group, Kernel, Tensors
from holdfast.offload.lanes import Lane, Lanes, Work
from holdfast.offload.rates import Rates
from holdfast.offload.rows import BATCH_ELEMENTS, MASTER

#: Of one copy, and of one update.
_ELEMENTS = 1 << 24
_TRIES = 3
#: The host's update takes so much longer beside copies before their memory is called shared.
_SLOWER = 1.05


def measure(
    lanes: Lanes, kernel: Kernel, group: Group, dtype: torch.dtype, elements: int = _ELEMENTS
) -> Rates:
    """The rates of these lanes, for parameters of ``dtype``; of several tries the best counts."""
    up, down = _copies(lanes.device, elements)
    on_host = _update(kernel, group, elements, torch.device("cpu"), BATCH_ELEMENTS, dtype)
    there = _update(kernel, group, elements, lanes.device, elements, torch.float32)
    lanes.now().wait()  # what was made is there
    h2d_s = _best_s([(lanes.prefetch, up)])
    d2h_s = _best_s([(lanes.flush, down)])
    both_s = _best_s([(lanes.prefetch, up), (lanes.flush, down)])
    state_bytes, size_bytes = 4 * (1 + len(kernel.kinds(group))), 4 * elements
    host_s = _best_s([(lanes.host, on_host)])
    rates = Rates(
        h2d_bytes_s=size_bytes / h2d_s,
        d2h_bytes_s=size_bytes / d2h_s,
        host_update_elements_s=elements / host_s,
        device_update_elements_s=elements / _best_s([(lanes.compute, there)]),
        both_ways=min(1.0, max(0.1, max(h2d_s, d2h_s) / both_s)),
        state_in_bytes=state_bytes,
        state_out_bytes=state_bytes,
        gradient_bytes=dtype.itemsize,
        parameter_bytes=dtype.itemsize,
    )
    times = math.ceil(host_s / both_s)  # copies that go on as long as the update
    copies = [(lanes.prefetch, up), (lanes.flush, down)] * times
    beside_s = _best_s([(lanes.host, on_host), *copies])
    if beside_s < _SLOWER * max(host_s, times * both_s):
        return rates
    traffic_bytes = elements * rates.update_traffic_bytes + 2 * times * size_bytes
    return replace(rates, host_memory_bytes_s=traffic_bytes / beside_s)


def _copies(device: torch.device, elements: int) -> tuple[Work, Work]:
    """To the device and from there."""
    here, back = (_host_memory(elements, is_pinned=device.type == "cuda") for _ in range(2))
    there, source = (torch.zeros(elements, device=device) for _ in range(2))

    def up() -> None:
        there.copy_(here, non_blocking=True)

    def down() -> None:
        back.copy_(source, non_blocking=True)

    return up, down


def _host_memory(elements: int, *, is_pinned: bool) -> torch.Tensor:
    if is_pinned:
        with suppress(RuntimeError):  # no more of it: the state itself is as slow then
            return torch.zeros(elements, device="cpu", pin_memory=True)
    return torch.zeros(elements, device="cpu")


def _update(
    kernel: Kernel, group: Group, elements: int, device: torch.device, batch: int,
    dtype: torch.dtype,
) -> Work:  # fmt: skip
    """Update made-up state, with the casts that gradients and parameters of ``dtype`` ask for."""
    memory = {kind: torch.zeros(elements, device=device) for kind in (MASTER, *kernel.kinds(group))}
    transfer = torch.zeros(elements, device=device, dtype=dtype)
    room = torch.zeros(min(batch, elements), device=device)
    step = torch.ones((), device=device)

    def update() -> None:
        for start in range(0, elements, batch):
            parts = {kind: [all_[start : start + batch]] for kind, all_ in memory.items()}
            masters, gradient = parts.pop(MASTER), transfer[start : start + batch]
            if dtype != torch.float32:
                gradient = room[: gradient.numel()].copy_(gradient)
            kernel.update(group, Tensors(masters, [gradient], parts, [step]), is_first=False)
            if dtype != torch.float32:
                transfer[start : start + batch].copy_(masters[0])

    return update


def _best_s(work: list[tuple[Lane, Work]]) -> float:
    """The shortest of several tries of doing all of this at once."""
    best_s = math.inf
    for _ in range(_TRIES + 1):  # the first finds nothing in place
        began_s = time.perf_counter()
        marks = [lane.run(one) for lane, one in work]
        for mark in marks:
            mark.wait()
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s
