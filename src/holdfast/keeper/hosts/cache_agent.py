"""Serves this host's cache to the run: to a coordinator elsewhere, and to ranks that restore.

Every host drains the images of its own ranks, and publishes in its cache the manifests of all. See
docs/design/0018-tiers.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.catalogue import attempt_dir, part_dir
from holdfast.errors import HoldfastError
from holdfast.events import warn
from holdfast.format.manifest import Generation, Incarnation, seal, unseal
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.cache_tier import CacheTier
from holdfast.keeper.hosts import host_messages
from holdfast.keeper.hosts.cache_messages import (
    CacheDocuments,
    CacheFound,
    CacheOrder,
    DrainImages,
    FillCache,
    MarkDrained,
    PublishCached,
    TellCached,
    deflate_manifest,
    inflate_manifest,
)
from holdfast.keeper.jobs import Background
from holdfast.persist.frozen_parts import StoredPart
from holdfast.protocol.facts import Fact, Report, ignore
from holdfast.transport.resources import NO_GENERATION
from holdfast.transport.wire.http import CACHE, cache_path

if TYPE_CHECKING:  # a run on one host does not need it
    from holdfast.transport.server import PeerServer


#: Seconds between two reports that a drain goes on.
PROGRESS_S = 30.0


class CacheAgent:
    """The cache of this host, if one is open. On the keeper's loop."""

    def __init__(self, memory: ArenaFiles, background: Background) -> None:
        self._memory, self._background = memory, background
        self.tier_of: Callable[[], CacheTier | None] = lambda: None
        """Returns the cache of this host, while it is open."""
        self._report: Report = ignore
        self._is_attached = False
        self._drains = ThreadPoolExecutor(1, thread_name_prefix="holdfast-drain")
        self._under_way: set[str] = set()
        self._written: dict[str, tuple[CacheTier, set[str]]] = {}
        """Directories written for a manifest that is not there yet, with the cache they are in."""
        self._server: PeerServer | None = None
        self._offered: dict[str, int] = {}

    @property
    def is_busy(self) -> bool:
        """Return True while something is drained."""
        return bool(self._under_way)

    @property
    def tier(self) -> CacheTier | None:
        """Return the cache of this host, while it is open."""
        return self.tier_of()

    async def opened(self) -> None:
        """Use the cache that was opened."""
        tier = self.tier
        if tier is not None:
            tier.persister.changed = lambda: self._background.from_thread(self._changed)
        self._tell_found()
        await self._offer()

    def serve(self, report: Report) -> None:
        """Report to this coordinator from now on, once it has ``attached``; what another ordered
        to be written is given up.
        """
        self._report, self._is_attached = report, False
        for directory in list(self._written):
            self.cancel(directory)

    def attached(self) -> None:
        """Handle that the coordinator elsewhere knows this host: it is told what waits here."""
        self._is_attached = True
        self._tell_found()

    def _tell_found(self) -> None:
        tier = self.tier
        if tier is None or not self._is_attached:
            return

        def find() -> None:
            found = tuple((*generation, attempt) for generation, attempt in tier.waiting())
            self._tell(CacheFound(waiting=found))

        _submit(tier, find)

    def _tell(self, fact: Fact) -> None:
        """Report; from any thread."""
        report = self._report
        self._background.from_thread(lambda: report(fact))

    def begin_write(self, order: host_messages.WriteImage) -> CacheTier | None:
        """Return the cache to write these images to; None where it takes nothing now."""
        tier = self.tier
        if tier is None or not tier.is_taking:
            return None
        of = order.attempt_id
        paths = {place(of.generation, order.directory) for place in (attempt_dir, part_dir)}
        self._written[order.directory] = tier, paths
        tier.expect(paths)
        return tier

    def cancel(self, directory: str) -> None:
        """Stop a drain, or give up what was written for an attempt that comes to nothing."""
        tier, paths = self._written.pop(directory, (None, set[str]()))
        if tier is not None and tier is self.tier:
            tier.give_up(paths)
        self._under_way.discard(directory)

    # ── orders ───────────────────────────────────────────────────────────────────────────────────

    def do(self, order: CacheOrder) -> None:
        """Carry out an order of the coordinator."""
        tier = self.tier
        if tier is None:
            if isinstance(order, PublishCached | DrainImages):
                self._end(order.directory, "it has no cache now")
            return
        match order:
            case PublishCached(directory=directory):
                target, written = self._written.pop(directory, (None, set[str]()))
                if target is tier:
                    tier.persister.submit(lambda: self._publish(tier, order, written))
                else:
                    self._end(directory, "its cache has lost what it had written")
            case DrainImages(directory=directory):
                self._under_way.add(directory)
                self._drains.submit(self._drain, tier, order)
            case MarkDrained(drained=drained):
                for n, step, attempt in drained:
                    _submit(tier, partial(tier.drained, Generation(n, step), attempt))
            case TellCached(generations=generations):
                for n, step in generations:
                    _submit(tier, partial(self._tell_documents, tier, Generation(n, step)))
            case FillCache(generation=filled, ranks=ranks):
                tier.fill(Generation(*filled), ranks)

    def _end(self, directory: str, reason: str, *, is_lost: bool = False) -> None:
        self._under_way.discard(directory)
        ended = host_messages.WriteEnded(directory=directory, reason=reason, is_lost=is_lost)
        self._report(ended)

    def _end_from_thread(self, directory: str, reason: str, *, is_lost: bool = False) -> None:
        self._background.from_thread(lambda: self._end(directory, reason, is_lost=is_lost))

    def _publish(self, tier: CacheTier, order: PublishCached, written: set[str]) -> None:
        """Publish the manifest of what was written here; on the cache's thread."""
        reason = ""
        try:
            manifest = inflate_manifest(order.manifest, "the coordinator")
            record = unseal(Incarnation, order.record, "a record of the coordinator")
            tier.publish(manifest, record, self._memory.layout(manifest.layout))
        except Exception as error:
            reason = str(error) or type(error).__name__
            tier.refused()
            tier.give_up(written)
        self._end_from_thread(order.directory, reason)

    def _drain(self, tier: CacheTier, order: DrainImages) -> None:
        """Copy this host's images of a checkpoint to the root; on the thread that drains."""
        reason, is_begun = "", False
        try:
            manifest = inflate_manifest(order.manifest, "the coordinator")
            images = {ref.rank: ref for ref in manifest.images}
            is_begun = True

            def done(rank: int) -> None:
                stored = StoredPart(images[rank])
                written = host_messages.ImageWritten(directory=order.directory, stored=stored)
                self._tell(written)

            is_cancelled = partial(self._is_cancelled, order.directory)
            tier.drain_own(manifest, done, is_cancelled, self._progress_of(order.directory))
        except Exception as error:
            reason = str(error) or type(error).__name__
        is_lost = bool(reason) and is_begun and bool(tier.drain_lost)
        self._end_from_thread(order.directory, reason, is_lost=is_lost)

    def _is_cancelled(self, directory: str) -> bool:
        return directory not in self._under_way

    def _progress_of(self, directory: str) -> Callable[[], None]:
        """Return what tells the coordinator, now and then, that a drain goes on."""
        told_s = time.monotonic()

        def progressed() -> None:
            nonlocal told_s
            if time.monotonic() >= told_s + PROGRESS_S:
                told_s = time.monotonic()
                self._tell(host_messages.WriteProgressed(directory=directory))

        return progressed

    def _tell_documents(self, tier: CacheTier, generation: Generation) -> None:
        manifest, record, layout = tier.documents(generation)
        documents = CacheDocuments(
            manifest=deflate_manifest(manifest), record=seal(record), layout=layout
        )
        self._tell(documents)

    # ── ranks that restore ───────────────────────────────────────────────────────────────────────

    async def serve_peers(self, server: PeerServer | None) -> None:
        """Offer what the cache has through this server, or nothing more (None)."""
        self._server, self._offered = server, {}
        await self._offer()

    def _changed(self) -> None:
        if self._server is not None:
            self._background.spawn(self._offer())

    async def _offer(self) -> None:
        """Bring up to date what is offered to the ranks of other hosts."""
        server, tier = self._server, self.tier
        if server is None:
            return
        files = {} if tier is None else await self._background.in_thread(_files_of, tier)
        if server is not self._server or tier is not self.tier:
            return
        for path in self._offered.keys() - files.keys():
            server.withdraw(cache_path(path))
        for path, size_bytes in files.items() - self._offered.items():
            try:
                server.offer_file(
                    cache_path(path),
                    Path(tier.place if tier else "", path),
                    offset_bytes=0,
                    length_bytes=size_bytes,
                    generation=NO_GENERATION,
                )
            except HoldfastError as error:  # removed meanwhile, for example
                warn(f"{path} of the cache is not offered: {error}")
        self._offered = files
        server.offer_document(CACHE, msgspec.msgpack.encode(files))


def _files_of(tier: CacheTier) -> dict[str, int]:
    try:
        return tier.files()
    except HoldfastError as error:
        warn(f"the cache {tier.store.url} is not offered: {error}")
        return {}


def _submit(tier: CacheTier, act: Callable[[], None]) -> None:
    """Have this done on the cache's thread; an error of the cache is told, and harms nothing."""

    def work() -> None:
        try:
            act()
        except HoldfastError as error:
            warn(f"the cache {tier.store.url}: {error}")

    tier.persister.submit(work)
