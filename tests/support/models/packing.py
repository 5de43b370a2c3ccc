"""A training whose data are packed: samples wait in a buffer of their rank until they are used.

Every rank leaves a line for each step it has done: what it was given, and what it used of its
buffer. From the lines of all lives it can be told what became of each sample.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import holdfast

SAMPLES = 203  # divides by nothing that there are ranks of
#: Packed together; as many stay behind.
PACKED = 3


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Packing:
    """One rank's share of a life."""

    def __init__(self, directory: str, life: str, rank: int, *, workers: int = 1) -> None:
        self.sampler = holdfast.ResumableSampler(Numbers(), batch_size=4, seed=11)
        self.loader = DataLoader(
            Numbers(),
            batch_sampler=self.sampler,
            generator=self.sampler.generator,
            num_workers=workers,
        )
        self.buffer = holdfast.SplitList()
        self.weight = torch.zeros(50)
        self.state: dict[str, Any] = {
            "data": self.sampler,
            "buffer": self.buffer,
            "rng": holdfast.Rng(),
            "step": -1,
            "weight": self.weight,
        }
        self.rank = rank
        self._log = Path(directory) / f"{life}-{rank}"

    def steps(self, count: int) -> Iterator[int]:
        """Train for so many steps; each is given when it is done and can be saved."""
        batches = iter(self.loader)
        for _ in range(count):
            batch = next(batches, None)
            if batch is None:  # the next epoch
                batches = iter(self.loader)
                batch = next(batches)
            self.buffer += [
                {"sample": int(i), "tokens": np.full(i % 5, i), "mask": torch.ones(int(i) % 3)}
                for i in batch
            ]
            used = self.buffer[:-PACKED]
            del self.buffer[:-PACKED]
            self.weight += 1
            self.sampler.advance()
            self.state["step"] += 1
            line = {"step": self.state["step"], "given": batch.tolist(), "used": _samples(used)}
            with self._log.open("a") as file:
                file.write(json.dumps(line) + "\n")
            yield self.state["step"]

    def waiting(self) -> list[int]:
        """The samples in the buffer."""
        return _samples(self.buffer)


def _samples(items: list[Any]) -> list[int]:
    for item in items:
        assert item["tokens"].tolist() == [item["sample"]] * (item["sample"] % 5)
        assert torch.equal(item["mask"], torch.ones(item["sample"] % 3))
    return [item["sample"] for item in items]


def lines(directory: str, life: str, world: int, steps: range) -> list[list[dict[str, Any]]]:
    """For each of the steps, the lines of all ranks, in their order."""
    found: dict[int, dict[int, dict[str, Any]]] = {step: {} for step in steps}
    for rank in range(world):
        for text in (Path(directory) / f"{life}-{rank}").read_text().splitlines():
            line = json.loads(text)
            if line["step"] in found:
                found[line["step"]][rank] = line
    assert all(len(ranks) == world for ranks in found.values()), found
    return [[ranks[rank] for rank in range(world)] for ranks in found.values()]
