"""Loops of accelerate in real processes: killed anywhere, what one says is what an unbroken run
says, to the bit. Without accelerate, which `make integrations` installs, these are skipped.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from holdfast.errors import UsageError
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
from support.runs.mishaps import listening

needs_it = needs("accelerate")
RUN = "accelerate_run.py"
run = partial(start, RUN)
resumed = partial(killed_and_resumed, RUN)
#: 108 samples, 8 an update: 14 updates an epoch, 42 in all, logged every fourth.
STEPS = {
    "forward": (1, 9, 42),
    "update": (1, 17, 42),
    "save": (1, 14, 15),
    "log": (8, 28),
    "evaluate": (0, 2),
    "epoch begin": (1, 2),
    "epoch end": (0, 1),
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
def test_a_killed_loop_of_accelerate_goes_on_as_if_nothing_had_been(
    place: str, tmp_path: Path, unbroken: list[str]
) -> None:
    for step in STEPS[place]:
        root = tmp_path / f"run-{step}"
        check_same(resumed(root, step, place), unbroken)
        check_resumed(root)


@needs_it
@pytest.mark.timeout(300)
def test_accelerate_resumes_from_storage_when_shared_memory_is_gone(
    tmp_path: Path, arena_dir: Path, unbroken: list[str]
) -> None:
    root = tmp_path / "run"
    assert run(root, 24, "save").returncode == -9
    for left in arena_dir.iterdir():
        shutil.rmtree(left)
    done = run(root, 24, "save")
    assert done.returncode == 0, done.stderr
    check_same(said(root), unbroken)
    assert {source for each in read_report(root).restores for source in each.sources} == {"storage"}


@needs_it
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "options",
    [
        {"stateful": True},
        {"loader": "resumable"},
        {"seedable": False, "persistent": True},
        {"seedable": False, "workers": 0},
        {"loader": "stream"},
        {"loader": "stream", "stateful": True},
        {"loader": "chance"},
        {"loader": "chance", "seedable": False, "workers": 0},
        {"reseeded": True},
        {"draws": True, "workers": 0},
        {"draws": True, "workers": 0, "seedable": False},
        {"draws": True, "workers": 0, "loader": "resumable"},
    ],
    ids=[
        "stateful",
        "resumable",
        "persistent workers",
        "one generator",
        "stream",
        "stateful stream",
        "generators of python and numpy",
        "generators, no workers",
        "another seed",
        "random samples",
        "random samples, one generator",
        "random samples, resumable",
    ],
)
def test_every_kind_of_loader_is_placed(options: dict[str, Any], tmp_path: Path) -> None:
    unbroken = whole(RUN, tmp_path / "whole", **options)
    chance = random.Random(str(options))
    for step, place in ((chance.randrange(2, 14), "update"), (1, "epoch end")):
        check_same(resumed(tmp_path / f"{step}-{place}", step, place, **options), unbroken)


@needs_it
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fsdp2", [False, True], ids=["ddp", "fsdp2"])
def test_two_ranks_of_accelerate_that_torchrun_starts_again(fsdp2: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"ranks": 2, "seedable": not fsdp2} | ({"fsdp": 2} if fsdp2 else {})
    unbroken = whole(RUN, tmp_path / "whole", **options)
    for step, place in ((10, "save"), (0, "evaluate")):
        check_same(resumed(tmp_path / f"run-{step}", step, place, **options), unbroken)


@needs_it
@pytest.mark.timeout(300)
def test_fsdp1_is_refused_by_name(tmp_path: Path) -> None:
    refused = run(tmp_path / "run", ranks=2, fsdp=1)
    assert refused.returncode != 0
    assert "is wrapped in FullyShardedDataParallel (FSDP1)" in refused.stderr


@needs_it
@pytest.mark.timeout(400)
def test_accumulation_by_hand_is_saved_when_an_optimizer_has_stepped(tmp_path: Path) -> None:
    unbroken = whole(RUN, tmp_path / "whole", manual=3)
    assert sum("step" in line for line in unbroken) == 27, "9 updates of 3 batches in each epoch"
    for step, place in ((5, "accumulate"), (12, "forward"), (9, "save")):
        check_same(resumed(tmp_path / f"{step}-{place}", step, place, manual=3), unbroken)


class Counted(torch.utils.data.Dataset[int]):
    """A million samples, and which of them were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


@needs_it
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_million_samples_are_passed_over_in_a_second(shuffle: bool) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    from holdfast.integrations.orders import tensor_of
    from holdfast.integrations.seam import LoaderPlace

    def make() -> tuple[Any, LoaderPlace, Counted]:
        torch.manual_seed(0)
        given = DataLoaderConfiguration(use_seedable_sampler=False)
        data = Counted()
        loader = DataLoader(data, batch_size=4, shuffle=shuffle)
        prepared = Accelerator(cpu=True, dataloader_config=given).prepare(loader)
        return prepared, LoaderPlace(prepared.base_dataloader, lambda: None), data

    loader, place, data = make()
    unbroken = iter(loader)
    next(unbroken)
    saved = place.save(249_998)
    again, place, data = make()
    place.set(saved)
    started_s = time.process_time()
    batches = [one.tolist() for one in again]
    assert time.process_time() - started_s < 1.0
    assert len(batches) == 2 and data.read == [index for batch in batches for index in batch]
    order = list(range(10**6))
    if shuffle:
        torch.set_rng_state(tensor_of(saved["generators"]["torch"]))
        torch.empty((), dtype=torch.int64).random_()  # the seed of workers comes first
        order = list(again.base_dataloader.batch_sampler.sampler)
    assert data.read == order[-8:]


