"""What tells which parameter a number in another writer's optimizer stands for.

Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ParameterOrder:
    """The names of the parameters in each group of an optimizer, in their order.

    ``options``: those of each group, as they are before a load. ``registered``: the same names in
    the order in which the modules have them. Both are empty where somebody gave the names for the
    very checkpoint that is read. ``module``: the key of the one module that all are of.
    """

    groups: Sequence[Sequence[str]]
    options: Sequence[Mapping[str, Any]] = ()
    registered: Sequence[str] = field(default=())
    module: str | None = None
