"""Stores bytes: in a directory, or in memory for tests; base.Store is what every store does."""

from __future__ import annotations

from holdfast.storage.base import ImageSink, Lock, Store
from holdfast.storage.local import LocalStore
from holdfast.storage.memory import MemoryStore

__all__ = ["ImageSink", "LocalStore", "Lock", "MemoryStore", "Store"]
