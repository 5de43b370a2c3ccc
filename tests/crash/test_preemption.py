"""SIGTERM with a grace: a last step on all ranks, in storage before the time is over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import holdfast
from evidence import check_storage
from holdfast.catalogue import catalogue
from holdfast.storage.local import LocalStore
from leftovers import keeper_pids
from lives import Lives, build, read_progress, take_step
from torchruns import SCRIPT, environment, write_life

GRACE_S = 30.0
NEVER = 1_000_000


def newest_stored(root: Path) -> int:
    newest = catalogue(LocalStore(root)).latest
    return -1 if newest is None else newest.step


def wait_keepers_gone(arena_dir: Path) -> None:
    deadline = time.monotonic() + 20
    while keeper_pids(arena_dir):
        assert time.monotonic() < deadline, "a keeper is left"
        time.sleep(0.05)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("hosts", [(), ("a", "b")], ids=["one host", "two hosts"])
def test_sigterm_to_one_rank_ends_all_after_one_step_that_is_in_storage(
    tmp_path: Path, arena_dir: Path, hosts: tuple[str, ...]
) -> None:
    root = tmp_path / "run"
    options = {"grace_s": GRACE_S}
    with Lives(root, seed=51) as lives:
        lives.start(2, 100_000, storage=NEVER, hosts=hosts, options=options)
        lives.wait_restored(2)
        lives.wait_progress(2, 20)
        told_s = time.monotonic()
        lives.kill([1], signal.SIGTERM)
        lives.join()
        assert time.monotonic() - told_s < GRACE_S
        said = [Path(lives.directory, f"error-{rank}").read_text() for rank in range(2)]
        assert all("Preempted: told to end by SIGTERM: step" in text for text in said), said
        last = read_progress(lives.directory, 2)
        assert newest_stored(root) == last >= 20
        # All that is left of it is in storage: whoever has the machine next finds its memory.
        wait_keepers_gone(arena_dir)
        assert not list(arena_dir.glob("*/*@*"))
        lives.start(2, 3, storage=NEVER, hosts=hosts, options=options)
        assert lives.wait_restored(2) == (last, "storage")
        lives.wait_end()
    check_storage(root, last + 3)


@pytest.mark.timeout(120)
def test_when_training_hangs_the_newest_snapshot_in_memory_is_made_durable_in_time(
    tmp_path: Path, arena_dir: Path
) -> None:
    root = tmp_path / "run"
    with Lives(root, seed=52) as lives:
        lives.start(2, 100_000, storage=NEVER, options={"grace_s": 6.0})
        lives.wait_restored(2)
        lives.wait_progress(2, 20)
        lives.kill([1], signal.SIGSTOP)
        time.sleep(0.5)  # the other one now waits for it in a collective, without any Python
        completed = read_progress(lives.directory, 2)
        lives.kill([0], signal.SIGTERM)
        deadline = time.monotonic() + 6
        while newest_stored(root) < completed - 1:
            assert time.monotonic() < deadline, newest_stored(root)
            time.sleep(0.05)
        lives.end(2)
    for pid in keeper_pids(arena_dir):
        os.kill(pid, signal.SIGTERM)


@pytest.mark.timeout(120)
def test_a_script_alone_is_ended_so_too_and_children_of_it_as_they_always_were(
    tmp_path: Path,
) -> None:
    lives = Lives(tmp_path / "run", seed=53)
    life = lives.plan(1, 100_000, layout="plain", storage=None, options={"grace_s": GRACE_S})
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), write_life(life)], env=environment(), stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    directory = f"{lives.directory}/round-0"
    deadline = time.monotonic() + 60
    while read_progress(directory, 1) < 5:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # of a scheduler and a launcher: no other meaning
    _, said = process.communicate(timeout=40)
    assert process.returncode == 1 and "Preempted" in said, said
    assert newest_stored(tmp_path / "run") == read_progress(directory, 1)


def test_signals_can_be_caught_on_the_main_thread_only_and_elsewhere_it_is_said_at_once(
    tmp_path: Path,
) -> None:
    _, state = build("plain")
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(lambda: holdfast.Checkpointer(tmp_path / "run", state, grace_s=1.0))
        with pytest.raises(holdfast.UsageError, match="on the main thread only"):
            made.result()
    assert not (tmp_path / "run").exists()


def test_a_last_step_that_storage_does_not_take_is_said_not_to_be_there(
    tmp_path: Path, arena_dir: Path
) -> None:
    model, state = build("plain")
    checkpointer = holdfast.Checkpointer(tmp_path / "run", state, grace_s=2.0)
    take_step(model, state, 0)
    checkpointer.save(0).wait_captured(30)
    (pid,) = keeper_pids(arena_dir)
    os.kill(pid, signal.SIGSTOP)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        take_step(model, state, 1)
        with pytest.raises(holdfast.Preempted, match="after step 1, which is not in storage") as it:
            checkpointer.step(1)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert it.value.fields == {"step": 1, "is_durable": False}
    os.kill(pid, signal.SIGTERM)


def test_a_forked_child_dies_of_sigterm_and_its_parent_hears_nothing_of_it(tmp_path: Path) -> None:
    model, state = build("plain")
    before = signal.getsignal(signal.SIGTERM)
    with holdfast.Checkpointer(tmp_path, state, grace_s=GRACE_S) as checkpointer:
        pid = os.fork()
        if not pid:
            time.sleep(60)
            os._exit(0)
        time.sleep(0.2)
        os.kill(pid, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGTERM
        for step in range(3):
            take_step(model, state, step)
            checkpointer.step(step)
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1
