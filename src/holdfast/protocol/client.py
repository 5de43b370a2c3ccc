"""A trainer's line to its keeper: find it, start it where there is none, ask, and listen.

``request`` waits for an answer under a deadline; everything the keeper says by itself goes to
the listener, on a thread of its own. A keeper that goes away is an event, never an exception
in the training thread.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from holdfast import errors
from holdfast.errors import DeadlineExceeded, FormatError, HoldfastError, KeeperError
from holdfast.snapshot import messages as m
from holdfast.snapshot.arena import arena_limit, make_private_dir

SOCKET_NAME = "keeper.sock"
LOCK_TAKEN = 3
_RETRY_S = 0.02
#: A keeper that takes nothing for so long is no longer spoken to on this line.
SEND_S = 5.0
#: What is no longer goes over a socket of this host whole, or not at all.
_SAID_AT_ONCE_BYTES = 4096
#: Keepers this process started: held, so that one that ends is reaped.
_started: list[subprocess.Popen[bytes]] = []


@atexit.register
def _leave_running() -> None:
    """A keeper is made to outlive its starter; subprocess would warn of it as of a leak."""
    for child in _started:
        child.returncode = child.poll() or 0


A = TypeVar("A", bound=m.Message)


def connect_socket(arena: Path) -> socket.socket:
    """A connected socket to the keeper of ``arena``; OSError when none listens."""
    directory = os.open(arena, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Through the descriptor: a unix socket's path has room for 108 bytes only.
        line.connect(f"/proc/self/fd/{directory}/{SOCKET_NAME}")
    except OSError:
        line.close()
        raise
    finally:
        os.close(directory)
    return line


def start_keeper(arena: Path, *, run_id: str, root: str, host_id: str) -> subprocess.Popen[bytes]:
    """Start a keeper in a session of its own, holding none of our descriptors.

    A launcher that ends its workers by process group, or a terminal that hangs up, does not
    reach it; an inherited listening socket would block the next start of the run.
    """
    command = [sys.executable, "-m", "holdfast.keeper"]
    command += ["--arena", str(arena), "--run-id", run_id, "--root", root, "--host-id", host_id]
    if "HOLDFAST_KEEPER_IDLE_S" in os.environ:
        command += ["--idle-s", os.environ["HOLDFAST_KEEPER_IDLE_S"]]
    if "HOLDFAST_KEEPER_SCRUB_S" in os.environ:
        command += ["--scrub-s", os.environ["HOLDFAST_KEEPER_SCRUB_S"]]
    limit = arena_limit()
    if limit is not None:
        command += ["--arena-bytes", str(limit)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    # It runs in "/", so that it pins no directory; relative paths would mean others there.
    ours = str(Path(__file__).resolve().parents[2])
    theirs = [os.path.abspath(p) for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p]
    environment["PYTHONPATH"] = os.pathsep.join([ours, *theirs])
    _started[:] = [child for child in _started if child.poll() is None]
    with open(arena / "keeper.log", "ab", opener=_for_us_alone) as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            close_fds=True,
            cwd="/",
            env=environment,
        )
    _started.append(child)
    return child


def _for_us_alone(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def find_or_start(
    arena: Path, *, run_id: str, root: str, host_id: str, timeout_s: float
) -> socket.socket:
    """A line to the keeper of ``arena``, started if none answers. KeeperError at the deadline."""
    make_private_dir(arena.parent)
    deadline = time.monotonic() + timeout_s
    child: subprocess.Popen[bytes] | None = None
    while True:
        try:
            make_private_dir(arena)
            return connect_socket(arena)
        except OSError:
            pass
        if time.monotonic() > deadline:
            raise KeeperError(
                f"no keeper answered in {arena} within {timeout_s:g} s{_last_words(arena)}"
            )
        ended = child.poll() if child is not None else LOCK_TAKEN
        if ended == LOCK_TAKEN:  # another has the arena and will answer, or is ending
            time.sleep(_RETRY_S)
            child = start_keeper(arena, run_id=run_id, root=root, host_id=host_id)
        elif ended is not None:
            raise KeeperError(f"the keeper ended with exit code {ended}{_last_words(arena)}")
        time.sleep(_RETRY_S)


def _last_words(arena: Path) -> str:
    try:
        lines = (arena / "keeper.log").read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return f"; its log ends with: {lines[-1]}" if lines else ""


def _give_up_sending_after(line: socket.socket, patience_s: float) -> None:
    """Sending alone: listening waits as long as there is nothing to hear."""
    whole_s = int(patience_s)
    micro_s = int((patience_s - whole_s) * 1e6)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", whole_s, micro_s))


class NeverSaid(KeeperError):
    """The keeper had hung up before a word of this was said: another one may be asked."""


class KeeperClient:
    """One connection. ``listener(message)`` hears what the keeper says by itself."""

    def __init__(
        self,
        line: socket.socket,
        listener: Callable[[m.Message], None],
        on_lost: Callable[[str], None],
    ) -> None:
        _give_up_sending_after(line, SEND_S)
        self._process = os.getpid()
        self._line = line
        self._listener = listener
        self._on_lost = on_lost
        self._sending = threading.RLock()  # only its owner can release it
        self._is_saying_much = False
        self._numbers = itertools.count(1)
        self._answers: dict[int, m.Message] = {}
        self._lock = threading.RLock()
        # Entered by the lock: by the condition, an interrupt may leave it locked.
        self._changed = threading.Condition(self._lock)
        self._broken = ""
        self._closing = False
        self._goodbye = -1
        self._reader = threading.Thread(target=self._read, name="holdfast-listen", daemon=True)
        self._reader.start()

    @property
    def is_open(self) -> bool:
        """Whether the keeper can still be spoken to."""
        return not self._broken

    def send(self, message: m.Message, seq: int = 0) -> None:
        """Say something. KeeperError when the keeper is gone, or reads nothing for ``SEND_S``.

        Progress is a hint: there are thousands, and none is said to a keeper that is behind in
        its reading, so that there is room for what matters.
        """
        if isinstance(message, m.Progress) and not self._is_writable():
            return
        data = m.pack(message, seq)
        is_much = len(data) > _SAID_AT_ONCE_BYTES
        try:
            # Within: an interrupt right behind it must not leave it locked.
            if not self._sending.acquire(timeout=SEND_S):
                raise KeeperError(f"the keeper went away: it read nothing for {SEND_S:g} s")
            if self._is_saying_much:  # this is a signal's handler
                raise KeeperError("something else was in the middle of being said")
            self._is_saying_much = is_much
            self._line.sendall(data)
            self._is_saying_much = False
        except BlockingIOError as error:
            # A part of the message may be said: nothing can follow it.
            self._break(f"it read nothing for {SEND_S:g} s")
            raise KeeperError(f"the keeper went away: {self._broken}") from error
        except OSError as error:
            self._break(str(error))
            raise NeverSaid(f"the keeper went away: {error}") from error
        except KeeperError:
            raise
        except BaseException:
            if is_much:
                self._break("it was interrupted in the middle of what was said")
            raise
        finally:
            try:  # noqa: SIM105 (nothing is called before that could be interrupted)
                self._sending.release()
            except RuntimeError:  # it is not ours
                pass

    def _is_writable(self) -> bool:
        """Whether most of the socket's buffer is free; True for a line that broke."""
        poll = select.poll()
        try:
            poll.register(self._line, select.POLLOUT)
        except ValueError:  # it was closed, which the sending tells better
            return True
        return bool(poll.poll(0))

    def _break(self, reason: str) -> None:
        """Nothing more is said or heard here; the listener's thread tells who must know."""
        with self._lock:
            self._broken = self._broken or reason
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)

    def request(self, message: m.Message, answer: type[A], *, timeout_s: float) -> A:
        """Say something and wait for its answer; the keeper's refusal is raised as its error."""
        seq = next(self._numbers)
        if isinstance(message, m.Goodbye):
            self._goodbye = seq
        self.send(message, seq)
        with self._lock:
            arrived = self._changed.wait_for(
                lambda: seq in self._answers or self._broken, timeout=timeout_s
            )
            found = self._answers.pop(seq, None)
        if found is None:
            if arrived:
                raise KeeperError(f"the keeper went away: {self._broken}")
            raise DeadlineExceeded(
                f"the keeper did not answer {type(message).__name__} within {timeout_s:g} s",
                phase=type(message).__name__,
            )
        if isinstance(found, m.Refused):
            raise errors.error_of(found.kind, found.reason, found.fields, KeeperError)
        if not isinstance(found, answer):
            raise KeeperError(f"the keeper answered {type(found).__name__} to {type(message)}")
        return found

    def hang_up(self) -> None:
        """End the conversation, and wait for nothing.

        In a process that was forked off, only its own hold on the line: the line is its parent's.
        """
        if self._process != os.getpid():
            self._line.close()
            return
        self._closing = True
        with contextlib.suppress(OSError):  # it hung up first
            self._line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up, and wait until the listener hears nothing more."""
        self.hang_up()
        self._reader.join(timeout=5)

    def _read(self) -> None:
        try:
            while True:
                size = int.from_bytes(self._receive(4), "little")
                if size > m.MAX_FRAME_BYTES:
                    raise FormatError(f"a message of {size} bytes")
                self._hear(*m.unpack(self._receive(size)))
        except (OSError, EOFError, HoldfastError) as error:
            reason = str(error) or "it closed the connection"
        with self._lock:
            reason = self._broken = self._broken or reason
            self._changed.notify_all()
        self._line.close()
        if not self._closing:
            self._on_lost(reason)

    def _hear(self, seq: int, message: m.Message) -> None:
        if seq == 0:
            self._listener(message)
            return
        if seq == self._goodbye:
            self._closing = True  # here, for the keeper may hang up right behind its answer
        with self._lock:
            self._answers[seq] = message
            self._changed.notify_all()

    def _receive(self, size: int) -> bytes:
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            count = self._line.recv_into(view[got:])
            if count == 0:
                raise EOFError("the keeper closed the connection")
            got += count
        return bytes(data)
