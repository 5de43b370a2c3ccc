"""PURE. Ranks the generations that can be restored, best first: one answer for all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from holdfast.errors import UsageError
from holdfast.format.manifest import Generation, Lineage


class Candidate(NamedTuple):
    """One source of a generation. ``where``: "memory" or "storage"."""

    incarnation: int
    step: int
    where: str
    attempt: str
    seal: str = ""
    """The checksum of its manifest, for a candidate in storage: it covers everything to be read."""
    held: int = 0
    """The number of its images that lie whole in memory, where hosts report theirs."""
    is_spread: bool = False
    """True if some image is not in this host's memory for all ranks: on another host, or lost."""

    @property
    def generation(self) -> Generation:
        """(incarnation, step)."""
        return Generation(self.incarnation, self.step)


def choose(
    candidates: Iterable[Candidate],
    parents: Mapping[int, tuple[int, int] | None],
    wanted: int | str | None,
    unreadable: Iterable[int] = (),
) -> list[Candidate]:
    """Return the candidates worth trying, in order: newest step first, memory before storage; of
    two such, the one with more of its images in memory.

    ``wanted`` None: any descendant line of the newest incarnation; a step: that step in this line;
    "incarnation-step": that very generation, abandoned or not. ``unreadable``: as a ``Lineage``
    takes it.
    """
    line = Lineage(dict(parents), unreadable)
    every = list(candidates)
    if isinstance(wanted, str):
        exact = parse_generation(wanted)
        fit = [c for c in every if c.generation == exact]
    else:
        fit = [c for c in every if c.generation in line and wanted in (None, c.step)]
    return sorted(
        fit,
        key=lambda c: (-c.step, -c.incarnation, c.where != "memory", -c.held, c.attempt, c.seal),
    )


def undecided(
    candidates: Iterable[Candidate], line: Lineage, wanted: int | str | None
) -> set[Generation]:
    """Return further candidates that would match if the line were known beyond the missing
    record.
    """
    if isinstance(wanted, str):
        return set()
    fit = {one.generation for one in candidates if wanted in (None, one.step)}
    return {generation for generation in fit if line.is_undecided(generation)}


def parse_generation(text: str) -> Generation:
    """Parse "incarnation-step", as ``holdfast ls`` prints it."""
    incarnation, dash, step = text.partition("-")
    if not (dash and incarnation.isdecimal() and step.isdecimal()):
        raise UsageError(
            f"{text!r} names no generation: give a step, or incarnation-step as in 2-100"
        )
    return Generation(int(incarnation), int(step))
