"""Finds the account of ``az://`` roots and signs its requests, by Azure's usual means.

The environment says the account and one of: a connection string, a shared access signature, the
account's key, an identity (of a workload, of an application, or of the machine), in this order.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from holdfast.errors import StorageError, UsageError
from holdfast.storage.http_client import Server, refuse_plain
from holdfast.storage.signing import encoded_query
from holdfast.storage.tokens import (
    Token,
    TokenSource,
    fetch_machine_token,
    fetch_token,
    no_token,
)

VERSION = "2023-11-03"
_RESOURCE = "https://storage.azure.com/"
_MACHINE = "http://169.254.169.254/metadata/identity/oauth2/token"
_LOGIN = "https://login.microsoftonline.com"
_ASSERTION = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
#: What of a request is signed beside its x-ms- headers, in this order.
_SIGNED = (
    "content-encoding",
    "content-language",
    "content-length",
    "content-md5",
    "content-type",
    "date",
    "if-modified-since",
    "if-match",
    "if-none-match",
    "if-unmodified-since",
    "range",
)


@dataclass(frozen=True, slots=True)
class AzureAccount:
    """An account and its credentials, of which one is there; none is ever shown."""

    name: str
    server: Server
    before: str = ""
    """What stands before the container in a path: the account's name for an emulator."""
    key: bytes = field(default=b"", repr=False)
    signature: str = field(default="", repr=False)
    """A shared access signature, as it stands in a query."""
    tokens: TokenSource | None = None

    @property
    def is_timed(self) -> bool:
        """True where a server refuses requests of ours that are older than a quarter of an hour."""
        return bool(self.key)

    def hidden_in(self, text: str) -> str:
        """Returns ``text`` without anything of the credentials."""
        secrets = [base64.b64encode(self.key).decode(), self.signature]
        for name, value in parse_qsl(self.signature):
            if name == "sig":
                encoded = urlencode({"": value})[1:]
                secrets += [value, value.replace(" ", "+"), encoded, _lower(encoded)]
        for secret in filter(None, secrets):
            text = text.replace(secret, "***")
        return text

    def require_valid(self) -> None:
        """Raises StorageError for a shared access signature that has ended, by this clock."""
        ends = next((value for name, value in parse_qsl(self.signature) if name == "se"), "")
        try:
            end = datetime.fromisoformat(ends)
        except ValueError:  # the server decides
            return
        end = end if end.tzinfo else end.replace(tzinfo=UTC)
        if end <= datetime.now(UTC):
            raise _refused(
                f"the shared access signature expired at {end:%Y-%m-%d %H:%M:%S} UTC: set "
                "AZURE_STORAGE_SAS_TOKEN, or the connection string that it is in, anew"
            )

    def signed(
        self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]
    ) -> tuple[str, dict[str, str]]:
        """Returns the target of a request, and all its headers. ``path``: encoded; ``headers`` has
        the length of the body, names in lower case.
        """
        date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())
        all_ = {**headers, "x-ms-version": VERSION, "x-ms-date": date}
        asked = encoded_query(query)
        if self.key:
            all_["authorization"] = self._shared_key(method, path, query, all_)
        elif self.signature:
            self.require_valid()
            asked = f"{asked}&{self.signature}" if asked else self.signature
        elif self.tokens is not None:
            all_["authorization"] = f"Bearer {self.tokens.current().text}"
        return (f"{path}?{asked}" if asked else path), all_

    def _shared_key(
        self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]
    ) -> str:
        signed = {**headers}
        if signed.get("content-length") == "0":
            signed["content-length"] = ""
        own = sorted(name for name in headers if name.startswith("x-ms-"))
        lines = [method, *(signed.get(name, "") for name in _SIGNED)]
        lines += [f"{name}:{headers[name]}" for name in own]
        lines.append(f"/{self.name}{path}")
        lines += [f"{name}:{query[name]}" for name in sorted(query)]
        found = hmac.new(self.key, "\n".join(lines).encode(), hashlib.sha256).digest()
        return f"SharedKey {self.name}:{base64.b64encode(found).decode()}"


def _lower(encoded: str) -> str:
    """Returns a text with its percent codes in lower case."""
    return re.sub("%[0-9A-F]{2}", lambda found: found[0].lower(), encoded)


