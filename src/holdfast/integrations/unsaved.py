"""Finds tensors that callbacks of a framework hold and nothing saves, as an average of the weights.

Frameworks call their callbacks and do not ask what they hold. A restart would make it anew, without
a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from holdfast.events import warn


def warn_of_unsaved(holders: Iterable[Any], saved: Iterable[Any]) -> None:
    """Warns, once for each of ``holders``, of tensors in its attributes that are in none of
    ``saved``.
    """
    known = {id(tensor) for one in saved for tensor in _tensors(one)}
    for holder in holders:
        names = [
            name
            for name, value in getattr(holder, "__dict__", {}).items()
            if any(id(tensor) not in known for tensor in _tensors(value))
        ]
        if names:
            warn(
                f"{type(holder).__qualname__} holds tensors in "
                f"{', '.join(sorted(names))} that are in no part of the state: a restart makes "
                "them anew. Give the object that holds them in state={...}, or leave this be "
                "where they need not be kept"
            )


def _tensors(value: Any, depth: int = 2) -> Iterator[torch.Tensor]:
    """Yields the tensors in a value, in modules, optimizers and containers too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
        for part in value.modules():  # metrics of torchmetrics add up in neither
            yield from _tensors(getattr(part, "metric_state", None))
    elif isinstance(value, torch.optim.Optimizer):
        yield from (one for group in value.param_groups for one in group["params"])
    elif isinstance(value, Mapping | list | tuple) and depth:
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one, depth - 1)
