"""Files and memory that changed: another source is used and said so, or a clear error lists all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast.format.manifest import Incarnation, Manifest, Root, seal, unseal
from support.runs.mishaps import build, content, dropped, files, flip, listening, train

HEADER, DATA, LAST = 40, 200_000, -3


def _two_checkpoints(root: Path) -> dict[str, bytes]:
    """Steps 0 and 1; gives back the content at 0."""
    state = build()
    with holdfast.Checkpointer(root, state, storage=None) as checkpointer:
        train(state, 0)
        checkpointer.save(0, durable=True).wait_durable(30)
        first = content(state)
        train(state, 1)
        checkpointer.save(1, durable=True).wait_durable(30)
    return first


def _image(root: Path, step: int) -> Path:
    (found,) = root.glob(f"steps/1-{step}-*/*.safetensors")
    return found


def _flip_image(at: int) -> Callable[[Path], None]:
    return lambda root: flip(_image(root, 1), at)


def _truncate_image(root: Path) -> None:
    image = _image(root, 1)
    image.write_bytes(image.read_bytes()[:-5000])


def _remove_image(root: Path) -> None:
    _image(root, 1).unlink()


def _empty_image(root: Path) -> None:
    _image(root, 1).write_bytes(b"")


def _flip_manifest(root: Path) -> None:
    flip(root / "manifests" / "1-1.json", 100)


def _empty_manifest(root: Path) -> None:
    (root / "manifests" / "1-1.json").write_bytes(b"")


DAMAGES = {
    "header": (_flip_image(HEADER), "header"),
    "data": (_flip_image(DATA), "block 0"),
    "table": (_flip_image(LAST), "block table"),
    "truncated image": (_truncate_image, "bytes, the manifest says"),
    "empty image": (_empty_image, "has 0 bytes, the manifest says"),
    "missing image": (_remove_image, "there is no steps/1-1"),
    "manifest": (_flip_manifest, "manifests/1-1.json"),
    "empty manifest": (_empty_manifest, "manifests/1-1.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_an_event_and_named_when_asked_for(
    tmp_path: Path, damage: str
) -> None:
    first = _two_checkpoints(tmp_path)
    harm, said = DAMAGES[damage]
    harm(tmp_path)
    into = build(seed=1)
    with listening() as heard:
        assert holdfast.load(tmp_path, into).step == 0
    assert content(into) == first
    assert len(dropped(heard)) == 1
    again = build(seed=2)
    with listening() as heard, holdfast.Checkpointer(tmp_path, again, storage=None) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None and restored.step == 0
        train(again, 1)
        checkpointer.save(1).wait_captured(30)
    assert dropped(heard)
    with pytest.raises(holdfast.RestoreError, match="1-1") as caught:
        holdfast.load(tmp_path, build(), 1 if "manifest" in damage else "1-1")
    assert said in str(caught.value)


def test_with_no_good_source_left_every_one_is_listed_with_its_reason(tmp_path: Path) -> None:
    _two_checkpoints(tmp_path)
    flip(_image(tmp_path, 1), DATA)
    flip(_image(tmp_path, 0), HEADER)
    with pytest.raises(holdfast.RestoreError) as caught:
        holdfast.load(tmp_path, build())
    text = str(caught.value)
    assert "storage 1-1: block 0 of steps/1-1" in text
    assert "storage 1-0: header of steps/1-0" in text


def test_manifests_that_cannot_be_read_are_never_taken_for_an_empty_root(tmp_path: Path) -> None:
    _two_checkpoints(tmp_path)
    for manifest in (tmp_path / "manifests").iterdir():
        flip(manifest, 100)
    there, state = files(tmp_path), build()
    before = content(state)
    checkpointer = holdfast.Checkpointer(tmp_path, state)
    with pytest.raises(holdfast.RestoreError, match=r"manifests/1-0\.json cannot be read"):
        checkpointer.restore()
    with pytest.raises(holdfast.UsageError, match=r"call restore\(\) before the first save"):
        checkpointer.save(0)
    checkpointer.close()
    with pytest.raises(holdfast.RestoreError, match=r"manifests/1-1\.json cannot be read"):
        holdfast.load(tmp_path, state)
    assert content(state) == before
    left = files(tmp_path)
    assert {name: left[name] for name in there if name != ".writer.lock"} == {
        name: data for name, data in there.items() if name != ".writer.lock"
    }


@pytest.mark.parametrize("at", [HEADER, LAST])
def test_objects_that_were_not_touched_yet_may_be_used_after_a_failed_restore(
    tmp_path: Path, at: int
) -> None:
    state = build()
    holdfast.save(tmp_path, state, 1)
    flip(next(tmp_path.glob("steps/*/*")), at)
    again = build(seed=1)
    train(again, 0)
    before = content(again)
    with holdfast.Checkpointer(tmp_path, again, storage=None) as checkpointer:
        with pytest.raises(holdfast.RestoreError):
            checkpointer.restore()
        assert content(again) == before
        with pytest.raises(holdfast.UsageError, match="call restore"):  # and not poisoned
            checkpointer.step(0)


def test_a_changed_layout_is_found_and_named(tmp_path: Path) -> None:
    holdfast.save(tmp_path, build(), 1)
    (layout,) = (tmp_path / "layouts").iterdir()
    flip(layout, 100)
    with pytest.raises(holdfast.RestoreError, match=f"layout layouts/{layout.name}: stored"):
        holdfast.load(tmp_path, build())


def test_a_changed_record_of_an_incarnation_hides_no_checkpoint(tmp_path: Path) -> None:
    _two_checkpoints(tmp_path)
    flip(tmp_path / "incarnations" / "1.json", 50)
    assert holdfast.load(tmp_path, build(1)).step == 1


def test_a_root_that_lost_its_name_goes_on_with_the_history_it_has(tmp_path: Path) -> None:
    _two_checkpoints(tmp_path)
    before = unseal(Root, (tmp_path / "holdfast.json").read_bytes(), "root").run_id
    (tmp_path / "holdfast.json").unlink()
    assert holdfast.load(tmp_path, build(1)).step == 1
    with holdfast.Checkpointer(tmp_path, build(1), storage=None) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None and restored.step == 1
    assert unseal(Root, (tmp_path / "holdfast.json").read_bytes(), "root").run_id == before


def test_a_root_whose_name_is_damaged_says_to_move_it_away_and_goes_on_without_it(
    tmp_path: Path,
) -> None:
    _two_checkpoints(tmp_path)
    name = tmp_path / "holdfast.json"
    before = unseal(Root, name.read_bytes(), "root").run_id
    flip(name, 20)
    with pytest.raises(holdfast.FormatError, match=r"Move holdfast\.json away"):
        holdfast.Checkpointer(tmp_path, build(1), storage=None)
    name.rename(tmp_path / "damaged.json")
    with holdfast.Checkpointer(tmp_path, build(1), storage=None) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None and restored.step == 1
    assert unseal(Root, name.read_bytes(), "root").run_id == before


DOCUMENTS: list[tuple[str, Any]] = [
    ("holdfast.json", Root),
    ("manifests/1-1.json", Manifest),
    ("incarnations/1.json", Incarnation),
]


@pytest.mark.parametrize(("name", "kind"), DOCUMENTS)
def test_a_newer_format_is_neither_guessed_at_nor_taken_for_absent(
    tmp_path: Path, name: str, kind: Any
) -> None:
    _two_checkpoints(tmp_path)
    path = tmp_path / name
    document = unseal(kind, path.read_bytes(), name)
    path.write_bytes(seal(msgspec.structs.replace(document, format_version=2)))
    there, state = files(tmp_path), build()
    before = content(state)
    for look in (
        lambda: holdfast.load(tmp_path, state),
        lambda: holdfast.open(tmp_path),
        lambda: holdfast.Checkpointer(tmp_path, state),
        lambda: holdfast.save(tmp_path, state, 9),
    ):
        with pytest.raises(holdfast.NewerFormat, match=name):
            look()
    assert content(state) == before
    left = files(tmp_path)
    assert {n: left[n] for n in there if n != ".writer.lock"} == {
        n: data for n, data in there.items() if n != ".writer.lock"
    }


def test_a_flipped_bit_in_every_slot_leads_to_storage_and_without_it_to_a_list(
    tmp_path: Path, arena_dir: Path
) -> None:
    state = build(wide=7000)  # its values lie in another block than what is flipped
    first = holdfast.Checkpointer(tmp_path, state, storage=None)
    train(state, 0)
    first.save(0, durable=True).wait_durable(30)
    expected = content(state)
    train(state, 1)
    first.save(1).wait_captured(30)
    for slot in arena_dir.rglob("*.slot"):
        flip(slot, DATA)
    again = build(seed=1, wide=7000)
    with listening() as heard, holdfast.Checkpointer(tmp_path, again, storage=None) as second:
        restored = second.restore()
        assert restored is not None
        assert (restored.step, restored.source) == (0, "storage")
        assert content(again) == expected
        assert "memory 1-1" in dropped(heard)
    flip(_image(tmp_path, 0), DATA)
    third = holdfast.Checkpointer(tmp_path, again, storage=None)
    with pytest.raises(holdfast.RestoreError, match="storage 1-0: block 0"):
        third.restore()
    for call in (third.step, third.save):
        with pytest.raises(holdfast.StatePoisoned, match="mixture of two states"):
            call(5)
    third.close()
    with pytest.raises(holdfast.HoldfastError):
        first.save(2).wait_captured(30)  # or at once, if it was told already that others began
