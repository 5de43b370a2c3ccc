"""Trainers are killed at random moments; what comes back is one whole step."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import holdfast
from holdfast.catalogue import catalogue
from holdfast.storage.local import LocalStore
from lives import Lives


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world", "kills"), [(1, 15), (2, 30)])
def test_a_killed_trainer_resumes_at_the_last_completed_step_or_the_one_before(
    world: int, kills: int, tmp_path: Path
) -> None:
    with Lives(tmp_path / "run", seed=world) as lives:
        completed = -1
        sources = []
        for _ in range(kills):
            lives.start(world, 100_000, layout="fsdp" if world > 1 else "plain")
            step, source = lives.wait_restored(world)
            sources.append(source)
            assert step in (completed, completed - 1), f"completed {completed}, restored {step}"
            time.sleep(lives.random.random() * 0.25)
            lives.kill([lives.random.randrange(world)])
            completed = max(step, lives.end(world))
        lives.start(world, 3, layout="fsdp" if world > 1 else "plain")
        step, source = lives.wait_restored(world)
        assert step in (completed, completed - 1)
        lives.wait_end()
    assert completed > 2 * kills, "hardly any step was trained: the test shows nothing"
    assert set(sources[2:]) == {"memory"}
    _check_storage(tmp_path / "run", step + 3)


def _check_storage(root: Path, newest: int) -> None:
    """Every published checkpoint holds one step, whole."""
    found = catalogue(LocalStore(root))
    assert not found.broken
    assert found.latest is not None and found.latest.step == newest
    for manifest in found.manifests[-8:]:
        with holdfast.open(root, f"{manifest.incarnation}-{manifest.step}") as checkpoint:
            step = manifest.step
            for name in checkpoint.leaves:
                values = set(checkpoint.read(name).flatten().tolist())
                if "momentum" in name:
                    assert values == {-float(step + 1)}
                elif name.endswith("seen"):
                    assert values == {float(step)}
                else:
                    assert values == {(step + 1) * (step + 2) / 2}
