"""What was logged comes back on every rank, also on one more than there were."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.integrations import lightning_logs
from holdfast.integrations.lightning_logs import resume_logs

FIRST_VERSION = {"metrics": [{"val_loss": 2.0}, {}, {}]}
BY_RANK = {"added": {"0": {"metrics": [{"val_loss": 2.0}, {}, {}]}}}


@pytest.mark.parametrize("saved", [FIRST_VERSION, BY_RANK])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_more_has_what_another_one_logged(
    monkeypatch: pytest.MonkeyPatch, saved: dict[str, Any], rank: int
) -> None:
    monkeypatch.setattr(lightning_logs, "_metrics", lambda _: ())
    results = SimpleNamespace(update_metrics=None)
    trainer = SimpleNamespace(
        global_rank=rank,
        lightning_module=None,
        _logger_connector=SimpleNamespace(),
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(_results=results)),
    )
    resume_logs(trainer, {**saved, "first": True, "function": "training_step"})
    assert trainer._logger_connector._callback_metrics == {"val_loss": 2.0}


def test_a_list_of_a_metric_that_grows_has_few_shapes_and_comes_back_to_the_bit() -> None:
    values: list[torch.Tensor] = []
    shapes = set()
    for batch in range(300):
        values += [torch.randn(64, 10), torch.tensor(batch), torch.zeros(0, 3)]
        values.append(torch.rand(7) > 0.5)
        values.append(torch.randn(3, 5, dtype=torch.bfloat16).t())
        packed = lightning_logs._copied({"preds": values, "mean": values[0]})
        assert packed["mean"] is values[0]
        shapes.add(packed["preds"]["bytes"].shape)
    assert len(shapes) <= 6
    values[0].zero_()
    again = lightning_logs._moved(packed["preds"], torch.device("cpu"))
    assert again[0].any(), "it is a copy"
    for found, value in zip(again[1:], values[1:], strict=True):
        assert found.dtype == value.dtype and torch.equal(found, value)
    assert lightning_logs._moved([values[1]], torch.device("cpu")) == [values[1]], "as before"
    assert lightning_logs._packed(["text"]) == ["text"]
    empty = lightning_logs._packed([])
    assert lightning_logs._moved(empty, torch.device("cpu")) == []
