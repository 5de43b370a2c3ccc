"""Injects faults on demand: stores that fail, hosts that are lost, bytes that change.

Nothing here imports torch. See docs/guides/testing-your-own-run.md.
"""

from __future__ import annotations

from holdfast.testing.faults.events import (
    Encoding,
    Held,
    Row,
    events_of,
    flip,
    flip_image,
    flip_row,
    held,
    is_capturing,
    is_persisting,
    newest_durable,
    newest_protected,
    rows,
    tear_image,
    tear_record,
    tear_row_record,
    wait_protected,
)
from holdfast.testing.faults.stores import (
    FaultyStore,
    LateFsyncStore,
    Mode,
    PassingSink,
    PassingStore,
    SlowStore,
    StaleListStore,
    Stopped,
)
from holdfast.testing.runs.processes import wait_until
from holdfast.testing.runs.simulated_hosts import Hosts

__all__ = [
    "Encoding",
    "FaultyStore",
    "Held",
    "Hosts",
    "LateFsyncStore",
    "Mode",
    "PassingSink",
    "PassingStore",
    "Row",
    "SlowStore",
    "StaleListStore",
    "Stopped",
    "events_of",
    "flip",
    "flip_image",
    "flip_row",
    "held",
    "is_capturing",
    "is_persisting",
    "newest_durable",
    "newest_protected",
    "rows",
    "tear_image",
    "tear_record",
    "tear_row_record",
    "wait_protected",
    "wait_until",
]
