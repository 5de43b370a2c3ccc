"""The generators of a device are set again with the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast

pytestmark = pytest.mark.gpu


def test_dropout_on_a_device_is_drawn_again_after_a_rewind(tmp_path: Path, device: str) -> None:
    dropout, x = torch.nn.Dropout(0.5), torch.ones(1000, device=device)
    torch.manual_seed(3)
    state = {"rng": holdfast.Rng()}
    holdfast.save(tmp_path, state)
    expected = dropout(x)
    restored = holdfast.load(tmp_path, state)
    dropout(x)  # an evaluation, say
    restored.rewind()
    assert torch.equal(dropout(x), expected)
