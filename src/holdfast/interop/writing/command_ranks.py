"""Brings together the ranks of one command, as torchrun starts them: through files, without torch.

Each rank knows its number by RANK and WORLD_SIZE. The files carry addresses and the first handshake
only; what an earlier start left there counts for nothing (``RankMeeting``).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

import xxhash

from holdfast.errors import DeadlineExceeded, HoldfastError, RootBusy, UsageError
from holdfast.ranks import MEET_S, ConnectedWorld, World, outcome_of, raise_outcome, reduce_or_raise
from holdfast.storage.base import reporting
from holdfast.storage.files import remove_tree

#: A rank writes its share of all files in this time; one that ends before is heard of at once.
WORK_S = 7 * 86400.0
_PAUSE_S = 0.05
#: The file that a rank holds locked while it takes part, before its number.
_LOCK = "lock-"
#: What tells the ranks of one start from those of another, where the launcher says it.
_LAUNCH = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "WORLD_SIZE")


#: One process that runs a command by itself, as ``rank_of_command`` would say it.
ALONE = (0, 1)


def rank_of_command() -> tuple[int, int]:
    """This process's number among those that run the command, and how many they are."""
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not rank or not size:
        raise UsageError(
            "--ranks needs RANK and WORLD_SIZE, as torchrun sets them: omit --ranks for a process "
            "of its own"
        )
    if not rank.isdecimal() or not size.isdecimal() or int(rank) >= int(size):
        raise UsageError(
            f"this process was started as rank {rank} of {size}, which no launcher does: omit "
            "--ranks for a process of its own"
        )
    return int(rank), int(size)


@contextlib.contextmanager
def met_ranks(
    directory: Path, command: str, place: tuple[int, int], timeout_s: float = MEET_S
) -> Iterator[CommandRanks]:
    """The ranks that run ``command``, of which this one is ``place``, met through files in
    ``directory``, which is made for it and removed; one process alone meets nobody. An error inside
    is raised on all.

    DeadlineExceeded names the ranks that did not come, RootBusy one of an earlier start that lives.
    """
    rank, size = place
    launch = " ".join(os.environ.get(name, "") for name in _LAUNCH)
    own = directory / xxhash.xxh3_64_hexdigest(launch.encode())
    if rank == 0:
        _clear_others(directory, own if size > 1 else None)
    if size == 1:
        yield CommandRanks(command)
        return
    with _part_in(own, rank, timeout_s):
        with _naming_ranks():
            world = ConnectedWorld(rank, size, MeetingFiles(own), timeout_s=timeout_s)
        ranks, is_done = CommandRanks(command, world, own), False
        try:
            # With all lines open, the end of a rank is heard of at once.
            with _naming_ranks():
                world.reduce("the meeting", b"", max, timeout_s=timeout_s)
            with ranks.telling():
                yield ranks
            is_done = True
        finally:
            world.close()
            if rank == 0 and is_done:
                with contextlib.suppress(OSError):
                    remove_tree(str(own))
                    directory.rmdir()


@contextlib.contextmanager
def _naming_ranks() -> Iterator[None]:
    """Say of ranks that do not come what makes them be waited for."""
    try:
        yield
    except DeadlineExceeded as error:
        error.args = (f"{error} Omit --ranks for a process of its own.",)
        raise


@contextlib.contextmanager
def _part_in(own: Path, rank: int, timeout_s: float) -> Iterator[None]:
    """Hold the lock of a rank's part in a meeting, which the kernel releases when it dies; an
    earlier holder has ``timeout_s`` to end.
    """
    with reporting("mkdir", own.parent.name, str(own.parent.parent)):
        for path in (own.parent, own):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _require_own(path)
    with contextlib.ExitStack() as held:
        _lock_rank(own / f"{_LOCK}{rank}", held, timeout_s)
        yield


def _clear_others(directory: Path, own: Path | None) -> None:
    """Remove what earlier starts left in ``directory``. RootBusy while a rank of one lives: it
    may still write.
    """
    with reporting("list", directory.name, str(directory.parent)):
        others = [path for path in directory.glob("*") if path != own]
        for other in others:
            with contextlib.ExitStack() as held:
                for path in other.glob(f"{_LOCK}*"):
                    _lock_rank(path, held)
                with contextlib.suppress(OSError):
                    remove_tree(str(other))
    if own is None:
        with contextlib.suppress(OSError):
            directory.rmdir()


def _lock_rank(path: Path, held: contextlib.ExitStack, timeout_s: float = 0.0) -> None:
    """Lock the file of a rank's part. RootBusy while another process has it."""
    end_s = time.monotonic() + timeout_s
    with reporting("lock", path.name, str(path.parent)):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        held.callback(os.close, descriptor)
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= end_s:
                    raise _still_runs(path) from None
                time.sleep(_PAUSE_S)


def _still_runs(path: Path) -> RootBusy:
    return RootBusy(
        f"rank {path.name.removeprefix(_LOCK)} of another start of this command still runs (it "
        f"holds {path}): wait until it has ended, or end it",
        name=str(path),
    )


