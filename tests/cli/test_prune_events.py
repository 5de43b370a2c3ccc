"""``holdfast prune --events`` removes full event files, and nothing that is written or is first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.cli import main


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "events").mkdir()
    for host in ("a", "b"):
        for part in (".s000001.jsonl.gz", ".s000002.jsonl.gz", ".s000003.jsonl", ".jsonl"):
            (tmp_path / "events" / f"host-{host}{part}").write_bytes(b"x" * 10)
    return tmp_path


def names(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "events").iterdir())


def test_the_first_and_the_newest_of_each_host_stay(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prune", str(root), "--events", "--dry-run"]) == 0
    assert "events/host-a.s000002.jsonl.gz" in capsys.readouterr().out
    assert len(names(root)) == 8
    assert main(["prune", str(root), "--events", "--yes", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["size_bytes"] == 40 and len(said["events"]) == 4
    first = [f"host-{host}.s000001.jsonl.gz" for host in "ab"]
    assert names(root) == sorted([*first, "host-a.jsonl", "host-b.jsonl"])
    assert main(["prune", str(root), "--events"]) == 0
    assert "no full event files" in capsys.readouterr().out


@pytest.mark.parametrize("options", [("--last", "1"), ("--abandoned",), ("--by", "loss")])
def test_it_is_given_alone(
    options: tuple[str, ...], root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prune", str(root), "--events", *options]) == 2
    assert "no checkpoints" in capsys.readouterr().err
    assert len(names(root)) == 8


def test_nothing_is_removed_unasked_nor_from_a_bucket(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prune", str(root), "--events"]) == 2  # nobody can be asked
    assert len(names(root)) == 8
    assert main(["prune", "s3://bucket/run", "--events"]) == 2
    assert "lifecycle rule" in capsys.readouterr().err
    assert main(["prune", str(tmp_path / "none"), "--events"]) != 0
    assert "no events" in capsys.readouterr().err
