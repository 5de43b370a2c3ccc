"""Client connection of a trainer to its keeper: finds or starts the keeper, sends, receives.

``request`` waits for an answer with a deadline; all notifications from the keeper go to the
listener, on its own thread. A keeper that terminates is an event, never an exception in the
training thread.
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
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from holdfast import errors
from holdfast.errors import DeadlineExceeded, FormatError, HoldfastError, KeeperError
from holdfast.protocol import messages as m
from holdfast.protocol.arena import arena_limit, make_private_dir

SOCKET_NAME = "keeper.sock"
LOCK_TAKEN = 3
_RETRY_S = 0.02
#: A keeper that reads nothing for this long is treated as gone on this connection.
SEND_S = 5.0
#: A message up to this size is sent over a local socket as a whole or not at all.
_SAID_AT_ONCE_BYTES = 4096
#: Keepers that this process started, kept so that ended ones are reaped.
_started: list[subprocess.Popen[bytes]] = []


@atexit.register
def _leave_running() -> None:
    """Keep subprocess from warning of a leak: a keeper is meant to outlive its starter."""
    for child in _started:
        child.returncode = child.poll() or 0


A = TypeVar("A", bound=m.Message)


def connect_socket(arena: Path) -> socket.socket:
    """Return a socket connected to the keeper of ``arena``; OSError if no keeper listens."""
    directory = os.open(arena, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Connects through the directory's descriptor: a unix socket path is limited to 108 bytes.
        line.connect(f"/proc/self/fd/{directory}/{SOCKET_NAME}")
    except OSError:
        line.close()
        raise
    finally:
        os.close(directory)
    return line


def start_keeper(
    arena: Path, *, run_id: str, root: str, host_id: str, root_id: str = ""
) -> subprocess.Popen[bytes]:
    """Start a keeper in its own session, without inherited descriptors.

    A launcher that kills its workers by process group, or a terminal that hangs up, does not reach
    the keeper; an inherited listening socket would block the next start of the run.
    """
    command = [sys.executable, "-m", "holdfast.keeper"]
    command += ["--arena", str(arena), "--run-id", run_id, "--root", root, "--host-id", host_id]
    if root_id:
        command += ["--root-id", root_id]
    if "HOLDFAST_KEEPER_IDLE_S" in os.environ:
        command += ["--idle-s", os.environ["HOLDFAST_KEEPER_IDLE_S"]]
    if "HOLDFAST_KEEPER_SCRUB_S" in os.environ:
        command += ["--scrub-s", os.environ["HOLDFAST_KEEPER_SCRUB_S"]]
    limit = arena_limit()
    if limit is not None:
        command += ["--arena-bytes", str(limit)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    # The keeper runs in "/", so that it pins no directory: relative paths are made absolute.
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
    arena: Path, *, run_id: str, root: str, host_id: str, timeout_s: float, root_id: str = ""
) -> socket.socket:
    """Connect to the keeper of ``arena``, starting one if none answers. KeeperError at the
    deadline.
    """
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
        if ended == LOCK_TAKEN:  # another keeper owns the arena and will answer, or is ending
            time.sleep(_RETRY_S)
            child = start_keeper(arena, run_id=run_id, root=root, host_id=host_id, root_id=root_id)
        elif ended is not None:
            raise KeeperError(f"the keeper ended with exit code {ended}{_last_words(arena)}")
        time.sleep(_RETRY_S)


def _last_words(arena: Path) -> str:
    try:
        lines = (arena / "keeper.log").read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return f"; its log ends with: {lines[-1]}" if lines else ""


def _set_send_timeout(line: socket.socket, patience_s: float) -> None:
    """Set the socket's send timeout only: receiving waits without limit."""
    whole_s = int(patience_s)
    micro_s = int((patience_s - whole_s) * 1e6)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", whole_s, micro_s))


class NeverSent(KeeperError):
    """The keeper closed the connection before this message was sent: it can go to another
    keeper.
    """


