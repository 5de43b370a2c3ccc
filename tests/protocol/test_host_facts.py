"""What the settings of a host say of it reaches every keeper of the run, or is refused."""

from __future__ import annotations

import pytest

from holdfast.errors import UsageError
from holdfast.geometry.rank_ranges import Range
from holdfast.hosts import HostFact, hosts_of


def test_a_host_tells_its_rate_and_its_domain_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    facts: list[tuple[HostFact, list[Range]]] = []
    for name, rate in (("a", "500M"), ("b", "")):
        monkeypatch.setenv("HOLDFAST_HOST_ID", name)
        monkeypatch.setenv("HOLDFAST_FAILURE_DOMAIN", f"rack-{name}")
        monkeypatch.setenv("HOLDFAST_PARITY_RATE", rate)
        facts.append((HostFact.of_this(1), [(len(facts), len(facts) + 1)]))
    hosts = hosts_of(facts, 1)
    assert hosts is not None
    assert [(one.id, one.parity_rate, one.domain) for one in hosts.table] == [
        ("a", 500_000_000, "rack-a"),
        ("b", 0, "rack-b"),
    ]


def test_a_rate_that_means_nothing_is_refused_before_the_run_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOLDFAST_PARITY_RATE", "quick")
    with pytest.raises(UsageError, match="HOLDFAST_PARITY_RATE='quick'"):
        HostFact.of_this(1)
