"""Decides when to save and which checkpoints to keep: pure values without clock or storage."""

from __future__ import annotations

from holdfast.policy.when import Every, Keep

__all__ = ["Every", "Keep"]
