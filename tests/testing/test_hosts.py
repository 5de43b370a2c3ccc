"""Simulated hosts: what is on one is found, and is gone at once when the host is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import UsageError
from holdfast.protocol.arena import arena_dir as arena_of
from holdfast.testing.faults import (
    Encoding,
    Hosts,
    flip,
    held,
    is_capturing,
    is_persisting,
    tear_record,
    wait_until,
)
from support.runs.host_pairs import Run
from support.runs.keepers import RUN

#: A trainer that says where it is, starts another process, and stays.
TRAINER = """
import json, os, subprocess, sys, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
         "HOLDFAST_HOST_ID", "HOLDFAST_ARENA_DIR", "MORE")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
print(json.dumps({name: os.environ.get(name) for name in names} | {"child": child.pid}), flush=True)
time.sleep(100)
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts() as made:
        yield made


def said(hosts: Hosts, ranks: int) -> list[dict[str, str]]:
    def logs() -> list[Path]:
        return sorted(hosts.logs().glob("*.log"))

    wait_until(lambda: sum(bool(p.read_bytes()) for p in logs()) == ranks, timeout_s=30)
    return [json.loads(path.read_text()) for path in logs()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_every_rank_knows_its_place_and_a_lost_host_takes_all_it_started_along(
    hosts: Hosts,
) -> None:
    pids = hosts.start([sys.executable, "-c", TRAINER], on="aba", environment={"MORE": "yes"})
    told = said(hosts, 3)
    assert [one["RANK"] for one in told] == ["0", "1", "2"]
    assert [one["LOCAL_RANK"] for one in told] == ["0", "0", "1"]
    assert [one["LOCAL_WORLD_SIZE"] for one in told] == ["2", "1", "2"]
    assert [one["HOLDFAST_HOST_ID"] for one in told] == ["a", "b", "a"]
    assert {one["HOLDFAST_ARENA_DIR"] for one in told} == {str(hosts.arena_dir)}
    assert {(one["WORLD_SIZE"], one["MORE"], one["MASTER_ADDR"]) for one in told} == {
        ("3", "yes", "127.0.0.1")
    }
    children = [int(one["child"]) for one in told]
    assert sorted(hosts.trainers("a")) == sorted([pids[0], pids[2], children[0], children[2]])
    arena = hosts.arena_dir / "holdfast-0" / "run@a"
    arena.mkdir(parents=True)
    fire = hosts.aim("a")
    assert hosts.running() == ["a", "b", "a"]
    fire()
    assert hosts.running() == ["b"] and not arena.exists()
    assert [is_alive(pid) for pid in (*pids, *children)] == [False, True, False] * 2
    with pytest.raises(UsageError, match=r"the ranks on \['b'\] still run"):
        hosts.start([sys.executable, "-c", ""], on="a")
    hosts.end()
    assert not hosts.running() and not is_alive(children[1])
    hosts.start([sys.executable, "-c", "print('done')"], on="bc")
    hosts.wait_end(timeout_s=30)


def test_a_rank_that_ends_badly_is_shown_and_one_that_hangs_is_named(hosts: Hosts) -> None:
    hosts.start([sys.executable, "-c", "raise SystemExit('no such thing')"], on="a")
    with pytest.raises(AssertionError, match="rank 0 on a ended with 1:\nno such thing"):
        hosts.wait_end(timeout_s=30)
    hosts.start([sys.executable, "-c", "import time; time.sleep(100)"], on="b")
    with pytest.raises(TimeoutError, match=r"the ranks on \['b'\]"):
        hosts.wait_end(timeout_s=0.2)


def test_what_was_started_otherwise_counts_when_it_is_added_or_has_the_environment(
    hosts: Hosts,
) -> None:
    forever = [sys.executable, "-c", "import time; time.sleep(100)"]
    added = subprocess.Popen(forever)
    found = subprocess.Popen(forever, env=hosts.environment("a"))
    other = subprocess.Popen(forever, env=hosts.environment("b"))
    hosts.add("a", added.pid)
    hosts.lose("a")
    assert (added.wait(10), found.wait(10), other.poll()) == (-9, -9, None)
    hosts.kill_trainers("b", number=signal.SIGTERM)
    assert other.wait(10) == -15


def test_a_number_that_passed_on_to_another_process_is_not_fired_at(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    forever = [sys.executable, "-c", "import time; time.sleep(100)"]
    found = subprocess.Popen(forever, env=hosts.environment("a"))
    added = subprocess.Popen(forever)
    hosts.add("a", added.pid)
    fire = hosts.aim("a")
    for one in (found, added):
        one.kill()
        one.wait(10)
    opened = list[int]()
    monkeypatch.setattr(os, "pidfd_open", opened.append)
    fire()
    assert not opened


def test_a_process_is_found_while_its_program_is_only_being_loaded(hosts: Hosts) -> None:
    forever = [sys.executable, "-S", "-c", "import time; time.sleep(100)"]
    for _ in range(40):
        started = subprocess.Popen(forever, env=hosts.environment("a"))
        try:
            assert hosts.trainers("a") == [started.pid]
        finally:
            started.kill()
            started.wait()


def test_a_number_that_was_added_stands_for_the_process_that_had_it_then(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    hosts.add("a", added.pid)
    assert hosts.trainers("a") == [added.pid]
    with monkeypatch.context() as later:
        later.setattr("holdfast.testing.runs.simulated_hosts.process_start", lambda _: -1)
        assert not hosts.trainers("a")
    hosts.end()
    assert added.wait(10) == -9


@pytest.mark.parametrize("name", ["", "a/b", "a@b", "a\n"])
def test_what_names_no_host_is_refused(hosts: Hosts, name: str) -> None:
    with pytest.raises(UsageError, match="names no host"):
        hosts.environment(name)


def test_keepers_are_stopped_continued_killed_and_lost_and_their_slots_can_be_damaged(
    tmp_path: Path, arena_dir: Path
) -> None:
    hosts = Hosts(arena_dir)
    run = Run(tmp_path, "a", "b")
    run.begin()
    run.capture(1)
    arena = hosts.arena("b")
    assert arena == arena_of(RUN, "b")
    assert not is_capturing(arena)
    for rank in run.ranks:
        rank.ask(2)
    wait_until(lambda: is_capturing(arena), timeout_s=10, what="a capture")
    for rank in run.ranks:
        rank.seal()
    wait_until(lambda: not is_capturing(arena), timeout_s=10)
    (keeper,) = hosts.keepers("b")
    hosts.stop_keeper("b")
    wait_until(lambda: state_of(keeper) == "T", timeout_s=10)
    hosts.continue_keeper("b")
    wait_until(lambda: state_of(keeper) != "T", timeout_s=10)
    hosts.kill_keeper("b")
    assert not hosts.keepers("b") and hosts.keepers("a") and arena.is_dir()
    with pytest.raises(UsageError, match="no keeper runs on b"):
        hosts.kill_keeper("b")
    tear(arena)
    hosts.lose("b")
    assert not arena.exists() and hosts.keepers("a")
    with pytest.raises(UsageError, match="b has 0 arenas"):
        hosts.arena("b")
    hosts.lose("a")
    assert not hosts.keepers("a")
    hosts.close()
    assert arena_dir.is_dir()  # it is the test's


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def tear(arena: Path) -> None:
    """A torn record leaves the one before: of a slot that was being written, by somebody dead."""
    slots = sorted(arena.glob("*.slot"))
    for slot in slots:
        tear_record(slot)
    assert not held(arena)


def test_no_bit_beyond_a_file_is_flipped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\0\0\0")
    flip(path, 1, bit=3)
    flip(path, -1)
    assert path.read_bytes() == b"\0\x08\x01"
    with pytest.raises(UsageError, match="has no byte 3"):
        flip(path, 3)


def test_a_half_whose_records_go_is_written_anew_and_one_that_had_none_is_not(
    tmp_path: Path,
) -> None:
    parity, is_encoding = tmp_path / "parity", Encoding(tmp_path)
    assert not is_encoding()
    parity.mkdir()
    for names, expected in (
        (["0-0", "0-4096"], False),  # one generation is protected, and the keeper idle
        (["0-0"], False),  # what was damaged is no row any more
        (["0-0", "1-0"], False),
        (["1-0"], True),
        (["1-0"], True),
        (["0-0", "1-0"], False),
        (["0-0"], True),
        (["1-0"], True),  # protected, and the next turn begun, between two looks
        ([], False),
    ):
        for path in parity.iterdir():
            path.unlink()
        for name in names:
            (parity / f"{name}.record").touch()
        assert is_encoding() is expected, names
        assert not Encoding(tmp_path)(), "it has seen nothing go"


def test_images_of_the_newest_start_that_it_has_not_published_are_being_written(
    tmp_path: Path,
) -> None:
    def is_so(*names: str) -> bool:
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.touch()
        return is_persisting(tmp_path)

    assert not is_so()
    assert not is_so("incarnations/1.json")
    assert is_so("steps/1-7-ab")
    assert not is_so("manifests/1-7.json")
    assert not is_so("steps/1-3-cd"), "a checkpoint that is being removed: its manifest went first"
    assert is_so("steps/1-12-ab")
    assert not is_so("incarnations/2.json"), "an earlier start was killed while it wrote"
    assert is_so("steps/2-8-ef", "manifests/1-20.json")
    assert not is_so("manifests/2-8.json")
    assert is_so("incarnations/10.json", "steps/10-9-ab", "steps/what-else")
