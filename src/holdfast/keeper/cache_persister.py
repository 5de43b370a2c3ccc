"""Makes attempts whole in a cache, by the rules of any root and what a cache has besides."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence

from holdfast.catalogue import EMPTY, Catalogue, Described, RootContents, catalogue
from holdfast.errors import HoldfastError
from holdfast.events import CheckpointCached, emit, warn
from holdfast.format.manifest import Generation, Incarnation, Manifest
from holdfast.keeper.image_writer import PersistJob
from holdfast.keeper.jobs import RemoteImages, write_all
from holdfast.keeper.persister import Call, Outcome, Persister, PublicationTimes
from holdfast.persist.drain_order import UnsettledDirectories, forget_marks, waiting
from holdfast.policy.when import Keep
from holdfast.storage.base import Store


class CachePersister(Persister):
    """Makes attempts whole in a cache. What the root has not had stays, whatever its policy says.

    Nobody else reads there who could not read in the root, so what is pruned is gone at once.
    """

    def __init__(
        self,
        store: Store,
        keep: Keep,
        done: Outcome,
        pruned: Callable[[str], None] = lambda _: None,
        remembered: Callable[[], Collection[Incarnation]] = tuple,
    ) -> None:
        super().__init__(store, keep, done, pruned, remembered)
        self._images.is_told = False
        self._sweeper.after = 0
        self._is_shared = False
        self.unsettled = UnsettledDirectories()
        self.spread: Callable[[PersistJob, Manifest], Sequence[RemoteImages]] = lambda *_: ()
        """Returns the hosts that are to publish the manifest of a job in their caches, too."""
        self.changed: Call = lambda: None
        """Called on this object's thread when checkpoints came or went."""

    def share(self, *, is_shared: bool) -> None:
        """Be one of several hosts' caches from now on, or the only one."""
        self._is_shared = is_shared
        self._sweeper.unsettled = self.unsettled if is_shared else frozenset()

    def _publish_elsewhere(self, job: PersistJob, manifest: Manifest) -> None:
        write_all(self.spread(job, manifest))

    def _publish(
        self,
        manifest: Manifest,
        started_s: float,
        places: Collection[str] = (),
        *,
        receipt_s: float = 0.0,
        is_told: bool = True,
    ) -> None:
        super()._publish(manifest, started_s, places, receipt_s=receipt_s, is_told=is_told)
        self.changed()

    def prune(self, published: Generation, *, is_newest: bool = True) -> None:
        """Apply the cache's retention, and forget marks of what is gone."""
        if self._is_shared:
            with contextlib.suppress(HoldfastError):  # then more stays
                self.unsettled.learn(self.store, catalogue(self.store))
        super().prune(published, is_newest=is_newest)
        with contextlib.suppress(HoldfastError):  # at the next one
            forget_marks(self.store)
        self.changed()

    def prune_drained(self) -> None:
        """Apply the retention after something was drained. Raises nothing."""
        with contextlib.suppress(HoldfastError):
            if (newest := catalogue(self.store).latest) is not None:
                self.prune(newest)

    def _spared(self, found: RootContents[Described]) -> set[Generation]:
        return set(waiting(self.store, found if isinstance(found, Catalogue) else EMPTY))

    def _tell_published(self, manifest: Manifest, took: PublicationTimes) -> None:
        emit(
            CheckpointCached(
                incarnation=manifest.incarnation,
                step=manifest.step,
                size_bytes=manifest.size_bytes,
                images=len(manifest.images),
                elapsed_s=took.elapsed_s,
            )
        )

    def _tell_pruned(self, pruned: Generation, at: Generation, elapsed_s: float) -> None:
        """Nothing: it is still in storage, or its own retention has told of it."""

    def _tell_broke(self, generation: Generation, reason: str) -> None:
        text = f"the cache {self.store.url} did not take step {generation.step}: {reason}"
        warn(text)
