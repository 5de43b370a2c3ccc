"""What computes parity on this machine: ISA-L where one is found and computes rightly, else numpy.

A library is tried on small sums before it is trusted: at odd lengths and addresses, against plain
arithmetic, with a look at the bytes beside the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from holdfast.redundancy import isal
from holdfast.redundancy.erasure import Backend
from holdfast.redundancy.matrices import Row, parity_rows, times
from holdfast.redundancy.numpy_coding import Bytes, NumpyBackend

_SIZES = (1, 15, 32, 63, 64, 100, 257)
_GUARD = 0xA5


@dataclass(frozen=True, slots=True)
class Chosen:
    """The backend in use, and why none of the faster ones is."""

    backend: Backend
    refused: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """One line for users."""
        return self.backend.name + "".join(f"; {reason}" for reason in self.refused)


@cache
def chosen() -> Chosen:
    """The fastest backend that computes rightly here, found once in a process."""
    return choose(_attempts())


def choose(attempts: Iterator[tuple[str, Callable[[], Backend]]]) -> Chosen:
    """The first of (name, how to make it) that works, or numpy."""
    refused: list[str] = []
    for name, make in attempts:
        try:
            backend = make()
        except (OSError, AttributeError) as error:
            refused.append(f"{name} is not used: {error}")
            continue
        if not (fault := fault_of(backend)):
            return Chosen(backend, tuple(refused))
        refused.append(f"{name} is not used: {fault}")
    refused.append("`pip install 'holdfast[parity]'` brings ISA-L, which is several times faster")
    return Chosen(NumpyBackend(), tuple(refused))


def _attempts() -> Iterator[tuple[str, Callable[[], Backend]]]:
    for name, load in isal.candidates():
        yield name, partial(isal.IsalBackend, name, load)


def fault_of(backend: Backend) -> str:
    """What ``backend`` computes wrongly; "" when nothing was found."""
    for data, parity in ((1, 1), (4, 1), (5, 2), (4, 3)):
        rows = parity_rows(data, parity)
        for size in _SIZES:
            sources = [_noise(size, seed) for seed in range(data)]
            for add in (False, True):
                if wrong := _try(backend, rows, sources, add=add):
                    return f"{wrong}, {size} bytes of {data}+{parity} members"
    return ""


def _try(backend: Backend, rows: Sequence[Row], sources: Sequence[Bytes], *, add: bool) -> str:
    size = len(sources[0])
    memory = [np.full(size + 130, _GUARD, np.uint8) for _ in rows]
    outputs = [one[65 : 65 + size] for one in memory]  # an odd address, and room on both sides
    backend.combine(rows, sources, outputs, add=add)
    for row, output, whole in zip(rows, outputs, memory, strict=True):
        if not np.array_equal(output, plain_sum(row, sources) ^ np.uint8(_GUARD * add)):
            return "it adds wrongly" if add else "it computes wrongly"
        if not ((whole[:65] == _GUARD).all() and (whole[65 + size :] == _GUARD).all()):
            return "it writes beside the output"
    return ""


def plain_sum(row: Row, sources: Sequence[Bytes]) -> Bytes:
    """The same by tables of products: slow, and nothing to get wrong."""
    found = np.zeros(len(sources[0]), np.uint8)
    for factor, source in zip(row, sources, strict=True):
        found ^= np.frombuffer(times(factor), np.uint8)[source]
    return found


def _noise(size: int, seed: int) -> Bytes:
    numbers = np.arange(seed * 1000 + 1, seed * 1000 + 1 + size, dtype=np.uint64)
    return (numbers * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(56)).astype(np.uint8)
