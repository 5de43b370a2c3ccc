"""A network that delays, cuts, flips or refuses: what is stored and read is right, or an error.

A proxy stands between the store and a real server.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.catalogue import MANIFESTS, catalogue
from holdfast.storage import probe
from holdfast.storage.objects import ObjectStore
from holdfast.storage.wrap import Patience
from holdfast.testing.faults import wait_until
from holdfast.testing.faults.faulty_proxy import FaultyProxy, RequestFault, RequestRule
from support.servers.object_servers import BUCKET, TIMES, ObjectServer, object_store, use

PART = 5 << 20
IMAGE = random.Random(5).randbytes(PART + 300_000)
DOCUMENT = b'{"a document": "that is published"}'
KEY = "steps/1-2-attempt/live-00000"

#: Faults that end after two requests: what they met is tried again.
PASSING = [
    RequestRule(RequestFault.ANSWER, 503),
    RequestRule(RequestFault.ANSWER, 500),
    RequestRule(RequestFault.ANSWER, 429),
    RequestRule(RequestFault.CUT_REQUEST, 0),
    RequestRule(RequestFault.CUT_REQUEST, 20),
    RequestRule(RequestFault.CUT_ANSWER, 0),
    RequestRule(RequestFault.CUT_ANSWER, 30),
    RequestRule(RequestFault.CUT_ANSWER, 100_000),
    RequestRule(RequestFault.DELAY_ANSWER, 0.2),
    RequestRule(RequestFault.THROTTLE, 20e6),
    RequestRule(RequestFault.FLIP_REQUEST, 1_000_000),
]
METHODS = ["PUT", "POST", "GET"]


@pytest.fixture
def proxy(seaweedfs_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    use(seaweedfs_server, monkeypatch)
    monkeypatch.setattr(probe, "_known", {})  # each server is tried out through the faults, too
    with FaultyProxy("127.0.0.1", seaweedfs_server.port) as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{made.port}")
        yield made


def store_at(prefix: str, total_s: float = 20.0, answer_s: float = 60.0) -> ObjectStore:
    patience = Patience(total_s, 0.05, 0.3)
    return ObjectStore(
        BUCKET, prefix, least_part_bytes=PART, lease=TIMES, patience=patience, answer_s=answer_s
    )


def named(rule: RequestRule) -> str:
    return f"{rule.fault.value}-{rule.value:g}"


def write(store: ObjectStore) -> None:
    sink = store.create(KEY, len(IMAGE))
    with memoryview(IMAGE) as view:
        for start in range(0, len(IMAGE), PART):
            sink.write(start, view[start : start + PART])
    sink.finish()
    store.publish("manifests/1-2.json", DOCUMENT)


def check(store: ObjectStore) -> None:
    into = bytearray(len(IMAGE))
    store.read_into(KEY, 0, memoryview(into))
    assert into == IMAGE
    assert store.read("manifests/1-2.json") == DOCUMENT
    assert store.list(MANIFESTS) == ["1-2.json"]


@pytest.mark.promise
@pytest.mark.parametrize("rule", PASSING, ids=named)
def test_what_is_met_twice_is_stored_and_read_whole(proxy: FaultyProxy, rule: RequestRule) -> None:
    met = 0
    for method in METHODS:
        prefix = f"network/{uuid.uuid4().hex}"
        store = store_at(prefix)
        number = proxy.add(RequestRule(rule.fault, rule.value, method, prefix, 1, 2))
        write(store)
        check(store)
        proxy.remove(number)
        met += proxy.met(number)
        check(store_at(prefix))
        # An upload whose beginning was never told is left to `prune`.
        is_untold = method == "POST" and rule.fault is RequestFault.CUT_ANSWER
        assert is_untold or not store.bucket.uploads(prefix)
    assert met >= 4


def test_a_part_that_a_slow_line_takes_longer_for_than_an_answer_may_is_sent_once(
    proxy: FaultyProxy,
) -> None:
    prefix = f"network/{uuid.uuid4().hex}"
    number = proxy.add(RequestRule(RequestFault.THROTTLE, 2.5e6, "PUT", "live-00000?partNumber=1"))
    store = store_at(prefix, answer_s=1.0)
    write(store)
    assert proxy.met(number) == 1
    check(store)


LASTING = [
    RequestRule(RequestFault.ANSWER, 503),
    RequestRule(RequestFault.CUT_REQUEST, 0),
    RequestRule(RequestFault.CUT_ANSWER, 0),
    RequestRule(RequestFault.FLIP_REQUEST, 10),
]


@pytest.mark.parametrize("rule", LASTING, ids=named)
def test_what_does_not_end_is_one_error_and_the_next_try_succeeds(
    proxy: FaultyProxy, rule: RequestRule
) -> None:
    prefix = f"network/{uuid.uuid4().hex}"
    number = proxy.add(RequestRule(rule.fault, rule.value, "PUT", "live-00000"))
    with pytest.raises(holdfast.StorageError, match=prefix):
        write(store_at(prefix, 1.0))
    assert proxy.met(number) >= 1
    proxy.remove(number)
    direct = object_store(prefix)
    assert not direct.exists(KEY) and not direct.exists("manifests/1-2.json")
    for upload in direct.bucket.uploads(prefix):
        direct.bucket.abort_upload(upload.key, upload.id)
    store = store_at(prefix)
    write(store)
    check(store)


@pytest.mark.promise
def test_a_bit_that_flips_on_the_way_is_found(proxy: FaultyProxy) -> None:
    """By the server while it writes; by the reader while it reads."""
    root = f"s3://{BUCKET}/network/{uuid.uuid4().hex}"
    torch.manual_seed(3)
    saved = {"model": torch.nn.Linear(300, 200)}
    holdfast.save(root, saved, step=4)
    wrong = 0
    for at in (0, 20, 5_000, 200_000):
        number = proxy.add(
            RequestRule(RequestFault.FLIP_ANSWER, at, "GET", root.rpartition("/")[2])
        )
        loaded = {"model": torch.nn.Linear(300, 200)}
        try:
            holdfast.load(root, loaded)
        except holdfast.HoldfastError:
            wrong += 1
        else:
            for name, value in saved["model"].state_dict().items():
                assert torch.equal(loaded["model"].state_dict()[name], value)
        assert proxy.met(number)
        proxy.remove(number)
    assert wrong >= 2
    holdfast.load(root, loaded)
    assert torch.equal(loaded["model"].weight, saved["model"].weight)


@pytest.mark.promise
def test_half_a_listing_is_no_listing(proxy: FaultyProxy) -> None:
    prefix = f"network/{uuid.uuid4().hex}"
    store = store_at(prefix, 1.0)
    for number in range(5):
        store.publish(f"manifests/1-{number}.json", DOCUMENT)
    number = proxy.add(RequestRule(RequestFault.HALVE_ANSWER, 0, "GET", "list-type=2"))
    with pytest.raises(holdfast.StorageError):
        store.list(MANIFESTS)
    with pytest.raises(holdfast.StorageError):
        catalogue(store)
    assert proxy.met(number) >= 2
    proxy.remove(number)
    assert len(store.list(MANIFESTS)) == 5


def test_a_half_listing_once_is_asked_for_again(proxy: FaultyProxy) -> None:
    prefix = f"network/{uuid.uuid4().hex}"
    store = store_at(prefix)
    store.publish("manifests/1-1.json", DOCUMENT)
    proxy.add(RequestRule(RequestFault.CUT_ANSWER, 150, "GET", "list-type=2", 1, 1))
    assert store.list(MANIFESTS) == ["1-1.json"]


TRAIN = """
import os, sys, time, torch, holdfast
root, end = sys.argv[1], sys.argv[2]
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.Adam(model.parameters())
state = {"model": model, "optimizer": optimizer}
with holdfast.Checkpointer(root, state, storage=holdfast.Every(steps=5)) as ckpt:
    ckpt.restore()
    step = 0
    while not os.path.exists(end):
        optimizer.zero_grad()
        (model(torch.full((1, 64), step / 7)) ** 2).sum().backward()
        optimizer.step()
        ckpt.step(step)
        print(step, flush=True)
        step += 1
        time.sleep(0.02)
