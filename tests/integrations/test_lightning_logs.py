"""What was logged comes back on every rank, also on one more than there were."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

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
