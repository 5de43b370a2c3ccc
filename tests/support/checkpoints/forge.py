"""A good checkpoint to break in one place, with every checksum around it made true again.

So what refuses it is the rule that was broken, and not the first checksum on the way.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

import holdfast
from holdfast.catalogue import catalogue
from holdfast.errors import FormatError
from holdfast.format.manifest import Generation
from holdfast.geometry.box import Box, flat_boxes
from holdfast.geometry.layout import (
    REPLICATE,
    HolderBoxes,
    Instance,
    Layout,
    LeafEntry,
    LeafSpec,
    Mesh,
    merge,
)
from holdfast.persist import commit
from holdfast.persist.pins import pin
from holdfast.storage.local import LocalStore
from support.checkpoints.conformance import xxh64
from support.checkpoints.images import images_of, publish_checkpoint, random_leaf, split_leaf

Json = dict[str, Any]
Change = Callable[[Json], Any]
"""Changes a document in place, or returns what is to stand there instead: a document or bytes."""

VALUES = b'{"shared":{"tokens":7,"name":{"$tuple":["a",1]}},"own":{"rng":{"$bytes":"AAA="}}}'
GENERATION = Generation(2, 40)
BOTH = Instance(Mesh((2,), (0, 1)), (REPLICATE,))
LAYOUT = Layout(
    2,
    (
        LeafSpec("b", "I8", (5,), "lowest", (BOTH,)),
        split_leaf("c", "C128", (3,), 2),
        split_leaf("empty", "F32", (0, 2), 2),
        LeafSpec("s", "F64", (), "lowest", (BOTH,)),
        split_leaf("w", "F32", (6, 4), 2),
    ),
)
LEAVES = {
    leaf.name: random_leaf(leaf.dtype, leaf.shape, seed) for seed, leaf in enumerate(LAYOUT.leaves)
}


def make_good(root: Path) -> None:
    """The checkpoint 2-40 of two ranks, which went on from 1-30."""
    store = LocalStore(root)
    images = images_of(LAYOUT, LEAVES, values=VALUES, generation=GENERATION)
    publish_checkpoint(store, LAYOUT, images, GENERATION, parent=(1, 30))
    commit.open_root(store, "r")
    pin(store, GENERATION, "kept")


#: A run of which most is frozen: each rank has a little more than a block of it.
PARTS_LAYOUT = Layout(
    2,
    (
        split_leaf("base", "F32", (512, 1040), 2, is_frozen=True),
        split_leaf("lora", "F32", (6, 4), 2),
        LeafSpec("norm", "F64", (40,), "lowest", (BOTH,), is_frozen=True),
    ),
)
PARTS_LEAVES = {
    leaf.name: random_leaf(leaf.dtype, leaf.shape, seed)
    for seed, leaf in enumerate(PARTS_LAYOUT.leaves)
}


def make_good_parts(root: Path) -> None:
    """The same checkpoint of another state: its frozen leaves lie in parts of their own."""
    store = LocalStore(root)
    images = images_of(PARTS_LAYOUT, PARTS_LEAVES, values=VALUES, generation=GENERATION)
    publish_checkpoint(store, PARTS_LAYOUT, images, GENERATION, parent=(1, 30))
    commit.open_root(store, "r")


#: A flat optimizer's leaf, one cut into columns, and one that ranks hold in two ways.
LISTED_LAYOUT = merge(
    [
        [
            LeafEntry("columns", "F32", (6, 4), "split", HolderBoxes((Box((0, 0), (6, 1)),))),
            LeafEntry("flat", "F32", (6, 4), "split", HolderBoxes(flat_boxes((6, 4), 0, 10))),
            LeafEntry(
                "twice", "I16", (8,), "split", HolderBoxes((Box((0,), (5,)), Box((5,), (8,))))
            ),
        ],
        [
            LeafEntry("columns", "F32", (6, 4), "split", HolderBoxes((Box((0, 1), (6, 4)),))),
            LeafEntry("flat", "F32", (6, 4), "split", HolderBoxes(flat_boxes((6, 4), 10, 24))),
            LeafEntry(
                "twice", "I16", (8,), "split", HolderBoxes((Box((0,), (5,)), Box((6,), (8,))))
            ),
        ],
    ]
)
LISTED_LEAVES = {
    leaf.name: random_leaf(leaf.dtype, leaf.shape, seed)
    for seed, leaf in enumerate(LISTED_LAYOUT.leaves)
}


def make_good_listed(root: Path) -> None:
    """The same checkpoint of another state: no mesh tells who holds what of its leaves."""
    store = LocalStore(root)
    images = images_of(LISTED_LAYOUT, LISTED_LEAVES, values=VALUES, generation=GENERATION)
    publish_checkpoint(store, LISTED_LAYOUT, images, GENERATION, parent=(1, 30))
    commit.open_root(store, "r")


def sealed(body: Any) -> bytes:
    """A document whose checksum is true, whatever its body is."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b'{"checksum":"%s","body":%s}\n' % (xxh64(raw).encode(), raw)


