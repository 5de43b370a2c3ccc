"""Selects the client of a cloud by the URL's scheme, s3, gs or az: a new cloud is added here."""

from __future__ import annotations

from holdfast.storage.bucket import Bucket
from holdfast.storage.wrap import Patience


def open_bucket(name: str, url: str, *, patience: Patience | None, answer_s: float) -> Bucket:
    """Returns the client of the bucket ``name``, which is in ``url``."""
    if url.startswith("gs://"):
        from holdfast.storage.google import GoogleBucket

        return GoogleBucket(name, url, patience=patience, answer_s=answer_s)
    if url.startswith("az://"):
        from holdfast.storage.azure import AzureContainer

        return AzureContainer(name, url, patience=patience, answer_s=answer_s)
    from holdfast.storage.s3 import S3Bucket

    return S3Bucket(name, url, patience=patience, answer_s=answer_s)
