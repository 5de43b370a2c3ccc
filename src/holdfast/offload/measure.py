"""How fast this machine copies and updates, by trying: some tenths of a second, once."""

from __future__ import annotations

import time

import torch

from holdfast.offload.kernels import Group, Kernel, Tensors
from holdfast.offload.lanes import Lane, Lanes, Mark, Work
from holdfast.offload.rates import Rates
from holdfast.offload.rows import BATCH_ELEMENTS, MASTER

#: Of one copy, and elements of one update.
_ELEMENTS = 1 << 24
_TRIES = 3


def measure(
    lanes: Lanes, kernel: Kernel, group: Group, dtype: torch.dtype, elements: int = _ELEMENTS
) -> Rates:
    """The rates of these lanes, for parameters of ``dtype``; of several tries the best counts."""
    device = lanes.device
    host = torch.zeros(elements, pin_memory=device.type == "cuda")
    there = torch.zeros(elements, device=device)
    back = torch.zeros(elements, pin_memory=device.type == "cuda")
    other = torch.zeros(elements, device=device)

    def down() -> None:
        back.copy_(other, non_blocking=True)

    def up() -> None:
        there.copy_(host, non_blocking=True)

    started = lanes.now()
    h2d_s = _best_s([(lanes.prefetch, up)], started)
    d2h_s = _best_s([(lanes.flush, down)], started)
    both_s = _best_s([(lanes.prefetch, up), (lanes.flush, down)], started)
    state_bytes = 4 * (1 + len(kernel.kinds(group)))
    return Rates(
        h2d_bytes_s=host.nbytes / h2d_s,
        d2h_bytes_s=host.nbytes / d2h_s,
        host_update_elements_s=_host_rate(lanes, kernel, group, dtype, elements),
        device_update_elements_s=_rate(lanes.compute, kernel, group, elements, device, elements),
        both_ways=min(1.0, max(0.1, max(h2d_s, d2h_s) / both_s)),
        state_in_bytes=state_bytes,
        state_out_bytes=state_bytes,
        gradient_bytes=dtype.itemsize,
        parameter_bytes=dtype.itemsize,
    )


def _host_rate(
    lanes: Lanes, kernel: Kernel, group: Group, dtype: torch.dtype, elements: int
) -> float:
    return _rate(lanes.host, kernel, group, elements, torch.device("cpu"), BATCH_ELEMENTS, dtype)


def _rate(
    lane: Lane, kernel: Kernel, group: Group, elements: int, device: torch.device, batch: int,
    dtype: torch.dtype = torch.float32,
) -> float:  # fmt: skip
    """Elements a second of updates on made-up state, with the casts that ``dtype`` asks for."""
    memory = {kind: torch.zeros(elements, device=device) for kind in (MASTER, *kernel.kinds(group))}
    narrow = torch.zeros(elements, device=device, dtype=dtype)
    room = torch.zeros(min(batch, elements), device=device)
    step = torch.ones((), device=device)

    def update() -> None:
        for start in range(0, elements, batch):
            parts = {kind: [all_[start : start + batch]] for kind, all_ in memory.items()}
            masters, gradient = parts.pop(MASTER), narrow[start : start + batch]
            if dtype != torch.float32:
                gradient = room[: gradient.numel()].copy_(gradient)
            kernel.update(group, Tensors(masters, [gradient], parts, [step]), is_first=False)
            if dtype != torch.float32:
                narrow[start : start + batch].copy_(masters[0])

    return elements / _best_s([(lane, update)])


def _best_s(work: list[tuple[Lane, Work]], after: Mark | None = None) -> float:
    """The shortest of several tries of doing all of this at once."""
    best_s = float("inf")
    for _ in range(_TRIES + 1):  # the first finds nothing in place
        began_s = time.perf_counter()
        marks = [lane.run(one, after=[after] if after else []) for lane, one in work]
        for mark in marks:
            mark.wait()
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s
