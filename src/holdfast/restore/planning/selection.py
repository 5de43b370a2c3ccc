"""PURE. Selects the generation to restore, and each image's source: memory, parity or storage.

The selection follows from what every host that answered holds, and from what lies in storage. An
image is taken from a host that has it. An image that no host has is decoded, from the data and
parity left of its group. Only an image that cannot be decoded comes from storage, and only of the
very same attempt: images of two attempts never mix. When a host is lost during a restore, the same
selection runs with one host fewer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from holdfast.format.manifest import AttemptId, ImageId, Lineage
from holdfast.protocol.messages import HoldingPart, Inventory
from holdfast.restore.planning.candidates import (
    Candidate,
    StartRecords,
    choose,
    is_replaced,
    join_parents,
    replaced_starts,
)
from holdfast.restore.planning.holdings import (
    Decoding,
    GroupCoding,
    ImageOrigin,
    Recovery,
    Refusal,
    ShardHolding,
    ShardSource,
    image_name,
)

_SHOWN = 4
#: HTTP statuses of a peer that is reachable but no longer has the requested resource.
_GONE = (404, 410)


class Selection(NamedTuple):
    """The restorable generations, best first, and the unrestorable ones in memory, newest first."""

    recoveries: tuple[Recovery, ...]
    refusals: tuple[Refusal, ...]


class Inventories(Struct, frozen=True):
    """The holdings of every host that answered, the stored checkpoints, and the line of
    incarnations.

    ``parents`` and ``starts`` are as storage has them, and join what hosts say as ``join_parents``
    does; ``unreadable`` are the incarnations whose records there cannot be read. ``rows`` are the
    parity shards of which the records are known, by host and attempt.
    """

    holdings: tuple[Inventory, ...] = ()
    stored: tuple[Candidate, ...] = ()
    parents: dict[int, tuple[int, int] | None] = {}
    unreadable: tuple[int, ...] = ()
    starts: dict[int, tuple[str, float]] = {}
    rows: dict[tuple[str, AttemptId], tuple[ShardHolding, ...]] = {}

    @property
    def line(self) -> Lineage:
        """The known ancestors of the newest incarnation."""
        return Lineage(self._parents(), self.unreadable)

    def candidates(self) -> list[Candidate]:
        """All that can be restored, of all lines of incarnations."""
        return [one.candidate for one in find_all(self).recoveries]

    def find(self, wanted: int | str | None = None) -> Selection:
        """Select for ``wanted``, as ``choose`` takes it: what can be restored, and what cannot."""
        selection, parents = find_all(self), self._parents()
        can = {one.candidate: one for one in selection.recoveries}
        cannot = {
            Candidate(one.incarnation, one.step, "memory", one.attempt): one
            for one in selection.refusals
        }
        return Selection(
            tuple(can[one] for one in choose(can, parents, wanted, self.unreadable)),
            tuple(cannot[one] for one in choose(cannot, parents, wanted, self.unreadable)),
        )

    def without(self, candidate: Candidate, fields: Mapping[str, Any]) -> Inventories:
        """Return what is left when ``candidate`` failed with an error of these ``fields``.

        Removes the image whose bytes were wrong, or which its host no longer has; or the host that
        did not answer; else the whole candidate. The result always has less than before.
        """
        peer, path = fields.get("peer"), fields.get("path")
        names = {fields.get("image"), path}
        if fields.get("status") in _GONE:
            names.add(f"{peer}{path}")
        remaining = tuple(_less_images(one, candidate.attempt, names) for one in self.holdings)
        if remaining == self.holdings:
            remaining = tuple(one for one in remaining if one.host != peer)
        if remaining == self.holdings and (candidate.held or candidate.where == "memory"):
            remaining = tuple(_less_attempt(one, candidate.attempt) for one in remaining)
        if remaining != self.holdings:
            return replace(self, holdings=remaining)
        return replace(self, stored=tuple(one for one in self.stored if one != candidate))

    def _parents(self) -> dict[int, tuple[int, int] | None]:
        memories = (StartRecords(one.parents, one.starts) for one in self.holdings)
        return join_parents(memories, StartRecords(self.parents, self.starts))

    def of_known_starts(self) -> tuple[Inventories, set[int]]:
        """The same without what is of starts whose numbers are others' in storage, and these."""
        stored, numbers, attempts = StartRecords(self.parents, self.starts), set[int](), set[str]()
        for holding in self.holdings:
            memory = StartRecords(holding.parents, holding.starts)
            replaced = replaced_starts(memory, stored)
            for part in holding.parts:
                id_ = part.attempt_id
                if is_replaced(id_.incarnation, part.nonce, memory, stored, replaced):
                    attempts.add(id_.attempt)
                    numbers.add(id_.incarnation)
        if not attempts:
            return self, numbers
        left = self.holdings
        for attempt in attempts:  # on all hosts: one of them may have lost the record
            left = tuple(_less_attempt(one, attempt) for one in left)
        return replace(self, holdings=left), numbers


