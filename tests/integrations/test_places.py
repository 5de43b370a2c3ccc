"""The place of a loader in its data, without a framework: what samples draw for themselves is what
an unbroken run draws.
"""

from __future__ import annotations

import random
from base64 import b64decode
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from holdfast.errors import UsageError
from holdfast.integrations.orders import (
    is_process_at,
    order_state,
    packed,
    process_state,
    set_own_generators,
    set_process_generators,
)
from holdfast.integrations.seam import LoaderPlace
from holdfast.state.rng import Rng

SAMPLES, BATCH, LAST = 20, 4, 3
NUMPY: Any = np.random  # its types leave out how a generator of another kind is put into it
BEGIN = Rng().state_dict()


class Noisy(torch.utils.data.Dataset[float]):
    """Samples with noise from the generators of the process."""

    def __init__(self, sources: str) -> None:
        self.sources = sources

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> float:
        noise: dict[str, Callable[[], float]] = {
            "torch": lambda: torch.rand(1).item(),
            "python": random.random,
            "numpy": np.random.random,
        }
        return index + sum(noise[each]() for each in self.sources.split())


def one_ahead(batches: Any) -> Iterator[Any]:
    """Gives a batch when the next one was fetched, as accelerate does."""
    batches = iter(batches)
    now = next(batches)
    for after in batches:
        yield now
        now = after
    yield now


def train(batches: Any) -> Iterator[tuple[list[float], float]]:
    """Yields what each step has: a batch, and a number that it draws itself."""
    for batch in batches:
        yield batch.tolist(), torch.rand(1).item()


def make(sources: str, settle: Callable[[], None], *, runs_ahead: bool) -> tuple[Any, LoaderPlace]:
    loader = DataLoader(Noisy(sources), batch_size=BATCH, shuffle=True)
    return loader, LoaderPlace(loader, settle, runs_ahead=runs_ahead)


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("sources", ["", "torch", "python numpy", "torch python numpy"])
def test_random_samples_go_on_as_if_nothing_had_been(sources: str, runs_ahead: bool) -> None:
    give: Callable[[Any], Any] = one_ahead if runs_ahead else iter
    Rng().load_state_dict(BEGIN)
    loader, place = make(sources, lambda: None, runs_ahead=runs_ahead)
    unbroken = []
    for number, each in enumerate(train(give(loader)), start=1):
        unbroken.append(each)
        if number == LAST:
            saved, generators = place.save(LAST), Rng().state_dict()
    assert len(unbroken) == SAMPLES // BATCH
    assert (saved["ahead"] is not None) == (runs_ahead and sources != "")

    def settle() -> None:
        Rng().load_state_dict(generators)

    torch.manual_seed(5)
    loader, place = make(sources, settle, runs_ahead=runs_ahead)
    place.set(saved)
    settle()
    again = train(give(loader))
    assert list(again) == unbroken[LAST:]
    place.release()


