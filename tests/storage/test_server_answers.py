"""An answer counts for what it says, whole; nothing of the credentials is shown or sent broken."""

from __future__ import annotations

import os

import pytest

from holdfast.errors import StorageError, UsageError
from holdfast.storage.credentials import CredentialSource
from holdfast.storage.http_client import Answer, Connections, Server
from holdfast.storage.open import normal_root
from holdfast.storage.s3 import Part, S3Bucket
from holdfast.storage.uploads import UploadSink
from holdfast.storage.wrap import Patience, RateLimit, RequestCounts
from support.servers.bucket_model import World, model_store

SECRET = "TOPSECRET"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Answer]:
    """What the server says to the next requests; the last of it to all that follow."""
    answers: list[Answer] = []

    def send(self: Connections, *_: object, **__: object) -> Answer:
        return answers.pop(0) if len(answers) > 1 else answers[0]

    monkeypatch.setattr(Connections, "send", send)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    return answers


def bucket(tries_s: float = 0.0) -> S3Bucket:
    return S3Bucket("bucket", "s3://bucket", patience=Patience(tries_s, 0.001, 0.001))


NAMESPACE = b' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
DONE = b"<CompleteMultipartUploadResult%s><Key>k</Key></CompleteMultipartUploadResult>"


@pytest.mark.promise
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" \n",
        b" " * 1000 + b"<Error><Code>InternalError</Code></Error>",
        b"<Error%s><Code>InternalError</Code></Error>" % NAMESPACE,
        b"<CompleteMultipartUploadResult><Key>k</K",
        b"<R/>",
    ],
)
def test_a_completion_that_does_not_say_that_it_is_done_is_not(
    said: list[Answer], body: bytes
) -> None:
    said.append(Answer(200, {}, body))
    found = bucket().end_upload("k", "id", [Part(1, "tag")])
    assert (found.status, found.is_done, found.is_first_try) == (0, False, False)


@pytest.mark.parametrize("space", [b"", b" \n " * 500])
@pytest.mark.parametrize("namespace", [b"", NAMESPACE])
def test_a_completion_is_done_with_white_space_before_it_and_a_namespace(
    said: list[Answer], space: bytes, namespace: bytes
) -> None:
    said.append(Answer(200, {}, space + DONE % namespace + b"\n"))
    assert bucket().end_upload("k", "id", [Part(1, "tag")]).is_done


@pytest.mark.promise
def test_an_image_of_another_size_than_was_written_is_not_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    store = model_store(world, monkeypatch)
    sink = store.create("image", 3 << 20)
    assert isinstance(sink, UploadSink)
    sink.write(0, memoryview(bytes(3 << 20)))
    for parts in world.parts.values():
        parts[2] = b"short"
    with pytest.raises(StorageError, match="finish of image"):
        sink.finish()
    sink.abort()
    assert "root/image" not in world.objects


# Credentials.


@pytest.mark.parametrize("name", ["AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID"])
def test_a_newline_after_a_credential_is_not_sent(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv(name, SECRET + "\n")
    found = CredentialSource().current()
    assert SECRET in (found.token, found.access_key)


def test_a_credential_that_cannot_be_sent_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", f"{SECRET}\nmore")
    with pytest.raises(StorageError) as raised:
        bucket(5.0).head("key")
    assert SECRET not in str(raised.value) and not raised.value.retryable


def test_a_header_that_http_forbids_is_not_quoted() -> None:
    server = Connections(Server("127.0.0.1", 1, False))
    connection = server._new()
    connection.connect = lambda: None  # type: ignore[method-assign]
    server._idle.append(connection)
    with pytest.raises(StorageError) as raised:
        server.send("GET", "/", {"x-amz-security-token": SECRET + "\n"})
    assert SECRET not in str(raised.value) and not raised.value.retryable
    assert raised.value.__suppress_context__


@pytest.mark.parametrize(
    "root",
    [
        "s3://AKIA:ab/cdSECRET@bucket/p",
        "gs://k:a/bSECRET@h/p",
        "s3://b/p?secret=SECRET",
        "s3://bkt?secret=SECRET",
        "s3://bkt/p#SECRET",
        "s3://AKIA:ab?SECRET@bucket/p",
        "gs://h/p?secret=SECRET",
    ],
)
def test_no_credentials_of_a_root_are_shown(root: str) -> None:
    with pytest.raises(UsageError) as raised:
        normal_root(root)
    assert "SECRET" not in str(raised.value) and "AKIA" not in str(raised.value)


# A forked child.


@pytest.mark.promise
def test_a_forked_child_never_takes_a_connection_of_its_parent_or_waits_for_its_locks() -> None:
    server = Connections(Server("127.0.0.1", 1, False))
    server._idle.append(server._new())
    parents = server._idle
    held = [server, RequestCounts("s3://b"), RateLimit(1.0), CredentialSource()]
    for one in held:
        one._lock.acquire()  # type: ignore[attr-defined]
    child = os.fork()
    if not child:
        is_free = all(one._lock.acquire(timeout=1) for one in held)  # type: ignore[attr-defined]
        is_apart = server._idle is not parents and not server._idle and len(parents) == 1
        os._exit(not (is_free and is_apart))
    assert os.waitpid(child, 0)[1] == 0
    assert server._idle is parents and len(parents) == 1
