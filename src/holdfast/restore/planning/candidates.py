"""Which generations can be restored, best first: one pure answer for all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from holdfast.errors import UsageError
from holdfast.format.manifest import Generation, Lineage


class Candidate(NamedTuple):
    """One place a generation can be restored from. ``where``: "memory" or "storage"."""

    incarnation: int
    step: int
    where: str
    attempt: str
    seal: str = ""
    """The checksum of its manifest, for what is in storage: of all that is to be read."""
    held: int = 0
    """How many of its images lie in memory as they are, where hosts tell of theirs."""
    is_spread: bool = False
    """Whether some image is not in this host's memory for all ranks: on another, or lost."""

    @property
    def generation(self) -> Generation:
        """(incarnation, step)."""
        return Generation(self.incarnation, self.step)


def choose(
    candidates: Iterable[Candidate],
    parents: Mapping[int, tuple[int, int] | None],
    wanted: int | str | None,
) -> list[Candidate]:
    """The candidates worth trying, in order: newest step first, memory before storage; of two
    such, the one that has more of its images in memory.

    ``wanted`` None: any descendant line of the newest incarnation; a step: that step in this
    line; "incarnation-step": that very generation, abandoned or not.
    """
    line = Lineage(dict(parents))
    found = list(candidates)
    if isinstance(wanted, str):
        exact = parse_generation(wanted)
        fit = [c for c in found if c.generation == exact]
    else:
        fit = [c for c in found if c.generation in line and wanted in (None, c.step)]
    return sorted(
        fit,
        key=lambda c: (-c.step, -c.incarnation, c.where != "memory", -c.held, c.attempt, c.seal),
    )


def parse_generation(text: str) -> Generation:
    """A generation from "incarnation-step", as ``holdfast ls`` prints it."""
    incarnation, dash, step = text.partition("-")
    if not (dash and incarnation.isdecimal() and step.isdecimal()):
        raise UsageError(
            f"{text!r} names no generation: give a step, or incarnation-step as in 2-100"
        )
    return Generation(int(incarnation), int(step))
