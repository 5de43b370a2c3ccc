"""Agents of several hosts start their workers again on what is left, from the others' memory."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from holdfast.testing.faults import Hosts
from support.runs.lives import Lives
from support.runs.torchruns import Agents, Store

#: All that is asked of the user. Storage has nothing to offer here.
PARITY = {"parity": 1}


@pytest.mark.slow  # every round of workers takes some ten seconds to start
@pytest.mark.timeout(400)
def test_torchrun_goes_on_from_memory_on_fewer_hosts_and_with_a_new_one_in_the_place_of_the_lost(
    tmp_path: Path, arena_dir: Path
) -> None:
    root = tmp_path / "run"
    life = Lives(root, seed=41).plan(3, 100_000, storage=None, options=PARITY)
    with Store() as store, Agents(life, arena_dir, store, hosts="abc", most=3) as agents:
        assert agents.restored(0, 3) == (-1, "")
        least = agents.wait_protected(0, 10, root)
        agents.lose(agents.hosts_of(0)[1])
        completed = agents.progress(0)
        step, source = agents.restored(1, 2)
        assert source == "memory" and least <= step <= completed
        agents.wait_protected(1, step + 5, root)

        agents.start("d")  # the agents take it in by themselves
        step, source = agents.restored(2, 3)
        assert source == "memory" and step in (agents.progress(1), agents.progress(1) - 1)
        least = agents.wait_protected(2, step + 5, root)

        agents.lose(agents.hosts_of(2)[0])  # its keeper decided for all, its worker had the store
        completed = agents.progress(2)
        step, source = agents.restored(3, 2)
        assert source == "memory" and least <= step <= completed
        agents.wait_protected(3, step + 5, root)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_the_rendezvous_store_the_agents_end_and_a_new_launch_goes_on_from_memory(
    tmp_path: Path, arena_dir: Path
) -> None:
    root = tmp_path / "run"
    lives = Lives(root, seed=42)
    life = lives.plan(2, 100_000, storage=None, options=PARITY)
    with Store() as store, Agents(life, arena_dir, store, hosts="ab", most=2) as agents:
        agents.restored(0, 2)
        agents.wait_protected(0, 10, root)
        store.process.kill()
        deadline = time.monotonic() + 120
        while any(agent.poll() is None for agent in agents.agents.values()):
            assert time.monotonic() < deadline, agents.tail()
            time.sleep(0.1)
        assert all(agent.returncode for agent in agents.agents.values())
        completed = agents.progress(0)
        again = lives.plan(2, 100_000, storage=None, options=PARITY)
        with Store() as other, Agents(again, arena_dir, other, hosts="ab", most=2) as next_agents:
            step, source = next_agents.restored(0, 2)
            assert source == "memory" and step in (completed, completed - 1)
    assert not Hosts(arena_dir).processes()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_host_that_is_taken_back_costs_no_step_and_the_others_go_on_from_storage(
    tmp_path: Path, arena_dir: Path
) -> None:
    root = tmp_path / "run"
    options = PARITY | {"grace_s": 25.0}
    life = Lives(root, seed=43).plan(3, 100_000, storage=None, options=options)
    with Store() as store, Agents(life, arena_dir, store, hosts="abc", most=3) as agents:
        agents.restored(0, 3)
        agents.wait_protected(0, 10, root)
        taken = agents.agents.pop("b")
        taken.send_signal(signal.SIGTERM)  # which its launcher passes on
        assert taken.wait(60)
        assert not list(arena_dir.glob("*/*@b"))
        completed = agents.progress(0)
        assert agents.restored(1, 2) == (completed, "storage")
        agents.wait_protected(1, completed + 5, root)
