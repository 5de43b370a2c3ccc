"""What Megatron-Core's own loads gave of its file for each rank, by the names of leaves."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

import holdfast


def rank_files_expected(case: Path) -> dict[str, torch.Tensor]:
    """By the names of leaves. Megatron-Core calls norms in ``torch_dist`` as Transformer Engine has
    them, which fuses each with the weight behind it; a state dict has them as the model does.
    """
    fused = {"self_attention.linear_qkv": "input", "mlp.linear_fc1": "pre_mlp"}
    found = {}
    for name, one in load_file(case / "expected.safetensors").items():
        for inner, norm in fused.items():
            name = name.replace(f"{inner}.layer_norm_", f"{norm}_layernorm.")
        found[name] = one
    return found


class Linear(nn.Module):
    """A layer as Megatron-Core's: it has extra state, which is None."""

    def get_extra_state(self) -> None:
        return None

    def set_extra_state(self, state: None) -> None:
        assert state is None


def give_extra_state(model: nn.Module, case: Path) -> None:
    """Let the layers of a model have extra state that had some when the case was written."""
    with holdfast.open(case / "checkpoint") as opened:
        for name in opened.values.get("model", ()):
            if "." not in name and name not in dict(model.named_children()):
                model.add_module(name, Linear())  # whose weight is that of the embedding
            model.get_submodule(name).__class__ = Linear
