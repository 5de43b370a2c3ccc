"""Holds a Checkpointer for an adapter that counts steps itself: restores it first, closes it last.

The key of the adapter in the state has what a restart must agree with. It is restored and checked
before anything else is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from holdfast.checkpointer import Checkpointer
from holdfast.errors import UsageError
from holdfast.integrations.seam import restore_loop_first

if TYPE_CHECKING:
    from holdfast.capture.handles import SaveHandle
    from holdfast.restore.restore import Restored
    from holdfast.state.objects import State


#: The objects of frameworks that have a Checkpointer which is not closed.
_attached: weakref.WeakSet[Any] = weakref.WeakSet()


class AttachedCheckpointer:
    """A Checkpointer with a count of steps, made by the ``attach`` of an adapter."""

    checkpointer: Checkpointer
    """Saves and restores."""
    restored: Restored | None = None
    """Where the run goes on from; None for one that begins."""
    steps: int = 0
    """The number of the last step; 0 before the first."""

    def __init__(
        self,
        subject: Any,
        root: str,
        key: str,
        facts: Mapping[str, Any],
        parts: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        """Makes the Checkpointer. ``subject``: the object of the framework that it is attached to.
        ``key``, ``facts``: what the adapter saves of the loop itself. ``parts``: the rest of the
        state.

        Raises UsageError where the object has a Checkpointer already.
        """
        if subject in _attached:
            raise UsageError(
                f"a Checkpointer is attached to this {type(subject).__qualname__} already: close "
                "it first"
            )
        self._subject = subject
        self._key, self._facts = key, dict(facts)
        self._state: dict[str, Any] = {key: dict(facts), **parts}
        self.checkpointer = Checkpointer(root, self._state, **options)
        _attached.add(subject)

    @property
    def state(self) -> State:
        """The state that is saved; take your own values from it after ``attach`` restored them."""
        return self.checkpointer.state

    def _restore(
        self,
        step: int | str | None,
        check: Callable[[Mapping[str, Any], Mapping[str, Any]], None],
    ) -> None:
        """Restores the state; closes the Checkpointer where that is not possible.

        ``check``: called with the facts that were saved and those of now, before the rest.
        """
        try:
            first = restore_loop_first(self.checkpointer, self._key, step)
            if first is not None:
                check(self._state[self._key], self._facts)
                self.restored = self.checkpointer.restore(f"{first.generation}")
                self._state[self._key] = dict(self._facts)
                self.steps = first.step
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def step(self, step: int | None = None) -> SaveHandle | None:
        """Call at the end of each step of the loop, on all ranks; saves when a policy says so.

        ``step``: the number of the step that has ended; by default they are counted, from 1. See
        ``Checkpointer.step``.
        """
        self.steps = self.steps + 1 if step is None else step
        return self.checkpointer.step(self.steps)

    def save(self) -> SaveHandle | None:
        """Save the last step as a durable checkpoint; None where it is the restored one."""
        if self.restored is not None and self.steps == self.restored.step:
            return None
        if not self.steps:
            raise UsageError("save() before the first step: there is nothing to save yet")
        return self.checkpointer.save(self.steps, durable=True)

    def close(self) -> None:
        """Close the Checkpointer, when what is owed is in storage."""
        _attached.discard(self._subject)
        self.checkpointer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _attached.discard(self._subject)
        self.checkpointer.__exit__(kind, error, trace)
