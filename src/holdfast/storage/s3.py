"""Speaks to a bucket by the S3 protocol: how requests are signed, and what else is S3's own."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import time
from collections.abc import Mapping, Sequence

from holdfast.storage import checksums
from holdfast.storage.bucket import BULK, Outcome, Signed
from holdfast.storage.checksums import Body
from holdfast.storage.credentials import CredentialSource, region, server_of
from holdfast.storage.http_client import refuse_plain
from holdfast.storage.listings import escaped, parsed, text_of
from holdfast.storage.signing import UNSIGNED, encoded_path, encoded_query, sha256, signed_headers
from holdfast.storage.wrap import Patience
from holdfast.storage.xml_bucket import XmlBucket, status_of

UNSIGNED_VARIABLE = "HOLDFAST_BUCKET_UNSIGNED"
_BULK = 1000
#: The characters that a document can have, and a server's reader leaves as they are.
_IS_TEXT = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\ud800-\udfff\ufffe\uffff]*").fullmatch
_ADVICE = {
    "NoSuchBucket": "Make the bucket, or correct its name.",
    "AccessDenied": "Give these credentials the right to do that on this bucket.",
    "InvalidAccessKeyId": "Correct the credentials.",
    "SignatureDoesNotMatch": "Correct the credentials.",
    "ExpiredToken": "Renew the credentials.",
    "PermanentRedirect": "Set AWS_REGION to the bucket's region.",
    "AuthorizationHeaderMalformed": "Set AWS_REGION to the bucket's region.",
    "RequestTimeTooSkewed": "Set this machine's clock.",
    "NotImplemented": "This server lacks what a root needs; use another.",
    "QuotaExceeded": "Free some of the quota or keep fewer checkpoints.",
    "301": "Set AWS_REGION to the bucket's region.",
    "401": "Give these credentials the right to do that on this bucket.",
    "403": "Give these credentials the right to do that on this bucket.",
}
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})


class S3Bucket(XmlBucket):
    """One bucket on Amazon S3 or a server like it."""

    advice = _ADVICE

    def __init__(
        self,
        bucket: str,
        url: str,
        *,
        patience: Patience | None = None,
        answer_s: float = 60.0,
    ) -> None:
        self._region = region()
        server, self._before = server_of(bucket, self._region)
        ca_file = os.environ.get("AWS_CA_BUNDLE", "")
        super().__init__(bucket, url, server, patience=patience, answer_s=answer_s, ca_file=ca_file)
        self._address = server
        self._credentials = CredentialSource()
        self._is_unsigned = server.is_secure or bool(os.environ.get(UNSIGNED_VARIABLE))

    def _signed(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        body: Body,
    ) -> Signed:
        credentials = self._credentials.current()
        if credentials.token:
            refuse_plain(self._address, "A session token")
        path, asked = encoded_path(self._before + key), encoded_query(query)
        payload = UNSIGNED if self._is_unsigned and any(map(len, body)) else sha256(body)
        signed = signed_headers(
            credentials,
            self._region,
            time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()),
            method,
            path,
            asked,
            {"host": self.server, **headers},
            payload,
        )
        target = f"{path}?{asked}" if asked else path
        return Signed(target, signed, credentials.hidden_in)

    def _is_expired(self, outcome: Outcome) -> bool:
        return outcome.code in _EXPIRED

    def _renew_credentials(self) -> None:
        self._credentials.forget()

    def checksum(self, body: Body) -> tuple[str, str]:
        found = checksums.crc64nvme(body)
        if found is not None:
            return "x-amz-checksum-crc64nvme", checksums.text(found.to_bytes(8, "big"))
        return "x-amz-checksum-crc32", checksums.text(checksums.crc32(body).to_bytes(4, "big"))

    def begin_upload(self, key: str) -> str:
        if checksums.crc64nvme([]) is None:
            return self._begin(key, {"x-amz-checksum-algorithm": "CRC32"})
        algorithm = {"x-amz-checksum-algorithm": "CRC64NVME"}
        return self._begin(key, algorithm | {"x-amz-checksum-type": "FULL_OBJECT"})

    def delete_many(self, keys: Sequence[str]) -> None:
        """Removes objects, a thousand by one request. While these are answered what stays is the
        fault of single objects, for as long as the patience lasts: that is not ``retryable``.

        What no XML can name, as a control character, goes by a request of its own.
        """
        stay, patience = dict[str, Outcome](), self.patience
        named = [key for key in keys if _IS_TEXT(key)]
        for start in range(0, len(named), _BULK):
            some = named[start : start + _BULK]
            for number in patience.pauses():
                if number > 1:
                    self.traffic.again("POST delete", stay[some[0]].code)
                failed = self._delete_some(some)
                if any(one.may_be_tried_again for one in failed.values()):
                    self.note_unanswered(BULK)
                stay = {key: one for key, one in stay.items() if key not in some} | failed
                some = [key for key in some if key in failed and failed[key].may_be_tried_again]
                if not some:
                    break
            else:  # the others are asked for once
                patience = Patience(total_s=0.0)
        super().delete_many([key for key in keys if not _IS_TEXT(key)])
        for key in sorted(stay, key=lambda one: stay[one].may_be_tried_again):
            error = self.failure(stay[key], "removal", key)
            error.retryable = False
            raise error

    def _delete_some(self, keys: Sequence[str]) -> dict[str, Outcome]:
        """Returns those that stay: the answer may be that of these some are to be asked for again,
        while the request itself has succeeded.
        """
        objects = "".join(f"<Object><Key>{escaped(key)}</Key></Object>" for key in keys)
        body = f"<Delete><Quiet>true</Quiet>{objects}</Delete>".encode()
        md5 = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
        query, headers = {"delete": ""}, {"content-md5": md5, "content-type": "text/xml"}
        outcome = self.send("POST", "", query=query, headers=headers, body=[body])
        self.require(outcome, "removal", keys[0])
        failed = {}
        for one in parsed(outcome.body).iter("Error"):
            code, message = text_of(one, "Code"), text_of(one, "Message")
            if code != "NoSuchKey":
                failed[text_of(one, "Key")] = Outcome(status_of(code), code, message)
        return failed

    def _advice(self, outcome: Outcome) -> str:
        right = outcome.header("x-amz-bucket-region")
        if right and right != self._region:
            return f"The bucket is in {right}: set AWS_REGION={right}."
        return super()._advice(outcome)
