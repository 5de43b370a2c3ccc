"""Matches the state of this rank with a checkpoint: leaves, values, and everything that does not
fit.

Matching changes nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import xxhash
from msgspec import Struct, msgpack

from holdfast.geometry.layout import Layout, LeafSpec
from holdfast.restore.averages import unequal_copies, unequal_numbers, unequal_ties
from holdfast.restore.reading.images import Checkpoint
from holdfast.restore.reading.read import read_aliases, read_values
from holdfast.rules import Rules
from holdfast.state.mapped.checkpoint_view import make_offer
from holdfast.state.mapped.mapper import (
    RuleMapper,
    StateView,
    report_usage,
    require_all_used,
    table_as_saved,
)
from holdfast.state.mapped.shards import declarations
from holdfast.state.objects import Objects, State
from holdfast.state.restore import StateRestore
from holdfast.state.saved_values import (
    Document,
    ItemSource,
    SavedValues,
    gather,
    needs,
    things,
    trim,
)
from holdfast.state.selection import LeafSelection, refuse_different
from holdfast.transport.wire.rank_tree import Said

#: (rules used, patterns of ``only`` used) on a rank, as bits, and those patterns.
_RequestUsage = tuple[bytes, bytes, list[str] | None]
_NO_USAGE: _RequestUsage = (b"", b"", None)


class RestoreRequest(msgspec.Struct, frozen=True):
    """Options of a restore beside filling the state with everything stored.

    ``rules``: map the tensors of the state to leaves of the checkpoint. ``stored_rules``: the rules
    without which the checkpoint was saved. ``choice``: the selected part of the checkpoint.
    """

    rules: Rules | None = None
    stored_rules: Rules | None = None
    choice: LeafSelection = msgspec.field(default_factory=LeafSelection)

    @property
    def is_plain(self) -> bool:
        """True if all leaves are wanted, each under its own name."""
        has_rules = self.rules is not None or self.stored_rules is not None
        return not has_rules and self.choice.is_all and not declarations()

    def refuse_unused(self, usages: Sequence[Said]) -> None:
        """Raise UsageError, the same on all ranks, for a rule or pattern that matches nothing on
        any.

        Also for ranks that want different parts of the checkpoint.
        """
        decoded = [
            msgpack.decode(said.value, type=_RequestUsage) if said.value else _NO_USAGE
            for said in usages
        ]
        selected = zip(usages, decoded, strict=True)
        refuse_different([(said.first, only) for said, (_, _, only) in selected])
        require_all_used([usage for usage, _, _ in decoded])
        self.choice.refuse_unused([used for _, used, _ in decoded])


class MatchResult(msgspec.Struct, frozen=True):
    """The match of this state with a checkpoint. ``problems``: the mismatches in words.

    ``usage``: the usage of rules and patterns that this rank reports to the others.
    """

    restoring: StateRestore
    problems: list[str]
    usage: bytes


class StateMatch(msgspec.Struct, frozen=True):
    """Compares one checkpoint with the state of one rank. ``base``: the saved rank whose values
    are used.
    """

    checkpoint: Checkpoint
    state: State
    base: int
    values: Document
    own: Mapping[str, Any]
    rank: int
    world: int
    lists: Collection[str] = ()
    """The keys of lists that are split over all saved ranks."""

    def compare(self, objects: Objects, request: RestoreRequest) -> MatchResult:
        """Return the mismatches between them. UsageError for a request that does not fit the
        state.
        """
        layout = self.checkpoint.layout
        stored = {leaf.name: (leaf.dtype, leaf.shape) for leaf in layout.leaves}
        objects.follow(stored)
        choice, table = request.choice, None
        names = [*stored, *objects.paths]
        objects.restrict(choice, stored)
        if request.stored_rules is not None:
            shapes = {leaf: shape for leaf, (_, shape) in stored.items()}
            aliases = read_aliases(self.checkpoint, self.values)
            table = table_as_saved(request.stored_rules, objects.modules, shapes, aliases)
        through = RuleMapper(request.rules, self.rank, self.world, table)
        usage = report_usage(through, objects)
        lens = StateView(objects, through, stored, choice, is_plain=request.is_plain)
        values = gather_values(self.checkpoint, lens, self.base, self.values)
        view = make_offer(lens, values.aliases)
        restoring = StateRestore(self.state, objects, view, values, self.own, lists=self.lists)
        problems = [*restoring.amiss]
        problems += unequal_numbers(self.checkpoint, view)
        problems += unequal_copies(self.checkpoint, view)
        problems += unequal_ties(self.checkpoint, view)
        used = choice.used([*names, *view.specs, *view.left])
        return MatchResult(restoring, problems, msgpack.encode((usage, used, choice.texts)))


# Finds the leaves and values that no rank restores.
#
# One rank of a pipeline takes a part of a checkpoint, and the others the rest. It is an error only
# if all of them leave a leaf that belongs to a key of the state.


class LeafClaims(Struct, array_like=True, frozen=True):
    """The claims of one rank, or of several. Leaves by their number in the layout, one bit each;
    values by name.
    """

    taken: bytes
    left: bytes
    values_taken: list[int]
    values_left: list[str]

    @property
    def leaves_something(self) -> bool:
        """True if a rank leaves something below its state's keys unused."""
        return any(self.left) or bool(self.values_left)

    def joined(self, other: LeafClaims) -> LeafClaims:
        """Return the claims of both."""
        return LeafClaims(
            _either(self.taken, other.taken),
            _either(self.left, other.left),
            sorted({*self.values_taken, *other.values_taken}),
            sorted({*self.values_left, *other.values_left}),
        )


