"""An answer counts for what it says, whole; nothing of the credentials is shown or sent broken."""

from __future__ import annotations

import datetime
import ipaddress
import math
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from holdfast.errors import StorageError, UsageError
from holdfast.storage import http_client
from holdfast.storage.azure import AzureContainer
from holdfast.storage.bucket import Outcome, Part, Upload
from holdfast.storage.credentials import CredentialSource
from holdfast.storage.http_client import (
    Answer,
    Connections,
    NoAnswer,
    Server,
    send_request,
)
from holdfast.storage.open import normal_root
from holdfast.storage.s3 import S3Bucket
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


LISTS = [
    ("ListBucketResult", lambda one: list(one.keys("p")), "NextContinuationToken"),
    ("ListMultipartUploadsResult", lambda one: one.uploads("p"), "NextKeyMarker"),
    ("ListPartsResult", lambda one: one.parts(Upload("p", "id")), "NextPartNumberMarker"),
]


@pytest.mark.promise
@pytest.mark.parametrize(("tag", "asked", "marker"), LISTS)
def test_a_list_that_may_be_short_is_none(
    said: list[Answer], tag: str, asked: Callable[[S3Bucket], list[object]], marker: str
) -> None:
    cut = f"<{tag}><IsTruncated>true</IsTruncated>%s</{tag}>"
    again = f"<{marker}>5</{marker}>"
    for pages in ([f"<html>{tag}</html>"], [cut % ""], [cut % again, cut % again]):
        said[:] = [Answer(200, {}, page.encode()) for page in pages]
        with pytest.raises(StorageError, match=r"cut short|is no List"):
            asked(bucket())
    said[:] = [Answer(200, {}, page.encode()) for page in (cut % again, f"<{tag}></{tag}>")]
    assert asked(bucket()) == []


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


def test_a_header_that_http_forbids_is_not_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Connections(Server("127.0.0.1", 1, False))
    connection = server._new()
    connection.connect = lambda: None  # type: ignore[method-assign]
    monkeypatch.setattr(server, "_connect", lambda: connection)
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
    server._idle.append((server._new(), 0.0))
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


# Kept connections.

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


