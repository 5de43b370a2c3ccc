"""Who the hosts of a start are, how the others reach them, and what secret they share."""

from __future__ import annotations

import socket
from functools import reduce
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.errors import UsageError
from holdfast.geometry.rank_ranges import Range
from holdfast.hosts import HostFact, HostTable, hosts_of, secret_word
from holdfast.transport.wire.rank_tree import all_said, join_said, said_by

A = HostFact("a", "boot-1", "10.0.0.1", "rack-1")
B = HostFact("b", "boot-2", "10.0.0.2", "rack-2")


def facts_of(*facts: HostFact) -> list[tuple[HostFact, list[Range]]]:
    """What ranks 0, 1, 2... said."""
    return [(fact, [(rank, rank + 1)]) for rank, fact in enumerate(facts)]


def test_hosts_are_in_order_of_their_lowest_rank_with_all_that_they_said() -> None:
    hosts = hosts_of(facts_of(B, A, B, A), rank=3)
    assert hosts is not None and hosts.are_several
    assert [(one.id, one.ranks, one.address, one.domain) for one in hosts.table] == [
        ("b", (0, 2), "10.0.0.2", "rack-2"),
        ("a", (1, 3), "10.0.0.1", "rack-1"),
    ]
    assert hosts.own_id == "a"
    speakers = [rank for rank in range(4) if one_of([B, A, B, A], rank).speaks_for(rank)]
    assert speakers == [0, 1]


def one_of(facts: list[HostFact], rank: int) -> HostTable:
    hosts = hosts_of(facts_of(*facts), rank)
    assert hosts is not None
    return hosts


def test_ranks_on_one_host_need_no_table_unless_there_were_more_before() -> None:
    assert hosts_of(facts_of(A, A), rank=0).is_alone
    alone = hosts_of(facts_of(A, A), rank=1, were_more=True)
    assert alone is not None and not alone.are_several
    assert alone.table[0].ranks == (0, 1)


@pytest.mark.parametrize("address", ["", "127.0.0.1", "127.0.1.1", "::1"])
def test_a_host_that_others_cannot_reach_is_named_with_what_to_set(address: str) -> None:
    lost = msgspec.structs.replace(B, address=address)
    with pytest.raises(UsageError, match=r"host b does not know by which address.*HOST_ADDRESS"):
        hosts_of(facts_of(A, lost), rank=0)


def test_hosts_that_are_one_machine_reach_each_other_on_it() -> None:
    near = HostFact("b", A.machine, "")
    assert [one.address for one in one_of([A, near], 0).table] == ["10.0.0.1", "127.0.0.1"]


# ── the address ──────────────────────────────────────────────────────────────────────────────


def test_the_address_that_is_set_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOST_ADDRESS", " node7.train ")
    monkeypatch.setenv("HOLDFAST_FAILURE_DOMAIN", "rack-9")
    monkeypatch.setattr(socket, "getaddrinfo", never)
    fact = HostFact.of_this(8)
    assert (fact.address, fact.domain) == ("node7.train", "rack-9")


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("a name was looked up")


@pytest.mark.parametrize(("ranks", "local"), [(1, ""), (8, "8")])
def test_no_name_is_looked_up_where_all_ranks_are_on_this_host(
    monkeypatch: pytest.MonkeyPatch, ranks: int, local: str
) -> None:
    monkeypatch.delenv("HOLDFAST_HOST_ADDRESS", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "a-name-that-hangs.example")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setattr(socket, "getaddrinfo", never)
    assert HostFact.of_this(ranks).address == ""


def test_else_it_is_the_one_that_reaches_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_HOST_ADDRESS", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert HostFact.of_this(8).address == "127.0.0.1"


@pytest.mark.parametrize("name", ["host..name", "x" * 70, "no-such-host.invalid"])
def test_a_name_that_is_none_costs_nothing_where_nobody_needs_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("HOLDFAST_HOST_ADDRESS", raising=False)
    monkeypatch.setenv("MASTER_ADDR", name)
    if name.endswith(".invalid"):
        monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert HostFact.of_this(8).address == ""


def unknown(*_: Any, **__: Any) -> Any:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


# ── the secret ───────────────────────────────────────────────────────────────────────────────


def agree_as(rank: int, said: list[bytes]) -> tuple[HostTable, list[bytes]]:
    """What rank ``rank`` says, when the others say the rest of ``said``."""
    told = secret_word(rank)
    words = [told if n == rank else each for n, each in enumerate(said)]
    hosts = one_of([A, B], rank)
    [column] = all_said(reduce(join_said, (said_by(n, [each]) for n, each in enumerate(words))))
    hosts.take_secret(column)
    return hosts, [told]


def test_rank_0_makes_a_secret_that_all_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_SECRET_FILE", raising=False)
    first, told = agree_as(0, [b"", b"none"])
    assert len(first.secret) == 32 and told == [first.secret]
    other, told = agree_as(1, [first.secret, b""])
    assert other.secret == first.secret and told == [b"none"]


def test_a_secret_from_a_file_is_told_to_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"0123456789abcdef-in-a-file")
    file.chmod(0o600)
    monkeypatch.setenv("HOLDFAST_SECRET_FILE", str(file))
    for rank in (0, 1):
        hosts, told = agree_as(rank, [b"", b""])
        assert hosts.secret == b"0123456789abcdef-in-a-file" and told == [b""]


def test_hosts_of_which_some_have_a_file_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HOLDFAST_SECRET_FILE", raising=False)
    with pytest.raises(UsageError, match="HOLDFAST_SECRET_FILE is not set on ranks"):
        agree_as(0, [b"", b""])
