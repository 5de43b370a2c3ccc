"""Of thousands of ranks, each block is read about once, and a host is connected to few others."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from holdfast.geometry.layout import merge
from holdfast.restore.planning import block_rounds

MOST_READ, MOST_CONNECTIONS = 1.02, 64
WORLD, LEAVES = 4096, 60


@pytest.fixture
def plan(importable: None) -> ModuleType:
    return importlib.import_module("benchmarks.plan.exchange")


def _counts(plan: ModuleType) -> dict[str, float]:
    meshes = importlib.import_module("benchmarks.plan.meshes")
    [kind] = [kind for kind in meshes.kinds(WORLD) if kind.name.startswith("HSDP")]
    layout = merge([tuple(kind.table(0, LEAVES))] * WORLD)
    counts: dict[str, float] = plan.count_reads(kind, layout, LEAVES)
    return counts


def test_replicas_read_each_block_about_once_over_few_connections(plan: ModuleType) -> None:
    found = _counts(plan)
    assert found["hosts"] == WORLD / 8
    assert 1 <= found["read_over_unique"] <= MOST_READ
    assert found["alone_over_unique"] > 10
    assert found["at_once"] <= MOST_CONNECTIONS
    replicas = WORLD // 256
    assert found["peers"] <= replicas - 1 + block_rounds.MOST_TAKERS - 1


def test_a_block_that_all_want_is_not_asked_for_at_one_host(
    plan: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_rounds, "MOST_TAKERS", WORLD)
    assert _counts(plan)["peers"] == WORLD / 8 - 1  # as it would be