def asked_of_one_that_says(said: bytes, method: str = "GET") -> Answer:
    """What comes of a request to a server that says this and ends the connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def work() -> None:
        with listener.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(said)

    threading.Thread(target=work, daemon=True).start()
    try:
        server = Connections(Server("127.0.0.1", listener.getsockname()[1], False), answer_s=5.0)
        return server.send(method, "/", {"host": "x"})
    finally:
        listener.close()


@pytest.mark.promise
@pytest.mark.parametrize(
    "lengths",
    [
        "Content-Length: 5, 5",
        "Content-Length:",
        "Content-Length: +5",
        "Content-Length: 5\r\n 5",
        "Content-Length: 5\r\ncontent-length: 2",
        "Transfer-Encoding: gzip, chunked",
    ],
)
def test_a_body_whose_length_is_not_said_for_certain_is_never_whole(lengths: str) -> None:
    with pytest.raises(NoAnswer, match="HTTPException"):
        asked_of_one_that_says(b"HTTP/1.1 200 OK\r\n%s\r\n\r\nhe" % lengths.encode())


def test_no_object_is_of_a_size_that_is_no_number() -> None:
    with pytest.raises(NoAnswer, match="HTTPException"):
        asked_of_one_that_says(b"HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\n\r\n", "HEAD")
    assert asked_of_one_that_says(b"HTTP/1.1 404 None\r\n\r\n", "HEAD").status == 404


@pytest.mark.parametrize(
    "head",
    [
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\ncontent-length: 5",
        "HTTP/1.1 200 OK\r\nContent-Length:\r\n 5",
        "HTTP/1.1 200 OK\r\nX-One: a\r\n \r\n\tb\r\nContent-Length: 5",
        "HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5",
    ],
)
def test_an_unusual_head_is_read_to_its_end(head: str) -> None:
    found = asked_of_one_that_says(f"{head}\r\n\r\nhello".encode())
    assert (found.status, found.body) == (200, b"hello")
    assert found.headers["content-length"] == "5" and found.headers.get("x-one", "a b") == "a b"


def serve_each_once(ends: bool) -> tuple[int, list[int]]:
    """Answers one request on each connection, then ends it at once, or at the next request."""
    listener, asked = socket.create_server(("127.0.0.1", 0)), list[int]()

    def work() -> None:
        while True:
            connection, address = listener.accept()
            with connection:
                connection.recv(65536)
                asked.append(address[1])
                connection.sendall(OK)
                if not ends:
                    connection.recv(65536)

    threading.Thread(target=work, daemon=True).start()
    return int(listener.getsockname()[1]), asked


def test_a_connection_that_the_server_ended_is_not_used_again() -> None:
    port, asked = serve_each_once(ends=True)
    server = Connections(Server("127.0.0.1", port, False), answer_s=5.0)
    for _ in range(3):
        assert server.send("GET", "/", {"host": "x"}).status == 200
        time.sleep(0.1)
    assert len(asked) == 3


@pytest.mark.promise
def test_a_request_that_a_kept_connection_failed_is_sent_again_at_once_over_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port, asked = serve_each_once(ends=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    one = bucket(tries_s=0.0)
    assert one.put("k", [b""]).is_first_try
    found = one.put("k", [b""])
    assert found.is_done and not found.is_first_try and len(asked) == 2


@pytest.mark.promise
def test_a_request_that_a_kept_connection_failed_is_a_try_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port, asked = serve_each_once(ends=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    one, waits = bucket(tries_s=0.0), list[int]()
    monkeypatch.setattr(one._rate, "wait", waits.append)
    one.put("b/k", [b"some"])
    assert one.put("a/k", [b"others"]).is_done and len(asked) == 2
    assert waits == [4, 6, 6]  # its bytes are sent twice
    assert one.traffic.retries == {"PUT": 1}
    assert time.monotonic() - one.unanswered_s(("PUT a/",)) < 60  # the first may have come there
    assert one.unanswered_s(("PUT b/",)) == -math.inf


def test_a_body_that_is_not_taken_ends_after_one_wait() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    server = Connections(Server("127.0.0.1", listener.getsockname()[1], False), answer_s=1.0)
    begun_s = time.monotonic()
    with pytest.raises(NoAnswer, match="TimeoutError"):
        server.send("PUT", "/", {"host": "x", "content-length": str(64 << 20)}, [bytes(64 << 20)])
    assert time.monotonic() - begun_s < 1.9
    listener.close()


@pytest.mark.parametrize("code", ["RequestTimeout", "BadDigest"])
def test_what_happened_on_the_way_is_tried_again(said: list[Answer], code: str) -> None:
    body = f"<Error><Code>{code}</Code></Error>".encode()
    said += [Answer(400, {}, body), Answer(200, {})]
    assert bucket(1.0).put("k", [b""]).is_done


@pytest.mark.promise
@pytest.mark.parametrize(("status", "is_answer"), [(b"200 OK", False), (b"403 Forbidden", True)])
def test_a_body_that_was_cut_off_is_no_success(
    monkeypatch: pytest.MonkeyPatch, status: bytes, is_answer: bool
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def work() -> None:
        with listener.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 %s\r\ncontent-length: 0\r\n\r\n" % status)
            time.sleep(2)

    threading.Thread(target=work, daemon=True).start()

    def send(self: socket.socket, pieces: list[memoryview]) -> int:
        self.sendall(pieces[0])  # the head
        raise BrokenPipeError("the server has ended it")

    monkeypatch.setattr(socket.socket, "sendmsg", send)
    server = Connections(Server("127.0.0.1", listener.getsockname()[1], False), answer_s=5.0)
    headers = {"host": "x", "content-length": "4"}
    if is_answer:
        assert server.send("PUT", "/", headers, [b"body"]).status == 403
    else:
        with pytest.raises(NoAnswer, match="BrokenPipe"):
            server.send("PUT", "/", headers, [b"body"])
    listener.close()


@pytest.mark.parametrize(
    ("code", "status"), [("ConditionNotMet", 412), ("", 412), ("LeaseIdMissing", 400)]
)
def test_of_azures_412_only_that_of_a_condition_is_one(
    monkeypatch: pytest.MonkeyPatch, code: str, status: int
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "account")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sig=Ab%2Bc%2F")
    one = AzureContainer("container", "az://container")
    assert one._outcome("PUT", Answer(412, {"x-ms-error-code": code})).status == status
    assert "Ab" not in one._signed("GET", "k", {}, {}, []).hidden_in("Ab+c/ Ab%2bc%2f Ab%2Bc%2F")
    assert "Ab" not in repr(one._signed("GET", "k", {}, {}, []))


@pytest.mark.promise
@pytest.mark.parametrize(
    ("committed", "status", "is_first_try"),
    [("own", 201, True), ("another's", 412, True), ("", 0, False)],
)
def test_the_names_of_azures_blocks_tell_whose_image_came_of_a_commit_without_an_answer(
    monkeypatch: pytest.MonkeyPatch, committed: str, status: int, is_first_try: bool
) -> None:
    """Blobs of one name share what is not committed: that it is gone says nothing."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "account")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sig=a")
    names = f"<Block><Name>{committed}</Name><Size>1</Size></Block>" if committed else ""
    listed = f"<BlockList><CommittedBlocks>{names}</CommittedBlocks></BlockList>".encode()
    answers = {"PUT": Outcome(0, is_first_try=False), "GET": Outcome(200, body=listed)}
    one = AzureContainer("container", "az://container")
    monkeypatch.setattr(one, "send", lambda method, *_, **__: answers[method])
    found = one.end_upload("k", "u", [Part(1, "own", 1, ("content-md5", "x"))])
    assert (found.status, found.is_first_try) == (status, is_first_try)


