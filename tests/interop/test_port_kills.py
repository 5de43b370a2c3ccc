"""Imports and exports that are stopped anywhere leave nothing that looks finished, and go on."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import holdfast
from holdfast.catalogue import catalogue
from holdfast.cli import main
from holdfast.errors import HoldfastError, RootBusy, StorageError
from holdfast.interop.writing import export_files
from holdfast.interop.writing.chosen_leaves import LeafReader
from holdfast.interop.writing.export_files import ExportReport, export, work_directory
from holdfast.interop.writing.formats import plan_format
from holdfast.interop.writing.import_plan import open_imports, plan_import
from holdfast.interop.writing.import_state import ImportReport, import_all
from holdfast.interop.writing.saved_state import saved_state
from holdfast.restore.reading.images import from_manifest
from holdfast.restore.reading.verify import verify
from holdfast.storage.base import Store
from holdfast.storage.local import LocalStore
from holdfast.testing.faults.stores import FaultyStore, Stopped
from support.servers.bucket_model import World, model_store

WINDOW = 700
FORMATS = ["dcp", "torch", "safetensors"]
SOURCE = str(Path(holdfast.__file__).parents[1])


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 5))
    holdfast.save(tmp_path / "root", {"model": model, "n": 3}, step=1)
    return tmp_path / "root"


def export_to(
    root: Path, out: Path, to: str, before: Callable[[str], None] = lambda _: None
) -> ExportReport:
    store = LocalStore(root)
    manifest = catalogue(store).manifests[-1]
    checkpoint = from_manifest(store, manifest)
    saved = saved_state(checkpoint)
    reader = LeafReader(checkpoint, saved.leaves)
    plan = plan_format(to, saved, 2000, 1, reader)
    return export(plan, reader, out, repr(manifest), lambda *_: None, before=before)


def contents(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}
    found = (one for one in path.rglob("*") if one.is_file() and not one.name.startswith(".holdf"))
    return {str(one.relative_to(path)): one.read_bytes() for one in found}


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_files, "window_bytes", lambda *_: WINDOW)
    monkeypatch.setattr(export_files, "WORKERS", 1)


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("to", FORMATS)
def test_an_export_stopped_at_any_operation_goes_on_to_the_same_bytes(
    root: Path, tmp_path: Path, to: str
) -> None:
    operations: list[str] = []
    export_to(root, tmp_path / "whole", to, operations.append)
    wanted = contents(tmp_path / "whole")
    resumed = 0
    for last in range(len(operations)):
        out, left = tmp_path / f"out{last}", [last]

        def stop(_: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Killed

        with pytest.raises(Killed):
            export_to(root, out, to, stop)
        if out.exists():  # only its leftovers were still to be removed
            assert operations[last].startswith(("remove", "fsync")) and contents(out) == wanted
            continue
        resumed += export_to(root, out, to).resumed_bytes
        assert contents(out) == wanted
        assert not work_directory(out).exists()
    assert resumed > 0


@pytest.mark.usefixtures("small_windows")
def test_bytes_that_changed_since_are_written_again(root: Path, tmp_path: Path) -> None:
    out, calls = tmp_path / "out", [0]

    def stop(operation: str) -> None:
        calls[0] += 1
        if operation.startswith("fsync"):
            raise Killed

    with pytest.raises(Killed):
        export_to(root, out, "safetensors", stop)
    for file in (work_directory(out) / "files").iterdir():
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
    export_to(root, tmp_path / "whole", "safetensors")
    report = export_to(root, out, "safetensors")
    assert 0 < report.resumed_bytes < report.size_bytes
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.usefixtures("small_windows")
def test_a_file_that_was_published_is_never_written_to_again(root: Path, tmp_path: Path) -> None:
    out, mine = tmp_path / "out", tmp_path / "mine"

    def stop(operation: str) -> None:
        if operation.startswith("remove"):
            raise Killed

    with pytest.raises(Killed):
        export_to(root, out, "torch", stop)
    wanted = contents(out)
    out.rename(mine)
    mine.write_bytes(b"changed by its owner")
    export_to(root, out, "torch")
    assert mine.read_bytes() == b"changed by its owner" and contents(out) == wanted


def test_another_source_of_the_same_form_and_time_is_not_mixed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "model.safetensors", tmp_path / "out"
    save_file({"w": torch.ones(1000)}, source)
    before = source.stat()
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise StorageError("no more", operation="rename")

        patch.setattr(export_files._WorkDirectory, "publish", fail)
        assert main(["export", str(source), str(out), "--to", "safetensors"]) == 5
    save_file({"w": torch.zeros(1000)}, tmp_path / "other")
    os.utime(tmp_path / "other", ns=(before.st_atime_ns, before.st_mtime_ns))
    (tmp_path / "other").replace(source)
    assert source.stat().st_size == before.st_size
    assert main(["export", str(source), str(out), "--to", "safetensors"]) == 0
    assert not load_file(out / "model.safetensors")["w"].any()


@pytest.mark.usefixtures("small_windows")
def test_what_another_export_left_is_not_used(root: Path, tmp_path: Path) -> None:
    def stop(operation: str) -> None:
        if operation.startswith("rename"):
            raise Killed

    with pytest.raises(Killed):
        export_to(root, tmp_path / "out", "safetensors", stop)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 5))
    holdfast.save(root, {"model": model, "n": 3}, step=2)
    assert export_to(root, tmp_path / "out", "safetensors").resumed_bytes == 0
    export_to(root, tmp_path / "whole", "safetensors")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.usefixtures("small_windows")
def test_a_full_disk_is_one_error_and_the_place_is_as_it_was(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = vars(export_files)["write_once"], [0]

    def full(*args: object) -> int:
        calls[0] += 1
        if calls[0] == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count: int = real(*args)
        return count

    monkeypatch.setattr(export_files, "write_once", full)
    with pytest.raises(StorageError, match=r"ENOSPC.*Free some space.*is as it was"):
        export_to(root, tmp_path / "out", "dcp")
    assert not (tmp_path / "out").exists()
    assert export_to(root, tmp_path / "out", "dcp").resumed_bytes > 0


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_all_files_get_their_names_by_one_call(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    def fail(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("os.rename", fail)
        with pytest.raises(Killed):
            export_to(root, tmp_path / "out", to)
    assert not (tmp_path / "out").exists()
    report = export_to(root, tmp_path / "out", to)
    assert report.resumed_bytes > 0


@pytest.mark.usefixtures("small_windows")
def test_two_exports_to_one_place_do_not_mix(root: Path, tmp_path: Path) -> None:
    said: list[str] = []

    def again(operation: str) -> None:
        if operation.startswith("write") and not said:
            said.append("")
            with pytest.raises(RootBusy, match="being written by another export"):
                export_to(root, tmp_path / "out", "dcp")
            said.append("refused")

    export_to(root, tmp_path / "out", "dcp", again)
    assert said == ["", "refused"]


# ── imports ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    found = []
    for step in (1, 2):
        path = tmp_path / f"step-{step}"
        path.mkdir()
        tensors = {f"w{n}": torch.randn(30, 9) + step for n in range(3)}
        save_file(tensors, path / "model.safetensors")
        found.append(path)
    return found


def import_into(root: Store, sources: list[Path]) -> ImportReport:
    opened = [open_imports(f"{path}", None, lambda saved, _: saved)[0] for path in sources]
    plans = [plan_import(one) for (one,) in opened]
    return import_all(plans, root, lambda *_: None, 128 << 20)


def assert_whole(root: Path, sources: list[Path]) -> None:
    store = LocalStore(root)
    found = catalogue(store)
    assert [m.step for m in found.manifests if m.generation in found.lineage] == [1, 2]
    for manifest in found.manifests:
        assert not verify(store, manifest, deep=True).faults
    for step, source in enumerate(sources, 1):
        with holdfast.open(root, step) as ours, holdfast.open(source) as theirs:
            for name in theirs.leaves:
                assert torch.equal(ours.read(name), theirs.read(name))


@pytest.mark.parametrize("mode", ["stop", "torn", "error", "lost", "twice"])
def test_an_import_stopped_at_any_change_goes_on(
    sources: list[Path], tmp_path: Path, mode: str
) -> None:
    counting = FaultyStore(LocalStore(tmp_path / "whole"))
    import_into(counting, sources)
    assert len(counting.changes) > 10
    for number in range(1, len(counting.changes) + 1):
        root = tmp_path / f"root{number}"
        store = FaultyStore(LocalStore(root), fail_at=number, mode=mode)  # type: ignore[arg-type]
        try:
            import_into(store, sources)
        except (Stopped, HoldfastError):
            for manifest in catalogue(LocalStore(root)).manifests:
                assert not verify(LocalStore(root), manifest, deep=True).faults
        import_into(LocalStore(root), sources)
        assert_whole(root, sources)


def test_finished_images_are_compared_and_kept(sources: list[Path], tmp_path: Path) -> None:
    root = tmp_path / "root"
    counting = FaultyStore(LocalStore(tmp_path / "whole"))
    import_into(counting, sources)
    noted = next(n for n, (_, path) in enumerate(counting.changes, 1) if path.startswith("copies/"))
    with pytest.raises(Stopped):
        import_into(FaultyStore(LocalStore(root), fail_at=noted + 1), sources)
    assert import_into(LocalStore(root), sources).resumed_bytes > 0
    assert_whole(root, sources)
    other = tmp_path / "other"
    with pytest.raises(Stopped):
        import_into(FaultyStore(LocalStore(other), fail_at=noted + 1), sources)
    (image,) = other.rglob("*.safetensors")
    data = bytearray(image.read_bytes())
    data[5000] ^= 1
    image.write_bytes(data)
    assert import_into(LocalStore(other), sources).resumed_bytes == 0
    assert_whole(other, sources)


def test_a_bucket_is_a_root_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step-1").mkdir()
    tensors = {"a": torch.randn(1100, 700), "b": torch.randn(900, 600)}
    save_file(tensors, tmp_path / "step-1" / "model.safetensors")
    store = model_store(World(), monkeypatch)
    import_into(store, [tmp_path / "step-1"])
    (manifest,) = catalogue(store).manifests
    assert not verify(store, manifest, deep=True).faults
    checkpoint = from_manifest(store, manifest)
    saved = saved_state(checkpoint)
    reader = LeafReader(checkpoint, saved.leaves)
    plan = plan_format("safetensors", saved, 1 << 30, 1, reader)
    export(plan, reader, tmp_path / "out", "bucket", lambda *_: None)
    read = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(read[name], one) for name, one in tensors.items())


HIGHEST = """
import re, sys
from pathlib import Path
from holdfast.cli import main, parser
parser(("import", "export"))
def highest():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
begin = highest()
assert main(sys.argv[1:]) == 0
print(highest() - begin)
"""


def test_memory_stays_within_the_bound(tmp_path: Path) -> None:
    tensors = {f"w{n}": torch.randn(12_000_000) for n in range(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    bound = 100 << 20
    for argv in (
        ("import", "model.safetensors", "root", "--memory", str(bound)),
        ("export", "root", "out.pt", "--to", "torch", "--memory", str(bound)),
        ("export", "root", "out", "--to", "safetensors", "--cast", "BF16", "--memory", str(bound)),
    ):
        done = subprocess.run(
            [sys.executable, "-c", HIGHEST, *argv],
            env=os.environ | {"PYTHONPATH": SOURCE},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert int(done.stdout.splitlines()[-1]) < bound, argv


# ── SIGKILL ──────────────────────────────────────────────────────────────────────────────────


def run(*argv: str | Path, kill_s: float | None = None) -> int:
    command = [sys.executable, "-m", "holdfast.cli", *map(str, argv)]
    with subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": SOURCE}, stdout=subprocess.DEVNULL
    ) as process:
        try:
            return process.wait(timeout=kill_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def remove(place: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink()


def kill_at_random(tmp_path: Path, times: int) -> None:
    """Kill export and import so often at random moments, begin anew when one ends, and end each."""
    torch.manual_seed(0)
    chance = random.Random(4)
    (tmp_path / "step-1").mkdir()
    tensors = {f"w{n}": torch.randn(1000, 1500) for n in range(4)}
    save_file(tensors, tmp_path / "step-1" / "model.safetensors")
    root = tmp_path / "root"
    jobs: list[tuple[Path, tuple[str | Path, ...]]] = [
        (root, ("import", tmp_path / "step-1", root, "--memory", "80MiB")),
        *(
            (tmp_path / to, ("export", root, tmp_path / to, "--to", to, "--memory", "80MiB"))
            for to in FORMATS
        ),
    ]
    for number, (place, argv) in enumerate(jobs):
        started_s = time.monotonic()
        again = [tmp_path / "again" if one == place else one for one in argv]
        assert run(*again) == 0
        whole_s = time.monotonic() - started_s
        wanted = contents(tmp_path / "again")
        (tmp_path / "again").rename(tmp_path / f"again{number}")
        killed = 0
        while killed < times // len(jobs):
            code = run(*argv, kill_s=chance.uniform(0.3, 1.05) * whole_s)
            assert code in (0, -signal.SIGKILL)
            killed += code == -signal.SIGKILL
            if place != root and place.exists():
                assert contents(place) == wanted
                remove(place)
            elif code == 0:
                remove(place)
        if place == root or not place.exists():
            assert run(*argv) == 0
        if place != root:
            assert contents(place) == wanted
    with holdfast.open(root) as found:
        assert all(torch.equal(found.read(f"model.{name}"), one) for name, one in tensors.items())


def test_killed_a_few_times(tmp_path: Path) -> None:
    kill_at_random(tmp_path, 4)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_fifty_times(tmp_path: Path) -> None:
    kill_at_random(tmp_path, 52)
