"""Makes mistakes with the adapter of Megatron-Core on one rank: each is an error by name.

usage: megatron_mistakes.py DIRECTORY/a -1 none; see ``test_megatron.py``
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from integrations import megatron_run as run
from integrations import witness

# isort: split
from megatron.core import num_microbatches_calculator, parallel_state, tensor_parallel

import holdfast
from holdfast.errors import UnsupportedState, UsageError
from holdfast.integrations import megatron as adapter

ROOT = Path(sys.argv[1]).parent


def refused(pattern: str, *given: Any, **options: Any) -> None:
    with pytest.raises(UsageError, match=pattern):
        adapter.attach(*given, **options)


def train(model: Any, optimizer: Any) -> None:
    tokens = torch.arange(16)[None]
    mask = torch.tril(torch.ones(16, 16))[None, None] < 0.5
    model.zero_grad_buffer()
    model(tokens, tokens, mask, labels=tokens).mean().backward()
    optimizer.step()


def check_ramp_up(model: Any, optimizer: Any, scheduler: Any, root: Path) -> None:
    """The global batch grows from where it was, whatever the loop has kept of its samples."""
    for saved in (0, 12, 16):
        num_microbatches_calculator.destroy_num_microbatches_calculator()
        num_microbatches_calculator.init_num_microbatches_calculator(0, [4, 4, 90], 16, 2, 1, False)
        with adapter.attach(model, optimizer, scheduler, root, memory=None) as ckpt:
            batch = num_microbatches_calculator.get_current_global_batch_size()
            assert batch == (saved or 4), batch
            assert num_microbatches_calculator.get_num_microbatches() == batch // 2
            num_microbatches_calculator.update_num_microbatches(75 if saved == 0 else 91)
            ckpt.step()
            handle = ckpt.save()
            assert handle is not None
            handle.wait_durable(60)
    num_microbatches_calculator.destroy_num_microbatches_calculator()


def main() -> None:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    tensor_parallel.get_cuda_rng_tracker()
    witness.OPTIONS.update(distributed=True)
    model = run.make_model()
    optimizer = run.make_optimizer(model)
    where, given = ROOT / "a", (model, optimizer, None)

    refused(r"model_parallel_cuda_manual_seed\(seed\) first", *given, where)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    refused("got a GPTModel: wrap it before", model.module, optimizer, None, where)
    refused("takes one model chunk, got 2", [model, model], optimizer, None, where)
    inner = optimizer.chained_optimizers[0].optimizer
    refused("got a AdamW: it keeps DistributedOptimizer", model, inner, None, where)
    refused("are in none of the model chunks", run.make_model(), optimizer, None, where)
    refused("keys rng, which are Megatron's own", *given, where, state={"rng": 1})
    foreign = ROOT / "foreign"
    foreign.mkdir()
    (foreign / "latest_checkpointed_iteration.txt").write_text("10")
    refused("Megatron-LM, and is no root of Holdfast", *given, foreign)
    model.ddp_config.overlap_param_gather = True
    refused("overlap_param_gather=True", *given, where)
    model.ddp_config.overlap_param_gather = False
    witness.OPTIONS.update(experts=2)
    mixed = run.make_model()
    witness.OPTIONS.pop("experts")
    layer = mixed.module.decoder.layers[1].mlp
    some, layer.experts = layer.experts, torch.nn.Linear(2, 2)
    refused("layers.1.mlp.experts is a Linear, which numbers", mixed, optimizer, None, where)
    layer.experts = some
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_state, "get_expert_tensor_parallel_world_size", lambda: 2)
        refused("2 tensor parallel ranks of experts beside 1", mixed, optimizer, None, where)
    check_ramp_up(*given, ROOT / "ramp")
    first = next(iter(model.module.parameters()))
    first.partition_stride = 3
    refused("embedding.* is cut into 3 stretches", *given, where)
    first.partition_stride = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron.core.__version__", "0.15.3")
        refused(r"needs megatron 0\.16 or later, got 0\.15\.3", *given, where)

    # Handed over without the adapter, its moments are in no state_dict: before the first step, and
    # after it.
    with pytest.raises(
        UnsupportedState, match=r"ChainedOptimizer, whose state_dict failed.*torch Adam"
    ):
        holdfast.Checkpointer(ROOT / "early", {"model": model, "optimizer": optimizer})
    train(model, optimizer)
    with pytest.raises(
        UnsupportedState, match=r"chained_optimizers\[0\].optimizer is a torch Adam"
    ):
        holdfast.save(ROOT / "bare", {"model": model, "optimizer": optimizer})

    with adapter.attach(*given, where, memory=None) as ckpt:
        refused("attached to this GPTModel already", *given, ROOT / "b")
        assert ckpt.save.__doc__ and ckpt.restored is None and ckpt.steps == 0
        with pytest.raises(UsageError, match="before the first step"):
            ckpt.save()
        ckpt.step()
        saved = ckpt.save()
        assert saved is not None
        saved.wait_durable(60)
        assert ckpt.checkpointer.root == str(where)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "_ranks", lambda: {"world": 1, "tensor": 1, "context": 2})
        refused(
            "saved on 1 ranks, 1 tensor and 1 context.* there are 1 ranks, 1 tensor and 2 context",
            *given,
            where,
        )
    holdfast.save(ROOT / "other", {"model": torch.nn.Linear(2, 2)}, step=3)
    refused(r"not written by holdfast\.integrations\.megatron", *given, ROOT / "other")
    print("all refused")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
