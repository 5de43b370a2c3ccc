"""Which frozen leaves count as constant, by what their images showed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import UnsupportedState
from holdfast.state.describe import Describer, Description

NAME = "model.base"


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.ones(32, 16), requires_grad=False)
        self.adapter = nn.Parameter(torch.ones(7))


def build() -> tuple[Adapted, Describer]:
    model = Adapted()
    state: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD([model.adapter], 0.1)}
    return model, Describer(state, 0, mark_frozen=True)


def lazy(found: Description) -> bool:
    (binding,) = (one for one in found.bindings if one.name == NAME)
    assert (binding.staged is None) == binding.lazy
    assert found.bindings.sources[NAME][0].binding is binding
    return binding.lazy


def take(found: Description, checksum: str, piece: str = "p") -> tuple[str, bool] | None:
    """What the worker tells of an image of this description."""
    assert found.frozen is not None
    in_place = {NAME} if lazy(found) else set()
    pieces = {} if NAME in found.frozen.restless else {NAME: (piece,)}
    return found.frozen.take_image(pieces, f"all {checksum}", lambda _: checksum, in_place)


def settle(describer: Describer) -> None:
    for _ in range(2):
        found = describer.describe(is_checked=True)
        assert not lazy(found) and take(found, "a") is None
    assert lazy(describer.describe(is_checked=True))


def test_a_leaf_is_captured_in_place_from_the_third_snapshot_on_but_never_for_a_durable_save() -> (
    None
):
    _, describer = build()
    settle(describer)
    found = describer.describe(is_checked=True)
    again = describer.describe(is_checked=True)
    assert again.bindings is found.bindings and take(again, "a") is None
    durable = describer.describe()
    assert not lazy(durable) and found.bindings.origin is durable.bindings
    assert take(durable, "a") is None
    assert lazy(describer.describe(is_checked=True))


def test_durable_saves_show_that_a_leaf_is_constant_as_snapshots_do() -> None:
    _, describer = build()
    for _ in range(2):
        assert take(describer.describe(), "a") is None
    assert lazy(describer.describe(is_checked=True))


def test_another_checksum_refutes_an_image_and_two_equal_ones_are_needed_again() -> None:
    _, describer = build()
    settle(describer)
    assert take(describer.describe(is_checked=True), "b") == (NAME, True)
    for _ in range(2):
        found = describer.describe(is_checked=True)
        assert not lazy(found) and take(found, "b") is None
    assert lazy(describer.describe(is_checked=True))


@pytest.mark.promise
def test_a_leaf_that_changes_between_images_is_never_captured_in_place() -> None:
    _, describer = build()
    for turn in range(5):
        found = describer.describe(is_checked=True)
        assert not lazy(found) and take(found, f"{turn}") is None


def test_a_leaf_refuted_twice_is_always_copied() -> None:
    _, describer = build()
    settle(describer)
    assert take(describer.describe(is_checked=True), "b") == (NAME, True)
    for _ in range(2):
        assert take(describer.describe(is_checked=True), "b") is None
    assert take(describer.describe(is_checked=True), "c") == (NAME, True)
    for _ in range(4):
        found = describer.describe(is_checked=True)
        assert not lazy(found) and take(found, "d") is None


def test_a_version_is_seen_before_the_copy_and_costs_no_snapshot() -> None:
    model, describer = build()
    settle(describer)
    model.base.add_(1)
    found = describer.describe(is_checked=True)
    assert not lazy(found) and take(found, "b") is None


@pytest.mark.promise
def test_another_tensor_in_its_place_is_copied_before_the_save_returns() -> None:
    model, describer = build()
    settle(describer)
    model.base = nn.Parameter(torch.full((32, 16), 3.0), requires_grad=False)
    found = describer.describe(is_checked=True)
    assert not lazy(found) and take(found, "b") is None


def test_nothing_shows_that_a_leaf_is_the_same_where_other_pieces_of_it_were_stored() -> None:
    _, describer = build()
    settle(describer)
    assert take(describer.describe(is_checked=True), "a", "other") == (NAME, False)
    for _ in range(2):
        found = describer.describe(is_checked=True)
        assert not lazy(found) and take(found, "a", "other") is None
    assert lazy(describer.describe(is_checked=True))


def test_one_leaf_that_changes_does_not_hide_that_another_is_the_same() -> None:
    model, describer = build()
    model.other = nn.Parameter(torch.ones(32, 16), requires_grad=False)
    for turn in range(4):
        found = describer.describe(is_checked=True)
        assert found.frozen is not None
        sums = {NAME: "a", "model.other": f"{turn}"}
        pieces = {name: ("p", name) for name in sums if name not in found.frozen.restless}
        in_place = {one.name for one in found.bindings if one.lazy}
        told = found.frozen.take_image(pieces, f"{turn}", sums.__getitem__, in_place)
        assert told is None
    found = describer.describe(is_checked=True)
    assert lazy(found) and found.frozen is not None and found.frozen.restless == {"model.other"}


@pytest.mark.promise
def test_a_leaf_that_is_thawed_has_all_that_are_frozen_copied_first_for_they_lie_elsewhere() -> (
    None
):
    model, describer = build()
    model.other = nn.Parameter(torch.ones(32, 16), requires_grad=False)
    settle(describer)
    model.other.requires_grad_(True)
    found = describer.describe(is_checked=True)
    assert not lazy(found) and take(found, "a", "elsewhere") is None


def test_other_leaves_come_and_go_and_what_is_constant_stays_in_place() -> None:
    model, describer = build()
    settle(describer)
    model.more = nn.Parameter(torch.ones(5))
    found = describer.describe(is_checked=True)
    assert lazy(found) and take(found, "a") is None


def test_a_frozen_tensor_without_memory_is_refused_by_name() -> None:
    model, describer = build()
    model.other = nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False)
    with pytest.raises(UnsupportedState, match=r"model\.other"):
        describer.describe(is_checked=True)


def test_a_view_that_differs_from_its_memory_is_always_copied() -> None:
    model, describer = build()
    model.base = nn.Parameter(torch.ones(32, 16, dtype=torch.complex64).conj(), requires_grad=False)
    for _ in range(4):
        found = describer.describe(is_checked=True)
        assert not lazy(found) and take(found, "a") is None
