"""docs/format/v1.md against the code and against real checkpoints, field by field, byte by byte."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors
import torch
from hypothesis import given, settings
from safetensors.numpy import load
from torch import nn

import holdfast
import support.checkpoints.specification as spec
from holdfast.checkpointer import Checkpointer
from holdfast.format import image, manifest, values
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.format.manifest import KNOWN_FEATURES, Generation
from holdfast.geometry import codec, leaves
from holdfast.geometry import mesh as placements
from holdfast.geometry import ownership as owners
from holdfast.geometry import partition as cutting
from holdfast.geometry.box import ITEMSIZE, STORED_AS_BYTES
from holdfast.geometry.layout import REPLICATE, Instance, Layout, LeafSpec, Mesh
from holdfast.persist.pins import pin
from holdfast.storage.open import open_store
from support.checkpoints import conformance
from support.checkpoints.images import images_of
from support.models.layouts import layouts
from support.models.models import build, make_optimizer_state
from support.runs.launch import run_ranks

# ── the document and the code ────────────────────────────────────────────────────────────────

STRUCTS: dict[str, type[msgspec.Struct]] = {
    "Root": manifest.Root,
    "Incarnation": manifest.Incarnation,
    "Manifest": manifest.Manifest,
    "Image reference": manifest.ImageRef,
    "Pin": manifest.Pin,
    "Lease": manifest.Lease,
}


@pytest.mark.parametrize("heading", STRUCTS)
def test_the_fields_of_a_document_are_those_of_the_code(heading: str) -> None:
    table = spec.fields(heading)
    fields = {field.name: field for field in msgspec.structs.fields(STRUCTS[heading])}
    assert list(table) == list(fields), "the same fields, in the same order"
    for name, field in fields.items():
        if name == "format_version":  # said by the code, and never assumed by a reader
            assert table[name].is_required
            continue
        assert table[name].is_required == field.required, name
        if not field.required:
            default: Any = field.default
            if default is msgspec.NODEFAULT:
                default = field.default_factory()
            written = json.loads(msgspec.json.encode(default))
            assert table[name].default == written, name


def test_the_fields_of_a_layout_are_those_of_the_code() -> None:
    table = spec.fields("4. Layout")
    written = json.loads(Layout(1, ()).to_json())
    assert set(written) == {name for name, field in table.items() if field.is_required}
    optional: dict[str, list[int]] = {
        name: [] for name in ("frozen", "extents", "sets", "listings")
    }
    assert {n: f.default for n, f in table.items() if not f.is_required} == optional
    struct_fields = {field.name for field in msgspec.structs.fields(codec._LayoutDocument)}
    assert set(table) == struct_fields | {"holds"}


def test_the_limits_are_those_of_the_code() -> None:
    assert spec.limits() == {
        "bytes of a sealed document": manifest.MAX_DOCUMENT_BYTES,
        "bytes of a layout": codec.MAX_BYTES,
        "bytes before the data of an image": image.MAX_HEADER_BYTES,
        "bytes of `__holdfast_values__`": image.MAX_VALUES_BYTES,
        "bytes of a page": image.PAGE_BYTES,
        "bytes of a block": BLOCK_BYTES,
        "entries of a block table, a multiple of": image.PAGE_BYTES // 8,
        "bytes in a header that metadata may take": image.METADATA_ROOM_BYTES,
        "leaves of a layout": codec.MAX_LEAVES,
        "ranks": placements.MAX_RANKS,
        "strides of an instance": placements.MAX_STRIDES,
        "dimensions": leaves.MAX_DIMS,
        "bytes of a leaf": leaves.MAX_LEAF_BYTES,
        "characters of a leaf's name": leaves.MAX_NAME_LENGTH,
        "largest integer in a document": manifest.MAX_NUMBER,
        "depth of values": values.MAX_DEPTH,
        "keys of a dictionary, or items of a set, with one hash": values.MAX_ALIKE,
        "smallest bytes of a divided box's parts": owners.PART_BYTES,
        "dimensions of all listed boxes, added up, 1 for a box of none": codec.MAX_LISTED_DIMS,
        "boxes that the cells of a region lie in, for each box of it (A.5)": cutting.MAX_OVERLAP,
    }


def test_numbers_in_the_rules_are_those_of_the_table() -> None:
    text = spec.text().replace(spec.sections()["10. Limits"], "")
    for phrase, limit in (
        ("9007199254740991 (2^53 - 1)", "largest integer in a document"),
        ("1 to 9223372036854775807", "bytes of a leaf"),
        ("at most 9223372036854775807", "bytes of a leaf"),
        ("most 65536. `dim`", "strides of an instance"),
        ("1 to 65536 characters", "characters of a leaf's name"),
        ("at most 64 dimensions", "dimensions"),
        ("multiple of 4096, and at most 100000000", "bytes before the data of an image"),
        ("multiple of 4096 that is not", "bytes of a page"),
        ("k × 1048576", "bytes of a block"),
        ("up to 1048576 more", "bytes of a block"),
        ("less than 1048576 bytes", "bytes of a block"),
        ("multiple of 1048576", "bytes of a block"),
        ("512; those in excess", "entries of a block table, a multiple of"),
        ("nest at most 64 deep", "depth of values"),
        ("more than 64 with one hash", "keys of a dictionary, or items of a set, with one hash"),
        ("at most 64 dimensions, with", "dimensions"),
        ("at most\n9223372036854775807", "bytes of a leaf"),
        (
            "more than 16 for each",
            "boxes that the cells of a region lie in, for each box of it (A.5)",
        ),
    ):
        assert phrase in text, phrase
        assert str(spec.limits()[limit]) in phrase, phrase


def test_the_element_types_are_those_of_the_code() -> None:
    assert spec.dtypes() == {
        name: (size, name in STORED_AS_BYTES) for name, size in ITEMSIZE.items()
    }


def test_the_tags_are_those_of_the_code() -> None:
    assert len(spec.tags()) == len(set(spec.tags()))
    assert set(spec.tags()) == set(values._TAGS)


def test_the_factories_of_defaultdicts_are_those_of_the_code() -> None:
    (row,) = [row for row in spec.rows("6. Values", "tag") if row["tag"] == "`$default`"]
    assert re.findall(r"`(\w+)`", row["value"]) == list(values._FACTORIES)


def test_the_versions_and_features_are_those_of_the_code() -> None:
    assert (manifest.FORMAT_VERSION, image.FORMAT_VERSION) == (1, "1")
    assert (codec.VERSION, codec.VERSION_WITH_LISTINGS) == (1, 2)
    rows = spec.rows("11. Versions and features", "feature")
    assert {row["feature"].strip("`") for row in rows} == KNOWN_FEATURES


def test_rules_are_numbered_without_gaps_and_every_one_that_is_named_exists() -> None:
    numbers = spec.rules()
    assert list(numbers) == list(range(1, len(numbers) + 1))
    named = {int(n) for n in re.findall(r"\bR(\d+)\b", spec.text())}
    assert named <= set(numbers)


def test_reserved_names_are_those_of_the_code() -> None:
    assert conformance.OWN == (image.VALUES, image.PAD, image.TABLE)
    assert conformance.GAP == image.GAP
    for name in (*conformance.OWN, conformance.GAP):
        assert f"`{name}`" in spec.text()
        assert name.startswith(image.RESERVED)
    assert f"`{image.METADATA}`" in spec.text()


def test_the_sealed_document_in_the_text_is_one() -> None:
    (block,) = spec.code_blocks("3. Documents")
    root = manifest.unseal(manifest.Root, block.encode(), "the text")
    assert root == manifest.Root(run_id="example", created_s=1.5)
    assert manifest.seal(root) == block.encode()


@given(layout=layouts())
@settings(max_examples=150)
def test_appendix_a_says_what_the_code_computes(layout: Layout) -> None:
    """Boxes and owners, from the text alone, for any layout: conformance.py was written from it."""
    document = json.loads(layout.to_json())
    for number, stored in enumerate(conformance.owners(document)):
        computed = [
            (rank, tuple(zip(box.start, box.stop, strict=True)))
            for rank, box in layout.owners(number)
        ]
        assert sorted(stored) == sorted(computed), layout.leaves[number].name


# ── the small image ──────────────────────────────────────────────────────────────────────────


def small_image() -> bytes:
    """The image that the text shows."""
    import numpy as np

    whole = Instance(Mesh((1,), (0,)), (REPLICATE,))
    layout = Layout(1, (LeafSpec("w", "F32", (2,), "split", (whole,)),))
    leaf = np.array([1.0, -2.0], "<f4").view(np.int32)
    return bytes(images_of(layout, {"w": leaf}, generation=Generation(3, 70))[0])


def hexdump(data: bytes) -> str:
    """As ``hexdump -C`` writes it."""
    lines: list[str] = []
    before = b""
    for at in range(0, len(data), 16):
        row = data[at : at + 16]
        if row == before:
            if lines[-1] != "*":
                lines.append("*")
            continue
        before = row
        pairs = [f"{byte:02x}" for byte in row]
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{at:08x}  {' '.join(pairs[:8])}  {' '.join(pairs[8:])}  |{shown}|")
    return "\n".join([*lines, f"{len(data):08x}", ""])


def undump(text: str) -> bytes:
    """The bytes back from a hexdump."""
    data = b""
    for line in text.splitlines():
        if line != "*":
            at, _, row = line.partition("  ")
            while len(data) < int(at, 16):
                data += data[-16:]
            data += bytes.fromhex(row.split("|")[0])
    return data


def test_the_hexdump_in_the_text_is_that_of_an_image_the_code_makes() -> None:
    (block,) = spec.code_blocks("A small image, whole", "hexdump")
    assert block == hexdump(small_image())


def test_the_hexdump_in_the_text_opens_with_the_public_library() -> None:
    (block,) = spec.code_blocks("A small image, whole", "hexdump")
    data = undump(block)
    found = load(data)
    assert found["w"].tolist() == [1.0, -2.0]
    first = conformance.xxh64(data[4096:8192])
    assert int(found[image.TABLE][0]) == int(first, 16)


# ── real checkpoints ─────────────────────────────────────────────────────────────────────────


def everything() -> dict[str, Any]:
    """A state with something of each kind: leaves of many dtypes and values of many tags."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.zero_grad()
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    model.append(nn.Linear(5, 3))
    model[2].weight = model[0].weight  # tied
    return {
        "model": model,
        "optimizer": optimizer,
        "rng": holdfast.Rng(),
        "tokens": 12,
        "tensors": {str(d): torch.zeros(3, 2).to(d) for d in (torch.bfloat16, torch.complex128)},
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.5),
        "notes": (1, b"bytes", float("nan"), 1 << 70, {1: 2}, {"a": {3, 4}}, torch.float16),
    }


