"""Reports on which device mesh the tensors of a run lie, so that its axes have names in reports."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from holdfast.capture.task import RankIdentity
from holdfast.events import MeshUsed, emit
from holdfast.state.describe import Description

#: Ranks of a mesh in another order than by their numbers that a record has room for.
_MOST_LISTED = 900


class MeshTeller:
    """Reports the largest mesh once, for rank 0, and again when the state lies on other ones."""

    def __init__(self) -> None:
        self._table = ""
        self._told: MeshUsed | None = None

    def tell(self, place: RankIdentity, step: int, description: Description) -> None:
        """Reports the mesh of a state that was described, unless it was reported."""
        if place.rank != 0 or description.table_hash == self._table:
            return
        self._table = description.table_hash
        told = None
        with suppress(Exception):  # a report must never stop training, whatever torch has changed
            told = _largest(binding.tensor for binding in description.bindings)
        if told is not None and told != self._told:
            self._told = told
            emit(
                MeshUsed(
                    incarnation=place.incarnation,
                    step=step,
                    rank=place.rank,
                    names=told.names,
                    sizes=told.sizes,
                    ranks=told.ranks,
                )
            )


def _largest(tensors: Iterable[torch.Tensor]) -> MeshUsed | None:
    every = {_root_of(one.device_mesh) for one in tensors if isinstance(one, DTensor)}
    mesh = max(every, key=lambda one: (one.size(), one.ndim), default=None)
    if mesh is None or mesh.size() < 2:
        return None
    ranks = tuple(mesh.mesh.flatten().tolist())
    if ranks == tuple(range(len(ranks))):
        ranks = ()
    if len(ranks) > _MOST_LISTED:
        return None
    names = mesh.mesh_dim_names or tuple(f"axis {n}" for n in range(mesh.ndim))
    return MeshUsed(names=tuple(names), sizes=tuple(mesh.mesh.shape), ranks=ranks)


def _root_of(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh that another one is a part of."""
    root = getattr(mesh, "_get_root_mesh", None)
    return mesh if root is None else root()
