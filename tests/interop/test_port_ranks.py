"""Ranks import and export together: the bytes of one process, whoever is killed, or one error."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast.catalogue import catalogue
from holdfast.cli import main
from holdfast.errors import DeadlineExceeded, HoldfastError, RootBusy, UsageError
from holdfast.interop.writing.command_ranks import ALONE, _lock_rank, met_ranks, rank_of_command
from holdfast.restore.reading.verify import verify
from holdfast.storage.local import LocalStore

SOURCE = str(Path(holdfast.__file__).parents[1])

#: A command in small windows, which ends itself at the n-th of them, or says that its disk is gone.
SCRIPT = """
import os, signal, sys, threading
from holdfast.cli import main
from holdfast.errors import StorageError
from holdfast.interop.writing import export_files, import_state
from holdfast.interop.writing import planned_files
export_files.window_bytes = lambda *_: 700
import_state.window_bytes = lambda *_: 1 << 20
left, lock = [int(os.environ.get("ENDS_AT", 1 << 30))], threading.Lock()
fill = planned_files.fill_window
def counted(*args):
    with lock:
        left[0] -= 1
        if left[0] == 0 and "GONE" in os.environ:
            raise StorageError("the disk of this rank is gone", operation="write")
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return fill(*args)
export_files.fill_window = import_state.fill_window = counted
code = main(sys.argv[1:])
sys.exit(99 if "torch" in sys.modules else code)
"""


def run_together(
    count: int,
    *argv: str | Path,
    more: Mapping[int, Mapping[str, str]] | None = None,
    port: int = 29500,
    others: Mapping[int, list[str | Path]] | None = None,
) -> list[tuple[int, str, str]]:
    """The exit code, stdout and stderr of a command on each of so many ranks."""
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    launch |= {"LOCAL_WORLD_SIZE": str(count), "PYTHONPATH": SOURCE}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *map(str, (others or {}).get(rank, argv)), "--ranks"],
            env={**os.environ, **launch, "RANK": str(rank), **(more or {}).get(rank, {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        said = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, said, strict=True)]


def contents(path: Path) -> dict[str, bytes]:
    """All files of an export."""
    if path.is_file():
        return {"": path.read_bytes()}
    files = (one for one in path.rglob("*") if one.is_file())
    return {str(one.relative_to(path)): one.read_bytes() for one in files}


def left_beside(path: Path) -> list[str]:
    """What a command has left beside its place."""
    return sorted(one.name for one in path.parent.iterdir() if one.name.startswith(f".{path.name}"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 5))
    holdfast.save(tmp_path / "root", {"model": model, "n": 3}, step=1)
    return tmp_path / "root"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model in several files, each of which becomes an image."""
    path = tmp_path / "step-3"
    path.mkdir()
    generator = torch.Generator().manual_seed(2)
    names = [f"model-{n:05}-of-00005.safetensors" for n in range(1, 6)]
    weights = {}
    for number, name in enumerate(names):
        weights[f"w{number}"] = name
        save_file({f"w{number}": torch.randn(300, 70, generator=generator)}, path / name)
    index = {"metadata": {"total_size": 5 * 84000}, "weight_map": weights}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


@pytest.mark.parametrize(
    "to", ["dcp", *(pytest.param(to, marks=pytest.mark.slow) for to in ("torch", "safetensors"))]
)
def test_ranks_export_the_bytes_of_one_process(root: Path, tmp_path: Path, to: str) -> None:
    argv = ("export", root, "--to", to, "--shard-size", "2000")
    assert main([*map(str, argv), str(tmp_path / "one")]) == 0
    wanted = contents(tmp_path / "one")
    count = {"dcp": 2, "torch": 3, "safetensors": 4}[to]
    ranks = run_together(count, *argv, tmp_path / "out")
    assert [code for code, *_ in ranks] == [0] * count, ranks
    assert "written to" in ranks[0][1] and not any(out for _, out, _ in ranks[1:])
    assert contents(tmp_path / "out") == wanted
    assert not left_beside(tmp_path / "out")


