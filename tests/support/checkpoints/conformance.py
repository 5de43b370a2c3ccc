"""A root checked against docs/format/v1.md, strictly, and without any code of Holdfast.

Where this finds something wrong in what Holdfast wrote, either the writer or the document lies.
A reader may let some of it pass; a writer may not write it. The comments name the rules.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import xxhash

import support.checkpoints.specification as spec

Json = dict[str, Any]
Box = tuple[tuple[int, int], ...]
MIB, PAGE, LINE = 1048576, 4096, 512
OWN = ("__holdfast_values__", "__holdfast_pad__", "__holdfast_blocks__")
GAP = "__holdfast_gap__"
FEATURES = {row["feature"].strip("`") for row in spec.rows("11. Versions and features", "feature")}
#: Optional fields that came after the first version: checkpoints from before have them not.
LATER = {"Manifest": {"parts"}, "4. Layout": {"frozen", "extents", "sets", "listings"}}
NUMBER = "(0|[1-9][0-9]*)"
IS_PIECE = re.compile(r"@\d+:\d+(,\d+:\d+)*\Z", re.ASCII)


def xxh64(data: bytes) -> str:
    return f"{xxhash.xxh3_64_intdigest(data):016x}"


def check_root(root: Path) -> dict[str, Json]:
    """Everything below ``root``; AssertionError for what breaks a rule. All manifests by name."""
    below = [path for path in sorted(root.rglob("*")) if path.is_file()]
    names = [str(path.relative_to(root)) for path in below if not path.name.startswith(".")]
    unknown = [name for name in names if not _is_known(name)]
    assert not unknown, f"R1: {unknown} are not in the tree"
    check_document((root / "holdfast.json").read_bytes(), "Root")
    manifests = {}
    for name in names:
        data = (root / name).read_bytes()
        if name.startswith("incarnations/"):
            body = check_document(data, "Incarnation")
            assert name == f"incarnations/{body['n']}.json", "R2"
        elif name.startswith("pins/"):
            body = check_document(data, "Pin")
            assert name == f"pins/{body['incarnation']}-{body['step']}.json", "R2"
            check_document(body["manifest"].encode(), "Manifest")
        elif name.startswith("readers/"):
            check_document(data, "Lease")
        elif name.startswith("manifests/"):
            body = check_document(data, "Manifest")
            assert name == f"manifests/{body['incarnation']}-{body['step']}.json", "R2"
            check_checkpoint(root, body)
            manifests[f"{body['incarnation']}-{body['step']}"] = body
    return manifests


def _is_known(name: str) -> bool:
    patterns = (
        r"holdfast\.json",
        rf"incarnations/{NUMBER}\.json",
        r"layouts/[0-9a-f]{32}\.json",
        r"events/(rollups/)?[^/]+\.jsonl",
        r"events/rollups/joined/\d+\.jsonl\.gz",
        rf"(manifests|pins)/{NUMBER}-{NUMBER}\.json",
        r"readers/[0-9a-f]{32}\.json",
        rf"steps/{NUMBER}-{NUMBER}-[0-9A-Za-z_-]{{1,128}}/live-(\d{{5}}|[1-9]\d{{5,}})\.safetensors",
        rf"parts/{NUMBER}-{NUMBER}-[0-9A-Za-z_-]{{1,128}}/frozen-(\d{{5}}|[1-9]\d{{5,}})\.(safetensors|damaged)",
    )
    return any(re.fullmatch(pattern, name) for pattern in patterns)


# ── sealed documents ─────────────────────────────────────────────────────────────────────────


def check_document(data: bytes, heading: str) -> Json:
    """The body of a sealed document."""
    assert len(data) <= spec.limits()["bytes of a sealed document"]
    framed = re.fullmatch(rb'\{"checksum":"([0-9a-f]{16})","body":(\{.*\})\}\n', data, re.DOTALL)
    assert framed, "R4: not framed"
    assert xxh64(framed[2]) == framed[1].decode(), "R5"
    body: Json = strict_json(framed[2])
    check_fields(body, heading)
    assert body["format_version"] == 1, "R7"
    assert set(body["requires"]) <= FEATURES, "R8"
    for name, value in body.items():
        if isinstance(value, int):
            assert 0 <= value <= spec.limits()["largest integer in a document"], f"R11: {name}"
    if body.get("parent") is not None:
        assert 0 <= body["parent"][0] < body.get("n", body.get("incarnation")), "R11"
        assert body["parent"][1] >= 0, "R11"
    return body


def strict_json(data: bytes) -> Any:
    """R6: no key twice, no NaN."""

    def unique(pairs: list[tuple[str, Any]]) -> Json:
        assert len(dict(pairs)) == len(pairs), f"R6: a key twice in {[k for k, _ in pairs]}"
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise AssertionError(f"R6: {constant}")

    return json.loads(data.decode(), object_pairs_hook=unique, parse_constant=refuse)


def check_fields(body: Json, heading: str) -> None:
    """R10: what a writer writes are exactly the fields of the table, optional ones too."""
    table = spec.fields(heading)
    lacks = table.keys() - body.keys()
    assert body.keys() <= table.keys(), f"R10: {heading}: {body.keys() - table.keys()}"
    assert lacks <= LATER.get(heading, set()), f"R10: {heading}: {lacks}"
    for name, field in table.items():
        assert name in lacks or has_type(body[name], field.type), (
            f"R10: {heading}.{name}: {body[name]!r:.80}"
        )


def has_type(value: Any, kind: str) -> bool:
    """Whether a JSON value is of a type of the tables."""
    if kind == "integer":
        return type(value) is int
    if kind == "number":
        return type(value) in (int, float)
    if kind == "generation or null":
        is_pair = isinstance(value, list) and [type(part) for part in value] == [int, int]
        return value is None or is_pair
    if kind.startswith("list of "):
        inner = {"strings": str, "image references": dict, "numbers": int}.get(kind[8:], list)
        return isinstance(value, list) and all(type(one) is inner for one in value)
    return type(value) is {"string": str, "object": dict}[kind]


# ── a checkpoint ─────────────────────────────────────────────────────────────────────────────


def check_checkpoint(root: Path, manifest: Json) -> None:
    """Layout and images of one manifest, and that together they hold everything once."""
    layout = check_layout(
        (root / "layouts" / f"{manifest['layout']}.json").read_bytes(), manifest["layout"]
    )
    assert layout["world"] == manifest["world"]
    ranks = [image["rank"] for image in manifest["images"]]
    assert sorted(ranks) == list(range(manifest["world"])), "R12"
    directories = set()
    held: dict[str, list[Box]] = {leaf[0]: [] for leaf in layout["leaves"]}
    computed = owners(layout)
    parts = {part["rank"]: part for part in manifest.get("parts", [])}
    assert len(parts) == len(manifest.get("parts", [])) and parts.keys() <= set(ranks), "R49"
    assert not parts or "parts" in manifest["requires"], "R49"
    for reference in manifest["images"]:
        check_fields(reference, "Image reference")
        path = Path(reference["path"])
        directories.add(str(path.parent))
        assert path.name == f"live-{reference['rank']:05d}.safetensors", "R13"
        data = (root / path).read_bytes()
        pieces = check_image(data, reference, manifest, layout)
        if part := parts.get(reference["rank"]):
            pieces += check_part(root, part, layout)
        for leaf, box in pieces:
            held[leaf].append(box)
        expected = [
            (layout["leaves"][number][0], box)
            for number, stored in enumerate(computed)
            for rank, box in stored
            if rank == reference["rank"]
        ]
        assert sorted(pieces) == sorted(expected), "R36: not divided as Appendix A says"
    (directory,) = directories
    prefix = f"steps/{manifest['incarnation']}-{manifest['step']}-{manifest['attempt']}"
    assert directory.startswith(prefix), "R13"
    for name, _, shape, _, _ in layout["leaves"]:
        check_cover(held[name], shape, name)


def check_part(root: Path, reference: Json, layout: Json) -> list[tuple[str, Box]]:
    """R49 to R51; the pieces it holds, all of frozen leaves."""
    check_fields(reference, "Image reference")
    assert _is_known(reference["path"]), "R49"
    name = reference["path"].split("/")
    assert (name[0], name[2]) == ("parts", f"frozen-{reference['rank']:05d}.safetensors"), "R49"
    pieces = check_image((root / reference["path"]).read_bytes(), reference, None, layout)
    frozen = {layout["leaves"][number][0] for number in layout["frozen"]}
    assert {leaf for leaf, _ in pieces} <= frozen, "R47"
    return pieces


def check_cover(boxes: list[Box], shape: list[int], name: str) -> None:
    """R35, by counting: no two boxes meet, and together they have all elements."""
    assert sum(map(volume, boxes)) == math.prod(shape), f"R35: {name} is not whole"
    if len(boxes) > 1:
        for number, one in enumerate(boxes):
            for other in boxes[number + 1 :]:
                pairs = zip(one, other, strict=True)
                apart = any(a[1] <= b[0] or b[1] <= a[0] for a, b in pairs)
                assert apart, f"R35: {name} has {one} and {other}"


def volume(box: Box) -> int:
    return math.prod(b - a for a, b in box)


def check_layout(data: bytes, name: str) -> Json:
    """Section 4."""
    assert len(data) <= spec.limits()["bytes of a layout"]
    assert xxhash.xxh3_128_hexdigest(data) == name, "R15"
    layout: Json = strict_json(data)
    check_fields(layout, "4. Layout")
    assert (layout["holds"], layout["version"]) == ("layout", 2 if "listings" in layout else 1)
    assert layout.get("listings", [0]), "R53"
    world, limits = layout["world"], spec.limits()
    assert 1 <= world <= limits["ranks"]
    for shape, ranks in layout["meshes"]:
        assert shape and min(shape) >= 1, "R18"
        assert math.prod(shape) == len(ranks) == len(set(ranks)), "R18"
        assert min(ranks) >= 0 and max(ranks) < world, "R18"
    for mesh, placements in layout["instances"]:
        assert 0 <= mesh < len(layout["meshes"]), "R17"
        assert len(placements) == len(layout["meshes"][mesh][0]), "R19"
        assert all(f >= 1 and d >= -1 and (d >= 0 or f == 1) for d, f in placements), "R19"
        strides = math.prod(f for _, f in placements)
        assert strides <= limits["strides of an instance"], "R19"
    for group in layout["groups"]:
        assert group and all(one < len(layout["instances"]) for one in group), "R17, R20"
        listed = [-1 - one for one in group if one < 0]
        assert len(listed) <= 1 and all(n < len(layout["listings"]) for n in listed), "R54"
        ranks = [rank for one in group for rank in _ranks(layout, one)]
        assert len(set(ranks)) == len(ranks), "R20, R54"
    check_listings(layout)
    check_leaves(layout)
    frozen = layout.get("frozen", [])
    assert frozen == sorted(set(frozen)) and set(frozen) <= set(range(len(layout["leaves"])))
    return layout


def check_listings(layout: Json) -> None:
    """R55, R56."""
    for ranks in layout.get("sets", []):
        assert len(ranks) > 1 and ranks == sorted(set(ranks)), "R56"
        assert ranks[0] >= 0 and ranks[-1] < layout["world"], "R56"
    for number, (reach, *columns) in enumerate(layout.get("listings", [])):
        boxes = listed_boxes(layout, number)
        assert {len(column) for column in columns} == {len(boxes)}, "R55"
        keys = [([a for a, _ in box], [b for _, b in box]) for box, _ in boxes]
        assert all(one < other for one, other in pairwise(keys)), "R55"
        stops = [[b for _, b in box] for box, _ in boxes]
        assert reach == [max(at) for at in zip(*stops, strict=True)], "R55"
        for n, (one, some) in enumerate(boxes):
            for other, others in boxes[n + 1 :]:
                assert not set(some) & set(others) or not meet(one, other), "R55"


def check_leaves(layout: Json) -> None:
    limits, leaves = spec.limits(), layout["leaves"]
    assert len(leaves) <= limits["leaves of a layout"]
    for one, other in pairwise(leaves):
        assert one[0] < other[0], "R21"
    for name, dtype, shape, spread, group in leaves:
        assert 1 <= len(name) <= limits["characters of a leaf's name"], "R21"
        assert not IS_PIECE.search(name), "R21"
        item, _ = spec.dtypes()[dtype]
        assert len(shape) <= limits["dimensions"] and min([0, *shape]) >= 0, "R22"
        assert math.prod(shape) * item <= limits["bytes of a leaf"], "R22"
        assert spread in ("split", "lowest"), "R22"
        assert 0 <= group < len(layout["groups"]), "R17"
        for instance in layout["groups"][group]:
            if instance < 0:
                reach, gaps, _, _ = layout["listings"][-1 - instance]
                assert not gaps or len(reach) == len(shape), "R54"
                assert all(b <= size for b, size in zip(reach, shape, strict=False)), "R54"
                continue
            assert all(d < len(shape) for d, _ in layout["instances"][instance][1]), "R19"


# ── an image ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Tensor:
    """An entry of a header."""

    dtype: str
    shape: list[int]
    start: int
    stop: int


def check_image(
    data: bytes, reference: Json, manifest: Json | None, layout: Json
) -> list[tuple[str, Box]]:
    """Section 5 and 6; the pieces it holds. ``manifest``: None for a frozen part."""
    assert len(data) == reference["size_bytes"], "R23"
    begin = 8 + int.from_bytes(data[:8], "little")
    assert begin % PAGE == 0 and begin <= spec.limits()["bytes before the data of an image"], "R24"
    assert xxh64(data[:begin]) == reference["header_xxh3"], "R25"
    header: Json = strict_json(data[8:begin])
    assert data[8:begin].decode().rstrip(" ").endswith("}"), "R26: padded with spaces"
    metadata = header.pop("__metadata__")
    assert (metadata.pop("requires", "") == "parts") == (GAP in header), "R48"
    if manifest is None:
        expected = {"holdfast": "1", "part": "frozen", "rank": str(reference["rank"])}
        assert metadata == expected, "R50"
    else:
        check_metadata(metadata, reference, manifest)
    tensors = {
        name: Tensor(entry["dtype"], entry["shape"], *entry["data_offsets"])
        for name, entry in header.items()
        if entry.keys() == {"dtype", "shape", "data_offsets"}
    }
    assert tensors.keys() == header.keys(), "R26"
    check_places(tensors, len(data) - begin)
    values, pad, table = (tensors.pop(name) for name in OWN)
    assert not any(data[begin + pad.start : begin + pad.stop]), "R32: padding is zero"
    check_blocks(data[begin:], table, reference)
    gap = tensors.pop(GAP, None)
    if gap is not None:
        assert (gap.dtype, len(gap.shape)) == ("U8", 1), "R48"
        assert gap.stop % MIB == 0 and gap.stop - gap.start < MIB, "R48"
        assert not any(data[begin + gap.start : begin + gap.stop]), "R48"
    if manifest is None:
        assert gap is not None and gap.stop == values.start == values.stop == table.start, "R50"
    else:
        raw = data[begin + values.start : begin + values.stop]
        check_values(strict_json(raw), layout, manifest)
    boundary = 0 if gap is None else gap.stop
    both: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for name, tensor in tensors.items():
        both[tensor.start >= boundary][name] = tensor
    pieces: list[tuple[str, Box]] = []
    for some in both:
        found = [_piece(name, tensor, layout) for name, tensor in some.items()]
        _check_order(some, found, layout)
        pieces += found
    return pieces


def check_metadata(metadata: Json, reference: Json, manifest: Json) -> None:
    assert all(type(value) is str for value in metadata.values()), "R27"
    assert set(metadata) == set(spec.metadata_keys()), "R27"
    assert metadata["holdfast"] == "1", "R27"
    assert metadata["run"] == manifest["run_id"]
    assert metadata["rank"] == str(reference["rank"]), "R29"
    for key in ("incarnation", "step", "attempt", "world", "layout"):
        assert metadata[key] == str(manifest[key]), f"R29: {key}"


def check_places(tensors: dict[str, Tensor], data_bytes: int) -> None:
    expected = 0
    in_order = sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop))
    for name, tensor in in_order:
        item, is_u8 = spec.dtypes()[tensor.dtype]
        assert not is_u8, f"R30: {tensor.dtype} is stored as U8"
        assert tensor.start == expected, f"R30: {name}"
        assert tensor.stop - tensor.start == math.prod(tensor.shape) * item, f"R30: {name}"
        assert len(tensor.shape) <= spec.limits()["dimensions"], "R30"
        assert tensor.start % item == 0, f"R31: {name}"
        expected = tensor.stop
    assert expected == data_bytes, "R30"
    own = [name for name in tensors if name.startswith("__holdfast_")]
    assert sorted({*own} - {GAP}) == sorted(OWN), "R32, R33"
    values, pad, table = (tensors[name] for name in OWN)
    assert [values.dtype, pad.dtype, table.dtype] == ["U8", "U8", "U64"], "R32"
    assert [len(one.shape) for one in (values, pad, table)] == [1, 1, 1], "R32"
    assert (values.stop, pad.stop, table.stop) == (pad.start, table.start, data_bytes), "R32"
    assert pad.stop == -(-values.stop // PAGE) * PAGE, "R32"


def check_blocks(data: bytes, table: Tensor, reference: Json) -> None:
    raw = data[table.start : table.stop]
    assert xxh64(raw) == reference["table_xxh3"], "R25"
    stored = [int.from_bytes(raw[at : at + 8], "little") for at in range(0, len(raw), 8)]
    blocks = [data[at : min(at + MIB, table.start)] for at in range(0, table.start, MIB)]
    assert len(stored) == max(1, -(-len(blocks) // LINE)) * LINE, "R37"
    expected = [xxhash.xxh3_64_intdigest(block) for block in blocks]
    assert stored == expected + [0] * (len(stored) - len(blocks)), "R37"


def _piece(name: str, tensor: Tensor, layout: Json) -> tuple[str, Box]:
    """R34: leaf and box of a piece, by its name."""
    leaves = {leaf[0]: leaf for leaf in layout["leaves"]}
    is_part = IS_PIECE.search(name)
    if is_part:
        leaf = leaves[name[: is_part.start()]]
        ranges = name[is_part.start() + 1 :].split(",")
        box = tuple((int(a), int(b)) for a, b in (text.split(":") for text in ranges))
        assert [f"{a}:{b}" for a, b in box] == ranges, "R34: decimal, without leading zeros"
        assert box != tuple((0, size) for size in leaf[2]), "R34: a whole leaf has no box"
    else:
        leaf = leaves[name]
        box = tuple((0, size) for size in leaf[2])
    assert len(box) == len(leaf[2]), "R34"
    assert all(0 <= a < b <= size for (a, b), size in zip(box, leaf[2], strict=True)), "R34"
    item, is_u8 = spec.dtypes()[leaf[1]]
    if is_u8:
        assert (tensor.dtype, tensor.shape) == ("U8", [volume(box) * item]), "R34"
    else:
        assert (tensor.dtype, tensor.shape) == (leaf[1], [b - a for a, b in box]), "R34"
    return leaf[0], box


def _check_order(tensors: dict[str, Tensor], pieces: list[tuple[str, Box]], layout: Json) -> None:
    """R31: by falling item size, then in the order of the layout."""
    numbers = {leaf[0]: n for n, leaf in enumerate(layout["leaves"])}
    keys = []
    for tensor, (leaf, box) in zip(tensors.values(), pieces, strict=True):
        item, _ = spec.dtypes()[layout["leaves"][numbers[leaf]][1]]
        keys.append((tensor.start, tensor.stop, (-item, numbers[leaf], [a for a, _ in box])))
    in_file = [key for _, _, key in sorted(keys)]
    assert in_file == sorted(in_file), "R31"


# ── values ───────────────────────────────────────────────────────────────────────────────────


def check_values(document: Json, layout: Json, manifest: Json) -> None:
    assert {"shared", "own"} <= document.keys() <= {"shared", "own", "aliases"}, "R38"
    names = {leaf[0] for leaf in layout["leaves"]}
    small = set(re.findall(r'"\$tensor": {"name": "([^"]*)"', json.dumps(document)))
    assert not small & names, "R40: a small tensor is no leaf"
    for part in ("shared", "own"):
        assert type(document[part]) is dict, "R38"
        for value in document[part].values():
            check_value(value, names | small, 0)
    aliases = document.get("aliases", {})
    assert manifest["aliases"] in (aliases, {}), "a copy, or nothing when values are long"
    assert manifest["values"] == {} or manifest["aliases"] == aliases
    for name, stored in aliases.items():
        assert stored in names and name not in names, "R39"
    assert manifest["values"].keys() <= document["shared"].keys()


def check_value(value: Any, leaves: set[str], depth: int) -> None:
    assert depth <= 2 * spec.limits()["depth of values"]  # JSON nests twice for a tagged list
    if isinstance(value, list):
        for item in value:
            check_value(item, leaves, depth + 1)
    elif isinstance(value, dict):
        if len(value) == 1 and next(iter(value)).startswith("$"):
            ((tag, content),) = value.items()
            assert tag in spec.tags(), f"R40: {tag}"
            check_tagged(tag, content, leaves, depth)
        else:
            for item in value.values():
                check_value(item, leaves, depth + 1)
    elif type(value) is int:
        assert abs(value) < 2**53, "R40"


def check_tagged(tag: str, content: Any, leaves: set[str], depth: int) -> None:
    """R40: what a tag can have."""
    if tag in ("$tuple", "$set", "$frozenset"):
        check_value(list(content), leaves, depth)
    elif tag in ("$dict", "$ordered", "$counter"):
        assert all(type(pair) is list and len(pair) == 2 for pair in content), tag
        check_value(content, leaves, depth)
    elif tag == "$default":
        factory, pairs = content
        assert factory in ("None", "int", "float", "str", "list", "dict", "set")
        check_tagged("$dict", pairs, leaves, depth)
    elif tag in ("$bytes", "$bytearray"):
        base64.b64decode(content, validate=True)
    elif tag == "$numpy":
        assert content.keys() == {"dtype", "shape", "data"}
        assert re.fullmatch(r"[<>|][biufcSU][0-9]+", content["dtype"])
        size = int(content["dtype"][2:]) * (4 if content["dtype"][1] == "U" else 1)
        count = math.prod(content["shape"] or ())
        assert len(base64.b64decode(content["data"], validate=True)) == size * count
    elif tag == "$enum":
        assert content.keys() in ({"type", "member"}, {"type", "value"})
    elif tag == "$object":
        assert content.keys() == {"type", "value"}
        assert type(content["type"]) is str
        check_value(content["value"], leaves, depth)
    elif tag == "$leaf":
        assert content in leaves
    elif tag == "$tensor":
        assert content.keys() == {"name", "dtype", "shape", "data"}
        item, _ = spec.dtypes()[content["dtype"]]
        data = base64.b64decode(content["data"], validate=True)
        assert len(data) == item * math.prod(content["shape"])
    else:
        pattern = {
            "$float": r"nan|-?inf|0x[0-9a-f]{16}",
            "$int": r"-?([0-9]+|0x[0-9a-f]+)",
            "$dtype": r"[a-z0-9_]+",
            "$device": r"[a-z_0-9]+(:[0-9]+)?",
        }[tag]
        assert re.fullmatch(pattern, content), f"{tag}: {content}"


# ── listings ─────────────────────────────────────────────────────────────────────────────────


def listed_boxes(layout: Json, number: int) -> list[tuple[Box, list[int]]]:
    """R56: the boxes of a listing, and the ranks of each."""
    reach, gaps, sizes, steps = layout["listings"][number]
    count = math.prod(reach)
    found: list[tuple[Box, list[int]]] = []
    end = holder = 0
    for gap, size, step in zip(gaps, sizes, steps, strict=True):
        first = end + gap
        assert size and 0 <= first < count and first + size <= count, "R56"
        start = place_of(first, reach)
        if size > 0:
            last = place_of(first + size - 1, reach)
            box = tuple((a, b + 1) for a, b in zip(start, last, strict=True))
            assert volume(box) == size, "R56: one run that is a box"
        else:
            extents = layout["extents"][-1 - size]
            box = tuple((a, a + n) for a, n in zip(start, extents, strict=True))
            assert all(b <= n for (_, b), n in zip(box, reach, strict=True)), "R56"
        run = first_run(box, reach)
        assert (run == volume(box)) == (size > 0), "R56"
        end, holder = first + run, holder + step
        assert holder >= 0, "R56"
        alone = holder < layout["world"]
        found.append((box, [holder] if alone else layout["sets"][holder - layout["world"]]))
    return found


def place_of(number: int, shape: list[int]) -> list[int]:
    """Where the element of this number is, in row-major order."""
    rest = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return [number // behind % size for behind, size in zip(rest, shape, strict=True)]


def first_run(box: Box, shape: list[int]) -> int:
    """How many elements of a box follow its first one without a gap."""
    dim = len(shape)
    while dim and all(box[d] == (0, shape[d]) for d in range(dim, len(shape))):
        dim -= 1  # behind `dim` the box is as wide as the leaf
    return volume(box[dim:])


def meet(one: Box, other: Box) -> bool:
    return all(a[0] < b[1] and b[0] < a[1] for a, b in zip(one, other, strict=True))


Held = list[tuple[Box, list[int]]]


def cells_of(layout: Json, group: list[int], shape: list[int]) -> Held:
    """A.5: the cells of a leaf with a listing, by their starts."""
    held: dict[Box, set[int]] = {}
    for one in group:
        some = listed_boxes(layout, -1 - one) if one < 0 else holders(layout, one, shape).items()
        for box, ranks in some:
            if volume(box):
                held.setdefault(box, set()).update(ranks)
    return make_cells(shape, [(box, sorted(ranks)) for box, ranks in held.items()])


def make_cells(shape: Iterable[int], held: Held) -> Held:
    """The cells of distinct boxes that are held, by their starts."""
    cells = _cells(tuple((0, size) for size in shape), held)
    return sorted(cells, key=lambda cell: [a for a, _ in cell[0]])


def _cells(region: Box, held: Held) -> Held:
    parts = _taken_apart(region, held)
    if parts is not None:
        return [cell for part in parts for cell in _cells(*part)]
    if not any(meet(one, other) for n, (one, _) in enumerate(held) for other, _ in held[:n]):
        return held
    cells = _cut(region, held)
    if sum(len(some) for _, some in cells) <= 16 * len(held):
        return [(part, sorted({r for _, ranks in some for r in ranks})) for part, some in cells]
    found: Held = []
    taken: list[Box] = []
    for box, ranks in sorted(held, key=lambda one: (one[1][0], *zip(*one[0], strict=True))):
        left = [box]
        for other in taken:
            left = [rest for one in left for rest in without(one, other)]
        found += [(rest, ranks) for rest in left]
        taken.append(box)
    return found


def _taken_apart(region: Box, held: Held) -> list[tuple[Box, Held]] | None:
    """Step 1; None when no dimension is left."""
    for dim, whole in enumerate(region):
        joined: list[list[int]] = []
        for a, b in sorted(box[dim] for box, _ in held):
            if joined and a < joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], b)
            else:
                joined.append([a, b])
        if joined != [list(whole)]:
            return [
                (
                    (*region[:dim], (a, b), *region[dim + 1 :]),
                    [one for one in held if a <= one[0][dim][0] < b],
                )
                for a, b in joined
            ]
    return None if held else []


def _cut(region: Box, held: Held) -> list[tuple[Box, Held]]:
    """Step 3: the cells, each with the boxes that are all of it."""
    if all(box == region for box, _ in held):
        return [(region, held)] if held else []
    parts = _taken_apart(region, held)
    if parts is None:
        dim = next(d for d, whole in enumerate(region) if {box[d] for box, _ in held} != {whole})
        ends = sorted({end for box, _ in held for end in box[dim]})
        parts = []
        for pair in pairwise(ends):
            some = [(box, r) for box, r in held if box[dim][0] < pair[1] and pair[0] < box[dim][1]]
            clipped = [((*box[:dim], pair, *box[dim + 1 :]), r) for box, r in some]
            parts.append(((*region[:dim], pair, *region[dim + 1 :]), clipped))
    return [cell for part in parts for cell in _cut(*part)]


def without(one: Box, other: Box) -> list[Box]:
    """Step 4: what remains of a box when another is taken from it."""
    if not meet(one, other):
        return [one]
    found = []
    for dim, (a, b) in enumerate(other):
        start, stop = one[dim]
        for pair in ((start, a), (b, stop)):
            if pair[0] < pair[1]:
                found.append((*one[:dim], pair, *one[dim + 1 :]))
        one = (*one[:dim], (max(start, a), min(stop, b)), *one[dim + 1 :])
    return found


# ── Appendix A ───────────────────────────────────────────────────────────────────────────────

Cut = tuple[int, int, int]  # parts, at, factor
Range = tuple[int, int]


def ranges_of(size: int, cuts: list[Cut]) -> list[Range]:
    """A.1: what a rank holds of one dimension; cuts by rising mesh dimension."""
    order: list[tuple[Cut, int]] = []
    for cut in reversed(cuts):
        products = [math.prod(c[0] for c, _ in order[:n]) for n in range(len(order) + 1)]
        if cut[2] in products:
            order.insert(products.index(cut[2]), (cut, 1))
        else:
            order.insert(0, (cut, cut[2]))
    elements = list(range(size))
    for (parts, at, _), strides in order:
        kept = []
        length = -(-len(elements) // strides)
        for a in range(0, len(elements), max(1, length)):
            chunk = elements[a : a + length]
            step = -(-len(chunk) // parts)
            kept += chunk[at * step : (at + 1) * step]
        elements = kept
    found: list[Range] = []
    for index in elements:
        if found and found[-1][1] == index:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
    return found


def holders(layout: Json, instance: int, shape: list[int]) -> dict[Box, list[int]]:
    """A.2: all boxes of an instance with their ranks, in the order in which ranks hold them."""
    mesh, placements = layout["instances"][instance]
    extents, ranks = layout["meshes"][mesh]
    found: dict[Box, list[int]] = {}
    for coordinate, rank in zip(product(*map(range, extents)), ranks, strict=True):
        dims = []
        for dim, size in enumerate(shape):
            cuts = [
                (extents[m], coordinate[m], factor)
                for m, (cut_dim, factor) in enumerate(placements)
                if cut_dim == dim
            ]
            dims.append(ranges_of(size, cuts))
        for box in product(*dims):
            found.setdefault(box, []).append(rank)
    return {box: sorted(some) for box, some in found.items()}


def shares(layout: Json, leaf: list[Any]) -> Iterator[tuple[int, Box, list[int]]]:
    """A.3: (bytes, box, ranks that could store it)."""
    _, dtype, shape, spread, group = leaf
    item, _ = spec.dtypes()[dtype]
    for box, ranks in stored_boxes(layout, layout["groups"][group], shape):
        if spread == "lowest":
            yield volume(box) * item, box, ranks[:1]
        else:
            for part in divided(box, item, len(ranks)):
                yield volume(part) * item, part, ranks


def stored_boxes(
    layout: Json, group: list[int], shape: list[int]
) -> Iterator[tuple[Box, list[int]]]:
    """A.3, A.5: the boxes that are stored of a leaf, and the ranks of each."""
    if min(group) < 0:
        yield from cells_of(layout, group, shape)
        return
    by_rank = sorted(group, key=lambda one: min(_ranks(layout, one)))
    first, *others = (holders(layout, one, shape) for one in by_rank)
    for box, ranks in first.items():
        for other in others:
            if other.keys() == first.keys():
                ranks = sorted(ranks + other[box])
        yield box, ranks


def _ranks(layout: Json, instance: int) -> list[int]:
    if instance < 0:
        return sorted({r for _, some in listed_boxes(layout, -1 - instance) for r in some})
    ranks: list[int] = layout["meshes"][layout["instances"][instance][0]][1]
    return ranks


def divided(box: Box, item: int, ranks: int) -> list[Box]:
    smallest = spec.limits()["smallest bytes of a divided box's parts"]
    for dim, (start, stop) in enumerate(box):
        extent = stop - start
        if extent > 1:
            n = min(extent, max(1, min(ranks, volume(box) * item // smallest)))
            cuts = [start + extent * k // n for k in range(n + 1)]
            return [(*box[:dim], pair, *box[dim + 1 :]) for pair in pairwise(cuts)]
    return [box]


def owners(layout: Json) -> list[list[tuple[int, Box]]]:
    """A.4: for each leaf, (rank, box) of all its pieces."""
    stored = [0] * layout["world"]
    found: list[list[tuple[int, Box]]] = [[] for _ in layout["leaves"]]
    free = []
    for number, leaf in enumerate(layout["leaves"]):
        for size, box, ranks in shares(layout, leaf):
            if len(ranks) == 1:
                stored[ranks[0]] += size
                found[number].append((ranks[0], box))
            else:
                free.append((size, number, box, ranks))
    for size, number, box, ranks in sorted(free, key=lambda share: -share[0]):
        rank = min(ranks, key=lambda r: (stored[r], r))
        stored[rank] += size
        found[number].append((rank, box))
    return found
