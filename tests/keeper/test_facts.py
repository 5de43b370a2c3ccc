"""Whatever one keeper says to another, that one understands."""

from __future__ import annotations

import zlib

import msgspec
import pytest

from holdfast.errors import FormatError
from holdfast.format.manifest import MAX_DOCUMENT_BYTES, ImageRef, Manifest, seal
from holdfast.keeper.hosts import host_messages
from holdfast.keeper.hosts.cache_messages import deflate_manifest, inflate_manifest
from holdfast.protocol.facts import Fact, ToCoordinator, ToFollower


def test_every_fact_can_be_heard_by_the_coordinator_or_by_a_follower() -> None:
    sides = {
        ToCoordinator: host_messages.from_follower,
        ToFollower: host_messages.from_coordinator,
    }
    assert sides.keys() == set(Fact.__subclasses__())
    for base, decode in sides.items():
        for kind in base.__subclasses__():
            alone = msgspec.msgpack.encode([kind.__struct_config__.tag])
            if any(field.required for field in msgspec.structs.fields(kind)):
                with pytest.raises(FormatError, match="at least length"):
                    decode(alone)
            else:
                assert decode(alone) == kind()
    with pytest.raises(FormatError, match="Invalid value 'Nothing'"):
        host_messages.from_follower(msgspec.msgpack.encode(["Nothing"]))


def test_a_fact_without_fields_arrives_as_what_it_is() -> None:
    for kind in ToFollower.__subclasses__():
        if not msgspec.structs.fields(kind):
            assert host_messages.from_coordinator(host_messages.pack(kind())) == kind()


def test_a_manifest_between_keepers_is_small_and_one_that_makes_no_sense_is_refused() -> None:
    images = tuple(
        ImageRef(
            path=f"steps/1-2-a/live-{rank:05d}.safetensors",
            rank=rank,
            size_bytes=1 << 30,
            header_xxh3=f"{rank:016x}",
            table_xxh3=f"{rank:016x}",
        )
        for rank in range(512)
    )
    manifest = Manifest(
        run_id="r", incarnation=1, step=2, attempt="a", world=512, layout="0" * 32, images=images
    )
    deflated = deflate_manifest(manifest)
    assert inflate_manifest(deflated, "a") == manifest
    assert len(deflated) < len(seal(manifest)) / 4
    bomb = zlib.compress(bytes(MAX_DOCUMENT_BYTES + (1 << 20)), 1)
    for wrong in (b"", b"not deflated", deflated[:-20], zlib.compress(b"{}"), bomb):
        with pytest.raises(FormatError):
            inflate_manifest(wrong, "a")
