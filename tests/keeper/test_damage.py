"""Bits flip in the arena: another record, another image or storage is used, never what is wrong.

A run leaves step 1 in storage and in memory, step 2 in memory alone; every element of each is the
step's number. Then something is damaged, and the run is started again.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.catalogue import LAYOUTS
from holdfast.errors import RestoreError
from holdfast.format.image import header_size
from holdfast.protocol.arena import IMAGE_START, PAGE_BYTES, SlotFile
from support.runs.keepers import arena_of, hand_over, kill_keeper, slots_of

Damage = Callable[[Path], None]


def build(value: float) -> dict[str, Any]:
    model = nn.Linear(300, 1000)
    fill(model, value)
    return {"model": model, "notes": "x" * 5000}


def fill(model: nn.Linear, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Root and arena of the run, to be copied: making them takes longest."""
    directory = tmp_path_factory.mktemp("left")
    arena_home = Path(tempfile.mkdtemp(prefix="hf-test-", dir="/dev/shm"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_ARENA_DIR", str(arena_home))
        state = build(1)
        checkpointer = holdfast.Checkpointer(directory / "root", state, storage=None)
        checkpointer.save(1, durable=True).wait_durable(60)
        fill(state["model"], 2)
        checkpointer.save(2).wait_captured(60)
        crash(checkpointer)
        kill_keeper(arena_home)
    (arena_of(arena_home) / "keeper.sock").unlink()
    shutil.move(arena_home, directory / "arenas")
    return directory


@pytest.fixture
def root(left_behind: Path, tmp_path: Path, arena_dir: Path) -> Path:
    shutil.copytree(left_behind / "root", tmp_path / "root")
    shutil.copytree(left_behind / "arenas", arena_dir, dirs_exist_ok=True)
    hand_over(arena_dir, tmp_path / "root")
    return tmp_path / "root"


def crash(checkpointer: holdfast.Checkpointer) -> None:
    error = RuntimeError("a crash")
    checkpointer.__exit__(type(error), error, None)


def restored(root: Path) -> tuple[int, str]:
    """(step, source) of what a new start of the run gets, which must be whole."""
    state = build(-1)
    with holdfast.Checkpointer(root, state, storage=None) as checkpointer:
        found = checkpointer.restore()
    assert found is not None
    values = {value for p in state["model"].parameters() for value in p.flatten().tolist()}
    assert values == {float(found.step)}
    assert state["notes"] == "x" * 5000
    return found.step, found.source


# ── what can be damaged ──────────────────────────────────────────────────────────────────────


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    with path.open("r+b") as file:
        file.write(data)


def slot_of(arena_home: Path, step: int) -> Path:
    (path,) = [p for p, record in slots_of(arena_home).items() if record and record.step == step]
    return path


def record_pages(path: Path) -> tuple[int, int]:
    """Where the newest record stands, and where the one before."""
    file = SlotFile.open(path, writable=False)
    sequences = [int.from_bytes(file.map[at + 8 : at + 16], "little") for at in (0, PAGE_BYTES)]
    file.close()
    return (0, PAGE_BYTES) if sequences[0] > sequences[1] else (PAGE_BYTES, 0)


def flip_newest_record(arena_home: Path) -> None:
    path = slot_of(arena_home, 2)
    flip(path, record_pages(path)[0] + 60)


def flip_older_record(arena_home: Path) -> None:
    path = slot_of(arena_home, 2)
    flip(path, record_pages(path)[1] + 60)


def flip_both_records(arena_home: Path) -> None:
    path = slot_of(arena_home, 2)
    for page in record_pages(path):
        flip(path, page + 60)


def flip_in_image(where: Callable[[int, int], int]) -> Damage:
    """Flip a bit of step 2's image, at ``where(start of the data, size of the image)``."""

    def damage(arena_home: Path) -> None:
        path = slot_of(arena_home, 2)
        record = slots_of(arena_home)[path]
        assert record is not None
        image = path.read_bytes()[IMAGE_START : IMAGE_START + record.image_bytes]
        data_start = header_size(image[:8], str(path), len(image))
        flip(path, IMAGE_START + where(data_start, len(image)))

    return damage


def flip_layout(arena_home: Path) -> None:
    (path,) = (arena_of(arena_home) / "layouts").glob("*.json")
    flip(path, path.stat().st_size // 2)


def remove_layout(arena_home: Path) -> None:
    (path,) = (arena_of(arena_home) / "layouts").glob("*.json")
    path.unlink()


def flip_incarnation(arena_home: Path) -> None:
    (path,) = (arena_of(arena_home) / "incarnations").iterdir()
    flip(path, path.stat().st_size // 2)


def remove_incarnation(arena_home: Path) -> None:
    (path,) = (arena_of(arena_home) / "incarnations").iterdir()
    path.unlink()


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        pytest.param(flip_newest_record, (1, "memory"), id="newest record"),
        pytest.param(flip_older_record, (2, "memory"), id="older record"),
        pytest.param(flip_both_records, (1, "memory"), id="both records"),
        pytest.param(flip_in_image(lambda start, size: 3), (1, "memory"), id="length of header"),
        pytest.param(flip_in_image(lambda start, size: 40), (1, "memory"), id="header"),
        pytest.param(
            flip_in_image(lambda start, size: start - 1), (1, "memory"), id="padding of header"
        ),
        pytest.param(flip_in_image(lambda start, size: start + 77_777), (1, "memory"), id="data"),
        pytest.param(
            flip_in_image(lambda start, size: start + 1_204_500), (1, "memory"), id="values"
        ),
        pytest.param(flip_in_image(lambda start, size: size - 4096), (1, "memory"), id="table"),
        pytest.param(flip_layout, (1, "storage"), id="layout"),
        pytest.param(remove_layout, (1, "storage"), id="no layout"),
        pytest.param(flip_incarnation, (2, "memory"), id="incarnation"),
        pytest.param(remove_incarnation, (2, "memory"), id="no incarnation"),
    ],
)
def test_what_is_damaged_in_memory_is_mended_or_another_source_is_used(
    damage: Damage, expected: tuple[int, str], root: Path, arena_dir: Path
) -> None:
    damage(arena_dir)
    assert restored(root) == expected


@pytest.mark.parametrize("seed", range(4))
def test_a_bit_flipped_anywhere_in_an_image_is_never_restored(
    seed: int, root: Path, arena_dir: Path
) -> None:
    flip_in_image(lambda start, size: random.Random(seed).randrange(size))(arena_dir)
    assert restored(root) in ((1, "memory"), (2, "memory"))  # which looks at all elements


def test_when_every_source_is_damaged_the_error_lists_them_all(root: Path, arena_dir: Path) -> None:
    flip_layout(arena_dir)
    (layout,) = (root / LAYOUTS).iterdir()
    flip(layout, 30)
    with pytest.raises(RestoreError) as caught:
        restored(root)
    for source in ("memory 1-2", "memory 1-1", "storage 1-1"):
        assert source in str(caught.value)
    holdfast.Checkpointer(root, build(0), storage=None).close()


def test_a_layout_damaged_in_memory_does_not_replace_the_one_in_storage(
    root: Path, arena_dir: Path
) -> None:
    (layout,) = (root / LAYOUTS).iterdir()
    good = layout.read_bytes()
    flip_layout(arena_dir)
    # At the end the newest snapshot is to be made durable: here with a layout that is wrong.
    checkpointer = holdfast.Checkpointer(root, build(0))
    with pytest.raises(holdfast.PersistFailed, match="layout"):
        checkpointer.close()
    assert layout.read_bytes() == good
    with holdfast.open(root) as found:
        assert found.step == 1
        assert set(found.read("model.weight").flatten().tolist()) == {1.0}


def test_a_generation_whose_incarnation_record_is_damaged_is_made_durable_after_all(
    root: Path, arena_dir: Path
) -> None:
    flip_incarnation(arena_dir)
    holdfast.Checkpointer(root, build(0)).close()
    with holdfast.open(root) as found:
        assert found.step == 2
        assert set(found.read("model.weight").flatten().tolist()) == {2.0}
