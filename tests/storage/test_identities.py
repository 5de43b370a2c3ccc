"""Tokens are asked for by each cloud's usual means; nothing that they are asked with is shown."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from holdfast.errors import StorageError, UsageError
from holdfast.storage import azure_account, google_identity
from holdfast.storage.azure_account import account
from support.servers.google_shim import make_key

SECRET = "canary-SECRET"


class Giver(BaseHTTPRequestHandler):
    """Gives a token to whoever asks, and keeps what was asked."""

    asked: list[tuple[str, dict[str, str], dict[str, str]]]
    status = 200
    said: dict[str, object]

    def do_GET(self) -> None:
        self._answer("")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["content-length"])).decode())

    def _answer(self, body: str) -> None:
        form = {name: values[0] for name, values in parse_qs(body).items()}
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.asked.append((self.path, headers, form))
        data = json.dumps(self.said).encode()
        self.send_response(self.status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def giver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[type[Giver], str]]:
    class One(Giver):
        pass

    One.asked, One.said = [], {"access_token": "given", "expires_in": "3600"}
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "HOLDFAST_GS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "someone")
    server = ThreadingHTTPServer(("127.0.0.1", 0), One)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield One, f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def token_of_google() -> str:
    source = google_identity.token_source()
    assert source is not None
    return source.current().text


def token_of_azure() -> str:
    source = account().tokens
    assert source is not None
    return source.current().text


def write(file: Path, said: dict[str, Any], patch: pytest.MonkeyPatch) -> None:
    file.write_text(json.dumps(said))
    patch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))


def test_a_machine_of_google_has_an_account(
    giver: tuple[type[Giver], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", giver[1])
    assert token_of_google() == "given"
    ((path, headers, _),) = giver[0].asked
    assert path.endswith("/service-accounts/default/token")
    assert headers["metadata-flavor"] == "Google"


def test_a_login_of_gcloud_is_used(
    giver: tuple[type[Giver], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(google_identity, "_TOKENS", f"http://{giver[1]}/token")
    (tmp_path / "gcloud").mkdir()
    file = tmp_path / "gcloud/application_default_credentials.json"
    said = {"client_id": "c", "client_secret": SECRET, "refresh_token": SECRET}
    file.write_text(json.dumps({"type": "authorized_user", **said}))
    assert token_of_google() == "given"
    assert giver[0].asked[0][2] == {**said, "grant_type": "refresh_token"}


def test_what_is_wrong_with_credentials_is_said_without_them(
    giver: tuple[type[Giver], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "account.json"
    write(file, {"type": "external_account", "secret": SECRET}, monkeypatch)
    with pytest.raises(StorageError, match="external_account") as raised:
        token_of_google()
    broken = {"type": "service_account", "client_email": "x", "private_key": SECRET}
    write(file, broken, monkeypatch)
    with pytest.raises(StorageError, match="cannot be used") as also:
        token_of_google()
    giver[0].status, giver[0].said = 400, {"error": "invalid_grant", "error_description": SECRET}
    monkeypatch.setattr(google_identity, "_TOKENS", f"http://{giver[1]}/token")
    login = {"client_id": "c", "client_secret": SECRET, "refresh_token": SECRET}
    write(file, {"type": "authorized_user", **login}, monkeypatch)
    with pytest.raises(StorageError, match="status 400, invalid_grant") as refused:
        token_of_google()
    for one in (raised, also, refused):
        assert SECRET not in str(one.value) and not one.value.retryable


def test_a_key_without_the_package_that_signs_says_what_to_install(
    giver: tuple[type[Giver], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(make_key(tmp_path, 1)))

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(StorageError, match=r"pip install 'holdfast\[cloud\]'"):
        token_of_google()


def test_an_emulator_of_google_is_given_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "localhost:4443")
    assert google_identity.token_source() is None
    found = google_identity.server()
    assert (found.name, found.is_secure) == ("localhost:4443", False)
    monkeypatch.setenv("HOLDFAST_GS_ENDPOINT", f"https://me:{SECRET}@private")
    with pytest.raises(UsageError) as raised:
        google_identity.server()
    assert SECRET not in str(raised.value)


def test_a_machine_of_azure_has_an_identity_and_one_of_several_is_chosen(
    giver: tuple[type[Giver], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(azure_account, "_MACHINE", f"http://{giver[1]}/identity")
    monkeypatch.setenv("AZURE_CLIENT_ID", "which")
    assert token_of_azure() == "given"
    ((path, headers, _),) = giver[0].asked
    assert "resource=https%3A%2F%2Fstorage.azure.com%2F" in path and "client_id=which" in path
    assert headers["metadata"] == "true"


def test_an_identity_of_a_workload_or_an_application_of_azure(
    giver: tuple[type[Giver], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AZURE_AUTHORITY_HOST", f"http://{giver[1]}/")
    monkeypatch.setenv("AZURE_CLIENT_ID", "client")
    (tmp_path / "token").write_text(f"{SECRET}\n")
    monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(StorageError, match="AZURE_TENANT_ID"):
        token_of_azure()
    monkeypatch.setenv("AZURE_TENANT_ID", "tenant")
    assert token_of_azure() == "given"
    monkeypatch.setenv("AZURE_CLIENT_SECRET", SECRET)
    assert token_of_azure() == "given"
    (path, _, workload), (_, _, application) = giver[0].asked
    assert path == "/tenant/oauth2/v2.0/token"
    assert workload["client_assertion"] == SECRET and application["client_secret"] == SECRET
    assert workload["scope"] == "https://storage.azure.com/.default"


def test_without_any_credentials_of_azure_it_says_which_to_set(
    giver: tuple[type[Giver], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(azure_account, "_MACHINE", "http://127.0.0.1:1/identity")
    with pytest.raises(StorageError, match="Set AZURE_STORAGE_KEY"):
        token_of_azure()
