"""Finds the credentials, region and address of a bucket by its cloud's usual means.

Those in the environment are used as they are; files, profiles, instance roles and tokens that
expire are botocore's business (the extra ``holdfast[cloud]``), which renews what it gave.
"""

from __future__ import annotations

import importlib
import os
import re
import threading
from typing import Any
from urllib.parse import urlsplit

from holdfast.errors import StorageError, UsageError
from holdfast.storage.http_client import Server
from holdfast.storage.signing import Credentials
from holdfast.storage.wrap import renew_in_child

_DEFAULT_REGION = "us-east-1"
_CAN_BE_SENT = re.compile("[!-~]*").fullmatch
EXTRA = "pip install 'holdfast[cloud]'"


class CredentialSource:
    """Gives the credentials of this moment. Safe from several threads, and after a fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._provider: Any = None
        renew_in_child(self)

    def in_child(self) -> None:
        """Looks them up anew: the lock may be held by a thread that is not here."""
        self._lock, self._provider = threading.Lock(), None

    def current(self) -> Credentials:
        """Returns credentials that are valid now. StorageError where there are none."""
        if found := _from_environment():
            return found
        with self._lock:
            if self._provider is None:
                self._provider = _botocore_credentials()
            try:
                frozen = self._provider.get_frozen_credentials()
            except Exception as error:  # of many kinds; their texts may quote an answer
                raise StorageError(
                    f"the credentials for object stores could not be renewed "
                    f"({type(error).__name__}). Look at the profile or the role of this machine."
                ) from None
        return _checked(frozen.access_key, frozen.secret_key, frozen.token or "")

    def forget(self) -> None:
        """Has the credentials looked up anew: the server says that these have expired."""
        with self._lock:
            self._provider = None


def _from_environment() -> Credentials | None:
    key, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    if not key or not secret:
        return None
    return _checked(key, secret, os.environ.get("AWS_SESSION_TOKEN", ""))


def _checked(*found: str) -> Credentials:
    """Returns credentials without white space around them; StorageError where one can't be sent."""
    stripped = [one.strip() for one in found]
    if not all(map(_CAN_BE_SENT, stripped)):
        error = StorageError(
            "the credentials for object stores have a character in them that none has: white "
            "space, a line's end or a letter beyond ASCII. Set them anew."
        )
        error.retryable = False
        raise error
    return Credentials(*stripped)


def _botocore() -> Any:
    try:
        return importlib.import_module("botocore.session").get_session()
    except ImportError:
        error = StorageError(
            "the environment has no AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and profiles and "
            f"roles need botocore: set both, or install it: {EXTRA}"
        )
        error.retryable = False
        raise error from None


def _botocore_credentials() -> Any:
    try:
        found = _botocore().get_credentials()
    except StorageError:
        raise
    except Exception as error:
        raise StorageError(f"no credentials for object stores: {type(error).__name__}") from None
    if found is None:
        none = StorageError(
            "no credentials for object stores: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
            "give this machine a profile (~/.aws) or a role that may use the bucket"
        )
        none.retryable = False
        raise none
    return found


def region() -> str:
    """Returns the region of the environment or the profile."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        if found := os.environ.get(name):
            return found
    if _from_environment() is None or os.environ.get("AWS_PROFILE"):
        try:
            return _botocore().get_config_variable("region") or _DEFAULT_REGION
        except Exception:  # no botocore, or no such profile: told when credentials are needed
            return _DEFAULT_REGION
    return _DEFAULT_REGION


def server_of(bucket: str, region: str) -> tuple[Server, str]:
    """Returns the address of a bucket's server, and what stands before each key in a path."""
    text = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if text:
        return server_named(text, "AWS_ENDPOINT_URL"), f"/{bucket}/"
    suffix = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    if "." in bucket:  # no certificate has a name with more dots
        return Server(f"s3.{region}.{suffix}", 443, True), f"/{bucket}/"
    return Server(f"{bucket}.s3.{region}.{suffix}", 443, True), "/"


def server_named(url: str, variable: str) -> Server:
    """Returns the address that a variable of the environment gives as a URL."""
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise UsageError(f"{variable} has credentials in it: take them out of the URL")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise UsageError(f"{variable} is not of the form https://host or https://host:port")
    is_secure = parts.scheme == "https"
    return Server(parts.hostname, parts.port or (443 if is_secure else 80), is_secure)
