"""``holdfast pin`` and what ``ls`` shows of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import main
from holdfast.storage.local import LocalStore
from support.checkpoints.roots import fill, whole

Out = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("template") / "run"
    store = LocalStore(directory)
    fill(store)
    return directory


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    """Incarnation 2 went on from 1-10."""
    return Path(shutil.copytree(template, tmp_path / "run"))


def json_of(capsys: Out, *argv: str | Path, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*map(str, argv), "--json"]) == code
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def pins(capsys: Out, root: Path) -> dict[str, str]:
    rows = json_of(capsys, "pin", root, "--list")["pins"]
    return {row["checkpoint"]: row["state"] for row in rows}


def test_a_step_is_pinned_as_a_restore_takes_it_and_a_generation_as_it_is_named(
    root: Path, capsys: Out
) -> None:
    assert json_of(capsys, "pin", root, "20")["checkpoint"] == "2-20"
    assert main(["pin", str(root), "1-30"]) == 0
    assert capsys.readouterr().out == "1-30: pinned\n"
    assert pins(capsys, root) == {"1-30": "abandoned", "2-20": "kept"}


def test_pinning_works_while_a_run_holds_the_root(root: Path, capsys: Out) -> None:
    with LocalStore(root).lock("writer", "run r"):
        assert main(["pin", str(root), "20"]) == 0
    assert pins(capsys, root).keys() == {"2-20"}


def test_ls_shows_pins_with_their_notes(root: Path, capsys: Out) -> None:
    main(["pin", str(root), "20", "--note", "for [the] paper"])
    main(["pin", str(root), "1-10"])
    capsys.readouterr()
    rows = {row["checkpoint"]: row for row in json_of(capsys, "ls", root)["checkpoints"]}
    assert {name for name, row in rows.items() if row["pinned"]} == {"1-10", "2-20"}
    assert rows["2-20"]["note"] == "for [the] paper"
    assert main(["ls", str(root)]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["2-20"].endswith("for [the] paper")
    assert lines["1-10"].rstrip().endswith("pinned")
    assert lines["2-40"].rstrip().endswith("-")


def test_the_list_shows_notes_and_pins_whose_checkpoint_is_gone(root: Path, capsys: Out) -> None:
    main(["pin", str(root), "2-30", "--note", "why not"])
    (root / "manifests" / "2-30.json").unlink()
    capsys.readouterr()
    assert pins(capsys, root) == {"2-30": "gone"}
    assert main(["pin", str(root), "--list"]) == 0
    assert "why not" in capsys.readouterr().out


def test_the_list_of_no_pins_says_so(root: Path, capsys: Out) -> None:
    assert main(["pin", str(root), "--list"]) == 0
    assert "nothing is pinned" in capsys.readouterr().out


def test_a_damaged_pin_is_listed_with_the_reason(root: Path, capsys: Out) -> None:
    main(["pin", str(root), "20"])
    (root / "pins" / "2-20.json").write_text("{}")
    capsys.readouterr()
    (row,) = json_of(capsys, "pin", root, "--list")["pins"]
    assert row["checkpoint"] == "2-20" and "not a Holdfast document" in row["reason"]


def test_a_removed_pin_gives_the_checkpoint_back_to_retention(root: Path, capsys: Out) -> None:
    main(["pin", str(root), "20"])
    assert main(["prune", str(root), "--last", "1", "--yes"]) == 0
    assert whole(LocalStore(root)) == ["1-20", "1-30", "2-20", "2-40"]
    assert main(["pin", str(root), "20", "--remove"]) == 0
    assert main(["prune", str(root), "--last", "1", "--yes"]) == 0
    assert "2-20" not in whole(LocalStore(root))


def test_a_pin_is_removed_even_when_its_checkpoint_is_gone(root: Path, capsys: Out) -> None:
    main(["pin", str(root), "2-30"])
    (root / "manifests" / "2-30.json").unlink()
    assert main(["pin", str(root), "30", "--remove"]) == 0
    assert pins_left(root) == []


def test_removing_a_step_pinned_twice_means_the_one_that_a_restore_takes(
    root: Path, capsys: Out
) -> None:
    for name in ("1-20", "2-20"):
        main(["pin", str(root), name])
    assert main(["pin", str(root), "20", "--remove"]) == 0
    assert pins_left(root) == ["1-20.json"]
    main(["pin", str(root), "2-20"])
    for name in ("1-20", "2-20"):
        (root / "manifests" / f"{name}.json").unlink()
    assert main(["pin", str(root), "20", "--remove"]) == 2
    assert "give one of 1-20, 2-20" in capsys.readouterr().err
    assert pins_left(root) == ["1-20.json", "2-20.json"]


def pins_left(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "pins").iterdir())


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["25"], 3, "no checkpoint of step 25"),
        (["25", "--remove"], 3, "25 is not pinned"),
        ([], 2, "say which STEP"),
        (["20", "--list"], 2, "--list stands alone"),
        (["--list", "--note", "x"], 2, "--list stands alone"),
        (["20", "--remove", "--note", "x"], 2, "takes no --note"),
        (["newest"], 2, "newest"),
    ],
)
def test_what_cannot_be_pinned_is_refused_with_the_reason(
    root: Path, words: list[str], code: int, said: str, capsys: Out
) -> None:
    assert main(["pin", str(root), *words]) == code
    assert said in capsys.readouterr().err
    assert not (root / "pins").exists()
