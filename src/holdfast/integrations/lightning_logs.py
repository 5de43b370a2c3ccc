"""Keeps what a Trainer of Lightning has added up for its logs, so that an epoch's are whole.

The Trainer adds up numbers that are logged for a mean over an epoch. Metrics of torchmetrics
add up by themselves, in values that no ``state_dict`` has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

#: More than is stored with the values, so that a list is a leaf from its begin on.
_LEAST_BYTES = 1 << 16


def logs_state(trainer: Any, *, is_inside: bool) -> dict[str, Any]:
    """Returns what was logged last and what each rank has added up, as plain values.

    They differ from rank to rank, and tensors that are large or on a GPU are stored once for all:
    so each rank has a key of its own. ``is_inside``: an epoch is under way.
    """
    logs = trainer._logger_connector
    own = {
        "metrics": [
            dict(one)
            for one in (logs._callback_metrics, logs._logged_metrics, logs._progress_bar_metrics)
        ],
        "means": _means(trainer.fit_loop.epoch_loop._results) if is_inside else {},
        "sums": {
            name: {"updates": one._update_count, "values": _copied(one.metric_state)}
            for name, one in _metrics(trainer.lightning_module)
            if one._update_count
        },
    }
    return {
        "first": logs._first_loop_iter,
        "function": logs._current_fx,
        "added": {f"{trainer.global_rank}": own},
    }


def resume_logs(trainer: Any, saved: Mapping[str, Any]) -> None:
    """Goes on with what was logged, and with each metric where it was."""
    logs = trainer._logger_connector
    added = saved.get("added", {})
    own = added.get(f"{trainer.global_rank}", {})
    logged = own or next(iter(added.values()), saved)  # a rank more has what another one logged
    logs._callback_metrics, logs._logged_metrics, logs._progress_bar_metrics = (
        dict(one) for one in logged.get("metrics", [{}, {}, {}])
    )
    logs._first_loop_iter, logs._current_fx = saved["first"], saved["function"]
    _resume_means(trainer.fit_loop.epoch_loop._results, own.get("means", saved.get("means", {})))
    sums = own.get("sums", {})  # the first version kept none
    for name, one in _metrics(trainer.lightning_module):
        if name in sums:
            one._update_count, one._computed = sums[name]["updates"], None
            for key, value in sums[name]["values"].items():
                setattr(one, key, _moved(value, one.device))


def _metrics(module: Any) -> Iterator[tuple[str, Any]]:
    """Yields the metrics of torchmetrics in a module, which Lightning brings, by name."""
    from torchmetrics import Metric

    # As named_modules() does, in a quarter of its time: each save does it. A metric's hash is slow.
    seen, waiting = set[int](), [("", module)]
    is_metric: dict[type, bool] = {}
    while waiting:
        prefix, part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        kind = type(part)
        if kind not in is_metric:
            is_metric[kind] = issubclass(kind, Metric)
        if is_metric[kind]:
            yield prefix.removesuffix("."), part
        for name, inner in reversed(part._modules.items()):
            if inner is not None:
                waiting.append((f"{prefix}{name}.", inner))


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _packed(one) if isinstance(one, list) else one for key, one in values.items()}


def _packed(values: list[Any]) -> Any:
    """Returns a list that grows with every batch in one tensor, of a power of two of bytes.

    A leaf more, or one of another shape, costs a save as much as the first one: with this few saves
    have one. A list with anything else than plain tensors is left as it is.
    """
    if not all(type(one) is torch.Tensor and one.layout is torch.strided for one in values):
        return list(values)
    plain = (one.detach().resolve_conj().resolve_neg() for one in values)
    flat = [one.contiguous().view(-1).view(torch.uint8) for one in plain]
    size = sum(one.numel() for one in flat)
    room = max(_LEAST_BYTES, 1 << max(0, size - 1).bit_length())
    device = flat[0].device if flat else torch.device("cpu")
    packed = torch.empty(room, dtype=torch.uint8, device=device)
    packed[size:].zero_()
    if flat:
        torch.cat([one.to(device) for one in flat], out=packed[:size])
    return {
        "of": [[str(one.dtype).removeprefix("torch."), list(one.shape)] for one in values],
        "bytes": packed,
    }


def _unpacked(packed: Mapping[str, Any]) -> list[torch.Tensor]:
    found, at = [], 0
    for name, shape in packed["of"]:
        dtype = getattr(torch, name)
        stop = at + math.prod(shape) * dtype.itemsize
        found.append(packed["bytes"][at:stop].clone().view(dtype).view(shape))
        at = stop
    return found


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Mapping):
        return _moved(_unpacked(value), device)
    if isinstance(value, list):
        return [_moved(one, device) for one in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _means(results: Any) -> dict[str, Any]:
    """Returns what was added up for the means of the epoch that are logged at its end."""
    return {
        key: {
            "value": one.value,
            "count": getattr(one, "cumulated_batch_size", None),
            "step": one._forward_cache,
        }
        for key, one in results.items()
        if one.is_tensor
    }


def _resume_means(results: Any, saved: Mapping[str, Any]) -> None:
    """Goes on with each mean where it was, when it is logged for the first time."""
    waiting, update = dict(saved), results.update_metrics

    def update_metrics(key: str, value: Any, batch_size: int) -> None:
        found = waiting.pop(key, None)
        if found is not None:
            results[key].value = found["value"]
            if found["count"] is not None:
                results[key].cumulated_batch_size = found["count"]
        if not waiting:
            vars(results).pop("update_metrics", None)
        update(key, value, batch_size)

    if waiting:
        results.update_metrics = update_metrics
