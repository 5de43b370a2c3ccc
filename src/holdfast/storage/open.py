"""Opens a root by its text: a path as a directory, a URL as a bucket whichever its cloud."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import UsageError
from holdfast.storage.base import Store, check_path
from holdfast.storage.files import ROOT_FILE
from holdfast.storage.local import LocalStore

if TYPE_CHECKING:
    from holdfast.storage.bucket import Bucket
    from holdfast.storage.lease_lock import LeaseView
    from holdfast.storage.objects import ObjectStore
    from holdfast.storage.probe import Kept
    from holdfast.storage.racers import RaceReport


_BUCKETS = ("s3", "gs", "az")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")


def is_bucket(root: str) -> bool:
    """True for a root that ``normal_root`` returned for a bucket."""
    return root.partition("://")[0] in _BUCKETS and "://" in root


def normal_root(root: object) -> str:
    """Returns ``root`` in the one form that every process of a run agrees on, independent of the
    working directory.

    Raises UsageError for a value that is no path, a scheme other than ``file://`` and those of
    buckets, and a home nobody has.
    """
    if not isinstance(root, (str, os.PathLike)):
        raise UsageError(f"{root!r} is no root: give the path of a directory as str or Path")
    text = os.fsdecode(os.fspath(root))
    scheme = text.partition("://")[0]
    if "://" in text and scheme in _BUCKETS:
        return _normal_bucket(text)
    if "://" in text and scheme != "file":
        raise UsageError(
            f"{_without_credentials(text)!r}: this version stores in directories and in buckets "
            "(s3://, gs:// or az://bucket/prefix); give a path every rank can reach"
        )
    if not text.removeprefix("file://") or "\0" in text:
        raise UsageError(f"{text!r} is no root: give the path of a directory")
    try:
        return str(Path(text.removeprefix("file://")).expanduser().absolute())
    except RuntimeError as error:
        raise UsageError(f"{text!r}: {error} Write the path out.") from error


def normal_cache(cache: object, root: str) -> str:
    """Returns the directory of caches in the form that all processes of a host agree on.

    Raises UsageError for a bucket, and where the root is in it or it is in the root.
    """
    found = normal_root(cache)
    if is_bucket(found):
        raise UsageError(f"cache={found!r}: a cache is a directory on a disk of this host")
    if not is_bucket(root):
        one, other = Path(found).resolve(), Path(root).resolve()
        if one == other or one in other.parents or other in one.parents:
            raise UsageError(
                f"cache={found!r} and the root {root!r} lie in each other: give the cache a "
                "directory of its own, on a disk of this host"
            )
    return found


def _normal_bucket(text: str) -> str:
    scheme, _, rest = text.partition("://")
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if "@" in rest:
        raise UsageError(
            f"{_without_credentials(text)!r} has credentials in it: take them out, and change "
            "them if others can see where it stood; they come from the environment, a profile or "
            "a role"
        )
    shown = _without_credentials(text)
    if "?" in rest or "#" in rest or not rest.isprintable():
        raise UsageError(f"{shown!r} is no root: a prefix has no ?, # or control characters")
    if not _NAME.fullmatch(bucket):
        raise UsageError(f"{shown!r} is no root: {bucket!r} is not the name of a bucket")
    if prefix:
        check_path(prefix)
    return f"{scheme}://{bucket}" + (f"/{prefix}" if prefix else "")


def _without_credentials(text: str) -> str:
    scheme, _, rest = text.partition("://")
    return f"{scheme}://{re.split('[?#]', rest.rpartition('@')[2])[0]}"


def follow(store: Store, root: str) -> None:
    """Makes a store use its root under another name; see ``LocalStore.follow``."""
    if isinstance(store, LocalStore):
        store.follow(root)


def open_store(root: object) -> Store:
    """Returns the store at ``root``, which is made at the first write."""
    found = normal_root(root)
    return _open_bucket(found) if is_bucket(found) else LocalStore(found)


def _open_bucket(root: str) -> ObjectStore:
    from holdfast.storage.objects import ObjectStore  # what speaks to servers is loaded late

    scheme, _, rest = root.partition("://")
    bucket, _, prefix = rest.partition("/")
    return ObjectStore(bucket, prefix, scheme=scheme)


def open_bucket_of(root: str) -> tuple[Bucket, str]:
    """Returns the bucket that a URL names, to read objects of others in, and the prefix."""
    normal = normal_root(root)
    prefix = normal.partition("://")[2].partition("/")[2]
    return _open_bucket(normal).bucket, prefix


def probe_bucket(root: str) -> Kept:
    """Returns what the server of a bucket keeps; it is tried out there. StorageError."""
    from holdfast.storage.probe import probe

    store = _open_bucket(root)
    return probe(store.bucket, store.probe_prefix)


def race_in_bucket(root: str) -> RaceReport:
    """Returns how many of several processes win that create one object at once. StorageError."""
    from holdfast.storage.racers import race

    store = _open_bucket(root)
    return race(store.bucket, store.probe_prefix)


def is_place(root: object) -> bool:
    """True if there is a directory of this name, or ``root`` names a bucket."""
    found = normal_root(root)
    return is_bucket(found) or Path(found).is_dir()


def open_lock(root: object, name: str) -> LeaseView | None:
    """Returns the lock of a bucket, to look at and to free; None for a root that is none."""
    found = normal_root(root)
    return _open_bucket(found).view_lock(name) if is_bucket(found) else None


# Describes in words a directory that is no root, for errors that suggest a remedy.


_SHOWN = 3


def what_is_at(url: str) -> str:
    """Returns one sentence on a directory that is no root, and on which path to use instead."""
    if is_bucket(url):
        return "Look for a misspelt bucket or prefix: nothing was saved there yet."
    path = Path(url.removeprefix("file://"))
    if near := _near(path):
        return f"{near} is one: give that path."
    if not os.path.lexists(path):
        return "Nothing is there: look for a misspelt or relative path."
    if not path.is_dir():
        return f"It is {_file(path)}."
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        return f"It cannot be listed: {error.strerror}."
    return _directory(names)


def root_around(path: Path) -> Path | None:
    """Returns the root that ``path`` is a part of, if it is one or two levels below it."""
    try:
        around = [parent for parent in list(path.parents)[:2] if (parent / ROOT_FILE).is_file()]
    except OSError:  # a name too long, say: then nothing near it was meant
        return None
    return next(iter(around), None)


def _near(path: Path) -> Path | None:
    """Returns a root around ``path``, for users who gave a part of one, or right below it."""
    try:
        below = sorted(found.parent for found in path.glob(f"*/{ROOT_FILE}"))
    except OSError:
        below = []
    return root_around(path) or next(iter(below), None)


def _file(path: Path) -> str:
    if path.is_symlink() and not path.exists():
        return f"a link to {os.readlink(path)}, where nothing is"
    if path.suffix == ".safetensors":
        return "a single safetensors file: `holdfast show` shows it, and holdfast.load reads it"
    return "a file: give the directory that was handed to Checkpointer or holdfast.save"


def _directory(names: list[str]) -> str:
    if not names:
        return "It is empty: nothing was saved there yet, or its file system is not mounted."
    if ".metadata" in names or any(name.endswith(".distcp") for name in names):
        return (
            "It holds a checkpoint of torch.distributed.checkpoint: `holdfast show` shows it, and "
            "holdfast.load reads it."
        )
    if any(name.endswith(".safetensors") for name in names):
        return (
            "It holds plain safetensors files, as model hubs give them: `holdfast show` shows "
            "them, and holdfast.load reads them."
        )
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    return f"It holds other things: {shown}."
