"""``holdfast show``: what a checkpoint holds, and a leaf drawn over its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import errors
from holdfast.cli import main
from holdfast.cli.checkpoints import choose, open_root
from holdfast.format.manifest import Generation
from holdfast.storage.local import LocalStore
from support.checkpoints.commands import LARGE, Out, error_of, json_of, text_of, tied_model
from support.checkpoints.roots import fill


def test_show_lists_leaves_and_values_of_the_newest(root: Path, capsys: Out) -> None:
    document = json_of(capsys, "show", root)
    assert (document["step"], document["state"]) == (20, "newest")
    leaves = {leaf["name"]: leaf for leaf in document["leaves"]}
    assert leaves["model.weight"] == {
        "name": "model.weight",
        "dtype": "F32",
        "shape": [300, 2000],
        "size_bytes": 2_400_000,
    }
    text = text_of(capsys, "show", root, "--step", "10")
    assert "300 x 2000" in text
    assert "2.40 MB" in text
    assert "tokens" in text


def test_show_of_a_leaf_says_who_holds_and_who_stores_which_box(root: Path, capsys: Out) -> None:
    document = json_of(capsys, "show", root, "model.weight")
    whole = [{"rank": 0, "start": [0, 0], "stop": [300, 2000]}]
    assert document["held"] == document["stored"] == whole
    assert text_of(capsys, "show", root, "model.weight").count("[0:300, 0:2000]") == 2


def test_show_of_an_unknown_leaf_offers_its_likes(root: Path, capsys: Out) -> None:
    assert main(["show", str(root), "model.wieght"]) == 3
    assert "did you mean model.weight" in capsys.readouterr().err


def test_show_of_an_unknown_step_says_which_there_are(root: Path, capsys: Out) -> None:
    assert main(["show", str(root), "--step", "30"]) == 3
    assert "there are: " in capsys.readouterr().err


def test_a_step_that_is_no_number_is_a_wrong_call(root: Path, capsys: Out) -> None:
    assert main(["show", str(root), "--step", "newest"]) == 2
    assert "INCARNATION-STEP" in capsys.readouterr().err
    assert main(["show", str(root), "--step", "9" * 5000]) == 2
    assert main(["show", str(root), "--step", "1-" + "9" * 5000]) == 2


def test_an_error_lists_the_newest_checkpoints_only(tmp_path: Path, capsys: Out) -> None:
    fill(LocalStore(tmp_path), [(1, step) for step in range(15)])
    said = error_of(capsys, "show", tmp_path, "--step", "77", code=3)
    assert "there are: 5 older, 1-5, 1-6" in said
    assert said.rstrip().endswith("1-14")


def test_show_notices_a_damaged_layout(root: Path, capsys: Out) -> None:
    (path,) = (root / "layouts").iterdir()
    path.write_bytes(path.read_bytes().replace(b"F32", b"I32"))
    assert main(["show", str(root)]) == 4
    assert "layout" in capsys.readouterr().err


def test_a_step_saved_twice_is_the_one_that_a_restore_takes(fallen_back: Path) -> None:
    opened = open_root(str(fallen_back))
    assert choose(opened, "20").generation == Generation(2, 20)
    assert choose(opened, "1-20").generation == Generation(1, 20)
    assert choose(opened, None).generation == Generation(2, 20)
    with pytest.raises(errors.NotFound, match=r"1-30 \(abandoned\)"):
        choose(opened, "30")
    assert choose(opened, "1-30").generation == Generation(1, 30)


def test_show_draws_who_stores_and_who_holds_each_box(by_ranks: Path, capsys: Out) -> None:
    text = text_of(capsys, "show", by_ranks / "hsdp", "model.weight")
    assert "mesh 2 x 2: 2 copies, dim 0 cut in 2" in text
    drawn = [line.rstrip() for line in text.splitlines() if line.startswith(("0 ", "│"))]
    numbers, labels = drawn[0].split(), [cell.strip() for cell in drawn[1].strip("│").split("│")]
    assert numbers == ["0", "16", "32", "48", str(LARGE[0])]
    assert labels == ["0* 2", "0 2*", "1* 3", "1 3*"]


def test_the_picture_says_the_same_as_the_boxes(by_ranks: Path, capsys: Out) -> None:
    for layout in ("fsdp", "tp", "fsdp_tp"):
        name = "model.blocks.0.up.weight"
        record = json_of(capsys, "show", by_ranks / layout, name)
        text = text_of(capsys, "show", by_ranks / layout, name)
        assert record["cuts"][0][-1] == record["shape"][0]
        for cut in record["cuts"][0]:
            assert str(cut) in text
        for part in record["stored"]:
            assert f"{part['rank']}*" in text


def test_a_leaf_without_elements_has_no_picture(tmp_path: Path, capsys: Out) -> None:
    holdfast.save(str(tmp_path), {"x": torch.zeros(0, 3)})
    text = text_of(capsys, "show", tmp_path, "x")
    assert "it has no elements" in text
    assert "┌" not in text


def test_show_of_a_leaf_is_plain_text_in_a_pipe(by_ranks: Path, capsys: Out) -> None:
    assert "\x1b" not in text_of(capsys, "show", by_ranks / "hsdp", "model.weight")


def test_show_of_a_leaf_colours_the_ranks_on_a_terminal(
    by_ranks: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[1;36m" in text_of(capsys, "show", by_ranks / "hsdp", "model.weight")


def test_tied_leaves_are_shown_with_the_name_they_are_stored_as(
    tmp_path: Path, capsys: Out
) -> None:
    holdfast.save(str(tmp_path), {"model": tied_model()})
    leaves = {leaf["name"]: leaf for leaf in json_of(capsys, "show", tmp_path)["leaves"]}
    tied = [leaf for leaf in leaves.values() if "stored_as" in leaf]
    assert [leaf["stored_as"] in leaves for leaf in tied] == [True]
    assert f"as {tied[0]['stored_as']}" in text_of(capsys, "show", tmp_path)
    assert "stored once" in text_of(capsys, "show", tmp_path, tied[0]["name"])


def test_what_is_too_long_for_the_manifest_is_taken_from_the_image(
    tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.oneshot._MAX_SHOWN_BYTES", 0)
    holdfast.save(str(tmp_path), {"model": tied_model(), "tokens": 7})
    document = json_of(capsys, "show", tmp_path)
    assert document["values"] == {"tokens": 7}
    assert [leaf["name"] for leaf in document["leaves"]] == ["model.0.weight", "model.1.weight"]


def test_values_that_json_has_no_form_for_are_shown_as_they_are_stored(
    tmp_path: Path, capsys: Out
) -> None:
    holdfast.save(str(tmp_path), {"x": {(1, 2): float("nan")}, "m": torch.nn.Linear(1, 1)})
    value = json_of(capsys, "show", tmp_path)["values"]["x"]
    assert value == {"$dict": [[{"$tuple": [1, 2]}, {"$float": "nan"}]]}
    assert "{(1, 2): nan}" in text_of(capsys, "show", tmp_path)


def test_show_of_a_damaged_checkpoint_says_so_in_one_line(root: Path, capsys: Out) -> None:
    (path,) = (root / "layouts").iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    assert "layout" in error_of(capsys, "show", root, "model.weight", code=4)