class SecretLine(ssl.SSLSocket):
    """Takes what a socket by TLS is given, whose timeout is for all that one call is given."""

    def __new__(cls) -> SecretLine:
        return socket.socket.__new__(cls)

    def __init__(self) -> None:
        self.given: list[int] = []
        self.taken = bytearray()

    def gettimeout(self) -> float:
        return 0.0

    def settimeout(self, _: float | None) -> None:
        """Waits for nothing."""

    def send(self, data: memoryview, flags: int = 0) -> int:  # type: ignore[override]
        self.given.append(len(data))
        self.taken += data
        return len(data)

    def __del__(self) -> None:
        """Has no descriptor to be closed."""


def test_a_body_is_sent_in_slices_where_one_timeout_is_for_all_of_a_call() -> None:
    body, line = os.urandom((1 << 20) + 7), SecretLine()
    assert send_request(line, [body[: 1 << 20], body[1 << 20 :]]) is None
    assert line.taken == body and max(line.given) == 256 << 10


def test_by_tls_the_same_is_given_again_while_a_slow_line_takes_any_of_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class SlowLine(SecretLine):
        def send(self, data: memoryview, flags: int = 0) -> int:  # type: ignore[override]
            if len(self.given) % 2:
                self.given.append(len(data))
                raise TimeoutError
            return super().send(data)

    left = iter([0, 256 << 10])  # at each time-out: the second slice is not taken
    monkeypatch.setattr(http_client, "_unsent_bytes", lambda _: next(left))
    monkeypatch.setattr(http_client, "_is_readable", lambda *_: False)
    body, line = os.urandom(1 << 20), SlowLine()
    with pytest.raises(TimeoutError):
        send_request(line, [body])
    assert line.given == [256 << 10] * 4 and line.taken == body[: 512 << 10]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of this machine, with its key, in one file."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .sign(key, hashes.SHA256())
    )
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    path.write_bytes(text + made.public_bytes(Encoding.PEM))
    return path


Serve = Callable[[ssl.SSLSocket], None]


