"""What ``holdfast doctor --for`` computes is what a real run takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.cli.doctor.rules.sizing import compute_sizing
from holdfast.persist.commit import SWEPT_AFTER
from holdfast.protocol.arena import IMAGE_START, SLOT_SUFFIX

MIB = 1 << 20


def test_a_run_takes_the_shared_memory_and_the_storage_that_were_computed(
    tmp_path: Path, arena_dir: Path
) -> None:
    state = {"weight": torch.zeros(2 * MIB, dtype=torch.float32)}
    needs = compute_sizing(
        8 * MIB, keep_last=1, slot_head_bytes=IMAGE_START, swept_after=SWEPT_AFTER
    )
    most = 0
    keep = holdfast.Keep(last=1)
    with holdfast.Checkpointer(str(tmp_path / "run"), state, keep=keep) as ckpt:
        for step in range(8):
            ckpt.save(step, durable=True).wait_durable()
            images = list((tmp_path / "run").rglob("live-*.safetensors"))
            most = max(most, len(images))
            if step == 0:
                image_bytes = images[0].stat().st_size
        slots = list(arena_dir.rglob(f"*{SLOT_SUFFIX}"))
        assert sum(slot.stat().st_size for slot in slots) == needs.slots_bytes == needs.shared_bytes
    assert needs.checkpoints is not None
    assert needs.checkpoints - 1 <= most <= needs.checkpoints
    assert image_bytes == pytest.approx(needs.image_bytes, abs=64 << 10)
