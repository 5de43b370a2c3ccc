"""A server of Google Cloud Storage's XML API for tests: strict about tokens, conditions and parts.

It answers as the documentation of that API says: a condition names a generation, an upload in parts
takes none, a part has 5 MiB or more but for the last, and its checksum is compared. Tokens are
given for the signature of a service account's key, and end after some seconds.

    python google_shim.py PORT FOLDER SECONDS
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import sys
import time
import xml.etree.ElementTree as xml
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from holdfast.storage import checksums
from holdfast.storage.bucket import Outcome
from support.servers.bucket_model import World

_LEAST_PART = 5 << 20
_CONDITION = "x-goog-if-generation-match"
ACCOUNT = "holdfast@tests.iam.gserviceaccount.com"


@dataclass
class GoogleModel(World):
    """What the server has, with a generation for each object."""

    generations: dict[str, tuple[bytes, int]] = field(default_factory=dict)

    def time_s(self) -> float:
        return time.time()

    def tag(self, key: str) -> str:
        """Returns the generation: a new one for each write."""
        data = self.objects.get(key)
        if data is None:
            return "0"
        if self.generations.get(key, (None, 0))[0] is not data:
            self.generations[key] = data, time.time_ns()
        return str(self.generations[key][1])

    def refuses(self, key: str, headers: Mapping[str, str]) -> bool:
        return _CONDITION in headers and headers[_CONDITION] != self.tag(key)

    def answer(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        data: bytes,
    ) -> Outcome:
        self.log.append((method, key))
        if method not in ("GET", "HEAD") and {"if-match", "if-none-match"} & set(headers):
            return Outcome(400, "InvalidArgument", "conditions of writes name a generation")
        if any(name.startswith("x-amz-") for name in headers):
            return Outcome(400, "InvalidArgument", "a header of another cloud")
        if not _is_right(headers, data):
            return Outcome(400, "BadDigest", "the checksum is not that of the body")
        if "compose" in query:
            return self._compose(key, headers, data)
        if {"uploadId", "uploads"} & set(query) and _CONDITION in headers:
            return Outcome(400, "NotImplemented", "an upload in parts takes no condition")
        if method == "DELETE" and "uploadId" not in query and key not in self.objects:
            return Outcome(404, "NoSuchKey")
        if method == "POST" and "delete" in query:
            return Outcome(400, "InvalidArgument")
        found = super().answer(method, key, query, headers, data)
        if found.status == 404 and found.code == "NoSuchKey" and _CONDITION in headers:
            return Outcome(412, "PreconditionFailed")
        return self._with_generation(found, key) if "uploadId" not in query else found

    def _with_generation(self, found: Outcome, key: str) -> Outcome:
        if not found.is_done or key not in self.objects:
            return found
        crc = (checksums.crc32c([self.objects[key]]) or 0).to_bytes(4, "big")
        said = {"x-goog-generation": self.tag(key), "x-goog-hash": f"crc32c={checksums.text(crc)}"}
        quoted = f'"{hashlib.md5(self.objects[key], usedforsecurity=False).hexdigest()}"'
        headers = {**(found.headers or {}), **said, "etag": quoted}
        return Outcome(found.status, headers=headers, body=found.body)

    def _compose(self, key: str, headers: Mapping[str, str], data: bytes) -> Outcome:
        if self.refuses(key, headers):
            return Outcome(412, "PreconditionFailed")
        pieces = []
        for one in xml.fromstring(data).iter("Component"):
            name = one.findtext("Name") or ""
            generation = one.findtext("Generation")
            if name not in self.objects or (generation and generation != self.tag(name)):
                return Outcome(404, "NoSuchKey")
            pieces.append(self.objects[name])
        self.keep(key, bytes(bytearray(b"".join(pieces))))
        return self._with_generation(Outcome(200, body=b"<ComposeResult/>"), key)

    def complete(self, key: str, upload: str, data: bytes) -> Outcome:
        there, listed = self.parts[key, upload], list(xml.fromstring(data).iter("Part"))
        found = [there.get(int(one.findtext("PartNumber") or 0)) for one in listed]
        tags = [(one.findtext("ETag") or "").strip('"') for one in listed]
        for part, tag in zip(found, tags, strict=True):
            if part is None or hashlib.md5(part, usedforsecurity=False).hexdigest() != tag:
                return Outcome(400, "InvalidPart")
        whole = [part for part in found if part is not None]
        if any(len(part) < _LEAST_PART for part in whole[:-1]):
            return Outcome(400, "EntityTooSmall")
        del self.parts[key, upload]
        self.keep(key, bytes(bytearray(b"".join(whole))))
        tag = "CompleteMultipartUploadResult"
        return Outcome(200, body=f"<{tag}><Key>k</Key></{tag}>".encode())


def _is_right(headers: Mapping[str, str], data: bytes) -> bool:
    for one in filter(None, headers.get("x-goog-hash", "").split(",")):
        name, _, value = one.strip().partition("=")
        crc = checksums.crc32c([data])
        if name == "crc32c" and crc is not None:
            return value == checksums.text(crc.to_bytes(4, "big"))
    md5 = headers.get("content-md5")
    return md5 is None or md5 == checksums.text(checksums.md5([data]))


# Tokens.


def make_key(folder: Path, port: int) -> Path:
    """Makes the key of a service account; returns its file."""
    private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    text = private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()
    said = {
        "type": "service_account",
        "client_email": ACCOUNT,
        "private_key_id": "tests",
        "private_key": text,
        "token_uri": f"http://127.0.0.1:{port}/token",
    }
    file = folder / "account.json"
    file.write_text(json.dumps(said))
    return file


class Tokens:
    """The tokens that were given, each until when it is valid."""

    def __init__(self, account: Path, lasts_s: float) -> None:
        self._said = json.loads(account.read_text())
        key = serialization.load_pem_private_key(self._said["private_key"].encode(), None)
        assert isinstance(key, rsa.RSAPrivateKey)
        self._key, self._lasts_s = key.public_key(), lasts_s
        self._given: dict[str, float] = {}

    def give(self, form: Mapping[str, str]) -> dict[str, object]:
        """Returns a token for a signed assertion; raises where that is not right."""
        head, claims, signature = form["assertion"].split(".")
        self._key.verify(
            _decoded(signature), f"{head}.{claims}".encode(), padding.PKCS1v15(), hashes.SHA256()
        )
        said = json.loads(_decoded(claims))
        assert said["iss"] == ACCOUNT and said["aud"] == self._said["token_uri"]
        assert said["iat"] <= time.time() + 5 and time.time() < said["exp"] <= said["iat"] + 3600
        token = f"ya29.canary-TOKEN-{secrets.token_hex(8)}"
        self._given[token] = time.monotonic() + self._lasts_s
        return {"access_token": token, "expires_in": int(self._lasts_s) + 225}

    def is_valid(self, header: str) -> bool:
        """True for the header of a request with a token that has not ended."""
        return self._given.get(header.removeprefix("Bearer "), 0) > time.monotonic()


def _decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


class Handler(BaseHTTPRequestHandler):
    """Answers one request after the other."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body by one packet
    buckets: dict[str, GoogleModel]
    tokens: Tokens

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (ConnectionError, ValueError):
            self.close_connection = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):
            return self._do
        raise AttributeError(name)

    def _do(self) -> None:
        data = self.rfile.read(int(self.headers.get("content-length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        parts = urlsplit(self.path)
        if parts.path == "/token":
            self._give(data)
            return
        if not self.tokens.is_valid(headers.get("authorization", "")):
            self._send(Outcome(401, "AuthenticationRequired", "the token is not valid"))
            return
        bucket, _, key = unquote(parts.path[1:]).partition("/")
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        if self.command == "PUT" and not key:
            self.buckets.setdefault(bucket, GoogleModel())
            self._send(Outcome(200))
            return
        model = self.buckets.get(bucket)
        if model is None:
            self._send(Outcome(404, "NoSuchBucket", "The specified bucket does not exist."))
            return
        with model.lock:
            outcome = model.answer(self.command, key, query, headers, data)
        self._send(outcome)

    def _give(self, data: bytes) -> None:
        form = {name: values[0] for name, values in parse_qs(data.decode()).items()}
        try:
            said, status = self.tokens.give(form), 200
        except Exception:
            said, status = {"error": "invalid_grant", "error_description": "canary"}, 400
        self._send(Outcome(status, body=json.dumps(said).encode()))

    def _send(self, outcome: Outcome) -> None:
        body = outcome.body
        if outcome.status >= 300 and not body:
            what = f"<Code>{outcome.code}</Code><Message>{outcome.message}</Message>"
            body = f"<?xml version='1.0'?><Error>{what}</Error>".encode()
        headers = {"content-length": str(len(body)), **(outcome.headers or {})}
        if self.command != "HEAD":
            headers["content-length"] = str(len(body))
        self.send_response(outcome.status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def version_string(self) -> str:
        return "GoogleShim"

    def log_message(self, *_: object) -> None:
        pass


def main(port: int, folder: Path, lasts_s: float) -> None:
    """Serves until it is killed."""
    Handler.buckets, Handler.tokens = {}, Tokens(folder / "account.json", lasts_s)
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