"""

BROKEN = {
    "busy": [RequestRule(RequestFault.ANSWER, 503)],
    "flapping": [RequestRule(RequestFault.ANSWER, 500, "PUT", first=k, last=k) for k in (1, 4, 7)],
    "forbidden": [RequestRule(RequestFault.ANSWER, 403)],
    "cut": [RequestRule(RequestFault.CUT_REQUEST, 100, "PUT")],
    "silent": [RequestRule(RequestFault.CUT_ANSWER, 0)],
}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_goes_on_while_the_network_is_broken_and_saves_when_it_is_back(
    proxy: FaultyProxy, arena_dir: Path, tmp_path: Path
) -> None:
    name = f"network/{uuid.uuid4().hex}"
    root, end, log = f"s3://{BUCKET}/{name}", tmp_path / "end", tmp_path / "log"
    with log.open("wb") as file:
        environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        command = [sys.executable, "-c", TRAIN, root, str(end)]
        running = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    direct = object_store(name)

    def reached() -> int:
        lines = log.read_text().split()
        return int(lines[-1]) if lines and lines[-1].isdecimal() else -1

    def published() -> int:
        return max((int(one[:-5].split("-")[1]) for one in direct.list(MANIFESTS)), default=-1)

    def wait_past(found: Callable[[], int], least: int, what: str) -> None:
        wait_until(lambda: found() > least, timeout_s=120, what=what)

    try:
        wait_past(published, -1, "a checkpoint")
        for what, rules in BROKEN.items():
            numbers = [proxy.add(rule) for rule in rules]
            wait_past(partial(proxy.met, numbers[0]), 0, what)
            wait_past(reached, reached() + 200, f"steps, {what}")
            for number in numbers:
                proxy.remove(number)
            wait_past(published, reached(), f"a save after {what}")
    finally:
        end.touch()
        running.wait(120)
    assert running.returncode == 0, log.read_text()[-3000:]
    last = reached()
    with holdfast.open(root) as found:
        assert found.step == last
    found_all = catalogue(direct)
    assert not found_all.broken