def claims_word(
    leaves: Sequence[str],
    claimed: Collection[str],
    restoring: StateRestore,
    problems: Sequence[str],
) -> bytes:
    """Encode what this rank says for ``left_by_ranks``.

    ``leaves`` are the names in the layout, ``claimed`` those that this rank takes, ``problems`` the
    mismatches it has found itself: with some, the list may be empty.
    """
    return msgpack.encode((bool(problems), claims_of(leaves, claimed, restoring)))


def join_claims(one: bytes, other: bytes) -> bytes:
    """Join the words of ranks; b"" where one of them has not compared anything yet."""
    if not one or not other:
        return b""
    (is_amiss, claims), (is_other_amiss, more) = _claims_in(one), _claims_in(other)
    return msgpack.encode((is_amiss or is_other_amiss, claims.joined(more)))


def left_by_ranks(leaves: Sequence[str], word: bytes) -> list[str] | None:
    """Describe what no rank restores, in words, the same on all ranks; None when all fits
    everywhere.
    """
    is_amiss, claims = _claims_in(word)
    return left_by_all(leaves, [claims]) if is_amiss or claims.leaves_something else None


def _claims_in(word: bytes) -> tuple[bool, LeafClaims]:
    return msgpack.decode(word, type=tuple[bool, LeafClaims])


def _either(one: bytes, other: bytes) -> bytes:
    """Return the bits that are in one of two, which are as long as each other."""
    return bytes(a | b for a, b in zip(one, other, strict=True))


def claims_of(
    leaves: Sequence[str], claimed: Collection[str], restoring: StateRestore
) -> LeafClaims:
    """Return what one rank takes, ``claimed`` among the leaves, and what it leaves."""
    claimed_values = restoring.found
    return LeafClaims(
        _bits([leaf in claimed for leaf in leaves]),
        _bits([leaf not in claimed and restoring.in_scope(leaf) for leaf in leaves]),
        sorted(map(_hash, claimed_values.taken)),
        sorted(claimed_values.left),
    )


def left_by_all(leaves: Sequence[str], claims: Sequence[LeafClaims]) -> list[str]:
    """Describe what no rank takes, in words."""
    taken = left = 0
    for one in claims:
        taken |= int.from_bytes(one.taken, "little")
        left |= int.from_bytes(one.left, "little")
    unclaimed = left & ~taken
    values_taken = {number for one in claims for number in one.values_taken}
    values_left = sorted({text for one in claims for text in one.values_left})
    return [
        *(text for text in values_left if _hash(text) not in values_taken),
        *(
            f"{leaf}: in the checkpoint, but nothing in the state takes it"
            for number, leaf in enumerate(leaves)
            if unclaimed >> number & 1
        ),
    ]


