"""Every error Holdfast raises, each named after the situation it reports.

HoldfastError
├── UsageError                the call cannot mean anything; nothing was changed
│   ├── UnsupportedState      an object in the state that cannot be stored faithfully
│   └── StateMismatch         the state offered and the state stored do not fit each other
├── NotFound                  what was asked for is not there
├── FormatError               bytes that are not what format v1 says they must be
│   ├── NewerFormat           written by a newer Holdfast that requires features unknown here
│   ├── ChecksumMismatch      bytes changed after they were written
│   └── CoverageError         the images do not produce every element exactly once
├── StorageError              a store refused or failed (retryable says which)
│   ├── AlreadyPublished      something exists that is never overwritten
│   └── RootBusy              another run holds the root's lock
├── SaveError                 a save that did not reach what it promised; training is unharmed
│   ├── SnapshotSkipped       no rank captured it
│   ├── CaptureOvertaken      the state changed while it was copied; never sealed
│   └── PersistFailed         captured, but not durable
├── RestoreError              no rank was given a state it can train with
│   └── StatePoisoned         a restore broke off half-way; the objects must not be used
├── ArenaError                shared memory is missing, too small, or not ours
├── KeeperError               the keeper could not be started or does not answer
│   └── Fenced                a newer incarnation has taken over; this one must stop
└── DeadlineExceeded          a wait ended; the message names the ranks and phase missing

An error's ``retryable`` says whether the same call may succeed later without a change by the
user; ``exit_code`` is what the command line exits with; ``fields`` are its facts for machines.
"""

from __future__ import annotations

from typing import Any


class HoldfastError(Exception):
    """The root of the tree: ``except holdfast.HoldfastError`` catches all of them."""

    retryable: bool = False
    exit_code: int = 1

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.fields: dict[str, Any] = fields


class UsageError(HoldfastError):
    """The call cannot mean anything as it was made; nothing was changed."""

    exit_code = 2


class UnsupportedState(UsageError):
    """An object in the state cannot be stored faithfully; the message names it."""


class StateMismatch(UsageError):
    """The offered state and the stored one do not fit; every difference is listed."""


class NotFound(HoldfastError):
    """The checkpoint, step, leaf or directory asked for is not there."""

    exit_code = 3


class FormatError(HoldfastError):
    """Bytes are not what the format says they must be; the message names file and field."""

    exit_code = 4


class NewerFormat(FormatError):
    """The checkpoint requires features this version does not know."""


class ChecksumMismatch(FormatError):
    """Bytes changed after they were written; the message names file and block."""


class CoverageError(FormatError):
    """The images do not produce every element of a leaf exactly once."""


class StorageError(HoldfastError):
    """A store refused or failed an operation; the operating system's reason is kept as cause."""

    exit_code = 5
    retryable = True


class AlreadyPublished(StorageError):
    """A name exists that is never overwritten."""

    retryable = False


class RootBusy(StorageError):
    """Another run holds the lock of this root."""


class SaveError(HoldfastError):
    """A save did not reach what it promised. Training is unharmed."""

    exit_code = 6
    retryable = True


class SnapshotSkipped(SaveError):
    """No rank captured this step; the message says why."""


class CaptureOvertaken(SaveError):
    """The state changed while it was copied; the copy was thrown away on all ranks."""


class PersistFailed(SaveError):
    """The snapshot was captured but did not become durable."""


class RestoreError(HoldfastError):
    """No state that all ranks can train with could be restored."""

    exit_code = 7


class StatePoisoned(RestoreError):
    """A restore broke off half-way: the objects hold a mixture and must not be used."""


class ArenaError(HoldfastError):
    """Shared memory is missing, too small, or belongs to somebody else."""

    exit_code = 8


class KeeperError(HoldfastError):
    """The keeper could not be started or does not answer."""

    exit_code = 9
    retryable = True


class Fenced(KeeperError):
    """A newer incarnation has taken over this run; this process must stop saving."""

    retryable = False


class DeadlineExceeded(HoldfastError):
    """A wait ended before what it waited for came; the message names who is missing, and where."""

    exit_code = 10
    retryable = True
