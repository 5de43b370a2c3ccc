"""What disks and strangers do to files: bits flip, ends go missing, sizes lie, links lead away.

Nothing but the good bytes is ever returned, and no memory is taken because a file claims a size.
"""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.errors import FormatError, HoldfastError
from holdfast.format import manifest
from holdfast.format.image import MAX_VALUES_BYTES
from holdfast.geometry import codec
from holdfast.persist import commit
from holdfast.persist.pins import read_pins
from support.checkpoints.forge import LEAVES, Forger, copy_of, make_good, read_everything, sealed

#: What a hostile file may make a reader allocate beside what it really holds.
BOUNDED_BYTES = 64 << 20
TIB = 1 << 40


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("good") / "root"
    make_good(root)
    return root


@pytest.fixture
def forger(good: Path, tmp_path: Path) -> Forger:
    return copy_of(good, tmp_path / "root")


def read_all_files(forger: Forger) -> None:
    """Everything there is to read, root and pins included."""
    commit.open_root(forger.store, "r")
    for pinned in read_pins(forger.store).values():
        if pinned.pin is None:
            raise FormatError(pinned.reason)
    found = read_everything(forger.root)
    for name, array in LEAVES.items():
        assert np.asarray(found[name]).tobytes() == array.tobytes(), "bad bytes were returned"


def files_of(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file() and path.name[0] != ".")


REGIONS = ["holdfast.json", "incarnations", "layouts", "manifests", "pins", "steps"]


@pytest.mark.parametrize("region", REGIONS)
def test_a_flipped_bit_in_any_file_is_noticed(region: str, forger: Forger) -> None:
    for path in files_of(forger.root):
        if path.relative_to(forger.root).parts[0] != region:
            continue
        whole = path.read_bytes()
        # All of what means something in an image: header, pieces and values, entries of the table.
        step = 11 if len(whole) < 4096 else 61
        for position in {*range(0, len(whole), step), len(whole) - 1}:
            changed = bytearray(whole)
            changed[position] ^= 1 << position % 8
            path.write_bytes(changed)
            with pytest.raises(HoldfastError):
                read_all_files(forger)
        path.write_bytes(whole)
    read_all_files(forger)


