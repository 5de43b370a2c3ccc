"""A record of a start is lost: every command says which, and none calls a checkpoint abandoned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.catalogue import ROOT, read_document
from holdfast.cli.doctor.root import probe_root
from holdfast.format.manifest import Generation, Incarnation, Root
from holdfast.persist import commit
from holdfast.storage.local import LocalStore
from support.checkpoints.commands import Out, error_of, json_of, text_of

LOST = "incarnations/3.json"


@pytest.fixture
def gap(tmp_path: Path) -> Path:
    """1-10 and 2-20; 4 went on from 3, of which there is no record, and has saved nothing."""
    root = tmp_path / "run"
    for step in (10, 20):
        holdfast.save(root, {"w": torch.full((6, 2), float(step))}, step)
    record = Incarnation(run_id=run_id_of(root), n=4, nonce="d", parent=(3, 25))
    commit.record_incarnation(LocalStore(root), record)
    return root


def run_id_of(root: Path) -> str:
    return read_document(LocalStore(root), Root, ROOT).run_id


def test_ls_says_what_is_undecided_and_which_record_is_missing(gap: Path, capsys: Out) -> None:
    found = json_of(capsys, "ls", gap)
    assert {row["checkpoint"]: row["state"] for row in found["checkpoints"]} == {
        "1-10": "undecided",
        "2-20": "undecided",
    }
    assert LOST in found["undecided"]
    assert LOST in text_of(capsys, "ls", gap)


def test_prune_refuses_to_tell_what_was_abandoned(gap: Path, capsys: Out) -> None:
    assert LOST in error_of(capsys, "prune", gap, "--abandoned", "--dry-run", code=4)
    assert json_of(capsys, "prune", gap, "--last", "1", "--dry-run")["checkpoints"] == []


def test_show_takes_none_by_itself_and_any_by_its_name(gap: Path, capsys: Out) -> None:
    for step in ((), ("--step", "20")):
        said = error_of(capsys, "show", gap, *step, code=holdfast.RestoreError.exit_code)
        assert LOST in said and "2-20" in said
    assert json_of(capsys, "show", gap, "--step", "2-20")["checkpoint"] == "2-20"


def test_doctor_names_the_record(gap: Path) -> None:
    root = probe_root(str(gap))
    assert LOST in root.gap
    assert root.newest == ""


def test_nothing_is_loaded_past_a_lost_record_but_by_its_name(gap: Path) -> None:
    state = {"w": torch.zeros(6, 2)}
    for step in (None, 10):
        with pytest.raises(holdfast.RestoreError, match=LOST):
            holdfast.load(gap, state, step)
    with pytest.raises(holdfast.NotFound):
        holdfast.load(gap, state, 11)
    assert not state["w"].any()
    assert holdfast.load(gap, state, "2-20").step == 20
    assert bool((state["w"] == 20).all())


def test_a_save_beside_a_lost_record_abandons_nothing(gap: Path, capsys: Out) -> None:
    holdfast.save(gap, {"w": torch.ones(6, 2)}, 30)
    states = {row["checkpoint"]: row["state"] for row in json_of(capsys, "ls", gap)["checkpoints"]}
    assert states == {"1-10": "undecided", "2-20": "undecided", "5-30": "newest"}
    commit.record_incarnation(
        LocalStore(gap), Incarnation(run_id=run_id_of(gap), n=3, nonce="c", parent=(2, 20))
    )
    states = {row["checkpoint"]: row["state"] for row in json_of(capsys, "ls", gap)["checkpoints"]}
    assert states == {"1-10": "kept", "2-20": "kept", "5-30": "newest"}


def test_a_run_starts_past_a_lost_record_by_name_only_and_then_all_is_known(gap: Path) -> None:
    state = {"w": torch.zeros(6, 2)}
    with holdfast.Checkpointer(gap, state) as checkpointer:
        with pytest.raises(holdfast.UsageError, match="call restore"):
            checkpointer.save(0)
        with pytest.raises(holdfast.RestoreError, match=rf"{LOST}.*restore\(\"2-20\"\)"):
            checkpointer.restore()
        restored = checkpointer.restore("2-20")
        assert restored is not None and restored.step == 20
        checkpointer.save(21, durable=True).wait_durable(60)
    assert holdfast.load(gap, state).step == 21
    assert holdfast.load(gap, state, 20).generation == Generation(2, 20)
