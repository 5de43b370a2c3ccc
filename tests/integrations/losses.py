"""What is taken away from runs of each framework, which ``test_losses.py`` kills and resumes so.

A loss is a key of the state, or a value in what the object under a key gives, as ``witness.py``
names them. docs/integrations.md lists them.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Loss(NamedTuple):
    """A run that is killed and resumed by an adapter that has forgotten something."""

    framework: str
    what: str
    step: int
    place: str
    options: dict[str, Any]


def losses(framework: str, step: int, place: str, *what: str, **options: Any) -> list[Loss]:
    return [Loss(framework, each, step, place, options) for each in what]


#: Loops of accelerate on engines of DeepSpeed.
ENGINES = "accelerate_deepspeed"
OF_LOADERS = ("loaders/batches", "loaders/generators")
#: Two stages of a pipeline, of which one loses what it has.
STAGES: dict[str, Any] = {
    "ranks": 2,
    "parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"},
    "steps": 6,
    "layers": 2,
}
LOSSES = [
    *losses("accelerate", 10, "save", "model", "optimizer", "scheduler", "rng", "registered"),
    *losses("accelerate", 20, "save", "accelerate/steps", seedable=False),
    *losses("accelerate", 20, "save", *(f"accelerate/{one}" for one in OF_LOADERS), seedable=False),
    *losses("accelerate", 20, "save", "accelerate/loaders/epoch"),
    *losses("accelerate", 10, "save", "accelerate/loaders/sampler", loader="resumable"),
    *losses(ENGINES, 10, "save", "model", stage=0),  # of ZeRO's the masters have it too
    *losses(ENGINES, 10, "save", "optimizer", "scheduler", "rng", stage=2),
    *losses(ENGINES, 10, "save", "engine/counters", "engine/scaler", stage=2, precision="fp16"),
    *losses("lightning", 20, "batch end", "model", "optimizer", "scheduler", "rng"),
    *losses("lightning", 20, "batch end", *(f"lightning/{one}" for one in OF_LOADERS)),
    *losses("lightning", 20, "batch end", "lightning/loops", "lightning/hooks"),
    *losses("lightning", 20, "batch end", "lightning/callbacks", average=True),
    *losses("lightning", 20, "batch end", "lightning/added/0/means", "lightning/added/0/sums"),
    *losses("lightning", 18, "batch end", "optimizer", "scheduler", manual=True),
    *losses("transformers", 11, "end", "model", "optimizer", "scheduler", "rng", "trainer/log"),
    *losses("transformers", 11, "end", "trainer/loss", "trainer/losses_before"),
    *losses("transformers", 11, "end", "trainer/epoch", "trainer/updates", "trainer/last_logged"),
    *losses("torchtitan", 7, "save", "model", "optimizer", "lr_scheduler", "rng"),
    *losses("torchtitan", 7, "save", "dataloader", "train_state"),
    *losses("torchtitan", 5, "save", "model", loser=1, **STAGES),
    *losses("deepspeed", 7, "save", "model", "optimizer", "scheduler", "rng", "client_state"),
    *losses("deepspeed", 7, "save", "deepspeed/counters", "deepspeed/scaler", precision="fp16"),
    *losses("deepspeed", 7, "save", "scaler", autocast=True),
    *losses("megatron", 7, "save", "model", "optimizer", "scheduler", "rng", ranks=2),
    *losses("megatron", 7, "save", "rng/tracker", tp=2, ranks=2),
    *losses("megatron", 7, "save", "optimizer", ranks=2, distributed=True, bf16=True),
    *losses("torchft", 9, "save", "model", "optimizer", "schedule", "rng"),
    *losses("ray", 9, "report", "model", "optimizer", "schedule", "rng", "seen"),
]
