"""Says which elements of a model the tensors of DeepSpeed's optimizers are, and makes copies anew.

DeepSpeed's optimizers hold one of torch's, whose tensors are rows of elements of all parameters, or
of a rank's share of them. Each is declared, so that leaves are whole and have the parameters'
names. What the model computes with are copies, which ``publish`` makes of them after a restore.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holdfast.accelerator.devices import memory_key
from holdfast.errors import UnsupportedState, UsageError
from holdfast.state.mapped.shards import FlatBuffer, FlatShard, declare
from holdfast.state.modules import parts

Range = tuple[str, tuple[int, ...], int, int, int]


class Partitions:
    """What is saved of an engine without ZeRO in fp32: its module and its optimizer."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.outer: Any = engine.optimizer
        self.module: nn.Module = engine.module
        self.optimizer: Any = getattr(self.outer, "optimizer", self.outer)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The optimizer's groups have their tensors meanwhile."""
        yield

    def publish(self) -> None:
        """Makes what the model computes with of what was restored."""

    def _names(self) -> dict[int, str]:
        """Returns the names of the engine's parameters, by their ids; the first of tied ones."""
        found: dict[int, str] = {}
        for name, parameter in _named(self.engine.module):
            found.setdefault(id(parameter), name)
        return found


class WholeMasters(Partitions):
    """16 bits without ZeRO: a master of all parameters of a group, on each rank."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        names = self._names()
        for flat, group in zip(self.outer.fp32_groups_flat, self.outer.fp16_groups, strict=True):
            declare(flat, FlatBuffer(_ranges(group, names, 0, flat.numel())))

    def publish(self) -> None:
        groups = zip(self.outer.fp32_groups_flat, self.outer.fp16_groups, strict=True)
        for flat, group in groups:
            sizes = [one.numel() for one in group]
            for one, new in zip(group, flat.data[: sum(sizes)].split(sizes), strict=True):
                one.data.copy_(new.view_as(one))


class SingleMasters(Partitions):
    """16 bits without ZeRO: a master of each parameter, on each rank."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        names = self._names()
        for master, one in self._pairs():
            declare(master, FlatShard(tuple(one.shape), 0, names[id(one)]))

    def publish(self) -> None:
        for master, one in self._pairs():
            one.data.copy_(master.data)

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        groups = zip(self.outer.fp32_groups, self.outer.fp16_groups, strict=True)
        for masters, group in groups:
            yield from zip(masters, group, strict=True)


