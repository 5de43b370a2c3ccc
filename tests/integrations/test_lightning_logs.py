"""What was logged comes back on every rank, also on one more than there were."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.integrations import lightning_logs
from holdfast.integrations.lightning_logs import resume_logs
from integrations.real_runs import needs

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


@needs("lightning")
@pytest.mark.filterwarnings("ignore")
def test_counters_metrics_and_hooks_are_those_that_lightning_itself_finds() -> None:
    """Each save looks for them, by walks that are quicker than Lightning's own."""
    import lightning
    from torchmetrics import MeanSquaredError, MetricCollection

    from holdfast.integrations.checkpoint_hooks import kept_by_hooks
    from holdfast.integrations.lightning import _loops_state

    class Model(lightning.LightningModule):  # type: ignore[misc]
        walks = 0

        def __init__(self) -> None:
            super().__init__()
            error = MeanSquaredError()
            self.net = torch.nn.Sequential(torch.nn.Linear(2, 2), error)
            self.same, self.none = error, None
            self.several = MetricCollection([MeanSquaredError()])

        def state_dict(self, *given: Any, **named: Any) -> Any:
            self.walks += 1
            return super().state_dict(*given, **named)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net[0](batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Adds(lightning.Callback):  # type: ignore[misc]
        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
            checkpoint["mine"] = len(checkpoint["state_dict"])

    trainer = lightning.Trainer(
        max_epochs=2,
        limit_train_batches=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    data: Any = torch.ones(8, 2)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=2))
    fit = trainer.fit_loop
    assert _loops_state(fit) == fit.state_dict()
    assert "epoch_loop.manual_optimization.optim_step_progress" in fit.state_dict()
    kind = type(model.net[1])
    named = [(name, one) for name, one in model.named_modules() if isinstance(one, kind)]
    assert list(lightning_logs._metrics(model)) == named and len(named) == 2
    model.walks = 0
    assert kept_by_hooks(trainer, [lightning.Callback()]) == {} and model.walks == 0
    assert kept_by_hooks(trainer, [Adds()]) == {"mine": 2}
    model.on_save_checkpoint = lambda given: given.update(own=1)
    assert kept_by_hooks(trainer, []) == {"own": 1}