class KeeperClient:
    """One connection to a keeper. ``listener(message)`` receives the keeper's notifications."""

    def __init__(
        self,
        line: socket.socket,
        listener: Callable[[m.Message], None],
        on_lost: Callable[[str], None],
    ) -> None:
        _set_send_timeout(line, SEND_S)
        self._process = os.getpid()
        self._socket = line
        self._listener = listener
        self._on_lost = on_lost
        self._send_lock = threading.RLock()  # only its owner can release it
        self._is_sending = False
        self._numbers = itertools.count(1)
        self._answers: dict[int, m.Message] = {}
        self._lock = threading.RLock()
        # The lock itself is used in ``with``: an interrupt inside Condition.__enter__ may leave it
        # locked.
        self._changed = threading.Condition(self._lock)
        self._broken = ""
        self._closing = False
        self._goodbye = -1
        self.received_count = 0
        """Number of messages received from the keeper."""
        self._reader = threading.Thread(target=self._read, name="holdfast-listen", daemon=True)
        self._reader.start()

    @property
    def is_open(self) -> bool:
        """True while messages can be sent to the keeper."""
        return not self._broken

    def send(self, message: m.Message, seq: int = 0) -> None:
        """Send a message. Raises KeeperError if the keeper is gone, or reads nothing for
        ``SEND_S``.

        Progress messages are optional and come in thousands: none is sent to a keeper whose socket
        buffer is filling, so that there is room for the important messages.
        """
        if isinstance(message, m.Progress) and not self._is_writable():
            return
        data = m.pack(message, seq)
        is_much = len(data) > _SAID_AT_ONCE_BYTES
        try:
            # Inside the try block: an interrupt right after acquiring must not leave the lock held.
            if not self._send_lock.acquire(timeout=SEND_S):
                raise KeeperError(f"the keeper went away: it read nothing for {SEND_S:g} s")
            if self._is_sending:  # called from a signal handler during a send
                raise KeeperError("something else was in the middle of being said")
            self._is_sending = is_much
            self._socket.sendall(data)
            self._is_sending = False
        except BlockingIOError as error:
            # A part of the message may have been sent: no other message can follow on this
            # connection.
            self._break(f"it read nothing for {SEND_S:g} s")
            raise KeeperError(f"the keeper went away: {self._broken}") from error
        except OSError as error:
            self._break(str(error))
            raise NeverSent(f"the keeper went away: {error}") from error
        except KeeperError:
            raise
        except BaseException:
            if is_much:
                self._break("it was interrupted in the middle of what was said")
            raise
        finally:
            try:  # noqa: SIM105 (nothing is called before that could be interrupted)
                self._send_lock.release()
            except RuntimeError:  # this thread does not hold the lock
                pass

    def _is_writable(self) -> bool:
        """Return True if most of the socket's buffer is free; also True for a broken connection."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLOUT)
        except ValueError:  # the socket was closed; the send itself reports that
            return True
        return bool(poll.poll(0))

    def _break(self, reason: str) -> None:
        """Close the connection for sending and receiving; the listener thread reports the loss."""
        with self._lock:
            self._broken = self._broken or reason
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def request(self, message: m.Message, answer: type[A], *, timeout_s: float) -> A:
        """Send a message and wait for its answer; a refusal by the keeper is raised as its
        error.
        """
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

    def disconnect(self) -> None:
        """Close the connection without waiting.

        In a forked child this closes only the child's descriptor: the connection belongs to the
        parent.
        """
        if self._process != os.getpid():
            self._socket.close()
            return
        self._closing = True
        with contextlib.suppress(OSError):  # the keeper closed the connection first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, and wait until the listener thread has ended."""
        self.disconnect()
        self._reader.join(timeout=5)

    def _read(self) -> None:
        try:
            while True:
                size = int.from_bytes(self._receive(4), "little")
                if size > m.MAX_FRAME_BYTES:
                    raise FormatError(f"a message of {size} bytes")
                self._dispatch(*m.unpack(self._receive(size)))
        except (OSError, EOFError, HoldfastError) as error:
            reason = str(error) or "it closed the connection"
        except Exception as error:  # a defect of ours: nothing said to a listener may go unheard
            traceback.print_exc()
            reason = f"a message could not be handled ({error!r})"
        with self._lock:
            reason = self._broken = self._broken or reason
            self._changed.notify_all()
        self._socket.close()
        if not self._closing:
            self._on_lost(reason)

    def _dispatch(self, seq: int, message: m.Message) -> None:
        self.received_count += 1
        if seq == 0:
            self._listener(message)
            return
        if seq == self._goodbye:
            self._closing = True  # first: the keeper may close the connection right after answering
        with self._lock:
            self._answers[seq] = message
            self._changed.notify_all()

    def _receive(self, size: int) -> bytes:
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            count = self._socket.recv_into(view[got:])
            if count == 0:
                raise EOFError("the keeper closed the connection")
            got += count
        return bytes(data)
