"""What a rank says and hears beside its saves: of steps to come, and of the newest in memory.

From any thread, also while the training thread hangs in a collective.
"""

from __future__ import annotations

import contextlib

from holdfast.errors import HoldfastError, KeeperError
from holdfast.snapshot import messages as m
from holdfast.snapshot.heard import Heard
from holdfast.snapshot.line import Line
from holdfast.snapshot.promises import Promises


class Announcing:
    """Of one rank, over the line that its saves take."""

    def __init__(self, line: Line, heard: Heard, promises: Promises) -> None:
        self._line, self._heard, self._promises = line, heard, promises

    def announce(self, step: int, which: str) -> None:
        """A save is due at ``step``, ahead of every rank, by the policy ``which``."""
        with contextlib.suppress(KeeperError):  # the next try is as good
            self._line.send(m.Announce(step=step, which=which))

    def take_announced(self, step: int, which: str, after: int | None = None) -> bool:
        """Whether ``which`` was announced for ``step``, or for one since ``after``; asked once."""
        return self._heard.take_announced(step, which, after)

    def was_announced(self, step: int | None, which: str) -> bool:
        """Whether ``which`` was announced for ``step`` or an earlier one; None: for any."""
        announced = tuple(self._heard.announced)
        return any(name == which and (step is None or n <= step) for n, name in announced)

    def reach_keeper(self) -> bool:
        """Whether there is one to talk to; where it died, another is started, which takes a while.

        Never on the training thread: a step waits for no keeper.
        """
        with contextlib.suppress(HoldfastError):
            self._line.ensure()
            return True
        return False

    def make_newest_durable(self) -> bool:
        """What is newest in memory is to be in storage; whether that was said.

        Never on the training thread either.
        """
        with contextlib.suppress(HoldfastError):
            self._line.ensure().send(m.MakeDurable(step=0, newest=True))
            return True
        return False

    @property
    def is_newest_settled(self) -> bool:
        """Whether what is newest in memory is in storage too, or storage has refused it."""
        return self._promises.is_newest_settled
