"""Agrees the run's layout from the leaf tables of all ranks, and knows each rank's image size.

Tables and layouts are known by the hashes of their contents, and their bytes asked for where nobody
has them. Everything that takes long is done by ``agree_layout``, beside the keeper's loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import xxhash

from holdfast.coordinator.actions import Action, AgreeLayout, PlanImages, SendMessage
from holdfast.errors import HoldfastError
from holdfast.format.image import ImagePlan, image_bytes
from holdfast.geometry.layout import Layout, deflate, inflate, merge, table_from_json
from holdfast.protocol.messages import RequestTable

#: Number of layouts kept with the sizes of their images.
LAYOUTS = 2
#: Seconds after which a host that has not planned is told again: its answer was lost by a fault.
ORDER_AGAIN_S = 60.0
#: Goes up when ``merge`` makes another layout of the same tables.
_AGREEMENT = "1"

Tables = tuple[str, ...]
"""Hashes of the leaf tables of all ranks, by rank."""


class Agreement(NamedTuple):
    """The layout of some tables; or why there is none; or neither, where tables are missing."""

    layout: Layout | None = None
    deflated: bytes = b""
    """The layout's document, for the wire."""
    reason: str = ""
    is_passing: bool = True


def agreement_id(tables: Tables, layout: str) -> str:
    """Identify the fact that ranks with these tables have the layout of this hash."""
    return xxhash.xxh3_128_hexdigest("\n".join((_AGREEMENT, *tables, layout)).encode())


def agree_layout(
    find: Callable[[Tables], bytes | None], tables: Tables, held: Mapping[str, bytes]
) -> Agreement:
    """Return the layout of these tables as ``find`` remembers it, or merge them if all are held.

    Takes up to a second: never on a keeper's loop.
    """
    try:
        layout = _remembered(find, tables)
        if layout is None:
            if not held.keys() >= set(tables):
                return Agreement()
            decoded = {hash_: table_from_json(inflate(held[hash_], hash_)) for hash_ in set(tables)}
            layout = merge([decoded[hash_] for hash_ in tables])
        with contextlib.suppress(Exception):  # whoever compares replicas reports why it cannot
            _ = layout.replicas.is_empty  # computed here, for the coordinator
        return Agreement(layout, deflate(layout.to_json()))
    except HoldfastError as error:
        return Agreement(reason=str(error), is_passing=False)
    except Exception as error:  # such as numpy's, when memory is short: an answer is waited for
        return Agreement(reason=f"its layout could not be divided: {error!r}")


def _remembered(find: Callable[[Tables], bytes | None], tables: Tables) -> Layout | None:
    data = find(tables)
    try:
        return None if data is None else Layout.from_json(data)
    except HoldfastError:  # of another version: the tables tell it anew
        return None


