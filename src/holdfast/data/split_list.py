"""A list that each rank has for itself, and that is dealt out anew to another number of ranks.

What a packing loader has read and not yet trained on, for one: lost at a restart it is missed,
and given to two ranks it is trained on twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, SupportsIndex

from holdfast.data.arguments import data_rank


class SplitList(list[Any]):
    """A list in the state of which each rank holds its own part, such as a token buffer.

    It is a list, to be changed in place. Its items are what the state may hold as values: numbers,
    text, bytes, lists, tuples, dicts, arrays, and tensors of the host. Each save stores all of it.

    On as many ranks as it was saved on, each rank gets its own items back. On another number, the
    items of all ranks, laid end to end in the order of ranks, are cut into stretches as equal as
    can be: rank r of w gets items n * r // w to n * (r + 1) // w of n. Nothing is lost and nothing
    is there twice; back on the first number, the items are in the same order over all ranks.

    ``rank`` and ``world`` count data ranks, where these are not all ranks that have the list: ranks
    of one data rank are to hold the same items, and the lowest of them counts.

    Raises UsageError for numbers that mean nothing.
    """

    def __init__(
        self,
        items: Iterable[Any] = (),
        *,
        rank: SupportsIndex | None = None,
        world: SupportsIndex | None = None,
    ) -> None:
        super().__init__(items)
        self.data_rank = data_rank(rank, world)
        """(rank, world) as they were given; None where all ranks that have the list are counted."""
