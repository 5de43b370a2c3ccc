"""Secrets that travel do so by TLS, or to this machine; a signature that has ended is not used."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote

import pytest

from holdfast.errors import StorageError
from holdfast.storage.azure import AzureContainer
from holdfast.storage.azure_account import account
from holdfast.storage.bucket import Outcome
from holdfast.storage.google import GoogleBucket
from holdfast.storage.http_client import PLAIN_VARIABLE, Server, refuse_plain
from holdfast.storage.s3 import S3Bucket
from holdfast.storage.tokens import fetch_token
from holdfast.storage.wrap import Patience
from support.servers.google_shim import make_key

CANARY = "canary-c0ffee"
NOW = Patience(total_s=0.0)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [one for one in os.environ if one.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.delenv(PLAIN_VARIABLE, raising=False)


def s3(patch: pytest.MonkeyPatch, address: str, tmp_path: Path) -> None:
    patch.setenv("AWS_ENDPOINT_URL", address)
    patch.setenv("AWS_ACCESS_KEY_ID", "key")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    patch.setenv("AWS_SESSION_TOKEN", CANARY)
    S3Bucket("b", "s3://b", patience=NOW)._signed("GET", "k", {}, {}, ())


def google(patch: pytest.MonkeyPatch, address: str, tmp_path: Path) -> None:
    patch.setenv("HOLDFAST_GS_ENDPOINT", address)
    patch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(make_key(tmp_path, 1)))
    GoogleBucket("b", "gs://b", patience=NOW)


def signature(patch: pytest.MonkeyPatch, address: str, tmp_path: Path) -> None:
    patch.setenv("AZURE_STORAGE_ACCOUNT", "a")
    patch.setenv("AZURE_STORAGE_SERVICE_ENDPOINT", address)
    patch.setenv("AZURE_STORAGE_SAS_TOKEN", f"sv=2023&sig={CANARY}")
    account()


def identity(patch: pytest.MonkeyPatch, address: str, tmp_path: Path) -> None:
    patch.setenv("AZURE_STORAGE_ACCOUNT", "a")
    patch.setenv("AZURE_STORAGE_SERVICE_ENDPOINT", address)
    account()


SENDERS = (s3, google, signature, identity)


@pytest.mark.promise
@pytest.mark.parametrize("send", SENDERS)
def test_a_secret_is_sent_by_plain_http_to_this_machine_alone_unless_the_user_says_so(
    send: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert callable(send)
    with pytest.raises(StorageError, match=PLAIN_VARIABLE) as refused:
        send(monkeypatch, "http://store.example:9000", tmp_path)
    assert not refused.value.retryable and CANARY not in str(refused.value)
    for address in ("https://store.example", "http://127.0.0.1:9000", "http://localhost:9000"):
        send(monkeypatch, address, tmp_path)
    monkeypatch.setenv(PLAIN_VARIABLE, "1")
    send(monkeypatch, "http://store.example:9000", tmp_path)


@pytest.mark.parametrize("host", ["127.0.0.1.example", "10.0.0.1", "localhost.example", "0.0.0.0"])
def test_what_only_looks_like_this_machine_is_another(host: str) -> None:
    with pytest.raises(StorageError, match="plain HTTP"):
        refuse_plain(Server(host, 80, False), "A token")


def test_keys_that_sign_requests_do_not_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.example:9000")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    signed = S3Bucket("b", "s3://b", patience=NOW)._signed("GET", "k", {}, {}, ())
    assert CANARY not in signed.target + repr(signed.headers)


def test_an_identity_is_not_proved_to_a_plain_address() -> None:
    with pytest.raises(StorageError, match=PLAIN_VARIABLE):
        fetch_token("POST", "http://login.example/token", what="Azure", form={"secret": CANARY})


@pytest.mark.parametrize(("ends", "is_over"), [(-60, True), (3600, False)])
def test_a_shared_signature_that_has_ended_is_told_before_it_is_used(
    ends: int, is_over: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    moment = f"{datetime.now(UTC) + timedelta(seconds=ends):%Y-%m-%dT%H:%M:%SZ}"
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "a")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", f"sv=2023&se={quote(moment)}&sig={CANARY}")
    if is_over:
        with pytest.raises(StorageError, match=f"expired at {moment[:10]}") as refused:
            account()
        assert not refused.value.retryable and CANARY not in str(refused.value)
        return
    bucket = AzureContainer("c", "az://c", patience=NOW)
    bucket._signed("GET", "k", {}, {}, ())
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", f"sv=2023&se=whenever&sig={CANARY}")
    account()  # what it means is the server's business


def test_a_completion_that_takes_long_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    google(monkeypatch, "https://store.example", tmp_path)
    bucket = GoogleBucket("b", "gs://b", patience=Patience(total_s=20.0))
    looks, done = [Outcome(404), Outcome(200)], Outcome(200)
    monkeypatch.setattr(bucket, "_end", lambda *_: Outcome(0, "", "no answer"))
    monkeypatch.setattr(bucket, "head", lambda key: looks.pop(0))
    monkeypatch.setattr(bucket, "_name", lambda *_: done)
    monkeypatch.setattr(bucket, "delete", lambda key: done)
    assert bucket.end_upload("k", "0123456789ab:u", []) is done and not looks
