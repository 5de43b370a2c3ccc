"""Whatever the sizes of chunks, segments and reads, the step that was saved comes back exactly.

Each update comes right behind its save, as soon as the fence lets it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

import holdfast
from holdfast import events
from holdfast.capture import copy_plan as capture
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.restore.planning import plan
from support.runs.launch import run_ranks
from support.runs.lives import build, take_step, wrong_elements
from support.runs.slow_keepers import chunks

ROWS = 61  # 7.6 MiB in all ranks' images together: several chunks, none of them whole at the end
STEPS, DURABLE = 6, 2


class Sizes(NamedTuple):
    """In bytes; everything that is cut into pieces on its way."""

    chunk: int
    segment: int
    batch: int


SIZES = [
    Sizes(chunk=BLOCK_BYTES, segment=BLOCK_BYTES, batch=BLOCK_BYTES),
    Sizes(chunk=3 * BLOCK_BYTES, segment=3 * BLOCK_BYTES, batch=2 * BLOCK_BYTES),
    Sizes(chunk=1 << 30, segment=1 << 30, batch=1 << 30),
]


def _save_and_come_back(rank: int, world: int, root: str, sizes: Sizes) -> list[str]:
    """What is wrong with the steps in memory and in storage."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "SEGMENT_BYTES", sizes.segment)
        patch.setattr(plan, "BATCH_BYTES", sizes.batch)
        layout = "fsdp" if world > 1 else "plain"
        heard: list[events.Event] = []
        stop = events.subscribe(lambda event, _: heard.append(event))
        model, state = build(layout, ROWS)
        checkpointer = holdfast.Checkpointer(root, state, memory=None, storage=None)
        for step in range(STEPS):
            take_step(model, state, step)
            handle = checkpointer.save(step, durable=step == DURABLE)
        handle.wait_captured(60)
        take_step(model, state, STEPS)
        checkpointer._hang_up()
        wrong = [repr(event) for event in heard if isinstance(event, _TROUBLE)]

        model, state = build(layout, ROWS)
        with holdfast.Checkpointer(root, state, memory=None, storage=None) as again:
            restored = again.restore()
            assert restored is not None and (restored.step, restored.source) == (
                STEPS - 1,
                "memory",
            )
            wrong += wrong_elements(model, state, STEPS - 1)
            take_step(model, state, STEPS)
            again.save(STEPS, durable=True).wait_durable(60)
        for step in (DURABLE, STEPS):
            model, state = build(layout, ROWS)
            holdfast.load(root, state, step=step)
            wrong += wrong_elements(model, state, step)
        stop()
        return wrong


_TROUBLE = (events.SnapshotMissed, events.PersistBroke, events.SourceDropped, events.Warned)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("world", [1, 2])
def test_the_step_that_was_saved_comes_back_whatever_the_sizes(
    world: int, sizes: Sizes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = chunks(tmp_path, monkeypatch, chunk_bytes=sizes.chunk)
    root = tmp_path / "root"
    if world == 1:
        found = [_save_and_come_back(0, 1, str(root), sizes)]
    else:
        found = run_ranks(2, _save_and_come_back, str(root), sizes)
    assert found == [[]] * world
    assert mark.exists()