@pytest.mark.parametrize("region", REGIONS)
def test_a_file_cut_short_anywhere_is_noticed(region: str, forger: Forger) -> None:
    for path in files_of(forger.root):
        if path.relative_to(forger.root).parts[0] != region:
            continue
        whole = path.read_bytes()
        for length in {*range(0, len(whole), max(1, len(whole) // 60)), len(whole) - 1}:
            path.write_bytes(whole[:length])
            with pytest.raises(HoldfastError):
                read_all_files(forger)
        path.write_bytes(whole)
    read_all_files(forger)


@pytest.mark.parametrize("region", ["layouts", "steps"])
def test_a_file_that_is_gone_is_missed(region: str, forger: Forger) -> None:
    for path in files_of(forger.root / region):
        whole = path.read_bytes()
        path.unlink()
        with pytest.raises(HoldfastError, match=path.name):
            read_all_files(forger)
        path.write_bytes(whole)


# ── sizes that lie ───────────────────────────────────────────────────────────────────────────


def huge_reference(forger: Forger) -> None:
    forger.manifest(lambda body: body["images"][0].update(size_bytes=2**62))


def huge_header(forger: Forger) -> None:
    path = forger.image_path(0)
    path.write_bytes((99_999_992).to_bytes(8, "little") + path.read_bytes()[8:])
    forger.manifest(lambda body: body["images"][0].update(size_bytes=2**62))


def huge_everything(forger: Forger) -> None:
    """A header that is consistent in itself, of an image of exbibytes."""
    blocks = 2**40
    table = -(-blocks // 512) * 512

    def change(header: dict[str, Any]) -> None:
        stop = blocks << 20
        own = {name: header[name] for name in header if name.startswith("__holdfast_")}
        pieces = [name for name in header if name not in own and name != "__metadata__"]
        for name in pieces:
            del header[name]
        header["w@0:3,0:4"] = {"dtype": "U8", "shape": [stop - 8], "data_offsets": [0, stop - 8]}
        for name, dtype, size, start, end in (
            ("values", "U8", 8, stop - 8, stop),
            ("pad", "U8", 0, stop, stop),
            ("blocks", "U64", table, stop, stop + 8 * table),
        ):
            header[f"__holdfast_{name}__"] = {
                "dtype": dtype,
                "shape": [size],
                "data_offsets": [start, end],
            }

    forger.header(0, change)
    begin = 8 + int.from_bytes(forger.image_path(0).read_bytes()[:8], "little")
    size = begin + (blocks << 20) + 8 * table
    forger.manifest(lambda body: body["images"][0].update(size_bytes=size))


def huge_values(forger: Forger) -> None:
    """More values than any image has, in a file that is as long as it says: it has holes."""

    def change(header: dict[str, Any]) -> None:
        start = header["__holdfast_values__"]["data_offsets"][0]
        stop = -(-(start + MAX_VALUES_BYTES + 1) // 8) * 8
        for name, shape, offsets in (
            ("values", stop - start, [start, stop]),
            ("pad", 0, [stop, stop]),
            ("blocks", 0, [stop, stop]),
        ):
            header[f"__holdfast_{name}__"] |= {"shape": [shape], "data_offsets": offsets}
        header["__holdfast_blocks__"]["dtype"] = "U64"

    forger.header(0, change)
    start = json.loads(forger.image_path(0).read_bytes()[8:4096])["__holdfast_blocks__"]
    size = 4096 + start["data_offsets"][1]
    os.truncate(forger.image_path(0), size)
    forger.manifest(lambda body: body["images"][0].update(size_bytes=size))


def many_dimensions(forger: Forger) -> None:
    forger.layout(lambda document: document["leaves"][4].__setitem__(2, [2**62] * 64))


def many_numbers(forger: Forger) -> None:
    forger.manifest(lambda body: body.update(world=2**20))


def long_digits(forger: Forger) -> None:
    forger.document(
        "manifests/2-40.json",
        lambda body: json.dumps(body).replace('"step": 40', '"step": ' + "9" * 100_000).encode(),
    )


LIES: list[tuple[Callable[[Forger], None], str]] = [
    (huge_reference, "bytes"),
    (huge_header, "bytes"),
    (huge_everything, "bytes"),
    (huge_values, "more than any have"),
    (many_dimensions, "more bytes than"),
    (many_numbers, "1048576 ranks"),
    (long_digits, "not a valid"),
]


def assert_refused_in_bounds(forger: Forger, match: str = ".") -> None:
    tracemalloc.start()
    try:
        with pytest.raises(HoldfastError, match=match):
            read_all_files(forger)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < BOUNDED_BYTES


@pytest.mark.parametrize(("lie", "match"), LIES)
def test_no_memory_is_taken_because_a_file_claims_a_size(
    lie: Callable[[Forger], None], match: str, forger: Forger
) -> None:
    lie(forger)
    assert_refused_in_bounds(forger, match)


def endless_manifest(forger: Forger) -> None:
    os.truncate(forger.manifest_path, TIB)


def endless_incarnation(forger: Forger) -> None:
    os.truncate(forger.root / "incarnations" / "2.json", TIB)


def endless_layout(forger: Forger) -> None:
    (path,) = (forger.root / "layouts").iterdir()
    os.truncate(path, TIB)


def endless_leaf(forger: Forger) -> None:
    """A leaf of exbibytes, of which the image has a few bytes."""
    forger.layout(lambda document: document["leaves"][4].__setitem__(2, [2**40, 2**18]))


@pytest.mark.parametrize(
    "lie", [endless_manifest, endless_incarnation, endless_layout, endless_leaf]
)
def test_no_memory_is_taken_for_what_is_longer_than_any(
    lie: Callable[[Forger], None], forger: Forger
) -> None:
    lie(forger)
    assert_refused_in_bounds(forger)


@pytest.mark.parametrize("kind", [manifest.Manifest, manifest.Incarnation, manifest.Root])
def test_a_document_longer_than_any_is_refused_by_its_length(
    kind: type[manifest.Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "MAX_DOCUMENT_BYTES", 100)
    with pytest.raises(FormatError, match="101 bytes"):
        manifest.unseal(kind, b" " * 101, "x")


def test_a_layout_longer_than_any_is_refused_by_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_BYTES", 100)
    with pytest.raises(FormatError, match="101 bytes"):
        codec.layout_from_json(b" " * 101)


# ── links and other things than files ────────────────────────────────────────────────────────


def test_a_link_out_of_the_root_gives_only_the_bytes_that_were_saved(
    good: Path, forger: Forger, tmp_path: Path
) -> None:
    image = forger.image_path(0)
    elsewhere = tmp_path / "elsewhere"
    image.rename(elsewhere)
    image.symlink_to(elsewhere)
    read_all_files(forger)
    elsewhere.write_bytes(b"a secret of somebody else" * 1000)
    with pytest.raises(HoldfastError) as caught:
        read_all_files(forger)
    assert "secret" not in str(caught.value)


def test_a_directory_or_a_dead_link_in_the_place_of_an_image_is_refused(forger: Forger) -> None:
    image = forger.image_path(0)
    image.unlink()
    image.symlink_to("nowhere")
    with pytest.raises(HoldfastError, match="live-00000"):
        read_all_files(forger)
    image.unlink()
    image.mkdir()
    with pytest.raises(HoldfastError, match="live-00000"):
        read_all_files(forger)


def test_a_manifest_with_a_true_checksum_and_any_other_body_is_refused(forger: Forger) -> None:
    bodies: list[Any] = [{}, {"format_version": 1}, {"a": [[[]]]}, b"{}", b"{\0}"]
    for body in [*bodies, b'{"format_version":1,}', b'{"format_version":01}']:
        forger.manifest_path.write_bytes(sealed(body))
        with pytest.raises(HoldfastError):
            read_all_files(forger)
