"""For every rule of docs/format/v1.md a file that breaks it, and what refuses the file.

A case breaks one rule of a good checkpoint and makes every checksum around it true again. Rules
that no file can break, or that other tests hold, are listed with the reason.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import support.checkpoints.specification as spec
from holdfast.catalogue import catalogue
from holdfast.errors import (
    ChecksumMismatch,
    CoverageError,
    FormatError,
    HoldfastError,
    NewerFormat,
)
from holdfast.persist import commit
from holdfast.persist.pins import pinned, read_pins
from holdfast.restore.reading.verify import verify
from holdfast.storage.local import LocalStore
from support.checkpoints.conformance import check_root
from support.checkpoints.forge import (
    GENERATION,
    LEAVES,
    LISTED_LEAVES,
    PARTS_LAYOUT,
    PARTS_LEAVES,
    Forger,
    copy_of,
    make_good,
    make_good_listed,
    make_good_parts,
    read_everything,
    sealed,
)
from support.checkpoints.forge import VALUES as VALUES_OF_GOOD
from support.checkpoints.images import images_of

MANIFEST = "manifests/2-40.json"
INCARNATION = "incarnations/2.json"
IMAGE = "steps/2-40-a0/live-00000.safetensors"
VALUES, PAD, TABLE = (f"__holdfast_{name}__" for name in ("values", "pad", "blocks"))
PART = "parts/2-40-a0/frozen-00000.safetensors"
GAP, MIB = "__holdfast_gap__", 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """One way to break a rule: ``forge`` does it, and reading then fails with ``match``."""

    rule: int
    name: str
    forge: Callable[[Forger], Any]
    match: str
    kind: type[HoldfastError] = FormatError
    good: str = "plain"
    """Which checkpoint is broken: "plain", "parts", whose frozen leaves lie apart, or "listed"."""

    def __str__(self) -> str:
        return f"R{self.rule} {self.name}"


def manifest(**fields: Any) -> Callable[[Forger], None]:
    return lambda forger: forger.manifest(lambda body: body.update(fields))


def incarnation(**fields: Any) -> Callable[[Forger], None]:
    return lambda forger: forger.document(INCARNATION, lambda body: body.update(fields))


def image_reference(**fields: Any) -> Callable[[Forger], None]:
    return lambda forger: forger.manifest(lambda body: body["images"][1].update(fields))


def lacking(name: str) -> Callable[[Forger], None]:
    return lambda forger: forger.manifest(lambda body: {k: body[k] for k in body if k != name})


def layout(**fields: Any) -> Callable[[Forger], None]:
    return lambda forger: forger.layout(lambda document: document.update(fields))


def leaf(number: int, column: int, value: Any) -> Callable[[Forger], None]:
    def change(document: dict[str, Any]) -> None:
        document["leaves"][number][column] = value

    return lambda forger: forger.layout(change)


def metadata(**fields: Any) -> Callable[[Forger], None]:
    return lambda forger: forger.header(0, lambda header: header["__metadata__"].update(fields))


def entry(name: str, **fields: Any) -> Callable[[Forger], None]:
    return lambda forger: forger.header(0, lambda header: header[name].update(fields))


def header_text(change: Callable[[str], str | bytes]) -> Callable[[Forger], None]:
    def as_bytes(header: dict[str, Any]) -> bytes:
        found = change(json.dumps(header))
        return found if isinstance(found, bytes) else found.encode()

    return lambda forger: forger.header(0, as_bytes)


def body_text(change: Callable[[bytes], bytes], name: str = MANIFEST) -> Callable[[Forger], None]:
    """The text of a body changed, its checksum true."""
    return lambda forger: forger.document(name, lambda body: change(json.dumps(body).encode()))


def raw(change: Callable[[bytes], bytes], name: str = MANIFEST) -> Callable[[Forger], None]:
    """The bytes of a file changed, and nothing else."""

    def forge(forger: Forger) -> None:
        path = forger.root / name
        path.write_bytes(change(path.read_bytes()))

    return forge


def image_bytes(change: Callable[[bytes], bytes]) -> Callable[[Forger], None]:
    """The bytes of an image changed; the manifest tells its new length and checksums."""
    return lambda forger: forger.image(0, change(forger.image_path(0).read_bytes()))


def values(text: bytes) -> Callable[[Forger], None]:
    return lambda forger: forger.values(0, text)


#: Numbers whose hashes Python makes the same: a set of n of them took a time of n * n.
MULTIPLES = [f'{{"$int":"{n * (2**61 - 1)}"}}' for n in range(1, 70)]
ALIKE = f'{{"$set":[{",".join(MULTIPLES)}]}}'
ALIKE_KEYS = f'{{"$dict":[{",".join(f"[{each},0]" for each in MULTIPLES)}]}}'


def tagged(text: str) -> Callable[[Forger], None]:
    return values(b'{"shared":{"x":%s},"own":{}}' % text.encode())


def renamed(old: str, new: str) -> Callable[[Forger], None]:
    """A tensor of an image by another name."""

    def change(header: dict[str, Any]) -> None:
        header[new] = header.pop(old)

    return lambda forger: forger.header(0, change)


def apart(rule: int, name: str, forge: Callable[[Forger], Any], match: str, **kind: Any) -> Case:
    """A case of the checkpoint with frozen parts."""
    return Case(rule, name, forge, match, good="parts", **kind)


def part_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Forger], None]:
    return lambda forger: forger.header(0, change, "parts")


def part_metadata(**fields: Any) -> Callable[[Forger], None]:
    return part_header(lambda header: header["__metadata__"].update(fields))


def part_reference(**fields: Any) -> Callable[[Forger], None]:
    return lambda forger: forger.manifest(lambda body: body["parts"][1].update(fields))


def raw_part(change: Callable[[bytes], bytes]) -> Callable[[Forger], None]:
    return raw(change, PART)


def listed(rule: int, name: str, forge: Callable[[Forger], Any], match: str, **kind: Any) -> Case:
    """A case of the checkpoint whose layout has listings."""
    return Case(rule, name, forge, match, good="listed", **kind)


def columns(at: int, **changes: Callable[[list[int]], Any]) -> Callable[[Forger], None]:
    """Columns of a listing changed in place: of the leaves columns, flat and twice, in order."""

    def change(document: dict[str, Any]) -> None:
        row = document["listings"][at]
        for name, act in changes.items():
            act(row[("reach", "gaps", "sizes", "steps").index(name)])

    return lambda forger: forger.layout(change)


def put(at: int, value: int) -> Callable[[list[int]], None]:
    return lambda column: column.__setitem__(at, value)


def box_of_flat_less(forger: Forger) -> None:
    """The last box is not listed: nobody stores it, as far as the layout tells."""
    columns(1, reach=put(0, 3), gaps=list.pop, sizes=list.pop, steps=list.pop)(forger)


def split_gap(header: dict[str, Any]) -> None:
    """The gap and something behind it, where the gap was."""
    start, stop = header[GAP]["data_offsets"]
    header[GAP] |= {"shape": [stop - start - 8], "data_offsets": [start, stop - 8]}
    header["more"] = {"dtype": "U8", "shape": [8], "data_offsets": [stop - 8, stop]}


def gap_in_values(header: dict[str, Any]) -> None:
    """A gap that ends with the block before, and the rest of it as values."""
    stop = header[GAP]["data_offsets"][1]
    base = header["base@0:256,0:1040"]
    base |= {"shape": [MIB // 4 - 80], "data_offsets": [320, MIB]}
    header[GAP] |= {"shape": [0], "data_offsets": [MIB, MIB]}
    header[VALUES] |= {"shape": [stop - MIB], "data_offsets": [MIB, stop]}


def longer_gap(header: dict[str, Any]) -> None:
    """A gap of more than a block, in which a piece lies that is now gone."""
    stop = header[GAP]["data_offsets"][1]
    del header["base@0:256,0:1040"]
    header[GAP] |= {"shape": [stop - 320], "data_offsets": [320, stop]}


def swap_parts(forger: Forger) -> None:
    one, other = (forger.part_path(rank).read_bytes() for rank in (0, 1))
    forger.image(0, other, "parts")
    forger.image(1, one, "parts")


def part_as_image(forger: Forger) -> None:
    forger.image(0, forger.part_path(0).read_bytes())


def image_as_part(forger: Forger) -> None:
    forger.image(0, forger.image_path(0).read_bytes(), "parts")


def twice_named(forger: Forger) -> None:
    """A piece that is in the image and in the part."""
    forger.header(
        0,
        lambda header: header.update(
            {"norm": header.pop("lora@0:3,0:4") | {"dtype": "F64", "shape": [6]}}
        ),
    )


def image_with_gap(forger: Forger) -> None:
    """An image that is whole by itself, and a part that is named with it all the same."""
    images = images_of(PARTS_LAYOUT, PARTS_LEAVES, values=VALUES_OF_GOOD, generation=GENERATION)
    forger.image(0, bytes(images[0]))


def flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def swap_pad_and_table(header: dict[str, Any]) -> None:
    stop = header[TABLE]["data_offsets"][1]
    start, size = header[PAD]["data_offsets"][0], header[TABLE]["shape"][0] * 8
    start += -start % 8
    header[VALUES]["shape"] = [start - header[VALUES]["data_offsets"][0]]
    header[VALUES]["data_offsets"][1] = start
    header[TABLE]["data_offsets"] = [start, start + size]
    header[PAD] |= {"shape": [stop - start - size], "data_offsets": [start + size, stop]}


def bytes_from_pad_to_values(header: dict[str, Any]) -> None:
    """Values that reach into the next page than the padding says."""
    pad = header[PAD]["data_offsets"]
    header[VALUES]["data_offsets"][1] = pad[1]
    header[VALUES]["shape"] = [pad[1] - header[VALUES]["data_offsets"][0]]
    header[PAD] |= {"shape": [0], "data_offsets": [pad[1], pad[1]]}
    header[TABLE] |= {"dtype": "U64", "shape": [511], "data_offsets": [pad[1] + 8, pad[1] + 4096]}
    header[PAD] |= {"shape": [8], "data_offsets": [pad[1], pad[1] + 8]}


def other_order(header: dict[str, Any]) -> None:
    """A piece of bytes in front of one of floats, which is then not aligned."""
    size = header["b"]["data_offsets"][1] - header["b"]["data_offsets"][0]
    moved = [name for name in header if name in ("w@0:3,0:4", "s")]
    for name in moved:
        header[name]["data_offsets"] = [at + size for at in header[name]["data_offsets"]]
    first = min(header[name]["data_offsets"][0] for name in moved) - size
    header["b"]["data_offsets"] = [first, first + size]


def swap_images(forger: Forger) -> None:
    """Each rank's image in the other's place; the manifest is true about both."""
    one, other = (forger.image_path(rank).read_bytes() for rank in (0, 1))
    forger.image(0, other)
    forger.image(1, one)


def one_image_twice(forger: Forger) -> None:
    forger.image_path(1).unlink()
    os.link(forger.image_path(0), forger.image_path(1))
    forger.image(1, forger.image_path(0).read_bytes())


def longer_table(forger: Forger) -> None:
    def change(header: dict[str, Any]) -> None:
        start, stop = header[TABLE]["data_offsets"]
        header[TABLE] |= {"shape": [1024], "data_offsets": [start, stop + 4096]}

    forger.image(0, forger.image_path(0).read_bytes() + bytes(4096))
    forger.header(0, change)


def extra_piece(header: dict[str, Any]) -> None:
    """The piece of rank 1 by the name of the one of rank 0."""
    header["w@3:6,0:4"] = header.pop("w@0:3,0:4")


WRONG = {"integer": "1", "number": "1", "string": 1}
DUPLICATED = b'{"format_version":1,"format_version":1,'
MESH = [[2], [0, 1]]

CASES = [
    Case(2, "a manifest of another generation", manifest(step=41, images=[]), "."),
    Case(
        2,
        "a manifest under another name",
        lambda f: f.manifest_path.rename(f.root / "manifests/2-41.json"),
        "2-40",
    ),
    Case(
        2,
        "an incarnation under another name",
        lambda f: (f.root / INCARNATION).rename(f.root / "incarnations/3.json"),
        "speaks of",
    ),
    Case(3, "a newer manifest", manifest(format_version=2), "upgrade", NewerFormat),
    # ── sealed documents ──
    Case(
        4, "spaces in the frame", raw(lambda d: d.replace(b',"body":', b', "body":')), "cut short"
    ),
    Case(4, "no line feed", raw(lambda d: d[:-1]), "cut short"),
    Case(4, "something behind it", raw(lambda d: d + b" "), "cut short"),
    Case(4, "a byte order mark", raw(lambda d: b"\xef\xbb\xbf" + d), "cut short"),
    Case(4, "a key before the checksum", raw(lambda d: b'{"a":1,' + d[1:]), "cut short"),
    Case(4, "two bodies", raw(lambda d: d[:-2] + b',"body":{}}\n'), "stored checksum"),
    Case(4, "no body at all", raw(lambda _: b""), "cut short"),
    Case(
        4,
        "capitals in the checksum",
        raw(lambda d: d.replace(d[13:29], b"ABCDEF0123456789")),
        "cut short",
    ),
    Case(5, "a changed body", raw(lambda d: d.replace(b'"a0"', b'"a1"')), "stored checksum"),
    Case(5, "a changed checksum", raw(lambda d: flipped(d, 20)), "stored checksum|cut short"),
    Case(5, "a changed incarnation", raw(lambda d: flipped(d, 60), INCARNATION), "stored"),
    Case(6, "a key twice", body_text(lambda b: DUPLICATED + b[1:]), "there twice"),
    Case(
        6,
        "a key twice in an image reference",
        body_text(lambda b: b.replace(b'"rank": 1', b'"rank": 0, "rank": 1')),
        "there twice",
    ),
    Case(
        6,
        "a key twice in values",
        body_text(lambda b: b.replace(b'"values": {', b'"values": {"x":1,"x":2')),
        "there twice",
    ),
    Case(
        6,
        "a key twice in an incarnation",
        body_text(lambda b: b.replace(b'"n": 2', b'"n": 1, "n": 2'), INCARNATION),
        "there twice",
    ),
    Case(6, "NaN", manifest(created_s=float("nan")), "not a valid|no readable"),
    Case(
        6,
        "infinity",
        body_text(lambda b: b.replace(b'"created_s": 0.0', b'"created_s": 1e999')),
        "not a valid",
    ),
    Case(6, "an integer with a fraction", manifest(step=40.0), "not a valid"),
    Case(
        6,
        "an integer with an exponent",
        body_text(lambda b: b.replace(b'"step": 40', b'"step": 4e1')),
        "not a valid",
    ),
    Case(
        6,
        "text that is not UTF-8",
        body_text(lambda b: b.replace(b'"run_id": "r"', b'"run_id": "\xff"')),
        "not a valid",
    ),
    Case(6, "a list", body_text(lambda _: b"[]"), "cut short"),
    Case(
        6,
        "nested without end",
        body_text(lambda b: b[:-1] + b',"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        "no readable|not a valid",
    ),
    Case(7, "no version", lacking("format_version"), "no readable format version"),
    Case(7, "version 0", manifest(format_version=0), "none before 1"),
    Case(7, "version 2", manifest(format_version=2), "upgrade", NewerFormat),
    Case(7, "a newer incarnation", incarnation(format_version=2), "upgrade", NewerFormat),
    Case(8, "an unknown feature", manifest(requires=["compressed"]), "'compressed'", NewerFormat),
    Case(
        8,
        "an unknown feature and nothing else",
        body_text(lambda _: b'{"format_version":1,"requires":["later"]}'),
        "'later'",
        NewerFormat,
    ),
    Case(
        8,
        "an unknown feature of an incarnation",
        incarnation(requires=["later"]),
        "'later'",
        NewerFormat,
    ),
    *[
        Case(10, f"no {name}", lacking(name), "missing required field")
        for name, field in spec.fields("Manifest").items()
        if field.is_required and name != "format_version"
    ],
    *[
        Case(
            10,
            f"{name} is no {field.type}",
            manifest(**{name: WRONG.get(field.type, 1)}),
            "not a valid|no readable",
        )
        for name, field in spec.fields("Manifest").items()
    ],
    *[
        Case(
            10,
            f"an incarnation's {name} is no {field.type}",
            incarnation(**{name: WRONG.get(field.type, True)}),
            "not a valid|no readable",
        )
        for name, field in spec.fields("Incarnation").items()
    ],
    *[
        Case(
            10,
            f"an image's {name} is no {field.type}",
            image_reference(**{name: 1 if field.type == "string" else "1"}),
            "not a valid",
        )
        for name, field in spec.fields("Image reference").items()
    ],
    Case(11, "a step before 0", manifest(step=-1), "outside of 0"),
    Case(11, "a step that other readers round", manifest(step=2**53), "outside of 0"),
    Case(11, "an incarnation before 0", manifest(incarnation=-2), "outside of 0"),
    Case(11, "a parent of its own", manifest(parent=[2, 1]), "not before its own"),
    Case(11, "an incarnation of a later one", incarnation(parent=[7, 1]), "not before its own"),
    Case(11, "a parent's step before 0", manifest(parent=[1, -1]), "outside of 0"),
    Case(11, "a world of none", manifest(world=0), "0 ranks"),
    Case(11, "a world beyond all", incarnation(world=2**21), "2097152 ranks"),
    Case(12, "no images", manifest(images=[]), "images of ranks"),
    Case(
        12,
        "one image less",
        lambda f: f.manifest(lambda b: b.update(images=b["images"][:1])),
        "images of ranks",
    ),
    Case(12, "a rank twice", image_reference(rank=0), "images of ranks"),
    Case(12, "a rank beyond the world", image_reference(rank=2), "images of ranks"),
    Case(12, "a rank before 0", image_reference(rank=-1), "images of ranks"),
    *[
        Case(13, f"path {path!r}", image_reference(path=path), "steps/2-40|is said to be")
        for path in (
            "",
            "/",
            "..",
            "/etc/passwd",
            "../other/live-00001.safetensors",
            "steps/2-40-a0/../../x/live-00001.safetensors",
            IMAGE,
            "steps/2-41-a0/live-00001.safetensors",
            "steps/2-40-/live-00001.safetensors",
            "steps/2-40-b0/live-00001.safetensors",
            "steps/2-40-a0/live-1.safetensors",
            "steps//2-40-a0/live-00001.safetensors",
            "./steps/2-40-a0/live-00001.safetensors",
            "steps/2-40-a0/live-00001.safetensors\0",
            "steps/2-40-a0/live-00001.safetensors\n",
            "manifests/2-40.json",
            "steps/2-40-a\u0661/live-00001.safetensors",
        )
    ],
    Case(
        13,
        "all paths in another checkpoint's directory",
        lambda f: f.manifest(
            lambda b: (
                [one.update(path=one["path"].replace("2-40", "1-40")) for one in b["images"]]
                and None
            )
        ),
        "not in one",
    ),
    # ── layouts ──
    Case(
        15,
        "a changed layout",
        lambda f: [
            path.write_bytes(path.read_bytes().replace(b'"I8"', b'"U8"'))
            for path in (f.root / "layouts").iterdir()
        ],
        "layout",
        ChecksumMismatch,
    ),
    Case(
        15,
        "the name of another layout",
        manifest(layout="0" * 32),
        "no layouts/0000",
        HoldfastError,
    ),
    Case(15, "a name that is no hash", manifest(layout="../../x"), "not 32 hexadecimal"),
    Case(16, "a newer layout", layout(version=3), "version 3", NewerFormat),
    Case(16, "a layout of version 0", layout(version=0), "version 0", NewerFormat),
    Case(
        16,
        "a key twice",
        lambda f: f.layout(
            lambda d: json.dumps(d).replace('"world"', '"world": 1, "world"').encode()
        ),
        "there twice",
    ),
    Case(16, "a table, not a layout", layout(holds="table"), "cannot be read"),
    Case(
        16,
        "text that is not UTF-8",
        lambda f: f.layout(lambda d: json.dumps(d).encode().replace(b'"I8"', b'"\xff"')),
        "cannot be read",
    ),
    Case(
        16,
        "no leaves",
        lambda f: f.layout(lambda d: {k: d[k] for k in d if k != "leaves"}),
        "cannot be read",
    ),
    *[
        Case(16, f"{name} of another type", layout(**{name: "x"}), "cannot be read")
        for name in spec.fields("4. Layout")
    ],
    Case(17, "a mesh that is not there", layout(instances=[[9, [[-1, 1]]]]), "no mesh 9"),
    Case(17, "a mesh before the first", layout(instances=[[-1, [[-1, 1]]]]), "no mesh -1"),
    Case(17, "an instance that is not there", layout(groups=[[9]]), "no instance 9"),
    Case(17, "a group that is not there", leaf(0, 4, 9), "no group 9"),
    Case(17, "a group before the first", leaf(0, 4, -1), "no group -1"),
    Case(18, "a mesh without dimensions", layout(meshes=[[[], []]]), "mesh of shape"),
    Case(18, "a mesh of none", layout(meshes=[[[0], []]]), "mesh of shape"),
    Case(18, "a mesh with too few ranks", layout(meshes=[[[2], [0]]]), "mesh of shape"),
    Case(18, "a rank twice", layout(meshes=[[[2], [0, 0]]]), "in the same mesh twice"),
    Case(18, "a rank beyond the world", layout(meshes=[[[2], [0, 2]]]), "rank 2 in a world of 2"),
    Case(18, "a rank before 0", layout(meshes=[[[2], [0, -1]]]), "ranks in a mesh"),
    Case(18, "a rank beyond all", layout(meshes=[[[2], [0, 2**40]]]), "ranks in a mesh"),
    Case(19, "too few placements", layout(instances=[[0, []]] * 3), "0 placements"),
    Case(19, "a dimension before -1", layout(instances=[[0, [[-2, 1]]]] * 3), "means nothing"),
    Case(
        19, "a dimension the leaf has not", layout(instances=[[0, [[2, 1]]]] * 3), "no dimension 2"
    ),
    Case(19, "a split factor of 0", layout(instances=[[0, [[0, 0]]]] * 3), "means nothing"),
    Case(
        19,
        "a split factor of a repetition",
        layout(instances=[[0, [[-1, 2]]]] * 3),
        "means nothing",
    ),
    Case(19, "too many strides", layout(instances=[[0, [[0, 2**17]]]] * 3), "65536 strides"),
    Case(20, "a group of none", layout(groups=[[]] * 3), "no rank holds"),
    Case(20, "a rank in two instances", layout(groups=[[0, 0]] * 3), "in two instances"),
    Case(
        21,
        "leaves out of order",
        lambda f: f.layout(lambda d: d["leaves"].reverse()),
        "sorted by name",
    ),
    Case(21, "a leaf twice", leaf(1, 0, "b"), "sorted by name"),
    Case(21, "a leaf without a name", leaf(0, 0, ""), "0 characters"),
    Case(21, "a leaf with too long a name", leaf(4, 0, "w" * 65537), "65537 characters"),
    Case(
        21,
        "half a character in a name",
        lambda f: f.layout(lambda d: json.dumps(d).replace('"w"', r'"w\ud800"').encode()),
        "cannot be read|not text",
    ),
    Case(21, "a leaf named like a piece", leaf(4, 0, "w@0:2,0:4"), "like the name of a part"),
    Case(21, "only the last leaf named like a piece", leaf(4, 0, "w@0:2"), "name of a part"),
    Case(22, "an unknown dtype", leaf(4, 1, "F7"), "does not know"),
    Case(22, "a dtype in small letters", leaf(4, 1, "f32"), "does not know"),
    Case(22, "a size before 0", leaf(4, 2, [6, -4]), "no tensor can have"),
    Case(22, "too many dimensions", leaf(3, 2, [1] * 65), "no tensor can have"),
    Case(22, "more bytes than there are", leaf(4, 2, [2**61, 4]), "more bytes than"),
    Case(22, "an unknown spread", leaf(4, 3, "somehow"), "there are"),
    # ── images ──
    Case(23, "cut short", lambda f: os.truncate(f.image_path(0), 8191), "bytes", HoldfastError),
    Case(
        23,
        "a length the file has not",
        image_reference(size_bytes=4096 * 5),
        "bytes",
        HoldfastError,
    ),
    Case(24, "empty", lambda f: os.truncate(f.image_path(0), 0), "bytes", HoldfastError),
    Case(
        24,
        "a header beyond the file",
        raw(lambda d: (2**20).to_bytes(8, "little") + d[8:], IMAGE),
        "claims",
    ),
    Case(24, "a header beyond all", raw(lambda d: b"\xff" * 8 + d[8:], IMAGE), "claims"),
    Case(
        24,
        "data that begin beside a page",
        image_bytes(
            lambda d: (
                (int.from_bytes(d[:8], "little") - 1).to_bytes(8, "little") + d[8:4095] + d[4096:]
            )
        ),
        "not on a page",
    ),
    Case(
        25, "a changed header", raw(lambda d: flipped(d, 4000), IMAGE), "header", ChecksumMismatch
    ),
    Case(
        25,
        "a changed entry of the table",
        raw(lambda d: flipped(d, len(d) - 4096), IMAGE),
        "block table",
        ChecksumMismatch,
    ),
    Case(
        25,
        "a changed unused entry of the table",
        raw(lambda d: flipped(d, len(d) - 1), IMAGE),
        "block table",
        ChecksumMismatch,
    ),
    Case(26, "no JSON", header_text(lambda t: t[:-1]), "not the JSON"),
    Case(26, "a list", header_text(lambda t: f"[{t}]"), "not the JSON"),
    Case(
        26,
        "a tensor twice",
        header_text(
            lambda t: t.replace(
                '"b":', '"b": {"dtype":"I8","shape":[5],"data_offsets":[0,5]}, "b":'
            )
        ),
        "there twice",
    ),
    Case(
        26,
        "text that is not UTF-8",
        header_text(lambda t: t.encode().replace(b'"s"', b'"\xff"')),
        "not the JSON",
    ),
    Case(
        26,
        "NaN",
        header_text(lambda t: t.replace('"shape": [5]', '"shape": [NaN]')),
        "not the JSON|entry",
    ),
    Case(
        26,
        "a field less",
        lambda f: f.header(0, lambda h: h["b"].pop("shape") and None),
        "entry 'b'",
    ),
    Case(26, "an entry that is none", lambda f: f.header(0, lambda h: h.update(b=7)), "entry 'b'"),
    Case(26, "one offset", entry("b", data_offsets=[0]), "entry 'b'"),
    Case(
        26,
        "nested without end",
        header_text(lambda t: t.replace('"shape": [5]', '"shape": ' + "[" * 99999 + "]" * 99999)),
        "not the JSON|entry",
    ),
    Case(27, "metadata that are no strings", metadata(step=40), "not strings"),
    Case(
        27,
        "no metadata",
        lambda f: f.header(0, lambda h: h.pop("__metadata__") and None),
        "not a Holdfast image",
    ),
    Case(
        27,
        "a safetensors file of somebody else",
        lambda f: f.header(0, lambda h: h.update(__metadata__={"format": "pt"})),
        "not a Holdfast image",
    ),
    Case(27, "another version", metadata(holdfast="2"), "upgrade", NewerFormat),
    Case(28, "an unknown feature", metadata(requires="encrypted"), "'encrypted'", NewerFormat),
    Case(28, "several unknown features", metadata(requires="a b"), r"\['a', 'b'\]", NewerFormat),
    *[
        Case(29, f"another {name}", metadata(**{name: other}), f"{name} '{other}'")
        for name, other in (
            ("incarnation", "1"),
            ("step", "41"),
            ("attempt", "a1"),
            ("rank", "1"),
            ("world", "3"),
            ("layout", "0" * 32),
        )
    ],
    Case(
        29,
        "no rank",
        lambda f: f.header(0, lambda h: h["__metadata__"].pop("rank") and None),
        "rank None",
    ),
    Case(29, "two images in each other's place", swap_images, "rank '1'"),
    Case(29, "one image for two ranks", one_image_twice, "rank '0'"),
    Case(30, "a gap", entry("w@0:3,0:4", data_offsets=[64, 112]), "gap or overlap"),
    Case(30, "an overlap", entry("s", data_offsets=[0, 8]), "gap or overlap"),
    Case(30, "an offset before 0", entry("c@0:2", data_offsets=[-32, 0]), "gap or overlap"),
    Case(30, "an end before the start", entry("w@0:3,0:4", data_offsets=[48, 0]), "-48 bytes"),
    Case(
        30,
        "an offset beyond the file",
        entry("w@0:3,0:4", data_offsets=[2**50, 2**50 + 48]),
        "gap or overlap",
    ),
    Case(30, "more elements than bytes", entry("w@0:3,0:4", shape=[3, 5]), "its shape needs 60"),
    Case(30, "a size before 0", entry("w@0:3,0:4", shape=[-3, -4]), "no tensor has"),
    Case(30, "more dimensions than there are", entry("s", shape=[1] * 65), "no tensor has"),
    Case(30, "a million dimensions", entry("s", shape=[2**62] * 1_000_000), "no tensor has"),
    Case(30, "an unknown dtype", entry("b", dtype="F128"), "knows no dtype"),
    Case(
        30,
        "a dtype that is stored as U8",
        entry("c@0:2", dtype="C128", shape=[2]),
        "knows no dtype",
    ),
    Case(30, "a byte behind the end", image_bytes(lambda d: d + b"\0"), "bytes of data"),
    Case(
        30, "a tensor less", lambda f: f.header(0, lambda h: h.pop("s") and None), "gap or overlap"
    ),
    Case(31, "bytes in front of floats", lambda f: f.header(0, other_order), "not aligned"),
    *[Case(32, f"no {name}", renamed(name, "x"), f"no '{name}'") for name in (VALUES, PAD, TABLE)],
    Case(32, "a table of bytes", entry(TABLE, dtype="U8", shape=[4096]), "not a row of U64"),
    Case(32, "a table of two dimensions", entry(TABLE, shape=[2, 256]), "not a row of U64"),
    Case(32, "values that are no bytes", entry(VALUES, dtype="I8"), "not a row of U8"),
    Case(32, "padding that is no bytes", entry(PAD, dtype="I8"), "not a row of U8"),
    Case(32, "the table before the padding", lambda f: f.header(0, swap_pad_and_table), "in order"),
    Case(
        32,
        "a table beside its page",
        lambda f: f.header(0, bytes_from_pad_to_values),
        "on the page",
    ),
    Case(
        33,
        "another name of the format's own",
        renamed("b", "__holdfast_later__"),
        "'__holdfast_later__'",
    ),
    Case(33, "nothing but the beginning", renamed("b", "__holdfast_"), "the format's own"),
    Case(35, "a piece less", renamed("w@0:3,0:4", "x"), "no piece 'w@0:3,0:4'", CoverageError),
    Case(
        35,
        "the piece of another rank",
        lambda f: f.header(0, extra_piece),
        "no piece 'w@0:3,0:4'",
        CoverageError,
    ),
    Case(
        36,
        "a piece divided otherwise",
        renamed("w@0:3,0:4", "w@0:2,0:6"),
        "no piece 'w@0:3,0:4'",
        CoverageError,
    ),
    Case(37, "a changed byte", raw(lambda d: flipped(d, 4096), IMAGE), "block 0", ChecksumMismatch),
    Case(
        37,
        "a changed byte of padding",
        raw(lambda d: flipped(d, 8191), IMAGE),
        "block 0",
        ChecksumMismatch,
    ),
    Case(
        37, "more entries than blocks need", image_bytes(lambda d: d + bytes(4096)), "bytes of data"
    ),
    Case(37, "a longer table", longer_table, "1024 entries"),
    # ── values ──
    *[
        Case(38, f"values {text!r:.20}", values(text), "values")
        for text in (b"", b"[]", b"null", b"{", b"\xff", b'{"shared":{"x":NaN}}', b"[" * 99999)
    ],
    Case(38, "a key twice", values(b'{"shared":{"x":1,"x":2},"own":{}}'), "there twice"),
    Case(
        38,
        "two documents in one",
        values(b'{"shared":{"x":1},"own":{},"shared":{"x":2}}'),
        "there twice",
    ),
    *[
        Case(
            39,
            f"aliases {aliases!r}",
            values(b'{"shared":{},"own":{},"aliases":%s}' % aliases),
            "aliases",
        )
        for aliases in (b"[]", b"null", b'{"a":"nothing"}', b'{"a":1}')
    ],
    Case(40, "an unknown tag", tagged('{"$later":1}'), r"\$later"),
    Case(40, "a set of numbers that hash alike", tagged(ALIKE), "have the same hash"),
    Case(40, "keys that hash alike", tagged(ALIKE_KEYS), "have the same hash"),
    Case(40, "a tensor in a set", tagged('{"$set":[{"$leaf":"w"}]}'), "a tensor is no key"),
    Case(40, "a tag of code", tagged('{"$pickle":"gASVAAAAAAA="}'), r"\$pickle"),
    *[
        Case(40, text, tagged(text), "malformed")
        for text in (
            '{"$float":"1.5"}',
            '{"$float":"0x7ff"}',
            '{"$int":"1.5"}',
            '{"$int":5}',
            '{"$bytes":"a"}',
            '{"$bytearray":7}',
            '{"$tuple":{}}',
            '{"$set":[1,1]}',
            '{"$frozenset":[[1]]}',
            '{"$dict":[[1]]}',
            '{"$ordered":{"a":1}}',
            '{"$counter":[1]}',
            '{"$default":["eval",[]]}',
            '{"$dtype":5}',
            '{"$device":"a b"}',
            '{"$enum":7}',
            '{"$enum":{"type":"X"}}',
            '{"$object":7}',
            '{"$object":{"type":"X"}}',
            '{"$leaf":1}',
            '{"$numpy":{"dtype":"O","shape":[1],"data":""}}',
            '{"$numpy":{"dtype":"<f4","shape":[1000000000],"data":""}}',
        )
    ],
    Case(
        23,
        "a byte behind the end that the manifest does not know",
        raw(lambda d: d + b"\0", IMAGE),
        "bytes",
    ),
    Case(34, "a piece of another dtype", entry("w@0:3,0:4", dtype="I32"), "another size or dtype"),
    Case(34, "a piece of another shape", entry("w@0:3,0:4", shape=[4, 3]), "another size or dtype"),
    Case(
        34,
        "a piece that is not stored as U8",
        entry("c@0:2", dtype="F64", shape=[4]),
        "another size or dtype",
    ),
    # ── frozen leaves ──
    *[
        Case(47, f"frozen {numbers}", layout(frozen=numbers), "rising order")
        for numbers in ([5], [-1], [1, 0], [1, 1])
    ],
    Case(47, "frozen leaves by name", layout(frozen=["w"]), "cannot be read"),
    Case(48, "a gap that nobody announced", renamed("b", GAP), "does not require"),
    Case(48, "no gap where one is announced", metadata(requires="parts"), "has no"),
    apart(
        48,
        "a gap of another dtype",
        part_header(lambda h: h[GAP].update(dtype="I8")),
        "not a row of U8",
    ),
    apart(
        48,
        "a gap of two dimensions",
        part_header(lambda h: h[GAP]["shape"].append(1)),
        "not a row of U8",
    ),
    apart(48, "a gap that ends inside a block", part_header(split_gap), "fill up a block"),
    apart(48, "a gap of more than a block", part_header(longer_gap), "fill up a block"),
    apart(49, "parts that nobody announced", manifest(requires=[]), "does not require"),
    apart(49, "a rank twice", part_reference(rank=0), "frozen parts of ranks"),
    apart(49, "a rank beyond the world", part_reference(rank=2), "frozen parts of ranks"),
    *[
        apart(49, f"path {path!r}", part_reference(path=path), "is said to be")
        for path in (
            "",
            "/etc/passwd",
            "../other/frozen-00001.safetensors",
            PART,
            "parts/2-40-a0/../../x/frozen-00001.safetensors",
            "parts/2-40-/frozen-00001.safetensors",
            "steps/2-40-a0/live-00001.safetensors",
            "parts/2-40-a0/live-00001.safetensors",
            "parts/02-40-a0/frozen-00001.safetensors",
            "parts/2-40-a0/frozen-1.safetensors",
            "parts/2-40-a0/frozen-00001.safetensors\n",
            "parts/2-40-a0/frozen-00001.damaged",
        )
    ],
    *[
        apart(
            49,
            f"{name} of another type",
            part_reference(**{name: 1 if field.type == "string" else "1"}),
            "not a valid",
        )
        for name, field in spec.fields("Image reference").items()
    ],
    apart(49, "a length of nothing", part_reference(size_bytes=0), "0 bytes"),
    apart(49, "no checksum", part_reference(table_xxh3="x"), "no checksum"),
    apart(50, "a part cut short", lambda f: os.truncate(f.part_path(0), 8191), "bytes"),
    apart(
        50,
        "a part that is gone",
        lambda f: f.part_path(0).unlink(),
        "no parts/",
        kind=HoldfastError,
    ),
    apart(
        50,
        "a changed header",
        raw_part(lambda d: flipped(d, 4000)),
        "header",
        kind=ChecksumMismatch,
    ),
    apart(
        50,
        "a changed table",
        raw_part(lambda d: flipped(d, len(d) - 1)),
        "block table",
        kind=ChecksumMismatch,
    ),
    apart(
        50,
        "a changed byte",
        raw_part(lambda d: flipped(d, MIB + 5000)),
        r"block 1 of parts/2-40-a0/frozen-00000\.safetensors \(a frozen part: it is noted",
        kind=ChecksumMismatch,
    ),
    apart(
        50,
        "a changed byte of the gap",
        raw_part(lambda d: flipped(d, 2 * MIB)),
        "block 1 of",
        kind=ChecksumMismatch,
    ),
    apart(50, "another rank", part_metadata(rank="1"), "rank '1'"),
    apart(50, "parts in each other's place", swap_parts, "rank '1'"),
    apart(50, "another kind of part", part_metadata(part="thawed"), "part 'thawed'"),
    apart(50, "another version", part_metadata(holdfast="2"), "upgrade", kind=NewerFormat),
    apart(
        50, "an unknown feature", part_metadata(requires="parts later"), "'later'", kind=NewerFormat
    ),
    apart(50, "an image for a part", image_as_part, "part None"),
    apart(50, "values in it", part_header(gap_in_values), "is not an image and the frozen part"),
    apart(51, "a part for an image", part_as_image, "incarnation None"),
    apart(51, "an image that has it all", image_with_gap, "is not an image and the frozen part"),
    apart(51, "a piece in both", twice_named, "'norm' is in the image and in its frozen part"),
    apart(
        51,
        "a piece less",
        part_header(lambda h: h.update({"x": h.pop("base@0:256,0:1040")})),
        "no piece 'base",
        kind=CoverageError,
    ),
    # ── listings: of the leaves columns, flat and twice ──
    listed(53, "listings in a layout of version 1", layout(version=1), "version 1, and 3 listings"),
    Case(53, "version 2 without listings", layout(version=2), "version 2, and 0 listings"),
    listed(54, "a listing that is not there", layout(groups=[[-4], [-2], [-3]]), "no listing 3"),
    listed(54, "two listings", layout(groups=[[-1, -2], [-2], [-3]]), "2 listings"),
    listed(
        54,
        "a rank in a listing and on a mesh",
        layout(meshes=[[[1], [1]]], instances=[[0, [[-1, 1]]]], groups=[[-1, 0], [-2], [-3]]),
        "in two instances",
    ),
    listed(54, "boxes beyond the leaf", leaf(1, 2, [6, 3]), "boxes of flat reach to"),
    listed(54, "boxes of other dimensions", leaf(1, 2, [24]), "boxes of flat reach to"),
    listed(55, "a gap more", columns(1, gaps=lambda c: c.append(0)), "5 gaps and 4 sizes"),
    listed(55, "a step less", columns(1, steps=list.pop), "4 boxes and 3 holders"),
    listed(
        55,
        "boxes out of order",
        columns(0, gaps=lambda c: c.__setitem__(slice(2), [1, -2])),
        "sorted",
    ),
    listed(55, "a box twice", columns(2, gaps=put(2, -3), sizes=put(2, 3)), "each there once"),
    listed(55, "a reach beyond the boxes", columns(1, reach=put(0, 7)), "said to reach"),
    listed(55, "a reach of nothing", columns(1, reach=put(0, 0)), "no tensor can have"),
    listed(55, "more elements than there are", columns(1, reach=put(0, 2**62)), "no tensor can"),
    listed(55, "too many dimensions", columns(1, reach=lambda c: c.extend([1] * 63)), "no tensor"),
    listed(56, "a box before the leaf", columns(1, gaps=put(0, -1)), "begins at element -1"),
    listed(56, "a box behind the leaf", columns(1, gaps=put(3, 99)), "begins at element"),
    listed(56, "a size of nothing", columns(1, sizes=put(3, 0)), "0 elements"),
    listed(56, "a run beyond the end", columns(1, sizes=put(3, 99)), "99 elements"),
    listed(56, "a run that is no box", columns(1, sizes=put(0, 9)), "not one box"),
    listed(56, "extents that are not there", columns(0, sizes=put(0, -9)), "no number 8 of"),
    listed(56, "extents of one run", layout(extents=[[6, 4], [6, 3]]), "is one run"),
    listed(56, "extents beyond the leaf", layout(extents=[[6, 1], [6, 9]]), "a box of"),
    listed(56, "extents of other dimensions", layout(extents=[[6], [6, 3]]), "a box of"),
    listed(56, "extents of nothing", layout(extents=[[6, 0], [6, 3]]), "a box of"),
    listed(56, "a rank before 0", columns(0, steps=put(0, -1)), "held by ranks 0 to"),
    listed(56, "a set that is not there", columns(2, steps=put(0, 9)), "of the set"),
    listed(56, "a set of one", layout(sets=[[0]]), "not several"),
    listed(56, "a set out of order", layout(sets=[[1, 0]]), "rising"),
    listed(56, "a set with a rank twice", layout(sets=[[1, 1]]), "rising"),
    listed(56, "a rank beyond the world", layout(sets=[[0, 2]]), "rank 2 in a world of 2"),
    *[
        listed(56, f"{name} of another type", layout(**{name: "x"}), "cannot be read")
        for name in ("extents", "sets", "listings")
    ],
    listed(35, "a box that nobody holds", box_of_flat_less, "not at all", kind=CoverageError),
    listed(
        36, "boxes of another rank", columns(1, steps=put(0, 1)), "no piece", kind=CoverageError
    ),
    apart(
        51,
        "a frozen leaf's piece in neither",
        lambda f: f.manifest(lambda b: b.update(parts=b["parts"][:1])),
        "no piece 'base",
        kind=CoverageError,
    ),
]

#: Rules without a case above, and why: other tests hold them, or no file can break them.
ELSEWHERE = {
    1: "test_a_number_that_is_spelt_otherwise_is_another_name",
    9: "test_unknown_fields_and_optional_features_are_read_over",
    14: "test_a_pin_counts_by_its_name_whatever_it_says",
    41: "no file can: any parents that R11 allows give a lineage (tests/format/test_manifest.py)",
    42: "no file can: it says which of several good ones to take (tests/restore/test_choose.py)",
    43: "no file can: it is about who writes (tests/crash/test_commit.py)",
    44: "no file can: it is about the order of writing (tests/storage/test_durability.py)",
    45: "no file can: it is about the order of removing (tests/crash/test_commit.py)",
    46: "no file can: it is about later versions",
    52: "no file can: it is about who writes (tests/persist/test_parts.py)",
    57: "no file can: it is about who removes (tests/persist/test_leases.py)",
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("good") / "root"
    make_good(root)
    return root


@pytest.fixture(scope="module")
def goods(good: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parts = tmp_path_factory.mktemp("parts") / "root"
    make_good_parts(parts)
    listed = tmp_path_factory.mktemp("listed") / "root"
    make_good_listed(listed)
    return {"plain": good, "parts": parts, "listed": listed}


@pytest.fixture
def forger(good: Path, tmp_path: Path) -> Forger:
    return copy_of(good, tmp_path / "root")


def test_every_rule_has_a_hostile_file_or_a_reason() -> None:
    covered = {case.rule for case in CASES}
    assert covered.isdisjoint(ELSEWHERE)
    assert covered | set(ELSEWHERE) == set(spec.rules())
    for reason in ELSEWHERE.values():
        assert reason.startswith("no file can") or reason in globals()


@pytest.mark.parametrize("which", ["plain", "parts", "listed"])
def test_the_good_checkpoint_is_good(which: str, goods: dict[str, Path]) -> None:
    check_root(goods[which])
    found = read_everything(goods[which])
    leaves = {"plain": LEAVES, "parts": PARTS_LEAVES, "listed": LISTED_LEAVES}[which]
    assert found.pop("values") == {"tokens": 7, "name": ("a", 1)}
    assert set(found) == set(leaves)
    for name, array in leaves.items():
        assert np.asarray(found[name]).tobytes() == array.tobytes()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_file_that_breaks_a_rule_is_refused(
    case: Case, goods: dict[str, Path], tmp_path: Path
) -> None:
    forger = copy_of(goods[case.good], tmp_path / "root")
    case.forge(forger)
    with pytest.raises(case.kind) as caught:
        read_everything(forger.root)
    assert re.search(case.match, str(caught.value)), str(caught.value)


@pytest.mark.parametrize("case", [c for c in CASES if 22 < c.rule < 39 or c.rule > 47], ids=str)
def test_verify_finds_a_fault_in_every_image_that_breaks_a_rule(
    case: Case, goods: dict[str, Path], tmp_path: Path
) -> None:
    forger = copy_of(goods[case.good], tmp_path / "root")
    case.forge(forger)
    (found,) = catalogue(forger.store).manifests or (None,)
    if found is not None:
        assert verify(forger.store, found, deep=True).faults


def test_files_of_other_names_are_read_over(forger: Forger) -> None:
    for name in (
        "manifests/2-41.json.part",
        "manifests/x-1.json",
        "manifests/-1-5.json",
        "manifests/.publish-0",
        "incarnations/x.json",
        "layouts/x.json",
        "steps/x",
        "x",
        "events/x.jsonl",
    ):
        path = forger.root / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"not ours")
    assert read_everything(forger.root)["values"]["tokens"] == 7


def test_a_number_that_is_spelt_otherwise_is_another_name(forger: Forger) -> None:
    for name in ("manifests/02-40.json", "manifests/2-040.json", "manifests/\u0662-40.json"):
        (forger.root / name).write_bytes(forger.manifest_path.read_bytes())
    (forger.root / "incarnations/02.json").write_bytes((forger.root / INCARNATION).read_bytes())
    found = catalogue(forger.store)
    assert (len(found.manifests), len(found.incarnations), found.broken) == (1, 1, ())


def test_unknown_fields_and_optional_features_are_read_over(forger: Forger) -> None:
    later = {"optional": ["parity", "other"], "later": {"a": [1]}, "zzz": None}
    for name in (MANIFEST, INCARNATION, "holdfast.json", "pins/2-40.json"):
        forger.document(name, lambda body: body.update(later))
    forger.manifest(lambda body: [one.update(crc=1) for one in body["images"]] and None)
    forger.layout(lambda document: document.update(later=1))
    forger.header(0, lambda header: header["__metadata__"].update(later="x", requires=""))
    forger.values(1, b'{"shared":{"tokens":7},"own":{},"later":{"$later":1}}')
    assert read_everything(forger.root)["values"]["tokens"] == 7
    (pin,) = read_pins(forger.store).values()
    assert pin.pin is not None
    assert commit.open_root(forger.store, "other").run_id == "r"


@pytest.mark.parametrize("content", [b"", b"\0" * 100, sealed({}), sealed({"format_version": 9})])
def test_a_pin_counts_by_its_name_whatever_it_says(content: bytes, forger: Forger) -> None:
    (forger.root / "pins" / "2-40.json").write_bytes(content)
    assert pinned(forger.store) == {GENERATION}
    (found,) = read_pins(forger.store).values()
    assert found.pin is None and found.reason


def test_a_newer_root_is_refused_by_whoever_would_write_to_it(forger: Forger) -> None:
    for change in ({"format_version": 2}, {"requires": ["later"]}):
        (forger.root / "holdfast.json").write_bytes(
            sealed({"format_version": 1, "run_id": "r"} | change)
        )
        with pytest.raises(NewerFormat):
            commit.open_root(LocalStore(forger.root), "r")
