"""A rank's line to its keeper, taken up from any thread, and never again after its end."""

from __future__ import annotations

import threading
from typing import Any

import pytest

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
