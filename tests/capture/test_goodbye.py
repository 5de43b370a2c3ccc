"""A keeper that hangs up behind its last answer has ended in order."""

from __future__ import annotations

import socket
import threading

from holdfast.protocol import messages as m
from holdfast.protocol.client import KeeperClient


def _answer_and_leave(line: socket.socket) -> None:
    size = int.from_bytes(line.recv(4, socket.MSG_WAITALL), "little")
    seq, message = m.unpack(line.recv(size, socket.MSG_WAITALL))
    assert isinstance(message, m.Goodbye)
    line.sendall(m.pack(m.Done(), seq))
    line.close()


def test_a_keeper_that_ends_right_behind_its_goodbye_is_not_lost() -> None:
    ours, theirs = socket.socketpair()
    keeper = threading.Thread(target=_answer_and_leave, args=(theirs,))
    keeper.start()
    lost: list[str] = []
    client = KeeperClient(ours, lambda _: None, lost.append)
    client.request(m.Goodbye(), m.Done, timeout_s=10)
    client._reader.join(10)  # it has seen the end, and nobody has hung up on this side yet
    assert lost == []
    keeper.join(10)
    client.close()
