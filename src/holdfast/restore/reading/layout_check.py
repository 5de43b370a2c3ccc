"""Computes what a restore would read and need on every rank: its whole planning without its reads.

Only the layout and the headers of images are read. The arithmetic is that of a real restore
(``holdfast.restore.planning.plan``), so complete coverage is proved in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from msgspec import Struct

from holdfast.format.checksum import BLOCK_BYTES
from holdfast.geometry.box import ITEMSIZE, Box
from holdfast.geometry.parallelism import NamedLayout
from holdfast.restore.planning.plan import (
    BATCH_BYTES,
    BUDGET_BYTES,
    STAGING_BYTES,
    Want,
    plan_batches,
)
from holdfast.restore.reading.images import Checkpoint
from holdfast.restore.reading.read import READERS

#: Of more different ranks than this, an even sample is planned, because each takes a moment.
PLANNED = 64


class RankPart(Struct, frozen=True):
    """The wants of one rank, and the number of ranks with the same wants, this one included."""

    rank: int
    alike: int
    wants: Sequence[Want]


class RankPlan(Struct, frozen=True):
    """One rank's restore.

    ``wanted_bytes``: of its leaves. ``read_bytes``: whole blocks, when it reads for itself.
    ``images``: how many it opens. ``memory_bytes``: at most, for its leaves and staging memory.
    """

    rank: int
    alike: int
    wanted_bytes: int
    read_bytes: int
    images: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """Tells whether a checkpoint can be restored with this layout, and what that takes.

    ``fits`` unless there are ``problems``.

    ``step``: the step of the checkpoint. ``saved_world``: on how many ranks it was saved.
    ``world``: for how many it is planned. ``problems``: the mismatches, a sentence each.
    ``different``: how many ranks have a plan of their own. ``assumptions``: conditions of the plan,
    in words. ``ranks``: a plan for each rank that differs from the others, or for some of
    ``different``. ``wanted_bytes``: of all ranks; ``most_bytes``: of the one that wants most.
    ``read_bytes``: of all ranks, each for itself; ``read_once_bytes``: when each block is read by
    one of them; None where only some were planned.
    """

    step: int
    saved_world: int
    world: int
    problems: tuple[str, ...]
    assumptions: tuple[str, ...]
    ranks: tuple[RankPlan, ...]
    different: int
    wanted_bytes: int
    most_bytes: int
    read_bytes: int | None
    read_once_bytes: int | None

    @property
    def fits(self) -> bool:
        """True if the checkpoint can be restored with this layout."""
        return not self.problems

    @property
    def balance(self) -> float:
        """The largest wanted bytes of a rank over the mean; 1.0 where all ranks want the same."""
        mean = Fraction(self.wanted_bytes, self.world)
        return float(self.most_bytes / mean) if mean else 1.0

    @property
    def memory_bytes(self) -> int:
        """The largest memory that any planned rank needs."""
        return max((one.memory_bytes for one in self.ranks), default=0)


def dry_run(
    checkpoint: Checkpoint,
    step: int,
    parts: Iterable[RankPart],
    *,
    world: int,
    problems: Iterable[str] = (),
    assumptions: Iterable[str] = (),
    on_planned: Callable[[int], None] = lambda _: None,
) -> RestorePlan:
    """Plan the restore of ``parts``, which are all ranks of ``world``.

    Raises CoverageError when the images do not hold what is wanted, and FormatError,
    ChecksumMismatch or StorageError for images that cannot be opened.
    """
    planner = _Planner(checkpoint, world)
    ranks = []
    for count, part in enumerate(parts, 1):
        ranks.append(planner.plan(part))
        on_planned(count)
    return RestorePlan(
        step,
        checkpoint.world,
        world,
        tuple(problems),
        tuple(assumptions),
        tuple(ranks),
        len(ranks),
        sum(one.wanted_bytes * one.alike for one in ranks),
        max((one.wanted_bytes for one in ranks), default=0),
        sum(one.read_bytes * one.alike for one in ranks),
        planner.read_once_bytes,
    )


def dry_run_asked(
    checkpoint: Checkpoint,
    step: int,
    wish: NamedLayout,
    *,
    on_planned: Callable[[int], None] = lambda _: None,
) -> RestorePlan:
    """Plan the restore for a parallelism given by name. Raises as ``dry_run``."""
    different = list(wish.different())
    sizes = [(wish.size_bytes(rank), alike) for rank, alike in different]
    count = min(PLANNED, len(different))
    planned = [different[len(different) * n // count] for n in range(count)]
    parts = (RankPart(rank, alike, wants_of(wish.boxes(rank))) for rank, alike in planned)
    plan = dry_run(
        checkpoint,
        step,
        parts,
        world=wish.wish.world,
        assumptions=wish.assumptions,
        on_planned=on_planned,
    )
    is_all = count == len(different)
    return RestorePlan(
        step,
        plan.saved_world,
        plan.world,
        plan.problems,
        plan.assumptions,
        plan.ranks,
        len(different),
        sum(size * alike for size, alike in sizes),
        max(sizes)[0],
        plan.read_bytes if is_all else None,
        plan.read_once_bytes if is_all else None,
    )


def wants_of(boxes: Iterable[tuple[object, Box]]) -> list[Want]:
    """Return (leaf or its name, box) pairs as wants, without empty ones."""
    named = ((getattr(leaf, "name", leaf), box) for leaf, box in boxes if not box.is_empty)
    return [Want(str(name), box, key) for key, (name, box) in enumerate(named)]


class _Planner:
    """Plans one rank after the other, and collects the blocks that any of them reads."""

    def __init__(self, checkpoint: Checkpoint, world: int) -> None:
        self._checkpoint, self._world = checkpoint, world
        self._item = {leaf.name: ITEMSIZE[leaf.dtype] for leaf in checkpoint.layout.leaves}
        self._blocks: dict[int, set[int]] = {}

    def plan(self, part: RankPart) -> RankPlan:
        fetches = self._checkpoint.fetches(part.wants)
        headers = {image: self._checkpoint.header(image) for image in fetches}
        flat = range(len(part.wants))
        read_bytes = 0
        for batch in plan_batches(fetches, headers, part.wants, flat):
            stop_bytes = headers[batch.rank].table.offset
            self._blocks.setdefault(batch.rank, set()).update(
                range(batch.first_block, batch.stop_block)
            )
            read_bytes += _block_bytes(batch.first_block, batch.stop_block, stop_bytes)
        wanted = sum(want.box.volume * self._item[want.leaf] for want in part.wants)
        # The rank also reads values from an image: its own if as many ranks saved, or that of rank
        # 0.
        values = part.rank if self._world == self._checkpoint.world else 0
        bounds = (READERS * BATCH_BYTES, STAGING_BYTES, BUDGET_BYTES)
        staging = sum(min(bound, read_bytes) for bound in bounds)
        images = len(fetches.keys() | {values})
        return RankPlan(part.rank, part.alike, wanted, read_bytes, images, wanted + staging)

    @property
    def read_once_bytes(self) -> int:
        """Return the bytes of all blocks that any rank reads."""
        return sum(self._sizes())

    def _sizes(self) -> Iterator[int]:
        for image, blocks in self._blocks.items():
            stop_bytes = self._checkpoint.header(image).table.offset
            for block in blocks:
                yield _block_bytes(block, block + 1, stop_bytes)


def _block_bytes(first: int, stop: int, stop_bytes: int) -> int:
    """Return the bytes of some blocks of an image whose data, without the table, end at
    ``stop_bytes``.
    """
    return min(stop * BLOCK_BYTES, stop_bytes) - first * BLOCK_BYTES
