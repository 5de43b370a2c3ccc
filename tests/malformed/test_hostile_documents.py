"""Manifests, incarnations, roots and stored values with anything in them but what belongs there."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ChecksumMismatch, FormatError, NewerFormat
from holdfast.format import manifest as documents
from holdfast.format.checksum import checksum, text
from holdfast.format.manifest import ImageRef, Incarnation, Manifest, Root, seal, unseal
from holdfast.format.values import decode, from_bytes

MANIFEST = Manifest(
    run_id="r",
    incarnation=2,
    step=40,
    attempt="a1",
    parent=(1, 30),
    world=1,
    layout="0f" * 16,
    images=(
        ImageRef(
            path="steps/2-40-a1/live-00000.safetensors",
            rank=0,
            size_bytes=8192,
            header_xxh3="0" * 16,
            table_xxh3="f" * 16,
        ),
    ),
    values={"tokens": 7},
    created_s=1.5,
)
BODY: dict[str, Any] = json.loads(seal(MANIFEST))["body"]


def with_body(body: Any) -> bytes:
    """A document whose checksum is true, whatever its body is."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b'{"checksum":"%s","body":%s}\n' % (text(checksum(raw)).encode(), raw)


def test_the_good_manifest_is_good() -> None:
    assert unseal(Manifest, with_body(BODY), "m") == MANIFEST


# ── accidents ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise
def test_every_flipped_bit_of_a_manifest_is_noticed() -> None:
    whole = seal(MANIFEST)
    for position in range(len(whole)):
        for bit in range(8):
            data = bytearray(whole)
            data[position] ^= 1 << bit
            with pytest.raises(FormatError):
                unseal(Manifest, data, "m")


def test_a_byte_replaced_by_any_other_never_gives_another_manifest() -> None:
    whole = seal(MANIFEST)
    for position in range(len(whole)):
        for value in range(256):
            data = bytearray(whole)
            data[position] = value
            try:
                assert unseal(Manifest, data, "m") == MANIFEST
            except FormatError:
                continue


def test_a_manifest_cut_short_anywhere_is_refused() -> None:
    whole = seal(MANIFEST).rstrip()
    for length in range(len(whole)):
        with pytest.raises(FormatError):
            unseal(Manifest, whole[:length], "m")


def test_a_manifest_that_is_one_half_of_another_is_refused() -> None:
    one = seal(MANIFEST)
    other = seal(Manifest(**{**BODY, "step": 40, "images": MANIFEST.images, "parent": (0, 30)}))
    assert len(one) == len(other)
    for cut in range(1, len(one) - 1):
        if one[:cut] + other[cut:] in (one, other):
            continue
        with pytest.raises(ChecksumMismatch):
            unseal(Manifest, one[:cut] + other[cut:], "m")


def test_a_checksum_mismatch_names_the_file_and_both_checksums() -> None:
    data = seal(MANIFEST).replace(b'"step":40', b'"step":41')
    with pytest.raises(ChecksumMismatch, match=r"manifests/2-40\.json.*stored.*read") as caught:
        unseal(Manifest, data, "manifests/2-40.json")
    assert json.loads(data)["checksum"] in str(caught.value)


# ── not a document ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"checksum":"0"}',
        b'{"body":{}}',
        b"\xff\xfe",
        b"{" * 10,
        b'{"checksum":1,"body":{}}',
        b'{"checksum":null,"body":{}}',
        b'{"checksum":"0","body":{}',
        b'{"checksum":"0","body":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"checksum":"\xff","body":{}}',
        b"PK\x03\x04",
        b"\x80\x04\x95",
    ],
    ids=range(15),
)
def test_what_is_no_document_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(FormatError, match="there"):
        unseal(Manifest, data, "there")
    with pytest.raises(FormatError, match="there"):
        unseal(Root, data, "there")


def test_a_document_of_any_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_DOCUMENT_BYTES", len(seal(MANIFEST)) - 1)
    with pytest.raises(FormatError, match="more than any document"):
        unseal(Manifest, seal(MANIFEST), "m")


