"""What a model is wrapped in changes no name, and what helps it train is part of the state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    LambdaLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast.errors import UnsupportedState
from support.models.models import differences


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Sequential(nn.Linear(8, 2)))


def wrapped(model: Any, how: str) -> Any:
    if how == "compiled":
        return torch.compile(model, backend="eager")
    if how == "compiled inside":
        model[2] = torch.compile(model[2], backend="eager")
    if how == "compiled in place":
        model.compile(backend="eager")
    if how == "checkpointed":
        model[0] = checkpoint_wrapper(model[0])
    if how == "both":
        compiled: Any = torch.compile(model[2], backend="eager")
        model[2] = checkpoint_wrapper(compiled)
        return torch.compile(model, backend="eager")
    if how == "data parallel inside":
        return nn.ModuleDict({"inner": nn.DataParallel(model)})["inner"]
    return model


# torch about itself: its compiler looks at views' gradients, its data loader at its vitals.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]
WRAPPERS = [
    "",
    "compiled",
    "compiled inside",
    "compiled in place",
    "checkpointed",
    "both",
    "data parallel inside",
]


def state_of(seed: int, how: str) -> dict[str, Any]:
    model = wrapped(net(seed), how)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def learn(state: dict[str, Any], step: int) -> Any:
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
    loss = state["model"](inputs).square().mean()
    loss.backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    return loss.item()


def test_no_wrapper_leaves_a_trace_in_a_name(tmp_path: Path) -> None:
    names = []
    for how in WRAPPERS:
        state = state_of(1, how)
        learn(state, 0)
        holdfast.save(tmp_path / (how or "plain"), state)
        with holdfast.open(tmp_path / (how or "plain")) as checkpoint:
            names.append(sorted(checkpoint.leaves))
    assert "model.2.0.weight" in names[0]
    assert all(found == names[0] for found in names)


@pytest.mark.parametrize(("before", "after"), [("", "both"), ("both", "checkpointed")])
def test_a_model_goes_on_wrapped_otherwise(before: str, after: str, tmp_path: Path) -> None:
    saved, back = state_of(1, before), state_of(2, after)
    losses = [learn(saved, step) for step in range(3)]
    holdfast.save(tmp_path, saved)
    holdfast.load(tmp_path, back)
    assert [learn(back, 3), learn(back, 4)] == [learn(saved, 3), learn(saved, 4)]
    assert len(set(losses)) == 3


def test_a_component_that_only_looks_like_a_wrappers_stays_in_the_name(tmp_path: Path) -> None:
    model = nn.Module()
    model.x_orig_mod = nn.Linear(1, 1)
    model.module = nn.Linear(1, 1)
    holdfast.save(tmp_path, {"model": model})
    with holdfast.open(tmp_path) as checkpoint:
        assert "model.x_orig_mod.weight" in checkpoint.leaves
        assert "model.module.weight" in checkpoint.leaves


def test_a_module_with_extra_state_gets_it_back_under_any_wrapper(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        seen: Any = None

        def get_extra_state(self) -> Any:
            return {"seen": self.seen, "history": torch.arange(3)}

        def set_extra_state(self, state: Any) -> None:
            self.seen, self.history = state["seen"], state["history"]

    def make(seen: Any) -> tuple[Counting, nn.Module]:
        part = Counting(2, 2)
        part.seen = seen
        return part, nn.Sequential(checkpoint_wrapper(part), part)

    _, model = make((5, "five"))
    holdfast.save(tmp_path, {"model": model})
    part, back = make(None)
    holdfast.load(tmp_path, {"model": torch.compile(back, backend="eager")})
    assert part.seen == (5, "five")
    assert part.history.tolist() == [0, 1, 2]


def test_flat_parameters_of_fsdp1_are_refused(tmp_path: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    class Wrapped(FullyShardedDataParallel):
        def __init__(self) -> None:
            nn.Module.__init__(self)

    model = nn.Module()
    model.body = Wrapped()
    with pytest.raises(UnsupportedState, match=r"^body is wrapped in .*FSDP1.*fully_shard"):
        holdfast.save(tmp_path, {"model": model})


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: LambdaLR(o, lambda epoch: 0.9**epoch),
    "milestones": lambda o: MultiStepLR(o, [1, 1, 3]),
    "restarts": lambda o: CosineAnnealingWarmRestarts(o, 2),
    "one cycle": lambda o: OneCycleLR(o, 0.1, total_steps=20),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=0),
    "sequence": lambda o: SequentialLR(o, [LambdaLR(o, lambda _: 0.1), MultiStepLR(o, [2])], [2]),
    "swa": lambda o: SWALR(o, 0.01, anneal_epochs=4),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_goes_on(kind: str, tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        state = state_of(seed, "")
        return {**state, "scheduler": SCHEDULERS[kind](state["optimizer"])}

    def run(state: dict[str, Any], steps: range) -> list[Any]:
        found = []
        for step in steps:
            loss = learn(state, step)
            is_plateau = isinstance(state["scheduler"], ReduceLROnPlateau)
            state["scheduler"].step(*([loss] if is_plateau else []))
            found.append((loss, [group["lr"] for group in state["optimizer"].param_groups]))
        return found

    saved, back = make(1), make(2)
    run(saved, range(3))
    holdfast.save(tmp_path, saved)
    holdfast.load(tmp_path, back)
    assert run(back, range(3, 8)) == run(saved, range(3, 8))


def test_a_gradient_scaler_goes_on(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        return {**state_of(1, ""), "scaler": torch.amp.GradScaler("cpu", init_scale=64.0)}

    saved, back = make(), make()
    scaler = saved["scaler"]
    for step in range(3):
        loss = saved["model"](torch.randn(6, 4)).square().mean() * (1e38 if step == 1 else 1)
        scaler.scale(loss).backward()
        scaler.step(saved["optimizer"])
        scaler.update()
        saved["optimizer"].zero_grad()
    assert scaler.get_scale() == 32.0
    holdfast.save(tmp_path, saved)
    holdfast.load(tmp_path, back)
    assert back["scaler"].get_scale() == 32.0
    assert back["scaler"].state_dict() == scaler.state_dict()


@pytest.mark.parametrize("how", ["", "compiled", "both"])
def test_an_averaged_copy_of_the_weights_goes_on(how: str, tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        state = state_of(seed, how)
        average = AveragedModel(
            state["model"], multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        return {**state, "average": average}

    def run(state: dict[str, Any], steps: range) -> dict[str, Any]:
        for step in steps:
            learn(state, step)
            state["average"].update_parameters(state["model"])
        return {name: tensor.clone() for name, tensor in state["average"].state_dict().items()}

    saved, back = make(1), make(2)
    run(saved, range(3))
    holdfast.save(tmp_path, saved)
    holdfast.load(tmp_path, back)
    assert differences(run(back, range(3, 5)), run(saved, range(3, 5))) == []


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_stateful_data_loader_gives_each_batch_once(workers: int, tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(3)
        loader = StatefulDataLoader(
            Numbers(),
            batch_size=3,
            shuffle=True,
            generator=generator,
            num_workers=workers,
            snapshot_every_n_steps=1,
        )
        return {"data": loader}

    whole = [batch.tolist() for batch in make()["data"]]
    saved, found = make(), []
    for batch in saved["data"]:
        found.append(batch.tolist())
        if len(found) == 5:
            holdfast.save(tmp_path, saved)
            break
    back = make()
    holdfast.load(tmp_path, back)
    found += [batch.tolist() for batch in back["data"]]
    assert found == whole
