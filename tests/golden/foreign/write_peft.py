"""Write a small adapter by PEFT."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from golden.foreign.kit import save_expected


def base(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    parts = {"embed": nn.Embedding(7, 4), "inner": nn.Linear(4, 6), "score": nn.Linear(6, 2)}
    return nn.ModuleDict(parts)


def write(case: Path) -> None:
    config = LoraConfig(r=2, target_modules=["inner", "embed"], modules_to_save=["score"])
    model = get_peft_model(base(0), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    model.save_pretrained(str(case / "checkpoint"))
    (case / "checkpoint" / "README.md").unlink(missing_ok=True)
    other = PeftModel.from_pretrained(base(1), str(case / "checkpoint"))
    added = [name for name, one in model.named_parameters() if one.requires_grad]
    tensors = {f"model.{name}": other.state_dict()[name] for name in added}
    save_expected(case, tensors, {"names": sorted(other.state_dict())})


if __name__ == "__main__":
    write(Path(sys.argv[1], "lora"))