def account() -> AzureAccount:
    """Returns the account of the environment. UsageError where it names none."""
    said = _connection_string()
    name = said.get("AccountName") or _setting("AZURE_STORAGE_ACCOUNT")
    endpoint = said.get("BlobEndpoint") or _setting("AZURE_STORAGE_SERVICE_ENDPOINT")
    if not name and endpoint:
        name = (urlsplit(endpoint).hostname or "").partition(".")[0]
    if not name:
        raise UsageError(
            "an az:// root needs its account: set AZURE_STORAGE_ACCOUNT, or "
            "AZURE_STORAGE_CONNECTION_STRING"
        )
    if not endpoint:
        suffix = said.get("EndpointSuffix", "core.windows.net")
        endpoint = f"{said.get('DefaultEndpointsProtocol', 'https')}://{name}.blob.{suffix}"
    server, before = _server(endpoint)
    signature = said.get("SharedAccessSignature") or (
        "" if said else _setting("AZURE_STORAGE_SAS_TOKEN")
    )
    if signature:
        refuse_plain(server, "A shared access signature")
        found = AzureAccount(name, server, before, signature=_printable(signature).lstrip("?&"))
        found.require_valid()
        return found
    key = said.get("AccountKey") or ("" if said else _setting("AZURE_STORAGE_KEY"))
    if key:
        return AzureAccount(name, server, before, key=_key(key))
    refuse_plain(server, "The token of an identity")
    return AzureAccount(name, server, before, tokens=TokenSource(_token))


def _setting(name: str) -> str:
    return os.environ.get(name, "").strip()


def _connection_string() -> dict[str, str]:
    text = _setting("AZURE_STORAGE_CONNECTION_STRING")
    pairs = (one.partition("=") for one in text.split(";") if one.strip())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _printable(text: str) -> str:
    if any(not "!" <= letter <= "~" for letter in text):
        raise _refused("AZURE_STORAGE_SAS_TOKEN has a character in it that none has: set it anew")
    return text


def _key(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise _refused("the key of the account is no base64: set AZURE_STORAGE_KEY anew") from None


def _refused(text: str) -> StorageError:
    error = StorageError(text)
    error.retryable = False
    return error


def _server(endpoint: str) -> tuple[Server, str]:
    parts = urlsplit(endpoint)
    if parts.username or parts.password or parts.query:
        raise UsageError("the endpoint of the account has credentials in it: take them out")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError("the endpoint of the account is not of the form https://host")
    is_secure = parts.scheme == "https"
    port = parts.port or (443 if is_secure else 80)
    return Server(parts.hostname, port, is_secure), unquote(parts.path).rstrip("/")


# Identities.


def _token() -> Token:
    client, tenant = _setting("AZURE_CLIENT_ID"), _setting("AZURE_TENANT_ID")
    form = {"client_id": client, "scope": f"{_RESOURCE}.default"}
    form["grant_type"] = "client_credentials"
    if secret := _setting("AZURE_CLIENT_SECRET"):
        return _application_token(tenant, {**form, "client_secret": secret})
    if file := _setting("AZURE_FEDERATED_TOKEN_FILE"):
        try:  # read each time: it is renewed by others
            assertion = Path(file).read_text().strip()
        except OSError as error:
            raise no_token("the workload's identity", f"{file}: {error.strerror}") from None
        form |= {"client_assertion_type": _ASSERTION, "client_assertion": assertion}
        return _application_token(tenant, form)
    query = {"api-version": "2018-02-01", "resource": _RESOURCE}
    query |= {"client_id": client} if client else {}
    return fetch_machine_token(
        f"{_MACHINE}?{encoded_query(query)}",
        what="the machine's managed identity",
        headers={"metadata": "true"},
        advice=(
            "Set AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CONNECTION_STRING, "
            "or give this machine an identity that may use the container."
        ),
    )


def _application_token(tenant: str, form: Mapping[str, str]) -> Token:
    if not tenant or not form["client_id"]:
        raise no_token("Azure", "AZURE_TENANT_ID and AZURE_CLIENT_ID are not both set")
    login = (_setting("AZURE_AUTHORITY_HOST") or _LOGIN).rstrip("/")
    return fetch_token("POST", f"{login}/{tenant}/oauth2/v2.0/token", what="Azure", form=form)
