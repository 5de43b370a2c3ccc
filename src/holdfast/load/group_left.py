"""PURE. What is left of a group that coded an attempt, and what can be made of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from holdfast.load.holdings import Coding, Image, Row

#: Which hosts hold something.
Hosts = Collection[str]


class GroupLeft:
    """A coding, and what there is of it: ``held`` images, ``rows`` of parity, by stripe and row.

    ``answered``: the hosts that told what they hold.
    """

    def __init__(
        self, coding: Coding, held: Mapping[Image, Hosts], rows: Mapping[tuple[int, int], Hosts],
        answered: Hosts,
    ) -> None:  # fmt: skip
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
        self.rows = tuple(Row(*at, tuple(sorted(hosts))) for at, hosts in sorted(rows.items()))
        self._slack = [self._slack_of(stripe) for stripe in range(self._placement.members)]
        self.least = min(self._slack)

    def image_of(self, rank: int) -> Image:
        """The image of this rank, as this group coded it."""
        member, image = self.places[rank]
        return self.coding.members[member].images[image].image

    def slack(self, rank: int) -> int:
        """How many more hosts can be lost, whichever they are, and the image of ``rank`` be there.

        Below 0: it cannot be decoded as it is.
        """
        placement, (member, image) = self._placement, self.places[rank]
        size = placement.image_bytes[member][image]
        columns = -(-size // max(1, placement.segment_bytes(size)))
        stripes = (n for n in range(placement.members) if placement.number(member, n) < columns)
        return min((self._slack[stripe] for stripe in stripes), default=self.least)

    def _slack_of(self, stripe: int) -> int:
        """Of one stripe: the members that are there beyond what it takes, by their hosts."""
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
        """For each member, on whom its part of a stripe hangs; None: it is not there."""
        columns = self._placement.columns
        for number, member in enumerate(self.coding.members):
            column = self._placement.number(number, stripe)
            if column >= columns:
                yield self._rows.get((stripe, column - columns))
            elif number in self.absent:
                yield None
            else:  # without images its bytes count as zeros, and hang on nobody
                yield {host for one in member.images for host in self._held[one.image]}

    def why(self, rank: int) -> str:
        """Why it does not give the image of this rank."""
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
