"""Which tensors fill the memory from their first element to their last, each place once."""

from __future__ import annotations

from itertools import product

import torch

from holdfast.state.bindings import _is_dense


def test_only_layouts_that_use_every_place_once_are_dense() -> None:
    memory = torch.arange(1000)
    for shape in product((1, 2, 3), repeat=3):
        for strides in product(range(1, 7), repeat=3):
            seen = memory.as_strided(shape, strides).flatten().tolist()
            expected = sorted(seen) == list(range(len(seen)))
            assert _is_dense(torch.empty(40).as_strided(shape, strides)) == expected
    assert not _is_dense(torch.empty(0))
    assert _is_dense(torch.empty(()))
