"""Parts of an upload that another writer replaced never become part of an object.

A completion lists each part with the tag and the checksum that its own writer was told, so the
server compares them, in the same moment in which it makes the object.
"""

from __future__ import annotations

import uuid

import pytest

from holdfast.errors import StorageError
from holdfast.storage.objects import ObjectStore
from holdfast.storage.uploads import UploadSink
from support.servers.object_servers import ObjectServer, object_store, use

PART = 5 << 20
SIZE = 2 * PART + 1000
DATA = memoryview(bytes(range(250)) * (SIZE // 250 + 1))[:SIZE]
#: Keeps both parts of one number, and takes the one whose tag is listed.
KEEPS_BOTH = "seaweedfs_server"


@pytest.fixture(params=[KEEPS_BOTH, "moto_server", "google_server", "azurite_server"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    found: ObjectServer = request.getfixturevalue(request.param)
    use(found, monkeypatch)
    return str(request.param)


def written(store: ObjectStore) -> UploadSink:
    sink = store.create("image", SIZE)
    assert isinstance(sink, UploadSink)
    sink.write(0, DATA)
    return sink


@pytest.mark.promise
@pytest.mark.parametrize("size_bytes", [PART, PART + 17])
@pytest.mark.parametrize("number", [1, 2])
def test_a_part_that_another_writer_replaced_is_found_when_the_upload_is_completed(
    server: str, number: int, size_bytes: int
) -> None:
    store = object_store(f"parts/{uuid.uuid4().hex}", least_part_bytes=PART)
    sink, bucket, other = written(store), store.bucket, [b"x" * size_bytes]
    key = f"{store._below}image"
    replaced = bucket.put_part(key, sink._upload, number, other, bucket.checksum(other))
    assert replaced.is_done
    if server in (KEEPS_BOTH, "azurite_server"):  # a block's name says its checksum
        sink.finish()
    else:
        with pytest.raises(StorageError, match="InvalidPart"):
            sink.finish()
        sink.abort()
        assert not store.exists("image") and not bucket.uploads(key)
        written(store).finish()
    assert store.read("image") == DATA
