"""Messages about the caches of several hosts, each of which has the images of its own ranks."""

from __future__ import annotations

import zlib

from holdfast.errors import FormatError
from holdfast.format.manifest import MAX_DOCUMENT_BYTES, Manifest, seal, unseal
from holdfast.protocol.facts import ToCoordinator, ToFollower


def deflate_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest for a message: it names the images of all ranks, and goes to all hosts."""
    return zlib.compress(seal(manifest), 1)


def inflate_manifest(deflated: bytes, host: str) -> Manifest:
    """Decode a manifest that ``host`` sent. Raises FormatError if it is invalid."""
    inflating = zlib.decompressobj()
    try:
        data = inflating.decompress(deflated, MAX_DOCUMENT_BYTES)
    except zlib.error as error:
        raise FormatError(f"the manifest that {host} sent makes no sense: {error}") from None
    return unseal(Manifest, data, f"the manifest that {host} sent")


# ── coordinator to follower ──────────────────────────────────────────────────────────────────────


class PublishCached(ToFollower, frozen=True, kw_only=True):
    """Orders the manifest of an attempt, whose images all hosts' caches have, to be published in
    this host's cache; answered by ``WriteEnded``.
    """

    directory: str
    manifest: bytes
    """See ``deflate_manifest``, here and below."""
    record: bytes
    """Record of the attempt's incarnation."""


class DrainImages(ToFollower, frozen=True, kw_only=True):
    """Orders the images of a checkpoint that this host's cache has to be copied to the root:
    answered by one ``ImageWritten`` for each, and by ``WriteEnded``.
    """

    directory: str
    """Names this try; no directory of a store."""
    manifest: bytes


class MarkDrained(ToFollower, frozen=True, kw_only=True):
    """Tells that the root has published these checkpoints: (incarnation, step, attempt)."""

    drained: tuple[tuple[int, int, str], ...]


class TellCached(ToFollower, frozen=True, kw_only=True):
    """Asks for the documents of checkpoints that this host's cache has: (incarnation, step)."""

    generations: tuple[tuple[int, int], ...]


class FillCache(ToFollower, frozen=True, kw_only=True):
    """Orders the images of these ranks to be copied from the root: they were restored from it."""

    generation: tuple[int, int]
    ranks: tuple[int, ...]


# ── follower to coordinator ──────────────────────────────────────────────────────────────────────


class CacheFound(ToCoordinator, frozen=True, kw_only=True):
    """Checkpoints that this host's cache has, and the root had not yet: (incarnation, step,
    attempt).
    """

    waiting: tuple[tuple[int, int, str], ...]


class CacheDocuments(ToCoordinator, frozen=True, kw_only=True):
    """The documents of a checkpoint that ``TellCached`` asked for."""

    manifest: bytes
    record: bytes
    layout: bytes


CacheOrder = PublishCached | DrainImages | MarkDrained | TellCached | FillCache
CacheReport = CacheFound | CacheDocuments
