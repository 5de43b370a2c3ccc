"""Whether memory still has the bits it had: one number, that compares where the memory is.

Versions do not tell: writes through ``.data`` and some of torch's own kernels move none.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch

from holdfast.offload.rows import Place

_INTEGERS = {4: torch.int32, 2: torch.int16}
#: Longer tensors are summed by rows and by columns of a table of this width first, so that there
#: need not be one weight for each element.
_WIDTH = 1024
_LONG = 16 * _WIDTH
#: Elements that are summed at once on a CPU, where torch widens them all before.
_AT_ONCE = 1 << 22


def checksum(flat: torch.Tensor) -> torch.Tensor:
    """One whole number of all bits and their order: exact sums, so nothing depends on threads.

    One element that changes always shows, several do but for a chance of about one in 2**32.
    """
    bits = flat.view(_INTEGERS[flat.element_size()])
    found = bits if bits.numel() < _LONG else _by_tables(bits)
    return (found * _weights(found.numel(), found.device)).sum()


def _by_tables(bits: torch.Tensor) -> torch.Tensor:
    sums: list[torch.Tensor] = []
    for part in (bits,) if bits.is_cuda else bits.split(_AT_ONCE):
        rows = part.numel() // _WIDTH
        table, rest = part[: rows * _WIDTH].view(rows, _WIDTH), part[rows * _WIDTH :]
        # Twice: an element counts by the weights of its row and of its column, an odd number.
        sums += [table.sum(1, dtype=torch.int64), 2 * table.sum(0, dtype=torch.int64), rest]
    return torch.cat(sums)


def _weights(count: int, device: torch.device) -> torch.Tensor:
    return _table(1 << max(0, count - 1).bit_length(), device)[:count]


@lru_cache(maxsize=64)
def _table(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers by chance, always the same."""
    with torch.inference_mode(False):
        chance = torch.Generator().manual_seed(count)
        found = torch.randint(1 << 62, (count,), generator=chance, device="cpu")
        return (2 * found + 1).to(device)


def note(place: Place) -> None:
    """The parameter is now what its master says."""
    place.seen, place.bits = _seen(place), checksum(place.flat(place.local))


def changed(places: Iterable[Place]) -> set[Place]:
    """Those whose parameter is not what was noted."""
    found, doubtful = set(), []
    for place in places:
        if place.bits is None or place.seen != _seen(place):
            found.add(place)
        else:
            doubtful.append((place, place.bits))
    if doubtful:
        now = torch.stack([checksum(place.flat(place.local)) for place, _ in doubtful])
        are_same = (now == torch.stack([bits for _, bits in doubtful])).tolist()
        found.update(
            place for (place, _), is_same in zip(doubtful, are_same, strict=True) if not is_same
        )
    return found


def _seen(place: Place) -> tuple[int, ...]:
    # What is done in place to a DTensor moves its own version, and not that of its local tensor.
    return place.local.data_ptr(), place.local._version, place.parameter._version
