"""An alarm where training moves on and what is captured does not; and none where all is well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.capture.replica_samples import OptimizerSteps, StandstillProbe, TrainedParameters
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.protocol.messages import CHANGED, NOTHING_TO_SAY
from support.runs.losing import events_of

# ── what one rank says ───────────────────────────────────────────────────────────────────────


def test_a_rank_compares_with_its_capture_before_if_it_was_trained_meanwhile() -> None:
    rank, stepped, not_stepped = (
        StandstillProbe(),
        TrainedParameters(has_stepped=True),
        TrainedParameters(),
    )
    assert rank.same_since(1, stepped, "p") == NOTHING_TO_SAY  # there is none before
    assert rank.same_since(2, not_stepped, "p") == NOTHING_TO_SAY
    assert rank.same_since(3, stepped, "p") == 2
    assert rank.same_since(4, stepped, "q") == CHANGED
    assert rank.same_since(5, stepped, "") == NOTHING_TO_SAY  # it passed through a ring
    assert rank.same_since(6, not_stepped, "q") == 4  # trained since it was compared last


def parameter(*, has_gradient: bool = True) -> nn.Parameter:
    made = nn.Parameter(torch.ones(3))
    made.grad = torch.ones(3) if has_gradient else None
    return made


def taken(*groups: dict[str, Any], **attributes: Any) -> bool:
    """Whether a step of such an optimizer counts."""
    optimizer = torch.optim.SGD([{"lr": 0.1, **group} for group in groups])
    for name, value in attributes.items():
        setattr(optimizer, name, value)
    steps = OptimizerSteps()
    steps.note(optimizer)
    return steps.collect(_NO_BINDINGS, lambda: {"optimizer": optimizer}).has_stepped


_NO_BINDINGS: Any = []


def test_only_steps_that_must_change_something_count() -> None:
    assert taken({"params": [parameter(has_gradient=False), parameter()]})
    assert not taken({"params": [parameter()], "lr": 0.0})
    assert not taken({"params": [parameter()], "lr": torch.tensor(0.0)})
    assert taken({"params": [parameter()], "lr": torch.tensor(0.1)})
    assert not taken({"params": [parameter(has_gradient=False)]})
    # The rate is for the group without gradients.
    frozen = {"params": [parameter(has_gradient=False)]}
    assert not taken(frozen, {"params": [parameter()], "lr": 0.0})
    # Whether it is skipped is decided on the GPU.
    assert not taken({"params": [parameter()]}, found_inf=torch.zeros(1))


def test_a_step_counts_for_one_save_and_for_the_optimizers_of_the_state_alone() -> None:
    steps, mine, other = (
        OptimizerSteps(),
        *(torch.optim.SGD([parameter()], lr=0.1) for _ in range(2)),
    )
    steps.note(other)
    assert not steps.collect(_NO_BINDINGS, lambda: {"mine": mine}).has_stepped
    steps.note(mine)
    steps.note(mine)
    assert steps.collect(_NO_BINDINGS, lambda: {"mine": mine}).has_stepped
    assert not steps.collect(_NO_BINDINGS, lambda: {"mine": mine}).has_stepped


# ── all of it ────────────────────────────────────────────────────────────────────────────────

Step = Callable[[dict[str, Any]], None]


def build(rate: float, columns: int = 40) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(columns, 50), nn.BatchNorm1d(50), nn.Linear(50, 2))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=rate)}


def backward(state: dict[str, Any], scale: float = 1.0) -> None:
    model = state["model"]
    columns = model[0].in_features
    (model(torch.randn(4, columns)).square().mean() * scale).backward()


def step(state: dict[str, Any]) -> None:
    backward(state)
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def gather(state: dict[str, Any]) -> None:
    backward(state)  # gradients add up, and no step is taken


def overflow(state: dict[str, Any]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    backward(state, float("inf"))
    scaler.scale(torch.ones(1))
    scaler.step(state["optimizer"])
    scaler.update()
    state["optimizer"].zero_grad()


def with_rate(rate: float) -> Step:
    def change(state: dict[str, Any]) -> None:
        for group in state["optimizer"].param_groups:
            group["lr"] = rate
        step(state)

    return change


def frozen(state: dict[str, Any]) -> None:
    state["model"].requires_grad_(False)
    state["optimizer"].step()


def half_frozen(state: dict[str, Any]) -> None:
    state["model"][0].requires_grad_(False)
    step(state)


def alarms(root: Path, state: dict[str, Any], steps: list[Step]) -> list[int]:
    """The steps at which a run that takes these was warned."""
    with holdfast.Checkpointer(root, state, storage=None) as checkpointer:
        for number, take in enumerate(steps):
            take(state)
            checkpointer.save(number).wait_captured(60)
    words = [e["message"] for e in events_of(root, "Warned")]
    told = [w for w in words if "byte for byte" in w]
    return sorted(int(w.partition("at step ")[2].split()[0]) for w in told)


def test_no_false_alarm_while_training_goes_on_or_rests(tmp_path: Path, arena_dir: Path) -> None:
    steps = [step, step, gather, gather, step, overflow, overflow, with_rate(0.0), with_rate(0.0)]
    steps += [with_rate(1e-2), half_frozen, half_frozen, frozen, frozen]
    assert alarms(tmp_path / "run", build(1e-2), steps) == []


@pytest.mark.parametrize("columns", [40, 3 * BLOCK_BYTES // 200])  # below a block, and beyond
def test_parameters_that_stand_still_though_they_are_trained_are_told_once_in_a_row(
    tmp_path: Path, arena_dir: Path, columns: int
) -> None:
    lost = with_rate(1e-30)  # the updates are nothing in this dtype
    steps = [step, lost, lost, lost, with_rate(1e-2), lost, lost]
    state = build(1e-2, columns)
    state["optimizer"].param_groups[0]["weight_decay"] = 0.0
    assert alarms(tmp_path / "run", state, steps) == [1, 5]