@pytest.mark.parametrize(
    "body",
    [
        [],
        7,
        "x",
        None,
        {},
        b"[" * 100_000 + b"]" * 100_000,
        b'{"values":' + b"[" * 5000 + b"]" * 5000 + b"}",
        {k: v for k, v in BODY.items() if k != "images"},
        {k: v for k, v in BODY.items() if k != "layout"},
        BODY | {"step": "40"},
        BODY | {"step": None},
        BODY | {"step": 40.5},
        BODY | {"step": True},
        BODY | {"images": {}},
        BODY | {"images": [{}]},
        BODY | {"images": [None]},
        BODY | {"images": [{**BODY["images"][0], "size_bytes": "8192"}]},
        BODY | {"parent": [1]},
        BODY | {"parent": [1, 2, 3]},
        BODY | {"parent": 1},
        BODY | {"values": []},
        BODY | {"run_id": 5},
        BODY | {"format_version": "1"},
        BODY | {"requires": "x"},
    ],
    ids=range(24),
)
def test_a_body_that_is_no_manifest_is_refused_although_its_checksum_is_true(body: Any) -> None:
    with pytest.raises(FormatError, match=r"^m "):
        unseal(Manifest, with_body(body), "m")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"size_bytes": 0}, "said to have 0 bytes"),
        ({"size_bytes": -8192}, "said to have -8192 bytes"),
        ({"size_bytes": 2**63}, "said to have 9223372036854775808 bytes"),
        ({"header_xxh3": "0" * 15}, "is no checksum of image steps/2-40-a1/live-00000"),
        ({"header_xxh3": "F" * 16}, "is no checksum of image"),
        ({"table_xxh3": ""}, "'' is no checksum of image"),
        ({"table_xxh3": "0" * 16 + "\n"}, "is no checksum of image"),
        (
            {"header_xxh3": "0" * 16 + ";" + "1" * 16, "table_xxh3": "2" * 16},
            "is no checksum of image",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_image_that_cannot_be_as_it_is_said_to_be_is_refused(
    change: dict[str, Any], said: str
) -> None:
    images = [{**BODY["images"][0], **change}]
    with pytest.raises(FormatError, match=said):
        unseal(Manifest, with_body(BODY | {"images": images}), "m")


def test_one_kind_of_document_is_not_another() -> None:
    with pytest.raises(FormatError, match="not a valid incarnation"):
        unseal(Incarnation, seal(MANIFEST), "m")
    for other in (Incarnation(run_id="r", n=1, nonce="x"), Root(run_id="r")):
        with pytest.raises(FormatError, match="not a valid manifest"):
            unseal(Manifest, seal(other), "m")


# ── from the future ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "claims", [{"format_version": 2}, {"requires": ["chunked"]}, {"requires": ["a", "b"]}]
)
def test_a_newer_format_is_refused_as_such(claims: dict[str, Any]) -> None:
    with pytest.raises(NewerFormat, match="upgrade"):
        unseal(Manifest, with_body(BODY | claims), "m")
    with pytest.raises(NewerFormat, match="upgrade"):
        unseal(Root, with_body({"format_version": 1, "run_id": "r"} | claims), "m")


def test_a_newer_format_is_told_from_nonsense_even_when_all_else_has_changed() -> None:
    with pytest.raises(NewerFormat, match=r"version 9.*\['later'\]"):
        unseal(Manifest, with_body({"format_version": 9, "requires": ["later"]}), "m")


@given(data=st.binary(max_size=80))
def test_any_bytes_at_all_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        unseal(Manifest, data, "m")


# ── stored values ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("data", [b"", b"{", b"nan", b"\xff", b"{'a':1}", b"[" * 100_000])
def test_stored_values_that_are_not_json_are_refused_by_name(data: bytes) -> None:
    with pytest.raises(FormatError, match="there"):
        from_bytes(data, "there")


ARRAY = {"dtype": "<f4", "shape": [2], "data": "AAAAAAAAAAA="}


