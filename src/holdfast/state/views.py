"""Parts of a tensor's memory, seen as boxes of the leaves they are of. Nothing is ever copied."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from holdfast.geometry.box import Box
from holdfast.geometry.patches import LocalPatch
from holdfast.state.declared import Piece


@dataclass(frozen=True, slots=True)
class View:
    """How to see elements of a tensor as a box of a leaf.

    Where there is a ``flat``, the elements from that one on are seen in the shape ``run`` first.
    Then ``inside`` is cut out, and its dimensions put in the leaf's order: ``order`` has, for each
    of the leaf's, the one of ``inside``, or -1 where the leaf's has extent 1; what it does not
    name has extent 1 here.
    """

    inside: Box
    order: tuple[int, ...]
    flat: int | None = None
    run: tuple[int, ...] = ()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view; shares the tensor's memory, and is shaped as the box."""
        if self.flat is not None:
            size = math.prod(self.run)
            row = tensor if tensor.ndim == 1 else tensor.view(-1)
            tensor = row[self.flat : self.flat + size].view(self.run)
        if self.inside.shape != tuple(tensor.shape):
            tensor = tensor[self.inside.slices()]
        if self.order == tuple(range(tensor.ndim)):
            return tensor
        named = [dim for dim in self.order if dim >= 0]
        dropped = [dim for dim in range(tensor.ndim) if dim not in named]
        tensor = tensor.permute([*named, *dropped])  # a list: there may be none
        for _ in dropped:
            tensor = tensor.select(-1, 0)
        for at, dim in enumerate(self.order):
            if dim < 0:
                tensor = tensor.unsqueeze(at)
        return tensor

    def behind(self) -> View:
        """The same as a row of a leaf of one more dimension, which comes first."""
        return View(self.inside, (-1, *self.order), self.flat, self.run)


def whole_view(shape: tuple[int, ...]) -> View:
    """A tensor as it is."""
    return View(Box.whole(shape), tuple(range(len(shape))))


def patch_view(patch: LocalPatch, piece: Piece) -> View:
    """What of ``piece`` the patch is, as the box of its leaf."""
    named = {there: here for here, there in enumerate(patch.dims) if there >= 0}
    order = tuple(named.get(dim, -1) for dim in range(patch.box.ndim))
    return View(patch.local, order, piece.flat, _run(piece))


def box_view(piece: Piece, box: Box) -> View:
    """A box counted as ``piece.inside`` is."""
    return View(box, tuple(range(box.ndim)), piece.flat, _run(piece))


def _run(piece: Piece) -> tuple[int, ...]:
    return () if piece.flat is None else piece.inside.shape
