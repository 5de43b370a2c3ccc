"""Implements a store in memory, with every promise of a directory, for tests.

It passes the same suite as the others, so proofs made with it hold for them. Images whose filling
was never finished stay visible, as they do on a disk after a crash.
"""

from __future__ import annotations

import errno
import os
import threading
import uuid
from types import TracebackType

from holdfast.errors import NotFound
from holdfast.storage.base import (
    ImageSink,
    Lock,
    SinkFill,
    already_published,
    check_path,
    check_prefix,
    check_range,
    flat,
    new_name,
    os_failure,
    root_busy,
    short_read,
)
from holdfast.storage.files import ROOT_FILE


class MemoryStore:
    """Files by path. Safe from several threads; share the object itself."""

    def __init__(self, name: str = "store") -> None:
        self._name = name
        self._files: dict[str, bytes | bytearray] = {}
        self._owners: dict[str, str] = {}
        self._mutex = threading.Lock()
        self._identity = f"memory {uuid.uuid4().hex}"

    def __repr__(self) -> str:
        return f"MemoryStore({self._name!r})"

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    def identity(self) -> str:
        self._file(ROOT_FILE)
        return self._identity

    def read(self, path: str, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        check_range(path, offset_bytes, size_bytes or 0)
        data = self._file(path)
        wanted = max(0, len(data) - offset_bytes) if size_bytes is None else size_bytes
        if offset_bytes + wanted > len(data):
            raise short_read(path, self.url, offset_bytes, wanted, len(data))
        return bytes(memoryview(data)[offset_bytes : offset_bytes + wanted])

    def read_into(
        self, path: str, offset_bytes: int, buffer: memoryview, *, is_shared: bool = False
    ) -> None:
        into = flat(buffer)
        if into:
            into[:] = self.read(path, offset_bytes, len(into))
        else:
            self.read(path, offset_bytes, 0)

    def size_bytes(self, path: str) -> int:
        return len(self._file(path))

    def exists(self, path: str) -> bool:
        return check_path(path) in self._files

    def list(self, prefix: str) -> list[str]:
        below = _below(check_prefix(prefix))
        with self._mutex:
            paths = [path for path in self._files if path.startswith(below)]
        return sorted({path[len(below) :].split("/", 1)[0] for path in paths})

    def publish(self, path: str, data: bytes, *, replace: bool = False) -> None:
        check_path(path)
        with self._mutex:
            self._require_free("publish", path, replace=replace)
            self._files[path] = bytes(data)

    def create(self, path: str, size_bytes: int, *, aside: str = "") -> ImageSink:
        check_path(path)
        check_range(path, 0, size_bytes)
        image = bytearray(size_bytes)
        name = check_path(new_name(aside)) if aside else path
        with self._mutex:
            self._require_free("create", aside or path)
            self._files[name] = image
        return _MemorySink(self, name, image, (path, aside) if aside else None)

    def remove(self, path: str) -> None:
        check_path(path)
        with self._mutex:
            self._files.pop(path, None)

    def remove_tree(self, prefix: str) -> None:
        below = _below(check_path(prefix))
        with self._mutex:
            self._files = {
                path: data for path, data in self._files.items() if not path.startswith(below)
            }

    def lock(self, name: str, owner: str) -> Lock:
        check_path(name)
        with self._mutex:
            if name in self._owners:
                raise root_busy(name, self.url, self._owners[name])
            self._owners[name] = owner
        return _MemoryLock(self, name)

    def _file(self, path: str) -> bytes | bytearray:
        check_path(path)
        try:
            return self._files[path]
        except KeyError:
            raise NotFound(f"there is no {path} in {self.url}", path=path) from None

    def _require_free(self, operation: str, path: str, *, replace: bool = False) -> None:
        parts = path.split("/")
        if any("/".join(parts[:depth]) in self._files for depth in range(1, len(parts))):
            cause = OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            raise os_failure(operation, path, self.url, cause) from cause
        if path in self._files and not replace:
            raise already_published(path, self.url)

    def _forget(self, path: str, image: bytearray) -> None:
        with self._mutex:
            if self._files.get(path) is image:
                del self._files[path]

    def _replace(self, image: bytearray, path: str, aside: str) -> None:
        with self._mutex:
            self._require_free("create", aside)
            if path in self._files:
                self._files[aside] = self._files[path]
            self._files[path] = image
            self._files.pop(new_name(aside), None)

    def _unlock(self, name: str) -> None:
        with self._mutex:
            self._owners.pop(name, None)


class _MemorySink:
    def __init__(
        self, store: MemoryStore, path: str, image: bytearray, replaces: tuple[str, str] | None
    ) -> None:
        self._store, self._replaces = store, replaces
        self._path = path
        self._image = image
        self._filling = SinkFill(path, len(image), lambda: None)

    def write(self, offset_bytes: int, data: memoryview) -> None:
        source = flat(data)
        with self._filling.writing(offset_bytes, len(source)):
            self._image[offset_bytes : offset_bytes + len(source)] = source

    def finish(self) -> None:
        with self._filling.finishing():  # memory is as durable as this store gets
            if self._replaces is not None:
                self._store._replace(self._image, *self._replaces)

    def abort(self) -> None:
        if self._filling.abort():
            self._store._forget(self._path, self._image)


class _MemoryLock:
    def __init__(self, store: MemoryStore, name: str) -> None:
        self._store = store
        self._name = name
        self._is_held = True

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._store._unlock(self._name)

    def __enter__(self) -> _MemoryLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def _below(prefix: str) -> str:
    return prefix + "/" if prefix else ""
