"""SIGTERM with a grace: a last step on all ranks, in storage before the time is over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.catalogue import catalogue
from holdfast.preemption import SignalWatch
from holdfast.storage.local import LocalStore
from support.runs.evidence import check_storage
from support.runs.leftovers import keeper_pids
from support.runs.lives import Lives, build, read_progress, read_signpost, take_step
from support.runs.torchruns import SCRIPT, environment, write_life

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


def wait_stored(root: Path, least: int, within_s: float) -> int:
    """Wait until storage has a step as new as ``least``; the newest there."""
    deadline = time.monotonic() + within_s
    while (found := newest_stored(root)) < least:
        assert time.monotonic() < deadline, f"step {found} of {least}"
        time.sleep(0.05)
    return found


def stop_keepers(arena_dir: Path) -> None:
    for pid in keeper_pids(arena_dir):
        os.kill(pid, signal.SIGTERM)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_keeper_lost", [False, True], ids=["the keeper lives", "it died"])
def test_when_training_hangs_the_newest_snapshot_in_memory_is_made_durable_in_time(
    tmp_path: Path, arena_dir: Path, is_keeper_lost: bool
) -> None:
    root, grace_s = tmp_path / "run", 10.0 if is_keeper_lost else 6.0
    with Lives(root, seed=52) as lives:
        lives.start(2, 100_000, storage=None, options={"grace_s": grace_s})
        lives.wait_restored(2)
        lives.wait_progress(2, 20)
        lives.kill([1], signal.SIGSTOP)
        time.sleep(0.5)  # the other one now waits for it in a collective, without any Python
        completed = read_progress(lives.directory, 2)
        if is_keeper_lost:
            (pid,) = keeper_pids(arena_dir)
            os.kill(pid, signal.SIGKILL)  # no save follows that would start another
        lives.kill([0], signal.SIGTERM)
        wait_stored(root, completed - 1, grace_s)
        lives.end(2)
    stop_keepers(arena_dir)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("act", ["raises", "stops"])
def test_when_a_rank_cannot_save_the_last_step_the_one_before_it_is_in_storage_in_time(
    tmp_path: Path, arena_dir: Path, act: str
) -> None:
    root, grace_s = tmp_path / "run", 8.0
    with Lives(root, seed=54) as lives:
        lives.start(2, 100_000, storage=None, moody=(1, act), options={"grace_s": grace_s})
        lives.wait_restored(2)
        lives.wait_progress(2, 20)
        told_s = time.monotonic()
        lives.kill([1], signal.SIGTERM)
        stored = wait_stored(root, 20, grace_s)
        last = read_signpost(lives.directory, 0)[0]
        assert stored == last - 1
        lives.join_rank(0)
        assert time.monotonic() - told_s < grace_s
        said = Path(lives.directory, "error-0").read_text()
        assert f"after step {last}, which is not in storage" in said, said
        lives.end(2)
    stop_keepers(arena_dir)


@pytest.mark.timeout(120)
def test_a_script_alone_is_ended_so_too_and_children_of_it_as_they_always_were(
    tmp_path: Path,
) -> None:
    lives = Lives(tmp_path / "run", seed=53)
    life = lives.plan(1, 100_000, layout="plain", storage=None, options={"grace_s": GRACE_S})
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), write_life(life)],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
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
    checkpointer = holdfast.Checkpointer(tmp_path / "run", state, grace_s=6.0)
    take_step(model, state, 0)
    checkpointer.save(0).wait_captured(30)
    (pid,) = keeper_pids(arena_dir)
    os.kill(pid, signal.SIGSTOP)
    try:
        told_s = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        take_step(model, state, 1)
        with pytest.raises(holdfast.Preempted, match="after step 1, which is not in storage") as it:
            checkpointer.step(1)
        assert time.monotonic() - told_s < 6.0
    finally:
        os.kill(pid, signal.SIGCONT)
    assert it.value.fields == {"step": 1, "is_durable": False}
    os.kill(pid, signal.SIGTERM)


def test_a_last_step_that_was_in_memory_already_is_durable_only_when_storage_took_it(
    tmp_path: Path, arena_dir: Path
) -> None:
    root = tmp_path / "run"
    model, state = build("plain")
    checkpointer = holdfast.Checkpointer(root, state, storage=None, grace_s=GRACE_S)
    take_step(model, state, 0)
    checkpointer.save(0).wait_captured(30)
    (root / "steps").write_text("in the way")
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(holdfast.Preempted, match="after step 0, which is not in storage") as it:
        checkpointer.step(0)
    assert it.value.fields == {"step": 0, "is_durable": False}
    (root / "steps").unlink()
    with holdfast.Checkpointer(root, build("plain")[1], storage=None) as again:
        restored = again.restore()
        assert restored is not None
        assert (restored.step, restored.source) == (0, "memory")


def test_leaving_ends_within_the_grace_though_nobody_answers_the_goodbye(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, state = build("plain")
    checkpointer = holdfast.Checkpointer(tmp_path / "run", state, grace_s=4.0)
    take_step(model, state, 0)
    checkpointer.save(0).wait_captured(30)
    (pid,) = keeper_pids(arena_dir)
    ask = checkpointer._saver.request

    def ask_a_stopped_keeper(*args: Any, **options: Any) -> Any:
        os.kill(pid, signal.SIGSTOP)
        return ask(*args, **options)

    monkeypatch.setattr(checkpointer._saver, "request", ask_a_stopped_keeper)
    try:
        told_s = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        take_step(model, state, 1)
        with pytest.raises(holdfast.Preempted, match="step 1 was the last one, and is in storage"):
            checkpointer.step(1)
        assert time.monotonic() - told_s < 4.0
    finally:
        os.kill(pid, signal.SIGCONT)
    os.kill(pid, signal.SIGTERM)


def test_a_second_sigterm_interrupts_neither_the_goodbye_nor_what_the_script_does_at_its_end(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(LEAVES_UNDER_FIRE)
    command = [sys.executable, str(script), str(tmp_path / "run"), str(tmp_path / "ended")]
    ended = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1 and "step 0 was the last one, and is in storage" in ended.stderr
    assert (tmp_path / "ended").read_text() == "well"


LEAVES_UNDER_FIRE = """
import os, signal, sys
import torch, holdfast

