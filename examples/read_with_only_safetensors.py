"""Read Holdfast checkpoints without Holdfast: written from docs/format/v1.md alone.

python examples/read_with_only_safetensors.py ROOT [LEAF leaf.npy]   # needs xxhash, to verify
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
from safetensors import deserialize
from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

# What numpy has no type for is read as integers of the same bits: the last three, and all others.
NUMPY = "F64=f8 F32=f4 F16=f2 I64=i8 I32=i4 I16=i2 I8=i1 U64=u8 U32=u4 U16=u2 U8=u1 BOOL=? C64=c8"
NUMPY = dict(one.split("=") for one in f"{NUMPY} C128=c16 BF16=u2 BITS16=u2 C32=u4".split())


def check(is_true: object, what: str) -> None:
    if not is_true:
        raise SystemExit(f"refused: {what}")


def unseal(path: Path) -> dict:
    """R4 to R8: a document whose body has its checksum, of a version we know."""
    framed = re.fullmatch(rb'{"checksum":"(.{16})","body":(.*)}\n', path.read_bytes(), re.DOTALL)
    check(framed and xxh3_64_hexdigest(framed[2]) == framed[1].decode(), f"{path} has changed")
    body = json.loads(framed[2])
    is_known = set(body.get("requires", ())) <= {"parts", "listings"}
    check(body["format_version"] == 1 and is_known, f"{path} is newer")
    return body


def find_checkpoints(root: Path) -> list[dict]:
    """R41 and R42: the manifests of the lineage, newest last."""
    name = re.compile(r"(0|[1-9]\d*)-(0|[1-9]\d*)\.json")
    manifests = [unseal(p) for p in (root / "manifests").iterdir() if name.fullmatch(p.name)]
    parents = {m["incarnation"]: m.get("parent") for m in manifests}
    for path in (root / "incarnations").glob("[0-9]*.json"):
        parents[int(path.stem)] = unseal(path).get("parent")
    limits, n, limit = {}, max(parents, default=None), float("inf")
    while n is not None and n not in limits:
        limits[n] = limit
        n, limit = parents.get(n) or (None, 0)
    manifests.sort(key=lambda m: (m["step"], m["incarnation"]))
    return [m for m in manifests if m["step"] <= limits.get(m["incarnation"], -1)]


def read_layout(root: Path, manifest: dict) -> dict[str, tuple[str, list[int]]]:
    data = (root / "layouts" / f"{manifest['layout']}.json").read_bytes()
    check(xxh3_128_hexdigest(data) == manifest["layout"], "the layout has changed")
    check(json.loads(data)["version"] in (1, 2), "the layout is newer")
    return {name: (dtype, shape) for name, dtype, shape, *_ in json.loads(data)["leaves"]}


def read_image(path: Path, image: dict) -> dict[str, dict]:
    """R23 to R37: the tensors of one image, every block compared first."""
    data = memoryview(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    check(xxh3_64_hexdigest(data[:start]) == image["header_xxh3"], f"{path}: header has changed")
    about = {"requires": "parts"} | json.loads(bytes(data[8:start]))["__metadata__"]
    check((about["holdfast"], about["requires"]) == ("1", "parts"), f"{path} is newer")
    tensors = dict(deserialize(bytes(data)))
    table = tensors["__holdfast_blocks__"]["data"]
    check(xxh3_64_hexdigest(table) == image["table_xxh3"], f"{path}: table has changed")
    for number, at in enumerate(range(start, stop := len(data) - len(table), 1 << 20)):
        stored = int.from_bytes(table[8 * number : 8 * number + 8], "little")
        found = int(xxh3_64_hexdigest(data[at : min(at + (1 << 20), stop)]), 16)
        check(found == stored, f"{path}: block {number} has changed")
    return tensors


def read_leaf(root: Path, manifest: dict, name: str) -> np.ndarray:
    """R34, R35, R51: a leaf from the pieces of all ranks, each element exactly once."""
    name = manifest.get("aliases", {}).get(name, name)
    dtype, shape = read_layout(root, manifest)[name]
    leaf, times = np.empty(shape, NUMPY.get(dtype, "u1")), np.zeros(shape, "u1")
    for image in [*manifest["images"], *manifest.get("parts", ())]:
        for piece, tensor in read_image(root / image["path"], image).items():
            if box := re.fullmatch(re.escape(name) + r"(@[\d:,]+)?", piece):
                ranges = box[1][1:].split(",") if box[1] else ()
                part = (*(slice(*map(int, one.split(":"))) for one in ranges), ...)
                leaf[part] = np.frombuffer(tensor["data"], leaf.dtype).reshape(leaf[part].shape)
                times[part] += 1
    check((times == 1).all(), f"{name} is not there exactly once")
    return leaf


if __name__ == "__main__":
    root, *leaf_and_file = Path(sys.argv[1]), *sys.argv[2:]
    line = find_checkpoints(root)
    print("checkpoints:", *(f"{m['incarnation']}-{m['step']}" for m in line))
    for name, (dtype, shape) in read_layout(root, line[-1]).items():
        print(name, dtype, shape)
    if leaf_and_file:
        np.save(leaf_and_file[1], read_leaf(root, line[-1], leaf_and_file[0]))
