"""As few images as needed are opened for values, of however many ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.geometry.layout import REPLICATE, Instance, Layout, LeafSpec, Mesh
from holdfast.restore import match as documents
from holdfast.restore.match import FRUITLESS, gather_values
from holdfast.restore.reading.images import Checkpoint
from holdfast.state.mapped.mapper import RuleMapper, StateView
from holdfast.state.objects import sort_objects
from holdfast.state.saved_values import SavedValues
from holdfast.state.selection import LeafSelection

STAGES, REPLICAS = 64, 32


class Counted(nn.Linear):
    """Keeps a number beside its tensors."""

    def get_extra_state(self) -> Any:
        return 0

    def set_extra_state(self, state: Any) -> None: ...


def _stage(number: int) -> Instance:
    """Rank r is in stage r % STAGES."""
    ranks = tuple(range(number, STAGES * REPLICAS, STAGES))
    return Instance(Mesh((REPLICAS,), ranks), (REPLICATE,))


def _layout() -> Layout:
    leaves = [
        LeafSpec(f"m.{n:02}.{what}", "F32", shape, "split", instances)
        for n in range(STAGES)
        for instances in [(_stage(n),)]
        for what, shape in (("bias", (1,)), ("weight", (1, 1)))
    ]
    return Layout(STAGES * REPLICAS, tuple(leaves))


def _document(rank: int) -> dict[str, Any]:
    stage = rank % STAGES
    names = [f"{stage:02}.weight", f"{stage:02}.bias"]
    group = {"params": names, "options": {"lr": stage}}
    optimizer = {"class": "SGD", "groups": [group], "state": {}}
    aliases = {f"m.{stage:02}.tied": f"m.{stage:02}.weight"}
    shared = {"o": optimizer, "m": {f"{stage:02}": rank}, "long": [rank]}
    return {"shared": shared, "own": {}, "aliases": aliases}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks whose images were opened."""
    found: list[int] = []

    def read(_: Checkpoint, rank: int) -> dict[str, Any]:
        found.append(rank)
        return _document(rank)

    monkeypatch.setattr(documents, "read_values", read)
    return found


def _gather(stages: list[str], base: int) -> SavedValues:
    model = nn.ModuleDict({name: Counted(1, 1) for name in stages})
    groups = [{"params": list(one.parameters())} for one in model.values()]
    state = {"m": model, "o": torch.optim.SGD(groups, lr=9.0), "long": 0}
    layout = _layout()
    files: Any = dict.fromkeys(range(layout.world))
    checkpoint = Checkpoint(layout, files, layout.world, {})
    stored = {leaf.name: (leaf.dtype, leaf.shape) for leaf in layout.leaves}
    objects, mapper = sort_objects(state), RuleMapper(None, 0, 1)
    view = StateView(objects, mapper, stored, LeafSelection(), is_plain=True)
    return gather_values(checkpoint, view, base, _document(base))


def test_a_rank_that_has_what_it_had_opens_nothing_more(opened: list[int]) -> None:
    found = _gather(["07"], base=7 + 3 * STAGES)
    assert opened == []
    assert found.problems == ()
    assert found.left == frozenset()
    assert found.shared["long"] == [7 + 3 * STAGES]


def test_one_image_of_each_stage_is_opened_the_lowest(opened: list[int]) -> None:
    found = _gather([f"{n:02}" for n in range(STAGES)], base=5)
    assert sorted(opened) == [n for n in range(STAGES) if n != 5]
    assert [group["options"]["lr"] for group in found.shared["o"]["groups"]] == list(range(STAGES))
    assert found.shared["m"] == {f"{n:02}": n for n in range(STAGES)}
    assert found.shared["long"] == [5]
    assert found.problems == ()


def test_a_rank_of_another_stage_opens_one_image(opened: list[int]) -> None:
    found = _gather(["12", "13"], base=0)
    assert sorted(opened) == [12, 13]
    assert found.left == {
        "o.00.bias: saved, but not in this optimizer",
        "o.00.weight: saved, but not in this optimizer",
        "m.00: has extra state in the checkpoint, but none in the model",
    }
    assert "o.12.bias: saved, but not in this optimizer" in found.taken
    assert found.aliases == {f"m.{n}.tied": f"m.{n}.weight" for n in ("00", "12", "13")}


def test_a_name_that_is_nowhere_costs_a_bounded_number_of_images(opened: list[int]) -> None:
    found = _gather(["lost"], base=0)
    assert len(opened) <= FRUITLESS
    assert found.problems == (
        "o.lost.bias: not in the saved optimizer",
        "o.lost.weight: not in the saved optimizer",
    )
