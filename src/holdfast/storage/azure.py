"""Speaks to a container of Azure Blob Storage: blobs, and blocks that a list makes one blob.

An upload has no name of its own there: its parts are the uncommitted blocks of a blob. A block's
name says its number and its checksum, by which an upload that was broken off is compared.
"""

from __future__ import annotations

import base64
import binascii
import math
import xml.etree.ElementTree as xml
from collections.abc import Iterable, Iterator, Mapping

from msgspec.structs import replace

from holdfast.errors import StorageError
from holdfast.storage import checksums
from holdfast.storage.azure_account import account
from holdfast.storage.bucket import SETTLE_S, Bucket, Outcome, Part, Signed, Upload
from holdfast.storage.checksums import Body
from holdfast.storage.http_client import Answer
from holdfast.storage.listings import (
    age_s,
    decoded_percent,
    escaped,
    next_marker,
    parsed,
    tag_of,
    text_of,
)
from holdfast.storage.signing import encoded_path
from holdfast.storage.tokens import LEAST_SETTLE_S
from holdfast.storage.wrap import Patience

_RIGHT = "Give this identity or signature the right to do that on this container"
_ADVICE = {
    "ContainerNotFound": "Make the container, or correct its name or AZURE_STORAGE_ACCOUNT.",
    "ContainerBeingDeleted": "It is being deleted: use another.",
    "AuthenticationFailed": "Correct the account's key or renew the signature; also look at this "
    "machine's clock.",
    "InvalidAuthenticationInfo": "Correct or renew the credentials.",
    "AuthorizationPermissionMismatch": f"{_RIGHT} (Storage Blob Data Contributor).",
    "AuthorizationFailure": f"{_RIGHT}, and look whether the key is right and the account's "
    "firewall lets this host in.",
    "AccountIsDisabled": "Look at the account: it is disabled.",
    "BlobImmutableDueToPolicy": "Take the policy of immutability off this container.",
    "401": "Correct or renew the credentials.",
    "403": f"{_RIGHT}.",
}
#: Answers of 409 that do not change by another try.
_FINAL = frozenset(
    {
        "BlobImmutableDueToPolicy",
        "ContainerBeingDeleted",
        "SnapshotsPresent",
        "InvalidBlobType",
        "AccountIsDisabled",
    }
)
#: What 412 says of a condition, and not of a lease on the blob; "": a head has none.
_CONDITIONS = frozenset({"", "ConditionNotMet", "TargetConditionNotMet"})
_CRC64, _MD5 = "x-ms-content-crc64", "content-md5"
_KINDS = {_CRC64: b"c64 ", _MD5: b"md5 "}
#: All uncommitted blocks of a blob are one upload.
_UPLOAD = "blocks"


