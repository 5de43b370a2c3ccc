"""What the tests of bad input share: a small state, its content bit for bit, and small disks."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast import events

State = dict[str, Any]


def build(seed: int = 0, *, wide: int = 700, layers: int = 1) -> State:
    """A model, its optimizer with state, a generator and a count."""
    torch.manual_seed(seed)
    hidden = [nn.Linear(wide, wide, bias=False) for _ in range(layers - 1)]
    model = nn.Sequential(nn.Linear(33, wide), nn.BatchNorm1d(wide), *hidden, nn.Linear(wide, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {"model": model, "optimizer": optimizer, "rng": holdfast.Rng(), "tokens": 0}


def train(state: State, step: int) -> None:
    """One real step."""
    generator = torch.Generator().manual_seed(step)
    loss = state["model"](torch.randn(9, 33, generator=generator)).square().mean()
    loss.backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["tokens"] += 9


def content(state: State) -> dict[str, bytes]:
    """Every tensor and value, as bytes."""
    found = {name: _bytes(tensor) for name, tensor in state["model"].state_dict().items()}
    for name, parameter in state["model"].named_parameters():
        for kind, tensor in state["optimizer"].state.get(parameter, {}).items():
            found[f"{name}.{kind}"] = _bytes(tensor)
    options = [
        {k: v for k, v in g.items() if k != "params"} for g in state["optimizer"].param_groups
    ]
    return found | {"tokens": repr((state["tokens"], options)).encode()}


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


def files(root: Path) -> dict[str, bytes]:
    """Every file below ``root`` and its bytes, apart from the reports of events."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and "events" not in path.parts
    }


def flip(path: Path, at: int) -> None:
    """Change one bit of a file; from the end when ``at`` is negative."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


@contextmanager
def listening() -> Iterator[list[events.Event]]:
    """Everything that is reported meanwhile."""
    heard: list[events.Event] = []
    stop = holdfast.subscribe(lambda event, _: heard.append(event))
    try:
        yield heard
    finally:
        stop()


def dropped(heard: list[events.Event]) -> list[str]:
    """The sources that a restore dropped."""
    return [event.source for event in heard if isinstance(event, events.SourceDropped)]


@contextmanager
def small_disk(directory: Path, size: str) -> Iterator[Path]:
    """``directory`` as a file system in memory of this size; skips where none can be mounted."""
    directory.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small tmpfs needs root")
    mounted = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
    done = subprocess.run(mounted, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def remount(directory: Path, how: str) -> None:
    """Mount it "ro" or "rw"."""
    subprocess.run(["mount", "-o", f"remount,{how}", str(directory)], check=True)
