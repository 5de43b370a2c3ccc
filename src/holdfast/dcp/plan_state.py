"""Describes what one rank's save plan writes: leaves bound to their memory, and plain values."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from holdfast.accelerator.pinnable_pages import allocate
from holdfast.dcp.forms import FORM, DictForm, Path, PlanItem, RankItems, encode_values
from holdfast.errors import UnsupportedState, UsageError
from holdfast.format import values as codec
from holdfast.geometry.box import Box
from holdfast.geometry.layout import HolderBoxes, LeafEntry, table_hash, table_to_json
from holdfast.state.bindings import (
    Binding,
    Bindings,
    LeafSource,
    same_storage_form,
    signature,
)
from holdfast.state.describe import Description, refuse_names_of_pieces
from holdfast.state.tensors import TINY_BYTES, is_small, leaf_entry, local_of, small_tensor

_HOST = torch.device("cpu")
_RESERVED_KEYS = ("__holdfast_", "__metadata__")


def items_of(plan: SavePlan) -> dict[str, PlanItem]:
    """The items of a plan by name, with their paths in the nested state dict."""
    paths: Mapping[str, Any] = plan.planner_data if isinstance(plan.planner_data, dict) else {}
    found = {}
    for item in plan.items:
        name = item.index.fqn
        path = paths.get(name)
        path = path if isinstance(path, tuple) and path else (name,)
        if str(path[0]).startswith(_RESERVED_KEYS) or not path[0]:
            raise UsageError(f"the state dict has the key {path[0]!r}, which is Holdfast's own")
        shape = None if item.tensor_data is None else tuple(item.tensor_data.size)
        found[name] = PlanItem(path, shape)
    return found


class PlannedPart(NamedTuple):
    """One rank's part of a save: what it writes by ``plan``, and the values it has by ``values``.

    A value that all ranks have is in one final plan and in all images.
    """

    plan: SavePlan
    values: Sequence[WriteItem]
    paths: Mapping[str, Path]
    form: DictForm
    rank: int
    world: int


def describe_part(
    part: PlannedPart, planner: SavePlanner, staging: dict[str, torch.Tensor] | None = None
) -> Description:
    """Describe the leaves and values of one rank. UnsupportedState names what cannot be stored.

    ``staging``: memory of earlier copies, by leaf and box, where the tensors are to be copied
    before they change; None: nothing changes them until they are written.
    """
    found = _Leaves(part.rank, staging)
    for item in part.plan.items:
        if item.type is not WriteItemType.BYTE_IO:
            tensor = planner.resolve_data(item)
            name = part.form.leaf(part.paths[item.index.fqn])
            found.add_item(name, item, tensor)
    by_name = {item.index.fqn: item for item in [*part.values, *part.plan.items]}
    values = {
        name: _value(planner, item)
        for name, item in by_name.items()
        if item.type is WriteItemType.BYTE_IO
    }

    def in_value(value: Any, where: str) -> str | codec.SmallTensor | None:
        if not isinstance(value, torch.Tensor):
            return None
        if part.world > 1 and is_small(value):
            return small_tensor(where, value)
        found.add_whole(where, value)
        return where

    shared = encode_values(part.form, RankItems(part.paths, values), in_value)
    document = {"shared": shared, "own": {FORM: codec.encode(_as_plain(part.form))}}
    bindings, entries = found.declared()
    table = table_to_json(entries)
    return Description(bindings, table, table_hash(table), codec.to_bytes(document))


def _as_plain(form: DictForm) -> dict[str, Any]:
    return {
        "modules": list(form.modules),
        "optimizers": form.optimizers,
        "is_bare": form.is_bare,
        "is_apart": form.is_apart,
        **({} if form.prefix is None else {"prefix": form.prefix}),
    }


def _value(planner: SavePlanner, item: WriteItem) -> Any:
    """The object of an item that is no tensor.

    A planner of one's own hands out what it has pickled a moment ago, in this very process.
    """
    if isinstance(planner, DefaultSavePlanner) and _is_as_torch(type(planner)):
        return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    name = item.index.fqn
    if not isinstance(data, io.BytesIO):
        raise UsageError(f"the planner gives a {type(data).__name__} for the value {name!r}")
    data.seek(0)
    try:
        return torch.load(data, weights_only=False)
    except Exception as error:
        raise UnsupportedState(
            f"{name!r}: the planner gives bytes that torch.save did not write ({error!s:.100}), "
            "and no others are stored",
            where=name,
        ) from None


def _is_as_torch(kind: type[DefaultSavePlanner]) -> bool:
    return (
        kind.resolve_data is DefaultSavePlanner.resolve_data
        and kind.transform_object is DefaultSavePlanner.transform_object
    )


class _Leaves:
    """The leaves of one rank: each with the boxes it writes, and the memory of each box."""

    def __init__(self, rank: int, staging: dict[str, torch.Tensor] | None) -> None:
        self._rank, self._staging = rank, staging
        self._split: set[str] = set()
        self._parts: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def add_item(self, name: str, item: WriteItem, tensor: Any) -> None:
        assert item.tensor_data is not None
        planned, fqn = item.tensor_data, item.index.fqn
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"the planner gives a {type(tensor).__name__} for the tensor {fqn!r}")
        sizes, start = tuple(planned.chunk.sizes), tuple(planned.chunk.offsets)
        if (tensor.dtype, tuple(tensor.shape)) != (planned.properties.dtype, sizes):
            raise UsageError(
                f"the planner gives {tensor.dtype} {list(tensor.shape)} for {fqn!r}, and planned "
                f"{planned.properties.dtype} {list(sizes)}: plan what is written"
            )
        box = Box(start, tuple(a + b for a, b in zip(start, sizes, strict=True)))
        self._add(name, tuple(planned.size), box, tensor)
        if item.type is WriteItemType.SHARD:  # a plain tensor may differ between ranks
            self._split.add(name)

    def add_whole(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor that stands in a value."""
        if name in self._parts:
            raise UsageError(f"two tensors of the state dict are both called {name!r}")
        self._add(name, tuple(tensor.shape), Box.whole(tuple(tensor.shape)), tensor)

    def _add(self, name: str, shape: tuple[int, ...], box: Box, tensor: torch.Tensor) -> None:
        if self._shapes.setdefault(name, shape) != shape:
            raise UsageError(f"{name!r} is planned in two shapes, {self._shapes[name]} and {shape}")
        parts = self._parts.setdefault(name, [])
        if all(box != other for other, _ in parts):
            parts.append((box, tensor.detach()))

    def declared(self) -> tuple[Bindings, list[LeafEntry]]:
        bindings, entries = [], []
        sources: dict[str, tuple[LeafSource, ...]] = {}
        for name in sorted(self._parts):
            parts = sorted(self._parts[name], key=lambda part: part[0].start)
            entry = self._entry(name, parts)
            bound = [(box, self._bind(name, box, tensor, entry)) for box, tensor in parts]
            is_whole = entry.instance is None
            sources[name] = tuple(LeafSource(b, None, None if is_whole else x) for x, b in bound)
            bindings += [binding for _, binding in bound]
            entries.append(entry)
        refuse_names_of_pieces(entries)
        found = Bindings(bindings)
        found.sources = sources
        return found, entries

    def _entry(self, name: str, parts: Sequence[tuple[Box, torch.Tensor]]) -> LeafEntry:
        shape = self._shapes[name]
        spread = "split" if name in self._split else "lowest"
        checked = [leaf_entry(name, tensor, self._rank, spread) for _, tensor in parts]
        spread = "lowest" if math.prod(shape) * parts[0][1].itemsize <= TINY_BYTES else spread
        whole = Box.whole(shape)
        if whole.is_empty or any(box == whole for box, _ in parts):
            return LeafEntry(name, checked[0].dtype, shape, spread)
        boxes = tuple(box for box, _ in parts if not box.is_empty)
        return LeafEntry(name, checked[0].dtype, shape, spread, HolderBoxes(boxes))

    def _bind(self, name: str, box: Box, tensor: torch.Tensor, entry: LeafEntry) -> Binding:
        is_plain = not (tensor.is_conj() or tensor.is_neg())
        tensor = tensor if is_plain else tensor.resolve_conj().resolve_neg()
        local, staged = local_of(tensor), None
        if self._staging is not None:
            key = f"{name}{box.start}"
            staged = self._staging.get(key)
            if not same_storage_form(staged, local, _HOST):
                staged = self._staging[key] = _host_memory(local)
        return Binding(
            name,
            tensor,
            local,
            signature(tensor),
            entry.spread,
            is_hooked=False,
            lazy=staged is None,
            entry=entry,
            staged=staged,
            is_copied_out=staged is not None and not local.is_cpu,
        )


def _host_memory(local: torch.Tensor) -> torch.Tensor:
    if not local.is_cpu:
        return allocate(local.shape, local.dtype)
    with torch.inference_mode(False):  # it is written to later, outside of any
        return torch.empty(local.shape, dtype=local.dtype)
