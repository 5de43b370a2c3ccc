"""Leaves that nothing seems to change: a hint where to store them, taken back when they do.

A parameter that needs no gradient and is in no optimizer looks frozen, but so does an averaged
copy of the weights, which is updated behind every step. Stored among the frozen ones it would have
them all written anew each time. So a leaf that was seen to move between saves is frozen no more;
one move is forgiven, for other weights may be loaded once. Checksums alone decide what is written.
"""

from __future__ import annotations

import torch

from holdfast.state.walk import Found

#: After so many moves a leaf counts as one that changes.
MOVES = 2


class Frozen:
    """What was seen of the leaves that look frozen, from save to save."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}
        """Name -> (version at the last save, how often it had moved by then)."""
        self._settled: list[tuple[str, torch.Tensor, bool]] = []
        """The leaves that looked frozen in the last walk, and whether they are taken for it."""

    def settle(self, leaves: list[Found]) -> None:
        """Take the hint back, in ``leaves`` itself, from those that change after all."""
        self._settled.clear()
        for number, (name, tensor, is_lazy, spread, looks_frozen) in enumerate(leaves):
            if looks_frozen:
                is_frozen = self._is_frozen(name, tensor)
                self._settled.append((name, tensor, is_frozen))
                leaves[number] = (name, tensor, is_lazy, spread, is_frozen)

    def is_settled(self) -> bool:
        """Whether ``settle`` would say the same of these leaves now. Each save asks one of both."""
        now = [self._is_frozen(name, tensor) for name, tensor, _ in self._settled]
        return now == [before for _, _, before in self._settled]

    def _is_frozen(self, name: str, tensor: torch.Tensor) -> bool:
        version = _version(tensor)
        before, moves = self._seen.get(name, (version, 0))
        moves += version != before
        self._seen[name] = version, moves
        return moves < MOVES


def _version(tensor: torch.Tensor) -> int:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    if local.is_inference():  # it has none
        return 0
    return local._version if local is tensor else local._version + tensor._version
