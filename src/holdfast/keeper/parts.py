"""Names the parts of a keeper that its role and the messages of its trainers use together."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.coordinator.coordinator import Coordinator
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.connections import Ranks
from holdfast.keeper.executor import Executor
from holdfast.keeper.incarnations import Incarnations, RootAccess
from holdfast.keeper.jobs import Background


class KeeperParts(NamedTuple):
    """One of each, for the life of the keeper."""

    coordinator: Coordinator
    memory: ArenaFiles
    ranks: Ranks
    background: Background
    executor: Executor
    incarnations: Incarnations
    root: RootAccess