def test_what_save_writes_on_one_rank_is_what_the_document_says(tmp_path: Path) -> None:
    for step in (4, 9):
        holdfast.save(tmp_path, everything(), step=step)
    assert set(conformance.check_root(tmp_path)) == {"1-4", "2-9"}
    assert assert_the_public_library_opens_every_image(tmp_path) > 20


def test_a_leaf_of_several_blocks_is_as_the_document_says(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"big": torch.arange(700_000), "b": torch.zeros(3)}, step=1)
    (found,) = conformance.check_root(tmp_path).values()
    assert found["images"][0]["size_bytes"] > 5 * BLOCK_BYTES


def test_what_a_run_with_a_keeper_writes_is_what_the_document_says(tmp_path: Path) -> None:
    for _ in range(2):
        state = everything()
        with Checkpointer(tmp_path, state, storage=None) as checkpointer:
            restored = checkpointer.restore()
            step = restored.step + 1 if restored else 0
            checkpointer.save(step, durable=True).wait_durable(timeout_s=60)
    pin(open_store(tmp_path), Generation(1, 0), "kept")
    assert set(conformance.check_root(tmp_path)) == {"1-0", "2-1"}
    assert (tmp_path / "pins" / "1-0.json").exists()


def assert_the_public_library_opens_every_image(root: Path) -> int:
    """With torch, tensor by tensor; each has the very bytes that lie in the file."""
    count = 0
    for path in root.glob("steps/*/*.safetensors"):
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        with safetensors.safe_open(str(path), framework="pt") as opened:
            assert dict(opened.metadata()) == header.pop(image.METADATA)
            assert set(opened.keys()) == set(header)
            for name, entry in header.items():
                start, stop = (begin + offset for offset in entry["data_offsets"])
                tensor = opened.get_tensor(name)
                assert list(tensor.shape) == entry["shape"]
                raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
                assert raw == data[start:stop], name
                count += 1
    return count


def _save_two_layouts(rank: int, world: int, root: str) -> None:
    for step, layout in enumerate(("fsdp", "ddp")):
        _, state = build(layout, seed=1)
        make_optimizer_state(state)
        holdfast.save(root, state, step=step)


def test_what_three_ranks_write_is_what_the_document_says(tmp_path: Path) -> None:
    run_ranks(3, _save_two_layouts, str(tmp_path))
    assert set(conformance.check_root(tmp_path)) == {"1-0", "2-1"}
    assert assert_the_public_library_opens_every_image(tmp_path) > 100
