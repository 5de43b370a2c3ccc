"""A server that is ready to be asked, and a file in shared memory that it offers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.peers.peering import Served, close_pullers, random_file

SIZE = 300_000


@pytest.fixture(autouse=True)
def closed_pullers() -> Iterator[None]:
    yield
    close_pullers()


@pytest.fixture
def served() -> Iterator[Served]:
    with Served() as one:
        yield one


@pytest.fixture
def data(served: Served, arena_dir: Path) -> bytes:
    """What ``served`` offers as /a."""
    found = random_file(arena_dir / "a", SIZE)
    served.offer("/a", arena_dir / "a")
    return found
