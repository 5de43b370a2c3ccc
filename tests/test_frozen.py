"""A fine-tuned model, most of it frozen: a durable save writes what is trained, and no more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.capture import saver
from holdfast.catalogue import catalogue
from holdfast.format.manifest import Manifest
from holdfast.storage.local import LocalStore
from support.checkpoints.conformance import check_root
from support.checkpoints.roots import whole
from support.runs.launch import run_ranks

State = dict[str, Any]
WIDE, NARROW = 700, 4


class Adapted(nn.Module):
    """Two frozen layers of 2 MB each, and a low-rank adapter beside each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(WIDE, NARROW, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(NARROW, WIDE, bias=False) for _ in range(2))
        self.layers.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):
            x = torch.tanh(layer(x) + up(down(x)))
        return x


def build(seed: int, *, is_sharded: bool = False) -> State:
    torch.manual_seed(seed)
    model = Adapted()
    if is_sharded:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return {"model": model, "optimizer": adamw(model), "tokens": 0}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train(state: State, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    state["model"](torch.randn(3, WIDE, generator=generator)).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["tokens"] += 3


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def content(state: State) -> dict[str, Any]:
    found: dict[str, Any] = {k: full(v) for k, v in state["model"].state_dict().items()}
    for name, parameter in state["model"].named_parameters():
        for kind, tensor in state["optimizer"].state.get(parameter, {}).items():
            found[f"{name}.{kind}"] = full(tensor)
    return found | {"tokens": state["tokens"]}


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names whose bits are not the same."""
    names = one.keys() ^ other.keys()
    return sorted(names) + [
        name
        for name in one.keys() & other.keys()
        if not (
            torch.equal(one[name].view(torch.int32), other[name].view(torch.int32))
            if isinstance(one[name], torch.Tensor)
            else one[name] == other[name]
        )
    ]


def manifests(root: Path) -> tuple[Manifest, ...]:
    return catalogue(LocalStore(root)).manifests


def files(root: Path) -> dict[str, int]:
    found = [*root.glob("steps/*/*"), *root.glob("parts/*/*")]
    return {str(path.relative_to(root)): path.stat().st_size for path in found}


FROZEN_BYTES = 2 * (WIDE * WIDE + WIDE) * 4


def nothing(state: State) -> None:
    """Training goes on."""


def other_weights(state: State) -> None:
    state["model"].load_state_dict(build(99)["model"].state_dict())


def in_place(state: State) -> None:
    weight = state["model"].layers[0].weight
    before = weight._version
    weight.data[3, 5] += 1
    assert weight._version == before, "nothing tells of it"


def thaw(state: State) -> None:
    state["model"].layers[1].requires_grad_(True)
    state["optimizer"] = adamw(state["model"])


def replace(state: State) -> None:
    layer = state["model"].layers[0]
    layer.weight = nn.Parameter(layer.weight.detach() * 2, requires_grad=False)


def replace_by_equal(state: State) -> None:
    layer = state["model"].layers[0]
    layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)


Change = tuple[Callable[[State], None], bool]
"""Something done before a save, and whether the frozen part must then be written anew."""
STORIES: dict[str, list[Change]] = {
    "in place, replaced, thawed": [
        (nothing, True),
        (nothing, False),
        (in_place, True),
        (replace, True),
        (nothing, False),
        (thaw, True),
        (nothing, False),
    ],
    "other weights": [(nothing, True), (other_weights, True), (nothing, False)],
    "replaced by the same": [(nothing, True), (replace_by_equal, False), (nothing, False)],
}


@pytest.mark.parametrize("story", STORIES)
def test_a_durable_save_writes_what_is_trained_and_whatever_changes_is_noticed(
    story: str, tmp_path: Path
) -> None:
    state = build(0)
    truth, wrote = [], []
    changes = [change for change, _ in STORIES[story]]
    with holdfast.Checkpointer(tmp_path, state, memory=None, storage=None) as checkpointer:
        assert checkpointer.restore() is None
        for step, change in enumerate(changes):
            change(state)
            train(state, step)
            truth.append(content(state))
            before = files(tmp_path)
            checkpointer.save(step, durable=True).wait_durable(60)
            after = files(tmp_path)
            wrote.append(sum(size for path, size in after.items() if path not in before))
    thawed = changes.index(thaw) if thaw in changes else len(changes)
    for step, (size, (_, is_anew)) in enumerate(zip(wrote, STORIES[story], strict=True)):
        if step < thawed:
            assert size > FROZEN_BYTES if is_anew else size < 250_000
        assert (manifests(tmp_path)[step].reused_bytes == 0) == is_anew
        assert manifests(tmp_path)[step].parts
    assert whole(LocalStore(tmp_path)) == [f"1-{step}" for step in range(len(truth))]
    check_root(tmp_path)
    for step, expected in enumerate(truth):
        into = build(7)
        if step >= thawed:
            thaw(into)
        assert holdfast.load(tmp_path, into, step).step == step
        assert differing(content(into), expected) == []


def test_what_is_in_memory_is_restored_and_the_part_in_storage_is_named_again(
    tmp_path: Path,
) -> None:
    state = build(0)
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=None)
    for step in range(2):
        train(state, step)
        checkpointer.save(step, durable=step == 0).wait_captured(60)
    checkpointer.save(1)
    expected = content(state)
    error = RuntimeError("a crash")
    checkpointer.__exit__(type(error), error, None)

    again = build(1)
    with holdfast.Checkpointer(tmp_path, again, storage=None) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None and (restored.step, restored.source) == (1, "memory")
        assert differing(content(again), expected) == []
        train(again, 2)
        checkpointer.save(2, durable=True).wait_durable(60)
    first, last = manifests(tmp_path)
    assert last.parts == first.parts
    into = build(2)
    holdfast.load(tmp_path, into)
    assert differing(content(into), content(again)) == []


def test_a_restore_that_finds_a_part_damaged_has_it_written_anew(tmp_path: Path) -> None:
    state = build(0)
    with holdfast.Checkpointer(tmp_path, state, memory=None, storage=None) as checkpointer:
        train(state, 0)
        checkpointer.save(0, durable=True).wait_durable(60)
        (part,) = manifests(tmp_path)[0].parts
        path = tmp_path / part.path
        data = bytearray(path.read_bytes())
        data[2_000_000] ^= 1
        path.write_bytes(data)
        with pytest.raises(holdfast.RestoreError, match=r"it is noted as damaged"):
            holdfast.load(tmp_path, build(1))
        for step in (1, 2):
            train(state, step)
            checkpointer.save(step, durable=True).wait_durable(60)
    expected = content(state)
    *_, one, last = manifests(tmp_path)
    assert part not in one.parts and one.parts == last.parts
    into = build(3)
    assert holdfast.load(tmp_path, into).step == 2
    assert differing(content(into), expected) == []


def test_a_state_without_enough_that_is_frozen_is_stored_as_ever(tmp_path: Path) -> None:
    model = nn.Linear(100, 100)
    model.weight.requires_grad_(False)
    state = {"model": model, "optimizer": torch.optim.SGD([model.bias])}
    with holdfast.Checkpointer(tmp_path / "run", state, memory=None, storage=None) as checkpointer:
        checkpointer.save(0, durable=True).wait_durable(60)
    holdfast.save(tmp_path / "once", state)
    for root in ("run", "once"):
        (manifest,) = manifests(tmp_path / root)
        assert (manifest.parts, manifest.requires) == ((), ())
    layouts = [list((tmp_path / root / "layouts").iterdir()) for root in ("run", "once")]
    assert [path.name for path in layouts[0]] == [path.name for path in layouts[1]]
    assert "frozen" not in layouts[0][0].read_text()


def test_a_single_save_writes_one_file_of_everything(tmp_path: Path) -> None:
    state = build(0)
    holdfast.save(tmp_path, state)
    (manifest,) = manifests(tmp_path)
    assert (manifest.parts, manifest.requires) == ((), ())
    assert list(files(tmp_path)) == [manifest.images[0].path]
    into = build(1)
    holdfast.load(tmp_path, into)
    assert differing(content(into), content(state)) == []


# ── several ranks ────────────────────────────────────────────────────────────────────────────


def _two_ranks(rank: int, world: int, root: str) -> None:
    """Three durable saves of a sharded model, the last with other weights on rank 1 alone."""
    state = build(0, is_sharded=True)
    with holdfast.Checkpointer(root, state, storage=None) as checkpointer:
        assert checkpointer.restore() is None
        for step in range(3):
            train(state, step)
            if step == 2 and rank == 1:
                state["model"].layers[0].weight.to_local().data += 1
            expected = content(state)
            if rank == 0:
                torch.save(expected, f"{root}.{step}")
            checkpointer.save(step, durable=True).wait_durable(60)
    again = build(1, is_sharded=True)
    assert holdfast.load(root, again, 1).step == 1
    assert differing(content(again), torch.load(f"{root}.1", weights_only=False)) == []


def _load_sharded(rank: int, world: int, root: str) -> list[list[str]]:
    found = []
    for step in range(3):
        state = build(5, is_sharded=True)
        assert holdfast.load(root, state, step).step == step
        found.append(differing(content(state), torch.load(f"{root}.{step}", weights_only=False)))
    return found


def test_two_sharded_ranks_write_only_what_is_trained_and_other_worlds_restore_it(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    run_ranks(2, _two_ranks, str(root))
    first, second, third = manifests(root)
    assert [part.rank for part in first.parts] == [0, 1]
    assert second.parts == first.parts
    assert first.reused_bytes == 0 and first.size_bytes > FROZEN_BYTES
    assert second.image_bytes < 250_000
    # Only the rank that changed something wrote its part again.
    assert third.parts[0] == first.parts[0] and third.parts[1] != first.parts[1]
    check_root(root)
    assert whole(LocalStore(root)) == ["1-0", "1-1", "1-2"]
    for step in range(3):
        into = build(9)
        assert holdfast.load(root, into, step).step == step
        expected = torch.load(f"{root}.{step}", weights_only=False)
        assert differing(content(into), expected) == []
    assert run_ranks(3, _load_sharded, str(root)) == [[[], [], []]] * 3


def test_another_world_writes_its_own_parts(tmp_path: Path) -> None:
    """What two ranks wrote, one rank goes on from: its image is another, and so is its part."""
    root = tmp_path / "root"
    run_ranks(2, _two_ranks, str(root))
    state = build(4)
    with holdfast.Checkpointer(root, state, memory=None, storage=None) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None and restored.step == 2
        for step in (3, 4):
            train(state, step)
            checkpointer.save(step, durable=True).wait_durable(60)
    *_, one, last = manifests(root)
    assert len(one.parts) == 1 and one.reused_bytes == 0
    assert last.parts == one.parts
    into = build(6)
    holdfast.load(root, into)
    assert differing(content(into), content(state)) == []


def test_what_is_frozen_in_the_middle_of_a_run_is_stored_apart_from_then_on(tmp_path: Path) -> None:
    """Wholly live, then frozen: the same leaves, and other places in memory."""
    state = build(0)
    state["model"].layers.requires_grad_(True)
    state["optimizer"] = adamw(state["model"])
    with holdfast.Checkpointer(tmp_path, state, memory=None, storage=None) as checkpointer:
        for step in range(8):
            if step == 4:
                state["model"].layers.requires_grad_(False)
                state["optimizer"] = adamw(state["model"])
            train(state, step)
            checkpointer.save(step, durable=True).wait_durable(60)
        expected = content(state)
    check_root(tmp_path)
    assert [len(manifest.parts) for manifest in manifests(tmp_path)] == [0] * 4 + [1] * 4
    assert len({manifest.parts for manifest in manifests(tmp_path)[4:]}) == 1
    into = build(1)
    holdfast.load(tmp_path, into)
    assert differing(content(into), expected) == []


def _in_place(rank: int, world: int, root: str) -> tuple[list[int], list[bool]]:
    """Snapshots of a sharded model; other tensors of rank 1 alone, and a change behind versions."""
    staged: list[bool] = []
    stage = vars(saver)["stage"]

    def note(volatile: Any, *rest: Any) -> None:
        staged.append(any(leaf.name == "model.layers.0.weight" for leaf in volatile))
        stage(volatile, *rest)

    state = build(0, is_sharded=True)
    lost: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "stage", note)
        with holdfast.Checkpointer(root, state, storage=None) as checkpointer:
            for step in range(10):
                if step == 4 and rank == 1:
                    checkpointer.state["tokens"] = torch.zeros(7)  # as no other rank has it
                train(state, step)
                if step == 7 and rank == 1:
                    state["model"].layers[0].weight.to_local().data[0, 0] += 1
                expected = content(state)
                try:
                    checkpointer.save(step).wait_captured(60)
                except holdfast.HoldfastError:
                    lost.append(step)
                    continue
                if step in (3, 5, 8):  # what is in memory is made durable
                    checkpointer.save(step, durable=True).wait_durable(60)
                    again = build(1, is_sharded=True)
                    again["tokens"] = state["tokens"]
                    assert holdfast.load(root, again, step).step == step
                    assert differing(content(again), expected) == []
    return lost, staged


def test_snapshots_of_sharded_ranks_capture_what_is_frozen_in_place(tmp_path: Path) -> None:
    first, second = run_ranks(2, _in_place, str(tmp_path / "root"))
    assert first[0] == second[0] == [7]
    assert first[1] == [True] * 2 + [False] * 8
    assert second[1] == [True] * 2 + [False] * 6 + [True] * 2
