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


#: The same of a model that FSDP2 shards: fewer take such tensors, by themselves.
LEAST_SHARDED = {"torch": 10, "torchao": 4, "pytorch_optimizer": 40}


def run(how: str, root: Path, library: str, ranks: int = 1) -> dict[str, str]:
    command = [sys.executable, str(RUN), how, str(root), library]
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command[1:1] = launcher
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True)
    if ranks > 1:
        assert (done.returncode != 0) == (how == "save"), done.stderr
    else:
        assert done.returncode == (-9 if how == "save" else 0), done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_an_optimizer_comes_to_the_same_bits_or_is_refused_at_the_start(
    library: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}: make integrations-optimizers")
    check_all(tmp_path, library, LEAST[library])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("library", LEAST_SHARDED)
def test_an_optimizer_of_a_model_that_two_ranks_shard_comes_to_the_same_bits(
    library: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}: make integrations-optimizers")
    check_all(tmp_path, library, LEAST_SHARDED[library], ranks=2)


def check_all(root: Path, library: str, least: int, ranks: int = 1) -> None:
    before = run("save", root, library, ranks)
    after = run("load", root, library, ranks)
    refused = {name for name, said in before.items() if said.startswith("refused:")}
    trained = {name for name, said in before.items() if len(said) == 16}
    print({name: said for name, said in before.items() if name not in trained})
    assert {
        name: (before[name], after.get(name)) for name in trained if after.get(name) != before[name]
    } == {}
    assert not refused & {name for name, said in after.items() if len(said) == 16}
    assert len(trained) >= least
