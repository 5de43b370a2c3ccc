"""Holds a Checkpointer for an adapter that counts steps itself: restores it first, closes it last.

The key of the adapter in the state has the place in its loop, or what a restart must agree with. It
is restored and checked before anything else is.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from holdfast.checkpointer import Checkpointer
from holdfast.errors import UsageError
from holdfast.integrations.seam import restore_run

if TYPE_CHECKING:
    from holdfast.capture.handles import SaveHandle
    from holdfast.restore.restore import Restored
    from holdfast.state.objects import State


#: The objects of frameworks that have a Checkpointer which is not closed.
_attached: weakref.WeakSet[Any] = weakref.WeakSet()


def check_free(subject: Any) -> None:
    """Raises UsageError for an object of a framework that has a Checkpointer already."""
    if subject in _attached:
        raise UsageError(
            f"a Checkpointer is attached to this {type(subject).__qualname__} already: close it "
            "first, or use the one that was returned"
        )


def present(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parts of a loop that it has: those that are not None."""
    return {name: part for name, part in parts.items() if part is not None}


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
        root: str | os.PathLike[str],
        key: str,
        loop: Any,
        parts: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        """Makes the Checkpointer. ``subject``: the object of the framework that it is attached to.
        ``key``, ``loop``: what the adapter saves of the loop itself, facts or an object with a
        state. ``parts``: the rest of the state.

        Raises UsageError where the object has a Checkpointer already.
        """
        check_free(subject)
        self._subject, self._key, self._made = subject, key, loop
        self._state: dict[str, Any] = {key: self._new_loop(), **parts}
        try:
            with self._shown():
                self.checkpointer = Checkpointer(root, self._state, **options)
        except BaseException:
            self._hand_back()
            raise
        _attached.add(subject)

    def _new_loop(self) -> Any:
        return dict(self._made) if isinstance(self._made, dict) else self._made

    @property
    def state(self) -> State:
        """The state that is saved; take your own values from it after ``attach`` restored them."""
        return self.checkpointer.state

    def _restore(
        self, step: int | str | None, check: Callable[[], None] | None = None
    ) -> Restored | None:
        """Restores the state; closes the Checkpointer where that is not possible.

        ``check``: called when the key of the adapter was restored, before the rest.
        """
        try:
            with self._shown():
                self.restored = restore_run(self.checkpointer, self._key, step, check)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        if self.restored is not None:
            self._state[self._key] = self._new_loop()
            self.steps = self.restored.step
        return self.restored

    def _shown(self) -> AbstractContextManager[None]:
        """Meanwhile the framework shows what is saved."""
        return nullcontext()

    def _hand_back(self) -> None:
        """Gives the framework back what was put in place of its own; may be called twice."""

    def step(self, step: int | None = None) -> SaveHandle | None:
        """Call at the end of each step of the loop, on all ranks; saves when a policy says so.

        ``step``: the number of the step that has ended; by default they are counted, from 1. See
        ``Checkpointer.step``.
        """
        self.steps = self.steps + 1 if step is None else step
        with self._shown():
            return self.checkpointer.step(self.steps)

    def save(self) -> SaveHandle | None:
        """Save the last step as a durable checkpoint; None where it is the restored one."""
        return self._save(self.steps)

    def _save(self, step: int) -> SaveHandle | None:
        if self.restored is not None and step == self.restored.step:
            return None
        if not step:
            raise UsageError("save() before the first step: there is nothing to save yet")
        with self._shown():
            return self.checkpointer.save(step, durable=True)

    def close(self) -> None:
        """Close the Checkpointer, when what is owed is in storage."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _attached.discard(self._subject)
        try:
            with self._shown():
                self.checkpointer.__exit__(kind, error, trace)
        finally:
            self._hand_back()
