"""What a listener cannot handle ends the connection aloud, not the listening in silence."""

from __future__ import annotations

import queue
import socket

import pytest

from holdfast.protocol import messages as m
from holdfast.protocol.client import KeeperClient


def test_a_message_that_cannot_be_handled_is_a_lost_connection(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_: m.Message) -> None:
        raise KeyError("no such step")

    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    here, there = socket.socketpair()
    client = KeeperClient(here, fail, lost.put)
    with there:
        there.sendall(m.pack(m.Protected(step=1, attempt="a"), 0))
        assert "no such step" in lost.get(timeout=5)
        assert there.recv(1) == b""
    client.close()
    assert "KeyError" in capsys.readouterr().err
