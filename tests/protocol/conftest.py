"""A slot of its own for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.protocol.arena import PAGE_BYTES, SlotFile


@pytest.fixture
def slot(tmp_path: Path) -> SlotFile:
    """A slot file of three pages."""
    return SlotFile.create(tmp_path / "00001.slot", 3 * PAGE_BYTES)
