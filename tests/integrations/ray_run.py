"""Trains a small model on two workers of Ray Train, writes down what it sees; a worker is killed.

usage: ray_run.py ROOT STEP PLACE [OPTIONS AS JSON]; see ``test_ray.py``
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT, STEP, PLACE = sys.argv[1], int(sys.argv[2]), sys.argv[3]
OPTIONS: dict[str, Any] = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}


def train(config: dict[str, Any]) -> None:
    """What a worker does. Ray sends it to another process, so it imports what it needs."""
    import hashlib
    import shutil
    import signal
    import warnings

    import ray.train
    import torch
    from ray.train.torch import prepare_model
    from torch import nn

    import holdfast
    from holdfast.integrations.ray import checkpointer, report

    warnings.filterwarnings("ignore")
    root, options = config["root"], config["options"]
    rank = ray.train.get_context().get_world_rank()

    def note(line: str) -> None:
        with Path(f"{root}.log").open("a") as file:
            file.write(f"{rank}: {line}\n")

    kills = [[config["place"], config["step"], options.get("victim", 0), options.get("clear")]]

    def pass_by(place: str, step: int) -> None:
        for number, (where, when, victim, clears) in enumerate(options.get("kills", kills)):
            died = Path(f"{root}.died{number or ''}")
            if (where, when, victim) != (place, step, rank) or died.exists():
                continue
            died.touch()
            note(f"killed {step} {place} {bool(clears)}")
            if clears:  # as on a node that is not there any more
                for left in Path(os.environ["HOLDFAST_ARENA_DIR"]).iterdir():
                    shutil.rmtree(left, ignore_errors=True)
            os.kill(os.getpid(), signal.SIGKILL)

    def digest(tensors: Any) -> str:
        found = hashlib.sha256()
        for tensor in tensors:
            found.update(tensor.detach().contiguous().numpy().tobytes())
        return found.hexdigest()[:12]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.GELU(), nn.Linear(32, 8))
    model = prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    state = {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "rng": holdfast.Rng(),
        "seen": {"samples": 0},
    }
    counts: Any = state["seen"]
    state.pop(options.get("leaves_out", ""), None)  # as by one who has forgotten it
    ckpt = checkpointer(state, options.get("own"), storage=holdfast.Every(steps=5))
    counts = ckpt.state.get("seen", counts)
    if ckpt.restored is not None:
        source = ckpt.restored.source
        note(f"restored {ckpt.steps} {source} {ckpt.checkpointer.root}")
    for step in range(ckpt.steps + 1, options.get("steps", 20) + 1):
        pass_by("begin", step)
        drawn = torch.Generator().manual_seed(step * 2 + rank)
        batch = torch.randn(4, 8, generator=drawn)
        loss = (model(batch) - batch.flip(1)).square().mean()
        pass_by("forward", step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        counts["samples"] += 4
        pass_by("update", step)
        moments = (optimizer.state[p][kind] for p in model.parameters() for kind in ("exp_avg",))
        rate = schedule.get_last_lr()
        seen = counts["samples"]
        note(f"step {step} {digest(model.parameters())} {digest(moments)} {rate} {seen}")
        report({"loss": loss.item()}, step=step, wait=options.get("wait", 0) == step)
        pass_by("report", step)
    ckpt.close()
    report_after(report)


def report_after(report: Any) -> None:
    from holdfast.errors import UsageError

    try:
        report({})
    except UsageError:
        return
    raise AssertionError("report() works without a Checkpointer")


def main() -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from holdfast.integrations.ray import reference

    wanted = ("PYTHONPATH", "HOLDFAST_ARENA_DIR", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
    env = {name: os.environ[name] for name in wanted if name in os.environ}
    ray.init(num_cpus=3, include_dashboard=False, runtime_env={"env_vars": env})
    trainer = TorchTrainer(
        train,
        train_loop_config={"root": ROOT, "step": STEP, "place": PLACE, "options": OPTIONS},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="run",
            storage_path=f"{ROOT}-ray",
            failure_config=FailureConfig(max_failures=len(OPTIONS.get("kills", [1]))),
        ),
    )
    result = trainer.fit()
    found = None if result.checkpoint is None else reference(result.checkpoint)
    print("reference", json.dumps(found), flush=True)
    print("metrics", json.dumps(result.metrics), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
