"""Compares checksums of replicated data across ranks, and raises the standstill alarm.

Every rank sums the same part of its replicated data, a different part at each save, and sends the
sums with its seal. Only attempts that all ranks captured are compared; an error in the comparison
never costs a save.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import xxhash

from holdfast.coordinator.actions import Action, ReportReplicasDiffer, SendMessage, Warn
from holdfast.format.image import piece_name
from holdfast.geometry.layout import Layout
from holdfast.protocol import messages as m
from holdfast.protocol.messages import CHANGED, NOTHING_TO_SAY

if TYPE_CHECKING:
    from holdfast.geometry.replicas import TileDifference


class ReplicaComparison(msgspec.Struct):
    """The compared part of the replicated data in one attempt, and the sums that ranks sent."""

    layout: Layout
    turn: int
    turns: int | None
    sums: dict[int, Sequence[bytes]] = msgspec.field(default_factory=dict)


class ReplicaCheck:
    """Selects the part to compare at each save of an incarnation, and reports differences."""

    def __init__(self) -> None:
        self.wanted: int | None = None
        """Number of saves over which all replicas are compared; 0: never, None: as many as keep it
        cheap.
        """
        self._turn = 0
        self._open: dict[str, ReplicaComparison] = {}
        self._warned = ""
        self._same_since: dict[str, list[int]] = {}
        """What ranks said of their own parameters in each attempt, see ``Captured``."""
        self._was_still = False

    def begin(self, nonce: str) -> None:
        """Begin a new incarnation at a random part: short-lived incarnations should not all compare
        the same part.
        """
        self._turn = xxhash.xxh3_64_intdigest(nonce.encode()) >> 32
        self._open.clear()
        self._warned = ""
        self._same_since.clear()
        self._was_still = False

    def start(self, attempt: str, step: int, layout: Layout) -> list[Action]:
        """Select the part to compare in this attempt; the next part follows once this one was
        compared.
        """
        try:
            if self.wanted != 0 and not layout.replicas.is_empty:
                self._open[attempt] = ReplicaComparison(layout, self._turn, self.wanted)
        except Exception as error:  # no memory, for example: an error here must not prevent a save
            return self._warn_once(f"{type(error).__name__}: {error}".removesuffix(": "), step)
        self._warned = ""
        return []

    def _warn_once(self, why: str, step: int) -> list[Action]:
        """Warn when a reason is new or changed: the same reason is likely at every save."""
        if why == self._warned:
            return []
        self._warned = why
        return [Warn(f"replicas cannot be compared from step {step} on, until this passes: {why}")]

    def part(self, attempt: str) -> tuple[int, int | None] | None:
        """Return (index, number of parts) as sent to the ranks; None if there is nothing to
        compare.
        """
        found = self._open.get(attempt)
        return None if found is None else (found.turn, found.turns)

    def add_sums(
        self, attempt: str, rank: int, sums: Sequence[bytes], same_since: int = m.NOTHING_TO_SAY
    ) -> None:
        """Record the sums of a captured rank; ``sums`` is empty if the rank could not compute them.

        ``same_since``: the step whose parameters it still has, see ``Captured``.
        """
        self._same_since.setdefault(attempt, []).append(same_since)
        if attempt in self._open:
            self._open[attempt].sums[rank] = sums

    def drop(self, attempt: str) -> None:
        """Forget an aborted attempt: its sums may come from different moments."""
        self._open.pop(attempt, None)
        self._same_since.pop(attempt, None)

    def finish(self, attempt: str, step: int) -> list[Action]:
        """Compare the sums of a complete attempt: report new differences, and differences that are
        gone; warn once while no rank's parameters change, though optimizers of the state step.
        """
        return self._alarm(attempt, step) + self._compare(attempt, step)

    def _alarm(self, attempt: str, step: int) -> list[Action]:
        reports = [one for one in self._same_since.pop(attempt, []) if one != NOTHING_TO_SAY]
        if not reports:
            return []
        was_still, self._was_still = self._was_still, CHANGED not in reports
        if was_still or not self._was_still:
            return []
        return [
            Warn(
                f"the parameters at step {step} are byte for byte those of step {min(reports)}, "
                "though optimizers of the state stepped in between: the training stands still. "
                "Look whether its gradients are zero (is the model that computes them the one its "
                "optimizer has?), and whether updates this small are lost in the parameters' dtype."
            )
        ]

    def _compare(self, attempt: str, step: int) -> list[Action]:
        comparison = self._open.pop(attempt, None)
        if comparison is None:
            return []
        self._turn = comparison.turn + 1
        try:
            found, others = comparison.layout.replicas.differences(
                comparison.sums, comparison.turn, comparison.turns
            )
        except Exception as error:  # an error here must not cost the generation
            return [Warn(f"replicas could not be compared at step {step}: {error!r}")]
        if not found:
            return []
        unlike = tuple(_unlike(comparison.layout, each) for each in found)
        message = m.ReplicaDifferences(step=step, attempt=attempt, leaves=unlike, others=others)
        return [SendMessage(message), ReportReplicasDiffer(message)]


def _unlike(layout: Layout, found: TileDifference) -> m.ReplicaDifference:
    leaf = layout.leaves[found.leaf]
    piece = piece_name(leaf.name, leaf.shape, found.box)
    return m.ReplicaDifference(
        leaf=leaf.name,
        box=piece[len(leaf.name) + 1 :],
        ranks=found.ranks,
        replicas=found.replicas,
        is_known_which=found.is_known_which,
    )