def _less_attempt(holding: Inventory, attempt: str) -> Inventory:
    kept = (part for part in holding.parts if part.attempt_id.attempt != attempt)
    return replace(holding, parts=tuple(kept))


def _less_images(holding: Inventory, attempt: str, names: Collection[object]) -> Inventory:
    """Return a holding without the images of this attempt that errors name so."""
    parts = []
    for part in holding.parts:
        if part.attempt_id.attempt == attempt:
            called = {one: image_name(holding.host, attempt, one.rank) for one in part.images}
            kept = tuple(one for one, name in called.items() if name not in names)
            part = replace(part, images=kept)
        parts.append(part)
    return replace(holding, parts=tuple(parts))


# ── one attempt ──────────────────────────────────────────────────────────────────────────────


def find_all(known: Inventories) -> Selection:
    """Find, for every attempt anywhere, whether it can be restored. All lines of incarnations."""
    attempts: defaultdict[AttemptId, list[tuple[str, HoldingPart]]] = defaultdict(list)
    hosts = set()
    for holding in sorted(known.holdings, key=lambda one: one.host):
        hosts.add(holding.host)
        for part in holding.parts:
            if part.attempt_id.world > 0:
                attempts[part.attempt_id].append((holding.host, part))
    recoveries, refusals = [Recovery(one) for one in known.stored], []
    for key, parts in sorted(attempts.items(), key=lambda one: one[0], reverse=True):
        attempt = _AttemptSources(key, parts, known.rows, hosts)
        manifest = min((one for one in known.stored if _is_of(one, key)), default=None)
        if not attempt.missing:
            recoveries.append(attempt.recovery(None))
            continue
        refusals.append(Refusal(key.incarnation, key.step, key.attempt, attempt.reason()))
        if manifest is not None and attempt.images:
            recoveries.append(attempt.recovery(manifest))
    return Selection(tuple(recoveries), tuple(refusals))


def _is_of(candidate: Candidate, key: AttemptId) -> bool:
    return (*candidate.generation, candidate.attempt) == (key.incarnation, key.step, key.attempt)


class _AttemptSources:
    """One attempt, and what all hosts together have of it."""

    def __init__(
        self,
        key: AttemptId,
        parts: Sequence[tuple[str, HoldingPart]],
        known_rows: Mapping[tuple[str, AttemptId], Sequence[ShardHolding]],
        answered: set[str],
    ) -> None:
        self._key, self._answered = key, answered
        self._holders = tuple(dict.fromkeys(host for host, _ in parts))
        held: dict[int, dict[ImageId, set[str]]] = {}
        rows: dict[GroupCoding, dict[tuple[int, int], set[str]]] = {}
        for host, part in parts:
            for image in part.images:
                held.setdefault(image.rank, {}).setdefault(image, set()).add(host)
            for row in known_rows.get((host, key), ()):
                at = row.stripe, row.row
                rows.setdefault(row.coding, {}).setdefault(at, set()).add(host)
        # Of two different ones, one is not what was captured, and it is unknown which.
        self._differing = {rank: some for rank, some in held.items() if len(some) > 1}
        self.images = {rank: min(some) for rank, some in held.items() if len(some) == 1}
        self._hosts = {image: held[rank][image] for rank, image in self.images.items()}
        groups = [GroupSurvivors(one, self._hosts, rows[one], answered) for one in sorted(rows)]
        self._groups = sorted(groups, key=lambda one: -one.least)

    @cached_property
    def _ways(self) -> dict[int, GroupSurvivors]:
        """For each lost image that can be decoded, by rank, the group that decodes it."""
        groups: dict[int, GroupSurvivors] = {}
        for group in self._groups:
            for rank in group.places.keys() - self.images.keys() - self._differing.keys():
                if group.slack(rank) >= 0:
                    groups.setdefault(rank, group)
        return groups

    @cached_property
    def missing(self) -> list[int]:
        """Return the first rank whose image neither exists nor can be decoded."""
        there = self.images.keys() | self._ways.keys()
        # Do not loop over a claimed world size: among so many ranks one is surely missing.
        ranks = range(min(self._key.world, len(there) + _SHOWN + 1))
        return [rank for rank in ranks if rank not in there]

    def recovery(self, manifest: Candidate | None) -> Recovery:
        """Return the origin of every image; ``manifest`` covers those that no host has any more."""
        key = self._key
        sources = tuple(map(self._source, range(key.world)))
        candidate = Candidate(
            key.incarnation,
            key.step,
            "storage" if manifest else "memory",
            key.attempt,
            manifest.seal if manifest else "",
            held=sum(bool(one.hosts) for one in sources),
            is_spread=any(set(one.hosts) != self._answered for one in sources),
        )
        return Recovery(candidate, key.world, key.layout, sources, self._holders, self._survives())

    def _source(self, rank: int) -> ImageOrigin:
        if rank in self.images:
            image = self.images[rank]
            return ImageOrigin(rank, image, tuple(sorted(self._hosts[image])))
        if rank not in self._ways:
            return ImageOrigin(rank)
        group = self._ways[rank]
        decoding = Decoding(group.coding, *group.places[rank], group.rows, group.absent)
        return ImageOrigin(rank, group.image_of(rank), decoding=decoding)

    def _survives(self) -> int:
        """Return the host losses that every image in memory survives, by its copies or by a
        group.
        """
        losses = []
        for rank in self.images.keys() | self._ways.keys():
            image = self.images.get(rank)
            copies = 0 if image is None else len(self._hosts[image]) - 1
            slacks = (
                group.slack(rank)
                for group in self._groups
                if rank in group.places and image in (None, group.image_of(rank))
            )
            losses.append(max(copies, *slacks, 0))
        return min(losses, default=0)

    def reason(self) -> str:
        """Explain why the attempt cannot be restored from memory."""
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