@pytest.mark.parametrize("last", range(1, SAMPLES // BATCH))
def test_the_only_batch_of_an_epoch_that_draws_goes_on_as_if_nothing_had_been(last: int) -> None:
    """Generators are looked at around each batch: none before it says that this one will draw."""

    class Once(Noisy):
        def __getitem__(self, index: int) -> float:
            return super().__getitem__(index) if index == 3 else float(index)

    def begin(settle: Callable[[], None]) -> tuple[Any, LoaderPlace]:
        loader: Any = DataLoader(Once("python numpy"), batch_size=BATCH, shuffle=True)
        return loader, LoaderPlace(loader, settle, runs_ahead=True)

    def draw(batches: Any) -> Iterator[Any]:
        """As a step with dropout by Python and numpy, so that a later state is another one."""
        return ((each, random.random(), np.random.randn()) for each in train(batches))

    Rng().load_state_dict(BEGIN)
    loader, place = begin(lambda: None)
    unbroken = []
    for number, each in enumerate(draw(one_ahead(loader)), start=1):
        unbroken.append(each)
        if number == last:
            saved, generators = place.save(last), Rng().state_dict()
    random.seed(5)
    loader, place = begin(lambda: Rng().load_state_dict(generators))
    place.set(saved)
    Rng().load_state_dict(generators)
    assert list(draw(one_ahead(loader))) == unbroken[last:]
    place.release()


def test_a_place_between_two_batches_that_were_fetched_is_saved_again() -> None:
    """A run that is killed twice: also what was fetched ahead by the second start goes on."""
    Rng().load_state_dict(BEGIN)
    loader, place = make("torch", lambda: None, runs_ahead=True)
    unbroken = list(train(one_ahead(loader)))
    Rng().load_state_dict(BEGIN)
    held: dict[str, Any] = {}

    def settle() -> None:
        Rng().load_state_dict(held["generators"])

    found: list[Any] = []
    loader, place = make("torch", settle, runs_ahead=True)
    for last in (1, 2, len(unbroken)):
        if held:
            torch.manual_seed(last)
            loader, place = make("torch", settle, runs_ahead=True)
            place.set(held["place"])
            settle()
        for each in train(one_ahead(loader)):
            found.append(each)
            if len(found) == last:
                held = {"place": place.save(last), "generators": Rng().state_dict()}
                break
    assert found == unbroken


class Yielding(DataLoader[Any]):
    """A loader whose iteration is a generator, as those that move batches to a device are."""

    def __iter__(self) -> Any:
        assert len(self)
        yield from super().__iter__()


class Lasting(DataLoader[Any]):
    """A loader that keeps one iteration of its own, which cannot be begun elsewhere."""

    def __iter__(self) -> Any:
        self.kept = self.__dict__.get("kept") or DataLoader(self.dataset, BATCH)
        yield from self.kept


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_yields_neither_repeats_nor_skips_batches(workers: int) -> None:
    loader = Yielding(Noisy(""), batch_size=BATCH, num_workers=workers)
    place = LoaderPlace(loader, lambda: None)
    unbroken = [batch.tolist() for batch in loader]
    saved = place.save(LAST)
    place.release()
    place = LoaderPlace(loader, lambda: None)
    place.set(saved)
    assert [batch.tolist() for batch in loader] == unbroken[LAST:]
    place.release()


def test_a_loader_that_cannot_pass_over_batches_is_refused_by_name() -> None:
    loader = Lasting(Noisy(""), batch_size=BATCH)
    place = LoaderPlace(loader, lambda: None)
    list(loader)
    place.set(place.save(LAST))
    with pytest.raises(UsageError, match="a Lasting does not begin its sampler"):
        list(loader)
    place.release()


def test_generators_of_a_place_are_few_values_and_those_of_the_first_versions_are_taken() -> None:
    """A save encodes them at each step: Python's are 625 numbers."""
    sampler: Any = torch.utils.data.RandomSampler(range(SAMPLES))
    sampler.own = random.Random(3)
    loader = DataLoader(Noisy(""), batch_size=BATCH, sampler=sampler)
    state = order_state(loader)
    assert [len(state["python"]), len(state["own"][0])] == [3, 3]
    many = (state["torch"], state["python"][1], state["numpy"][1], state["own"][0][1])
    assert [type(one) for one in many] == [str, str, str, bytes]
    plain = {**process_state(), "own": [sampler.own.getstate()], "seeds": []}
    in_bytes = {**state, "torch": b64decode(state["torch"])}
    for name in ("python", "numpy"):
        in_bytes[name] = [b64decode(one) if n == 1 else one for n, one in enumerate(state[name])]
    drawn = []
    for each in (state, in_bytes, plain, {**plain, "own": [[3, list(plain["own"][0][1]), None]]}):
        set_process_generators(each)
        set_own_generators(loader, each)
        assert sampler.own.getstate() == plain["own"][0]
        drawn.append((random.random(), np.random.random(), torch.rand(1).item()))
    assert drawn[0] == drawn[1] == drawn[2] == drawn[3]


@pytest.mark.parametrize("draws", [np.random.random, np.random.randn, random.random, torch.rand])
@pytest.mark.parametrize("holds_back", [False, True])
def test_a_number_that_is_drawn_is_seen(draws: Callable[..., Any], *, holds_back: bool) -> None:
    np.random.seed(3)
    if holds_back:
        np.random.randn()  # numpy has made two, and gives the other one without a move
    state = process_state()
    assert is_process_at(state)
    draws(1) if draws is torch.rand else draws()
    assert not is_process_at(state)
    set_process_generators(packed(state))
    assert is_process_at(state)


@pytest.fixture
def _numpy_as_before() -> Iterator[None]:
    source = NUMPY.get_bit_generator()
    yield
    NUMPY.set_bit_generator(source)


KINDS = [np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64]


@pytest.mark.usefixtures("_numpy_as_before")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draws", [np.random.random, np.random.randn, np.random.bytes])
@pytest.mark.parametrize("holds_back", [False, True])
def test_a_number_of_another_generator_of_numpy_is_seen(
    kind: Any, draws: Callable[..., Any], *, holds_back: bool
) -> None:
    NUMPY.set_bit_generator(kind(3))
    if holds_back:
        np.random.randn()
    state = process_state()
    assert is_process_at(state)
    drawn = draws(1)
    assert not is_process_at(state)
    set_process_generators(packed(state))
    assert is_process_at(state)
    assert draws(1) == drawn


@pytest.mark.usefixtures("_numpy_as_before")
@pytest.mark.parametrize("kind", KINDS)
def test_random_samples_of_another_generator_of_numpy_go_on(kind: Any) -> None:
    NUMPY.set_bit_generator(kind(3))
    loader, place = make("numpy", lambda: None, runs_ahead=True)
    unbroken = []
    for number, each in enumerate(train(one_ahead(loader)), start=1):
        unbroken.append(each)
        if number == LAST:
            saved, generators = place.save(LAST), Rng().state_dict()

    def settle() -> None:
        Rng().load_state_dict(generators)

    NUMPY.set_bit_generator(kind(5))
    loader, place = make("numpy", settle, runs_ahead=True)
    place.set(saved)
    settle()
    assert list(train(one_ahead(loader))) == unbroken[LAST:]
    place.release()


def test_a_loaders_own_generator_of_numpy_may_be_of_another_kind() -> None:
    sampler: Any = torch.utils.data.RandomSampler(range(SAMPLES))
    sampler.own = np.random.RandomState(np.random.PCG64(3))
    loader = DataLoader(Noisy(""), batch_size=BATCH, sampler=sampler)
    sampler.own.randn()
    state, expected = order_state(loader), sampler.own.randn(2).tolist()
    set_own_generators(loader, state)
    assert sampler.own.randn(2).tolist() == expected


class Choosing:
    """A batch sampler without a length that draws an order, and for each batch a sample more."""

    def __init__(self, source: str) -> None:
        self.source = source

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SAMPLES).tolist()
        for begin in range(0, SAMPLES, BATCH):
            more = random.randrange(SAMPLES) if self.source == "python" else None
            more = int(torch.randint(SAMPLES, ())) if more is None else more
            yield [*order[begin : begin + BATCH], more]


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("source", ["python", "torch"])
@pytest.mark.parametrize("noise", ["", "torch"])
def test_a_sampler_that_draws_for_each_batch_goes_on_as_if_nothing_had_been(
    source: str, noise: str, *, runs_ahead: bool
) -> None:
    give: Callable[[Any], Any] = one_ahead if runs_ahead else iter

    def begin(settle: Callable[[], None]) -> tuple[Any, LoaderPlace]:
        loader: Any = DataLoader(Noisy(noise), batch_sampler=Choosing(source))
        return loader, LoaderPlace(loader, settle, runs_ahead=runs_ahead)

    Rng().load_state_dict(BEGIN)
    loader, place = begin(lambda: None)
    unbroken = []
    for number, each in enumerate(train(give(loader)), start=1):
        unbroken.append(each)
        if number == LAST:
            saved, generators = place.save(LAST), Rng().state_dict()
    torch.manual_seed(5)
    loader, place = begin(lambda: Rng().load_state_dict(generators))
    place.set(saved)
    Rng().load_state_dict(generators)
    assert list(train(give(loader))) == unbroken[LAST:]
    place.release()


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize(
    ("kind", "noise"), [(DataLoader, ""), (DataLoader, "torch python"), (Yielding, "")]
)
def test_two_loaders_that_are_iterated_together_go_on_as_if_nothing_had_been(
    kind: Any, noise: str, *, runs_ahead: bool
) -> None:
    """Both are asked for an iteration before either one draws its order."""
    give: Callable[[Any], Any] = one_ahead if runs_ahead else iter

    def begin() -> tuple[list[Any], list[LoaderPlace]]:
        loaders = [kind(Noisy(noise), batch_size=BATCH, shuffle=True) for _ in range(2)]
        return loaders, [LoaderPlace(each, settle, runs_ahead=runs_ahead) for each in loaders]

    def settle() -> None:
        Rng().load_state_dict(generators)

    def together(loaders: list[Any]) -> Iterator[Any]:
        for batches in give(zip(*loaders, strict=False)):
            yield [batch.tolist() for batch in batches], torch.rand(1).item()

    Rng().load_state_dict(BEGIN)
    loaders, places = begin()
    unbroken, kept = [], {}
    for number, each in enumerate(together(loaders), start=1):
        unbroken.append(each)
        kept[number] = [place.save(number) for place in places], Rng().state_dict()
    for last in (LAST, LAST + 1):  # the second time of what a start that was resumed has saved
        saved, generators = kept[last]
        torch.manual_seed(5)
        loaders, places = begin()
        for place, found in zip(places, saved, strict=True):
            place.set(found)
        settle()
        for number, each in enumerate(together(loaders), start=last + 1):
            assert each == unbroken[number - 1]
            kept[number] = [place.save(number) for place in places], Rng().state_dict()
        assert number == len(unbroken)


def test_a_place_of_versions_that_kept_one_state_for_an_epoch_is_taken() -> None:
    Rng().load_state_dict(BEGIN)
    loader, place = make("", lambda: None, runs_ahead=False)
    unbroken = [batch.tolist() for batch in loader]
    saved = place.save(LAST)
    assert saved.pop("first") is None  # nothing else has drawn: a save has no more than before
    loader, place = make("", lambda: None, runs_ahead=False)
    place.set(saved)
    assert [batch.tolist() for batch in loader] == unbroken[LAST:]


def test_a_stream_in_process_pays_nothing_for_a_batch_that_is_fetched_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is read again from the begin of its epoch, whatever it drew for a batch."""

    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(SAMPLES))

    asked = []

    def count() -> dict[str, Any]:
        asked.append(1)
        return process_state()

    monkeypatch.setattr("holdfast.integrations.seam.process_state", count)
    loader: Any = DataLoader(Stream(), batch_size=BATCH)
    place = LoaderPlace(loader, lambda: None, runs_ahead=True)
    assert len(list(loader)) == SAMPLES // BATCH
    assert len(asked) == 1  # when it was asked for the iteration
    place.release()
