"""PURE. Two generations whose parameters are the same bytes though optimizers stepped: an alarm.

Then the training does nothing. Seen are optimizers of the state and their parameters alone: whether
others are trained is not known. Every rank says of its part whether it is so; it is told when all
that have parameters say the same, once until it passes.
"""

from __future__ import annotations

from holdfast.snapshot.actions import Action, Warn

NOTHING_TO_SAY = -2
"""A rank without parameters in its image, or without a step since the capture before."""
CHANGED = -1


class Standing:
    """What ranks said of the attempts under way; and whether it was told."""

    def __init__(self) -> None:
        self._told: dict[str, list[int]] = {}
        self._was_said = False

    def begin(self) -> None:
        """A new incarnation."""
        self._told.clear()
        self._was_said = False

    def told(self, attempt: str, same_since: int) -> None:
        """A rank's parameters are those of that earlier step; or one of the two above."""
        self._told.setdefault(attempt, []).append(same_since)

    def drop(self, attempt: str) -> None:
        """It came to nothing."""
        self._told.pop(attempt, None)

    def finish(self, attempt: str, step: int) -> list[Action]:
        """All ranks captured it."""
        said = [one for one in self._told.pop(attempt, []) if one != NOTHING_TO_SAY]
        if not said:
            return []
        was_said, self._was_said = self._was_said, CHANGED not in said
        if was_said or not self._was_said:
            return []
        return [Warn(
            f"the parameters at step {step} are byte for byte those of step {min(said)}, though "
            "optimizers of the state stepped in between: the training stands still. Look whether "
            "its gradients are zero (is the model that computes them the one its optimizer has?), "
            "and whether updates this small are lost in the parameters' dtype."
        )]  # fmt: skip