checkpointer = holdfast.Checkpointer(sys.argv[1], {"a": torch.ones(3)}, grace_s=30)
ask = checkpointer._saver.request

def ask_under_fire(message, *args, **options):
    if type(message).__name__ == "Goodbye":
        os.kill(os.getpid(), signal.SIGTERM)
    return ask(message, *args, **options)

checkpointer._saver.request = ask_under_fire
os.kill(os.getpid(), signal.SIGTERM)
try:
    checkpointer.step(0)
finally:
    os.kill(os.getpid(), signal.SIGTERM)
    with open(sys.argv[2], "w") as file:
        file.write("well")
"""


@pytest.mark.parametrize("way", ["with", "without"])
def test_an_error_between_sigterm_and_the_last_step_leaves_the_step_before_in_storage(
    tmp_path: Path, arena_dir: Path, way: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILS_ON_ITS_WAY_OUT)
    command = [sys.executable, str(script), str(tmp_path / "run"), way]
    ended = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1 and "the other hosts are gone" in ended.stderr, ended.stderr
    assert newest_stored(tmp_path / "run") == 0
    stop_keepers(arena_dir)


FAILS_ON_ITS_WAY_OUT = """
import os, signal, sys
import torch, holdfast

def train(checkpointer):
    checkpointer.save(0).wait_captured(30)
    os.kill(os.getpid(), signal.SIGTERM)
    raise RuntimeError("the other hosts are gone")

state = {"a": torch.ones(3)}
checkpointer = holdfast.Checkpointer(sys.argv[1], state, storage=None, grace_s=30)
if sys.argv[2] == "with":
    with checkpointer:
        train(checkpointer)
else:
    train(checkpointer)
"""


def test_when_the_grace_is_over_sigterm_means_again_what_it_meant_before() -> None:
    heard: list[str] = []

    class Owner:
        def told(self) -> bool:
            heard.append("ours")
            return True

    def term() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("theirs"))
    owner, (reading, writing) = Owner(), os.pipe()
    os.set_blocking(writing, False)
    try:
        caught = SignalWatch(weakref.WeakMethod(owner.told), writing)
        term()
        over_s = time.monotonic() + 1.0
        caught.let_go(deaf_until_s=over_s)
        caught.let_go()  # as a close behind it does
        term()
        assert time.monotonic() < over_s and heard == ["ours"]
        time.sleep(max(0.0, over_s - time.monotonic()))
        term()
        term()
        assert heard == ["ours", "theirs", "theirs"]
    finally:
        signal.signal(signal.SIGTERM, before)
        os.close(reading)


UNHEEDED = """
import os, signal, sys, time
import torch, holdfast

checkpointer = holdfast.Checkpointer(sys.argv[1], {"a": torch.ones(3)}, storage=None, grace_s=0.5)
checkpointer.save(0).wait_captured(30)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(1.0)
if sys.argv[2] == "again":
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
checkpointer.save(0, durable=True)
checkpointer.close()
"""


@pytest.mark.parametrize(("way", "code"), [("again", -signal.SIGTERM), ("close", 0)])
def test_whoever_lives_beyond_its_grace_ends_by_another_sigterm_or_closes_as_ever(
    tmp_path: Path, arena_dir: Path, way: str, code: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNHEEDED)
    command = [sys.executable, str(script), str(tmp_path / "run"), way]
    ended = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == code, ended.stderr
    assert way == "again" or newest_stored(tmp_path / "run") == 0
    stop_keepers(arena_dir)


RESTORED = """
import os, signal, sys
import torch, holdfast

checkpointer = holdfast.Checkpointer(sys.argv[1], {"a": torch.ones(3)}, storage=None, grace_s=20)
if sys.argv[2] == "first":
    checkpointer.save(0).wait_captured(30)
    os._exit(0)
assert checkpointer.restore().source == "memory"
with checkpointer:
    os.kill(os.getpid(), signal.SIGTERM)
    raise RuntimeError("a worker was told to end, too")
"""


def test_what_was_restored_from_memory_is_stored_when_the_start_is_told_to_end_before_a_capture(
    tmp_path: Path, arena_dir: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(RESTORED)
    for life, code in (("first", 0), ("second", 1)):
        command = [sys.executable, str(script), str(tmp_path / "run"), life]
        ended = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=60, check=False
        )
        assert ended.returncode == code, ended.stderr
    until_s = time.monotonic() + 20
    while newest_stored(tmp_path / "run") != 0 and time.monotonic() < until_s:
        time.sleep(0.1)
    assert newest_stored(tmp_path / "run") == 0
    stop_keepers(arena_dir)


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
