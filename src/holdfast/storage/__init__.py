"""Stores bytes: provides what a checkpoint needs from a directory or a bucket, and nothing more."""

from __future__ import annotations

from holdfast.storage.base import ImageSink, Lock, Store
from holdfast.storage.local import LocalStore
from holdfast.storage.memory import MemoryStore

__all__ = ["ImageSink", "LocalStore", "Lock", "MemoryStore", "Store"]
