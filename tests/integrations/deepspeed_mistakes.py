"""Makes mistakes with engines of DeepSpeed, and says what each was told.

usage: deepspeed_mistakes.py ROOT
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.argv[2:] = ["-1", "none", '{"stage": 3, "accumulation": 2}']

import deepspeed  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

import holdfast  # noqa: E402
from holdfast.errors import HoldfastError  # noqa: E402
from holdfast.integrations import deepspeed as adapter  # noqa: E402

sys.path.append(str(Path(__file__).parents[1]))

from integrations.deepspeed_run import make_engine  # noqa: E402

ROOT = Path(sys.argv[1])


def tell(name: str, act: Callable[[], Any]) -> None:
    try:
        act()
    except HoldfastError as error:
        print(f"{name}: {error}", flush=True)
    else:
        raise AssertionError(f"{name} was let pass")


class Extra(nn.Linear):
    """A layer with extra state."""

    def get_extra_state(self) -> Any:
        return 1

    def set_extra_state(self, state: Any) -> None:
        pass


#: What engines of the oldest version may have; later ones have not.
OF_OLDER_VERSIONS = {
    "progressive_layer_drop": object(),
    "quantizer": object(),
    "compression_scheduler": SimpleNamespace(
        different_compression_methods={
            "sparse_pruning": {"enabled": True},
            "row_pruning": {"enabled": False},
        }
    ),
}


class Strange:
    """An optimizer that nobody knows."""

    param_groups: tuple[()] = ()


def main() -> None:
    engine = make_engine()
    attach = adapter.attach
    tell("another thing", lambda: attach(nn.Linear(2, 2), ROOT))
    tell("before initialize", lambda: attach(engine.module, ROOT))
    tell("own keys", lambda: attach(engine, ROOT, state={"rng": 1, "model": 2, "mine": 3}))
    foreign = ROOT.with_name("foreign")
    foreign.mkdir()
    (foreign / "zero_to_fp32.py").touch()
    tell("foreign root", lambda: attach(engine, foreign))
    other = ROOT.with_name("other")
    holdfast.save(other, {"note": 1}, step=3)
    tell("another program", lambda: attach(engine, other))
    version, deepspeed.__version__ = deepspeed.__version__, "0.18.2"
    tell("too old", lambda: attach(engine, ROOT))
    deepspeed.__version__ = version
    engine.has_moe_layers = True
    tell("experts", lambda: attach(engine, ROOT))
    engine.has_moe_layers = False
    for name, value in OF_OLDER_VERSIONS.items():
        setattr(engine, name, value)
        tell(f"has {name}", lambda: attach(engine, ROOT))
        setattr(engine, name, None)
    kind = type(engine.optimizer.optimizer)
    module = kind.__module__
    for name in ("fp16.onebit.adam", "zero.muon.muon_optimizer"):
        kind.__module__ = f"deepspeed.runtime.{name}"
        tell(name, lambda: attach(engine, ROOT))
    kind.__module__ = module
    optimizer, engine.optimizer = engine.optimizer, Strange()
    tell("unknown", lambda: attach(engine, ROOT))
    engine.optimizer = optimizer
    tell("emptied", lambda: holdfast.save(ROOT, {"model": engine.module}))
    tell("emptied engine", lambda: holdfast.save(ROOT, {"model": engine}))
    batch = torch.ones(4, 9)
    with attach(engine, ROOT) as ckpt:
        tell("twice", lambda: attach(engine, ROOT.with_name("more")))
        engine.backward(engine(batch).square().mean())
        engine.step()
        assert ckpt.step() is None
        tell("in an accumulation", ckpt.save)
        engine.backward(engine(batch).square().mean())
        engine.step()
        assert ckpt.step() is not None and ckpt.steps == 1
        saved = ckpt.save()
        assert saved is not None
        saved.wait_durable(60)
        for _ in range(2):
            engine.backward(engine(batch).square().mean())
            engine.step()
        saved = ckpt.save()  # before step(): the update that was made is saved, not the one before
        assert saved is not None and saved.step == engine.global_steps == 2
        saved.wait_durable(60)
        assert ckpt.step() is None and ckpt.steps == 2  # saved already
        shard = engine.module.net[0].weight.ds_tensor
        memory = shard.data
        shard.data = memory.clone()
        tell("moved", ckpt.save)
        shard.data = memory
    engine.module.net[0].__class__ = Extra
    tell("extra state", lambda: attach(engine, ROOT))


if __name__ == "__main__":
    main()
