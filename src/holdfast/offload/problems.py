"""What an optimizer cannot update, in words: parameters at its door, gradients at its steps."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from holdfast.errors import UsageError
from holdfast.offload.rows import Place, Row

WIDTHS = (torch.float32, torch.bfloat16, torch.float16)


def check_parameter(place: Place, device: torch.device | None) -> None:
    """UsageError for a parameter that cannot be updated here."""
    local, name = place.local, place.name
    problem = ""
    if local.is_meta:
        problem = "is on the meta device: materialise the module first, then make the optimizer"
    elif local.dtype not in WIDTHS:
        problem = (
            f"is of {local.dtype}, and masters are FP32: parameters are float32, bfloat16 or "
            "float16. Give the others to an optimizer of torch"
        )
    elif local.device.type not in ("cpu", "cuda"):
        problem = f"is on {local.device}: the CPU and CUDA are supported"
    elif device is not None and local.device != device:
        problem = (
            f"is on {local.device}, others are on {device}: one optimizer is for one device. Make "
            "one for each, or move the module first"
        )
    elif not _is_dense(local):
        problem = "has gaps in its memory, or elements that share it: make it contiguous first"
    if problem:
        raise UsageError(f"{name} {problem}")


def mesh_problem(place: Place) -> str:
    """Why a parameter's gradient is no gradient of it on its mesh, in words; "" if it is one."""
    parameter, gradient = place.parameter, place.parameter.grad
    if isinstance(parameter, DTensor) != isinstance(gradient, DTensor):
        kinds = [
            "DTensor" if isinstance(one, DTensor) else "plain tensor"
            for one in (parameter, gradient)
        ]
        return f"is a {kinds[0]}, its gradient a {kinds[1]}: they have to be alike"
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        meshes = parameter.device_mesh, gradient.device_mesh
        if meshes[0] != meshes[1]:
            return f"is on {meshes[0]}, its gradient on {meshes[1]}: they have to be on the same"
    return ""


def gradient_problem(kind: str, row: Row, place: Place, gradient: torch.Tensor) -> str:
    """Why a parameter cannot be updated with its gradient, in words; "" if it can.

    ``kind``: what the optimizer is called.
    """
    local = place.raw
    if not place.is_placed and _is_as_it_was(row, place, local, gradient):
        return ""
    if problem := mesh_problem(place):
        return problem
    if gradient.layout is not torch.strided:
        return (
            f"has a gradient of the layout {gradient.layout}: {kind} updates "
            "by dense gradients. Make the embedding with sparse=False"
        )
    if local.dtype != row.dtype or local.device != row.device:
        return (
            f"is {local.dtype} on {local.device} now, and was {row.dtype} on {row.device} when "
            "the optimizer was made: convert and move the module first, then make the optimizer"
        )
    if tuple(local.shape) != place.shape:
        return (
            f"has the shape {list(local.shape)} here now, and had {list(place.shape)} when the "
            "optimizer was made: shard the module first, then make the optimizer"
        )
    if not place.lies_so(local):
        return (
            f"lies in memory with the strides {list(local.stride())} now, and with "
            f"{list(place.stride)} when the optimizer was made: convert the module to its "
            "memory format first, then make the optimizer"
        )
    if gradient.dtype != local.dtype or gradient.device != local.device:
        return (
            f"is {local.dtype} on {local.device}, its gradient {gradient.dtype} on "
            f"{gradient.device}: they have to be alike"
        )
    return ""


def _is_as_it_was(row: Row, place: Place, local: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Nothing to look at closely: it is so at nearly every step, of thousands of parameters."""
    return (
        type(place.parameter.grad) is torch.Tensor
        and gradient.layout is torch.strided
        and local.dtype is row.dtype is gradient.dtype
        and local.device == row.device == gradient.device
        and local.shape == place.shape
        and local.stride() == place.stride
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(
        (stride, size)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size != 1
    ):
        if stride != expected and tensor.numel():
            return False
        expected *= size
    return True
