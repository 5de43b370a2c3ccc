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

    def settle(self, leaves: list[Found]) -> None:
        """Take the hint back, in ``leaves`` itself, from those that change after all."""
        for number, (name, tensor, is_lazy, spread, looks_frozen) in enumerate(leaves):
            if not looks_frozen:
                continue
            version = _version(tensor)
            before, moves = self._seen.get(name, (version, 0))
            moves += version != before
            self._seen[name] = version, moves
            if moves >= MOVES:
                leaves[number] = (name, tensor, is_lazy, spread, False)


def _version(tensor: torch.Tensor) -> int:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    if local.is_inference():  # it has none
        return 0
    return local._version if local is tensor else local._version + tensor._version