# PURE. Computes which images the survivors of a coding group can still decode.


#: Hosts that hold some resource.
Hosts = Collection[str]


class GroupSurvivors:
    """A coding and its remains: ``held`` images, and ``rows``: parity shards by stripe and row.

    ``answered``: the hosts that reported their holdings.
    """

    def __init__(
        self,
        coding: GroupCoding,
        held: Mapping[ImageId, Hosts],
        rows: Mapping[tuple[int, int], Hosts],
        answered: Hosts,
    ) -> None:
        self.coding, self._answered = coding, answered
        self._placement = coding.placement
        self._held, self._rows = held, rows
        self.places = {
            coded.image.rank: (number, n)
            for number, member in enumerate(coding.members)
            for n, coded in enumerate(member.images)
        }
        self.absent = tuple(
            number
            for number, member in enumerate(coding.members)
            if not all(coded.image in held for coded in member.images)
        )
        self.rows = tuple(
            ShardSource(*at, tuple(sorted(hosts))) for at, hosts in sorted(rows.items())
        )
        self._slack = [self._slack_of(stripe) for stripe in range(self._placement.members)]
        self.least = min(self._slack)

    def image_of(self, rank: int) -> ImageId:
        """The image of this rank, as this group coded it."""
        member, image = self.places[rank]
        return self.coding.members[member].images[image].image

    def slack(self, rank: int) -> int:
        """Return how many more hosts, whichever they are, can be lost with the image of ``rank``
        decodable.

        Below 0: it cannot be decoded now.
        """
        placement, (member, image) = self._placement, self.places[rank]
        size = placement.image_bytes[member][image]
        columns = -(-size // max(1, placement.segment_bytes(size)))
        stripes = (n for n in range(placement.members) if placement.number(member, n) < columns)
        return min((self._slack[stripe] for stripe in stripes), default=self.least)

    def _slack_of(self, stripe: int) -> int:
        """Return the spare members of one stripe beyond the number needed, counted by their
        hosts.
        """
        there = [hosts for hosts in self._hosts_of(stripe) if hosts is not None]
        spare = len(there) - self._placement.columns
        if spare < 0:
            return -1
        loads = Counter(host for hosts in there for host in set(hosts))
        count = 0
        for _, load in loads.most_common():
            if spare < load:
                break
            spare -= load
            count += 1
        return count

    def _hosts_of(self, stripe: int) -> Iterator[Hosts | None]:
        """Return, for each member, the hosts that its part of a stripe depends on; None: it is
        missing.
        """
        columns = self._placement.columns
        for number, member in enumerate(self.coding.members):
            column = self._placement.number(number, stripe)
            if column >= columns:
                yield self._rows.get((stripe, column - columns))
            elif number in self.absent:
                yield None
            else:  # without images its bytes count as zeros and depend on no host
                yield {host for one in member.images for host in self._held[one.image]}

    def why(self, rank: int) -> str:
        """Explain why the group cannot decode the image of this rank."""
        hosts = [member.host for member in self.coding.members]
        away = [host for host in hosts if host not in self._answered]
        lacking = [hosts[n] for n in self.absent if hosts[n] not in away]
        words = [f"{', '.join(away)} did not answer"] if away else []
        if lacking:
            words.append(f"{', '.join(lacking)} no longer had what was captured there")
        if len(self.absent) <= self.coding.parity:
            words.append("too little of its parity was left")
        return (
            f"the image of rank {rank} was on {hosts[self.places[rank][0]]}; of its group "
            f"({', '.join(hosts)}) {' and '.join(words)}, and its parity replaces "
            f"{self.coding.parity}"
        )
