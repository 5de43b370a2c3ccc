"""The kit Holdfast is tested with, shipped so that others can test their own stores and runs.

``holdfast.testing.faults`` has stores that fail and hosts that are lost;
``holdfast.testing.store_suite`` needs pytest and is imported by itself.
"""

from __future__ import annotations

from holdfast.testing.faults import FaultyStore, Hosts, LateFsyncStore, SlowStore, Stopped

__all__ = ["FaultyStore", "Hosts", "LateFsyncStore", "SlowStore", "Stopped"]
