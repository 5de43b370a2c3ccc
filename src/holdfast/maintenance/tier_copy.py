"""Copies the files of one checkpoint from a cache to the root or back, every byte verified."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from holdfast.catalogue import PARTS, STEPS, catalogue, damage_note
from holdfast.errors import AlreadyPublished, FormatError, HoldfastError, NotFound, PersistFailed
from holdfast.format.manifest import ImageRef, Manifest
from holdfast.maintenance.good_bytes import GoodFile, write_good
from holdfast.storage.base import Store, resume, settle_s
from holdfast.storage.wrap import RateLimit

#: The letters at the end of a directory's name that tell two writes of one attempt apart.
_RANDOM = 6


class TierCopy:
    """Copies from ``source`` to ``target``, whose lock the caller holds, on one thread."""

    def __init__(
        self,
        source: Store,
        target: Store,
        limit: RateLimit | None = None,
        gives_way: Callable[[], bool] = lambda: False,
    ) -> None:
        self._source, self._target = source, target
        self._pace = _Pace(limit or RateLimit(), gives_way)
        self._written: set[str] = set()
        """The files that this object made durable."""
        self._left: set[str] = set()
        """Directories of a bucket with images that may have been begun and broken off."""
        self._is_listed = False
        self._progressed: Callable[[], None] = lambda: None
        self.lost = ""
        """The reason why the last copy failed, if that is with the source's bytes: they are gone,
        or are not those that the manifest names.
        """

    def copy_files(
        self,
        manifest: Manifest,
        ranks: Collection[int] | None = None,
        done: Callable[[int], None] = lambda _: None,
        progressed: Callable[[], None] = lambda: None,
    ) -> None:
        """Make all files durable in the target, or those of these ranks alone; ``done(rank)`` is
        called after each image and its part, and ``progressed`` after each chunk, on any thread.
        """
        self.lost, self._progressed = "", progressed
        is_bucket = settle_s(self._target) > 0
        named = self._named() if manifest.parts and not is_bucket else {}
        if is_bucket:
            self._resume(manifest)
        parts = {part.rank: part for part in manifest.parts}
        for image in manifest.images:
            if ranks is None or image.rank in ranks:
                part = parts.get(image.rank)
                for ref in (image,) if part is None else (image, part):
                    if is_bucket or not self._is_there(ref, named):
                        self._copy_noting(ref, is_part=ref is part)
                done(image.rank)
        self._left -= manifest.directories

    def forget(self, manifest: Manifest) -> None:
        """Drop what is known of a checkpoint that the target has published."""
        self._written -= {ref.path for ref in manifest.images}

    def _resume(self, manifest: Manifest) -> None:
        """Go on with what was begun and broken off; a bucket is listed for it once."""
        if not self._is_listed:
            self._left |= {f"{a}/{name}" for a in (STEPS, PARTS) for name in self._target.list(a)}
            self._is_listed = True
        starts = {path[:-_RANDOM] for path in self._left}
        for directory in manifest.directories:
            if directory[:-_RANDOM] in starts:
                above, _, name = directory.rpartition("/")
                resume(self._target, above, name[:-_RANDOM])
        self._left |= manifest.directories  # until it is whole

    def _copy_noting(self, ref: ImageRef, *, is_part: bool) -> None:
        try:
            self._copy(ref)
        finally:
            if self.lost and is_part:
                self._note_damage(ref)

    def _copy(self, ref: ImageRef) -> None:
        try:
            good = _PacedFile(ref, self._source, self._pace, self._progressed)
        except (FormatError, NotFound) as error:
            self.lost = str(error)
            raise
        try:
            sink = self._target.create(ref.path, ref.size_bytes)
        except AlreadyPublished:  # a bucket has an object whole, or not
            is_whole = settle_s(self._target) > 0
            if is_whole and self._target.size_bytes(ref.path) == ref.size_bytes:
                return
            raise
        try:
            write_good(sink, good)
        except (FormatError, NotFound) as error:
            self.lost = str(error)
            raise
        self._written.add(ref.path)

    def _note_damage(self, part: ImageRef) -> None:
        """Have the next save write the part anew, instead of naming it once more."""
        with suppress(HoldfastError):
            self._source.publish(damage_note(part.path), b"found damaged\n")

    def _named(self) -> dict[str, ImageRef]:
        """Return the parts that manifests of the target name."""
        return {ref.path: ref for one in catalogue(self._target).manifests for ref in one.parts}

    def _is_there(self, ref: ImageRef, named: dict[str, ImageRef]) -> bool:
        """Return True for a durable file of a directory. What was left there proves nothing, and
        goes.
        """
        if not self._target.exists(ref.path):
            return False
        if ref.path in self._written or named.get(ref.path) == ref:
            return True
        if ref.path in named:
            self.lost = f"{ref.path} is another file in {self._target.url} than in the other tier"
            raise FormatError(self.lost, path=ref.path)
        self._target.remove(ref.path)
        return False


@dataclass(frozen=True, slots=True)
class _Pace:
    limit: RateLimit
    gives_way: Callable[[], bool]


class _PacedFile(GoodFile):
    """Reads no faster than its pace, and no further once it gives way: PersistFailed."""

    def __init__(
        self, ref: ImageRef, store: Store, pace: _Pace, progressed: Callable[[], None]
    ) -> None:
        super().__init__(ref, [store])
        self._pace, self._progressed = pace, progressed

    def chunk(self, start: int, stop: int) -> memoryview:
        """See ``ImageSource``."""
        self._require_way()
        self._pace.limit.wait(stop - start, self._require_way)
        return super().chunk(start, stop)

    def stored(self, start: int, stop: int) -> None:
        """See ``ImageSource``."""
        self._progressed()

    def _require_way(self) -> None:
        if self._pace.gives_way():
            raise PersistFailed(f"{self.ref.path} is not copied: something else comes first")
