"""What a restore would read, and need, on every rank: all of its planning and none of its reads.

Of the checkpoint only the layout and the headers of images are read. It is the arithmetic of a
real restore (``load.plan``), so what it says is proved to be complete as there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from holdfast.format.checksum import BLOCK_BYTES
from holdfast.geometry.asked import AskedLayout
from holdfast.geometry.box import Box
from holdfast.geometry.dtypes import ITEMSIZE
from holdfast.load.plan import (
    BATCH_BYTES,
    BUDGET_BYTES,
    STAGING_BYTES,
    Want,
    plan_batches,
    plan_fetches,
)
from holdfast.load.read import READERS
from holdfast.load.source import Checkpoint

#: Of more ranks than this that differ, some are planned for, evenly: each takes a moment.
PLANNED = 64


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank wants, and how many ranks want just the same, itself among them."""

    rank: int
    alike: int
    wants: Sequence[Want]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's restore.

    ``wanted_bytes``: of its leaves. ``read_bytes``: whole blocks, when it reads for itself.
    ``images``: how many it opens. ``memory_bytes``: its leaves and what is staged, at most.
    """

    rank: int
    alike: int
    wanted_bytes: int
    read_bytes: int
    images: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """Whether a checkpoint can be restored so, and what that takes.

    ``fits`` unless there are ``problems``. ``assumptions``: what the plan rests on, in words.
    ``ranks``: a plan for each rank that differs from the others, or for some of ``different``.
    ``wanted_bytes``: of all ranks; ``most_bytes``: of the one that wants most. ``read_bytes``: of
    all ranks, each for itself; ``read_once_bytes``: when each block is read by one of them; None
    where only some were planned for.
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
        """Whether it can be restored so."""
        return not self.problems

    @property
    def balance(self) -> float:
        """What the rank that wants most wants, over the mean; 1.0 where all want as much."""
        mean = Fraction(self.wanted_bytes, self.world)
        return float(self.most_bytes / mean) if mean else 1.0

    @property
    def memory_bytes(self) -> int:
        """The most that any rank planned for needs."""
        return max((one.memory_bytes for one in self.ranks), default=0)


def dry_run(
    checkpoint: Checkpoint,
    step: int,
    parts: Iterable[Part],
    *,
    world: int,
    problems: Iterable[str] = (),
    assumptions: Iterable[str] = (),
    on_planned: Callable[[int], None] = lambda _: None,
) -> RestorePlan:
    """A plan for ``parts``, which are all ranks of ``world``.

    Raises CoverageError when the images do not hold what is wanted, and FormatError,
    ChecksumMismatch or StorageError for images that cannot be opened.
    """
    planner = _Planner(checkpoint, world)
    ranks = []
    for count, part in enumerate(parts, 1):
        ranks.append(planner.plan(part))
        on_planned(count)
    return RestorePlan(
        step, checkpoint.world, world, tuple(problems), tuple(assumptions), tuple(ranks),
        len(ranks), sum(one.wanted_bytes * one.alike for one in ranks),
        max((one.wanted_bytes for one in ranks), default=0),
        sum(one.read_bytes * one.alike for one in ranks), planner.read_once_bytes,
    )  # fmt: skip


def dry_run_asked(
    checkpoint: Checkpoint,
    step: int,
    wish: AskedLayout,
    *,
    on_planned: Callable[[int], None] = lambda _: None,
) -> RestorePlan:
    """A plan for a parallelism that is only named. Raises as ``dry_run``."""
    different = list(wish.different())
    sizes = [(wish.size_bytes(rank), alike) for rank, alike in different]
    count = min(PLANNED, len(different))
    planned = [different[len(different) * n // count] for n in range(count)]
    parts = (Part(rank, alike, wants_of(wish.boxes(rank))) for rank, alike in planned)
    plan = dry_run(
        checkpoint, step, parts, world=wish.wish.world,
        assumptions=wish.assumptions, on_planned=on_planned,
    )  # fmt: skip
    is_all = count == len(different)
    return RestorePlan(
        step, plan.saved_world, plan.world, plan.problems, plan.assumptions, plan.ranks,
        len(different), sum(size * alike for size, alike in sizes), max(sizes)[0],
        plan.read_bytes if is_all else None, plan.read_once_bytes if is_all else None,
    )  # fmt: skip


def wants_of(boxes: Iterable[tuple[object, Box]]) -> list[Want]:
    """(leaf or its name, box) as wants, without those that are empty."""
    named = ((getattr(leaf, "name", leaf), box) for leaf, box in boxes if not box.is_empty)
    return [Want(str(name), box, key) for key, (name, box) in enumerate(named)]


class _Planner:
    """Plans one rank after the other, and knows the blocks that any of them reads."""

    def __init__(self, checkpoint: Checkpoint, world: int) -> None:
        self._checkpoint, self._world = checkpoint, world
        self._item = {leaf.name: ITEMSIZE[leaf.dtype] for leaf in checkpoint.layout.leaves}
        self._blocks: dict[int, set[int]] = {}

    def plan(self, part: Part) -> RankPlan:
        fetches = plan_fetches(part.wants, self._checkpoint.layout)
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
        # Its values are in an image, too: its own if as many ranks saved, or that of rank 0.
        values = part.rank if self._world == self._checkpoint.world else 0
        bounds = (READERS * BATCH_BYTES, STAGING_BYTES, BUDGET_BYTES)
        staging = sum(min(bound, read_bytes) for bound in bounds)
        images = len(fetches.keys() | {values})
        return RankPlan(part.rank, part.alike, wanted, read_bytes, images, wanted + staging)

    @property
    def read_once_bytes(self) -> int:
        """Bytes of all blocks that any rank reads."""
        return sum(self._sizes())

    def _sizes(self) -> Iterator[int]:
        for image, blocks in self._blocks.items():
            stop_bytes = self._checkpoint.header(image).table.offset
            for block in blocks:
                yield _block_bytes(block, block + 1, stop_bytes)


def _block_bytes(first: int, stop: int, stop_bytes: int) -> int:
    """Bytes of some blocks of an image whose data, but for the table, end at ``stop_bytes``."""
    return min(stop * BLOCK_BYTES, stop_bytes) - first * BLOCK_BYTES
