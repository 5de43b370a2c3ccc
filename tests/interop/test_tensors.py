"""Tensors that their bytes alone do not say: never taken for what their bytes are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.interop.pickle_records import Opaque, TensorRef
from holdfast.interop.source_files import SourceFiles
from holdfast.interop.torch_files import open_torch_file

COMPLEX = torch.complex(torch.arange(6.0), torch.arange(6.0) + 1)
MARKED = {
    "conj": COMPLEX.conj(),
    "conj of a view": COMPLEX[::2].conj(),
    "neg": torch._neg_view(torch.arange(6.0)),
    "imag of a conj": COMPLEX.conj().imag,
    "parameter": torch.nn.Parameter(COMPLEX.conj()),
}


def saved(tmp_path: Path, tensor: torch.Tensor) -> object:
    torch.save({"w": tensor, "x": torch.ones(2)}, tmp_path / "a.pt")
    value = open_torch_file(SourceFiles(tmp_path), "a.pt").value
    assert isinstance(value["x"], TensorRef)
    return value["w"]


@pytest.mark.promise
@pytest.mark.parametrize("tensor", MARKED.values(), ids=MARKED.keys())
def test_a_conjugate_or_negative_view_is_never_read_as_its_bytes(
    tmp_path: Path, tensor: torch.Tensor
) -> None:
    found = saved(tmp_path, tensor)
    assert isinstance(found, Opaque) and "mark" in found.what and found.offset > 0
    with holdfast.open(tmp_path / "a.pt") as opened:
        assert "model.w" not in opened.leaves


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("float8_e4m3fnuz", "a tensor of torch.float8_e4m3fnuz"),
        ("float8_e8m0fnu", "a tensor of torch.float8_e8m0fnu"),
        ("complex32", "a tensor of torch."),
        ("qint8", "torch._utils._rebuild_qtensor"),
    ],
)
def test_a_tensor_of_an_unknown_type_is_named_and_the_others_are_read(
    tmp_path: Path, name: str, what: str
) -> None:
    if name == "qint8":
        tensor = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    else:
        tensor = torch.zeros(4, dtype=torch.uint8).view(getattr(torch, name))
    found = saved(tmp_path, tensor)
    assert isinstance(found, Opaque) and what in found.what


def test_a_view_without_marks_is_read(tmp_path: Path) -> None:
    assert isinstance(saved(tmp_path, COMPLEX.imag), TensorRef)
    assert isinstance(saved(tmp_path, COMPLEX[1:].real), TensorRef)
