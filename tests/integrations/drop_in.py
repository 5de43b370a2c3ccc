"""What the tests of two libraries share whose own calls save here, with one name changed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import holdfast
from holdfast.cli import main
from integrations.real_runs import environment


def check_changed(library: str, place: Path, roots: dict[Path, str], out: Path) -> None:
    """The library loads what it loads of its own files, and what lies in the roots is this.

    ``place``: where it saves. ``roots``: what then is a root, and the name that its tensors begin
    with.
    """
    wanted, values = _run(library, "no", out / "theirs" / "step-4", out / "expected")
    got, found = _run(library, "yes", place, out / "got")
    assert got.keys() == wanted.keys() and any(name.startswith("optimizer.") for name in got)
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor), name
    assert found == values
    for root, prefix in roots.items():
        assert main(["verify", str(root), "--deep"]) == 0
        with holdfast.open(root) as ours:
            names = {name for name in wanted if name.startswith(prefix)}
            assert names and set(ours.leaves) == names
            for name in names:
                assert torch.equal(ours.read(name), wanted[name]), name


def _run(
    library: str, changed: str, place: Path, out: Path
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    script = Path(__file__).with_name("drop_in_run.py")
    done = subprocess.run(
        [sys.executable, script, library, changed, place, out],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    values: dict[str, Any] = json.loads((out / "expected.json").read_text())
    return load_file(out / "expected.safetensors"), values
