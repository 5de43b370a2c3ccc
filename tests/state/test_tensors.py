"""Every tensor that can be stored comes back bit for bit; every other is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import UnsupportedState, UsageError
from holdfast.state.tensors import DTYPE_NAMES, empty
from support.models.models import differences


def filled(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random bits: among them NaNs with payloads, infinities and denormals."""
    there = empty(shape, DTYPE_NAMES[dtype])
    generator = torch.Generator().manual_seed(seed)
    size = there.numel() * there.element_size()
    raw = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    if dtype is torch.bool:
        raw %= 2
    return raw.view(dtype).view(shape) if size else there


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().view(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def test_no_dtype_of_torch_is_forgotten() -> None:
    quantised = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}
    everything = {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    assert everything - quantised == set(DTYPE_NAMES)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_every_dtype_in_every_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    shapes: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (5, 7), (33_000,)]
    saved = {
        f"{name} {shape}": filled(dtype, shape)
        for dtype, name in DTYPE_NAMES.items()
        for shape in shapes
    }
    holdfast.save(tmp_path, {"tensors": dict(saved)})
    into = {"tensors": {name: torch.empty_like(tensor) for name, tensor in saved.items()}}
    there = dict(into["tensors"])
    anew: dict[str, Any] = {"tensors": {}}
    holdfast.load(tmp_path, into)
    holdfast.load(tmp_path, anew)
    for name, tensor in saved.items():
        for found in (into["tensors"][name], anew["tensors"][name]):
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
            assert bits(found) == bits(tensor), name
        assert into["tensors"][name] is there[name], "a tensor that fits is filled in place"


def test_every_dtype_can_be_a_parameter_or_buffer_captured_by_a_running_checkpointer(
    tmp_path: Path,
) -> None:
    model = nn.Module()
    for dtype, name in DTYPE_NAMES.items():
        for size in (5, 70_000):  # copied together with others, and by itself
            model.register_buffer(f"{name}_{size}".lower(), filled(dtype, (size,)))
    with holdfast.Checkpointer(tmp_path, {"model": model}) as checkpointer:
        checkpointer.restore()
        checkpointer.save(0, durable=True).wait_durable(timeout_s=60)
    with holdfast.open(tmp_path) as checkpoint:
        for name, buffer in model.named_buffers():
            found = checkpoint.read(f"model.{name}")
            assert found.dtype == buffer.dtype
            assert bits(found) == bits(buffer), name


@pytest.mark.parametrize("size", [6, 70_000])
def test_tensors_that_are_views_come_back_with_their_elements(size: int, tmp_path: Path) -> None:
    base = torch.arange(size * 2, dtype=torch.float32)
    wave = torch.randn(size, dtype=torch.complex64)

    def views(base: torch.Tensor, wave: torch.Tensor) -> dict[str, Any]:
        return {
            "every other": base[::2],
            "turned": base.view(2, size).t(),
            "expanded": base[:1].expand(3, 1),
            "permuted": base.view(2, size // 2, 2).mT,
            "conjugate": wave.conj(),
            "imaginary": wave.conj().imag,
            "real": wave.real,
        }

    saved = {"views": views(base, wave)}
    expected = {name: tensor.clone() for name, tensor in saved["views"].items()}
    holdfast.save(tmp_path, saved)
    fresh: dict[str, Any] = {"views": {}}
    holdfast.load(tmp_path, fresh)
    assert differences(fresh["views"], expected) == []
    for only in saved["views"]:  # into a view of the same kind, one at a time
        base2, wave2 = torch.zeros(size * 2), torch.zeros(size, dtype=torch.complex64)
        holdfast.save(tmp_path / only, {"view": saved["views"][only]})
        into = {"view": views(base2, wave2)[only]}
        there = into["view"]
        holdfast.load(tmp_path / only, into)
        # Elements that share memory could not be told apart: they get memory of their own.
        assert (into["view"] is there) == (only != "expanded")
        assert differences({only: into["view"].clone()}, {only: expected[only]}) == []


def test_a_lazy_conjugate_parameter_is_stored_as_what_it_says(tmp_path: Path) -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.randn(40_000, dtype=torch.complex64).conj())
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with holdfast.Checkpointer(tmp_path, state) as checkpointer:
        checkpointer.restore()
        checkpointer.save(0, durable=True).wait_durable(timeout_s=60)
    with holdfast.open(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.read("model.w"), model.w.detach().resolve_conj())


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


class Strange(torch.Tensor):
    pass


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "layout torch.sparse_coo.*indices"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "layout torch.sparse_csr"),
    "quantised": (quantised, "is quantised; store its int_repr"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged),
        "layout torch.jagged|nested",
    ),
    "meta": (lambda: torch.empty(3, device="meta"), "meta device.*materialise"),
    "subclass": (lambda: torch.ones(2).as_subclass(Strange), "Strange.*register_tensor"),
    "lazy": (lambda: nn.parameter.UninitializedParameter(), "run a forward first"),
}


@pytest.mark.filterwarnings("ignore")  # torch on the future of quantised and sparse tensors
@pytest.mark.parametrize("what", REFUSED)
def test_a_tensor_that_cannot_be_stored_faithfully_is_refused_by_name(
    what: str, tmp_path: Path
) -> None:
    make, message = REFUSED[what]
    with pytest.raises(UnsupportedState, match=rf"(?s)^state\.x.*({message})"):
        holdfast.save(tmp_path / "none", {"state": {"x": make()}})
    assert not (tmp_path / "none" / "manifests").exists()


def test_a_plain_number_beside_objects_in_a_tuple_is_refused_for_it_could_not_be_set(
    tmp_path: Path,
) -> None:
    with pytest.raises(UsageError, match=r"pair\.1 is a plain value in a tuple"):
        holdfast.save(tmp_path, {"pair": (nn.Linear(1, 1), 3)})
