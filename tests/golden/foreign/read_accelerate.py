"""Load an exported checkpoint by Accelerate, into the golden model and its optimizer.

    python tests/golden/foreign/read_accelerate.py WAY DIRECTORY OUT

WAY: ``weights``, by ``load_checkpoint_in_model``, of safetensors; ``sharded``, by ``load_state`` of
two ranks of FSDP2, of folders of DCP. What they have then goes to OUT, as `golden.foreign.kit`
writes it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from accelerate import load_checkpoint_in_model

from golden.foreign.kit import run_ranks, save_expected
from golden.foreign.states import by_name, groups_of
from golden.foreign.write_accelerate import accelerated, whole


def read_weights(where: Path, out: Path) -> None:
    _, model, *_ = accelerated(1, 0, 1)
    load_checkpoint_in_model(model, str(where))
    tensors: dict[str, Any] = {f"model.{name}": one for name, one in model.state_dict().items()}
    out.mkdir(parents=True)
    save_expected(out, tensors, {})


def read_sharded(rank: int, world: int, where: Path, out: Path) -> None:
    accelerator, model, optimizer, _ = accelerated(1, 0, world)
    accelerator._schedulers.clear()  # which no folder of DCP has
    accelerator.load_state(str(where))
    tensors = {f"model.{name}": whole(one) for name, one in model.state_dict().items()}
    moments = by_name(model, optimizer.optimizer)
    tensors |= {name: whole(one) for name, one in moments.items()}
    if rank == 0:
        out.mkdir(parents=True)
        save_expected(out, tensors, {"groups": groups_of(model, optimizer.optimizer)})


if __name__ == "__main__":
    way, given = sys.argv[1], [Path(one) for one in sys.argv[2:4]]
    if way == "weights":
        read_weights(*given)
    else:
        run_ranks(2, read_sharded, *given)
