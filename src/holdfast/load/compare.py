"""What a restore is asked for, and what of a checkpoint that comes to for the state of this rank.

Nothing is changed by it. Where neither rules nor a choice stand between the state and what is
stored, leaves are those of the same names, and nothing is worked out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import msgpack

from holdfast.load.documents import gather_values
from holdfast.load.means import unequal_copies, unequal_numbers
from holdfast.load.read import read_aliases
from holdfast.load.source import Checkpoint
from holdfast.rules import Rules
from holdfast.state.as_saved import stored_table
from holdfast.state.choice import Choice, refuse_different
from holdfast.state.declared import declarations
from holdfast.state.following import Document
from holdfast.state.objects import Objects, State
from holdfast.state.offer import Lens, Offer, Spec
from holdfast.state.offering import make_offer
from holdfast.state.restore import Restoring
from holdfast.state.through import Through
from holdfast.state.usage import refuse_unused, say_usage

#: Which rules and which patterns of ``only`` are for something on a rank, and those patterns.
_Said = tuple[bytes, bytes, list[str] | None]
_SAYS_NOTHING: _Said = (b"", b"", None)


@dataclass(frozen=True, slots=True)
class Request:
    """What a restore is to do beside filling the state with all that is stored.

    ``rules``: what the tensors of the state are in the checkpoint. ``stored_rules``: those that the
    checkpoint was saved without. ``choice``: what of it is wanted.
    """

    rules: Rules | None = None
    stored_rules: Rules | None = None
    choice: Choice = field(default_factory=Choice)

    @property
    def is_plain(self) -> bool:
        """Whether all leaves are wanted, and are what they are called."""
        has_rules = self.rules is not None or self.stored_rules is not None
        return not has_rules and self.choice.is_all and not declarations()

    def refuse_unused(self, said: Sequence[bytes]) -> None:
        """UsageError, the same on all ranks, for a rule or pattern that means nothing to any.

        And for ranks that want other parts of the checkpoint.
        """
        heard = [msgpack.decode(one, type=_Said) if one else _SAYS_NOTHING for one in said]
        refuse_different([only for _, _, only in heard])
        refuse_unused([usage for usage, _, _ in heard])
        self.choice.refuse_unused([used for _, used, _ in heard])


@dataclass(frozen=True, slots=True)
class Compared:
    """How this state and a checkpoint fit. ``problems``: why they do not, in words.

    ``said``: what the other ranks are to know of the request here.
    """

    restoring: Restoring
    problems: list[str]
    offer: Offer | None = None
    said: bytes = b""

    @property
    def claimed(self) -> set[str]:
        """The stored leaves that something in this state takes."""
        claimed = self.restoring.claimed()
        return claimed if self.offer is None else (claimed & self.offer.rest) | self.offer.claimed


@dataclass(frozen=True, slots=True)
class Comparison:
    """One checkpoint and the state of one rank. ``base``: the saved rank whose values count."""

    checkpoint: Checkpoint
    state: State
    base: int
    values: Document
    own: Mapping[str, Any]
    rank: int
    world: int
    lists: Collection[str] = ()
    """The keys of what all saved ranks have of lists."""

    def compare(self, objects: Objects, request: Request) -> Compared:
        """What stands between them. UsageError for a request that does not fit the state."""
        layout = self.checkpoint.layout
        stored = {leaf.name: (leaf.dtype, leaf.shape) for leaf in layout.leaves}
        if not request.is_plain:
            return self._through(objects, request, stored)
        found = gather_values(self.checkpoint, objects, self.base, self.values, stored)
        restoring = Restoring(self.state, objects, stored, found, self.own, lists=self.lists)
        return Compared(restoring, restoring.amiss)

    def _through(self, objects: Objects, request: Request, stored: Mapping[str, Spec]) -> Compared:
        choice, table = request.choice, None
        names = [*stored, *objects.paths]
        objects.restrict(choice, stored)
        if request.stored_rules is not None:
            shapes = {leaf: shape for leaf, (_, shape) in stored.items()}
            aliases = read_aliases(self.checkpoint, self.values)
            table = stored_table(request.stored_rules, objects.modules, shapes, aliases)
        through = Through(request.rules, self.rank, self.world, table)
        usage = say_usage(through, objects)
        lens = Lens(objects, through, stored, choice)
        found = gather_values(
            self.checkpoint, objects, self.base, self.values, stored, lens.names, lens.leaves
        )
        offer = make_offer(lens, found.aliases)
        found = replace(found, aliases=offer.aliases)
        restoring = Restoring(
            self.state, objects, offer.specs, found, self.own,
            lists=self.lists, left=offer.left, references=offer.references,
        )  # fmt: skip
        problems = [*offer.problems, *restoring.amiss]
        problems += unequal_numbers(self.checkpoint, offer)
        problems += unequal_copies(self.checkpoint, offer)
        used = choice.used([*names, *offer.specs, *offer.left])
        return Compared(restoring, problems, offer, msgpack.encode((usage, used, choice.texts)))
