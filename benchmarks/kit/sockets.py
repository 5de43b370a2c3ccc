"""Move ranges of a file over plain sockets: the limit that transports are compared with.

A request is 16 bytes, where from and how many; the answer is these bytes, by ``sendfile``. There
are no heads and no signatures.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from pathlib import Path

_ASKED = struct.Struct("<QQ")  # from, how many


def serve(path: Path) -> int:
    """Serve one file, each connection on a thread; the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listener, path), daemon=True).start()
    return int(listener.getsockname()[1])


def _accept(listener: socket.socket, path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    while True:
        connected, _ = listener.accept()
        threading.Thread(target=_send, args=(connected, descriptor), daemon=True).start()


def _send(connected: socket.socket, descriptor: int) -> None:
    """Until the other end hangs up."""
    while asked := connected.recv(_ASKED.size, socket.MSG_WAITALL):
        at, left = _ASKED.unpack(asked)
        while left:
            sent = os.sendfile(connected.fileno(), descriptor, at, left)
            at, left = at + sent, left - sent


def connect(port: int) -> socket.socket:
    """A connection to a server of a file."""
    return socket.create_connection(("127.0.0.1", port))


def receive(connected: socket.socket, start: int, into: memoryview) -> None:
    """Receive one range into memory of its size."""
    connected.sendall(_ASKED.pack(start, len(into)))
    at = 0
    while at < len(into):
        at += connected.recv_into(into[at:])


def receive_over(connected: socket.socket, start: int, size: int, into: memoryview) -> None:
    """Receive one range into memory that is written again and again."""
    connected.sendall(_ASKED.pack(start, size))
    left = size
    while left:
        left -= connected.recv_into(into[: min(left, len(into))])
