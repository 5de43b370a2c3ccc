"""Agrees the run's layout from the leaf tables of all ranks, and knows each rank's image size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from holdfast.errors import FormatError, UsageError
from holdfast.format.image import ImagePlan, image_bytes
from holdfast.geometry.layout import Layout, LeafEntry, merge, table_from_json, table_hash

#: Number of leaf tables kept per rank: a state may alternate between a few forms.
TABLES_PER_RANK = 8
#: Number of layouts kept with the sizes of their images.
LAYOUTS = 2
#: Seconds after which a host that has not planned is told again: its answer was lost by a fault.
ORDER_AGAIN_S = 60.0


class AgreedLayout:
    """A layout, with the image size of each rank once that rank's host has planned it."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._plans: dict[int, ImagePlan] = {}
        self._ordered_s: dict[int, float] = {}
        """Ranks whose hosts were told to plan and have not answered, and when that was."""

    def order_plans(self, ranks: Iterable[int], now_s: float) -> list[int]:
        """Return those of these ranks whose hosts are to plan now: no host is told again soon."""
        since_s = now_s - ORDER_AGAIN_S
        told = {rank for rank, ordered_s in self._ordered_s.items() if ordered_s > since_s}
        found = [rank for rank in ranks if rank not in self._plans and rank not in told]
        self._ordered_s.update(dict.fromkeys(found, now_s))
        return found

    def forget_orders(self) -> None:
        """Have the hosts that have not answered told again, by the next save."""
        self._ordered_s.clear()

    def planned(self, sizes: Mapping[int, tuple[int, int]]) -> None:
        """Record the sizes of some ranks' images, see ``image_plan.plan_sizes``."""
        for rank, (data_start, tensor_bytes) in sizes.items():
            # Without the thousands of entries: the copier computes its own plan.
            self._plans[rank] = ImagePlan((), tensor_bytes, "", data_start)
            self._ordered_s.pop(rank, None)

    @property
    def planned_count(self) -> int:
        """Number of ranks whose image sizes are known."""
        return len(self._plans)

    def image_bytes(self, rank: int, values_bytes: int) -> int:
        """Return the size of a rank's image with values of ``values_bytes`` bytes."""
        return image_bytes(self._plans[rank], values_bytes)

    def data_start(self, rank: int) -> int:
        """Return the number of bytes before the data in a rank's image."""
        return self._plans[rank].data_start


class LayoutRegistry:
    """Leaf tables by rank, and the layouts last agreed from them."""

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
            layout = merge([self._tables[hash_] for hash_ in key])
            # Other tables may have the same layout: its images are planned once.
            found = self.agreed(layout.hash) or AgreedLayout(layout)
            while len(self._agreed) >= LAYOUTS:
                del self._agreed[next(iter(self._agreed))]
            self._agreed[key] = found
        return found

    def forget_orders(self) -> None:
        """Forget which hosts were told to plan images: one of them is gone."""
        for agreed in self._agreed.values():
            agreed.forget_orders()

    def hashes_of(self, agreed: AgreedLayout) -> set[tuple[str, ...]]:
        """Return the tables by rank from which this layout was agreed."""
        return {tables for tables, found in self._agreed.items() if found is agreed}

    def agreed(self, hash_: str) -> AgreedLayout | None:
        """Return the agreed layout with this hash if it is still known."""
        return next((a for a in self._agreed.values() if a.layout.hash == hash_), None)
