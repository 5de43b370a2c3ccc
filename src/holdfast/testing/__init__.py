"""The kit Holdfast is tested with, shipped so that others can test their own stores with it.

``holdfast.testing.store_suite`` needs pytest and is imported by itself.
"""

from __future__ import annotations

from holdfast.testing.faults import FaultyStore, LateFsyncStore, SlowStore, Stopped

__all__ = ["FaultyStore", "LateFsyncStore", "SlowStore", "Stopped"]