def answer_by_tls(certificate: Path, serve: Serve, body_bytes: int, answer_s: float) -> Answer:
    """What comes of a PUT of so many bytes, of which ``serve`` reads what it likes."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    is_over = threading.Event()

    def work() -> None:
        with (
            suppress(OSError),
            context.wrap_socket(listener.accept()[0], server_side=True) as line,
        ):
            serve(line)
            is_over.wait(30)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        server = threading.Thread(target=work)
        server.start()
        address = Server("127.0.0.1", listener.getsockname()[1], True)
        try:
            connections = Connections(address, answer_s=answer_s, ca_file=str(certificate))
            headers = {"host": "x", "content-length": str(body_bytes)}
            return connections.send("PUT", "/", headers, [bytes(body_bytes)])
        finally:
            is_over.set()
            server.join()


@pytest.mark.promise
@pytest.mark.parametrize(("size_bytes", "head"), [(64 << 20, 1), (1_500_000, 1), (64 << 20, 0)])
def test_by_tls_a_server_that_answers_and_reads_no_further_is_listened_to_at_once(
    certificate: Path, size_bytes: int, head: int
) -> None:
    """Such as one that refuses a part before it has read it: it never takes the rest."""

    def refuse(line: ssl.SSLSocket) -> None:
        line.recv(65536 * head)
        line.sendall(b"HTTP/1.1 503 Slow Down\r\ncontent-length: 4\r\n\r\nslow")

    begun_s = time.monotonic()
    answer = answer_by_tls(certificate, refuse, size_bytes, 24.0)
    assert (answer.status, answer.body) == (503, b"slow")
    assert time.monotonic() - begun_s < 5


def test_by_tls_no_success_counts_of_a_body_that_was_not_taken(certificate: Path) -> None:
    def lie(line: ssl.SSLSocket) -> None:
        line.recv(65536)
        line.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    with pytest.raises(NoAnswer, match="before it had all of the request"):
        answer_by_tls(certificate, lie, 64 << 20, 24.0)


def test_what_tls_says_for_itself_while_a_slow_line_takes_more_is_no_answer(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tickets come behind each beginning of a connection, and none of the answer is lost."""
    looks: list[bool] = []
    is_answered = http_client._SecretSocket.is_answered

    def look(self: http_client._SecretSocket) -> bool:
        looks.append(is_answered(self))
        return looks[-1]

    def take_slowly(line: ssl.SSLSocket) -> None:
        left = 3 << 20
        while left > 0:  # the head too
            left -= len(line.recv(65536))
            time.sleep(0.01)
        line.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwhole")

    monkeypatch.setattr(http_client._SecretSocket, "is_answered", look)
    answer = answer_by_tls(certificate, take_slowly, 3 << 20, 1.0)
    assert (answer.status, answer.body) == (200, b"whole")
    assert False in looks


@pytest.fixture
def plain() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A plain connection that waits for half a second, and what is at its other end."""
    ours, theirs = socket.socketpair()
    ours.settimeout(0.5)
    yield ours, theirs
    ours.close()
    theirs.close()


def test_head_and_body_arrive_whole_however_many_pieces_they_are_and_slowly_they_are_read(
    plain: tuple[socket.socket, socket.socket],
) -> None:
    connection, theirs = plain
    body = [os.urandom(one) for one in (0, 3 << 20, 1, 0, *([7] * 3000), 2 << 20)]
    wanted, found = b"head" + b"".join(body), bytearray()

    def read() -> None:
        while len(found) < len(wanted):
            found.extend(theirs.recv(100_000))

    reader = threading.Thread(target=read)
    reader.start()
    assert send_request(connection, [b"head", *body]) is None
    reader.join(30)
    assert found == wanted and connection.gettimeout() == 0.5


def test_a_line_that_takes_little_at_a_time_is_waited_for_until_it_has_taken_all(
    plain: tuple[socket.socket, socket.socket],
) -> None:
    connection, theirs = plain
    body, found = os.urandom(10 << 20), bytearray()

    def read() -> None:
        while len(found) < len(body):
            time.sleep(0.004)
            found.extend(theirs.recv(64 << 10))

    reader = threading.Thread(target=read)
    began_s = time.monotonic()
    reader.start()
    assert send_request(connection, [body]) is None
    assert time.monotonic() - began_s > 0.5 and len(found) > len(body) - (1 << 20)
    reader.join(30)
    assert found == body


@pytest.mark.parametrize("size_bytes", [2 << 20, 32 << 20])
def test_what_a_server_says_that_reads_no_further_is_listened_to(
    plain: tuple[socket.socket, socket.socket], size_bytes: int
) -> None:
    """``size_bytes``: what the system's buffer has room for, and what it has not."""
    connection, theirs = plain
    theirs.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
    assert send_request(connection, [bytes(size_bytes)]) is None or size_bytes > 2 << 20


def test_a_server_that_takes_nothing_more_is_waited_for_as_long_as_is_said_and_no_longer(
    plain: tuple[socket.socket, socket.socket],
) -> None:
    connection, theirs = plain
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        send_request(connection, [bytes(32 << 20)])
    assert 0.4 < time.monotonic() - began_s < 20
    assert connection.gettimeout() == 0.5
    theirs.close()
    assert isinstance(send_request(connection, [b"x"]), OSError)
