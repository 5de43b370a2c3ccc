"""Keepers forked from a process that has their modules loaded: a start without an interpreter's.

A run of tests that starts a thousand keepers puts ``KeeperForks`` where the client of a keeper has
``subprocess``. Each keeper has the command line, the environment and the output it was given, as
those that Python starts anew.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import os
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

#: All that a keeper loads by its first durable save.
_MODULES = ("holdfast.keeper.__main__", "holdfast.keeper.process", "holdfast.geometry.replicas")
_COMMAND_BYTES = 4000
"""Of the server's own command line, into which each keeper writes its own."""
_REQUEST_BYTES = 1 << 17


class KeeperForks:
    """Has the server fork one keeper after the other; it ends with this process."""

    DEVNULL = subprocess.DEVNULL

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None

    def Popen(
        self, command: list[str], *, stdout: IO[bytes], env: dict[str, str], **_: Any
    ) -> ForkedKeeper:
        """Starts a keeper; other options are those that each has."""
        with self._lock:
            if self._socket is None:
                self._start_server()
        pid = self._ask({"command": command, "environment": env}, [stdout.fileno()])
        return ForkedKeeper(self, pid)

    def exit_code(self, pid: int) -> int | None:
        """Returns the exit code of a keeper; None while it runs, or when nobody knows."""
        return None if self._socket is None else self._ask({"ended": pid}, [])

    def close(self) -> None:
        """Ends the server and leaves its keepers running."""
        if self._socket is not None and self._server is not None:
            self._socket.close()
            self._socket = None
            self._server.wait(10)

    def _ask(self, request: dict[str, Any], descriptors: list[int]) -> Any:
        assert self._socket is not None
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            return json.loads(self._socket.recv(_REQUEST_BYTES))

    def _start_server(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", __file__, str(theirs.fileno()), "-" * _COMMAND_BYTES]
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # a fork loses other threads
        with theirs:
            self._server = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        self._socket = ours
        atexit.register(self.close)


class ForkedKeeper:
    """What its starter asks of a keeper, as of a ``subprocess.Popen``."""

    def __init__(self, forks: KeeperForks, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._forks = forks

    def poll(self) -> int | None:
        """Returns its exit code; None while it runs."""
        if self.returncode is None:
            self.returncode = self._forks.exit_code(self.pid)
        return self.returncode


def serve(line: socket.socket) -> None:
    """Forks keepers until nobody can ask for one any more."""
    for module in _MODULES:
        importlib.import_module(module)
    while True:
        text, descriptors, _, _ = socket.recv_fds(line, _REQUEST_BYTES, 1)
        if not text:
            return
        request, answer = json.loads(text), None
        if "ended" in request:
            pid, status = os.waitpid(request["ended"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif not (answer := os.fork()):
            line.close()
            os._exit(_be_keeper(request["command"], request["environment"], descriptors[0]))
        for descriptor in descriptors:
            os.close(descriptor)
        line.send(json.dumps(answer).encode())


def _be_keeper(command: list[str], environment: dict[str, str], output: int) -> int:
    os.setsid()
    os.chdir("/")
    for number, ours in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(ours, number)
    os.environ.clear()
    os.environ.update(environment)
    _set_command_line(command)
    main: Callable[[list[str]], int] = sys.modules["holdfast.keeper.__main__"].main
    try:
        return main(command[3:])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        return 1


def _set_command_line(command: list[str]) -> None:
    words = b"\0".join(word.encode() for word in command) + b"\0"
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    assert len(words) < end - begin, "the command line is too long"
    ctypes.memmove(begin, words.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
