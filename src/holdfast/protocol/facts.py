"""Base types of the messages between the keepers of one run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec


class Fact(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Base class of all messages between keepers of one run; those of every save are short."""


class ToCoordinator(Fact, frozen=True, kw_only=True):
    """Base class of what a follower tells the coordinator."""


class ToFollower(Fact, frozen=True, kw_only=True):
    """Base class of what the coordinator tells or orders a follower."""


#: Receives what an agent reports to its coordinator.
Report = Callable[[Fact], None]


def ignore(_: Fact) -> None:
    """Report to nobody."""


T = TypeVar("T")
#: One field of several reports: the distinct values, and which is whose; () if there is one.
Column = tuple[tuple[T, ...], tuple[int, ...]]
