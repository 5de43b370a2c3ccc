"""Keeps and resumes loops of Megatron-Core, at every iteration and to the bit.

Megatron's optimizers hold one of torch's, whose tensors are parts of the model's that only the
optimizer knows of: ``attach`` declares them. Parameters that are cut over tensor parallel ranks
become whole leaves by rules, and the layers of a pipeline stage have their numbers in the whole
model, as have the experts of an expert parallel rank. So a checkpoint has the model as one rank
would have it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holdfast import rules
from holdfast.errors import UsageError
from holdfast.integrations.attached import AttachedCheckpointer, present
from holdfast.integrations.seam import Adapter, missing, one_or_all
from holdfast.state.mapped.shards import FlatShard, declare
from holdfast.state.rng import Rng

try:
    import megatron.core as megatron
    from megatron.core import num_microbatches_calculator, parallel_state
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import (
        Float16OptimizerWithFloat16Params,
        FP32Optimizer,
    )
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer
except ImportError as error:
    raise missing("megatron", error) from error

from holdfast.integrations.megatron_strategies import (
    HoldfastLoadStrategy,
    HoldfastSaveStrategy,
)

__all__ = [
    "Generators",
    "HoldfastLoadStrategy",
    "HoldfastSaveStrategy",
    "MegatronCheckpointer",
    "attach",
    "whole_model_rules",
]

_LOOP = "megatron"
_KEYS = (_LOOP, "model", "optimizer", "scheduler", "scaler", "rng")
_ADAPTER = Adapter("megatron", "0.16", _KEYS, "Megatron's")
#: The two names of a weight that the first stage of a pipeline and the last one share.
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_SHARED = "share_embeddings_and_output_weights"
_OPTIMIZERS = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)


def attach(
    model_chunks: nn.Module | Sequence[nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: Any,
    root: str | os.PathLike[str],
    rng: bool = True,
    *,
    state: Mapping[str, Any] | None = None,
    step: int | str | None = None,
    **options: Any,
) -> MegatronCheckpointer:
    """Attach a Checkpointer to a loop of Megatron-Core, and go on from its newest generation.

    Call it after ``get_megatron_optimizer``, on all ranks.

    ``model_chunks``: the model in its DistributedDataParallel, or a list of it. ``optimizer``: what
    ``get_megatron_optimizer`` returned. ``scheduler``: its OptimizerParamScheduler, or None.
    ``root`` and ``options``: as for ``Checkpointer``; ``rules=`` takes the place of those that make
    whole leaves of tensor parallel parameters; the layers of a pipeline stage, and the experts of a
    rank, have their numbers in the whole model before. ``rng``: keeps the generators of each rank,
    those of the model parallel tracker among them. ``state``: more objects and values to be kept,
    by key. ``step``: go on from this step instead, or from a generation as "incarnation-step".

    Raises UsageError for a model or an optimizer that the adapter cannot keep, and for generators
    of another layout of ranks.
    """
    more = _ADAPTER.check(megatron.__version__, root, state)
    model = _unwrapped(model_chunks)
    parts = _optimizers(optimizer)
    _check_layout(model, parts)
    if rng and not get_cuda_rng_tracker().get_states():
        raise UsageError(
            "rng=True, and Megatron's tracker of generators is empty: call "
            "tensor_parallel.model_parallel_cuda_manual_seed(seed) first, or give rng=False"
        )
    named = _in_whole_model(model)
    for part in parts:
        _declare_shards(named, part)
    options.setdefault("rules", whole_model_rules(named))
    return MegatronCheckpointer(os.fspath(root), model, parts, scheduler, rng, more, step, options)


class MegatronCheckpointer(AttachedCheckpointer):
    """A Checkpointer attached to a loop of Megatron-Core, made by ``attach``."""

    def __init__(
        self,
        root: str,
        model: nn.Module,
        parts: Sequence[MegatronOptimizer],
        scheduler: Any,
        rng: bool,
        more: Mapping[str, Any],
        step: int | str | None,
        options: Mapping[str, Any],
    ) -> None:
        kept: dict[str, Any] = {
            "model": _in_whole_model(model),
            "optimizer": one_or_all(part.optimizer for part in parts),
            "scheduler": scheduler,
            "scaler": getattr(parts[0], "grad_scaler", None),
            "rng": Generators() if rng else None,
        }
        now = {**_ranks(), "rng": rng}
        super().__init__(model, root, _LOOP, now, {**present(kept), **more}, options)

        def check() -> None:
            saved = dict(self._state[_LOOP])
            _ramp_up_to(saved.pop("batch", None))
            _check_generators(saved, now)

        self._restore(step, check)

    def _shown(self) -> AbstractContextManager[None]:
        ramp = _ramp_up()
        if ramp is not None:
            self._state[_LOOP]["batch"] = ramp.current_global_batch_size
        return nullcontext()


class Generators(Rng):
    """The generators of a rank, with the states of Megatron's tracker."""

    def state_dict(self) -> dict[str, Any]:
        """Return the generators' states as plain values."""
        states = get_cuda_rng_tracker().get_states()
        tracked = {name: _bytes_of(one) for name, one in states.items()}
        return {**super().state_dict(), "tracker": tracked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators to these states."""
        super().load_state_dict(state)
        tracker = get_cuda_rng_tracker()
        now = tracker.get_states()
        for name, found in state["tracker"].items():
            tensor = torch.frombuffer(bytearray(found), dtype=torch.uint8)
            if isinstance(now.get(name), torch.Generator):
                now[name].set_state(tensor)
            else:
                now[name] = tensor
        tracker.set_states(now)


def _ramp_up() -> Any:
    """Returns Megatron's calculator of microbatches if it lets the batch grow, else None."""
    found = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    return found if hasattr(found, "rampup_samples_per_increment") else None


def _ramp_up_to(batch: int | None) -> None:
    """Lets the calculator go on with a global batch of this size; None leaves it as it is."""
    ramp = _ramp_up()
    if ramp is None or batch is None:
        return
    samples = ramp.ramup_samples + 1
    if batch < ramp.global_batch_size:
        increments = (batch - ramp.start_global_batch_size) // ramp.batch_size_increment
        samples = (increments + 0.5) * ramp.rampup_samples_per_increment
    ramp.update(samples, consistency_check=False)


def _bytes_of(state: Any) -> bytes:
    tensor = state.get_state() if isinstance(state, torch.Generator) else state
    return bytes(tensor.cpu().numpy())


# ── what is attached ─────────────────────────────────────────────────────────────────────────────


def _unwrapped(model_chunks: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """Returns the model inside of Megatron's wrappers."""
    chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
    if len(chunks) != 1:
        raise UsageError(
            f"attach() takes one model chunk, got {len(chunks)}: virtual pipeline stages number "
            "their layers anew in each chunk, and are not kept yet"
        )
    model = chunks[0]
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"attach() takes a model in megatron.core.distributed.DistributedDataParallel, got a "
            f"{type(model).__qualname__}: wrap it before get_megatron_optimizer (Megatron's FSDP "
            "is not kept)"
        )
    if model.ddp_config.overlap_param_gather:
        raise UsageError(
            "overlap_param_gather=True: parameters are gathered in the next forward, so that a "
            "step has no whole model to be saved. Set it to False"
        )
    while isinstance(model, DistributedDataParallel | Float16Module):
        model = model.module
    inner: nn.Module = model
    return inner


def _optimizers(optimizer: Any) -> list[MegatronOptimizer]:
    """Returns the optimizers of a chain that have parameters."""
    chain = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    for one in chain:
        if type(one) not in _OPTIMIZERS:
            raise UsageError(
                f"attach() takes what get_megatron_optimizer returned, got a "
                f"{type(one).__qualname__}: it keeps "
                f"{', '.join(kind.__name__ for kind in _OPTIMIZERS)} and chains of them"
            )
    found = [one for one in chain if not one.is_stub_optimizer]
    for one in found:
        _check_optimizer(one)
    if not found:
        raise UsageError("the optimizer has no parameters on this rank: there is nothing to keep")
    return found


def _check_optimizer(one: MegatronOptimizer) -> None:
    if not isinstance(one.optimizer, torch.optim.Optimizer) or one.config.optimizer_cpu_offload:
        raise UsageError(
            f"the {type(one).__qualname__} has a {type(one.optimizer).__qualname__} inside, with "
            "moments in places of its own: only one of torch's, or derived from it, is kept, "
            "without optimizer_cpu_offload"
        )
    if one.config.use_precision_aware_optimizer:
        raise UsageError(
            "use_precision_aware_optimizer=True keeps the masters in Transformer Engine's "
            "optimizer, where they are not kept yet: set it to False"
        )


def _ranks() -> dict[str, Any]:
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    experts = parallel_state.get_expert_model_parallel_world_size()
    return {
        "world": dist.get_world_size(),
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        **({"stages": stages} if stages > 1 else {}),
        **({"experts": experts} if experts > 1 else {}),
    }


def _check_layout(model: nn.Module, parts: Iterable[MegatronOptimizer]) -> None:
    """Raises UsageError for a layout of ranks that cannot be told by rules."""
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    config = getattr(model, "config", None)
    if getattr(config, "num_moe_experts", None):
        _check_experts(model, tensor)
    groups = getattr(config, "num_query_groups", None) or tensor
    if groups % tensor:
        raise UsageError(
            f"{groups} query groups over {tensor} tensor parallel ranks: several ranks have the "
            "same group, which is not kept yet. Take a divisor of the groups"
        )
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    in_stage = dist.get_world_size() // stages
    if parallel_state.get_pipeline_model_parallel_rank() != dist.get_rank() // in_stage:
        raise UsageError(
            "the ranks of a pipeline stage are not neighbours: initialize_model_parallel with an "
            'order= that ends with "pp"'
        )
    if parallel_state.get_tensor_model_parallel_rank() != dist.get_rank() % tensor:
        raise UsageError(
            "tensor parallel ranks are not neighbours: initialize_model_parallel with an order= "
            'that begins with "tp"'
        )


def _check_experts(model: nn.Module, tensor: int) -> None:
    """Raises UsageError for experts that are no modules of their own, or that are cut otherwise."""
    for name, part in model.named_modules():
        if isinstance(part, BaseMoELayer) and not isinstance(part.experts, SequentialMLP):
            raise UsageError(
                f"{name}.experts is a {type(part.experts).__qualname__}, which numbers its experts "
                "anew in the names of parameters, or has several in one, and is not kept yet: set "
                "moe_grouped_gemm=False, which makes a SequentialMLP"
            )
    if parallel_state.get_expert_tensor_parallel_world_size() != tensor:
        raise UsageError(
            f"{parallel_state.get_expert_tensor_parallel_world_size()} tensor parallel ranks of "
            f"experts beside {tensor} of other layers are not kept yet: give "
            "expert_tensor_parallel_size the same number"
        )


def _check_generators(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises UsageError where generators would go to ranks with another part of the model."""
    if now["rng"] and not saved["rng"]:
        raise UsageError(
            "the run was saved with rng=False and has no generators: give rng=False, or another "
            "root"
        )
    if now["rng"] and saved != now:
        then, here = (
            f"{one['world']} ranks, {one['tensor']} tensor and {one['context']} context parallel, "
            f"{one.get('stages', 1)} pipeline stages, {one.get('experts', 1)} expert parallel"
            for one in (saved, now)
        )
        raise UsageError(
            f"the run was saved on {then}, and now there are {here}: no rank's generators are "
            "those of another layout. rng=False goes on with the generators as they were seeded"
        )


# ── the parts of tensors ─────────────────────────────────────────────────────────────────────────


def _declare_shards(model: nn.Module, part: MegatronOptimizer) -> None:
    """Declares for the tensors that an optimizer updates which elements of which parameter they
    are.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, tensor, start in _updated(part):
        if id(parameter) not in names:
            raise UsageError(
                "the optimizer updates parameters that are in none of the model chunks: give both "
                "to attach() as they were given to get_megatron_optimizer"
            )
        declare(tensor, _part(names[id(parameter)], parameter, start))


def _part(name: str, parameter: torch.Tensor, start: int) -> FlatShard:
    """Returns which elements of a parameter a tensor has that begins at number ``start`` of it.

    They are those of all ranks' parts, one behind another: the rules say what these are.
    """
    local = list(parameter.shape)
    if not _is_cut(parameter):
        return FlatShard(local, start, name)
    dim, _ = _cut_of(name, parameter)
    whole, offsets = list(local), [0] * len(local)
    whole[dim] *= parallel_state.get_tensor_model_parallel_world_size()
    offsets[dim] = local[dim] * parallel_state.get_tensor_model_parallel_rank()
    return FlatShard(whole, start, name, (offsets, local))


def _is_cut(parameter: torch.Tensor) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def _cut_of(name: str, parameter: Any) -> tuple[int, int]:
    """Returns the dimension in which a parameter is cut, and its stretches on each rank."""
    dim, stretches = parameter.partition_dim, parameter.partition_stride
    if stretches not in (1, 2):
        raise UsageError(
            f"{name} is cut into {stretches} stretches on each rank (partition_stride), and is not "
            "kept yet: 1 and 2 are"
        )
    return dim, stretches


def _updated(part: MegatronOptimizer) -> Iterator[tuple[nn.Parameter, torch.Tensor, int]]:
    """Yields (parameter, tensor that is updated for it, its first element in the parameter)."""
    if isinstance(part, DistributedOptimizer):
        for parameters, shards in (
            (part.model_fp32_groups, part.shard_fp32_groups),
            (part.model_float16_groups, part.shard_fp32_from_float16_groups),
        ):
            for parameter, shard in _pairs(parameters, shards):
                found = part._get_model_param_range_map(parameter)["param"]
                yield parameter, shard, found.start
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        for parameter, master in _pairs(part.float16_groups, part.fp32_from_float16_groups):
            yield parameter, master, 0


def _pairs(some: Iterable[Any], others: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    for group, other in zip(some, others, strict=True):
        yield from zip(group, other, strict=True)


def whole_model_rules(model: nn.Module) -> rules.Rules:
    """Returns the rules by which a rank's part of a model is stored as one rank would have it.

    ``model``: inside of Megatron's wrappers, built on all ranks. Raises UsageError for a parameter
    that is cut into more stretches than two on each rank.
    """
    ranks = _ranks()
    tensor, stages = ranks["tensor"], ranks.get("stages", 1)
    found: list[tuple[Any, ...]] = [
        (name, _cut(name, parameter, tensor))
        for name, parameter in model.named_parameters()
        if _is_cut(parameter)
    ]
    names = dict(model.named_parameters())
    if stages > 1 and _OUTPUT in names and getattr(model, _SHARED, False):
        kinds = [kind for name, *some in found if name == _OUTPUT for kind in some]
        found = [one for one in found if one[0] != _OUTPUT]
        found.append((_OUTPUT, *kinds, *rules.tied(_EMBEDDING)))
    mesh = {"pp": stages, "dp": ranks["world"] // tensor // stages, "tp": tensor}
    return rules.Rules(found, mesh)


def _cut(name: str, parameter: torch.Tensor, tensor: int) -> rules.Kind:
    """Returns what a parameter is on each rank: a part, or two parts side by side (gate and up)."""
    dim, stretches = _cut_of(name, parameter)
    if stretches == 1:
        return rules.shard(dim, "tp")
    whole = parameter.shape[dim] * tensor
    half = whole // 2
    halves = [
        (f"{name}.{number}", rules.part_of(name, dim, at=number * half, whole=whole))
        for number in (0, 1)
    ]
    return rules.fused(dim, [half, half], halves, over="tp")


# ── the layers of a stage ────────────────────────────────────────────────────────────────────────


class Stage(nn.Module):
    """The modules of a pipeline stage, its layers under their numbers in the whole model; never
    called.
    """

    def __init__(self, module: nn.Module, path: str, numbers: Mapping[str, str]) -> None:
        super().__init__()
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise UsageError(
                f"{path or 'the model'} has extra state around the layers of a pipeline stage, "
                "which is not kept yet: put that under a key of its own, by state="
            )
        # The very dicts: what the module puts into its buffers is saved.
        self._parameters, self._buffers = module._parameters, module._buffers
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        self.share_embeddings_and_output_weights = getattr(module, _SHARED, False)
        for name, child in module._modules.items():
            below = f"{path}.{name}" if path else name
            if child is not None and any(one.startswith(f"{below}.") for one in numbers):
                child = Stage(child, below, numbers)
            self.add_module(numbers.get(below, name), child)


def _in_whole_model(model: nn.Module) -> nn.Module:
    """Returns a model whose layers and experts have their numbers in the whole one; itself where
    they do.
    """
    found = ((path, getattr(part, "layer_number", None)) for path, part in model.named_modules())
    numbered = {path: str(number - 1) for path, number in found if number}
    others = {
        path: number
        for path, number in numbered.items()
        if path.rpartition(".")[2].isdecimal() and path.rpartition(".")[2] != number
    }
    first = parallel_state.get_expert_model_parallel_rank()
    for path, part in model.named_modules():
        if isinstance(part, SequentialMLP) and first:
            for number in range(part.num_local_experts):
                whole = str(first * part.num_local_experts + number)
                others[f"{path}.local_experts.{number}"] = whole
    return Stage(model, "", others) if others else model