class AzureContainer(Bucket):
    """One container of the account of the environment."""

    advice = _ADVICE

    def __init__(
        self, name: str, url: str, *, patience: Patience | None = None, answer_s: float = 60.0
    ) -> None:
        self._account = account()
        server = self._account.server
        super().__init__(name, url, server, patience=patience, answer_s=answer_s)
        self.settle_s = SETTLE_S if self._account.is_timed else LEAST_SETTLE_S
        self.reach_advice = (
            f"look whether AZURE_STORAGE_ACCOUNT is right, and {self.server} can be reached"
        )
        self._has_crc64 = server.host.endswith(
            (".core.windows.net", ".core.chinacloudapi.cn", ".core.usgovcloudapi.net")
        )

    def _signed(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        body: Body,
    ) -> Signed:
        found = self._account
        path = encoded_path(f"{found.before}/{self.name}" + (f"/{key}" if key else ""))
        size_bytes = sum(len(piece) for piece in body)
        sent = {"content-length": str(size_bytes)} if size_bytes or method == "PUT" else {}
        target, signed = found.signed(method, path, query, {**headers, **sent})
        if found.tokens is not None:
            self.settle_s = found.tokens.settle_s
        return Signed(target, {"host": self.server, **signed}, found.hidden_in)

    def _is_expired(self, outcome: Outcome) -> bool:
        return outcome.status == 401

    def _renew_credentials(self) -> None:
        if self._account.tokens is not None:
            self._account.tokens.forget()

    def _outcome(self, kind: str, answer: Answer) -> Outcome:
        status, code, message = answer.status, "", ""
        if status >= 300:
            code = answer.headers.get("x-ms-error-code", "")
            message = _message(answer.body)
            if code == "BlobAlreadyExists":
                status = 412
            elif code in _FINAL or (status == 412 and code not in _CONDITIONS):
                status = 400
        return Outcome(status, code, message, answer.headers, answer.body, answer.size_bytes)

    def checksum(self, body: Body) -> tuple[str, str]:
        found = checksums.crc64nvme(body) if self._has_crc64 else None
        if found is not None:
            return _CRC64, checksums.text(found.to_bytes(8, "little"))
        return _MD5, checksums.text(checksums.md5(body))

    def put(self, key: str, body: Body, *, if_none: bool = False, if_match: str = "") -> Outcome:
        headers = self._condition(if_none=if_none, if_match=if_match)
        headers |= {"x-ms-blob-type": "BlockBlob", **dict([self.checksum(body)])}
        return self.send("PUT", key, headers=headers, body=body)

    # Lists.

    def keys(self, prefix: str) -> Iterator[str]:
        for page in self._pages({"prefix": prefix}):
            yield from (_name(one) for one in page.iter("Blob"))

    def tagged_names(self, prefix: str, end: str = "/") -> Iterator[tuple[str, str]]:
        for page in self._pages({"prefix": prefix, "delimiter": end}):
            for one in page.iter("Blob"):
                properties = one.find("Properties")
                tag = "" if properties is None else tag_of(properties, "Etag", "Content-Length")
                yield _name(one)[len(prefix) :].rstrip("/"), tag
            for one in page.iter("BlobPrefix"):
                yield _name(one)[len(prefix) :].removesuffix(end), ""

    def youngest_s(self, prefix: str) -> float:
        found = math.inf
        for page, answer in self._answers({"prefix": prefix}):
            for one in page.iter("Last-Modified"):
                found = min(found, age_s(one.text or "", answer.header("date")))
        return found

    def _pages(self, asked: Mapping[str, str]) -> Iterator[xml.Element]:
        return (page for page, _ in self._answers(asked))

    def _answers(self, asked: Mapping[str, str]) -> Iterator[tuple[xml.Element, Outcome]]:
        query = {"restype": "container", "comp": "list", **asked}
        while True:
            outcome = self.send("GET", "", query=query)
            self.require(outcome, "list", asked["prefix"])
            page = _parsed(outcome.body, "EnumerationResults")
            yield page, outcome
            marker = next_marker(page, query.get("marker", ""))
            if not marker:
                return
            query = {**query, "marker": marker}

    # Uploads in parts.

    def begin_upload(self, key: str) -> str:
        return _UPLOAD

    def put_part(
        self, key: str, upload: str, number: int, body: Body, checksum: tuple[str, str]
    ) -> Outcome:
        block = _block(number, checksum)
        query = {"comp": "block", "blockid": block}
        outcome = self.send("PUT", key, query=query, headers=dict([checksum]), body=body)
        return replace(outcome, headers={**(outcome.headers or {}), "etag": block})

    def end_upload(
        self, key: str, upload: str, parts: Iterable[Part], *, if_match: str = ""
    ) -> Outcome:
        parts = list(parts)
        condition = self._condition(if_none=not if_match, if_match=if_match)
        outcome = self._commit(key, parts, condition)
        if outcome.is_done or (outcome.is_first_try and outcome.status):
            return outcome
        # Blobs of one name share what is not committed: whose it is tell the names of the blocks.
        found = self.send("GET", key, query={"comp": "blocklist", "blocklisttype": "committed"})
        if not found.is_done or (if_match and found.header("etag") == if_match):
            return outcome
        blocks = _parsed(found.body, "BlockList").iter("Block")
        names = [text_of(block, "Name") for block in blocks]
        if not names:
            return outcome
        is_ours = names == [part.etag for part in parts]
        return replace(outcome, status=201 if is_ours else 412, is_first_try=True)

    def _commit(self, key: str, parts: Iterable[Part], condition: Mapping[str, str]) -> Outcome:
        listed = "".join(f"<Uncommitted>{escaped(part.etag)}</Uncommitted>" for part in parts)
        body = [f"<BlockList>{listed}</BlockList>".encode()]
        headers = {**condition, "content-type": "text/xml", _MD5: self._md5(body)}
        return self.send("PUT", key, query={"comp": "blocklist"}, headers=headers, body=body)

    def _md5(self, body: Body) -> str:
        return checksums.text(checksums.md5(body))

    def abort_upload(self, key: str, upload: str) -> Outcome:
        """Removes the blocks of a blob that has none committed, by committing none of them: what
        was committed before stays, and its other blocks end by themselves after a week.
        """
        if not any(one.key == key for one in self.uploads(key)):
            return Outcome(204)
        made = self._commit(key, [], {"if-none-match": "*"})
        if not made.is_done:
            return replace(made, status=204) if made.status == 412 else made
        gone = self.send("DELETE", key, headers={"if-match": made.header("etag")})
        return replace(gone, status=204) if gone.status in (404, 412) else gone

    def uploads(self, prefix: str) -> list[Upload]:
        found = []
        for page in self._pages({"prefix": prefix, "include": "uncommittedblobs"}):
            for blob in page.iter("Blob"):
                if self._is_uncommitted(blob):
                    found.append(Upload(_name(blob), _UPLOAD))
        return found

    def _is_uncommitted(self, blob: xml.Element) -> bool:
        properties = blob.find("Properties")
        if properties is None or not text_of(properties, "Etag"):
            return True
        if text_of(properties, "Content-Length") not in ("", "0"):
            return False
        found = self.head(_name(blob))  # the emulator gives these a tag, too
        if not found.is_absent:
            self.require(found, "look-up", _name(blob))
        return found.is_absent

    def is_begun(self, upload: Upload) -> bool:
        return bool(self.parts(upload))

    def parts(self, upload: Upload) -> list[Part]:
        query = {"comp": "blocklist", "blocklisttype": "uncommitted"}
        outcome = self.send("GET", upload.key, query=query)
        if outcome.is_absent:
            return []
        self.require(outcome, "list", upload.key)
        page = _parsed(outcome.body, "BlockList")
        blocks = [
            block for above in page.iter("UncommittedBlocks") for block in above.iter("Block")
        ]
        return [part for part in map(_part, blocks) if part is not None]


