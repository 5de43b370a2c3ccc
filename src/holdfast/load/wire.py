"""Bytes between ranks, over connections of Holdfast's own.

They are made for one restore and ended with it, so they share no tags, no order and no failure
with what the training sends, and nothing of them stays open while it trains. They are gloo's,
between the addresses that GLOO_SOCKET_IFNAME or the host names say, whatever the training's
backend is: what is sent lies in host memory, where it was read and where it is verified.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from holdfast.load.exchange import Pending, RankLost
from holdfast.load.read import Array

#: Longer nobody waits for connections to be made: without them each rank reads for itself.
CONNECT_S = 30.0


def can_connect() -> bool:
    """Whether this torch has what it takes."""
    return dist.is_available() and dist.is_initialized() and dist.is_gloo_available()


class GlooWire:
    """Connections between all ranks. All make one, with the same ``name``, used only once."""

    def __init__(self, rank: int, size: int, name: str, timeout_s: float) -> None:
        self._under_way: list[_Begun] = []
        store = dist.PrefixStore(
            f"holdfast/exchange/{name}", dist.distributed_c10d._get_default_store()
        )
        try:
            # Not dist.new_group: it counts groups, and ranks whose counts differ because one of
            # them failed before could never make another.
            self._group: Any = dist.ProcessGroupGloo(
                store, rank, size, timeout=timedelta(seconds=min(timeout_s, CONNECT_S))
            )
        except RuntimeError as error:
            raise RankLost(f"rank {rank} cannot reach all ranks: {error}") from error

    def send(self, rank: int, message: Array) -> Pending:
        """See ``Wire``."""
        return self._begin(_Begun(self._group.send, message, rank))

    def receive(self, rank: int, message: Array) -> Pending:
        """See ``Wire``."""
        return self._begin(_Begun(self._group.recv, message, rank))

    def _begin(self, message: _Begun) -> Pending:
        self._under_way = [other for other in self._under_way if not other.is_over]
        self._under_way.append(message)
        return message

    def close(self) -> None:
        """See ``Wire``."""
        # Neither shutdown() nor abort() of gloo closes a connection: the end of the last object
        # that refers to it does, and messages under way do.
        for message in self._under_way:
            message.drop()
        self._group = None


class _Begun:
    """One message; an error at its beginning is told when it is waited for, too."""

    def __init__(self, begin: Any, message: Array, rank: int) -> None:
        self._work: Any = None
        self._error: RuntimeError | None = None
        try:
            self._work = begin([torch.from_numpy(message)], rank, 0)
        except RuntimeError as error:
            self._error = error

    @property
    def is_over(self) -> bool:
        return self._work is None

    def drop(self) -> None:
        self._work = None

    def wait(self, timeout_s: float) -> None:
        """See ``Pending``."""
        try:
            if self._error is not None:
                raise self._error
            self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise RankLost(str(error)) from error
        self.drop()
