"""From verified blocks of images to the arrays that are to be filled, whatever was cut where."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.geometry.box import Box
from holdfast.geometry.dtypes import ITEMSIZE
from holdfast.geometry.rows import between, flat
from holdfast.load.move import CARRIERS, Array, Destination
from holdfast.load.plan import Fetch, Want
from holdfast.load.read import Lend


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one fetch begins in the data of its image, and where it goes."""

    fetch: Fetch
    offset: int
    item_bytes: int
    inner: Box
    at: Box
    """Where it goes, counted from the want's own start."""
    target: Destination


class Landing:
    """The fetches of one rank, by the blocks they come from."""

    def __init__(
        self, wants: Sequence[Want], destinations: Mapping[int, Destination], lend: Lend
    ) -> None:
        self._wants, self._destinations, self._lend = wants, destinations, lend
        self._by_block: dict[tuple[int, int], list[_Place]] = {}
        self._missing = 0

    def add(self, fetch: Fetch, offset: int, blocks: Iterator[int]) -> None:
        """``fetch`` comes from these blocks; its piece begins at byte ``offset`` of the data."""
        want = self._wants[fetch.want]
        inner, at = fetch.part.relative_to(fetch.piece), fetch.part.relative_to(want.box)
        place = _Place(
            fetch, offset, ITEMSIZE[fetch.dtype], inner, at, self._destinations[want.key]
        )
        for block in blocks:
            self._by_block.setdefault((fetch.rank, block), []).append(place)
        self._missing += inner.volume

    def land(self, image: int, blocks: range, start: int, data: Array) -> None:
        """Copy out of ``data``, the bytes from ``start`` on of the image's, what is wanted."""
        places: dict[int, _Place] = {}
        for block in blocks:
            places.update((id(place), place) for place in self._by_block.get((image, block), ()))
        for place in places.values():
            self._missing -= self._copy(place, start, data)

    @property
    def missing(self) -> int:
        """How many elements have not come yet."""
        return self._missing

    def _copy(self, place: _Place, start: int, data: Array) -> int:
        """Copy all that ``data`` has of one place; how many elements that was."""
        item, shape = place.item_bytes, place.fetch.piece.shape
        first = max(0, -((place.offset - start) // item))
        stop = min(math.prod(shape), (start + len(data) - place.offset) // item)
        count = 0
        for rows in between(shape, first, stop):
            part = rows.intersect(place.inner)
            if part is None:
                continue
            at = place.offset + flat(rows.start, shape) * item - start
            raw: Array = data[at : at + rows.volume * item].view(CARRIERS[item]).reshape(rows.shape)
            to = part.relative_to(place.inner).shift(place.at.start)
            self._put(place.target, to, raw[part.relative_to(rows).slices()])
            count += part.volume
        return count

    def _put(self, target: Destination, to: Box, found: Array) -> None:
        if isinstance(target, np.ndarray):
            target[to.slices()] = found
            return
        with self._lend(found.nbytes) as memory:  # the message is used again before it is copied
            kept: Array = np.frombuffer(memory, found.dtype).reshape(found.shape)
            kept[...] = found
            target.take_box(to, kept)