def _parsed(body: bytes, root: str = "") -> xml.Element:
    return parsed(body.removeprefix(b"\xef\xbb\xbf"), root)


def _message(body: bytes) -> str:
    """Returns the first line of an error's message: the others name the request."""
    try:
        return text_of(_parsed(body), "Message").partition("\n")[0].strip(" .\r")
    except StorageError:  # no answer of Azure's
        return ""


def _name(blob: xml.Element) -> str:
    found = blob.find("Name")
    if found is not None and found.get("Encoded") == "true":
        return decoded_percent(found.text or "")
    return text_of(blob, "Name")


def _block(number: int, checksum: tuple[str, str]) -> str:
    """Returns the name of a block: all have one length, as those of one blob must."""
    digest = base64.b64decode(checksum[1]).ljust(16, b"\0")
    return base64.b64encode(number.to_bytes(4, "big") + _KINDS[checksum[0]] + digest).decode()


def _part(block: xml.Element) -> Part | None:
    """Returns what a block's name says; None for a block that is not ours."""
    name = text_of(block, "Name")
    try:
        said = base64.b64decode(name, validate=True)
    except binascii.Error:
        return None
    header = {kind: one for one, kind in _KINDS.items()}.get(said[4:8])
    if header is None or len(said) != 24:
        return None
    digest = said[8:16] if header == _CRC64 else said[8:]
    size_bytes = int(text_of(block, "Size") or 0)
    return Part(int.from_bytes(said[:4], "big"), name, size_bytes, (header, checksums.text(digest)))
