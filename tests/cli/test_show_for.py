"""``holdfast show --for``: what a restore under another parallelism would be, without one."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast.geometry.box import Box
from holdfast.geometry.parallelism import NamedLayout, asked
from support.checkpoints.commands import Out, error_of, json_of, run_alone, text_of


@pytest.mark.parametrize(
    ("saved", "wish"),
    [("fsdp", "fsdp=4"), ("tp", "tp=4"), ("fsdp_tp", "fsdp=2,tp=2"), ("hsdp", "dp=2,fsdp=2")],
)
def test_what_is_asked_for_is_what_ranks_of_that_kind_really_held(
    saved: str, wish: str, by_ranks: Path
) -> None:
    with holdfast.open(by_ranks / saved) as checkpoint:
        layout = checkpoint.layout
    found = NamedLayout(layout, asked(wish))
    for rank in range(4):
        boxes: dict[str, list[Box]] = {leaf.name: [] for leaf in layout.leaves}
        for leaf, box in found.boxes(rank):
            boxes[leaf.name].append(box)
        for number, leaf in enumerate(layout.leaves):
            held = [box for box, _ in layout.held(number, rank)]
            assert boxes[leaf.name] == held, leaf.name


def test_the_dry_run_says_what_every_rank_reads_and_needs(by_ranks: Path, capsys: Out) -> None:
    document = json_of(capsys, "show", by_ranks / "fsdp_tp", "--step", "2", "--for", "dp=2,fsdp=2")
    assert (document["fits"], document["world"], document["for_world"]) == (True, 4, 4)
    assert [(one["rank"], one["alike"]) for one in document["ranks"]] == [(0, 2), (1, 2)]
    assert document["wanted_bytes"] == 2 * sum(one["wanted_bytes"] for one in document["ranks"])
    assert document["read_bytes"] == 2 * sum(one["read_bytes"] for one in document["ranks"])
    assert document["most_bytes"] == max(one["wanted_bytes"] for one in document["ranks"])
    mean = document["wanted_bytes"] / 4
    assert document["balance"] == pytest.approx(document["most_bytes"] / mean)
    sizes = [path.stat().st_size for path in (by_ranks / "fsdp_tp").glob("steps/*-2-*/*")]
    assert 0 < document["read_once_bytes"] < sum(sizes)
    for one in document["ranks"]:
        assert one["wanted_bytes"] < one["memory_bytes"] <= 4 * one["read_bytes"]
        assert 2 <= one["images"] <= 4
    assert "the ranks of dp hold the same" in document["assumptions"]


def test_the_dry_run_is_told_in_words(by_ranks: Path, capsys: Out) -> None:
    text = text_of(capsys, "show", by_ranks / "hsdp", "--for", "fsdp=4")
    assert "saved by 4 ranks, can be restored on 4 ranks as fsdp=4, if" in text
    assert "  fsdp cuts parameters and their optimizer state in dimension 0" in text
    assert "   0  65.5 kB" in text
    assert "the most that one wants is 65.5 kB, 1.00 of that" in text


def test_of_very_many_ranks_some_are_planned_for(by_ranks: Path, capsys: Out) -> None:
    document = json_of(capsys, "show", by_ranks / "hsdp", "--for", "fsdp=1000,dp=100")
    assert (document["for_world"], document["different_ranks"]) == (100_000, 1000)
    assert (len(document["ranks"]), document["read_bytes"]) == (64, None)
    assert document["wanted_bytes"] == 100 * 64 * 1024 * 4
    text = text_of(capsys, "show", by_ranks / "hsdp", "--for", "fsdp=1000,dp=100")
    assert "and 984 more that differ from these" in text
    assert "planned for 64 of 1000 ranks that differ" in text


def test_a_wish_that_means_nothing_is_a_wrong_call(root: Path, capsys: Out) -> None:
    assert "names no parallelism" in error_of(capsys, "show", root, "--for", "gpus=8", code=2)
    said = error_of(capsys, "show", root, "model.weight", "--for", "dp=8", code=2)
    assert "leave the leaf out" in said
    assert "numbered layers" in error_of(capsys, "show", root, "--for", "pp=4", code=2)


def test_the_dry_run_needs_no_torch_and_tells_of_damage(root: Path, capsys: Out) -> None:
    assert run_alone("show", root, "--for", "fsdp=2").returncode == 0
    for image in root.glob("steps/*/*.safetensors"):
        image.write_bytes(image.read_bytes()[:-1])
    assert "bytes, the manifest says" in error_of(capsys, "show", root, "--for", "dp=2", code=4)
