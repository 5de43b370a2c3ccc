"""Slot records with every field set."""

from __future__ import annotations

from holdfast.protocol.arena import SlotRecord


def record(step: int, state: str = "captured") -> SlotRecord:
    """The record of this step's image."""
    return SlotRecord(
        state=state,
        boot_id="b",
        run_id="r",
        incarnation=1,
        nonce="n",
        step=step,
        attempt=f"a{step}",
        rank=3,
        world=4,
        layout="l" * 32,
        image_bytes=77,
        header_xxh3="0" * 16,
        table_xxh3="1" * 16,
        writer_pid=12,
        writer_start=34,
    )
