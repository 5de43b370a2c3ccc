"""Documents that were valid until a few things in them were changed: refused, or read; no third.

Every checksum is true, so what is asked is the decoder. Anything but a FormatError (NewerFormat and
ChecksumMismatch are ones) would be a traceback in `holdfast verify`.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.cli import main
from holdfast.cli import value_tree as tree
from holdfast.errors import FormatError, HoldfastError
from holdfast.format.checksum import checksum, text
from holdfast.format.image import parse_header
from holdfast.format.manifest import Incarnation, Manifest, Pin, Root, seal, unseal
from holdfast.format.values import decode, encode, values_of
from holdfast.geometry.box import Box
from holdfast.geometry.layout import (
    REPLICATE,
    HolderBoxes,
    Instance,
    Layout,
    LeafEntry,
    Mesh,
    Placement,
    table_from_json,
    table_to_json,
)
from holdfast.state.values import decode_items, stored_lists
from support.checkpoints.forge import LAYOUT, LISTED_LAYOUT, copy_of, make_good
from support.checkpoints.mutations import mutated

Thorough = settings(
    max_examples=80,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


class Colour(Enum):
    RED = 1


holdfast.register_enum(Colour, name="A")

STATE: dict[str, Any] = {
    "numbers": [1, 2.5, float("nan"), 2**70, 2**20000],
    "text": "é",
    "raw": [b"ab", bytearray(b"c")],
    "nested": {"a": ({1: "x", (2, 3): [4]}, {5, 6}, frozenset({"q"}))},
    "arrays": [np.arange(6).reshape(2, 3), np.float32(1.5), np.array(["ab", "c"]), np.array(b"x")],
    "torch": [torch.float32, torch.device("cpu")],
    "enum": Colour.RED,
}
SMALL = {"$tensor": {"name": "t", "dtype": "F32", "shape": [2, 1], "data": "AAAAAAAAAAA="}}
VALUES: dict[str, Any] = {
    "shared": {
        "state": encode(STATE),
        "w2": {"$leaf": "w"},
        "t": SMALL,
        "d": {"$default": ["int", [["a", 1]]]},
        "c": {"$counter": [["a", 2]]},
        "o": {"$ordered": [["z", {"$leaf": "t"}]]},
    },
    "own": {
        "rng": {"python": [1, 2], "torch": {"$bytes": "AAA="}},
        "items": {"kind": "split_list", "rank": 0, "world": 2, "items": [1, SMALL]},
    },
    "aliases": {"tied": "w"},
}


@contextlib.contextmanager
def only_format_errors() -> Iterator[None]:
    with contextlib.suppress(FormatError):
        yield


def with_body(body: Any) -> bytes:
    raw = json.dumps(body).encode()
    return b'{"checksum":"%s","body":%s}\n' % (text(checksum(raw)).encode(), raw)


@Thorough
@given(document=mutated(VALUES))
def test_values_are_read_or_refused(document: Any) -> None:
    with only_format_errors():
        found = values_of(json.dumps(document).encode(), "v")
        for value in (*found["shared"].values(), *found["own"].values()):
            with only_format_errors():
                decode(value)
            tree.text(value)
        for one in stored_lists(found["own"], "v").values():
            decode_items(one.items)


def _documents() -> dict[type, Any]:
    image = {
        "path": "steps/2-40-a1/live-00000.safetensors",
        "rank": 0,
        "size_bytes": 8192,
        "header_xxh3": "0" * 16,
        "table_xxh3": "f" * 16,
    }
    part = {**image, "path": "parts/2-40-a1/frozen-00000.safetensors"}
    manifest = {
        "format_version": 1,
        "requires": ["parts"],
        "optional": [],
        "run_id": "r",
        "incarnation": 2,
        "step": 40,
        "attempt": "a1",
        "parent": [1, 30],
        "world": 1,
        "layout": "0f" * 16,
        "images": [image],
        "parts": [part],
        "values": VALUES["shared"],
        "aliases": {"tied": "w"},
        "created_s": 1.5,
    }
    head = {"format_version": 1, "requires": [], "optional": [], "run_id": "r"}
    return {
        Manifest: manifest,
        Incarnation: {**head, "n": 3, "nonce": "x", "parent": [2, 4], "world": 2, "created_s": 1.0},
        Root: {**head, "created_s": 1.0},
        Pin: {**head, "incarnation": 1, "step": 2, "manifest": "{}", "note": "n"},
    }


@pytest.mark.parametrize("kind", [Manifest, Incarnation, Root, Pin])
def test_documents_are_read_or_refused(kind: Any) -> None:
    unseal(kind, with_body(_documents()[kind]), "d")

    @Thorough
    @given(document=mutated(_documents()[kind]))
    def check(document: Any) -> None:
        with only_format_errors():
            found = unseal(kind, with_body(document), "d")
            assert unseal(kind, seal(found), "d") == found
            repr(found)

    check()


WHOLE = Instance(Mesh((2,), (0, 1)), (REPLICATE,))
CUT = Instance(Mesh((2,), (0, 1)), (Placement(0),))
ENTRIES = [
    LeafEntry("alone", "F32", (6, 4), "split"),
    LeafEntry("columns", "F32", (6, 4), "split", HolderBoxes((Box((0, 0), (6, 1)),)), True),
    LeafEntry("cut", "I16", (6,), "split", CUT),
    LeafEntry("whole", "I16", (), "lowest", WHOLE),
]


@pytest.mark.parametrize("layout", [LAYOUT, LISTED_LAYOUT], ids=["meshes", "listings"])
def test_layouts_are_read_or_refused(layout: Layout) -> None:
    @Thorough
    @given(document=mutated(json.loads(layout.to_json())))
    def check(document: Any) -> None:
        with only_format_errors():
            found = Layout.from_json(json.dumps(document).encode())
            for rank in range(min(found.world, 3)):
                found.pieces(rank)

    check()


def test_tables_are_read_or_refused() -> None:
    @Thorough
    @given(document=mutated(json.loads(table_to_json(ENTRIES))))
    def check(document: Any) -> None:
        with only_format_errors():
            table_from_json(json.dumps(document).encode())

    check()


def test_headers_of_images_are_read_or_refused(tmp_path: Path) -> None:
    make_good(tmp_path)
    data = next((tmp_path / "steps").rglob("live-00000*")).read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")

    @Thorough
    @given(document=mutated(json.loads(data[8:begin])))
    def check(document: Any) -> None:
        raw = json.dumps(document).encode()
        size = max(begin, -(-(8 + len(raw)) // 4096) * 4096)
        head = (size - 8).to_bytes(8, "little") + raw.ljust(size - 8)
        with only_format_errors():
            parse_header(head, "i", size + len(data) - begin)

    check()


@settings(Thorough, max_examples=12)
@given(document=mutated(VALUES), deep=st.booleans())
def test_no_command_breaks_down_on_forged_values(document: Any, deep: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        make_good(Path(directory, "good"))
        forger = copy_of(Path(directory, "good"), Path(directory, "forged"))
        raw = json.dumps(document).encode()
        if len(raw) > 1 << 19:
            return
        forger.values(0, raw)
        body = document.get("shared") if isinstance(document, dict) else None
        if isinstance(body, dict):
            forger.manifest(lambda found: found.update(values=body))
        root, good = str(forger.root), str(Path(directory, "good"))
        for argv in (
            ("verify", root, *(["--deep"] if deep else [])),
            ("show", root),
            ("ls", root),
            ("show", root, "--json"),
            ("dump", root, "state"),
            ("dump", root, "t", "--json"),
            ("diff", root, good, "--values-only"),
            ("diff", root, good, "--values-only", "--json"),
        ):
            assert main(argv) in (0, 1, 3, 4), argv  # 70: a traceback
        with contextlib.suppress(HoldfastError), holdfast.open(root) as reader:
            assert isinstance(reader.values, dict) and isinstance(reader.aliases, dict)
        state = {"state": {}, "t": torch.zeros(2, 1), "w2": 0, "d": None, "o": None}
        with contextlib.suppress(HoldfastError):
            holdfast.load(root, state, allow_missing=["*"])
