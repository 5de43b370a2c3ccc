"""Serve a bucket out of memory over HTTP, as S3 does, for benchmarks: it keeps nothing on a disk.

What a client is refused by S3 is refused here, too: a taken name, a stale tag. Signatures are not
looked at. Every request is noted.
"""

from __future__ import annotations

import bisect
import hashlib
import multiprocessing
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bench"
_PAGE = 1000
_KINDS = "list-type", "uploads", "uploadId", "delete"


class _Objects:
    """The objects of a bucket, and the requests for them."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.keys: list[str] = []
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}
        self.log: list[tuple[str, str]] = []
        self.lock = threading.RLock()

    def put(self, key: str, data: bytes) -> None:
        if key not in self.data:
            bisect.insort(self.keys, key)
        self.data[key] = data

    def remove(self, key: str) -> None:
        if self.data.pop(key, None) is not None:
            del self.keys[bisect.bisect_left(self.keys, key)]

    def tag(self, key: str) -> str:
        return '"' + hashlib.md5(self.data[key], usedforsecurity=False).hexdigest() + '"'

    def page(self, prefix: str, delimiter: str, after: str) -> tuple[str, str]:
        """Returns the elements of one page of a list, and where the next begins."""
        found: list[str] = []
        count = 0
        at = bisect.bisect_left(self.keys, max(prefix, after))
        while at < len(self.keys) and (key := self.keys[at]).startswith(prefix):
            if count == _PAGE:
                return "".join(found), key
            count += 1
            name, slash, _ = key[len(prefix) :].partition(delimiter or "\0")
            if slash:
                above = prefix + name + slash
                found.append(f"<CommonPrefixes><Prefix>{quote(above)}</Prefix></CommonPrefixes>")
                at = bisect.bisect_left(self.keys, above + "\U0010ffff")
                continue
            found.append(
                f"<Contents><Key>{quote(key)}</Key><ETag>{escape(self.tag(key))}</ETag>"
                f"<Size>{len(self.data[key])}</Size>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            )
            at += 1
        return "".join(found), ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: _Objects
    wbufsize = 1 << 16
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        pass

    def _handle(self) -> None:
        split = urlsplit(self.path)
        query = dict(parse_qsl(split.query, keep_blank_values=True))
        key = unquote(split.path).partition(f"/{BUCKET}")[2].lstrip("/")
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        kind = next((name for name in _KINDS if name in query), "")
        with self.objects.lock:
            what = f"{self.command} {kind}".strip()
            self.objects.log.append((what, key or query.get("prefix", "")))
            status, data, headers = self._answer(key, query, body)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "content-length" not in headers:
            self.send_header("content-length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _handle

    def _answer(
        self, key: str, query: dict[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        there = self.objects
        if "list-type" in query:
            after = query.get("continuation-token", "")
            listed, rest = there.page(query.get("prefix", ""), query.get("delimiter", ""), after)
            more = f"<NextContinuationToken>{escape(rest)}</NextContinuationToken>" if rest else ""
            cut = "true" if rest else "false"
            page = f"<ListBucketResult><IsTruncated>{cut}</IsTruncated>{more}{listed}"
            return 200, f"{page}</ListBucketResult>".encode(), {}
        if "uploads" in query or "uploadId" in query:
            return self._upload(key, query, body)
        if "delete" in query:
            for one in body.split(b"<Key>")[1:]:
                there.remove(one.split(b"</Key>")[0].decode())
            return 200, b"<DeleteResult/>", {}
        if self.command == "PUT":
            return self._put(key, body)
        if self.command == "DELETE":
            there.remove(key)
            return 204, b"", {}
        return self._content(key)

    def _put(self, key: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        there, match = self.objects, self.headers.get("if-match")
        is_taken = key in there.data and self.headers.get("if-none-match") == "*"
        if is_taken or (match and (key not in there.data or match != there.tag(key))):
            return 412, b"<Error><Code>PreconditionFailed</Code></Error>", {}
        there.put(key, body)
        return 200, b"", {"etag": there.tag(key)}

    def _content(self, key: str) -> tuple[int, bytes, dict[str, str]]:
        if key not in self.objects.data:
            return 404, b"<Error><Code>NoSuchKey</Code></Error>", {}
        data = self.objects.data[key]
        headers = {
            "etag": self.objects.tag(key),
            "last-modified": "Thu, 01 Jan 2026 00:00:00 GMT",
            "content-length": str(len(data)),
        }
        range_ = self.headers.get("range")
        if not range_ or self.command == "HEAD":
            return 200, data, headers
        first, _, last = range_.removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last) + 1 if last else None]
        if not part:
            return 416, b"<Error><Code>InvalidRange</Code></Error>", {}
        end = int(first) + len(part) - 1
        headers |= {
            "content-range": f"bytes {first}-{end}/{len(data)}",
            "content-length": str(len(part)),
        }
        return 206, part, headers

    def _upload(
        self, key: str, query: dict[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        there, id_ = self.objects, query.get("uploadId", "")
        if "uploads" in query and self.command == "POST":
            id_ = f"upload{secrets.token_hex(8)}"
            there.uploads[id_] = key, {}
            made = f"<UploadId>{id_}</UploadId>"
            return 200, _document("InitiateMultipartUploadResult", made), {}
        if "uploads" in query:
            prefix = query.get("prefix", "")
            listed = "".join(
                f"<Upload><Key>{quote(one)}</Key><UploadId>{id_}</UploadId></Upload>"
                for id_, (one, _) in there.uploads.items()
                if one.startswith(prefix)
            )
            return 200, _document("ListMultipartUploadsResult", listed), {}
        if id_ not in there.uploads:
            return 404, b"<Error><Code>NoSuchUpload</Code></Error>", {}
        parts = there.uploads[id_][1]
        if self.command == "PUT":
            parts[int(query["partNumber"])] = body
            tag = hashlib.md5(body, usedforsecurity=False).hexdigest()
            return 200, b"", {"etag": f'"{tag}"'}
        if self.command == "GET":
            return 200, _document("ListPartsResult", ""), {}
        del there.uploads[id_]
        if self.command == "DELETE":
            return 204, b"", {}
        there.put(key, b"".join(parts[number] for number in sorted(parts)))
        return 200, _document("CompleteMultipartUploadResult", ""), {}


def _document(tag: str, content: str) -> bytes:
    return f"<{tag}>{content}</{tag}>".encode()


class Server:
    """A server in a process of its own."""

    def __init__(self, process: Any, pipe: Connection, port: int) -> None:
        self._process, self._pipe, self.port = process, pipe, port

    @property
    def environment(self) -> dict[str, str]:
        """What a client of it needs."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_REGION": "us-east-1",
        }

    def load(self, directory: Path, prefix: str) -> None:
        """Takes all files below a directory into the bucket, but for locks."""
        self._ask("load", (str(directory), prefix))

    def add_foreign(self, prefix: str, count: int) -> None:
        """Adds empty objects that are none of a root's."""
        self._ask("foreign", (prefix, count))

    def remove(self, key: str) -> None:
        """Removes an object."""
        self._ask("remove", key)

    def requests(self) -> list[tuple[str, str]]:
        """Returns the requests since the last call: what kind each was, and of which key."""
        found: list[tuple[str, str]] = self._ask("requests", None)
        return found

    def _ask(self, what: str, argument: Any) -> Any:
        self._pipe.send((what, argument))
        return self._pipe.recv()

    def stop(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection) -> None:
    objects = _Objects()
    handler = type("Handler", (_Handler,), {"objects": objects})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pipe.send(server.server_address[1])
    while True:
        what, argument = pipe.recv()
        with objects.lock:
            pipe.send(_do(objects, what, argument))


def _do(objects: _Objects, what: str, argument: Any) -> Any:
    if what == "requests":
        found, objects.log = objects.log, []
        return found
    if what == "remove":
        objects.remove(argument)
    elif what == "foreign":
        prefix, count = argument
        objects.data |= {f"{prefix}{number:08d}": b"" for number in range(count)}
        objects.keys = sorted(objects.data)
    else:
        directory, prefix = argument
        for folder, _, names in os.walk(directory):
            for name in (one for one in names if not one.startswith(".")):
                path = Path(folder, name)
                key = f"{prefix}/{path.relative_to(directory).as_posix()}"
                objects.data[key] = path.read_bytes()
        objects.keys = sorted(objects.data)
    return None


@contextmanager
def serving() -> Iterator[Server]:
    """Starts a server, and ends it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    server = Server(process, ours, ours.recv())
    try:
        yield server
    finally:
        server.stop()
