from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import AlreadyPublished
from holdfast.storage import MemoryStore, Store
from holdfast.testing.store_suite import StoreSuite


class TestMemoryStore(StoreSuite):
    def make_store(self, tmp_path: Path) -> Store:
        return MemoryStore()


def test_an_unfinished_image_stays_visible_as_after_a_crash() -> None:
    store = MemoryStore()
    sink = store.create("image", 10)
    sink.write(0, memoryview(b"01234"))
    del sink
    assert store.read("image") == b"01234" + bytes(5)
    with pytest.raises(AlreadyPublished):
        store.create("image", 10)
