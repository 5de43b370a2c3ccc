"""The run's secret, from a file that nobody else can read, or an error that says what is wrong."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from holdfast.errors import UsageError

SETTING = "HOLDFAST_SECRET_FILE"
_MOST_BYTES = 4096
_MODES = (0o600, 0o400)


def secret_from_environment() -> bytes | None:
    """The secret in the file that ``HOLDFAST_SECRET_FILE`` names; None where it is not set."""
    path = os.environ.get(SETTING, "").strip()
    return read_secret(Path(path)) if path else None


def read_secret(path: Path) -> bytes:
    """What the file holds, without a line break at its end. UsageError when it is not ours alone.

    Links are followed (container platforms hand secrets out through them): owner and mode are
    those of the file that was opened, not of a name.
    """
    try:
        # Not blocking: a pipe of this name would be waited for without end.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise UsageError(
            f"cannot read the run's secret {path}: {error.strerror}. HOLDFAST_SECRET_FILE must "
            "name a file that every host of the run has, with the same bytes."
        ) from error
    try:
        _check(path, os.fstat(descriptor))
        data = os.read(descriptor, _MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > _MOST_BYTES:
        raise UsageError(
            f"{path} is larger than a secret ({_MOST_BYTES} bytes at most): HOLDFAST_SECRET_FILE "
            "names another file"
        )
    return data.rstrip(b"\r\n")


def _check(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"the run's secret {path} is not a file: HOLDFAST_SECRET_FILE names it")
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) not in _MODES:
        raise UsageError(
            f"the run's secret {path} must be readable by its owner alone, and that must be this "
            f"process's user {os.getuid()}; it belongs to user {found.st_uid} with mode "
            f"{stat.filemode(found.st_mode)}: chown it, and chmod 600"
        )
