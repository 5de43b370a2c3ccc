"""Files of another writer that change while they are read give an error, and never a mixture."""

from __future__ import annotations

import gc
import json
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast import dcp
from holdfast.errors import ForeignFormatError, HoldfastError
from holdfast.interop import source_files
from holdfast.interop.hugging_face import state_dict
from holdfast.interop.source_files import MAX_OPEN, SourceFiles
from support.checkpoints.commands import error_of

CHANGED = "was changed while it was read"


def replace_file(path: Path, data: bytes) -> None:
    path.with_name("new").write_bytes(data)
    path.with_name("new").rename(path)


def overwrite(path: Path, data: bytes) -> None:
    before = path.stat().st_mtime_ns
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(before + 10**6, before + 10**6))


@pytest.mark.parametrize("change", [replace_file, overwrite])
@pytest.mark.parametrize("keeps", [True, False])
def test_a_file_that_changes_between_two_reads_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path, bytes], None],
    keeps: bool,
) -> None:
    if not keeps:
        monkeypatch.setattr(source_files, "_OPEN", source_files._OpenFiles(0))
    path = tmp_path / "a"
    path.write_bytes(b"old" * 100)
    files = SourceFiles(tmp_path)
    assert files.read("a", 0, 3) == b"old"
    change(path, b"new" * 100)
    if keeps and change is replace_file:
        assert files.read("a", 0, 3) == b"old", "the file that was opened is still there"
    else:
        with pytest.raises(ForeignFormatError, match=CHANGED):
            files.read("a", 0, 3)
    with pytest.raises(ForeignFormatError, match=CHANGED):
        files.require_unchanged()
    assert SourceFiles(tmp_path).read("a", 0, 3) == b"new"


def test_a_file_that_changes_under_a_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(bytes(300))
    files, preadv = SourceFiles(tmp_path), os.preadv
    assert files.size_bytes("a") == 300

    def changed(file: int, buffers: Any, offset: int) -> int:
        overwrite(tmp_path / "a", b"x")
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", changed)
    with pytest.raises(ForeignFormatError, match=CHANGED):
        files.read("a", 0, 3)


def sharded(path: Path, value: float) -> Path:
    path.mkdir(exist_ok=True)
    for number in range(3):
        save_file({f"w{number}": torch.full((8,), value)}, path / f"new{number}")
        (path / f"new{number}").rename(path / f"model-0000{number + 1}-of-00003.safetensors")
    names = {f"w{number}": f"model-0000{number + 1}-of-00003.safetensors" for number in range(3)}
    index = {"metadata": {"total_size": 96}, "weight_map": names}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def load_module(path: Path) -> None:
    module = torch.nn.Module()
    for number in range(3):
        module.register_parameter(f"w{number}", torch.nn.Parameter(torch.zeros(8)))
    holdfast.load(path, {"model": module})


def start_from(path: Path) -> None:
    module = torch.nn.Module()
    for number in range(3):
        module.register_parameter(f"w{number}", torch.nn.Parameter(torch.zeros(8)))
    with holdfast.Checkpointer(f"{path}-root", {"model": module}) as checkpointer:
        checkpointer.restore(start_from=path)


def load_by_dcp(path: Path) -> None:
    state = {"model": {f"w{number}": torch.zeros(8) for number in range(3)}}
    reader = dcp.Reader(path)
    dcp.load(state, storage_reader=reader, no_dist=True)


def for_transformers(path: Path) -> None:
    state_dict(path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("act", [load_module, start_from, load_by_dcp, for_transformers])
def test_no_load_gives_a_mixture_of_two_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], None]
) -> None:
    """Another save replaces all files before the first, and then after any read of data."""
    path = sharded(tmp_path / "run", 1.0)
    act(path)
    read_into, reads = SourceFiles.read_into, [0]

    def read(self: SourceFiles, name: str, offset: int, buffer: memoryview) -> None:
        read_into(self, name, offset, buffer)
        reads[0] += offset > 0 and len(buffer) == 32
        if reads[0] == stop:
            sharded(path, 2.0)
            reads[0] += 100

    monkeypatch.setattr(SourceFiles, "read_into", read)
    for stop in (1, 3):
        reads[0] = 0
        path = sharded(tmp_path / f"run{stop}", 1.0)
        with pytest.raises(BaseException, match=CHANGED) as caught:  # DCP wraps what is raised
            act(path)
        assert reads[0] > 100
        assert isinstance(caught.value, HoldfastError) or act is load_by_dcp


@pytest.mark.parametrize("depth", ["one", "of steps"])
def test_an_export_of_a_source_that_changes_publishes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    depth: str,
) -> None:
    top = tmp_path / "run"
    top.mkdir()
    path = sharded(top / "step-20", 1.0)
    sharded(top / "step-10", 1.0)
    is_changed: list[bool] = []
    read_into = SourceFiles.read_into

    def read(self: SourceFiles, name: str, offset: int, buffer: memoryview) -> None:
        read_into(self, name, offset, buffer)
        if offset > 0 and len(buffer) == 32 and not is_changed:
            is_changed.append(True)
            sharded(path, 2.0)

    monkeypatch.setattr(SourceFiles, "read_into", read)
    source, out = path if depth == "one" else top, tmp_path / "out"
    said = error_of(capsys, "export", source, out, "--to", "safetensors", code=4)
    assert CHANGED in said and not out.exists()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_files_stay_open_for_the_next_read_and_only_a_few_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3 * MAX_OPEN):
        (tmp_path / f"{number}").write_bytes(bytes([number]) * 1000)
    gc.collect()
    before, opened, open_ = open_files(), [0], os.open

    def counted(*args: Any, **kwargs: Any) -> int:
        opened[0] += not args[1] & os.O_DIRECTORY
        return open_(*args, **kwargs)

    monkeypatch.setattr(os, "open", counted)
    files = SourceFiles(tmp_path)
    for offset in range(100):
        assert files.read("7", offset, 5) == b"\x07" * 5
    assert opened[0] == 1
    others = [SourceFiles(tmp_path) for _ in range(3)]
    for one in others:
        for number in range(3 * MAX_OPEN):
            assert one.read(f"{number}", 3, 1) == bytes([number])
    assert open_files() <= before + MAX_OPEN
    del files, others, one
    gc.collect()
    assert open_files() <= before


def test_threads_read_what_they_ask_for(tmp_path: Path) -> None:
    count, wrong = 2 * MAX_OPEN, []
    for number in range(count):
        (tmp_path / f"{number}").write_bytes(bytes([number]) * 100)
    files = [SourceFiles(tmp_path) for _ in range(2)]

    def read(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(400):
            number = chance.randrange(count)
            if (
                chance.choice(files).read(f"{number}", chance.randrange(90), 9)
                != bytes([number]) * 9
            ):
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
