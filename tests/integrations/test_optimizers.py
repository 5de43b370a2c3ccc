"""Every optimizer that is installed, in real processes: killed after its checkpoint and made anew,
it comes to what an unbroken run comes to, or it is refused by name at the start. Without the
libraries, which `make integrations-optimizers` installs, these are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("optimizer_run.py")
LIBRARIES = ("torch", "torchao", "bitsandbytes", "pytorch_optimizer")
#: How many optimizers of a library have to come to the same bits, so that none is lost unseen.
LEAST = {"torch": 14, "torchao": 8, "bitsandbytes": 10, "pytorch_optimizer": 90}


def run(how: str, root: Path, library: str) -> dict[str, str]:
    command = [sys.executable, str(RUN), how, str(root), library]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == (-9 if how == "save" else 0), done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_an_optimizer_comes_to_the_same_bits_or_is_refused_at_the_start(
    library: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}: make integrations-optimizers")
    before = run("save", tmp_path, library)
    after = run("load", tmp_path, library)
    refused = {name for name, said in before.items() if said.startswith("refused:")}
    trained = {name for name, said in before.items() if len(said) == 16}
    print({name: said for name, said in before.items() if name not in trained})
    assert {
        name: (before[name], after.get(name)) for name in trained if after.get(name) != before[name]
    } == {}
    assert not refused & {name for name, said in after.items() if len(said) == 16}
    assert len(trained) >= LEAST[library]
