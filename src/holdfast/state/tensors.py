"""Describes one tensor of the state: its name and type in the format, and the part of it on this
rank.

A tensor that cannot be stored faithfully is refused by name here, before anything is copied.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast.errors import UnsupportedState
from holdfast.format.values import SmallTensor
from holdfast.geometry.box import ITEMSIZE, Box
from holdfast.geometry.layout import (
    REPLICATE,
    Instance,
    LeafEntry,
    Mesh,
    Placement,
    local_boxes,
    local_shape,
)
from holdfast.geometry.mesh import known
from holdfast.state.hidden_state import refuse_emptied

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.complex128: "C128",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex32: "C32",
}
#: Element types that torch can hold, though hardly compute with, where this torch has them.
_SHELLS = (
    "float4_e2m1fn_x2",
    "bits8",
    "bits1x8",
    "bits2x4",
    "bits4x2",
    "bits16",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
)
DTYPE_NAMES.update((getattr(torch, n), n.upper()) for n in _SHELLS if hasattr(torch, n))
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
#: Element types that torch cannot copy, or copies with a warning; viewed as another type of their
#: size they can be copied.
_CARRIERS = {d: torch.uint8 for d, n in DTYPE_NAMES.items() if "INT" in n}
_CARRIERS[torch.complex32] = torch.int32
#: Tensors in values up to this size are stored as values: each rank has its own.
SMALL_BYTES = 8 << 10
#: Plain tensors up to this size, such as an optimizer's step counts, are stored together by one
#: rank: spread over thousands of ranks, a restore would have to open as many images.
TINY_BYTES = 64
PLAIN_TYPES: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the plain tensor with this rank's elements, sharing their memory."""
    found: Any = tensor
    if isinstance(tensor, DTensor):
        found = tensor._local_tensor  # to_local() takes 15 times as long
        if type(found).__name__ == "AsyncCollectiveTensor":
            found = found.wait()
    local: torch.Tensor = found.detach()
    carrier = _CARRIERS.get(local.dtype)
    return local if carrier is None or local.is_conj() else local.view(carrier)


def empty(shape: tuple[int, ...], dtype: str, device: torch.device | None = None) -> torch.Tensor:
    """Returns a plain tensor of zeros, of a dtype by its name in the format."""
    # Filled as bytes, because torch cannot fill every type it has.
    size = math.prod(shape) * ITEMSIZE[dtype]
    raw = torch.zeros(size, dtype=torch.uint8, device=device)
    return raw.view(TORCH_DTYPES[dtype]).view(shape)


def is_small(tensor: torch.Tensor) -> bool:
    """True if the tensor is stored among the values: a generator's state, a count, a learning
    rate.
    """
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and tensor.dtype in DTYPE_NAMES
        and tensor.numel() * tensor.element_size() <= SMALL_BYTES
    )


def small_tensor(name: str, tensor: torch.Tensor) -> SmallTensor:
    """Copies the elements as they are now."""
    flat = local_of(tensor).resolve_conj().resolve_neg().contiguous().view(-1)
    data = bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
    return SmallTensor(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), data)


def fill_small(room: torch.Tensor, small: SmallTensor) -> None:
    """Copies the elements of a small tensor into ``room``, which has its dtype and shape."""
    if small.data:
        local = local_of(room)
        flat = torch.frombuffer(bytearray(small.data), dtype=torch.uint8).view(local.dtype)
        local.copy_(flat.view(small.shape))


def leaf_entry(
    name: str, tensor: torch.Tensor, rank: int, spread: str, *, is_frozen: bool = False
) -> LeafEntry:
    """Returns what ``rank`` declares of the leaf ``name``; raises UnsupportedState for what cannot
    be stored.
    """
    _check(name, tensor)
    dtype = DTYPE_NAMES[tensor.dtype]
    shape = tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        where = _mesh(tensor.device_mesh)
        placements = tuple(_placement(name, p) for p in tensor.placements)
        _check_local_shape(name, tensor, local_shape(shape, where, placements, rank) or ())
        return LeafEntry(name, dtype, shape, spread, Instance(where, placements), is_frozen)
    is_tiny = math.prod(shape) * ITEMSIZE[dtype] <= TINY_BYTES
    return LeafEntry(name, dtype, shape, "lowest" if is_tiny else spread, None, is_frozen)


def held_boxes(name: str, tensor: torch.Tensor, rank: int) -> tuple[Box, ...]:
    """Returns which boxes of the leaf ``name`` the tensor is on ``rank``; works on the meta device,
    too.
    """
    shape = tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        placements = tuple(_placement(name, p) for p in tensor.placements)
        return tuple(
            box for box, _ in local_boxes(shape, _mesh(tensor.device_mesh), placements, rank)
        )
    return (Box.whole(shape),)


@lru_cache(maxsize=64)
def _mesh(mesh: DeviceMesh) -> Mesh:
    """Returns the ranks of a mesh; the same object for all its leaves, because there may be
    thousands.
    """
    return known(Mesh(tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist())))


def _check_local_shape(name: str, tensor: DTensor, expected: tuple[int, ...]) -> None:
    """Refuses a tensor whose placements contradict its local shape: its boxes would be a guess."""
    found = tuple(tensor._local_tensor.shape)
    if found != expected and 0 not in (*found[:1], *expected, tensor._local_tensor.numel()):
        raise UnsupportedState(
            f"{name}: this rank holds a part of shape {list(found)}, by its placements "
            f"{tensor.placements} it should be {list(expected)}: these shards cannot be told apart",
            leaf=name,
        )


def _placement(name: str, placement: Any) -> Placement:
    if isinstance(placement, Replicate):
        return REPLICATE
    if type(placement) is Shard:
        return Placement(placement.dim)
    if type(placement).__name__ == "_StridedShard":
        return Placement(placement.dim, placement.split_factor)
    raise UnsupportedState(
        f"{name} has the placement {placement!r}, which names no elements of its own; redistribute "
        "it to Shard or Replicate before it is saved",
        leaf=name,
    )


def _check(name: str, tensor: torch.Tensor) -> None:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    problem = ""
    if tensor.is_sparse or tensor.layout is not torch.strided:
        problem = f"has the layout {tensor.layout}; store its indices and values instead"
    elif tensor.is_quantized:
        problem = "is quantised; store its int_repr(), scale and zero point instead"
    elif tensor.is_nested:
        problem = "is a nested tensor; store its values() and offsets() instead"
    elif torch.nn.parameter.is_lazy(tensor):
        problem = "has no elements yet: run a forward first, so that the lazy module makes them"
    elif tensor.is_meta:
        problem = "is on the meta device: it has no elements yet; materialise the module first"
    elif tensor.dtype not in DTYPE_NAMES:
        problem = f"has the dtype {tensor.dtype}, for which the format has no name"
    elif type(local) not in PLAIN_TYPES and type(local).__name__ != "AsyncCollectiveTensor":
        problem = _of_subclass(local)
    if problem:
        raise UnsupportedState(f"{name} {problem}", leaf=name)
    refuse_emptied(name, tensor)


def _of_subclass(local: torch.Tensor) -> str:
    return (
        f"is a {type(local).__module__}.{type(local).__qualname__}, a tensor subclass whose inner "
        "tensors Holdfast does not know: name them with holdfast.register_tensor"
    )
