"""A rank with a fault may say anything: it costs the keeper little, and the others nothing."""

from __future__ import annotations

import os
import queue
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.errors import UsageError
from holdfast.keeper import connections as doors
from holdfast.keeper.connections import MOST_UNREAD_BYTES
from holdfast.protocol import messages as m
from holdfast.protocol.arena import arena_dir as arena_path
from holdfast.protocol.client import KeeperClient, connect_socket
from support.runs.evidence import read_events
from support.runs.keepers import (
    HOST,
    NONCE,
    RUN,
    ask,
    begin,
    capture,
    connect,
    end,
    hear,
    memory_bytes,
    wait_end,
)
from support.runs.leftovers import keeper_pids
from support.runs.slow_keepers import impatient
from support.runs.strangers import crowd

HALF = (1 << 20).to_bytes(4, "little") + b"the rest never comes"


def hello(root: Path) -> bytes:
    return m.pack(m.Hello(run_id=RUN, root=str(root)), 1)


@contextmanager
def raw_line(root: Path) -> Iterator[socket.socket]:
    """A line whose other end has been greeted, and that nobody reads unless the test does."""
    with connect_socket(arena_path(RUN, HOST)) as line:
        line.settimeout(30)
        line.sendall(hello(root))
        assert line.recv(1 << 16)
        yield line


def is_ended(line: socket.socket) -> bool:
    """Whether the keeper ends it, whatever it says before."""
    try:
        while line.recv(1 << 20):
            pass
    except ConnectionError:
        return True
    return True


def say_until_the_end(line: socket.socket, data: bytes, most: int) -> int:
    """How often it could be said."""
    for count in range(most):
        try:
            line.sendall(data)
        except ConnectionError:
            return count
    return most


def serves(line: KeeperClient) -> bool:
    return line.request(m.Explain(step=1), m.Explanation, timeout_s=30).text != ""


def test_who_reads_nothing_is_hung_up_on_before_its_answers_fill_the_memory(
    tmp_path: Path, arena_dir: Path
) -> None:
    line = connect(tmp_path)
    n = begin(line, world=2)
    (pid,) = keeper_pids(arena_dir)
    before_bytes = memory_bytes(pid)
    with raw_line(tmp_path) as deaf:
        join = m.Join(incarnation=n, nonce=NONCE, rank=1, persist_at_end=False)
        deaf.sendall(m.pack(join, 2))
        # The answer to each names what it refuses.
        refused = m.pack(m.Hello(run_id="x" * 500_000, root=""), 3)
        assert say_until_the_end(deaf, refused, most=2000) < 2000
    assert serves(line)
    assert memory_bytes(pid) - before_bytes < 8 * MOST_UNREAD_BYTES
    end(line)


def test_the_rest_of_a_message_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient(tmp_path, monkeypatch, frame_s=0.2)
    line = connect(tmp_path / "root")
    begin(line)
    with raw_line(tmp_path / "root") as other:
        other.sendall(HALF)
        assert is_ended(other)
    assert serves(line)
    end(line)


def test_who_has_no_place_in_the_run_has_little_to_say(tmp_path: Path) -> None:
    line = connect(tmp_path)
    begin(line)
    with raw_line(tmp_path) as other:
        other.sendall((doors.OTHER_FRAME_BYTES + 1).to_bytes(4, "little"))
        assert is_ended(other)
    end(line)


def test_of_too_many_lines_of_one_process_its_oldest_are_ended_and_not_its_ranks(
    tmp_path: Path,
) -> None:
    line = connect(tmp_path)
    begin(line)
    opened = crowd(
        lambda: connect_socket(arena_path(RUN, HOST)),
        doors.MOST_LINES + 5,
        [hello(tmp_path) + HALF],
    )
    assert serves(line)  # it has heard all that came before
    for other in opened[:6]:
        other.settimeout(30)
        assert is_ended(other)
    for other in opened:
        other.close()
    end(line)


@pytest.mark.parametrize("after", [1 << 62, (1 << 63) - 1, (1 << 64) - 1, -1])
def test_a_start_far_beyond_all_known_ones_is_refused_and_none_is_fenced_off(
    tmp_path: Path, after: int
) -> None:
    line = connect(tmp_path)
    n = begin(line)
    with pytest.raises(UsageError, match="must be"):
        line.request(m.Begin(nonce=NONCE, world=1, after=after), m.Begun, timeout_s=10)
    assert serves(line)
    assert begin(line) == n + 1
    end(line)


def test_a_line_speaks_for_one_rank(tmp_path: Path) -> None:
    line = connect(tmp_path)
    n = begin(line, world=2)
    with pytest.raises(UsageError, match="speaks for rank 0 and asks for the place of rank 1"):
        line.request(m.Join(incarnation=n, nonce=NONCE, rank=1), m.Done, timeout_s=10)
    other = connect(tmp_path)
    join = m.Join(incarnation=n, nonce=NONCE, rank=1, persist_at_end=False)
    other.request(join, m.Done, timeout_s=10)
    other.send(m.Goodbye())
    end(line)
    other.close()


def test_a_rank_that_leaves_in_the_middle_of_a_capture_does_not_keep_the_keeper(
    tmp_path: Path, arena_dir: Path
) -> None:
    heard: queue.SimpleQueue[m.Message] = queue.SimpleQueue()
    line = connect(tmp_path, listener=heard.put)
    begin(line)
    (pid,) = keeper_pids(arena_dir)
    descriptor = os.pidfd_open(pid)
    line.send(ask(1))
    hear(heard, m.Grant)
    end(line)
    wait_end(descriptor)


def test_a_flood_of_refused_messages_is_told_in_a_few_words_and_in_numbers(
    tmp_path: Path, arena_dir: Path
) -> None:
    heard: queue.SimpleQueue[m.Message] = queue.SimpleQueue()
    line = connect(tmp_path, listener=heard.put)
    begin(line)
    (pid,) = keeper_pids(arena_dir)
    keeper = os.pidfd_open(pid)
    for _ in range(2000):
        line.send(m.CancelRequest(step=-1))
    capture(line, heard, 1)
    end(line)
    wait_end(keeper)  # what is left to be told it tells as it ends
    warned = [e for e in read_events(tmp_path, "keeper", "Warned") if "step is -1" in e["message"]]
    assert 1 <= len(warned) <= doors.MOST_WARNINGS + 1
    told = [e["counts"] for e in read_events(tmp_path, "keeper", "RequestsRefused")]
    assert sum(counts.get("meaningless", 0) for counts in told) == 2000 - len(warned)
