"""Says where the events of a root are written and read: below it, or on the host for a bucket.

Nothing appends to an object. So the ranks and the keeper of a host write into a spool there, as
into a directory; the keeper, and no trainer, uploads whole lines of it now and then as objects that
are never changed. Who reads the events of a bucket reads these, and what this host has not uploaded
yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import stat
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from holdfast.catalogue import ROOT, is_root
from holdfast.errors import HoldfastError, UsageError
from holdfast.format.checksum import checksum, text
from holdfast.storage.base import Store, read_at_most
from holdfast.storage.open import is_bucket, open_store

EVENTS = "events"
UPLOAD_S = 60.0
#: The most that one object holds; what is longer goes into several.
OBJECT_BYTES = 8 << 20
_MARKS, _FETCHED = ".uploaded.json", ".fetched"
#: How the names of files begin that have what is in the spool alone.
_HERE = "here-"
#: The most that the first line of a file has; a record has less.
_FIRST_BYTES = 64 << 10
#: The names of the objects that ``upload`` makes; what else a user keeps there is not fetched.
_IS_UPLOADED = re.compile(r"[\w-]{1,64}-[0-9]{20}-[0-9a-f]{8}\.jsonl", re.ASCII).fullmatch


@dataclass(frozen=True, slots=True)
class EventPlace:
    """The directory of the events of a root, on this host."""

    root: str
    directory: Path
    is_spool: bool

    @property
    def only_beside(self) -> Path | None:
        """The file without which nothing is written; a spool is not below the root."""
        return None if self.is_spool else Path(self.root, ROOT)

    def file(self, writer: str) -> Path:
        """Returns the file of a writer."""
        return self.directory / f"{writer}.jsonl"

    def read_from(self) -> Path:
        """Returns a directory with all events that can be had; those of a bucket are fetched."""
        return _fetch(self) if self.is_spool else self.directory


def event_place(root: str | Path) -> EventPlace:
    """Returns the place of the events of ``root``. Raises UsageError for an empty name."""
    if not str(root):
        raise UsageError("'' is no root: give the path of a directory")
    if not is_bucket(str(root)):
        return EventPlace(str(root), Path(root, EVENTS), is_spool=False)
    import tempfile  # a start of every keeper would wait for it

    name = f"holdfast-events-{os.getuid()}"
    above = Path(tempfile.gettempdir(), name)
    _make_private(above)
    return EventPlace(str(root), above / text(checksum(str(root).encode())), is_spool=True)


def _make_private(directory: Path) -> None:
    """Makes a directory that nobody else can read or write. UsageError if another has made it."""
    with contextlib.suppress(OSError):  # without it no event is written, which harms nothing
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
            raise UsageError(
                f"{directory}, where events of buckets wait, is not a directory of this user: "
                "remove it, or set TMPDIR to a directory of your own"
            )
        directory.chmod(0o700)


class EventUploader:
    """Uploads what is new in a spool, on a thread of its own until ``close``."""

    def __init__(self, place: EventPlace, store: Store, *, every_s: float = UPLOAD_S) -> None:
        self._place, self._store, self._every_s = place, store, every_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="holdfast-spool", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._stopping.wait(self._every_s):
            with contextlib.suppress(HoldfastError, OSError):  # they wait in the spool
                upload(self._place, self._store)

    def close(self, *, deadline_s: float = 10.0) -> None:
        """Uploads what is left, and stops; gives up after ``deadline_s``."""
        self._stopping.set()
        last = threading.Thread(target=self._last, name="holdfast-spool-end", daemon=True)
        last.start()
        last.join(deadline_s)

    def _last(self) -> None:
        self._thread.join()
        with contextlib.suppress(HoldfastError, OSError):
            upload(self._place, self._store)


def follow_events(place: EventPlace, store: Store) -> Callable[[], None]:
    """Has the events of a bucket uploaded; returns a function that ends it."""
    return EventUploader(place, store).close if place.is_spool else lambda: None


def upload(place: EventPlace, store: Store) -> int:
    """Uploads the whole lines that are new in the spool; returns how many objects were made."""
    if not is_root(store):
        return 0
    made, marks = 0, _read_marks(place)
    for file in sorted(place.directory.glob("*.jsonl")):
        with file.open("rb") as opened:
            name = _name_of(opened)
            while lines := _new_lines(opened.read, opened.seek, marks.get(name, 0)):
                moment = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}"
                store.publish(f"{EVENTS}/{_host()}-{moment}.jsonl", lines)
                marks[name] = marks.get(name, 0) + len(lines)
                _write_marks(place, marks)
                made += 1
    return made


def _new_lines(read: Callable[[int], bytes], seek: Callable[[int], int], start: int) -> bytes:
    seek(start)
    data = read(OBJECT_BYTES)
    return data[: data.rfind(b"\n") + 1]


def _host() -> str:
    return re.sub(r"[^\w-]", "-", socket.gethostname(), flags=re.ASCII)[:64] or "host"


def _name_of(file: BinaryIO) -> str:
    """Returns what names a file for good: they are renamed when full, and a new one may have the
    inode of one that was given up.
    """
    first = text(checksum(file.readline(_FIRST_BYTES)))
    return f"{os.fstat(file.fileno()).st_ino}-{first}"


def _read_marks(place: EventPlace) -> dict[str, int]:
    """Returns how much of each file was uploaded, of those that are there."""
    try:
        found = json.loads((place.directory / _MARKS).read_bytes())
    except (OSError, ValueError):
        return {}
    there = set()
    for file in place.directory.glob("*.jsonl"):
        with contextlib.suppress(FileNotFoundError), file.open("rb") as opened:
            there.add(_name_of(opened))
    return {name: int(size) for name, size in found.items() if name in there}


def _write_marks(place: EventPlace, marks: dict[str, int]) -> None:
    temporary = place.directory / f"{_MARKS}.new"
    temporary.write_text(json.dumps(marks))
    temporary.replace(place.directory / _MARKS)


def _fetch(place: EventPlace) -> Path:
    """Fills a directory with the uploaded objects, and with what is only in the spool.

    What is uploaded meanwhile is in both: a reader knows records by their numbers.
    """
    into = place.directory / _FETCHED
    into.mkdir(mode=0o700, parents=True, exist_ok=True)
    store = open_store(place.root)
    marks = _read_marks(place)
    uploaded = set(filter(_IS_UPLOADED, store.list(EVENTS)))
    for old in into.glob("*.jsonl"):
        if old.name not in uploaded:  # it was removed, and may be of another run that was there
            old.unlink(missing_ok=True)
    for name in sorted(uploaded):
        if (into / name).exists():
            continue
        data = read_at_most(store, f"{EVENTS}/{name}", OBJECT_BYTES)
        if isinstance(data, bytes):  # else it is none of ours
            temporary = into / f".{name}"
            temporary.write_bytes(data)
            temporary.replace(into / name)
    for file in place.directory.glob("*.jsonl"):
        with file.open("rb") as opened:
            opened.seek(marks.get(_name_of(opened), 0))
            (into / f"{_HERE}{file.stem.replace('.', '-')}.jsonl").write_bytes(opened.read())
    return into


def is_of_spool(path: Path) -> bool:
    """Returns True for a file to read from that has what was not uploaded yet."""
    return path.name.startswith(_HERE) and not _IS_UPLOADED(path.name)
