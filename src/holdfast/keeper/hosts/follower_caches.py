"""The coordinator's view of the caches of all other hosts: see ``keeper.shared_drain``."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

from holdfast.errors import HoldfastError
from holdfast.events import warn
from holdfast.format.manifest import Generation, Incarnation, Manifest, seal, unseal
from holdfast.keeper.cache_tier import CacheTier
from holdfast.keeper.hosts.cache_messages import (
    CacheDocuments,
    CacheFound,
    CacheReport,
    DrainImages,
    FillCache,
    MarkDrained,
    PublishCached,
    TellCached,
    deflate_manifest,
    inflate_manifest,
)
from holdfast.keeper.hosts.followers import FollowerRegistry, HostSession
from holdfast.keeper.hosts.host_messages import CancelWrite
from holdfast.keeper.image_writer import PersistJob
from holdfast.keeper.jobs import Background, RemoteImages
from holdfast.keeper.shared_drain import NOWHERE
from holdfast.protocol.facts import Fact

#: A manifest is published at once, or its host hangs.
_PUBLISH_S = 120.0
#: Seconds for which the followers of a new incarnation are waited for.
_GATHER_S = 30.0
#: So many drained generations are remembered, the newest of them.
_REMEMBERED = 4096


class FollowerCaches:
    """The caches of the followers. Created and told on the keeper's loop; a ``keeper.cache_tier``
    thread asks for shares.
    """

    def __init__(
        self,
        followers: FollowerRegistry,
        background: Background,
        tier: Callable[[], CacheTier | None],
        found: Callable[[Iterable[tuple[Generation, str]], bool], None],
    ) -> None:
        """``tier`` returns this host's own cache. ``found(generations, is_exact)``: what other
        caches are found to have; handles of this incarnation may wait for those very steps.
        """
        self._followers, self._background, self._found = followers, background, found
        self._tier = tier
        self._gathered_s = 0.0
        self._holders: dict[str, Mapping[str, frozenset[int]]] = {}
        """Which host has the images of which ranks, by attempt: of those cached in this start."""
        self._asked = frozenset[str]()
        """The hosts that were asked for their part of the drain under way."""
        self._drained: dict[tuple[Generation, str], None] = {}
        """What was drained or passed over: this host's cache may have dropped it."""
        self._early: dict[str, tuple[HostSession, CacheFound]] = {}
        """What followers told while this host's cache was not open, by name."""
        self._has_begun = False
        """True once an incarnation began with this keeper: it knows of all that was saved then."""
        self._reported: set[str] = set()
        """The hosts that have told what their caches have, to a successor in mid-incarnation."""
        self._exact: set[str] = set()
        """Those of them of which it was the first that a successor heard."""

    # ── on the threads of the tiers ──────────────────────────────────────────────────────────────

    def drain(self, manifest: Manifest) -> Sequence[RemoteImages]:
        """Return one share for each host that can be asked to copy its images to the root."""
        directory, data = f"drain-{secrets.token_hex(4)}", deflate_manifest(manifest)
        order = DrainImages(directory=directory, manifest=data)
        ranks = frozenset(ref.rank for ref in manifest.images)
        hosts = self._followers.attached()
        self._asked = frozenset(hosts.values())
        return [self._share(host, name, directory, order, ranks) for host, name in hosts.items()]

    def publish(self, job: PersistJob, manifest: Manifest) -> Sequence[RemoteImages]:
        """Return one share for each host of ``job`` that is to publish the manifest."""
        order = PublishCached(
            directory=job.directory,
            manifest=deflate_manifest(manifest),
            record=seal(job.incarnation),
        )
        hosts = {share.host: frozenset(share.ranks) for share in job.shares}
        self._holders[job.attempt] = hosts
        numbers = {name: host for host, name in self._followers.attached().items()}
        none = frozenset[int]()
        return [
            self._share(numbers.get(name, -1), name, job.directory, order, none, stall_s=_PUBLISH_S)
            for name in hosts
        ]

    def _share(
        self,
        host: int,
        name: str,
        directory: str,
        order: Fact,
        ranks: frozenset[int],
        **patience: float,
    ) -> RemoteImages:
        def begin() -> None:
            self._background.from_thread(
                lambda: self._followers.order(share, host, directory, order)
            )

        def stop(reason: str) -> None:
            cancel = CancelWrite(directory=directory, reason=reason)
            self._background.from_thread(lambda: self._followers.send_to_host(host, cancel))

        share = RemoteImages(name, ranks, begin, stop, **patience)
        share.must_have_all = False
        return share

    def explain(self, manifest: Manifest, ranks: Sequence[int]) -> tuple[str, bool]:
        """Say why the images of these ranks were not drained, and whether they may yet be."""
        away = self._followers.away()
        came = [one for one in self._followers.attached().values() if one not in self._asked]
        away += [name for name in came if name not in away]  # they came during the drain
        holders = self._holders.get(manifest.attempt, {})
        gone = [name for name in away if not holders.get(name, set(ranks)).isdisjoint(ranks)]
        if gone:
            hosts = ", ".join(gone)
            why = (
                f"the images of ranks {ranks} are in no cache within reach, and the keeper of "
                f"{hosts} is or was out of reach"
            )
            return why, True
        known = [name for name, theirs in holders.items() if not theirs.isdisjoint(ranks)]
        lost = f": that of {', '.join(known)} had them" if known else ""
        return f"the images of ranks {ranks} {NOWHERE}{lost}", False

    def drained(self, manifest: Manifest) -> None:
        """Tell all hosts that the root has published this."""
        self._holders.pop(manifest.attempt, None)
        self._drained[manifest.generation, manifest.attempt] = None
        if len(self._drained) > _REMEMBERED:
            del self._drained[next(iter(self._drained))]
        mark = MarkDrained(drained=((*manifest.generation, manifest.attempt),))
        self._background.from_thread(lambda: self._followers.broadcast(mark))

    # ── on the loop ──────────────────────────────────────────────────────────────────────────────

    def begin(self) -> None:
        """Begin an incarnation, and wait a while for its followers."""
        self.gather()
        self._has_begun = True
        self._exact.clear()
        self._early.clear()

    def gather(self) -> None:
        """Wait a while for the followers of an incarnation."""
        self._gathered_s = time.monotonic() + _GATHER_S

    def opened(self) -> None:
        """Handle what followers told before this host's cache was open."""
        early, self._early = self._early, {}
        for host, report in early.values():
            self.handle(host, report)

    @property
    def are_gathering(self) -> bool:
        """Return True while followers are only about to connect: nothing is drained yet."""
        return time.monotonic() < self._gathered_s and bool(self._followers.away())

    def fill(self, generation: tuple[int, int], ranks_of: Mapping[int, Collection[int]]) -> None:
        """Have each host copy the images of its ranks to its cache."""
        for host, ranks in ranks_of.items():
            order = FillCache(generation=generation, ranks=tuple(ranks))
            self._followers.send_to_host(host, order)

    def handle(self, host: HostSession, report: CacheReport) -> None:
        """Handle what a follower's cache has: what this host's cache does not know of is asked
        for, or was drained meanwhile.
        """
        tier = self._tier()
        if tier is None:
            if isinstance(report, CacheFound):
                self._early[host.name] = host, report
            return
        match report:
            case CacheFound(waiting=waiting):
                self._note_report(host.name)
                tier.persister.submit(partial(self._compare, tier, host.send, waiting))
            case CacheDocuments():
                is_exact = host.name in self._exact
                tier.persister.submit(partial(self._learn, tier, report, is_exact=is_exact))

    def _note_report(self, host: str) -> None:
        """Note whether this host was away while this keeper led: what was passed over meanwhile
        need not be durable. A successor does not know what an earlier keeper had begun.
        """
        if self._has_begun or host in self._reported:
            self._exact.discard(host)
        else:
            self._exact.add(host)
        self._reported.add(host)

    def _compare(
        self, tier: CacheTier, send: Callable[[Fact], None], waiting: Sequence[tuple[int, int, str]]
    ) -> None:
        """Compare with this host's cache; on its thread."""
        try:
            mine = set(tier.waiting())
            there = [(Generation(n, step), attempt) for n, step, attempt in waiting]
            left = [one for one in there if one not in mine]
            drained = [one for one in left if one in self._drained or tier.is_drained(*one)]
        except HoldfastError as error:
            warn(f"the cache {tier.store.url}: {error}")
            return
        unknown = tuple(
            (g.incarnation, g.step) for g, attempt in left if (g, attempt) not in drained
        )
        marks = tuple((*generation, attempt) for generation, attempt in drained)

        def tell() -> None:
            if marks:
                send(MarkDrained(drained=marks))
            if unknown:
                send(TellCached(generations=unknown))
            tier.try_lost_again()
            self._found((), False)

        self._background.from_thread(tell)

    def _learn(self, tier: CacheTier, told: CacheDocuments, *, is_exact: bool) -> None:
        """Publish what another host's cache has in this one; on its thread."""
        try:
            manifest = inflate_manifest(told.manifest, "another host")
            record = unseal(Incarnation, told.record, "a record of another host's cache")
            tier.publish(manifest, record, told.layout)
        except HoldfastError as error:
            warn(f"what another host's cache has is not drained: {error}")
            return
        found = ((manifest.generation, manifest.attempt),)
        self._background.from_thread(lambda: self._found(found, is_exact))
