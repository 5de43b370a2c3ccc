"""A rank's line to its keeper, taken up from any thread, and never again after its end."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from holdfast.capture import saver
from holdfast.capture.saver import Saver
from holdfast.capture.session import KeeperSession
from holdfast.errors import KeeperError


class Client:
    """Stands for a conversation."""

    is_open = True

    def disconnect(self) -> None:
        self.is_open = False

    close = disconnect


def test_two_threads_that_take_up_the_line_at_once_have_one_conversation() -> None:
    made: list[Client] = []
    may_answer = threading.Event()

    def connect() -> Any:
        may_answer.wait(10)
        made.append(Client())
        return made[-1]

    line, taken = KeeperSession(connect), list[Any]()
    threads = [threading.Thread(target=lambda: taken.append(line.ensure())) for _ in range(2)]
    for thread in threads:
        thread.start()
    may_answer.set()
    for thread in threads:
        thread.join(10)
    assert len(made) == 1 and taken == [made[0]] * 2


def test_a_line_that_has_ended_is_not_taken_up_again_even_if_that_had_begun() -> None:
    made = Client()

    def connect() -> Any:
        line.end()  # on another thread: the rank says goodbye
        return made

    line = KeeperSession(connect)
    line.ensure()
    assert not made.is_open
    with pytest.raises(KeeperError, match="has left its keeper"):
        line.ensure()


@pytest.mark.promise
def test_a_worker_that_can_start_no_thread_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nothing would be captured until the end of the run."""
    tried = list[float]()

    def connect() -> Any:
        raise RuntimeError("can't start new thread")

    def call_later(wait_s: float, _: object) -> None:
        tried.append(wait_s)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(saver, "call_later", call_later)
    worker: Any = Saver.__new__(Saver)
    worker._session = KeeperSession(connect)
    worker.execute(None)
    assert len(tried) == 1 and tried[0] > 0, "it would try again without a pause"
