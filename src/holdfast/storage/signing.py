"""Signs requests to an S3 bucket (Signature Version 4).

A part's checksum travels in a signed header, so a server that checks it refuses bytes that changed
on the way, also where the body itself is not signed (over TLS).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import quote

from holdfast.storage.checksums import Body

UNSIGNED = "UNSIGNED-PAYLOAD"
_ALGORITHM = "AWS4-HMAC-SHA256"
_SERVICE = "s3"


@dataclass(frozen=True, slots=True)
class Credentials:
    """What requests are signed with; none of it is ever shown."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    token: str = field(default="", repr=False)

    def hidden_in(self, text: str) -> str:
        """Returns ``text`` without anything of the credentials."""
        for secret in filter(None, (self.secret_key, self.token, self.access_key)):
            text = text.replace(secret, "***")
        return text


def encoded_path(path: str) -> str:
    """Returns a path as it is sent and signed."""
    return quote(path, safe="/-_.~")


def encoded_query(query: Mapping[str, str]) -> str:
    """Returns a query as it is sent and signed: sorted, everything encoded."""
    pairs = sorted(
        (quote(key, safe="-_.~"), quote(value, safe="-_.~")) for key, value in query.items()
    )
    return "&".join(f"{key}={value}" for key, value in pairs)


def sha256(body: Body) -> str:
    """Returns the hash of a body."""
    found = hashlib.sha256()
    for piece in body:
        found.update(piece)
    return found.hexdigest()


def signed_headers(
    credentials: Credentials,
    region: str,
    time: str,
    method: str,
    path: str,
    query: str,
    headers: Mapping[str, str],
    payload: str,
) -> dict[str, str]:
    """Returns all headers of the request, signed. ``headers`` has the host; names in lower case.

    ``path``, ``query``: as they are sent. ``time``: as ``20260102T030405Z``. ``payload``: the hash
    of the body, or UNSIGNED.
    """
    all_ = {**headers, "x-amz-date": time, "x-amz-content-sha256": payload}
    if credentials.token:
        all_["x-amz-security-token"] = credentials.token
    names = sorted(all_)
    canonical = "\n".join(
        (
            method,
            path,
            query,
            *(f"{name}:{' '.join(all_[name].split())}" for name in names),
            "",
            ";".join(names),
            payload,
        )
    )
    scope = f"{time[:8]}/{region}/{_SERVICE}/aws4_request"
    hashed = hashlib.sha256(canonical.encode()).hexdigest()
    to_sign = "\n".join((_ALGORITHM, time, scope, hashed))
    key = _signing_key(credentials.secret_key, time[:8], region)
    signature = hmac.new(key, to_sign.encode(), hashlib.sha256).hexdigest()
    all_["authorization"] = (
        f"{_ALGORITHM} Credential={credentials.access_key}/{scope}, "
        f"SignedHeaders={';'.join(names)}, Signature={signature}"
    )
    return all_


@lru_cache(maxsize=8)  # it is one for a day
def _signing_key(secret: str, day: str, region: str) -> bytes:
    key = b"AWS4" + secret.encode()
    for part in (day, region, _SERVICE, "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key
