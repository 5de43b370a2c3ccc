"""``holdfast prune``: what it asks, shows and refuses. What it removes: tests/persist."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.catalogue import LOCK
from holdfast.cli import main
from holdfast.cli.checkpoints import holders, root_holder
from holdfast.storage.local import LocalStore
from support.checkpoints.roots import fill, leave_behind, whole

Out = pytest.CaptureFixture[str]
ALL = ["1-10", "1-20", "1-30", "2-20", "2-30", "2-40"]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("template") / "run"
    store = LocalStore(directory)
    fill(store)
    leave_behind(store)
    return directory


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    """Incarnation 2 went on from 1-10; one attempt was killed."""
    return Path(shutil.copytree(template, tmp_path / "run"))


def json_of(capsys: Out, *argv: str | Path, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*map(str, argv), "--json"]) == code
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def contents(root: Path) -> dict[str, int]:
    files = {str(p): p.stat().st_mtime_ns for p in root.rglob("*") if p.is_file()}
    return files | {str(p): 0 for p in root.rglob("*") if p.is_dir()}


class Terminal(io.StringIO):
    """Somebody sits there and types."""

    def isatty(self) -> bool:
        return True


def test_a_dry_run_shows_what_would_go_and_changes_nothing(root: Path, capsys: Out) -> None:
    before = contents(root)
    assert main(["prune", str(root), "--last", "1", "--abandoned", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()[1:6]] == ALL[:-1]
    assert "2-50-deadbeef" in said
    assert said.splitlines()[-1].endswith("would be freed")
    assert "in use" not in said
    document = json_of(capsys, "prune", root, "--last", "1", "--dry-run")
    assert [row["checkpoint"] for row in document["checkpoints"]] == ["1-10", "2-20", "2-30"]
    assert document["directories"] == [{"path": "steps/2-50-deadbeef", "size_bytes": 5000}]
    assert (document["dry_run"], document["lock"]) == (True, None)
    assert contents(root) == before


def test_what_goes_is_printed_with_the_bytes_freed(root: Path, capsys: Out) -> None:
    planned = json_of(capsys, "prune", root, "--last", "2", "--dry-run")
    done = json_of(capsys, "prune", root, "--last", "2", "--yes")
    assert done == planned | {"dry_run": False}
    assert whole(LocalStore(root)) == ["1-20", "1-30", "2-30", "2-40"]
    assert main(["prune", str(root), "--abandoned", "--yes"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(" freed")
    assert main(["prune", str(root), "--last", "2", "--yes"]) == 0
    assert "nothing to remove" in capsys.readouterr().out
    assert whole(LocalStore(root)) == ["2-30", "2-40"]
    assert json_of(capsys, "prune", root, "--last", "2")["checkpoints"] == []


def test_while_a_run_is_there_nothing_goes_and_the_message_says_what_to_do(
    root: Path, capsys: Out
) -> None:
    with LocalStore(root).lock(LOCK, "run r, keeper 17 on here"):
        for words in (["--yes"], []):
            assert main(["prune", str(root), "--last", "1", *words]) == 5
            said = capsys.readouterr().err
            assert "run r, keeper 17 on here" in said
            assert "keep=holdfast.Keep(last=3)" in said
        assert main(["prune", str(root), "--last", "1", "--dry-run"]) == 0
        assert "in use by run r, keeper 17 on here" in capsys.readouterr().out
        lock = json_of(capsys, "prune", root, "--last", "1", "--dry-run")["lock"]
        assert lock["signed"] == "run r, keeper 17 on here"
    assert whole(LocalStore(root)) == ALL


@pytest.mark.parametrize(("typed", "left"), [("y\n", 1), ("yes\n", 1), ("n\n", 6), ("", 6)])
def test_a_person_is_asked_first(
    root: Path, typed: str, left: int, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    assert main(["prune", str(root), "--last", "1", "--abandoned"]) == 0
    said = capsys.readouterr()
    assert "2-50-deadbeef" in said.out
    assert "Remove this?" in said.err
    assert ("nothing was removed" in said.out) == (left == 6)
    assert len(whole(LocalStore(root))) == left


def test_a_script_without_yes_removes_nothing(root: Path, capsys: Out) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "prune", str(root), "--last", "1"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 2
    assert "--yes" in done.stderr
    assert whole(LocalStore(root)) == ALL


def test_what_changed_while_a_person_looked_at_it_is_not_removed(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    class Slow(Terminal):
        def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
            leave_behind(LocalStore(root), "steps/2-60-aaaa/live-00000.safetensors")
            return "y\n"

    monkeypatch.setattr(sys, "stdin", Slow())
    assert main(["prune", str(root), "--last", "1"]) == 5
    assert "changed while you looked" in capsys.readouterr().err
    assert whole(LocalStore(root)) == ALL


def test_an_unreadable_manifest_stops_it_with_exit_code_4(root: Path, capsys: Out) -> None:
    (root / "manifests" / "1-20.json").write_text("{}")
    before = contents(root)
    for option in ("--dry-run", "--yes"):
        assert main(["prune", str(root), "--last", "1", option]) == 4
        assert "manifests/1-20.json" in capsys.readouterr().err
    assert contents(root) == before


@pytest.mark.parametrize("words", [["--last", "0"], ["--every", "-1"], ["--last", "many"]])
def test_a_number_that_keeps_nothing_is_a_wrong_call(root: Path, words: list[str]) -> None:
    assert main(["prune", str(root), *words, "--yes"]) == 2
    assert whole(LocalStore(root)) == ALL


# ── who holds a lock ───────────────────────────────────────────────────────────────────────────


def test_the_holder_of_a_root_is_found_without_touching_its_lock(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert root_holder(str(tmp_path)) is None
    script = (
        "import sys, time; from holdfast.storage.local import LocalStore\n"
        "lock = LocalStore(sys.argv[1]).lock('writer', 'a run'); print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert child.stdout is not None and child.stdout.readline() == b"held\n"
    held = root_holder(str(tmp_path))
    assert held is not None and (held.pid, held.signed) == (child.pid, "a run")
    child.kill()
    child.communicate()
    killed = root_holder(str(tmp_path))
    assert killed is not None and (killed.pid, killed.signed) == (0, "a run")
    store.lock(LOCK, "next").release()
    assert root_holder(str(tmp_path)) is None


def test_a_lock_of_another_file_with_the_same_number_is_not_taken_for_ours(tmp_path: Path) -> None:
    path, other = tmp_path / "lock", tmp_path / "other"
    path.touch()
    other.touch()
    proc = tmp_path / "proc"
    for pid, opened in ((11, other), (12, path)):
        (proc / str(pid) / "fd").mkdir(parents=True)
        (proc / str(pid) / "fd" / "3").symlink_to(opened)
    inode = path.stat().st_ino
    lines = [
        f"{n}: FLOCK  ADVISORY  WRITE {pid} 00:2a:{inode} 0 EOF"
        for n, pid in ((1, 11), (2, 12), (3, 13))
    ]
    lines += [f"4: -> FLOCK  ADVISORY  WRITE 12 00:2a:{inode} 0 EOF", "nonsense", ""]
    (proc / "locks").write_text("\n".join(lines))
    assert holders(path, proc) == [12]
    assert holders(tmp_path / "missing", proc) == []


def test_a_value_that_no_checkpoint_has_is_refused_before_anything_goes(
    root: Path, capsys: Out
) -> None:
    before = contents(root)
    assert main(["prune", str(root), "--best", "1", "--by", "val_los", "--yes"]) == 3
    assert "has a number under 'val_los', so nothing is removed" in capsys.readouterr().err
    assert main(["prune", str(root), "--best", "1", "--yes"]) == 2
    assert "give both, such as Keep(best=3" in capsys.readouterr().err
    assert contents(root) == before
