"""Files of a foreign directory: what is no file is no matter, and no link leads out by a folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.errors import ForeignFormatError, HoldfastError
from holdfast.interop import source_files
from holdfast.interop.safetensors_files import indexed_names, open_safetensors
from holdfast.interop.source_files import SourceFiles


def test_only_files_and_links_to_files_are_listed(tmp_path: Path) -> None:
    top, blobs = tmp_path / "top", tmp_path / "blobs"
    top.mkdir()
    blobs.mkdir()
    (blobs / "x").write_bytes(b"abc")
    os.symlink("/nonexistent", top / ".aa")
    os.symlink(blobs, top / "folder")
    os.symlink("loop", top / "loop")
    os.symlink("../blobs/x", top / "model.safetensors")
    os.mkfifo(top / "pipe")
    files = SourceFiles(top)
    assert files.names() == ["model.safetensors"]
    assert files.read("model.safetensors") == b"abc"
    assert files.changed_s(".aa") == files.changed_s("gone") == files.changed_s("pipe") == 0.0


@pytest.mark.promise
def test_no_folder_that_is_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "outside" / "in").mkdir(parents=True)
    (tmp_path / "outside" / "in" / "x").write_bytes(b"abc")
    top = tmp_path / "top"
    (top / "a").mkdir(parents=True)
    os.symlink(tmp_path / "outside", top / "sub")
    os.symlink(tmp_path / "outside" / "in", top / "a" / "b")
    files = SourceFiles(top)
    for name in ("sub/in/x", "a/b/x"):
        with pytest.raises(HoldfastError, match="cannot be opened"):
            files.read(name)


def test_more_files_than_are_looked_at_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_files, "MAX_FILES", 3)
    for number in range(4):
        (tmp_path / f"{number}").touch()
    with pytest.raises(ForeignFormatError, match="more than 3 files"):
        SourceFiles(tmp_path).names()


def test_documents_of_empty_lists_take_no_memory(tmp_path: Path) -> None:
    text = b'{"weight_map":[' + b"[]," * 300 + b"[]]}"
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    files = SourceFiles(tmp_path)
    with pytest.raises(ForeignFormatError, match="little but empty lists"):
        open_safetensors(files, "a.safetensors")
    with pytest.raises(ForeignFormatError, match="little but empty lists"):
        indexed_names(files, "model.safetensors.index.json")
