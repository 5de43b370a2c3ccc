"""Connects the ranks of this run, by its process group or alone: one result, one error."""

from __future__ import annotations

import os

import torch.distributed as dist

from holdfast.errors import UsageError
from holdfast.ranks import (
    MEET_S,
    Conclude,
    ConnectedWorld,
    World,
    all_said_or_raise,
    from_rank0,
    outcome_of,
    raise_outcome,
    reduce_or_raise,
)
from holdfast.transport.wire.rank_tree import FAN_OUT

__all__ = [
    "Conclude",
    "TorchWorld",
    "World",
    "all_said_or_raise",
    "current_world",
    "from_rank0",
    "outcome_of",
    "raise_outcome",
    "reduce_or_raise",
    "refuse_rank_without_group",
]


class TorchWorld(ConnectedWorld):
    """The ranks of torch.distributed's default process group, connected within ``timeout_s``.

    ``fan_out``: the most hosts that speak to one. ``among``: this rank's number among the ranks
    that meet, their number, and a name that no other meeting has; None: all of the group.
    """

    def __init__(
        self,
        *,
        timeout_s: float = MEET_S,
        fan_out: int = FAN_OUT,
        among: tuple[int, int, str] | None = None,
    ) -> None:
        rank, size = among[:2] if among else (dist.get_rank(), dist.get_world_size())
        store = dist.distributed_c10d._get_default_store()
        store = dist.PrefixStore(f"holdfast/{among[2]}", store) if among else store
        super().__init__(rank, size, store, timeout_s=timeout_s, fan_out=fan_out)


def current_world(*, timeout_s: float = MEET_S) -> World:
    """Return the process group's ranks, or this process alone when there is no group.

    All ranks call it. DeadlineExceeded names those that did not within ``timeout_s``.
    """
    if dist.is_available() and dist.is_initialized():
        return TorchWorld(timeout_s=timeout_s)
    return World()


def refuse_rank_without_group() -> None:
    """Raises UsageError in a process that was started as one of several ranks and has no group.

    It would act as a run of its own, and the ranks would fence each other off.
    """
    world = os.environ.get("WORLD_SIZE", "1")
    has_group = dist.is_available() and dist.is_initialized()
    if not has_group and world.isdecimal() and int(world) > 1 and "RANK" in os.environ:
        raise UsageError(
            f"this process was started as rank {os.environ['RANK']} of {world}, but "
            "torch.distributed is not initialised: call init_process_group() first. For processes "
            "that do not belong together unset WORLD_SIZE."
        )
