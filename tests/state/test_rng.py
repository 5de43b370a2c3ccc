"""Random generators: they go on where they were, and what new ranks draw is a rule."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.errors import StateMismatch
from holdfast.format import values as codec
from holdfast.state.rng import numpy_state, seeds_of

NUMPY: Any = np.random  # its types leave out how a generator of another kind is put into it
KINDS = [np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64]


@pytest.fixture(autouse=True)
def _generators_as_before() -> Iterator[None]:
    rng = holdfast.Rng()
    source, before = NUMPY.get_bit_generator(), rng.state_dict()
    yield
    NUMPY.set_bit_generator(source)
    rng.load_state_dict(before)


def _draws() -> tuple[list[float], list[float], list[float]]:
    return [random.random() for _ in range(3)], np.random.rand(3).tolist(), torch.rand(3).tolist()


def test_generators_go_on_where_they_were() -> None:
    rng = holdfast.Rng()
    np.random.normal()  # of which there is always a pair
    saved = rng.state_dict()
    expected = _draws()
    _draws()
    rng.load_state_dict(saved)
    assert _draws() == expected


def _derived(saved: dict[str, Any], rank: int) -> Any:
    holdfast.Rng().derive(saved, rank)
    return _draws()


def _as_read(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = codec.decode(
        codec.from_bytes(codec.to_bytes(codec.encode(state)), "a test")
    )
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_generator_that_numpy_was_given_goes_on_where_it_was(kind: Any) -> None:
    rng = holdfast.Rng()
    NUMPY.set_bit_generator(kind(3))
    np.random.randn(3)  # an odd count: a number is held back for the next call
    np.random.randint(2**31, dtype=np.int32)  # and, of 64 bits that were drawn, 32
    saved = _as_read(rng.state_dict())
    expected = np.random.randn(4), np.random.randint(2**31, size=3, dtype=np.int32), _draws()
    NUMPY.set_bit_generator(kind(9))
    np.random.randn()
    rng.load_state_dict(saved)
    found = np.random.randn(4), np.random.randint(2**31, size=3, dtype=np.int32), _draws()
    assert codec.encode(found) == codec.encode(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_rank_seeds_the_generator_that_numpy_was_given(kind: Any) -> None:
    rng = holdfast.Rng()
    NUMPY.set_bit_generator(kind(3))
    saved, found = rng.state_dict(), []
    for drawn, rank in ((1, 7), (2, 7), (2, 8)):
        np.random.randn(drawn)
        rng.derive(saved, rank)
        found.append(np.random.randn(3).tolist())
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(("saved", "now"), [("MT19937", "PCG64"), ("PCG64", "MT19937")])
def test_a_generator_of_numpy_of_another_kind_is_refused_by_name(saved: str, now: str) -> None:
    NUMPY.set_bit_generator(getattr(np.random, saved)(3))
    state = holdfast.Rng().state_dict()
    NUMPY.set_bit_generator(getattr(np.random, now)(3))
    with pytest.raises(StateMismatch, match=f"was a {saved} when it was saved, now it is a {now}"):
        holdfast.Rng().load_state_dict(state)


BEGIN = random.Random(4).getstate()
MOVES: list[tuple[str, Callable[[], Any]]] = [
    ("nothing", lambda: None),
    ("a word", random.random),
    ("bits", lambda: random.getrandbits(1)),
    ("the second of two", lambda: random.gauss(0, 1)),
    ("a seed", lambda: random.seed(4)),
    ("back", lambda: random.setstate(BEGIN)),
    ("a word of numpy", np.random.random),
    ("the second of two of numpy", np.random.randn),
    ("what numpy remembers of a distribution", lambda: np.random.binomial(40, 0.5)),
    ("a seed of numpy", lambda: np.random.seed(4)),
    ("numpy's held back", lambda: _change_numpy(3, 1)),
    ("numpy's whether", lambda: _change_numpy(3, 0)),
    ("numpy's number", lambda: _change_numpy(4, 0.25)),
    ("another of numpy's kind", lambda: NUMPY.set_bit_generator(np.random.MT19937(4))),
    ("another kind of numpy", lambda: NUMPY.set_bit_generator(np.random.PCG64(4))),
]


def _change_numpy(at: int, value: float) -> None:
    state = numpy_state()
    if isinstance(state, tuple):
        np.random.set_state((*state[:at], value, *state[at + 1 :]))


@pytest.mark.promise
@pytest.mark.parametrize("seed", range(5))
def test_the_state_is_that_of_the_generator_whatever_has_been_done_to_it(seed: int) -> None:
    order = random.Random(seed)
    for _ in range(200):
        name, move = order.choice(MOVES)
        move()
        expected: Any = np.random.get_state(legacy=False)
        found: Any = numpy_state()
        if not isinstance(found, dict):
            kind, keys, place, has_gauss, gauss = found
            found = {"bit_generator": kind, "state": {"key": keys, "pos": place}}
            found |= {"has_gauss": has_gauss, "gauss": gauss}
        assert codec.encode(found) == codec.encode(expected), name


def test_a_new_rank_draws_the_same_at_every_restore_and_other_numbers_than_any_rank() -> None:
    saved = holdfast.Rng().state_dict()
    drawn = [_draws(), *(_derived(saved, rank) for rank in range(1, 40))]
    _draws()
    assert _derived(saved, 7) == drawn[7]
    for of_kind in zip(*drawn, strict=True):
        assert len(set(map(tuple, of_kind))) == len(drawn)


@pytest.mark.parametrize("kind", range(3))
def test_whatever_rank_0_has_drawn_since_new_ranks_draw_other_numbers(kind: int) -> None:
    """Else ranks that come, go and come again would draw what they had drawn before."""
    saved = holdfast.Rng().state_dict()
    draw: Any = [random.random, np.random.rand, lambda: torch.rand(1)][kind]
    draw()
    later = holdfast.Rng().state_dict()
    for a, b in zip(_derived(saved, 3), _derived(later, 3), strict=True):
        assert a != b


def test_no_two_new_ranks_and_no_two_generators_are_seeded_alike() -> None:
    saved = holdfast.Rng().state_dict()
    seeds = [seeds_of(saved, rank) for rank in range(300)]
    for kind in ("python", "numpy", "torch", "cuda"):
        assert len({one[kind] for one in seeds}) == 300
        assert all(0 <= one[kind] < 2**32 for one in seeds)
    assert len(set(seeds[0].values())) == 4


def test_numpy_and_torch_do_not_draw_the_same_bits_on_a_new_rank() -> None:
    """Seeded alike they would: both are the Mersenne twister."""
    holdfast.Rng().derive(holdfast.Rng().state_dict(), 5)
    ours = set(torch.randint(0, 2**32, (1000,)).tolist())
    assert len(ours & set(np.random.randint(0, 2**32, 2000).tolist())) < 3


class Devices:
    """Stands for torch's module of a type of accelerator, on a host with so many of them."""

    def __init__(self, kind: str, count: int, used: int) -> None:
        self.states = [torch.full((16,), device, dtype=torch.uint8) for device in range(count)]
        self.kind, self.used = kind, used
        self.seeds: list[int] = []
        self.is_used = True

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch, "get_device_module", lambda kind: self if kind == self.kind else None)
        accelerator = {
            "current_accelerator": lambda: torch.device(self.kind),
            "device_count": lambda: len(self.states),
            "current_device_index": lambda: self.used,
        }
        for name, answer in accelerator.items():
            patch.setattr(torch.accelerator, name, answer)

    def is_available(self) -> bool:
        return bool(self.states)

    def is_initialized(self) -> bool:
        return self.is_used

    def manual_seed_all(self, seed: int) -> None:
        self.seeds.append(seed)

    def get_rng_state(self, device: int) -> torch.Tensor:
        return self.states[device]

    def set_rng_state(self, state: torch.Tensor, device: int) -> None:
        self.states[device] = state


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mtia"])
def test_the_device_in_use_goes_on_with_what_the_device_in_use_had(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Devices(kind, 4, used=3).install(monkeypatch)
    saved = holdfast.Rng().state_dict()
    there = Devices(kind, 2, used=1)
    there.install(monkeypatch)
    holdfast.Rng().load_state_dict(saved)
    assert [int(state[0]) for state in there.states] == [0, 3]
    del saved[f"{kind}_device"]  # saved by a version that did not tell
    holdfast.Rng().load_state_dict(saved)
    assert [int(state[0]) for state in there.states] == [0, 1]


def test_what_a_checkpoint_has_of_gpus_is_under_the_names_it_always_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Devices("cuda", 2, used=1).install(monkeypatch)
    saved = holdfast.Rng().state_dict()
    assert saved["cuda"] == [bytes(16), bytes([1] * 16)]
    assert saved["cuda_device"] == 1


def test_a_device_of_another_type_keeps_its_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    Devices("cuda", 2, used=1).install(monkeypatch)
    saved = holdfast.Rng().state_dict()
    there = Devices("xpu", 2, used=0)
    there.install(monkeypatch)
    there.states = [torch.full((16,), 7, dtype=torch.uint8)] * 2
    holdfast.Rng().load_state_dict(saved)
    assert [int(state[0]) for state in there.states] == [7, 7]


def test_devices_that_were_not_used_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Devices("xpu", 2, used=0)
    there.is_used = False
    there.install(monkeypatch)
    assert "xpu" not in holdfast.Rng().state_dict()


def test_a_host_without_devices_loads_what_was_saved_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Devices("cuda", 2, used=1).install(monkeypatch)
    saved = holdfast.Rng().state_dict()
    Devices("cuda", 0, used=0).install(monkeypatch)
    expected = _draws()
    holdfast.Rng().load_state_dict(saved)
    assert _draws() == expected


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_new_rank_seeds_its_devices_by_their_type(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = holdfast.Rng().state_dict()
    there = Devices(kind, 1, used=0)
    there.install(monkeypatch)
    holdfast.Rng().derive(saved, 5)
    assert there.seeds == [seeds_of(saved, 5)[kind]]
    assert there.seeds[0] not in {seeds_of(saved, 5)[one] for one in ("python", "numpy", "torch")}


def test_a_device_without_generators_has_none_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    Devices("xpu", 1, used=0).install(monkeypatch)
    monkeypatch.setattr(torch, "get_device_module", lambda _: object())
    assert "xpu" not in holdfast.Rng().state_dict()
    holdfast.Rng().derive(holdfast.Rng().state_dict(), 5)