@pytest.mark.parametrize(
    ("killed", "again"),
    [
        ([1], 4),
        pytest.param([0], 2, marks=pytest.mark.slow),
        pytest.param([0, 1, 2, 3], 1, marks=pytest.mark.slow),
    ],
)
def test_an_export_whose_ranks_were_killed_goes_on_to_the_same_bytes(
    root: Path, tmp_path: Path, killed: list[int], again: int
) -> None:
    argv = ("export", root, "--to", "dcp", "--json")
    assert main([*map(str, argv), str(tmp_path / "one")]) == 0
    out = tmp_path / "out"
    ranks = run_together(4, *argv, out, more={rank: {"ENDS_AT": "3"} for rank in killed})
    for rank, (code, _, said) in enumerate(ranks):
        assert code == (-signal.SIGKILL if rank in killed else 10), said
        assert rank in killed or f"ranks {killed} ended before" in said
    assert not out.exists()
    (first, *_) = run_together(again, *argv, out)
    assert first[0] == 0, first
    assert json.loads(first[1])["resumed_bytes"] > 0
    assert contents(out) == contents(tmp_path / "one")
    assert not left_beside(out)


def test_an_error_of_one_rank_ends_all_with_that_error(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = ("export", root, out, "--to", "safetensors")
    ranks = run_together(4, *argv, more={2: {"ENDS_AT": "1", "GONE": "1"}})
    for rank, (code, _, said) in enumerate(ranks):
        assert code == 5 and "the disk of this rank is gone" in said
        assert ("rank 2:" in said) == (rank != 2)
    assert not out.exists()


def test_ranks_that_would_write_something_else_are_refused(root: Path, tmp_path: Path) -> None:
    argv: list[str | Path] = ["export", root, tmp_path / "out", "--to", "safetensors"]
    for code, _, said in run_together(2, *argv, others={1: [*argv, "--cast", "BF16"]}):
        assert code == 2 and "rank 1 would export other bytes than rank 0" in said
    missing = [*argv[:1], tmp_path / "absent", *argv[2:]]
    for code, _, said in run_together(2, *argv, others={1: missing}):
        assert code == 3 and "absent" in said
    assert not (tmp_path / "out").exists()


# ── imports ──────────────────────────────────────────────────────────────────────────────────


def images(root: Path) -> dict[str, bytes]:
    """What the images hold, whichever attempt wrote them."""
    files = (root / "steps").rglob("*.safetensors")
    return {f"{one.parent.name}/{one.name}": one.read_bytes() for one in files}


def assert_whole(root: Path, one: Path, source: Path) -> None:
    """What is there is what one process makes, verified."""
    (manifest,) = catalogue(LocalStore(root)).manifests
    (wanted,) = catalogue(LocalStore(one)).manifests
    assert not verify(LocalStore(root), manifest, deep=True).faults
    assert (manifest.generation, manifest.attempt) == (wanted.generation, wanted.attempt)
    assert [ref.table_xxh3 for ref in manifest.images] == [ref.table_xxh3 for ref in wanted.images]
    with holdfast.open(root) as ours, holdfast.open(source) as theirs:
        assert ours.leaves.keys() == theirs.leaves.keys()
        for name in theirs.leaves:
            assert torch.equal(ours.read(name), theirs.read(name))
    assert not list((root / "copies").glob("*")) and not left_beside(root)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_import_what_one_process_does(source: Path, tmp_path: Path, count: int) -> None:
    one, root = tmp_path / "one", tmp_path / "root"
    assert main(["import", str(source), str(one)]) == 0
    ranks = run_together(count, "import", source, root)
    assert [code for code, *_ in ranks] == [0] * count, ranks
    assert not any(out for _, out, _ in ranks[1:])
    assert_whole(root, one, source)


@pytest.mark.parametrize(
    ("killed", "again"),
    [
        ([1], 2),
        pytest.param([0], 1, marks=pytest.mark.slow),
        pytest.param([0, 1], 3, marks=pytest.mark.slow),
    ],
)
def test_an_import_whose_ranks_were_killed_goes_on(
    source: Path, tmp_path: Path, killed: list[int], again: int
) -> None:
    one, root = tmp_path / "one", tmp_path / "root"
    assert main(["import", str(source), str(one)]) == 0
    argv = ("import", source, root, "--json")
    ranks = run_together(2, *argv, more={rank: {"ENDS_AT": "2"} for rank in killed})
    for rank, (code, _, said) in enumerate(ranks):
        assert code == (-signal.SIGKILL if rank in killed else 10), said
    assert not catalogue(LocalStore(root)).manifests
    (first, *_) = run_together(again, *argv)
    assert first[0] == 0, first
    assert json.loads(first[1])["resumed_bytes"] > 0
    assert_whole(root, one, source)


def test_ranks_of_another_source_are_refused(source: Path, tmp_path: Path) -> None:
    argv: list[str | Path] = ["import", source, tmp_path / "root"]
    for code, _, said in run_together(2, *argv, others={1: [*argv, "--only", "model.w0"]}):
        assert code == 2 and "rank 1 would import something else than rank 0" in said
    assert not catalogue(LocalStore(tmp_path / "root")).manifests


# ── the meeting ──────────────────────────────────────────────────────────────────────────────


def test_a_rank_that_does_not_come_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(DeadlineExceeded, match=r"(?s)ranks \[0\] did not reach.*Omit --ranks"),
        met_ranks(tmp_path / "meeting", "the export", rank_of_command(), 0.3),
    ):
        pass


