"""Saves and loads by DeepSpeed's own calls, with Holdfast as its checkpoint engine, on one rank.

usage: deepspeed_files.py ROOT; see ``test_deepspeed.py``
"""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path
from typing import Any

sys.argv[2:] = ["-1", "none", "{}"]
sys.path.append(str(Path(__file__).parents[1]))

from integrations import deepspeed_run as run  # noqa: E402
from integrations import witness  # noqa: E402

# isort: split
import pytest  # noqa: E402
import torch  # noqa: E402

from holdfast.errors import HoldfastError, UnsupportedState, UsageError  # noqa: E402
from holdfast.integrations.deepspeed import HoldfastEngine  # noqa: E402

KINDS = ((0, "fp32"), (0, "fp16"), (1, "fp16"), (2, "bf16"), (3, "bf16"))


def make_engine(seed: int) -> Any:
    witness.OPTIONS["seed"] = seed
    engine = run.make_engine()
    engine.checkpoint_engine = HoldfastEngine()
    return engine


def train(engine: Any, numbers: range) -> str:
    """Trains with some batches, and returns what has come out."""
    losses = []
    for number in numbers:
        torch.manual_seed(number)
        batch = torch.randn(4, 9).to(run.DTYPES[run.PRECISION])
        loss = engine(batch).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    extra = [torch.tensor(losses), torch.tensor([engine.global_steps, engine.skipped_steps])]
    return witness.digest(chain(run.shares(engine), extra))


def main() -> None:
    for stage, run.PRECISION in KINDS:
        run.STAGE = stage
        where = Path(witness.ROOT) / f"{stage}-{run.PRECISION}"
        engine = make_engine(0)
        train(engine, range(6))
        engine.save_checkpoint(str(where), client_state={"batches": 6})
        engine.save_checkpoint(str(where), client_state={"batches": 6})  # in place of the first
        expected = train(engine, range(6, 10))
        with pytest.raises(UnsupportedState, match="client"):
            engine.save_checkpoint(str(where), tag="bad", client_state={"client": object()})
        other = make_engine(1)
        assert train(other, range(2)) != expected
        path, client_state = other.load_checkpoint(str(where))
        assert path is not None and client_state["batches"] == 6
        assert train(other, range(6, 10)) == expected, (stage, run.PRECISION)
        written = [one for one in where.glob("global_step*/*") if one.is_dir()]
        assert written and not [one for one in where.rglob("*.pt") if one.is_file()]
        print("same", stage, run.PRECISION, sorted(one.name for one in written), flush=True)
    (image,) = written[0].rglob("*.safetensors")
    data = bytearray(image.read_bytes())
    data[-3] ^= 1
    image.write_bytes(data)
    with pytest.raises(HoldfastError):
        other.checkpoint_engine.load(str(written[0]))
    (where / "x.pt").touch()
    with pytest.raises(UsageError, match=r"is a file of torch\.save"):
        other.checkpoint_engine.load(str(where / "x.pt"))
    print("all said")


if __name__ == "__main__":
    main()
