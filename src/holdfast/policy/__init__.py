"""When to save and what to keep, as values: pure decisions without clock or storage."""

from __future__ import annotations

from holdfast.policy.interval import Every
from holdfast.policy.retention import Keep

__all__ = ["Every", "Keep"]