class SharedMasters(Partitions):
    """ZeRO 1 and 2: of each group, a rank has the masters of a run of its elements.

    ``flats``: a rank's runs. ``groups``: the parameters of each group, in the order of its
    elements. ``shares``: views of what the model computes with, by the number of the rank.
    """

    def __init__(
        self,
        engine: Any,
        flats: Sequence[torch.Tensor],
        groups: Sequence[Sequence[torch.Tensor]],
        shares: Sequence[Sequence[torch.Tensor]],
        whole: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(engine)
        names = self._names()
        self._flats, self._shares, self._whole = flats, shares, whole
        for flat, group, number in zip(flats, groups, self._numbers(), strict=True):
            low = number * flat.numel()
            declare(flat, FlatBuffer(_ranges(group, names, low, low + flat.numel())))

    def publish(self) -> None:
        from deepspeed.runtime.utils import all_gather_dp_groups

        for flat, shares, number in zip(self._flats, self._shares, self._numbers(), strict=True):
            shares[number].data.copy_(flat.data)
        all_gather_dp_groups(
            groups_flat=self._whole,
            partitioned_param_groups=self._shares,
            dp_process_group=self.outer.real_dp_process_group,
            start_alignment_factor=self.outer.nccl_start_alignment_factor,
            allgather_bucket_size=self.outer.allgather_bucket_size,
        )

    def _numbers(self) -> list[int]:
        return [dist.get_rank(group=group) for group in self.outer.real_dp_process_group]


class EmptiedParameters(Partitions):
    """ZeRO 3: a rank has a run of the elements of each parameter, and its module has none of them.

    The module that is saved is another one: it has the shards under the parameters' names.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._shards: list[tuple[str, Any, nn.Parameter]] = []
        self.module = self._make_shell()
        names = self._names()
        for flat, group in zip(
            self.outer.fp32_partitioned_groups_flat, self.outer.fp16_groups, strict=True
        ):
            ranges, at = [], 0
            for one in group:
                start, size = _run(one)
                ranges.append((names[id(one)], tuple(one.ds_shape), start, size, at))
                at += one.partition_numel()
            declare(flat, FlatBuffer(ranges))

    @contextmanager
    def shown(self) -> Iterator[None]:
        for name, parameter, shard in self._shards:
            if memory_key(shard) != memory_key(parameter.ds_tensor) and shard.numel():
                raise UnsupportedState(
                    f"DeepSpeed has moved the elements of {name} since attach(): attach after "
                    "the engine is at its place",
                    leaf=name,
                )
        self.outer._set_fp32_optimizer_param_groups()
        try:
            yield
        finally:
            self.outer._clear_fp32_optimizer_param_groups()

    def publish(self) -> None:
        outer = self.outer
        outer.checkpoint_event_prologue()
        flats = outer.fp32_partitioned_groups_flat
        for flat, lower in zip(flats, outer.fp16_partitioned_groups_flat, strict=True):
            if memory_key(flat) != memory_key(lower):
                lower.data.copy_(flat.data)
        outer.checkpoint_event_epilogue()

    def _make_shell(self) -> nn.Module:
        shell = _Shell()
        made: dict[int, nn.Parameter] = {}
        for prefix, part in parts(self.engine.module):
            if type(part).get_extra_state is not nn.Module.get_extra_state:
                raise UnsupportedState(
                    f"{prefix or 'the model'} has extra state, which is not kept under ZeRO 3: "
                    "put that under a key of its own, by state=",
                    where=prefix,
                )
            inside = shell.below(prefix)
            # The very dicts: what the module puts into its buffers is saved.
            inside._buffers = part._buffers
            inside._non_persistent_buffers_set = part._non_persistent_buffers_set
            for name, parameter in part._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in made:
                    made[id(parameter)] = self._make_shard(f"{prefix}.{name}", parameter)
                inside.register_parameter(name, made[id(parameter)])
        return shell

    def _make_shard(self, name: str, parameter: Any) -> nn.Parameter:
        start, _ = _run(parameter)
        shard = nn.Parameter(parameter.ds_tensor.data, requires_grad=parameter.requires_grad)
        declare(shard, FlatShard(tuple(parameter.ds_shape), start))
        self._shards.append((name, parameter, shard))
        return shard


class _Shell(nn.Module):
    """Has the shards of a module under the names of its parameters; never called."""

    def below(self, prefix: str) -> _Shell:
        """Returns the module at a path, which is made where it is not there."""
        found: nn.Module = self
        for name in prefix.split(".") if prefix else ():
            if name not in found._modules:
                found.add_module(name, _Shell())
            found = found._modules[name]  # type: ignore[assignment]
        assert isinstance(found, _Shell)
        return found


def find_partitions(engine: Any) -> Partitions:
    """Returns how an engine keeps its state; raises UsageError for an optimizer it does not know.

    It is called when the engine is whole, and declares the optimizer's tensors.
    """
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    outer, kind = engine.optimizer, type(engine.optimizer)
    if isinstance(outer, torch.optim.Optimizer):
        return Partitions(engine)
    if kind is FP16_Optimizer:
        return WholeMasters(engine)
    if kind is FP16_UnfusedOptimizer:
        return SingleMasters(engine)
    if kind is DeepSpeedZeroOptimizer:
        return SharedMasters(
            engine,
            outer.single_partition_of_fp32_groups,
            outer.round_robin_bit16_groups,
            outer.parallel_partitioned_bit16_groups,
            outer.bit16_groups_flat,
        )
    if kind is BF16_Optimizer and getattr(outer, "fp32_groups_flat_partition", None):
        return SharedMasters(
            engine,
            outer.fp32_groups_flat_partition,
            outer.bf16_groups,
            outer.bf16_partitioned_groups,
            outer.bf16_groups_flat,
        )
    if kind is DeepSpeedZeroOptimizer_Stage3:
        _refuse_elsewhere(engine, outer)
        return EmptiedParameters(engine)
    raise UsageError(
        f"attach() does not know {kind.__qualname__}: it knows the optimizers of ZeRO 0 to 3 in "
        "fp32, bf16 and fp16"
    )


def _refuse_elsewhere(engine: Any, outer: Any) -> None:
    """Raises UsageError for an engine of ZeRO 3 that has elements in other places too."""
    found = {
        "optimizer state on NVMe": outer.swap_optimizer,
        "parameters on NVMe": outer.params_in_nvme_and_cpu,
        "a part of the optimizer offloaded (offload_optimizer.ratio)": outer.offload_optimizer
        and outer.partial_offload < 1,
        "zero_hpz_partition_size": engine.zero_hpz_partition_size() > 1,
    }
    for what, has_it in found.items():
        if has_it:
            raise UsageError(f"attach() does not know ZeRO 3 with {what}: leave that out")


def _named(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix, part in parts(module):
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{name}" if prefix else name, parameter


def _ranges(
    group: Iterable[torch.Tensor], names: dict[int, str], low: int, high: int
) -> list[Range]:
    """Returns the ranges of a row of parameters that are between two of its elements."""
    found: list[Range] = []
    at = 0
    for one in group:
        first, last = max(at, low), min(at + one.numel(), high)
        size = max(last - first, 0)
        place = (first - at, size, first - low) if size else (0, 0, 0)
        found.append((names[id(one)], tuple(one.shape), *place))
        at += one.numel()
    return found


def _run(parameter: Any) -> tuple[int, int]:
    """Returns the first element of a parameter on this rank, and how many; without padding."""
    size, whole = int(parameter.partition_numel()), int(parameter.ds_numel)
    start = min(dist.get_rank(group=parameter.ds_process_group) * size, whole)
    return start, min(size, whole - start)
