"""Holds what a live state says of the numbers in another writer's optimizer: names, in order.

Loads no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec import Struct, field


class ParameterOrder(Struct, frozen=True):
    """The names of the parameters in each group of an optimizer, in their order.

    ``options``: those of each group, as they are before a load. ``registered``: the same names in
    the order in which the modules have them. Both are empty where somebody gave the names for the
    very checkpoint that is read. ``module``: the key of the one module that all are of.
    ``tensors``: all that the modules of the state have, by their keys and names.
    """

    groups: Sequence[Sequence[str]]
    options: Sequence[Mapping[str, Any]] = ()
    registered: Sequence[str] = field(default=())
    module: str | None = None
    tensors: Collection[str] = ()


class LiveOrders(dict[str, ParameterOrder]):
    """The orders of the optimizers of a live state, by their keys.

    ``paths``: the places of all objects and values of that state, keys joined by dots. ``ties``:
    the names of each tensor that its modules have under several, as leaves have them.
    ``milestones``: the places of schedules that have some, each the path of an object and the keys
    in its state.
    """

    def __init__(
        self,
        orders: Mapping[str, ParameterOrder],
        paths: Collection[str],
        ties: Collection[Sequence[str]] = (),
        milestones: Collection[tuple[str, Sequence[str | int]]] = (),
    ) -> None:
        super().__init__(orders)
        self.paths, self.ties, self.milestones = frozenset(paths), ties, milestones
