"""Finds who asks for a ``gs://`` root, by Google's usual means, and gets the tokens for it.

A key of a service account or the credentials that ``gcloud`` left are in a file; a machine on
Google's cloud has an account of its own. A key signs with the package cryptography, of the extra
``holdfast[cloud]``.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

from holdfast.storage.credentials import EXTRA, server_named
from holdfast.storage.http_client import Server
from holdfast.storage.tokens import (
    Token,
    TokenSource,
    fetch_machine_token,
    fetch_token,
    no_token,
)

ENDPOINT_VARIABLE = "HOLDFAST_GS_ENDPOINT"
EMULATOR_VARIABLE = "STORAGE_EMULATOR_HOST"
_FILE_VARIABLE = "GOOGLE_APPLICATION_CREDENTIALS"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_TOKENS = "https://oauth2.googleapis.com/token"
_GRANT = "urn:ietf:params:oauth:grant-type:jwt-bearer"
_MACHINE = "/computeMetadata/v1/instance/service-accounts/default/token"
_LASTS_S = 3600


def server() -> Server:
    """Returns the address of the service, or of the emulator of the environment."""
    text = os.environ.get(ENDPOINT_VARIABLE) or os.environ.get(EMULATOR_VARIABLE)
    if not text:
        return Server("storage.googleapis.com", 443, True)
    return server_named(text if "://" in text else f"http://{text}", ENDPOINT_VARIABLE)


def token_source() -> TokenSource | None:
    """Returns what gives the tokens; None for an emulator, which is given none."""
    if os.environ.get(EMULATOR_VARIABLE) and not os.environ.get(ENDPOINT_VARIABLE):
        return None
    return TokenSource(_token)


def _token() -> Token:
    file = _file()
    if file is None:
        return _of_machine()
    found = _read(file)
    kind = found.get("type")
    try:
        if kind == "service_account":
            return _of_service_account(found)
        if kind == "authorized_user":
            form = {name: str(found[name]) for name in ("client_id", "client_secret")}
            form |= {"grant_type": "refresh_token", "refresh_token": str(found["refresh_token"])}
            return fetch_token("POST", _TOKENS, what="Google", form=form)
    except KeyError as error:
        raise no_token(str(file), f"it has no {error}") from None
    raise no_token(
        str(file),
        f"its kind, {str(kind)[:40]!r}, is not one of service_account and authorized_user",
    )


def _file() -> Path | None:
    if named := os.environ.get(_FILE_VARIABLE):
        return Path(named)
    above = os.environ.get("CLOUDSDK_CONFIG") or Path("~/.config/gcloud").expanduser()
    found = Path(above) / "application_default_credentials.json"
    return found if found.is_file() else None


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except OSError as error:
        raise no_token(str(file), str(error.strerror)) from None
    except ValueError:
        raise no_token(str(file), "it is no JSON") from None
    if not isinstance(found, dict):
        raise no_token(str(file), "it holds no credentials")
    return found


def _of_machine() -> Token:
    host = os.environ.get("GCE_METADATA_HOST") or "metadata.google.internal"
    return fetch_machine_token(
        f"http://{host}{_MACHINE}",
        what="this machine's service account",
        headers={"metadata-flavor": "Google"},
        advice=(
            f"Set {_FILE_VARIABLE} to a file of credentials, run gcloud auth application-default "
            "login, or run on a machine whose service account may use the bucket."
        ),
    )


def _of_service_account(found: dict[str, Any]) -> Token:
    asked_of = str(found.get("token_uri") or _TOKENS)
    begun_s = int(time.time())
    head = {"alg": "RS256", "typ": "JWT", "kid": found.get("private_key_id", "")}
    claims = {"iss": found["client_email"], "scope": _SCOPE, "aud": asked_of}
    claims |= {"iat": begun_s, "exp": begun_s + _LASTS_S}
    said = f"{_encoded(json.dumps(head).encode())}.{_encoded(json.dumps(claims).encode())}"
    signature = _encoded(_rs256(str(found["private_key"]), said.encode()))
    form = {"grant_type": _GRANT, "assertion": f"{said}.{signature}"}
    return fetch_token("POST", asked_of, what="Google", form=form)


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _rs256(key: str, data: bytes) -> bytes:
    try:
        hashes = importlib.import_module("cryptography.hazmat.primitives.hashes")
        padding = importlib.import_module("cryptography.hazmat.primitives.asymmetric.padding")
        load = importlib.import_module("cryptography.hazmat.primitives.serialization")
    except ImportError:
        raise no_token(
            "the service account's key",
            f"to sign with it takes the package cryptography: {EXTRA}",
        ) from None
    try:
        private = load.load_pem_private_key(key.encode(), password=None)
        return bytes(private.sign(data, padding.PKCS1v15(), hashes.SHA256()))
    except Exception as error:  # of many kinds; their texts may quote the key
        why = f"it cannot be used ({type(error).__name__})"
        raise no_token("the service account's key", why) from None
