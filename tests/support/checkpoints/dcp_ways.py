"""The two ways to the same calls: DCP's own files, and Holdfast, with one argument changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

import holdfast

WAYS = ("torch", "holdfast")


class Way:
    """Writers and readers of one kind for the steps of one root."""

    def __init__(self, name: str, root: Path | str) -> None:
        self.name, self.root = name, Path(root)

    def writer(self, step: int) -> Any:
        if self.name == "torch":
            return FileSystemWriter(self.root / f"step-{step}")
        return holdfast.dcp.Writer(self.root, step=step)

    def reader(self, step: int) -> Any:
        if self.name == "torch":
            return FileSystemReader(self.root / f"step-{step}")
        return holdfast.dcp.Reader(self.root, step=step)

    def save(self, state: dict[str, Any], step: int, **options: Any) -> Any:
        return quietly(dcp.save, state, storage_writer=self.writer(step), **options)

    def load(self, state: dict[str, Any], step: int, **options: Any) -> dict[str, Any]:
        quietly(dcp.load, state, storage_reader=self.reader(step), **options)
        return state


def quietly(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Torch warns of calls without a process group, and of functions of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args, **options)


def differs(found: Any, expected: Any, where: str = "") -> list[str]:
    """Where two state dicts differ: types, keys, dtypes, every bit."""
    if isinstance(expected, torch.Tensor):
        return [] if _are_equal(found, expected) else [where]
    if type(found) is not type(expected):
        return [f"{where}: {type(found).__name__} for {type(expected).__name__}"]
    if isinstance(expected, dict):
        if found.keys() != expected.keys():
            return [f"{where}: {sorted(map(str, found.keys() ^ expected.keys()))}"]
        return [t for k in expected for t in differs(found[k], expected[k], f"{where}.{k}")]
    if isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            return [f"{where}: {len(found)} for {len(expected)} items"]
        pairs = enumerate(zip(found, expected, strict=True))
        return [t for n, (a, b) in pairs for t in differs(a, b, f"{where}.{n}")]
    return [] if repr(found) == repr(expected) else [f"{where}: {found!r} for {expected!r}"]


def _are_equal(found: Any, expected: torch.Tensor) -> bool:
    if not isinstance(found, torch.Tensor) or type(found) is not type(expected):
        return False
    one, other = (getattr(each, "_local_tensor", each).detach() for each in (found, expected))
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    raw = (each.contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return one.numel() == 0 or torch.equal(*raw)
