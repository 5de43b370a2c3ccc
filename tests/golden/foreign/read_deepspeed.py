"""Load what `holdfast export --to deepspeed-universal` wrote by DeepSpeed, as its own loader does.

.venv-foreign/deepspeed/bin/python tests/golden/foreign/read_deepspeed.py STAGE DTYPE DIRECTORY OUT

Two ranks with other weights load the directory; what they have then goes to ``OUT`` in the form of
what is expected of a case of ``write_deepspeed.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import deepspeed
import torch

from golden.foreign.kit import run_ranks, save_expected
from golden.foreign.write_deepspeed import config_of, engine_of, loaded, train, values_of

WORLD = 2


def load(rank: int, world: int, stage: int, dtype: str, directory: str, out: str) -> None:
    deepspeed.init_distributed("gloo")
    accelerator = deepspeed.get_accelerator()
    accelerator.is_fp16_supported = lambda: True  # torch can, on a CPU
    config = config_of(stage, dtype, checkpoint={"load_universal": True})
    engine = engine_of(config, 7)
    train(engine, rank)  # its state exists, and is another one
    path, client = engine.load_checkpoint(directory)
    assert path is not None
    tensors = {name: one for name, one in loaded(engine, True).items() if torch.is_tensor(one)}
    if rank == 0:
        client = {key: client[key] for key in ("note", "seen")}
        save_expected(Path(out), tensors, {**values_of(engine), "client": client})


if __name__ == "__main__":
    stage, dtype, directory, out = sys.argv[1:]
    Path(out).mkdir(exist_ok=True)
    run_ranks(WORLD, load, int(stage), dtype, directory, out)