def _require_own(path: Path) -> None:
    """Whoever can write there could take part: it must be this user's alone."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise UsageError(
            f"{path} is not a directory of this user alone, where the ranks would meet: remove it"
        )


class CommandRanks:
    """The ranks of one command; ``directory``: where they met, None for one process alone."""

    def __init__(
        self, command: str, world: World | None = None, directory: Path | None = None
    ) -> None:
        self._world = world or World()
        #: One name for all that is said: a rank that fails is heard wherever others are.
        self._phase = command
        self.rank, self.size = self._world.rank, self._world.size
        self._failed = None if directory is None else directory / f"failed-{self._world.nonce}"

    def require_others(self) -> None:
        """Raise the error of another rank that has failed, DeadlineExceeded where one has ended:
        what this one does is in vain.
        """
        self._require_no_failure()
        if ended := self._world.ended():
            raise DeadlineExceeded(
                f"ranks {ended} ended before they finished {self._phase!r}: see in their logs why",
                ranks=ended,
                phase=self._phase,
            )

    def _require_no_failure(self) -> None:
        if self._failed is not None:
            with contextlib.suppress(FileNotFoundError):
                raise_outcome(self.rank, self._failed.read_bytes())

    def share(self, count: int) -> range:
        """Which of so many pieces of work in order are this rank's: a run of neighbours."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def gather(
        self,
        act: Callable[[], bytes],
        join: Callable[[bytes, bytes], bytes] = max,
        conclude: Callable[[bytes], bytes] | None = None,
    ) -> bytes:
        """Run ``act`` on every rank; the joined results of all, or what rank 0 concludes of them.

        The error of any rank is raised on all.
        """

        def attempt() -> bytes:
            with self._marking():
                return act()

        try:
            return reduce_or_raise(
                self._world, self._phase, attempt, join, timeout_s=WORK_S, conclude=conclude
            )
        except HoldfastError:
            self._require_no_failure()  # those whose error follows from another say which
            raise

    def from_rank0(self, act: Callable[[], bytes]) -> bytes:
        """Run ``act`` on rank 0 only; its result, or its error, on every rank."""
        return self.gather(act if self.rank == 0 else bytes)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the others of an error inside: they raise it where they wait next."""
        try:
            with self._marking():
                yield
        except BaseException as error:
            with contextlib.suppress(HoldfastError):
                self._world.leave(self._phase, _outcome(self.rank, error))
            raise

    @contextlib.contextmanager
    def _marking(self) -> Iterator[None]:
        """Leave the first error of all ranks where those that work look for it."""
        try:
            yield
        except BaseException as error:
            if self._failed is not None:
                new = self._failed.with_name(f".{uuid.uuid4().hex}")
                with contextlib.suppress(OSError):
                    new.write_bytes(_outcome(self.rank, error))
                    os.link(new, self._failed)
            raise


def _outcome(rank: int, error: BaseException) -> bytes:
    def fail() -> None:
        raise error if isinstance(error, Exception) else HoldfastError("it was interrupted")

    return outcome_of(rank, fail)


class MeetingFiles:
    """A store of keys as torch's, of which each value is a file."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._timeout_s = MEET_S

    def clone(self) -> MeetingFiles:
        """The same files, with a timeout of their own."""
        return MeetingFiles(self._directory)

    def set_timeout(self, timeout: timedelta) -> None:
        """The longest that ``multi_get`` waits."""
        self._timeout_s = timeout.total_seconds()

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """Set each value at once, in their order."""
        for key, value in zip(keys, values, strict=True):
            path = self._path(key)
            new = path.with_name(f".{uuid.uuid4().hex}")
            with self._reporting("write", key):
                new.write_bytes(value)
                new.replace(path)

    def check(self, keys: Sequence[str]) -> bool:
        """True if all have a value."""
        with self._reporting("read", "keys"):
            return all(self._path(key).exists() for key in keys)

    def get(self, key: str) -> bytes:
        """The value under ``key``, which has one."""
        with self._reporting("read", key):
            return self._path(key).read_bytes()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """All values once they are there; RuntimeError if they are not in time, as torch's."""
        end_s = time.monotonic() + self._timeout_s
        while True:
            try:
                return [self._path(key).read_bytes() for key in keys]
            except OSError as error:
                # ESTALE: of a network file system, where the file was replaced meanwhile.
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    raise RuntimeError(f"{self._directory}: {error.strerror}") from error
            if time.monotonic() > end_s:
                raise RuntimeError("timeout")
            time.sleep(_PAUSE_S)

    def delete_key(self, key: str) -> None:
        """Remove a value; a missing one is fine."""
        with self._reporting("remove", key):
            self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._directory / quote(key, safe="")

    def _reporting(self, operation: str, key: str) -> contextlib.AbstractContextManager[None]:
        return reporting(operation, quote(key, safe=""), str(self._directory))
