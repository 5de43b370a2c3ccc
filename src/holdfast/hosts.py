"""Builds the table of a run's hosts on which all ranks agree at each start, with the run's secret.

Keepers learn of each other through their trainers alone: at each start one rank of each host asks
its keeper for its knowledge and its address, and sends it the resulting table.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from holdfast.errors import UsageError
from holdfast.geometry.rank_ranges import Range, ranks_in
from holdfast.meeting import LOOPBACK, address_of_this_host, host_id
from holdfast.policy.arguments import parity_rate
from holdfast.protocol import messages as m
from holdfast.protocol.arena import boot_id
from holdfast.transport.channel import secret_from_environment
from holdfast.transport.wire.rank_tree import Said

DOMAIN = "HOLDFAST_FAILURE_DOMAIN"
PARITY_RATE = "HOLDFAST_PARITY_RATE"
_SECRET_BYTES = 32
_OF_RUN = b"holdfast run\n"
_FROM_FILE = b""
#: Seconds for which a keeper waits for the coordinator once the run has begun: there are many
#: saves.
LATER_S = 1.0

Request = Callable[[m.Message, type[m.Message]], m.Message]


class HostFact(msgspec.Struct, frozen=True):
    """The description of a host by one of its ranks."""

    id: str
    machine: str
    """The physical machine: in a test several hosts share one."""
    address: str
    domain: str = ""
    """A rack, a switch, a power feed: a unit that fails together."""
    parity_rate: int = 0
    """Bytes a second, at most, that parity may take of its network; 0: no bound."""

    @classmethod
    def of_this(cls, ranks: int) -> HostFact:
        """Describes the host of this process, in a run of so many ranks.

        Raises UsageError for an invalid setting.
        """
        domain = os.environ.get(DOMAIN, "").strip()
        address = address_of_this_host(ranks)
        rate = parity_rate(PARITY_RATE, os.environ.get(PARITY_RATE, ""))
        return cls(host_id(), boot_id(), address, domain, rate)


@dataclass(slots=True)
class HostTable:
    """All hosts of this start, this rank's own among them; the first is that of rank 0."""

    table: tuple[m.HostEntry, ...]
    own: int
    secret: bytes = b""
    within_s: float = LATER_S
    """Seconds for which a keeper waits for the coordinator after it got its role."""
    is_alone: bool = False
    """True if all ranks are on one host, and no other can have memory of the run."""

    @property
    def own_id(self) -> str:
        """The name of this rank's host."""
        return self.table[self.own].id

    @property
    def own_ranks(self) -> tuple[int, ...]:
        """The ranks of this host."""
        return self.table[self.own].ranks

    @property
    def are_several(self) -> bool:
        """True if there is another host than this one."""
        return len(self.table) > 1

    def speaks_for(self, rank: int) -> bool:
        """True if this rank is the one of its host that speaks to the keeper."""
        return rank == min(self.table[self.own].ranks)

    def part(self, incarnation: int, nonce: str) -> m.AssignRole:
        """Returns the role message for this host's keeper."""
        return m.AssignRole(
            incarnation=incarnation,
            nonce=nonce,
            hosts=self.table,
            host=self.own,
            secret=self.secret,
            within_s=self.within_s,
        )

    # ── agreeing ─────────────────────────────────────────────────────────────────────────

    def take_secret(self, said: Sequence[Said], run: str = "") -> None:
        """Take the secret that all have: from the file that all hosts have, or as rank 0 made it
        for this start alone. ``said``: see ``secret_word``.

        ``run``: the run and its root. Each derives another secret from one file, so that no keeper
        is mistaken for that of a copy. Raises UsageError where only some have the file.
        """
        without = [one for one in said if one.value != _FROM_FILE]
        if without and len(without) < len(said):
            ranks = sorted(rank for one in without for rank in ranks_in(one.ranks))
            raise UsageError(
                f"HOLDFAST_SECRET_FILE is not set on ranks {ranks}, but on the others: set it on "
                "every host, to a file with the same bytes, or nowhere"
            )
        secret = said[0].value if without else secret_from_environment() or b""
        self.secret = hmac.digest(secret, _OF_RUN + run.encode(), "sha256") if run else secret

    def probe(self, rank: int, request: Request) -> bytes:
        """Prepare this host's keeper for an incarnation that will begin; return what it says.

        On one rank of the host; b"" on the others.
        """
        if not self.speaks_for(rank):
            return b""
        answer = request(
            m.ProbeHost(
                secret=self.secret,
                address=self.table[self.own].address,
                is_coordinator=self.own == 0,
            ),
            m.HostProbed,
        )
        assert isinstance(answer, m.HostProbed)
        known = self.own, answer.newest, answer.port, answer.control_port
        return msgspec.json.encode(known)

    def take_ports(self, said: Sequence[Said]) -> int:
        """Take the ports of all keepers; return the newest incarnation that any of them knows."""
        newest, table = 0, list(self.table)
        for one in said:
            if one.value:
                host, known, port, control_port = msgspec.json.decode(
                    one.value, type=tuple[int, int, int, int]
                )
                newest = max(newest, known)
                table[host] = msgspec.structs.replace(
                    table[host], port=port, control_port=control_port
                )
        self.table = tuple(table)
        return newest


def secret_word(rank: int) -> bytes:
    """Return what a rank says of the secret: one that rank 0 makes, where no file has it.

    What is in a file is never told to other ranks: a file is for those who do not trust that.
    """
    if secret_from_environment() is not None:
        return _FROM_FILE
    return secrets.token_bytes(_SECRET_BYTES) if rank == 0 else b"none"


def hosts_of(
    facts: Sequence[tuple[HostFact, Sequence[Range]]], rank: int, *, were_more: bool = False
) -> HostTable:
    """Returns the hosts that ranks described, in order of their lowest.

    ``facts``: in this order too, with the ranks that gave each. ``were_more``: an earlier start may
    have been on several, whose memory this one has parity of. Raises UsageError when there are
    several and one of them does not know its address for the others.
    """
    hosts: dict[str, tuple[HostFact, list[int]]] = {}
    for fact, some in facts:
        hosts.setdefault(fact.id, (fact, []))[1].extend(ranks_in(some))
    is_one_machine = len({fact.machine for fact, _ in facts}) == 1
    table = []
    for id_, (fact, ranks) in hosts.items():
        said = fact.address
        address = (said or LOOPBACK) if is_one_machine else said
        if not is_one_machine and (not address or address.startswith("127.") or address == "::1"):
            raise UsageError(
                f"host {id_} does not know by which address the other hosts reach it (it found "
                f"{address or 'none'}): set HOLDFAST_HOST_ADDRESS to it there, or MASTER_ADDR to "
                "an address and no name of the host itself"
            )
        table.append(
            m.HostEntry(
                id=id_,
                ranks=tuple(sorted(ranks)),
                address=address,
                domain=fact.domain,
                parity_rate=fact.parity_rate,
            )
        )
    own = next(n for n, place in enumerate(table) if rank in place.ranks)
    return HostTable(tuple(table), own, is_alone=len(table) == 1 and not were_more)
