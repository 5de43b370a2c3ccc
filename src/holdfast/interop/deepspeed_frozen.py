"""Reads parameters without a gradient after ZeRO-3: each rank's model file has a run of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from holdfast.interop.deepspeed_files import TagFiles
from holdfast.interop.foreign import ForeignLeaf
from holdfast.interop.parameter_partition import partition_cuts


def add_frozen(
    files: TagFiles,
    module: dict[str, Any],
    models: Mapping[int, str],
    optimizers: Mapping[int, str],
    masters: Collection[str],
) -> list[str]:
    """Add them to ``module``. What is elsewhere, or tied, has a placeholder there, which is
    removed; returns the names of those that no file fills.

    ``models`` and ``optimizers``: the files of the data-parallel ranks.
    """
    models = {rank: name for rank, name in models.items() if rank >= 0}
    if not models:
        return []
    count = 1 + max(models)
    some = models[min(models)]
    main = files.value(some)
    ranks = 1 + max(optimizers, default=-1)
    wanted = [(some, rank) for rank in range(max(count, ranks)) if rank not in models]
    if optimizers:
        wanted += [(optimizers[min(optimizers)], rank) for rank in range(ranks, count)]
    if wanted:
        name = re.sub(r"pp_rank_[0-9]+", f"pp_rank_{wanted[0][1]}", wanted[0][0])
        raise files.missing(name, f"{max(count, ranks)} ranks' files, if all are of one save")
    for file in models.values():
        if files.value(file).get("global_steps") != main.get("global_steps"):
            raise files.error(file, "its global_steps are of another save")
    for name, shape in (main.get("frozen_param_shapes") or {}).items():
        boxes, dtype = [], ""
        for rank, file in sorted(models.items()):
            ref: Any = (files.value(file).get("frozen_param_fragments") or {}).get(name)
            for _, begin, start, size in partition_cuts({name: shape}, rank, count):
                boxes += files.run(file, ref, begin, start, size, shape, 0)
                if ref.dtype != (dtype := dtype or ref.dtype):
                    raise files.error(file, f"{name!r:.200} is {ref.dtype}, not {dtype}")
        module[name] = ForeignLeaf(dtype, shape, tuple(boxes))
    kept = {*masters, *(main.get("buffer_names") or ())}
    hollow = [n for n, leaf in module.items() if n not in kept and _is_hollow(leaf)]
    for name in hollow:
        del module[name]
    return sorted(set(hollow) - set(main.get("shared_params") or ()))


def _is_hollow(leaf: Any) -> bool:
    return isinstance(leaf, ForeignLeaf) and leaf.shape == (0,)