@pytest.mark.parametrize(
    "form",
    [
        {"$float": "1.5"},
        {"$float": 1.5},
        {"$float": "Infinity"},
        {"$float": []},
        {"$int": 5},
        {"$int": "0xg0"},
        {"$int": "1_0"},
        {"$int": " 1"},
        {"$int": "١"},
        {"$int": ""},
        {"$int": "9" * 5000},
        {"$bytes": "a"},
        {"$bytes": "****"},
        {"$bytes": 5},
        {"$bytes": "YQ==\n"},
        {"$tuple": "ab"},
        {"$tuple": {"a": 1}},
        {"$tuple": None},
        {"$dict": {"a": 1}},
        {"$dict": ["ab"]},
        {"$dict": [[1]]},
        {"$dict": [[1, 2, 3]]},
        {"$dict": [[[1], 2]]},
        {"$dict": 5},
        {"$dtype": 5},
        {"$leaf": 5},
        {"$numpy": []},
        {"$numpy": {}},
        {"$numpy": ARRAY | {"dtype": "O"}},
        {"$numpy": ARRAY | {"dtype": None}},
        {"$numpy": ARRAY | {"dtype": "f4,f4"}},
        {"$numpy": ARRAY | {"dtype": "<f4,<f4", "shape": [1]}},
        {"$numpy": ARRAY | {"dtype": "<M8[s]", "shape": [1]}},
        {"$numpy": ARRAY | {"dtype": "|V8", "shape": [1]}},
        {"$numpy": ARRAY | {"dtype": "nonsense"}},
        {"$numpy": ARRAY | {"dtype": ["<f4"]}},
        {"$numpy": ARRAY | {"shape": [3]}},
        {"$numpy": ARRAY | {"shape": [-1]}},
        {"$numpy": ARRAY | {"shape": [-1, -2]}},
        {"$numpy": ARRAY | {"shape": ["2"]}},
        {"$numpy": ARRAY | {"shape": 2}},
        {"$numpy": ARRAY | {"shape": None}},
        {"$numpy": ARRAY | {"shape": [2**70, 0, 2**70], "data": ""}},
        {"$numpy": ARRAY | {"shape": [1] * 70}},
        {"$numpy": ARRAY | {"data": "!"}},
        {"$numpy": ARRAY | {"data": None}},
        {"$numpy": {"dtype": "<f4", "shape": [2]}},
        {"$numpy": {"dtype": "<U1", "shape": [1], "data": "AAARAA=="}},  # U+110000
        {"$numpy": {"dtype": ">U1", "shape": [1], "data": "ABEAAA=="}},
    ],
    ids=lambda form: repr(form)[:60],
)
def test_a_tagged_value_that_is_malformed_is_refused_by_its_tag(form: dict[str, Any]) -> None:
    (tag,) = form
    for place in (form, [form], {"a": {"b": form}}, {"$tuple": [form]}):
        with pytest.raises(FormatError, match=rf"tagged (\{tag}|\$tuple) is malformed"):
            decode(place)


@pytest.mark.parametrize("name", ["nn", "Tensor", "load", "no_such_thing", "float32.is_complex"])
def test_a_dtype_is_never_anything_else_of_torch(name: str) -> None:
    importlib.import_module("torch")
    with pytest.raises(FormatError, match="no torch dtype"):
        decode({"$dtype": name})


@pytest.mark.promise
@pytest.mark.parametrize("name", ["object", "builtins.exit", "os.getcwd", "subprocess.Popen"])
def test_what_makes_a_missing_item_is_never_what_a_checkpoint_names(name: str) -> None:
    with pytest.raises(FormatError, match=r"tagged \$default is malformed"):
        decode({"$default": [name, []]})


def test_an_unknown_tag_is_refused_as_newer() -> None:
    with pytest.raises(FormatError, match=r"unknown tag \$later; a newer"):
        decode({"$later": 1})


def test_values_nested_without_end_are_refused() -> None:
    deep: Any = 0
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(FormatError, match="nested"):
        decode(deep)


@pytest.mark.parametrize("form", [{"$eval": "1"}, {"$pickle": "gASVAAAAAAA="}, {"$object": {}}])
def test_nothing_that_could_be_executed_has_a_tag(form: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        decode(form)