class AgreedLayout:
    """A layout, with the image size of each rank once that rank's host has planned it."""

    def __init__(self, layout: Layout, deflated: bytes = b"") -> None:
        self.layout, self.deflated = layout, deflated
        self._plans: dict[int, ImagePlan] = {}
        self._ordered_s: dict[int, float] = {}
        """Ranks whose hosts were told to plan and have not answered, and when that was."""

    def plan(self, hosts: Mapping[int, int], now_s: float) -> list[PlanImages]:
        """Have each host plan the images of its ranks that it has not planned; none is told again
        soon.
        """
        since_s = now_s - ORDER_AGAIN_S
        told = {rank for rank, ordered_s in self._ordered_s.items() if ordered_s > since_s}
        by_host: dict[int, list[int]] = {}
        for rank, host in hosts.items():
            if rank not in self._plans and rank not in told:
                by_host.setdefault(host, []).append(rank)
                self._ordered_s[rank] = now_s
        return [PlanImages(host, self.layout, tuple(ranks)) for host, ranks in by_host.items()]

    def forget_orders(self) -> None:
        """Have the hosts that have not answered told again, by the next save."""
        self._ordered_s.clear()

    def forget_plans(self, ranks: Iterable[int]) -> None:
        """Have these ranks' images planned again, by a host that has the layout then."""
        for rank in ranks:
            self._plans.pop(rank, None)
        self.forget_orders()

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
    """The layouts last agreed, and the leaf tables from which the next one is."""

    def __init__(self) -> None:
        self._held: dict[str, bytes] = {}
        """Tables, deflated: those of the last agreement, and what came of the next."""
        self._under_way: Tables = ()
        """The tables whose layout is being agreed; () if none is."""
        self._since_s = 0.0
        self._unknown: Tables = ()
        """The tables whose layout nobody here remembers."""
        self._missing: dict[str, int] = {}
        """Those among them that no rank has sent, each with a rank that has it."""
        self._agreed: dict[Tables, AgreedLayout] = {}

    def find(self, tables: Tables) -> AgreedLayout | None:
        """Return the layout agreed from these tables; the same object while they are the same."""
        return self._agreed.get(tables)

    def agree(self, tables: Tables, now_s: float) -> list[Action]:
        """Have the layout of these tables found or merged; ask for tables that nobody has."""
        if self.is_under_way(tables, now_s):
            return []
        missing = self.missing(tables)
        if missing:
            return [SendMessage(RequestTable(hash=h), rank) for h, rank in missing.items()]
        return [AgreeLayout(tables, self.begin(tables, now_s))]

    def is_under_way(self, tables: Tables, now_s: float) -> bool:
        """Return True if the layout of these tables is being agreed, and an answer may come."""
        return tables == self._under_way and now_s < self._since_s + ORDER_AGAIN_S

    def missing(self, tables: Tables) -> dict[str, int]:
        """Return the tables to ask for, each with a rank; none before it was seen if the layout is
        remembered.
        """
        return self._missing if tables == self._unknown else {}

    @property
    def awaited(self) -> list[int]:
        """The ranks that were asked for tables and have not sent them."""
        return sorted(set(self._missing.values()))

    def begin(self, tables: Tables, now_s: float) -> dict[str, bytes]:
        """Return what is held of these tables, whose layout is agreed from now on."""
        self._under_way, self._since_s = tables, now_s
        if tables != self._unknown:  # nobody waits for the others any more
            self._unknown, self._missing = (), {}
        return self._held_of(tables)

    def _held_of(self, tables: Tables) -> dict[str, bytes]:
        return {hash_: self._held[hash_] for hash_ in self._held.keys() & set(tables)}

    def agreed_on(self, tables: Tables, agreement: Agreement) -> None:
        """Record what came of ``agree_layout``, unless others are agreed on since."""
        if tables != self._under_way:
            return
        self._under_way = ()
        if agreement.layout is None:
            self._held = {} if agreement.reason else self._held
            self._unknown = () if agreement.reason else tables
            ranks = {hash_: rank for rank, hash_ in reversed([*enumerate(self._unknown)])}
            self._missing = {h: rank for h, rank in sorted(ranks.items()) if h not in self._held}
            return
        self._unknown, self._missing = (), {}
        self._held = self._held_of(tables)
        # Other tables may have the same layout: its images are planned once.
        found = self.agreed(agreement.layout.hash)
        while len(self._agreed) >= LAYOUTS:
            del self._agreed[next(iter(self._agreed))]
        self._agreed[tables] = found or AgreedLayout(agreement.layout, agreement.deflated)

    def learn(self, hash_: str, deflated: bytes) -> Tables:
        """Take in a table that was asked for; return the tables that are complete with it."""
        if self._missing.pop(hash_, None) is None:
            return ()
        self._held[hash_] = deflated
        return () if self._missing else self._unknown

    def forget_plans(self, ranks: Collection[int]) -> None:
        """Forget the images of a host that is gone: the next keeper there may have no layout."""
        for agreed in self._agreed.values():
            agreed.forget_plans(ranks)

    @property
    def hashes(self) -> set[str]:
        """Hashes of the layouts under which slots may be granted at once."""
        return {agreed.layout.hash for agreed in self._agreed.values()}

    def tables_of(self, agreed: AgreedLayout) -> set[Tables]:
        """Return the tables by rank from which this layout was agreed."""
        return {tables for tables, found in self._agreed.items() if found is agreed}

    def agreed(self, hash_: str) -> AgreedLayout | None:
        """Return the agreed layout with this hash if it is still known."""
        return next((a for a in self._agreed.values() if a.layout.hash == hash_), None)
