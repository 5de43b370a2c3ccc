"""The command line: what each command prints, what it exits with, and no traces."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch

import holdfast
from holdfast import errors, events
from holdfast.catalogue import catalogue
from holdfast.cli import COMMANDS, main, parser
from holdfast.cli.checkpoints import choose, open_root
from holdfast.cli.output import SlowProgress
from holdfast.format.manifest import Generation, ImageRef, Incarnation, Manifest
from holdfast.persist import commit
from holdfast.storage.local import LocalStore

Out = pytest.CaptureFixture[str]
SOURCE = str(Path(holdfast.__file__).parents[1])


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"model": torch.nn.Linear(2000, 300), "tokens": 7}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Checkpoints of steps 10 and 20, made by ``holdfast.save``."""
    directory = tmp_path / "run"
    for step in (10, 20):
        holdfast.save(str(directory), state(), step=step)
    return directory


@pytest.fixture
def fallen_back(tmp_path: Path) -> Path:
    """Manifests only: incarnation 1 saved 10, 20, 30; 2 went on from 10 and saved 20 again."""
    directory = tmp_path / "fallen-back"
    store = LocalStore(directory)
    commit.open_root(store, "r")
    for n, parent in ((1, None), (2, (1, 10))):
        commit.record_incarnation(store, Incarnation(run_id="r", n=n, nonce="x", parent=parent))
    for incarnation, step in ((1, 10), (1, 20), (1, 30), (2, 20)):
        image = ImageRef(path="p", rank=0, size_bytes=4096, header_xxh3="0", table_xxh3="0")
        commit.publish(
            store,
            Manifest(
                run_id="r",
                incarnation=incarnation,
                step=step,
                attempt="a",
                world=1,
                layout="none",
                images=(image,),
            ),
        )
    return directory


def json_of(capsys: Out, *argv: str | Path, code: int = 0) -> dict[str, Any]:
    """What a command prints with ``--json``."""
    assert main([*map(str, argv), "--json"]) == code
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def text_of(capsys: Out, *argv: str | Path, code: int = 0) -> str:
    assert main([*map(str, argv)]) == code
    return capsys.readouterr().out


def image_of(root: Path, step: int) -> Path:
    store = LocalStore(root)
    (manifest,) = (m for m in catalogue(store).manifests if m.step == step)
    return root / manifest.images[0].path


def damage(path: Path, offset_bytes: int) -> None:
    """Flip one bit, as a bad disk does."""
    data = bytearray(path.read_bytes())
    data[offset_bytes] ^= 1
    path.write_bytes(data)


# ── every command ──────────────────────────────────────────────────────────────────────────────


def test_the_command_line_loads_no_torch() -> None:
    script = (
        "import sys, holdfast.cli; holdfast.cli.main(['ls', '.']);assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": SOURCE}, timeout=60
    )
    assert done.returncode == 0


@pytest.mark.parametrize("command", [command.__name__.rpartition(".")[2] for command in COMMANDS])
def test_every_command_has_help_with_an_example(command: str, capsys: Out) -> None:
    assert main([command, "--help"]) == 0
    said = capsys.readouterr().out
    assert f"example:\n  holdfast {command}" in said
    assert "--json" in said


def test_the_exit_codes_in_the_help_are_those_of_the_errors(capsys: Out) -> None:
    main(["--help"])
    table = capsys.readouterr().out
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.HoldfastError):
            family = next(base for base in kind.__mro__ if "exit_code" in vars(base))
            (line,) = (
                line for line in table.splitlines() if line.strip().startswith(f"{kind.exit_code} ")
            )
            assert family is errors.HoldfastError or family.__name__ in line


def test_a_holdfast_error_is_one_line_and_an_exit_code(tmp_path: Path, capsys: Out) -> None:
    assert main(["ls", str(tmp_path / "nowhere")]) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"holdfast: NotFound: {tmp_path}/nowhere is not a directory\n"


def test_with_json_an_error_is_an_object_too(tmp_path: Path, capsys: Out) -> None:
    document = json_of(capsys, "ls", tmp_path, code=3)
    assert document["error"]["class"] == "NotFound"
    assert document["error"]["fields"] == {"root": str(tmp_path)}


@pytest.mark.parametrize("argv", [[], ["fly"], ["ls"], ["ls", "--hover", "x"]])
def test_a_wrong_call_exits_with_2(argv: list[str], capsys: Out) -> None:
    assert main(argv) == 2
    assert "usage: holdfast" in capsys.readouterr().err