def read_everything(root: Path) -> dict[str, Any]:
    """Every leaf and value of every checkpoint. FormatError for what a catalogue calls broken."""
    found = catalogue(LocalStore(root))
    for path, reason in found.broken:
        raise FormatError(f"{path}: {reason}")
    leaves: dict[str, Any] = {}
    for generation in found.lineage:
        with holdfast.open(root, str(generation)) as opened:
            leaves |= {name: opened.read(name) for name in opened.leaves}
            leaves["values"] = opened.values
            assert opened.aliases == {}
    return leaves


class Forger:
    """Breaks the checkpoint below ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = LocalStore(root)

    @property
    def manifest_path(self) -> Path:
        return self.root / "manifests" / "2-40.json"

    def image_path(self, rank: int) -> Path:
        return self.root / "steps" / "2-40-a0" / f"live-{rank:05d}.safetensors"

    def document(self, name: str, change: Change) -> None:
        """Change the body of a sealed document."""
        path = self.root / name
        path.write_bytes(sealed(_changed(json.loads(path.read_bytes())["body"], change)))

    def manifest(self, change: Change) -> None:
        self.document("manifests/2-40.json", change)

    def layout(self, change: Change) -> None:
        """Change the layout, and all that names it by its hash."""
        (path,) = (self.root / "layouts").iterdir()
        document = _changed(json.loads(path.read_bytes()), change)
        is_raw = isinstance(document, bytes)
        raw = document if is_raw else json.dumps(document, separators=(",", ":")).encode()
        name = xxhash.xxh3_128_hexdigest(raw)
        path.unlink()
        (path.parent / f"{name}.json").write_bytes(raw)
        self.manifest(lambda body: body.update(layout=name))
        for rank in (0, 1):
            self.header(rank, lambda header: header["__metadata__"].update(layout=name))

    def part_path(self, rank: int) -> Path:
        return self.root / "parts" / "2-40-a0" / f"frozen-{rank:05d}.safetensors"

    def header(self, rank: int, change: Change, of: str = "images") -> None:
        """Change the header of an image or of a part; the data stay where they are."""
        path = self.image_path(rank) if of == "images" else self.part_path(rank)
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        header = _changed(json.loads(data[8:begin]), change)
        raw = header if isinstance(header, bytes) else json.dumps(header).encode()
        size = max(begin, -(-(8 + len(raw)) // 4096) * 4096)
        changed = (size - 8).to_bytes(8, "little") + raw.ljust(size - 8) + data[begin:]
        self.image(rank, changed, of)

    def values(self, rank: int, raw: bytes) -> None:
        """Other values: the data behind them move, the table is computed anew."""
        data = self.image_path(rank).read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        start = header["__holdfast_values__"]["data_offsets"][0]
        stop, page = start + len(raw), -(-(start + len(raw)) // 4096) * 4096
        assert page <= 1 << 20, "one block"
        covered = data[begin : begin + start] + raw + bytes(page - stop)
        table = xxhash.xxh3_64_intdigest(covered).to_bytes(8, "little") + bytes(4088)
        for name, shape, offsets in (
            ("values", stop - start, [start, stop]),
            ("pad", page - stop, [stop, page]),
            ("blocks", 512, [page, page + 4096]),
        ):
            header[f"__holdfast_{name}__"].update(shape=[shape], data_offsets=offsets)
        self.image(rank, data[:begin] + covered + table)
        self.header(rank, lambda _: header)

    def image(self, rank: int, data: bytes, of: str = "images") -> None:
        """Replace a whole file; the manifest tells the truth about it where there is any."""
        path = self.image_path(rank) if of == "images" else self.part_path(rank)
        path.write_bytes(data)
        self.manifest(lambda body: body[of][rank].update(_reference(data)))


def _reference(data: bytes) -> Json:
    begin = 8 + int.from_bytes(data[:8], "little")
    facts = {"size_bytes": len(data), "header_xxh3": xxh64(data[:begin])}
    try:
        start = json.loads(data[8:begin])["__holdfast_blocks__"]["data_offsets"][0]
        return facts | {"table_xxh3": xxh64(data[begin + start :])}
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return facts


def _changed(document: Any, change: Change) -> Any:
    instead = change(document)
    return document if instead is None else instead


def copy_of(good: Path, where: Path) -> Forger:
    """A forger with a copy of the good checkpoint of its own."""
    shutil.copytree(good, where)
    return Forger(where)
