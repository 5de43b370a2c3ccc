"""Whether what ranks hold alike is the same on all of them: what they told of it is compared.

Every rank sums the same part of what it holds, another part at each save, and tells the sums with
its seal. Compared is what all ranks captured in one attempt, and nothing else; whatever is wrong
with the comparing itself costs no save.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import xxhash

from holdfast.format.image import piece_name
from holdfast.geometry.layout import Layout
from holdfast.snapshot import messages as m
from holdfast.snapshot.actions import Action, NoteUnlike, Tell, Warn
from holdfast.snapshot.standing import NOTHING_TO_SAY, Standing

if TYPE_CHECKING:
    from holdfast.geometry.replicas import Difference


@dataclass(slots=True)
class Comparison:
    """One attempt's: which part of what is held alike, and what ranks told of it."""

    layout: Layout
    turn: int
    turns: int | None
    sums: dict[int, Sequence[bytes]] = field(default_factory=dict)


class Comparing:
    """Whose turn it is, over the saves of an incarnation; and what comes of it."""

    def __init__(self) -> None:
        self.wanted: int | None = None
        """In how many saves all is to be compared; 0: never, None: as is cheap."""
        self._turn = 0
        self._open: dict[str, Comparison] = {}
        self._warned = ""
        self._standing = Standing()

    def begin(self, nonce: str) -> None:
        """A new incarnation. It begins anywhere: one that dies early should not compare the same
        as all before it."""
        self._turn = xxhash.xxh3_64_intdigest(nonce.encode()) >> 32
        self._open.clear()
        self._warned = ""
        self._standing.begin()

    def start(self, attempt: str, step: int, layout: Layout) -> list[Action]:
        """What is to be compared in this attempt; the turn passes when it has been."""
        try:
            if self.wanted != 0 and not layout.replicas.is_empty:
                self._open[attempt] = Comparison(layout, self._turn, self.wanted)
        except Exception as error:  # no memory, say: nothing here may keep a save from being made
            return self._warn_once(f"{type(error).__name__}: {error}".removesuffix(": "), step)
        self._warned = ""
        return []

    def _warn_once(self, why: str, step: int) -> list[Action]:
        """It is likely to be the same at every save: it is said when it begins, or changes."""
        if why == self._warned:
            return []
        self._warned = why
        return [Warn(f"replicas cannot be compared from step {step} on, until this passes: {why}")]

    def part(self, attempt: str) -> tuple[int, int | None] | None:
        """(turn, of so many), as the ranks are told; None when there is nothing to compare."""
        found = self._open.get(attempt)
        return None if found is None else (found.turn, found.turns)

    def told(
        self, attempt: str, rank: int, sums: Sequence[bytes], same_since: int = NOTHING_TO_SAY
    ) -> None:
        """A rank captured its image; ``sums`` is empty when it could not make them.

        ``same_since``: see ``standing``.
        """
        self._standing.told(attempt, same_since)
        if attempt in self._open:
            self._open[attempt].sums[rank] = sums

    def drop(self, attempt: str) -> None:
        """The attempt came to nothing: what ranks told of it may be of different moments."""
        self._open.pop(attempt, None)
        self._standing.drop(attempt)

    def finish(self, attempt: str, step: int) -> list[Action]:
        """All ranks captured it: say what is not the same and should be, or the other way."""
        return self._standing.finish(attempt, step) + self._compare(attempt, step)

    def _compare(self, attempt: str, step: int) -> list[Action]:
        comparison = self._open.pop(attempt, None)
        if comparison is None:
            return []
        self._turn = comparison.turn + 1
        try:
            found, others = comparison.layout.replicas.differences(
                comparison.sums, comparison.turn, comparison.turns
            )
        except Exception as error:  # nothing here may keep a generation from being complete
            return [Warn(f"replicas could not be compared at step {step}: {error!r}")]
        if not found:
            return []
        unlike = tuple(_unlike(comparison.layout, each) for each in found)
        message = m.ReplicasDiffer(step=step, attempt=attempt, leaves=unlike, others=others)
        return [Tell(message), NoteUnlike(message)]


def _unlike(layout: Layout, found: Difference) -> m.Unlike:
    leaf = layout.leaves[found.leaf]
    piece = piece_name(leaf.name, leaf.shape, found.box)
    return m.Unlike(
        leaf=leaf.name, box=piece[len(leaf.name) + 1 :], ranks=found.ranks,
        replicas=found.replicas, is_known_which=found.is_known_which,
    )  # fmt: skip
