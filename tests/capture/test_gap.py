"""An image with frozen leaves, captured into memory that held something else before."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from holdfast.capture.copy_plan import SlotTarget, plan_copies
from holdfast.capture.copy_slot import copy_image
from holdfast.capture.overtaking import OvertakeDetector
from holdfast.capture.progress import CopyProgress
from holdfast.capture.volatile_copies import stage
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.format.image import fill_in
from holdfast.geometry.layout import merge, table_from_json
from holdfast.state.bindings import Bindings
from holdfast.state.describe import Describer
from support.checkpoints.images import halves, seals


def test_nothing_of_what_the_memory_held_before_is_left_in_the_gap() -> None:
    model = nn.Module()
    model.base = nn.Parameter(torch.ones(BLOCK_BYTES // 4 + 5), requires_grad=False)
    model.adapter = nn.Parameter(torch.ones(7))
    state: dict[str, Any] = {"model": model}
    described = Describer(state, 0, mark_frozen=True).describe()
    layout = merge([table_from_json(described.table)])
    plan = plan_copies(layout, 0, described.bindings)
    image = fill_in(plan.image, {"rank": "0"}, len(described.values))
    assert image.gap == (BLOCK_BYTES + 20, 2 * BLOCK_BYTES)
    memory = bytearray(b"\xff" * image.size_bytes)
    stage(described.bindings)
    progress = CopyProgress(check=lambda: None, copied=lambda _: None, enqueued=lambda _: None)
    seal = copy_image(
        SlotTarget(memoryview(memory), plan),
        image,
        described.values,
        OvertakeDetector(Bindings()),
        progress,
        0,
        {},
    )
    start, stop = (image.data_start + at for at in image.gap)
    assert not any(memory[start:stop])
    assert (seal.header_xxh3, seal.table_xxh3) == seals(memory)
    live, part = halves(memory)
    assert part is not None and b"\xff" not in part[8192:-4096] and b"\xff" not in live[4096:-4096]