@needs_it
@pytest.mark.timeout(300)
def test_other_batches_in_the_middle_of_an_epoch_are_refused_by_name(tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert run(root, 11, "save").returncode == -9
    changes: list[dict[str, Any]] = [{"batch": 2}, {"accumulation": 4}, {"ranks": 2}]
    for other in changes:
        refused = run(root, **other)
        assert refused.returncode != 0
        assert (
            "batches of 4 samples on all ranks together and 2 of them an update" in refused.stderr
        )
    assert run(root, batch=4).returncode == 0


@needs_it
@pytest.mark.timeout(300)
def test_sigterm_ends_a_loop_of_accelerate_in_its_grace_period(
    tmp_path: Path, unbroken: list[str]
) -> None:
    root = tmp_path / "run"
    told = run(root, 11, "forward", signal=15, grace_s=30.0)
    assert told.returncode == 1 and "Preempted" in told.stderr
    done = run(root)
    assert done.returncode == 0, done.stderr
    check_same(said(root), unbroken)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    data: Any = DataLoader(torch.ones(8, 2), batch_size=2)  # type: ignore[arg-type]
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    yield accelerator
    accelerator.free_memory()


class SkippingScaler:
    """A scaler that finds an overflow in every step."""

    def step(self, *_: Any) -> None:
        pass

    update = step


@needs_it
def test_mistakes_with_an_accelerator_are_named(
    prepared: Any, tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import Accelerator

    from holdfast.integrations import accelerate as adapter

    with pytest.raises(UsageError, match=r"call it after accelerator\.prepare"):
        adapter.attach(Accelerator(cpu=True), tmp_path / "a")
    with pytest.raises(UsageError, match="takes an Accelerator, got a Linear"):
        adapter.attach(nn.Linear(2, 2), tmp_path / "a")
    with pytest.raises(UsageError, match="keys model, rng, which are the Accelerator's own"):
        adapter.attach(prepared, tmp_path / "a", state={"rng": 1, "model": 2, "mine": 3})
    foreign = tmp_path / "foreign"
    prepared.save_state(str(foreign))
    with pytest.raises(UsageError, match="is no root of Holdfast"):
        adapter.attach(prepared, foreign)
    monkeypatch.setattr("accelerate.__version__", "1.14.0")
    with pytest.raises(UsageError, match=r"needs accelerate 1\.15 or later, got 1\.14\.0"):
        adapter.attach(prepared, tmp_path / "a")


@needs_it
def test_an_accelerator_has_one_checkpointer_and_gets_its_methods_back(
    prepared: Any, tmp_path: Path, arena_dir: Path
) -> None:
    from holdfast.integrations.accelerate import attach

    with attach(prepared, tmp_path / "a") as ckpt:
        with pytest.raises(UsageError, match="attached to this Accelerator already"):
            attach(prepared, tmp_path / "b")
        assert prepared.load_state() is None and ckpt.restored is None
        assert ckpt.step() is None and ckpt.steps == 0, "no optimizer has stepped"
        prepared._optimizers[0].step()
        ckpt.step()
        saved = prepared.save_state()
        saved.wait_durable(60)
        assert ckpt.steps == 1 and ckpt.checkpointer.root == str(tmp_path / "a")
        prepared.prepare(nn.Linear(2, 2))
        prepared._optimizers[0].step()
        with pytest.raises(UsageError, match=r"since attach\(\)"):
            ckpt.step()
    assert "save_state" not in vars(prepared)
    prepared.register_save_state_pre_hook(lambda models, weights, where: None)
    with listening() as heard:
        attach(prepared, tmp_path / "c").close()
    assert any("register_save_state_pre_hook() are not called" in str(one) for one in heard)


@needs_it
def test_a_save_in_an_accumulation_by_hand_is_refused_and_a_skipped_step_is_counted(
    prepared: Any, tmp_path: Path, arena_dir: Path
) -> None:
    from holdfast.integrations.accelerate import attach

    optimizer, loader = prepared._optimizers[0], prepared._dataloaders[0]
    optimizer.scaler = SkippingScaler()
    optimizer.__setstate__({})
    with attach(prepared, tmp_path / "a") as ckpt:
        for number, batch in enumerate(loader):
            prepared.backward(prepared._models[0](batch).sum())
            if number == 2:
                with pytest.raises(UsageError, match="in the middle of an accumulation"):
                    prepared.save_state()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
            ckpt.step()
            assert ckpt.steps == (number + 1) // 2
        assert optimizer.step_was_skipped
        prepared.save_state()
    assert "step" not in vars(optimizer)


@needs_it
def test_a_root_of_another_program_is_refused_by_an_accelerator(
    prepared: Any, tmp_path: Path, arena_dir: Path
) -> None:
    import holdfast
    from holdfast.integrations.accelerate import attach

    holdfast.save(tmp_path / "a", {"model": nn.Linear(2, 2)}, step=3)
    with pytest.raises(UsageError, match=r"not written by holdfast\.integrations\.accelerate"):
        attach(prepared, tmp_path / "a")


@needs_it
@pytest.mark.timeout(600)
def test_save_state_and_load_state_keep_shards_here_when_torchs_two_classes_are_changed(
    tmp_path: Path,
) -> None:
    place = tmp_path / "state"
    roots = {place / "pytorch_model_fsdp_0": "model.", place / "optimizer_0": "optimizer."}
    check_changed("accelerate", place, roots, tmp_path)
