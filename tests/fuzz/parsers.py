"""Every parser of bytes that come from outside: each reads its input or raises its own error.

A parser here is called with any bytes. What else it raises is a fault, and so is taking much longer
or more memory than the length of its input explains.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from unittest.mock import patch

from holdfast.cli import value_tree
from holdfast.errors import FormatError, HoldfastError, NotFound
from holdfast.format.checksum import checksum, text
from holdfast.format.image import parse_header
from holdfast.format.manifest import Incarnation, Lease, Manifest, Pin, Root, seal, unseal
from holdfast.format.values import decode, values_of
from holdfast.geometry.layout import Layout, table_from_json
from holdfast.interop.arrange import arrange
from holdfast.interop.dcp import METADATA, locate, read_dcp_tree
from holdfast.interop.pickles import interpret
from holdfast.interop.safetensors_files import open_safetensors
from holdfast.interop.source_files import SourceFiles
from holdfast.interop.torch_files import Tree, open_torch_file
from holdfast.parity.planning import record as parity_record
from holdfast.protocol import messages
from holdfast.state.values import decode_items, stored_lists
from holdfast.storage.http_client import Answer, Connections
from holdfast.storage.s3 import S3Bucket
from holdfast.storage.wrap import Patience
from holdfast.transport.wire.frame_seals import FIXED_HELLO_BYTES, parse_hello, rest_of_hello
from holdfast.transport.wire.http import END, parse_answer, parse_request

CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True, slots=True)
class Parser:
    """``read`` takes any bytes; ``refusals`` are the errors it may raise."""

    read: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...] = (FormatError,)

    def __call__(self, data: bytes) -> bool:
        """Returns whether the input was read; any error but a refusal passes through."""
        try:
            self.read(data)
        except self.refusals:
            return False
        return True


def _with_checksum(body: bytes) -> bytes:
    return b'{"checksum":"%s","body":%s}\n' % (text(checksum(body)).encode(), body)


def _document(data: bytes) -> None:
    """The first byte chooses the kind; its checksum is made true, so that the decoder is asked."""
    if data:
        kind = (Manifest, Incarnation, Root, Pin, Lease)[data[0] % 5]
        found = unseal(kind, _with_checksum(data[1:]), "d")  # type: ignore[type-var]
        assert unseal(kind, seal(found), "d") == found  # type: ignore[type-var,arg-type]


def _frame(data: bytes) -> None:
    """A sealed document with whatever checksum it has."""
    unseal(Manifest, data, "d")


def _values(data: bytes) -> None:
    found = values_of(data, "v")
    for value in (*found["shared"].values(), *found["own"].values()):
        try:
            decode(value)
        except FormatError:
            continue
        value_tree.text(value)
    for one in stored_lists(found["own"], "v").values():
        decode_items(one.items)


def _layout(data: bytes) -> None:
    found = Layout.from_json(data)
    for rank in range(min(found.world, 2)):
        found.pieces(rank)


def _header(data: bytes) -> None:
    """What an image begins with, and in front of it, in 4 bytes, how long the file is."""
    parse_header(data[4:], "i", int.from_bytes(data[:4], "little"))


def _parity_record(data: bytes) -> None:
    """Its body, with a true checksum."""
    frame = parity_record._FRAME.pack(parity_record._MAGIC, len(data), checksum(data))
    parity_record.unseal(frame + data, "r")


def _hello(data: bytes) -> None:
    fixed = data[:FIXED_HELLO_BYTES]
    rest = rest_of_hello(fixed)
    parse_hello(fixed, data[len(fixed) : len(fixed) + rest])


def _listing(data: bytes) -> None:
    """A server's answer to each request whose answer is XML; the second answer is another."""
    with answering(data) as bucket:
        for read in (
            lambda: list(islice(bucket.keys("p"), 10_000)),
            lambda: bucket.uploads("p"),
            lambda: bucket.begin_upload("p"),
        ):
            try:
                read()
            except HoldfastError:
                continue


@contextmanager
def answering(body: bytes) -> Iterator[S3Bucket]:
    """A bucket whose server gives this answer, and after it none that can be read."""
    answers = [Answer(200, {}, body)]

    def send(*_: object, **__: object) -> Answer:
        return answers.pop() if answers else Answer(200, {}, b"")

    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    with patch.object(Connections, "send", send), patch.dict(os.environ, keys):
        yield S3Bucket("bucket", "s3://bucket", patience=Patience(0.0, 0.001, 0.001))


class _Bytes(SourceFiles):
    """One file, in memory."""

    def __init__(self, data: bytes) -> None:
        super().__init__(Path("f"))
        self._data = data

    def size_bytes(self, name: str) -> int:
        return len(self._data)

    def read_into(self, name: str, offset_bytes: int, buffer: memoryview) -> None:
        buffer[:] = self._data[offset_bytes : offset_bytes + len(buffer)]


class _Directory(SourceFiles):
    """A directory of files in memory."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(Path("d"))
        self._data = files

    def names(self) -> list[str]:
        return sorted(self._data)

    def changed_s(self, name: str) -> float:
        return 0.0

    def size_bytes(self, name: str) -> int:
        if name not in self._data:
            raise NotFound(f"{name} is not there", path=name)
        return len(self._data[name])

    def read_into(self, name: str, offset_bytes: int, buffer: memoryview) -> None:
        buffer[:] = self._data[name][offset_bytes : offset_bytes + len(buffer)]


def _dcp(data: bytes) -> None:
    """A directory of DCP: its metadata, whose length the first 2 bytes have, then its one file.

    What a state is made of it, and where its elements lie.
    """
    size = int.from_bytes(data[:2], "little")
    files = _Directory({METADATA: data[2:][:size], "__0_0.distcp": data[2:][size:]})
    found = arrange(read_dcp_tree(files, "").entries, where="d")
    for name, leaf in found.leaves.items():
        for part in leaf.parts:
            locate(files, name, leaf.dtype, part.box, part.extent)


def _torch_zip(data: bytes) -> None:
    """A file of torch.save, and what a state is made of it."""
    arrange({"k": Tree(open_torch_file(_Bytes(data), "f")).value()}, where="f")


def _pickle(data: bytes) -> None:
    """What a pickle says, and what a state is made of it."""
    arrange({"k": interpret(data, "f").value}, where="f")


PARSERS = {
    "dcp-directories": Parser(_dcp),
    "documents": Parser(_document),
    "frames": Parser(_frame),
    "headers": Parser(_header),
    "layouts": Parser(_layout),
    "listings": Parser(_listing),
    "messages": Parser(messages.unpack),
    "parity-records": Parser(_parity_record),
    "peer-answers": Parser(lambda data: parse_answer(data + END)),
    "peer-hellos": Parser(_hello),
    "peer-requests": Parser(lambda data: parse_request(data + END, 16)),
    "pickles": Parser(_pickle),
    "safetensors": Parser(lambda data: open_safetensors(_Bytes(data), "f")),
    "tables": Parser(table_from_json),
    "torch-zips": Parser(_torch_zip),
    "values": Parser(_values),
}


def corpus(name: str) -> list[bytes]:
    """Returns the inputs that are kept for a parser, whole files below ``corpus``."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