def test_the_version_is_the_packages(capsys: Out) -> None:
    assert text_of(capsys, "--version") == f"holdfast {holdfast.__version__}\n"


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    def interrupted(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.cli.ls.run", interrupted)
    assert main(["ls", "."]) == 130
    assert capsys.readouterr().err == "holdfast: interrupted\n"


def test_a_reader_that_goes_away_causes_no_trace(fallen_back: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "ls", str(fallen_back)],
        env=os.environ | {"PYTHONPATH": SOURCE},
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=60,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_quick_work_shows_no_progress_bar(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with SlowProgress("reading") as progress:
        progress(1, 2)
    assert capsys.readouterr().err == ""


def test_slow_work_shows_a_progress_bar(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    monkeypatch.setattr("holdfast.cli.output.QUIET_S", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes anything for a terminal
    with SlowProgress("reading") as progress:
        progress(1, 2)
    said = capsys.readouterr()
    assert "reading" in said.err
    assert said.out == ""


def test_nobody_watching_means_no_progress_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    monkeypatch.setattr("holdfast.cli.output.QUIET_S", 0.0)
    with SlowProgress("reading") as progress:
        progress(1, 2)
    assert capsys.readouterr().err == ""


# ── ls ─────────────────────────────────────────────────────────────────────────────────────────


def test_ls_lists_every_checkpoint_and_which_is_newest(root: Path, capsys: Out) -> None:
    rows = json_of(capsys, "ls", root)["checkpoints"]
    assert [(row["step"], row["state"]) for row in rows] == [(10, "kept"), (20, "newest")]
    assert all(row["world"] == row["images"] == 1 and row["size_bytes"] > 2_400_000 for row in rows)
    text = text_of(capsys, "ls", root)
    assert len(text.splitlines()) == 3
    assert "newest" in text.splitlines()[2]


def test_ls_shows_what_a_fall_back_abandoned(fallen_back: Path, capsys: Out) -> None:
    rows = json_of(capsys, "ls", fallen_back)["checkpoints"]
    assert {row["checkpoint"]: row["state"] for row in rows} == {
        "1-10": "kept",
        "1-20": "abandoned",
        "1-30": "abandoned",
        "2-20": "newest",
    }


def test_ls_shows_a_broken_manifest_with_the_reason(fallen_back: Path, capsys: Out) -> None:
    path = fallen_back / "manifests" / "1-10.json"
    path.write_bytes(path.read_bytes().replace(b'"run_id":"r"', b'"run_id":"s"'))
    broken = json_of(capsys, "ls", fallen_back)["checkpoints"][-1]
    assert (broken["checkpoint"], broken["state"]) == ("manifests/1-10.json", "broken")
    assert "checksum" in broken["reason"]
    assert "broken" in text_of(capsys, "ls", fallen_back)


def test_ls_of_a_root_without_checkpoints_says_so(tmp_path: Path, capsys: Out) -> None:
    commit.open_root(LocalStore(tmp_path), "r")
    assert "no checkpoints" in text_of(capsys, "ls", tmp_path)
    assert json_of(capsys, "ls", tmp_path)["checkpoints"] == []


# ── show ───────────────────────────────────────────────────────────────────────────────────────


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


# ── verify ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("deep", [[], ["--deep"]])
def test_verify_finds_nothing_wrong_with_what_save_made(
    root: Path, deep: list[str], capsys: Out
) -> None:
    document = json_of(capsys, "verify", root, *deep)
    assert document["ok"]
    assert [row["faults"] for row in document["checkpoints"]] == [[], []]
    assert "ok" in text_of(capsys, "verify", root, *deep)


def test_verify_deep_finds_one_flipped_bit(root: Path, capsys: Out) -> None:
    damage(image_of(root, 10), 100_000)
    assert json_of(capsys, "verify", root)["ok"], "the bit is in a block, which only --deep reads"
    document = json_of(capsys, "verify", root, "--deep", code=4)
    assert [bool(row["faults"]) for row in document["checkpoints"]] == [True, False]
    assert "FAULTY" in text_of(capsys, "verify", root, "--deep", "--step", "10", code=4)
    assert "ok" in text_of(capsys, "verify", root, "--deep", "--step", "20")


@pytest.mark.parametrize("offset_bytes", [20, -8], ids=["header", "block table"])
def test_verify_finds_a_bit_in_what_describes_the_blocks(
    root: Path, offset_bytes: int, capsys: Out
) -> None:
    damage(image_of(root, 20), offset_bytes)
    assert not json_of(capsys, "verify", root, "--step", "20", code=4)["ok"]


def test_verify_finds_a_missing_image(root: Path, capsys: Out) -> None:
    image_of(root, 20).unlink()
    assert not json_of(capsys, "verify", root, code=4)["ok"]


def test_verify_counts_a_broken_manifest_as_a_fault(root: Path, capsys: Out) -> None:
    damage(sorted((root / "manifests").iterdir())[0], -20)
    document = json_of(capsys, "verify", root, code=4)
    assert [bool(row["faults"]) for row in document["checkpoints"]] == [False, True]


# ── report, demo ───────────────────────────────────────────────────────────────────────────────


def test_report_prints_a_runs_saves(tmp_path: Path, capsys: Out) -> None:
    published = events.CheckpointPublished(step=19, elapsed_s=2.0, size_bytes=4000, images=1)
    (tmp_path / "events").mkdir()
    path = tmp_path / "events" / "keeper-a.jsonl"
    path.write_bytes(msgspec.json.encode(events.to_record(published, 1.0)) + b"\n")
    assert "2.00 kB/s" in text_of(capsys, "report", tmp_path)
    assert json_of(capsys, "report", tmp_path)["saves"][0]["durable_s"] == 2.0
    assert main(["report", str(tmp_path), "--last", "-1"]) == 2


def test_report_of_a_run_without_events_is_not_found(tmp_path: Path, capsys: Out) -> None:
    assert main(["report", str(tmp_path)]) == 3
    assert "no events" in capsys.readouterr().err


def test_demo_hands_its_options_on_and_its_exit_code_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[argparse.Namespace] = []

    def demo(args: argparse.Namespace) -> int:
        given.append(args)
        return 1

    fake = ModuleType("holdfast.demo")
    vars(fake)["main"] = demo
    monkeypatch.setitem(sys.modules, "holdfast.demo", fake)
    assert main(["demo", "--out", "somewhere", "--seed", "7"]) == 1
    assert (given[0].out, given[0].seed, given[0].json) == ("somewhere", 7, False)


def test_the_parser_names_every_command() -> None:
    assert all(
        name in parser().format_help() for name in ("ls", "show", "verify", "report", "demo")
    )
