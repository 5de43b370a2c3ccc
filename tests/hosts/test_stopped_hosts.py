"""The keeper of one of several hosts hangs: its peers and their training do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.observe.report_builder import read_report
from holdfast.testing.faults import Hosts
from support.runs.evidence import newest_sealed, read_events
from support.runs.lives import Lives, read_progress, wait_for
from support.runs.losing import wait_protected


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_training_goes_on_while_the_keeper_of_a_host_is_stopped_and_protection_after_it(
    tmp_path: Path, arena_dir: Path
) -> None:
    root, simulated = tmp_path / "run", Hosts(arena_dir)
    with Lives(root, seed=46) as lives:
        lives.start(
            3,
            100_000,
            storage=100_000,
            hosts=("a", "b", "c"),
            options={"parity": 1},
            patience={"grant_s": 2.0},
        )
        lives.wait_restored(3)
        reached = wait_protected(lives, root, 1)
        simulated.stop_keeper("b")
        lives.wait_progress(3, read_progress(lives.directory, 3) + 20, timeout_s=60)
        simulated.continue_keeper("b")
        wait_protected(lives, root, 1, after=max(reached, read_progress(lives.directory, 3)))
        assert simulated.keepers("b")
        lives.end(3)
        simulated.lose("c")
        lives.start(2, 3, storage=100_000, hosts=("b", "a"), options={"parity": 1})
        step, source = lives.wait_restored(2)
        assert source == "memory" and step > reached
        lives.wait_end()


@pytest.mark.timeout(120)
def test_a_host_that_is_late_costs_one_wait_is_named_and_is_waited_for_again(
    tmp_path: Path, arena_dir: Path
) -> None:
    root, simulated = tmp_path / "run", Hosts(arena_dir)
    with Lives(root, seed=47) as lives:
        lives.start(2, 100_000, storage=None, hosts=("a", "b"), patience={"grant_s": 1.0})
        lives.wait_restored(2)

        def wait_sealed(after: int) -> None:
            wait_for(lambda: True if newest_sealed(root, 2) > after else None, "s", timeout_s=60)

        wait_sealed(3)
        simulated.stop_keeper("b")
        lives.wait_progress(2, read_progress(lives.directory, 2) + 40)
        missed = read_events(root, "keeper", "SnapshotMissed")
        (late,) = [event for event in missed if event["late_hosts"]]
        assert late["late_hosts"] == ["b"] and "ranks [1] on b" in late["reason"]
        simulated.continue_keeper("b")
        wait_sealed(read_progress(lives.directory, 2))
        assert read_report(root).late_hosts["b"] >= 1
        reached = newest_sealed(root, 2)
        lives.end(2)
        lives.start(2, 3, storage=None, hosts=("a", "b"))
        step, source = lives.wait_restored(2)
        assert source == "memory" and step >= reached
        lives.wait_end()
