"""Whether the parameters in a rank's image are those of the one before, though it was trained.

The training thread only notes which optimizers stepped. What is compared are checksums that the
image has anyway, of the blocks that are all parameters, and the few bytes around them; on the
worker, when the image is sealed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch.optim import Optimizer

from holdfast.format.checksum import BLOCK_BYTES
from holdfast.format.image import Image
from holdfast.snapshot.copies import Copy
from holdfast.snapshot.standing import CHANGED, NOTHING_TO_SAY
from holdfast.state.binding import Bindings


@dataclass(frozen=True, slots=True)
class Trained:
    """What a save knows of the training: ``leaves`` that optimizers change, whether they did."""

    leaves: frozenset[str] = frozenset()
    has_stepped: bool = False


UNTRAINED = Trained()


class Steps:
    """The optimizers that surely changed parameters since the last save. On the training thread."""

    def __init__(self) -> None:
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._bindings: Bindings | None = None
        self._leaves: frozenset[str] = frozenset()
        self._optimizers: list[weakref.ref[Optimizer]] = []

    def note(self, optimizer: Optimizer) -> None:
        """It is about to step; counted only if that cannot leave all parameters as they are.

        A GradScaler that decides on the GPU whether the step is skipped says so by ``found_inf``.
        """
        if optimizer in self._stepped or getattr(optimizer, "found_inf", None) is not None:
            return
        if any(_is_trained(group) for group in optimizer.param_groups):
            self._stepped.add(optimizer)

    def take(self, bindings: Bindings, optimizers: Iterable[Optimizer]) -> Trained:
        """What is to be known at this save; ``optimizers`` of the state, asked for when needed."""
        if bindings is not self._bindings:
            found = list(optimizers)
            ids = {id(p) for each in found for group in each.param_groups for p in group["params"]}
            self._leaves = frozenset(b.name for b in bindings if id(b.tensor) in ids)
            self._optimizers = [weakref.ref(each) for each in found]
            self._bindings = bindings
        stepped = any(one in self._stepped for ref in self._optimizers if (one := ref()))
        self._stepped.clear()
        return Trained(self._leaves, stepped)


def _is_trained(group: dict[str, object]) -> bool:
    rate, parameters = group.get("lr", 0.0), group["params"]
    if isinstance(rate, torch.Tensor):
        if not rate.is_cpu:  # to look would be to wait
            return False
        rate = rate.item()
    assert isinstance(parameters, list)
    return bool(rate) and any(one.grad is not None for one in parameters)


class Stillness:
    """Compares each sealed image with the one before. On the worker."""

    def __init__(self) -> None:
        self._step, self._sum = -1, ""
        self._has_stepped = False

    def same_since(self, step: int, trained: Trained, parameters: str) -> int:
        """The step of the image before if its parameters are these; see ``standing`` for others.

        ``parameters``: their checksum in this image, "" where it has none or keeps none.
        """
        self._has_stepped |= trained.has_stepped
        if not parameters:
            return NOTHING_TO_SAY
        before, was, has_stepped = self._step, self._sum, self._has_stepped
        self._step, self._sum, self._has_stepped = step, parameters, False
        if before < 0 or not has_stepped:
            return NOTHING_TO_SAY
        return before if was == parameters else CHANGED


def sum_of(memory: memoryview, image: Image, copies: Sequence[Copy], trained: Trained) -> str:
    """The checksum of all trained parameters in a sealed image; "" when there are none.

    Made of the checksums of the blocks that they fill, and of what stands before and behind these.
    """
    total = xxhash.xxh3_64()
    data = image.data_start
    table = memory[data + image.table_offset : image.size_bytes]
    spans = _spans(copies, trained.leaves)
    for start, stop in spans:
        first, last = -(-start // BLOCK_BYTES), stop // BLOCK_BYTES
        if first >= last:
            total.update(memory[data + start : data + stop])
            continue
        total.update(memory[data + start : data + first * BLOCK_BYTES])
        total.update(table[8 * first : 8 * last])
        total.update(memory[data + last * BLOCK_BYTES : data + stop])
    return total.hexdigest() if spans else ""


def _spans(copies: Sequence[Copy], leaves: frozenset[str]) -> list[tuple[int, int]]:
    """Where they lie, those that touch as one; ``copies`` are in the order of their offsets."""
    spans: list[tuple[int, int]] = []
    for copy in copies:
        if copy.leaf not in leaves or not copy.size_bytes:
            continue
        stop = copy.offset + copy.size_bytes
        if spans and spans[-1][1] == copy.offset:
            spans[-1] = spans[-1][0], stop
        else:
            spans.append((copy.offset, stop))
    return spans
