"""PURE. What can be restored, best first, and from where: one answer for all ranks.

It follows from what every host that answered holds, and from what lies in storage. An image is
taken from a host that has it. One that no host has is decoded, from the data and parity left of its
group. Only what cannot be decoded either comes from storage, and only of the very same attempt:
images of two attempts never meet. When a host is lost while a restore is under way, the answer is
that to the same question with one host fewer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from holdfast.load.choose import Candidate, choose
from holdfast.load.group_left import GroupLeft
from holdfast.load.holdings import (
    Coding,
    Decoding,
    HeldPart,
    Holding,
    Image,
    Recovery,
    Refusal,
    Source,
    image_name,
)

_SHOWN = 4
#: What a peer answers that is there, and has no more what it is asked for.
_GONE = (404, 410)


class Found(NamedTuple):
    """What can be restored, best first, and what is in memory but cannot be, newest first."""

    recoveries: tuple[Recovery, ...]
    refusals: tuple[Refusal, ...]


class Inventories(Struct, frozen=True):
    """What every host that answered holds, what is stored, and what went on from what.

    ``parents`` are as storage has them, and count where a host says something else.
    """

    holdings: tuple[Holding, ...] = ()
    stored: tuple[Candidate, ...] = ()
    parents: dict[int, tuple[int, int] | None] = {}

    def find(self, wanted: int | str | None = None) -> Found:
        """What can be restored of ``wanted``, as ``choose`` takes it, and what of it cannot."""
        found, parents = find_all(self.holdings, self.stored), self._parents()
        can = {one.candidate: one for one in found.recoveries}
        cannot = {
            Candidate(one.incarnation, one.step, "memory", one.attempt): one
            for one in found.refusals
        }
        return Found(
            tuple(can[one] for one in choose(can, parents, wanted)),
            tuple(cannot[one] for one in choose(cannot, parents, wanted)),
        )

    def without(self, candidate: Candidate, fields: Mapping[str, Any]) -> Inventories:
        """What is left when ``candidate`` failed with an error of these ``fields``.

        Without the image whose bytes were wrong, or which its host has no more; or without the host
        that did not give what it has; else without all of that candidate. Always less than before.
        """
        peer, path = fields.get("peer"), fields.get("path")
        names = {fields.get("image"), path}
        if fields.get("status") in _GONE:
            names.add(f"{peer}{path}")
        left = tuple(_less_images(one, candidate.attempt, names) for one in self.holdings)
        if left == self.holdings:
            left = tuple(one for one in left if one.host != peer)
        if left == self.holdings and (candidate.held or candidate.where == "memory"):
            left = tuple(_less_attempt(one, candidate.attempt) for one in left)
        if left != self.holdings:
            return replace(self, holdings=left)
        return replace(self, stored=tuple(one for one in self.stored if one != candidate))

    def _parents(self) -> dict[int, tuple[int, int] | None]:
        said: dict[int, tuple[int, int] | None] = {}
        for holding in self.holdings:
            for n, parent in holding.parents.items():
                both = (one for one in (parent, said.get(n)) if one is not None)
                said[n] = min(both, default=None)
        return said | self.parents


def _less_attempt(holding: Holding, attempt: str) -> Holding:
    return replace(holding, parts=tuple(p for p in holding.parts if p.attempt != attempt))


def _less_images(holding: Holding, attempt: str, names: Collection[object]) -> Holding:
    """The same without the images of this attempt that are called so in errors."""
    parts = []
    for part in holding.parts:
        if part.attempt == attempt:
            called = {one: image_name(holding.host, attempt, one.rank) for one in part.images}
            kept = tuple(one for one, name in called.items() if name not in names)
            part = replace(part, images=kept)
        parts.append(part)
    return replace(holding, parts=tuple(parts))


# ── one attempt ──────────────────────────────────────────────────────────────────────────────


class _Key(NamedTuple):
    """What all parts of an attempt say alike."""

    incarnation: int
    step: int
    attempt: str
    world: int
    layout: str


def find_all(holdings: Iterable[Holding], stored: Iterable[Candidate]) -> Found:
    """Of every attempt, wherever it is, whether it can be restored. All lines of incarnations."""
    attempts: defaultdict[_Key, list[tuple[str, HeldPart]]] = defaultdict(list)
    hosts = set()
    for holding in sorted(holdings, key=lambda one: one.host):
        hosts.add(holding.host)
        for part in holding.parts:
            if part.world > 0:
                key = _Key(part.incarnation, part.step, part.attempt, part.world, part.layout)
                attempts[key].append((holding.host, part))
    in_storage = list(stored)
    recoveries, refusals = [Recovery(one) for one in in_storage], []
    for key, parts in sorted(attempts.items(), key=lambda one: one[0], reverse=True):
        attempt = _Attempt(key, parts, hosts)
        manifest = min((one for one in in_storage if _is_of(one, key)), default=None)
        if not attempt.missing:
            recoveries.append(attempt.recovery(None))
            continue
        refusals.append(Refusal(key.incarnation, key.step, key.attempt, attempt.reason()))
        if manifest is not None and attempt.images:
            recoveries.append(attempt.recovery(manifest))
    return Found(tuple(recoveries), tuple(refusals))


def _is_of(candidate: Candidate, key: _Key) -> bool:
    return (*candidate.generation, candidate.attempt) == (key.incarnation, key.step, key.attempt)


class _Attempt:
    """One attempt, and what all hosts together have of it."""

    def __init__(
        self, key: _Key, parts: Sequence[tuple[str, HeldPart]], answered: set[str]
    ) -> None:
        self._key, self._answered = key, answered
        self._holders = tuple(dict.fromkeys(host for host, _ in parts))
        held: dict[int, dict[Image, set[str]]] = {}
        rows: dict[Coding, dict[tuple[int, int], set[str]]] = {}
        for host, part in parts:
            for image in part.images:
                held.setdefault(image.rank, {}).setdefault(image, set()).add(host)
            for row in part.rows:
                at = row.stripe, row.row
                rows.setdefault(row.coding, {}).setdefault(at, set()).add(host)
        # Of two that differ, one is not what was captured, and nobody can say which.
        self._differing = {rank: some for rank, some in held.items() if len(some) > 1}
        self.images = {rank: min(some) for rank, some in held.items() if len(some) == 1}
        self._hosts = {image: held[rank][image] for rank, image in self.images.items()}
        groups = [GroupLeft(one, self._hosts, rows[one], answered) for one in sorted(rows)]
        self._groups = sorted(groups, key=lambda one: -one.least)

    @cached_property
    def _ways(self) -> dict[int, GroupLeft]:
        """For each lost image that can be decoded, by rank, the group that does it."""
        found: dict[int, GroupLeft] = {}
        for group in self._groups:
            for rank in group.places.keys() - self.images.keys() - self._differing.keys():
                if group.slack(rank) >= 0:
                    found.setdefault(rank, group)
        return found

    @cached_property
    def missing(self) -> list[int]:
        """The first of the ranks whose images are neither there nor to be decoded."""
        there = self.images.keys() | self._ways.keys()
        # A world that is claimed is not walked: among so many ranks one is missing already.
        ranks = range(min(self._key.world, len(there) + _SHOWN + 1))
        return [rank for rank in ranks if rank not in there]

    def recovery(self, manifest: Candidate | None) -> Recovery:
        """Where every image comes from; ``manifest`` is of those that no host has any more."""
        key = self._key
        sources = tuple(map(self._source, range(key.world)))
        candidate = Candidate(
            key.incarnation, key.step, "storage" if manifest else "memory", key.attempt,
            manifest.seal if manifest else "", held=sum(bool(one.hosts) for one in sources),
            is_spread=any(set(one.hosts) != self._answered for one in sources),
        )  # fmt: skip
        return Recovery(candidate, key.world, key.layout, sources, self._holders, self._survives())

    def _source(self, rank: int) -> Source:
        if rank in self.images:
            image = self.images[rank]
            return Source(rank, image, tuple(sorted(self._hosts[image])))
        if rank not in self._ways:
            return Source(rank)
        group = self._ways[rank]
        decoding = Decoding(group.coding, *group.places[rank], group.rows, group.absent)
        return Source(rank, group.image_of(rank), decoding=decoding)

    def _survives(self) -> int:
        """Of each image in memory, by its copies or by a group of it; of all, the least."""
        found = []
        for rank in self.images.keys() | self._ways.keys():
            image = self.images.get(rank)
            copies = 0 if image is None else len(self._hosts[image]) - 1
            slacks = (
                group.slack(rank)
                for group in self._groups
                if rank in group.places and image in (None, group.image_of(rank))
            )
            found.append(max(copies, *slacks, 0))
        return min(found, default=0)

    def reason(self) -> str:
        """Why it cannot be had from memory."""
        words = dict.fromkeys(map(self._why, self.missing[:_SHOWN]))
        more = ["and so on"] if len(self.missing) > _SHOWN else []
        return "; ".join([*words, *more])

    def _why(self, rank: int) -> str:
        if rank in self._differing:
            hosts = sorted({host for some in self._differing[rank].values() for host in some})
            return f"{', '.join(hosts)} hold different images of rank {rank}"
        for group in self._groups:
            if rank in group.places:
                return group.why(rank)
        return (
            f"the image of rank {rank} was in the memory of no host that answered, and no parity "
            "of it"
        )
