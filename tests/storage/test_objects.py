"""A bucket of each cloud does what a directory does, on servers of these clouds."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from holdfast.storage import Store
from holdfast.testing.store_suite import StoreSuite
from support.servers.object_servers import ObjectServer, object_store, use


class OnServer(StoreSuite):
    def make_store(self, tmp_path: Path) -> Store:
        return object_store(f"suite/{uuid.uuid4().hex}")

    def same_store(self, store: Store) -> Store:
        return object_store(store.url.split("/", 3)[3])


class TestSeaweedFS(OnServer):
    @pytest.fixture(autouse=True)
    def server(self, seaweedfs_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
        use(seaweedfs_server, monkeypatch)


class TestMoto(OnServer):
    @pytest.fixture(autouse=True)
    def server(self, moto_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
        use(moto_server, monkeypatch)


@pytest.mark.slow
class TestAzurite(OnServer):
    @pytest.fixture(autouse=True)
    def server(self, azurite_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
        use(azurite_server, monkeypatch)


@pytest.mark.slow
class TestGoogle(OnServer):
    @pytest.fixture(autouse=True)
    def server(self, google_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
        use(google_server, monkeypatch)