def _bits(claims: Sequence[bool]) -> bytes:
    """Pack booleans into whole bytes, the first one lowest."""
    digits = "".join("1" if claim else "0" for claim in reversed(claims))
    return int(digits or "0", 2).to_bytes(-(-len(claims) // 8), "little")


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode(errors="surrogatepass"))


# Gathers the values that a rank needs from as few images as have them all.
#
# A rank of a pipeline finds the values of its parameters in one image, most often in its own. One
# that replaces a whole pipeline finds them in as many images as there were stages, however many
# ranks each stage had. The layout tells which ranks had a value: their leaves stand in it.


Ranks = tuple[int, ...]

#: The most images opened without success: a name that is in none of these is in none.
FRUITLESS = 64


def gather_values(
    checkpoint: Checkpoint, state: StateView, base: int, document: Document
) -> SavedValues:
    """Return the values of ``state``: from ``document`` of the saved rank ``base``, the missing
    from others.

    The result is the same for ranks with the same objects and the same base.
    """
    objects, stored = state.objects, state.stored
    aliases = read_aliases(checkpoint, document)
    there = set(things(objects, document))
    wanted = needs(objects, stored, aliases, state.names, state.leaves)
    missing = [need for need in wanted if need.thing not in there]
    documents: dict[int, Document] = {
        base: {"shared": document.get("shared", {}), "aliases": aliases}
    }
    if missing:
        groups = _by_holders(checkpoint.layout, missing)
        documents |= _read(checkpoint, objects, base, document, groups)
    return gather(objects, documents, stored, state.names)


def _by_holders(layout: Layout, missing: Iterable[ItemSource]) -> dict[Ranks, set[Any]]:
    """Group missing items by the ranks that may have them."""
    where = _Where(layout)
    groups: dict[Ranks, set[Any]] = {}
    for need in missing:
        is_alias = need.thing.kind == "alias"
        ranks = where.one_of_each(need.leaves[0]) if is_alias else where.ranks(need.leaves)
        groups.setdefault(ranks, set()).add(need.thing)
    return groups


def _read(
    checkpoint: Checkpoint,
    objects: Objects,
    base: int,
    first: Document,
    groups: dict[Ranks, set[Any]],
) -> dict[int, Document]:
    """Yield documents of other ranks: always of the one with most of the missing items, the
    lowest first.
    """
    documents: dict[int, Document] = {}
    in_vain = 0
    while in_vain < FRUITLESS:
        counts: Counter[int] = Counter()
        for ranks, some in groups.items():
            for rank in ranks if some else ():
                if rank != base and rank not in documents and rank in checkpoint.files:
                    counts[rank] += len(some)
        if not counts:
            break
        rank = min(counts, key=lambda each: (-counts[each], each))
        document = read_values(checkpoint, rank)
        aliases = read_aliases(checkpoint, document)
        there = set(things(objects, document))
        documents[rank] = trim(objects, {**document, "aliases": aliases}, first)
        is_in_vain = not any(some & there for some in groups.values())
        in_vain += is_in_vain
        groups = {ranks: some - there for ranks, some in groups.items()}
    return documents


class _Where:
    """Finds the ranks that had a leaf, by its name or by a prefix of its name."""

    def __init__(self, layout: Layout) -> None:
        self._leaves = layout.leaves
        self._names = [leaf.name for leaf in layout.leaves]
        self._ranks: dict[int, Ranks] = {}

    def ranks(self, names: Sequence[str]) -> Ranks:
        """Return the ranks of the first of these names that is stored; none if none is."""
        for name in names:
            at = bisect_left(self._names, name)
            there = self._names[at] if at < len(self._names) else ""
            if there == name or (name.endswith(".") and there.startswith(name)):
                return self._of(self._leaves[at])
        return ()

    def one_of_each(self, beginning: str) -> Ranks:
        """Return the lowest rank of each different set of ranks that had a leaf with this
        prefix.
        """
        at = bisect_left(self._names, beginning)
        lowest: set[int] = set()
        while at < len(self._names) and self._names[at].startswith(beginning):
            lowest.add(self._of(self._leaves[at])[0])
            at += 1
        return tuple(sorted(lowest))

    def _of(self, leaf: LeafSpec) -> Ranks:
        key = id(leaf.instances)
        if key not in self._ranks:
            ranks = {rank for one in leaf.instances for rank in one.ranks}
            self._ranks[key] = tuple(sorted(ranks))
        return self._ranks[key]
