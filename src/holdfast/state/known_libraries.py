"""Registers the types in which other libraries keep an optimizer's state, once they are loaded.

Nothing is imported here. A library that the program has not loaded has no objects in the state, and
its types are registered at the first walk after it was loaded. What the program registers itself
comes first.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from holdfast.format.native_types import register_enum, register_value, registered_class
from holdfast.state.subclasses import (
    Make,
    Parts,
    StoredTensor,
    block_size,
    is_known,
    register_tensor,
)

#: State tensors of Adam that are never negative; torchao keeps their codes without a sign.
_UNSIGNED = frozenset({"exp_avg_sq", "max_exp_avg_sq"})
_MOMENTS = _UNSIGNED | {"exp_avg"}


def register_loaded() -> None:
    """Registers the types below of every library that is loaded; others are left alone."""
    for (module, name), register in _KNOWN.items():
        loaded = sys.modules.get(module)
        kind = None if loaded is None else vars(loaded).get(name)
        if isinstance(kind, type):
            register(kind)


# torchao's packed moments: codes, and a scale for each block of them. The table that says what a
# code means is a constant, which ``zeros`` makes.


def _codes_and_scale(tensor: Any) -> dict[str, torch.Tensor]:
    return {"codes": tensor.codes, "scale": tensor.scale}


def _packed(per_code: int, dtype: torch.dtype, *, has_sign: bool) -> Callable[[type], None]:
    """Returns what registers a class of packed moments.

    ``per_code``: the number of elements in one code. ``has_sign``: its codes may be without sign.
    """

    def register(kind: type) -> None:
        _register_subclass(
            kind, _codes_and_scale, make=_make_packed(kind, per_code, dtype, has_sign)
        )

    return register


def _make_packed(kind: Any, per_code: int, dtype: torch.dtype, has_sign: bool) -> Make:
    def make(parameter: torch.Tensor, stored: StoredTensor) -> torch.Tensor | None:
        if has_sign and stored.name not in _MOMENTS:
            return None  # whether its codes have a sign is not known
        shape = tuple(parameter.shape)
        codes = shape if per_code == 1 else (math.prod(shape) // per_code,)
        parts = stored.parts
        if parts.keys() != {"codes", "scale"} or parts["codes"] != (dtype, codes):
            return None
        block = block_size(parameter.numel(), parts["scale"][1])
        if not block:
            return None
        signed = (stored.name not in _UNSIGNED,) if has_sign else ()
        like = {"device": parameter.device, "dtype": parameter.dtype}
        made: torch.Tensor = kind.zeros(shape, *signed, block, **like)
        return made

    return make


# torchao's weights that are cast to fp8 when they are gathered: a plain tensor, and settings.


def _inner_weight(tensor: Any) -> dict[str, torch.Tensor]:
    return {"": tensor._tensor}


def _register_subclass(kind: type, parts: Parts, make: Make | None = None) -> None:
    if not is_known(kind):
        register_tensor(kind, parts, make=make)


# pytorch_optimizer's preconditioners and projectors: objects that are their attributes.

#: Attributes that are a torch.Size, stored as tuples.
_SIZES = frozenset({"original_shape", "transformed_shape", "shape"})


def _attributes(item: Any) -> dict[str, Any]:
    return {
        name: tuple(value) if isinstance(value, torch.Size) else value
        for name, value in vars(item).items()
    }


def _register_by_attributes(kind: Any) -> None:
    def give(data: Mapping[str, Any]) -> Any:
        made = kind.__new__(kind)
        for name, value in data.items():
            is_size = name in _SIZES and isinstance(value, tuple)
            setattr(made, name, torch.Size(value) if is_size else value)
        return made

    if registered_class(kind) is None:
        register_value(kind, _attributes, give, name=f"pytorch_optimizer.{kind.__qualname__}")


def _register_enum(kind: Any) -> None:
    register_enum(kind, name=f"pytorch_optimizer.{kind.__qualname__}")


_KNOWN: dict[tuple[str, str], Callable[[type], None]] = {
    ("torchao.optim.subclass_8bit", "OptimState8bit"): _packed(1, torch.uint8, has_sign=True),
    ("torchao.optim.subclass_4bit", "OptimState4bit"): _packed(2, torch.uint8, has_sign=True),
    ("torchao.optim.subclass_fp8", "OptimStateFp8"): _packed(
        1, torch.float8_e4m3fn, has_sign=False
    ),
    ("torchao.float8.fsdp_utils", "WeightWithDynamicFloat8CastTensor"): lambda kind: (
        _register_subclass(kind, _inner_weight)
    ),
    ("pytorch_optimizer.optimizer.utils.preconditioner", "PreConditioner"): _register_by_attributes,
    ("pytorch_optimizer.optimizer.utils.partition", "BlockPartitioner"): _register_by_attributes,
    ("pytorch_optimizer.optimizer.utils.partition", "PreConditionerType"): _register_enum,
    ("pytorch_optimizer.optimizer.scion", "LMONorm"): _register_enum,
    ("pytorch_optimizer.optimizer.utils.graft", "LayerWiseGrafting"): _register_enum,
    ("pytorch_optimizer.optimizer.utils.galore", "GaLoreProjector"): _register_by_attributes,
    **{
        ("pytorch_optimizer.optimizer.utils.graft", name): _register_by_attributes
        for name in ("Graft", "SGDGraft", "SQRTNGraft", "AdaGradGraft", "RMSPropGraft")
    },
}
