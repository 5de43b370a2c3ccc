"""A process that uploads is killed at any moment: the next sends only what is not there yet."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
import uuid

import pytest

from holdfast.storage.bucket import RATE_VARIABLE
from holdfast.storage.lease_lock import LeaseTimes
from holdfast.storage.objects import ObjectStore
from holdfast.storage.uploads import UploadSink
from support.servers.object_servers import ObjectServer, object_store, use

PART = 5 << 20
SIZE = 6 * PART + 12_345
HEAD = 4096
TIMES = LeaseTimes(renew_s=2.0, stop_s=10.0, take_over_s=20.0)


def content() -> bytes:
    return random.Random(7).randbytes(SIZE)


def write(store: ObjectStore, directory: str, data: bytes) -> UploadSink:
    """Writes an image as the keeper does: its header, and chunks that begin behind it."""
    sink = store.create(f"steps/{directory}/live-00000", len(data))
    assert isinstance(sink, UploadSink)
    with memoryview(data) as view:
        sink.write(0, view[:HEAD])
        for start in range(HEAD, len(data), PART):
            sink.write(start, view[start : start + PART])
    return sink


def upload_for_ever(prefix: str) -> None:
    """What is killed; it is stopped at the end, so that it never ends by itself."""
    store = object_store(prefix, least_part_bytes=PART, lease=TIMES)
    store.lock("writer", "killed")
    write(store, "1-2-attempt0a1b2c", content()).finish()
    time.sleep(600)


def kill_and_resume(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data, chance = content(), random.Random(3)
    monkeypatch.setenv(RATE_VARIABLE, str(30 << 20))
    lost = 0
    for _ in range(rounds):
        prefix = f"kills/{uuid.uuid4().hex}"
        process = multiprocessing.get_context("spawn").Process(
            target=upload_for_ever, args=(prefix,)
        )
        process.start()
        store = object_store(prefix, least_part_bytes=PART, lease=TIMES)
        until_s = time.monotonic() + 60
        begun = store.bucket.uploads(f"{prefix}/steps")
        while not begun and time.monotonic() < until_s:
            begun = store.bucket.uploads(f"{prefix}/steps")
            time.sleep(0.02)
        time.sleep(chance.random() * 1.2)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        there = sum(part.size_bytes for one in begun for part in store.bucket.parts(one))
        store.lock("writer", "next")
        until_s = time.monotonic() + 10  # its completion may be under way in the server
        while not (found := store.resume("steps", "1-2-attempt")) and time.monotonic() < until_s:
            time.sleep(0.1)
        lease = store._lease()
        assert lease is not None and lease.is_alone
        if not found:  # killed while the server completed it: neither upload nor object is there
            assert store.list("steps") == [] and not store.bucket.uploads(f"{prefix}/steps")
            lost += 1
            continue
        assert found == "1-2-attempt0a1b2c"
        before = store.bucket.traffic.sent_bytes
        if store.exists("steps/1-2-attempt0a1b2c/live-00000"):
            there, sent = SIZE, 0
        else:
            sink = write(store, "1-2-attempt0a1b2c", data)
            sink.finish()
            sent = store.bucket.traffic.sent_bytes - before
        print(f"{there} bytes there, {sent} sent")
        assert sent <= SIZE - there + SIZE // 10
        assert store.read("steps/1-2-attempt0a1b2c/live-00000") == data
        assert store.bucket.uploads(prefix) == []
    assert lost <= rounds // 20


@pytest.mark.slow
@pytest.mark.parametrize("server", ["seaweedfs_server", "google_server", "azurite_server"])
def test_a_killed_upload_is_gone_on_with(
    server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(request.getfixturevalue(server), monkeypatch)
    kill_and_resume(1, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_uploads_killed_a_hundred_times_send_at_most_a_tenth_again(
    seaweedfs_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(seaweedfs_server, monkeypatch)
    kill_and_resume(100, monkeypatch)
