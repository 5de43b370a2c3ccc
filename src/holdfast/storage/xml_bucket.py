"""Speaks the part of the S3 protocol that other clouds share: the XML of lists and of uploads."""

from __future__ import annotations

import math
import xml.etree.ElementTree as xml
from collections.abc import Iterable, Iterator, Mapping

from holdfast.errors import StorageError
from holdfast.storage.bucket import Bucket, Outcome, Part, Upload
from holdfast.storage.checksums import Body
from holdfast.storage.http_client import Answer
from holdfast.storage.listings import age_s, decoded, escaped, following_of, parsed, tag_of, text_of


class XmlBucket(Bucket):
    """A bucket whose lists and uploads have the shapes of S3."""

    def _outcome(self, kind: str, answer: Answer) -> Outcome:
        return _outcome(answer, is_completion=kind == "POST uploadId")

    def keys(self, prefix: str) -> Iterator[str]:
        for page in self._pages({"list-type": "2", "prefix": prefix, "encoding-type": "url"}):
            yield from (decoded(text_of(one, "Key")) for one in page.iter("Contents"))

    def tagged_names(self, prefix: str, end: str = "/") -> Iterator[tuple[str, str]]:
        query = {"list-type": "2", "prefix": prefix, "delimiter": end, "encoding-type": "url"}
        for page in self._pages(query):
            for one in page.iter("Contents"):
                yield decoded(text_of(one, "Key"))[len(prefix) :], tag_of(one, "ETag", "Size")
            for one in page.iter("CommonPrefixes"):
                yield decoded(text_of(one, "Prefix"))[len(prefix) :].removesuffix(end), ""

    def youngest_s(self, prefix: str) -> float:
        found = math.inf
        query = {"list-type": "2", "prefix": prefix, "encoding-type": "url"}
        for page, answer in self._answers(query):
            for one in page.iter("Contents"):
                found = min(found, age_s(text_of(one, "LastModified"), answer.header("date")))
        return found

    def _pages(self, query: dict[str, str]) -> Iterator[xml.Element]:
        return (page for page, _ in self._answers(query))

    def _answers(self, query: dict[str, str]) -> Iterator[tuple[xml.Element, Outcome]]:
        names = {"continuation-token": "NextContinuationToken"}
        return self._all_pages("", query, "ListBucketResult", names)

    def _all_pages(
        self, key: str, query: dict[str, str], root: str, names: Mapping[str, str]
    ) -> Iterator[tuple[xml.Element, Outcome]]:
        while True:
            outcome = self.send("GET", key, query=query)
            self.require(outcome, "list", key or query["prefix"])
            page = parsed(outcome.body, root)
            yield page, outcome
            following = following_of(page, query, names)
            if not following:
                return
            query = {**query, **following}

    # Uploads in parts.

    def begin_upload(self, key: str) -> str:
        return self._begin(key, {})

    def _begin(self, key: str, headers: Mapping[str, str]) -> str:
        outcome = self.send("POST", key, query={"uploads": ""}, headers=headers)
        self.require(outcome, "create", key)
        return text_of(parsed(outcome.body, "InitiateMultipartUploadResult"), "UploadId")

    def put_part(
        self, key: str, upload: str, number: int, body: Body, checksum: tuple[str, str]
    ) -> Outcome:
        query = {"partNumber": str(number), "uploadId": upload}
        return self.send("PUT", key, query=query, headers=dict([checksum]), body=body)

    def end_upload(
        self, key: str, upload: str, parts: Iterable[Part], *, if_match: str = ""
    ) -> Outcome:
        condition = self._condition(if_none=not if_match, if_match=if_match)
        return self._end(key, upload, parts, condition)

    def _end(
        self, key: str, upload: str, parts: Iterable[Part], condition: Mapping[str, str]
    ) -> Outcome:
        listed = "".join(
            f"<Part><PartNumber>{part.number}</PartNumber><ETag>{escaped(part.etag)}</ETag>"
            f"{_checksum_element(part)}</Part>"
            for part in parts
        )
        body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        headers = {**condition, "content-type": "text/xml"}
        return self.send("POST", key, query={"uploadId": upload}, headers=headers, body=[body])

    def abort_upload(self, key: str, upload: str) -> Outcome:
        return self.send("DELETE", key, query={"uploadId": upload})

    def uploads(self, prefix: str) -> list[Upload]:
        query = {"uploads": "", "prefix": prefix, "encoding-type": "url"}
        names = {"key-marker": "NextKeyMarker", "upload-id-marker": "NextUploadIdMarker"}
        found = [
            Upload(decoded(text_of(one, "Key")), text_of(one, "UploadId"))
            for page, _ in self._all_pages("", query, "ListMultipartUploadsResult", names)
            for one in page.iter("Upload")
        ]
        return [one for one in found if one.key.startswith(prefix)]

    def parts(self, upload: Upload) -> list[Part]:
        found: list[Part] = []
        query = {"uploadId": upload.id}
        while True:
            outcome = self.send("GET", upload.key, query=query)
            if outcome.status == 404:
                return []
            self.require(outcome, "list", upload.key)
            page = parsed(outcome.body, "ListPartsResult")
            found += [_part(one) for one in page.iter("Part")]
            following = following_of(page, query, {"part-number-marker": "NextPartNumberMarker"})
            if not following:
                return found
            query |= following


def _outcome(answer: Answer, *, is_completion: bool) -> Outcome:
    body, status, code, message = answer.body, answer.status, "", ""
    # A completion is answered with 200 before it is done, and its end is in the body.
    if status >= 300 or is_completion:
        try:
            found = parsed(body.strip())
        except StorageError:
            found = None
        tag = "" if found is None else found.tag
        if found is not None and tag == "Error":
            code, message = text_of(found, "Code"), text_of(found, "Message")
            status = status if status >= 300 else status_of(code)
        elif status < 300 and tag != "CompleteMultipartUploadResult":
            status, message = 0, "the answer does not say whether the upload was completed"
    return Outcome(status, code, message, answer.headers, body, answer.size_bytes)


def status_of(code: str) -> int:
    """Returns the status of an error that an answer of success has in its body."""
    known = {"PreconditionFailed": 412, "ConditionalRequestConflict": 409, "NoSuchUpload": 404}
    return known.get(code, 503 if code in _NOT_NOW else 400)


_NOT_NOW = frozenset({"InternalError", "OperationAborted", "ServiceUnavailable", "SlowDown"}) | {
    *("SlowDownRead", "SlowDownWrite", "TooManyRequests")  # MinIO's
}
_CHECKSUMS = {
    "ChecksumCRC64NVME": "x-amz-checksum-crc64nvme",
    "ChecksumCRC32": "x-amz-checksum-crc32",
}


def _part(element: xml.Element) -> Part:
    kept = ((header, text_of(element, name)) for name, header in _CHECKSUMS.items())
    checksum = next((one for one in kept if one[1]), ("", ""))
    size_bytes = int(text_of(element, "Size") or 0)
    number = int(text_of(element, "PartNumber") or 0)
    return Part(number, text_of(element, "ETag"), size_bytes, checksum)


def _checksum_element(part: Part) -> str:
    for name, header in _CHECKSUMS.items():
        if part.checksum[0] == header:
            return f"<{name}>{part.checksum[1]}</{name}>"
    return ""
