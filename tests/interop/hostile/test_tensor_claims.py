"""Files whose tensors are larger than any can be, or than the file has bytes for, are refused."""

from __future__ import annotations

import io
import itertools
import json
import string
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import ForeignFormatError
from support.checkpoints.commands import SOURCE


def safetensors(header: dict[str, object] | bytes, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def sharded(offset: object) -> bytes:
    """A shard of DCP's form, which says where in the whole it begins."""
    said = json.dumps({"a": {"saved_offsets": offset}})
    tensor = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    return safetensors({"__metadata__": {"DCP_SHARDING_INFO": said}, "a": tensor}, bytes(8))


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a%c" % len(data) + data


def _tuple(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def torch_file(shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """One tensor, a view of 1024 numbers."""
    named = (_text("storage"), b"ctorch\nFloatStorage\n", _text("0"), _text("cpu"), _number(1024))
    storage = _tuple(*named) + b"Q"
    sizes, steps = (_tuple(*map(_number, some)) for some in (shape, strides))
    parts = _tuple(storage, _number(0), sizes, steps, b"\x89", b"N")
    value = b"}(" + _text("w") + b"ctorch._utils\n_rebuild_tensor_v2\n" + parts + b"Ru."
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("a/data.pkl", b"\x80\x02" + value)
        made.writestr("a/data/0", bytes(4096))
    return file.getvalue()


def empty(size: int) -> bytes:
    return safetensors({"a": {"dtype": "F32", "shape": [0, size], "data_offsets": [0, 0]}})


CLAIMS: dict[str, tuple[str, bytes]] = {
    "no elements, and 2^62 rows": ("a.safetensors", empty(1 << 62)),
    "no elements, and 2^70 rows": ("a.safetensors", empty(1 << 70)),
    "no elements of a view of 2^62 rows": ("a.pt", torch_file((0, 1 << 62), (1, 1))),
    "a shard at 2^61": ("a.safetensors", sharded([1 << 61])),
    "a shard at 2^63": ("a.safetensors", sharded([1 << 63])),
    "a shard at 2^70": ("a.safetensors", sharded([1 << 70])),
    "one number, 2^29 times": ("a.pt", torch_file((1 << 29,), (0,))),
    "one number, 2^50 times": ("a.pt", torch_file((1 << 50,), (0,))),
    "one row, 2^40 times": ("a.pt", torch_file((1 << 40, 1024), (0, 1))),
    "one number, 2^62 times": ("a.pt", torch_file((1 << 62,), (0,))),
}


@pytest.mark.promise
@pytest.mark.parametrize(("name", "raw"), CLAIMS.values(), ids=CLAIMS.keys())
def test_what_no_tensor_can_be_is_refused(tmp_path: Path, name: str, raw: bytes) -> None:
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(ForeignFormatError, match=r"can be addressed|again and again") as error:
        holdfast.open(tmp_path / name)
    assert name in str(error.value)


def test_a_view_that_names_numbers_a_few_times_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(torch_file((1000, 1024), (0, 1)))
    with holdfast.open(tmp_path / "a.pt") as opened:
        assert opened.read("model.w").shape == (1000, 1024)


def hidden(raw: bytes) -> bytes:
    """The same with lists that are seen when the text in it is read as JSON alone."""
    header = raw[8:-8].replace(b"[]", b"\\u005b\\u005d")
    return safetensors(header, raw[-8:])


LETTERS = string.ascii_letters.encode()
KEYS = b",".join(
    b'"%b":0' % bytes(some)
    for some in itertools.islice(itertools.product(LETTERS, repeat=4), 430_000)
)
MANY = {
    "header": safetensors(b"{" + KEYS + b"}"),
    "metadata": safetensors(
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{'
        + KEYS.replace(b":0", b':""')
        + b"}}",
        bytes(8),
    ),
    "offsets of shards": hidden(sharded([[] for _ in range(100_000)])),
}
SCRIPT = """
import resource, sys
import holdfast
from holdfast.errors import ForeignFormatError
from holdfast.interop import directories, foreign_store
began_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    holdfast.open(sys.argv[1])
except ForeignFormatError as error:
    assert "little but" in str(error) and sys.argv[1] in str(error), error
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began_kib) << 10)
"""


@pytest.mark.promise
@pytest.mark.parametrize("raw", MANY.values(), ids=MANY.keys())
def test_a_header_of_many_keys_takes_little_memory(tmp_path: Path, raw: bytes) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(raw)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(file)],
        env={"PYTHONPATH": SOURCE},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= (16 << 20) + 4 * len(raw)
