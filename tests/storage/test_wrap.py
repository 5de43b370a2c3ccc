"""Requests are tried again with growing pauses until a deadline, and their rate is bounded."""

from __future__ import annotations

import os
import random
import socket
import threading
import time

import pytest

from holdfast.events import Event, Warned, subscribe
from holdfast.storage.http_client import Connections, NoAnswer, Server
from holdfast.storage.wrap import Patience, RateLimit, RequestCounts


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


@pytest.mark.parametrize("drawn", [0.0, 1.0])
def test_pauses_double_vary_and_end_with_the_patience(drawn: float) -> None:
    clock = Clock()
    patience = Patience(total_s=60.0, first_s=0.1, longest_s=5.0)
    tries = list(patience.pauses(clock=clock, sleep=clock.sleep, draw=lambda: drawn))
    assert tries == list(range(1, len(clock.slept) + 2))
    factor = 1.0 if drawn else 0.5
    assert clock.slept[:4] == pytest.approx(
        [0.1 * factor, 0.2 * factor, 0.4 * factor, 0.8 * factor]
    )
    assert max(clock.slept) == pytest.approx(5.0 * factor)
    assert 50.0 < clock.now_s <= 60.0


def test_what_one_try_took_all_the_time_of_is_tried_once_more() -> None:
    clock = Clock()
    tries = []
    for number in Patience(total_s=60.0).pauses(clock=clock, sleep=clock.sleep):
        tries.append(number)
        clock.now_s += 61.0
    assert tries == [1, 2]


def test_a_rate_is_kept_over_all_threads() -> None:
    clock = Clock()
    limit = RateLimit(1000.0, clock=clock, sleep=clock.sleep)
    for _ in range(10):
        limit.wait(500)
    assert clock.now_s == pytest.approx(4.5)  # the first goes at once
    free = RateLimit(0.0, clock=clock, sleep=clock.sleep)
    free.wait(10**12)
    assert clock.now_s == pytest.approx(4.5)


def test_of_many_tries_one_event_tells() -> None:
    seen: list[Event] = []
    end = subscribe(lambda event, time_s: seen.append(event))
    counts = RequestCounts("s3://bucket/run")
    for _ in range(100):
        counts.again("PUT", "503")
    end()
    assert counts.retries["PUT"] == 100
    assert len(seen) == 1 and isinstance(seen[0], Warned) and "s3://bucket/run" in seen[0].message


def serve(answers: list[bytes]) -> tuple[int, threading.Thread]:
    """Answers one request after the other as told, each on a connection of its own if it ended.

    Nobody listens any more once the thread has ended.
    """
    listener = socket.create_server(("127.0.0.1", 0))

    def work() -> None:
        with listener:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    data = b""
                    while b"\r\n\r\n" not in data:
                        data += connection.recv(65536)
                    connection.sendall(answer)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return int(listener.getsockname()[1]), thread


def test_an_answer_that_is_cut_off_is_no_answer() -> None:
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n0123456789"
    port, listening = serve([whole[:-3], whole[:-3], whole[:20], b"", whole])
    server = Connections(Server("127.0.0.1", port, False), answer_s=5.0)
    memory = memoryview(bytearray(10))
    for into in (None, memory, None, None):
        with pytest.raises(NoAnswer) as raised:
            server.send("GET", "/", {"host": "x"}, into=into)
        assert raised.value.is_sent
    answer = server.send("GET", "/", {"host": "x"}, into=memory)
    assert (answer.size_bytes, bytes(memory)) == (10, b"0123456789")
    listening.join(5.0)
    with pytest.raises(NoAnswer) as raised:
        Connections(server.server, answer_s=5.0).send("GET", "/", {"host": "x"})
    assert not raised.value.is_sent  # nobody listens: certainly nothing happened


def test_a_body_longer_than_the_memory_for_it_is_left_alone() -> None:
    port, _ = serve([b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n0123456789"])
    server = Connections(Server("127.0.0.1", port, False), answer_s=5.0)
    memory = memoryview(bytearray(4))
    assert server.send("GET", "/", {"host": "x"}, into=memory).size_bytes == 0
    assert bytes(memory) == bytes(4)


def test_a_forked_child_has_none_of_its_parents_connections() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    ports: list[int] = []

    def work() -> None:
        def answer(connection: socket.socket) -> None:
            while data := connection.recv(65536):
                if data.endswith(b"\r\n\r\n"):
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            connection.close()

        for _ in range(2):
            connection, address = listener.accept()
            ports.append(address[1])
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=work, daemon=True).start()
    server = Connections(Server("127.0.0.1", listener.getsockname()[1], False), answer_s=5.0)
    server.send("GET", "/", {"host": "x"})
    server.send("GET", "/", {"host": "x"})
    assert len(ports) == 1  # it is kept
    child = os.fork()
    if not child:
        os._exit(server.send("GET", "/", {"host": "x"}).status != 200)
    assert os.waitpid(child, 0)[1] == 0
    until_s = time.monotonic() + 5
    while len(ports) < 2 and time.monotonic() < until_s:
        time.sleep(0.01)
    assert len(ports) == 2
    server.send("GET", "/", {"host": "x"})  # and the parent's is as it was
    assert len(ports) == 2
    listener.close()


def test_pauses_take_nothing_from_the_generator_of_the_program() -> None:
    before, waited = random.getstate(), list[float]()
    pauses = Patience(total_s=9.0).pauses(clock=lambda: sum(waited), sleep=waited.append)
    assert len(list(pauses)) > 3 and waited
    assert random.getstate() == before