def test_what_an_earlier_start_left_does_not_count(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(DeadlineExceeded),
        met_ranks(tmp_path / ".out.ranks", "the export", rank_of_command(), 0.3),
    ):
        pass
    (own,) = (tmp_path / ".out.ranks").iterdir()
    assert len(list(own.iterdir())) > 1  # its lock, and its call
    argv = ("export", root, tmp_path / "out", "--to", "dcp")
    assert [code for code, *_ in run_together(2, *argv)] == [0, 0]
    assert not left_beside(tmp_path / "out")


def test_a_meeting_that_others_could_join_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    (tmp_path / "meeting").mkdir(mode=0o700)
    (tmp_path / "meeting").chmod(0o777)
    with (
        pytest.raises(UsageError, match="not a directory of this user alone"),
        met_ranks(tmp_path / "meeting", "the export", rank_of_command(), 0.3),
    ):
        pass
    monkeypatch.setenv("RANK", "2")
    with (
        pytest.raises(UsageError, match="rank 2 of 2, which no launcher does"),
        met_ranks(tmp_path / "other", "the export", rank_of_command(), 0.3),
    ):
        pass


#: A rank that waits where ranks meet, after all others have ended.
ORPHAN = """
import sys
from pathlib import Path
from holdfast.interop.writing.command_ranks import _part_in
with _part_in(Path(sys.argv[1]), 1, 0.0):
    print("there", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def outliving(own: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Rank 1 of a start whose other ranks have ended, with its part in a meeting."""
    pipe = subprocess.PIPE
    argv, env = [sys.executable, "-c", ORPHAN, str(own)], {**os.environ, "PYTHONPATH": SOURCE}
    with subprocess.Popen(argv, env=env, stdin=pipe, stdout=pipe) as rank:
        assert rank.stdout is not None and rank.stdout.readline()
        try:
            yield rank
        finally:
            rank.kill()


