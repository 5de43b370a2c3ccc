"""Ranks that hold the same parameters, in one process: what each of them samples of them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from holdfast.accelerator.devices import computation_so_far
from holdfast.capture.copy_plan import SlotTarget, plan_copies
from holdfast.capture.copy_slot import copy_image
from holdfast.capture.overtaking import OvertakeDetector
from holdfast.capture.progress import CopyProgress
from holdfast.capture.replica_samples import ReplicaSample, ReplicaSampler
from holdfast.capture.volatile_copies import stage
from holdfast.format.image import fill_in
from holdfast.geometry.layout import Layout, merge, table_from_json
from holdfast.state.describe import Describer, Description

WORLD = 2


class Replica:
    """One of two ranks that hold the same parameters, as its capture sees it."""

    def __init__(self, rank: int, parameters: dict[str, torch.Tensor]) -> None:
        module = torch.nn.Module()
        for name, tensor in parameters.items():
            module.register_parameter(name, torch.nn.Parameter(tensor))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        self.rank = rank
        self.described: Description = Describer(
            {"model": module, "optimizer": optimizer}, rank, WORLD
        ).describe()
        table = table_from_json(self.described.table)
        self.layout: Layout = merge([table] * WORLD)

    def sample(self, turn: int = 0, turns: int = 1) -> ReplicaSample:
        stage(self.described.bindings.volatile)
        return ReplicaSampler(self.layout, self.rank, self.described.bindings).sample(turn, turns)

    def capture(self, sample: ReplicaSample, check: Callable[[], None] = lambda: None) -> None:
        plan = plan_copies(self.layout, self.rank, self.described.bindings)
        image = fill_in(plan.image, {}, len(self.described.values))
        memory = memoryview(bytearray(image.size_bytes))
        progress = CopyProgress(check=check, copied=lambda _: None, enqueued=lambda _: None)
        copy_image(
            SlotTarget(memory, plan),
            image,
            self.described.values,
            OvertakeDetector(self.described.bindings),
            progress,
            0,
            computation_so_far(self.described.bindings.gpus),
            sample,
        )


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
