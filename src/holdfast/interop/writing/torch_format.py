"""Writes one ``torch.save`` file of a checkpoint: the state dict that ``torch.load`` gives."""

from __future__ import annotations

from typing import Any

from holdfast.format import values as codec
from holdfast.geometry.box import Box
from holdfast.interop.writing.planned_files import FormatPlan, PlannedFile, require_types
from holdfast.interop.writing.state_tree import SavedState, state_tree
from holdfast.interop.writing.torch_zip import TORCH_TYPES, TorchTensor, plan_torch_zip


def plan_torch_file(saved: SavedState, file_bytes: int) -> FormatPlan:
    """The file; optimizers have their state by numbers, as ``load_state_dict`` takes it."""
    require_types(saved.leaves, TORCH_TYPES, "torch.save")
    tree = state_tree(saved, numbered=True)
    zipped = plan_torch_zip(with_tensors(tree.state, saved))
    file = PlannedFile("state.pt", zipped.size_bytes, zipped.parts, zipped.finish)
    return FormatPlan((file,), is_file=True, notes=tree.notes)


def with_tensors(tree: dict[str, Any], saved: SavedState) -> dict[str, Any]:
    """The same tree with tensors in place of references; one for all names of a leaf."""
    made: dict[str, TorchTensor] = {}

    def of(value: Any) -> Any:
        if isinstance(value, codec.LeafRef):
            name = saved.aliases.get(value.name, value.name)
            if name not in made:
                leaf = saved.leaves[name]
                made[name] = TorchTensor(leaf.dtype, leaf.shape, name, Box.whole(leaf.shape))
            return made[name]
        if isinstance(value, codec.SmallTensor):
            return TorchTensor(value.dtype, value.shape, data=value.data)
        if isinstance(value, dict):
            for key, item in value.items():
                value[key] = of(item)
            return value
        if isinstance(value, (list, tuple)):
            return type(value)(of(item) for item in value)
        return value

    return {key: of(value) for key, value in tree.items()}
