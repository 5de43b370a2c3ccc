"""Serve a bucket that keeps nothing, as fast as the machine can: what clients are measured with.

It speaks as much of S3 and of Azure Blob Storage as an upload in parts and reads of ranges take.
Bodies that come are dropped in the kernel; a body that is asked for is sent out of a file in
memory. So what is measured is the client. Signatures and checksums are not looked at.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

BUCKET = "null"
_TAG = '"0123456789abcdef0123456789abcdef"'
_ONCE = 1 << 20


def _dropped(connection: socket.socket, size_bytes: int) -> None:
    memory = memoryview(bytearray(min(size_bytes, _ONCE)))
    while size_bytes:
        count = connection.recv_into(memory, min(size_bytes, _ONCE), socket.MSG_TRUNC)
        if not count:
            raise ConnectionError
        size_bytes -= count


def _head(connection: socket.socket) -> tuple[str, str, dict[str, str], int]:
    """Returns method, target and headers of the next request, and how much of its body came."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(1 << 16)
        if not more:
            raise ConnectionError
        data += more
    head, _, rest = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    pairs = (line.partition(":") for line in lines)
    return method, target, {name.lower(): value.strip() for name, _, value in pairs}, len(rest)


def _document(target: str, method: str) -> bytes:
    """Returns what a request of an upload is answered with."""
    if method == "POST" and "uploads" in target:
        return (
            b"<InitiateMultipartUploadResult><UploadId>u</UploadId>"
            b"<Bucket>null</Bucket><Key>k</Key></InitiateMultipartUploadResult>"
        )
    if method == "POST":
        return (
            b"<CompleteMultipartUploadResult><Location>l</Location><Bucket>null</Bucket>"
            b"<Key>k</Key><ETag>" + _TAG.encode() + b"</ETag></CompleteMultipartUploadResult>"
        )
    return b""


class _Server:
    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._file = os.memfd_create("body")
        os.truncate(self._file, size_bytes)
        for at in range(0, size_bytes, _ONCE):
            os.pwrite(self._file, b"\x5a" * min(_ONCE, size_bytes - at), at)

    def serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while True:
                self._answer(connection)
        except (ConnectionError, OSError):
            connection.close()

    def _answer(self, connection: socket.socket) -> None:
        method, target, headers, there = _head(connection)
        if headers.get("expect") == "100-continue":
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        _dropped(connection, int(headers.get("content-length") or 0) - there)
        if method in ("GET", "HEAD") and "list" not in target:
            self._send(connection, method, headers)
            return
        body = _document(target, method)
        status = "201 Created" if "comp=block" in target else "200 OK"
        self._say(connection, status, {"content-length": str(len(body))}, body)

    def _send(self, connection: socket.socket, method: str, headers: Mapping[str, str]) -> None:
        first, last, status = 0, self._size_bytes - 1, "200 OK"
        told = {"accept-ranges": "bytes"}
        if "range" in headers or "x-ms-range" in headers:
            span = headers.get("x-ms-range") or headers["range"]
            begin, _, end = span.removeprefix("bytes=").partition("-")
            first, last, status = int(begin), min(int(end or last), last), "206 Partial Content"
            told["content-range"] = f"bytes {first}-{last}/{self._size_bytes}"
        self._say(connection, status, {**told, "content-length": str(last - first + 1)})
        at = first
        while method == "GET" and at <= last:
            at += os.sendfile(connection.fileno(), self._file, at, last + 1 - at)

    @staticmethod
    def _say(
        connection: socket.socket, status: str, headers: Mapping[str, str], body: bytes = b""
    ) -> None:
        always = {
            "etag": _TAG,
            "last-modified": "Thu, 01 Jan 2026 00:00:00 GMT",
            "date": "Thu, 01 Jan 2026 00:00:00 GMT",
            "x-ms-version": "2024-08-04",
            "x-ms-blob-type": "BlockBlob",
            "content-type": "application/octet-stream",
        }
        lines = [f"{name}: {value}" for name, value in {**always, **headers}.items()]
        connection.sendall("\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode() + body)


def _run(pipe: Any, size_bytes: int) -> None:
    server = _Server(size_bytes)
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    pipe.send(listener.getsockname()[1])
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=server.serve, args=(connection,), daemon=True).start()


@contextmanager
def serving_nothing(size_bytes: int) -> Iterator[dict[str, str]]:
    """Starts one whose every object has ``size_bytes``; yields what a client of S3 needs."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, size_bytes), daemon=True)
    process.start()
    try:
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ours.recv()}",
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_REGION": "us-east-1",
        }
    finally:
        process.kill()
        process.join()
