"""Agrees the run's layout from the leaf tables of all ranks, and sizes each rank's image."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from holdfast.errors import FormatError, UsageError
from holdfast.format.image import ImagePlan, image_bytes
from holdfast.geometry.layout import Layout, LeafEntry, merge, table_from_json, table_hash
from holdfast.protocol.image_plan import plan_rank

#: Number of leaf tables kept per rank: a state may alternate between a few forms.
TABLES_PER_RANK = 8


class AgreedLayout:
    """A layout, with the image size of each rank computed on demand.

    Of thousands of ranks only some are on this host.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._plans: dict[int, ImagePlan] = {}

    def image_bytes(self, rank: int, values_bytes: int) -> int:
        """Return the size of a rank's image with values of ``values_bytes`` bytes."""
        return image_bytes(self._plan(rank), values_bytes)

    def data_start(self, rank: int) -> int:
        """Return the number of bytes before the data in a rank's image."""
        return self._plan(rank).data_start

    def _plan(self, rank: int) -> ImagePlan:
        plan = self._plans.get(rank)
        if plan is None:
            # The plan is kept without its thousands of entries: the copier computes its own.
            whole = plan_rank(self.layout, rank)
            plan = self._plans[rank] = replace(whole, entries=(), header_text="")
        return plan


class LayoutRegistry:
    """Leaf tables by rank, and the layout last agreed from them."""

    def __init__(self) -> None:
        self._tables: dict[str, tuple[LeafEntry, ...]] = {}
        self._by_rank: dict[int, list[str]] = {}
        self._uses: Counter[str] = Counter()
        """Number of ranks that use each leaf table."""
        self._agreed: dict[tuple[str, ...], AgreedLayout] = {}
        self.sent_hash = ""
        """Hash of the layout that all trainers have: they keep the last layout sent."""

    def learn(self, rank: int, hash_: str, data: bytes) -> None:
        """Register the leaf table of a rank. Raises FormatError or UsageError if the table is
        invalid.
        """
        if hash_ not in self._tables:
            if table_hash(data) != hash_:
                raise FormatError(f"a table of leaves named {hash_} is {table_hash(data)}")
            self._tables[hash_] = table_from_json(data)
        remembered = self._by_rank.setdefault(rank, [])
        if hash_ in remembered:
            remembered.remove(hash_)
        else:
            self._uses[hash_] += 1
        remembered.append(hash_)
        if len(remembered) > TABLES_PER_RANK:
            self._forget(remembered.pop(0))

    def _forget(self, hash_: str) -> None:
        self._uses[hash_] -= 1
        if not self._uses[hash_]:
            del self._tables[hash_], self._uses[hash_]

    def agree(self, hashes: Sequence[str]) -> AgreedLayout:
        """Return the layout of the tables of all ranks, by rank; the same object while the tables
        are the same.
        """
        key = tuple(hashes)
        found = self._agreed.get(key)
        if found is None:
            unknown = [rank for rank, hash_ in enumerate(key) if hash_ not in self._tables]
            if unknown:
                raise UsageError(f"ranks {unknown} have not told which leaves they hold")
            found = AgreedLayout(merge([self._tables[hash_] for hash_ in key]))
            self._agreed = {key: found}
        return found
