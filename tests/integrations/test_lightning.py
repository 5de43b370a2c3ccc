"""The Trainer of Lightning in real processes: killed anywhere, what it says is what an unbroken run
says, to the bit. Without lightning, which `make integrations` installs, these are skipped.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import holdfast
from holdfast.errors import UsageError
from holdfast.events import Warned
from holdfast.integrations.lightning_limits import check_validation
from holdfast.observe.report_builder import read_report
from integrations.drop_in import check_changed
from integrations.real_runs import (
    check_resumed,
    check_same,
    killed_and_resumed,
    needs,
    said,
    start,
    whole,
)
from support.project.code_blocks import PROJECT

needs_it = needs("lightning")
RUN = "lightning_run.py"
run = partial(start, RUN)
resumed = partial(killed_and_resumed, RUN)
#: 108 samples, 8 an update: 14 updates an epoch, 42 in all; logged every third, from the second
#: on, and at the end of an epoch.
STEPS = {
    "batch begin": (1, 15),
    "forward": (1, 9, 42),
    "update": (1, 17, 42),
    "batch end": (1, 13, 14, 42),
    "log": (2, 13, 17),
    "evaluate": (14, 42),
    "epoch begin": (0, 1),
    "epoch end": (0, 2),
}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("unbroken") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_ARENA_DIR", str(root.parent))
        return whole(RUN, root)


@needs_it
@pytest.mark.timeout(400)
@pytest.mark.parametrize("place", list(STEPS))
def test_a_killed_fit_goes_on_as_if_nothing_had_been(
    place: str, tmp_path: Path, unbroken: list[str]
) -> None:
    for step in STEPS[place]:
        root = tmp_path / f"run-{step}"
        check_same(resumed(root, step, place), unbroken)
        check_resumed(root)


@needs_it
@pytest.mark.timeout(300)
def test_a_fit_resumes_from_storage_when_shared_memory_is_gone(
    tmp_path: Path, arena_dir: Path, unbroken: list[str]
) -> None:
    root = tmp_path / "run"
    assert run(root, 24, "batch end").returncode == -9
    for left in arena_dir.iterdir():
        shutil.rmtree(left)
    done = run(root, 24, "batch end")
    assert done.returncode == 0, done.stderr
    check_same(said(root), unbroken)
    assert {source for each in read_report(root).restores for source in each.sources} == {"storage"}


@needs_it
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "options",
    [
        {"val_check_interval": 0.25},
        {"val_check_interval": 0.25, "patience": 1},
        {"max_steps": 33},
        {"loader": "stateful"},
        {"loader": "resumable"},
        {"persistent": True},
        {"average": True, "val_check_interval": 0.25},
        {"best": True},
        {"scheduling": {"0": 2, "1": 3}},
        {"draws": True, "workers": 0},
        {"draws": True, "workers": 0, "loader": "resumable"},
        {"draws": True, "workers": 0, "loader": "choosing"},
    ],
    ids=[
        "validation inside",
        "early stop",
        "max_steps",
        "stateful",
        "sampler",
        "persistent",
        "weight averaging",
        "checkpoints of its own",
        "accumulation by epoch",
        "random samples",
        "random samples, resumable",
        "no length, drawn by batch",
    ],
)
def test_every_kind_of_fit_goes_on(options: dict[str, Any], tmp_path: Path) -> None:
    unbroken = whole(RUN, tmp_path / "whole", **options)
    chance = random.Random(str(options))
    for step, place in ((chance.randrange(2, 14), "update"), (1, "epoch begin")):
        if step == 1 and not any(f"epoch begins {step}" in line for line in unbroken):
            continue  # it stopped before
        check_same(resumed(tmp_path / f"{step}-{place}", step, place, **options), unbroken)


@needs_it
@pytest.mark.timeout(400)
def test_two_optimizers_in_manual_optimization(tmp_path: Path) -> None:
    options = {"manual": True, "val_check_interval": 5}
    unbroken = whole(RUN, tmp_path / "whole", **options)
    for step, place in ((13, "forward"), (54, "batch end"), (1, "epoch end")):
        check_same(resumed(tmp_path / f"{step}-{place}", step, place, **options), unbroken)


@needs_it
@pytest.mark.timeout(400)
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "model parallel"])
def test_two_ranks_of_lightning_that_torchrun_starts_again(sharded: bool, tmp_path: Path) -> None:
    options = {"ranks": 2, "sharded": sharded}
    unbroken = whole(RUN, tmp_path / "whole", **options)
    for step, place in ((10, "batch end"), (1, "epoch begin")):
        check_same(resumed(tmp_path / f"run-{step}", step, place, **options), unbroken)


@needs_it
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "tensor"), [(2, 2), (4, 2)], ids=["1x2", "2x2"])
def test_model_parallel_ranks_in_two_dimensions(ranks: int, tensor: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"ranks": ranks, "sharded": True, "tensor": tensor, "max_steps": 16}
    unbroken = whole(RUN, tmp_path / "whole", **options)
    check_same(resumed(tmp_path / "run", 9, "batch end", who=1, **options), unbroken)


@needs_it
@pytest.mark.timeout(300)
def test_other_batches_in_the_middle_of_an_epoch_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert run(root, 11, "batch end").returncode == -9
    changes: list[tuple[dict[str, Any], str]] = [
        ({"batch": 2}, "batches of [4], now [2]"),
        ({"accumulation": 4}, "batches an update 2, now 4"),
        ({"ranks": 2}, "batches of [4], now [8]"),
    ]
    for other, words in changes:
        refused = run(root, **other)
        assert refused.returncode != 0 and words in refused.stderr
    assert run(root).returncode == 0


@needs_it
@pytest.mark.timeout(300)
def test_sigterm_ends_a_fit_in_its_grace_period(tmp_path: Path, unbroken: list[str]) -> None:
    root = tmp_path / "run"
    told = run(root, 11, "forward", signal=15, grace_s=30.0)
    assert told.returncode == 1 and "Preempted" in told.stderr
    done = run(root)
    assert done.returncode == 0, done.stderr
    check_same(said(root), unbroken)


@needs_it
@pytest.mark.timeout(300)
def test_checkpoints_of_modelcheckpoint_and_of_fabric_and_two_fits_in_a_process(
    tmp_path: Path,
) -> None:
    script = Path(__file__).with_name("lightning_io.py")
    command = [sys.executable, str(script), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "none: holdfast:last" in done.stdout
    assert "does not lie in" in done.stdout and "was not given to fabric.setup()" in done.stdout
    assert "plain torch read it" in done.stdout
    assert "fit 1 4 None" in done.stdout and "fit 3 12 4" in done.stdout


@needs_it
def test_mistakes_with_a_trainer_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning
    from lightning.pytorch.callbacks import (
        BatchSizeFinder,
        LearningRateFinder,
        StochasticWeightAveraging,
    )
    from lightning.pytorch.strategies import FSDPStrategy

    from holdfast.integrations import lightning as adapter

    with pytest.raises(UsageError, match="keys model, rng, which are the Trainer's own"):
        adapter.HoldfastLightningCallback(tmp_path / "a", state={"rng": 1, "model": 2})
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "last.ckpt").touch()
    with pytest.raises(UsageError, match=r"\*\.ckpt, a file of Lightning, and is no root"):
        adapter.HoldfastLightningCallback(foreign)
    two = [adapter.HoldfastLightningCallback(tmp_path / name) for name in "ab"]
    with pytest.raises(UsageError, match="two callbacks of Holdfast"):
        adapter._check(lightning.Trainer(callbacks=two, accelerator="cpu", logger=False))
    trainer = lightning.Trainer(callbacks=two[:1], accelerator="cpu", logger=False)
    averaging = StochasticWeightAveraging(0.1)
    trainer.callbacks.append(averaging)
    with pytest.raises(UsageError, match="StochasticWeightAveraging needs its state before"):
        adapter._check(trainer)
    trainer.callbacks.remove(averaging)
    for finder in (LearningRateFinder(), BatchSizeFinder()):
        trainer.callbacks.append(finder)
        with pytest.raises(UsageError, match=f"{type(finder).__name__} trains in the fit"):
            adapter._check(trainer)
        trainer.callbacks.remove(finder)
    trainer.reload_dataloaders_every_n_epochs = 2
    with pytest.raises(UsageError, match="reload_dataloaders_every_n_epochs=2"):
        adapter._check(trainer)
    trainer.reload_dataloaders_every_n_epochs = 1
    adapter._check(trainer)
    loader: Any = SimpleNamespace(persistent_workers=True)
    loop = SimpleNamespace(_combined_loader=SimpleNamespace(flattened=[loader]))
    with pytest.raises(UsageError, match="a validation loader has persistent_workers"):
        check_validation(loop)
    trainer.strategy.__class__ = FSDPStrategy
    with pytest.raises(UsageError, match=r"does not know FSDPStrategy.*ModelParallelStrategy"):
        adapter._check(trainer)
    with pytest.raises(UsageError, match=r"is for lightning\.Trainer, got one of builtins"):
        adapter._check(object())
    with pytest.raises(UsageError, match="takes a Fabric, got a Trainer"):
        adapter.fabric_checkpointer(trainer, tmp_path / "c", {})
    monkeypatch.setattr(lightning, "__version__", "2.5.9")
    with pytest.raises(UsageError, match=r"needs lightning 2\.6 or later, got 2\.5\.9"):
        adapter.HoldfastLightningCallback(tmp_path / "a")


@needs_it
def test_a_trainer_has_the_callback_by_itself_only_if_a_root_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.integrations import lightning_limits
    from holdfast.integrations.lightning import callbacks

    monkeypatch.setattr(lightning_limits, "_first", [])
    assert callbacks() == []
    monkeypatch.setenv("HOLDFAST_ROOT", str(tmp_path / "a"))
    assert [type(one).__name__ for one in callbacks()] == ["HoldfastLightningCallback"]
    first, second = *callbacks(), *callbacks()
    assert first._is_from_environment
    lightning_limits.take_environment(first)
    lightning_limits.take_environment(first)
    with pytest.raises(UsageError, match="gives a second Trainer of this process the root"):
        lightning_limits.take_environment(second)
    found = entry_points(group="lightning.pytorch.callbacks_factory")
    assert [one.load() for one in found if one.name == "holdfast"] == [callbacks]


@needs_it
def test_the_counters_of_the_loops_are_those_that_their_state_dict_has() -> None:
    from dataclasses import dataclass

    import lightning
    from lightning.pytorch.loops.progress import _BaseProgress

    from holdfast.format import values as codec
    from holdfast.integrations.lightning import _loops_state, _read_loops

    @dataclass
    class Mine(_BaseProgress):  # type: ignore[misc]
        seen: Any = None

    fit = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False).fit_loop
    fit.epoch_progress.current.processed, fit.epoch_loop.batch_progress.is_last_batch = 7, True
    fit.epoch_loop.mine = Mine({3: (1, 2)})
    before = fit.state_dict()
    saved = codec.decode(codec.encode(_loops_state(fit)))
    assert _read_loops(saved) == before
    assert _read_loops(before) == before  # as earlier versions kept them
    fit.epoch_progress.current.processed, fit.epoch_loop.mine.seen = 0, None
    fit.load_state_dict(_read_loops(saved))
    assert fit.state_dict() == before


@needs_it
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_one_without_length", [False, True])
def test_where_one_loader_has_no_length_a_batch_more_is_fetched_of_all(
    *, is_one_without_length: bool
) -> None:
    """What the Trainer does is compared with what places take it to do."""
    import lightning
    import torch
    from torch.utils.data import DataLoader

    from holdfast.integrations.lightning import _FitPlace

    class Batches:
        def __iter__(self) -> Any:
            return iter([[0, 1], [2, 3], [4, 5]])

    class Model(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(1, 1)

        def on_train_batch_start(self, *_: Any) -> None:
            fetcher = self.trainer.fit_loop._data_fetcher
            place = _FitPlace(self.trainer)
            place.take_loaders()
            self.of_places = [one._follows_draws for one in place._places]
            self.of_trainer = fetcher.length is None
            place.release()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(batch["a"]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data: Any = torch.ones(6, 1)
    other: dict[str, Any] = {"batch_sampler": Batches()} if is_one_without_length else {}
    loaders: dict[str, Any] = {"a": DataLoader(data, 2), "b": DataLoader(data, **other)}
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, loaders)
    assert model.of_places == [is_one_without_length] * 2 == [model.of_trainer] * 2


@needs_it
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_fabric_that_nothing_saves_says_so_once_where_the_environment_names_a_root(
    is_kept: bool, tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from lightning.fabric import Fabric
    from torch import nn

    from holdfast.integrations.lightning import FabricWatch, fabric_callbacks, fabric_checkpointer

    entries = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["entry-points"]
    module, _, name = entries["lightning.fabric.callbacks_factory"]["holdfast"].partition(":")
    assert getattr(import_module(module), name) is fabric_callbacks
    assert fabric_callbacks() == []
    monkeypatch.setenv("HOLDFAST_ROOT", str(tmp_path / "a"))
    is_installed = bool(entry_points(group="lightning.fabric.callbacks_factory"))
    given = [] if is_installed else fabric_callbacks()  # an installed Holdfast is asked by Fabric
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=given)
    assert sum(isinstance(one, FabricWatch) for one in fabric._callbacks) == 1
    plain = nn.Linear(2, 2)
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    told: list[str] = []
    stop = holdfast.subscribe(
        lambda event, _: told.append(event.message) if isinstance(event, Warned) else None
    )
    with ExitStack() as stack:
        stack.callback(stop)
        if is_kept:
            state = {"model": model, "optimizer": optimizer}
            ckpt = fabric_checkpointer(fabric, tmp_path / "a", state)
            stack.enter_context(ckpt).restore()
        for _ in range(2):
            fabric.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
    said = [text for text in told if "no fabric_checkpointer was made for this Fabric" in text]
    assert len(said) == (not is_kept)


@needs_it
@pytest.mark.timeout(600)
def test_saves_and_loads_of_fabric_are_kept_here_when_torchs_two_functions_are_changed(
    tmp_path: Path,
) -> None:
    root = tmp_path / "run"
    check_changed("lightning", root / "step-4", {root: ""}, tmp_path)
