"""The formats that checkpoints are exported to: each makes planned files of a saved state.

A format is one function in a file of its own, and one row here.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.errors import UsageError
from holdfast.interop.writing.chosen_leaves import LeafReader
from holdfast.interop.writing.dcp_format import plan_dcp
from holdfast.interop.writing.deepspeed_format import plan_deepspeed_universal
from holdfast.interop.writing.megatron_format import ReadNumber, plan_torch_dist
from holdfast.interop.writing.planned_files import FormatPlan
from holdfast.interop.writing.safetensors_format import plan_safetensors
from holdfast.interop.writing.state_tree import SavedState
from holdfast.interop.writing.torch_format import plan_torch_file

#: By the name that ``--to`` takes: what has these leaves and values, in files of so many bytes, of
#: such a step. Single numbers are read where a format has them among its values.
FORMATS: dict[str, Callable[[SavedState, int, int, ReadNumber], FormatPlan]] = {
    "dcp": lambda saved, size, *_: plan_dcp(saved, size),
    "deepspeed-universal": lambda saved, _, step, __: plan_deepspeed_universal(saved, step),
    "megatron": plan_torch_dist,
    "safetensors": lambda saved, size, *_: plan_safetensors(saved, size),
    "torch": lambda saved, size, *_: plan_torch_file(saved, size),
}


def plan_format(
    name: str, saved: SavedState, file_bytes: int, step: int, reader: LeafReader
) -> FormatPlan:
    """The files of a saved state in a format. Raises UsageError for an unknown one, and for what
    the format has no form for.
    """
    if name not in FORMATS:
        raise UsageError(f"--to {name}: there are {', '.join(FORMATS)}")
    return FORMATS[name](saved, file_bytes, step, reader.number)