def test_a_rank_that_outlives_its_start_keeps_another_from_writing(
    source: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    with outliving(tmp_path / ".root.ranks" / "earlier"):
        (found,) = run_together(1, "import", source, root)
        assert found[0] == 5 and "rank 1 of another start of this command still runs" in found[2]
        assert not root.exists()
    assert run_together(1, "import", source, root)[0][0] == 0
    assert not left_beside(root)


def test_a_rank_waits_for_the_one_that_it_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(DeadlineExceeded),
        met_ranks(tmp_path / "meeting", "the import", rank_of_command(), 0.1),
    ):
        pass
    (own,) = (tmp_path / "meeting").iterdir()
    with outliving(own) as rank:
        with (
            pytest.raises(RootBusy),
            met_ranks(tmp_path / "meeting", "the import", rank_of_command(), 0.3),
        ):
            pass
        threading.Timer(0.3, rank.kill).start()
        with (
            pytest.raises(DeadlineExceeded),
            met_ranks(tmp_path / "meeting", "the import", rank_of_command(), 3.0),
        ):
            pass


def test_a_start_leaves_the_meeting_of_another_that_lives(tmp_path: Path) -> None:
    held = contextlib.ExitStack()
    for name in ("dead", "lives"):
        (tmp_path / "meeting" / name).mkdir(parents=True)
        (tmp_path / "meeting" / name / "lock-0").touch()
    with held:
        _lock_rank(tmp_path / "meeting" / "lives" / "lock-0", held)
        with (
            pytest.raises(RootBusy, match="rank 0"),
            met_ranks(tmp_path / "meeting", "the export", ALONE),
        ):
            pass
        assert (tmp_path / "meeting" / "lives" / "lock-0").exists()
    with met_ranks(tmp_path / "meeting", "the export", ALONE):
        assert not (tmp_path / "meeting").exists()


@pytest.mark.parametrize("command", ["import", "export"])
def test_what_a_launcher_has_set_counts_only_with_ranks(
    root: Path,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    to = ("--to", "dcp") if command == "export" else ()
    argv = [command, str(source if command == "import" else root), str(tmp_path / "new"), *to]
    assert main([*argv, "--ranks"]) == 2
    assert "--ranks needs RANK and WORLD_SIZE" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert main([*argv, "--dry-run"]) == 0 and capsys.readouterr().out
    assert main(argv) == 0 and capsys.readouterr().out
    assert (tmp_path / "new").is_dir() and not left_beside(tmp_path / "new")


#: Two ranks, of which one waits for the other's end and then works on, and the other ends itself.
WORKING = """
import os, sys, time
from pathlib import Path
from holdfast.errors import HoldfastError
from holdfast.interop.writing.command_ranks import met_ranks, rank_of_command
from holdfast.errors import StorageError
try:
    with met_ranks(Path(sys.argv[1]), "the import", rank_of_command()) as ranks:
        if ranks.rank == int(sys.argv[2]):
            if sys.argv[3] == "killed":
                os._exit(9)
            raise StorageError("the disk is gone", operation="write")
        for _ in range(300):
            time.sleep(0.1)
            ranks.require_others()
        print("worked to the end")
except HoldfastError as error:
    print(error)
"""


@pytest.mark.parametrize(("ends", "how"), [(0, "killed"), (1, "killed"), (0, "failed")])
def test_a_rank_that_works_hears_of_the_end_of_another(tmp_path: Path, ends: int, how: str) -> None:
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    env = {**os.environ, **launch, "LOCAL_WORLD_SIZE": "2", "PYTHONPATH": SOURCE}
    argv = [sys.executable, "-c", WORKING, str(tmp_path / "meeting"), str(ends), how]
    ranks = [
        subprocess.Popen(argv, env={**env, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60)[0] for rank in ranks]
    wanted = f"ranks [{ends}] ended" if how == "killed" else f"rank {ends}: the disk is gone"
    assert wanted in said[1 - ends]


@pytest.mark.parametrize(
    ("code", "wanted"),
    [(errno.ESTALE, "ranks [1] did not reach"), (errno.EIO, "Input/output error")],
)
def test_a_value_that_cannot_be_read_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, wanted: str
) -> None:
    def failing(path: Path) -> bytes:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(Path, "read_bytes", failing)
    with (
        pytest.raises(HoldfastError, match=re.escape(wanted)),
        met_ranks(tmp_path / "meeting", "the export", (0, 2), 0.5),
    ):
        pass
