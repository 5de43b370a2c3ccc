"""Dropout, noise and augmentation after a restore: those of the run that was never stopped."""

from __future__ import annotations

import copy
import gc
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

import holdfast
from holdfast import events
from holdfast.errors import UsageError
from support.runs.mishaps import listening

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

SAMPLES, BATCH, WIDTH = 22, 4, 6
STEPS_OF_AN_EPOCH, STEPS = 6, 15
#: Steps to go on after: in the middle of an epoch, and the last of one.
INSIDE, AT_THE_END = 8, 5


@pytest.fixture(autouse=True)
def _generators_as_before() -> Iterator[None]:
    rng = holdfast.Rng()
    before = rng.state_dict()
    yield
    rng.load_state_dict(before)


def _draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


class Rows(Dataset[torch.Tensor]):
    """Sample i is i, over and over; ``noisy``: and what the process that reads it draws."""

    def __init__(self, *, noisy: bool = False) -> None:
        self.noisy = noisy

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        row = torch.full((WIDTH,), index / SAMPLES)
        if self.noisy:
            row = row + torch.rand(WIDTH) + torch.from_numpy(np.random.rand(WIDTH)).float()
        return row


@dataclass
class Training:
    """A model with dropout, its data, and the loop that a script would have."""

    make_data: Callable[[], tuple[Any, holdfast.ResumableSampler | None, Any]]
    draws_noise: bool = False
    weights: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.3), nn.Linear(8, WIDTH))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.loader, self.sampler, data = self.make_data()
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "rng": holdfast.Rng(),
            "data": data,
        }

    def run(self, steps: range, *, got_first: Callable[[], None] = lambda: None) -> Iterator[int]:
        """Train; each step is given when it is done. ``got_first``: the first batch is there."""
        epochs = chain.from_iterable(iter(lambda: self.loader, None))
        for step, x in zip(steps, epochs, strict=False):
            if step == steps[0]:
                got_first()
            noise = torch.randn_like(x) if self.draws_noise else 0
            (self.model(x + noise) - x.flip(1)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.sampler is not None:
                self.sampler.advance()
            self.weights[step] = b"".join(
                bytes(p.detach().numpy().tobytes()) for p in self.model.parameters()
            )
            yield step


def unbroken(root: Path, training: Training) -> Training:
    """A run that nothing happens to; every step of it can be gone on from."""
    for step in training.run(range(STEPS)):
        holdfast.save(root, training.state, step=step)
    return training


def resumed(
    root: Path, training: Training, after: int, *, rewinds: bool = False
) -> tuple[Training, list[str]]:
    """Another process, as far as that matters, that goes on after a step; and its warnings."""
    with listening() as heard:
        restored = holdfast.load(root, training.state, step=after)
        got_first = restored.rewind if rewinds else lambda: None
        list(training.run(range(after + 1, STEPS), got_first=got_first))
    return training, [e.message for e in heard if isinstance(e, events.Warned)]


def differing(whole: Training, later: Training) -> list[int]:
    """The steps after which the weights are not bit for bit those of the unbroken run."""
    return [step for step, weights in later.weights.items() if weights != whole.weights[step]]


# ── loaders ──────────────────────────────────────────────────────────────────────────────────


def _sampled(
    kind: type[DataLoader[Any]] = DataLoader,
    *,
    own: bool = True,
    noisy: bool = False,
    keeps_place: bool = False,
    **options: Any,
) -> Callable[[], tuple[Any, holdfast.ResumableSampler, Any]]:
    """Loaders over a sampler. ``own``: as the guide makes them. ``keeps_place``: themselves."""

    def make() -> tuple[Any, holdfast.ResumableSampler, Any]:
        sampler = holdfast.ResumableSampler(SAMPLES, batch_size=BATCH, seed=1)
        if own:
            options["generator"] = sampler.generator
        loader = kind(Rows(noisy=noisy), batch_sampler=sampler, **options)
        return loader, sampler, loader if keeps_place else sampler

    return make


def _shuffled(*, own: bool, workers: int = 0) -> Callable[[], tuple[Any, None, Any]]:
    """A loader that shuffles and keeps its place by itself."""

    def make() -> tuple[Any, None, Any]:
        data = Rows()
        order = RandomSampler(data, generator=torch.Generator().manual_seed(1))
        loader = StatefulDataLoader(
            data,
            batch_size=BATCH,
            sampler=order,
            num_workers=workers,
            generator=torch.Generator() if own else None,
        )
        return loader, None, loader

    return make


def _made(**options: Any) -> Callable[[], tuple[Any, holdfast.ResumableSampler, Any]]:
    """Loaders that Holdfast makes."""

    def make() -> tuple[Any, holdfast.ResumableSampler, Any]:
        sampler = holdfast.ResumableSampler(SAMPLES, batch_size=BATCH, seed=1)
        return holdfast.loader(Rows(), sampler, **options), sampler, sampler

    return make


RECIPES: dict[str, Callable[[], Training]] = {
    "loader": lambda: Training(_made()),
    "loader, 2 workers": lambda: Training(_made(num_workers=2)),
    "sampler": lambda: Training(_sampled()),
    "sampler, 2 workers": lambda: Training(_sampled(num_workers=2)),
    "sampler, workers that stay": lambda: Training(
        _sampled(num_workers=1, persistent_workers=True)
    ),
    "sampler, data that draw": lambda: Training(_sampled(noisy=True)),
    "sampler, a loop that draws": lambda: Training(_sampled(), draws_noise=True),
    "stateful loader of a sampler": lambda: Training(_sampled(StatefulDataLoader)),
    "stateful loader in its stead": lambda: Training(
        _sampled(StatefulDataLoader, keeps_place=True)
    ),
    "stateful loader in its stead, 2 workers": lambda: Training(
        _sampled(StatefulDataLoader, keeps_place=True, num_workers=2)
    ),
    "stateful loader that shuffles": lambda: Training(_shuffled(own=True)),
    "stateful loader that shuffles, 2 workers": lambda: Training(_shuffled(own=True, workers=2)),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_under_dropout_are_those_of_the_run_that_never_stopped(
    tmp_path: Path, recipe: str
) -> None:
    make = RECIPES[recipe]
    whole = unbroken(tmp_path, make())
    assert len(set(whole.weights.values())) == STEPS
    bad = {}
    for after in (INSIDE, AT_THE_END) if "workers" in recipe else (0, INSIDE, AT_THE_END, 6, 11):
        later, warned = resumed(tmp_path, make(), after)
        if differing(whole, later) or warned:
            bad[after] = differing(whole, later), warned
    assert bad == {}


# ── loaders that draw from the generators of the state ───────────────────────────────────────

MOVING: dict[str, Callable[[], Training]] = {
    "sampler": lambda: Training(_sampled(own=False)),
    "sampler, workers": lambda: Training(_sampled(own=False, num_workers=1)),
    "sampler, a loop that draws": lambda: Training(_sampled(own=False), draws_noise=True),
    "stateful loader of a sampler": lambda: Training(_sampled(StatefulDataLoader, own=False)),
    "stateful loader in its stead": lambda: Training(
        _sampled(StatefulDataLoader, own=False, keeps_place=True)
    ),
    "stateful loader that shuffles": lambda: Training(_shuffled(own=False)),
    "stateful loader that shuffles, workers": lambda: Training(_shuffled(own=False, workers=1)),
}


@pytest.mark.parametrize("loader", MOVING)
def test_a_loader_that_moves_the_generators_inside_an_epoch_is_named_once(
    tmp_path: Path, loader: str
) -> None:
    make = MOVING[loader]
    whole = unbroken(tmp_path, make())
    later, warned = resumed(tmp_path, make(), INSIDE)
    assert differing(whole, later) == list(range(INSIDE + 1, STEPS))  # of what the warning tells
    (message,) = warned
    assert message.startswith("data: torch's default generator was moved")
    assert "generator=sampler.generator" in message
    assert "restored.rewind()" in message


@pytest.mark.parametrize("loader", MOVING)
def test_rewound_generators_give_the_weights_of_the_run_that_never_stopped(
    tmp_path: Path, loader: str
) -> None:
    make = MOVING[loader]
    whole = unbroken(tmp_path, make())
    later, warned = resumed(tmp_path, make(), INSIDE, rewinds=True)
    assert (differing(whole, later), warned) == ([], [])


def test_at_an_epochs_beginning_a_loader_draws_in_every_run_and_nothing_is_said(
    tmp_path: Path,
) -> None:
    whole = unbroken(tmp_path, MOVING["sampler"]())
    later, warned = resumed(tmp_path, MOVING["sampler"](), AT_THE_END)
    assert (differing(whole, later), warned) == ([], [])


# ── what is said, and what is not ────────────────────────────────────────────────────────────


def _restored_inside(tmp_path: Path, training: Training) -> holdfast.Restored:
    unbroken(tmp_path, Training(training.make_data))
    return holdfast.load(tmp_path, training.state, step=INSIDE)


def _first_update_warns(training: Training) -> bool:
    with listening() as heard:
        list(training.run(range(INSIDE + 1, INSIDE + 3)))
    return any(isinstance(event, events.Warned) for event in heard)


def test_an_evaluation_that_draws_before_training_goes_on_is_named(tmp_path: Path) -> None:
    training = RECIPES["sampler"]()
    restored = _restored_inside(tmp_path, training)
    list(DataLoader(Rows(), batch_size=BATCH))
    assert restored.step == INSIDE
    assert _first_update_warns(training)


def test_generators_that_the_script_sets_again_itself_are_not_complained_about(
    tmp_path: Path,
) -> None:
    training = MOVING["sampler"]()
    restored = _restored_inside(tmp_path, training)
    saved = training.state["rng"].state_dict()
    next(iter(training.loader))
    training.state["rng"].load_state_dict(saved)
    assert restored.step == INSIDE
    assert not _first_update_warns(training)


def test_a_loop_that_draws_its_data_itself_is_not_complained_about(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "rng": holdfast.Rng()}
    holdfast.save(tmp_path, state)
    with listening() as heard:
        restored = holdfast.load(tmp_path, state)
        model(torch.rand(2, WIDTH)).sum().backward()
        optimizer.step()
    assert restored.step == 0
    assert not [event for event in heard if isinstance(event, events.Warned)]


def test_a_state_without_its_generators_is_not_complained_about(tmp_path: Path) -> None:
    training = MOVING["sampler"]()
    del training.state["rng"]
    holdfast.save(tmp_path, training.state)
    restored = holdfast.load(tmp_path, training.state)
    assert restored.step == 0
    assert not _first_update_warns(training)


def test_every_generator_is_set_again(tmp_path: Path) -> None:
    state = {"rng": holdfast.Rng()}
    holdfast.save(tmp_path, state)
    restored = holdfast.load(tmp_path, state)
    expected = _draws()
    for _ in range(2):
        restored.rewind()
        assert _draws() == expected


def test_generators_are_not_set_again_once_an_optimizer_has_stepped(tmp_path: Path) -> None:
    training = RECIPES["sampler"]()
    restored = _restored_inside(tmp_path, training)
    other = torch.optim.SGD(nn.Linear(1, 1).parameters())
    other.step()  # is none of this state
    restored.rewind()
    list(training.run(range(INSIDE + 1, INSIDE + 2)))
    before = _draws()
    with pytest.raises(holdfast.UsageError, match="an optimizer has stepped since the restore"):
        restored.rewind()
    assert _draws() != before


def test_without_generators_in_the_state_none_are_set_again(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"n": 1})
    with pytest.raises(holdfast.UsageError, match=r"Put holdfast\.Rng\(\) into the state"):
        holdfast.load(tmp_path, {"n": 0}).rewind()


def test_what_a_restore_returns_stays_a_plain_value(tmp_path: Path) -> None:
    state = {"rng": holdfast.Rng()}
    holdfast.save(tmp_path, state)
    restored = holdfast.load(tmp_path, state)
    assert "ewind" not in repr(restored)
    copied = pickle.loads(pickle.dumps(restored))
    assert copied == restored == copy.deepcopy(restored)
    assert hash(copied) == hash(restored)
    with pytest.raises(holdfast.UsageError, match="this is a copy"):
        copied.rewind()


def test_a_checkpointer_names_the_loader_too_and_its_restore_can_be_rewound(
    tmp_path: Path,
) -> None:
    unbroken(tmp_path, MOVING["sampler"]())
    training = MOVING["sampler"]()
    with holdfast.Checkpointer(tmp_path, training.state, memory=None, storage=None) as ckpt:
        restored = ckpt.restore(INSIDE)
        assert restored is not None
        expected = _draws()
        restored.rewind()
        assert _draws() == expected
    training = MOVING["sampler"]()
    with holdfast.Checkpointer(tmp_path, training.state, memory=None, storage=None) as ckpt:
        ckpt.restore(INSIDE)  # what it returns is not kept
        gc.collect()
        assert _first_update_warns(training)


@pytest.mark.parametrize(
    ("data", "sampler", "options", "message"),
    [
        (Rows(), RandomSampler(Rows()), {}, "is not a holdfast.Resum"),
        (Rows(), None, {"batch_size": 3, "shuffle": True}, "batch_size, shuffle given"),
        (Rows(), None, {"generator": None}, "generator given, which the sampler decides"),
        ([1, 2, 3], None, {}, f"the data have 3 samples, the sampler was made for {SAMPLES}"),
    ],
)
def test_a_loader_of_what_does_not_fit_is_refused(
    data: Any, sampler: Any, options: dict[str, Any], message: str
) -> None:
    sampler = holdfast.ResumableSampler(SAMPLES, batch_size=BATCH) if sampler is None else sampler
    with pytest.raises(UsageError, match=message):
        holdfast.loader(data, sampler, **options)


def test_a_loader_of_a_device_is_seeded_by_the_place_in_the_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_default_device", lambda: torch.device("cuda"))
    host = torch.Generator
    monkeypatch.setattr("holdfast.data.loader.torch.Generator", lambda device="cpu": host())
    seeds = []
    for _ in range(2):
        loader = holdfast.loader(list(range(8)), holdfast.ResumableSampler(8, 2))
        assert loader.generator is not loader.batch_sampler.generator  # type: ignore[union-attr]
        iter(loader)
        seeds.append(loader.generator.initial_seed())
    assert seeds[0] == seeds[1] == loader.batch_sampler.generator.initial_seed()  # type: ignore[union-attr]
