"""Encodes a SplitList for storage among the values that each rank has for itself, and decodes it.

Tensors among its items are stored with them, whatever their size: a leaf would be one for all
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from holdfast.data.planning.order import SplitList
from holdfast.errors import FormatError, UnsupportedState
from holdfast.format import values as codec
from holdfast.state.tensors import DTYPE_NAMES, TORCH_DTYPES, empty, fill_small, small_tensor

_KIND = "split_list"


class StoredList(NamedTuple):
    """One rank's part: its data rank, if one was given, and the encoded items."""

    data_rank: tuple[int, int] | None
    items: Sequence[Any]


def encode_list(key: str, found: SplitList) -> dict[str, Any]:
    """Encodes the list for this rank's image. UnsupportedState names what cannot be stored."""
    rank, world = found.data_rank or (None, None)
    items = codec.encode(list(found), key, tensor=_own_tensor, depth=1)
    return {"kind": _KIND, "rank": rank, "world": world, "items": items}


def stored_lists(own: Mapping[str, Any], where: str) -> dict[str, StoredList]:
    """Returns all lists in a rank's own values, by key; FormatError names the image, ``where``."""
    if not isinstance(own, Mapping):
        raise FormatError(f"{where}: what each rank has for itself is no object: {own!r:.100}")
    return {
        key: _stored(document, f"{where}: {key}")
        for key, document in own.items()
        if isinstance(document, dict) and document.get("kind") == _KIND
    }


def decode_items(items: Sequence[Any]) -> list[Any]:
    """Decodes the items; raises FormatError for one that is not an encoded value."""
    return [codec.decode(item, tensor=_tensor, leaf=_no_leaf, strict=True) for item in items]


def _stored(document: Mapping[str, Any], where: str) -> StoredList:
    items, rank, world = (document.get(name) for name in ("items", "rank", "world"))
    if not isinstance(items, list):
        raise FormatError(f"{where}: a split list without a list of items")
    if rank is None and world is None:
        return StoredList(None, items)
    if type(rank) is not int or type(world) is not int or not 0 <= rank < world:
        raise FormatError(f"{where}: a split list of data rank {rank!r} of {world!r}")
    return StoredList((rank, world), items)


def _own_tensor(value: Any, where: str) -> codec.SmallTensor | None:
    if not isinstance(value, torch.Tensor):
        return None
    is_plain = type(value) is torch.Tensor and value.layout is torch.strided
    is_plain = is_plain and not (value.is_quantized or value.is_nested)
    if not is_plain or value.device.type != "cpu" or value.dtype not in DTYPE_NAMES:
        raise UnsupportedState(
            f"{where} is a {type(value).__name__} of {value.dtype} on {value.device} in a "
            "SplitList, which holds plain tensors of the host: append tensor.detach().cpu()",
            where=where,
        )
    return small_tensor(where, value)


def _tensor(small: codec.SmallTensor) -> torch.Tensor:
    if small.dtype not in TORCH_DTYPES:
        raise FormatError(f"{small.name}: this torch has no dtype {small.dtype}")
    with torch.inference_mode(False):
        found = empty(small.shape, small.dtype)
        fill_small(found, small)
    return found


def _no_leaf(name: str) -> Any:
    raise FormatError(f"an item of a split list refers to the leaf {name!r:.100}")
