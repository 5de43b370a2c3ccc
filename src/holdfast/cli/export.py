"""Write one box of a leaf to a file of its own: whole, or not at all, and never over another.

Both formats are a header and the elements in row-major order, so the file grows portion by
portion and needs no library: safetensors takes every dtype, .npy those that numpy has.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path

import numpy as np

from holdfast.cli.elements import NATIVE, as_bytes
from holdfast.errors import StorageError, UsageError
from holdfast.geometry.dtypes import ITEMSIZE, STORED_AS_BYTES
from holdfast.load.read import Array

SUFFIXES = (".npy", ".safetensors")


def header(path: str, name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """The first bytes of the file ``path``; UsageError when its format has no such dtype."""
    suffix = Path(path).suffix
    if suffix not in SUFFIXES:
        raise UsageError(f"--out {path}: the name must end in {' or '.join(SUFFIXES)}")
    if suffix == ".safetensors":
        return _safetensors_header(name, dtype, shape)
    if dtype not in NATIVE:
        raise UsageError(f"--out {path}: numpy has no {dtype}; write a .safetensors file")
    descr = "|b1" if dtype == "BOOL" else np.dtype(NATIVE[dtype]).str
    head = BytesIO()
    described = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, described)
    return head.getvalue()


def _safetensors_header(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    size_bytes = int(np.prod(shape, dtype=object)) * ITEMSIZE[dtype]
    as_bytes = dtype in STORED_AS_BYTES  # as in an image: safetensors has no name for it
    tensor = {
        "dtype": "U8" if as_bytes else dtype,
        "shape": [size_bytes] if as_bytes else list(shape),
        "data_offsets": [0, size_bytes],
    }
    true = {"dtype": dtype, "shape": ",".join(map(str, shape))}
    text = json.dumps({"__metadata__": true, name: tensor}).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # the data begins on a multiple of eight bytes
    return len(text).to_bytes(8, "little") + text


def write_file(path: str, head: bytes, arrays: Iterable[Array], *, force: bool) -> int:
    """Write ``head`` and the elements; returns the bytes. UsageError when the file is there.

    It appears under its name when it is complete: an interrupted command leaves nothing.
    """
    target = Path(path)
    refuse_existing(path, force=force)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as file:
            file.write(head)
            for array in arrays:
                file.write(as_bytes(array))
            size_bytes = file.tell()
        _give_name(part, target, force=force)
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror}; choose another place with --out", path=path
        ) from error
    finally:
        part.unlink(missing_ok=True)
    return size_bytes


def refuse_existing(path: str, *, force: bool) -> None:
    """UsageError when ``path`` is there and may not be written over."""
    if Path(path).exists() and not force:
        raise UsageError(f"{path} exists already; --force writes over it")


def _give_name(part: Path, target: Path, *, force: bool) -> None:
    if force:
        part.replace(target)
        return
    try:
        os.link(part, target)  # unlike a rename, this fails when somebody was faster
    except FileExistsError:
        raise UsageError(f"{target} exists already; --force writes over it") from None
    except PermissionError:  # a file system without links
        part.rename(target)
