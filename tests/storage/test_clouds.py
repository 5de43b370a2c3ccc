"""What a bucket promises holds in each cloud: parts, conditions, and answers that are lost."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from holdfast.errors import AlreadyPublished, RootBusy, StorageError, UsageError
from holdfast.storage import open as roots
from holdfast.storage import tokens
from holdfast.storage.azure_account import account
from holdfast.storage.base import ImageSink, heads
from holdfast.storage.bucket import Bucket, Outcome
from holdfast.storage.google import GoogleBucket
from holdfast.storage.objects import ObjectStore
from holdfast.storage.probe import probe
from holdfast.storage.tokens import Token, TokenSource
from holdfast.storage.uploads import UploadSink
from holdfast.storage.wrap import Patience
from support.servers.object_servers import (
    ACCOUNT,
    ACCOUNT_KEY,
    ObjectServer,
    object_store,
    use,
)

PART = 5 << 20
SIZE = 2 * PART + 12_345
SERVERS = {"s3": "seaweedfs_server", "gs": "google_server", "az": "azurite_server"}


@pytest.fixture(params=SERVERS)
def cloud(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The scheme of a cloud, whose server is that of this test."""
    server: ObjectServer = request.getfixturevalue(SERVERS[request.param])
    use(server, monkeypatch)
    return str(request.param)


@pytest.fixture
def store(cloud: str) -> ObjectStore:
    patience = Patience(total_s=0.6, first_s=0.05, longest_s=0.1)
    return object_store(
        f"clouds/{uuid.uuid4().hex}", least_part_bytes=PART, patience=patience, answer_s=20.0
    )


Chosen = Callable[[str, str], str]


@dataclass
class Faults:
    """What happens to which request: it is done and its answer lost, done later, or never done."""

    of: Chosen = lambda kind, key: ""
    late: list[Callable[[], object]] = field(default_factory=list)
    log: list[tuple[str, str]] = field(default_factory=list)

    def land(self) -> None:
        late, self.late = self.late, []
        for request in late:
            request()

    def at(self, number: int, fault: str) -> None:
        """Has the n-th request from now on end so, with all its later tries as they are."""
        left = [number]

        def chosen(kind: str, key: str) -> str:
            left[0] -= 1
            return fault if not left[0] else ""

        self.of = chosen


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """Faults of the way to a real server."""
    found, real = Faults(), Bucket._try

    def tried(self: Bucket, kind: str, *args: Any, **options: Any) -> tuple[Outcome, bool]:
        key = args[1]
        found.log.append((kind, key))
        fault = found.of(kind, key)
        if fault == "late":
            found.late.append(lambda: real(self, kind, *args, **options))
        if fault in ("late", "dropped"):
            return Outcome(0, "", "no answer"), True
        outcome = real(self, kind, *args, **options)
        return (Outcome(0, "", "no answer"), True) if fault == "lost" else outcome

    monkeypatch.setattr(Bucket, "_try", tried)
    yield found
    found.of = lambda kind, key: ""


def content(seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(SIZE)


def fill(sink: Any, data: bytes, seed: int = 1) -> None:
    """Writes an image in pieces, in any order."""
    starts = list(range(0, len(data), 1_234_567))
    random.Random(seed).shuffle(starts)
    with memoryview(data) as view:
        for start in starts:
            sink.write(start, view[start : start + 1_234_567])


# Images of several parts.


@pytest.mark.promise
def test_an_image_of_parts_in_any_order_is_whole_once_and_leaves_no_upload(
    store: ObjectStore,
) -> None:
    data, other = content(), content(1)
    sink, rival = store.create("steps/1/image", SIZE), store.create("steps/1/image", SIZE)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: fill(*one), [(sink, data), (rival, other)]))
    assert store.unfinished() == ("steps/1/image",) and store.list("steps/1") == ["image"]
    assert not store.exists("steps/1/image")
    sink.finish()
    with pytest.raises((AlreadyPublished, StorageError)):
        rival.finish()
    rival.abort()
    assert store.read("steps/1/image") == data
    assert store.bucket.uploads(store._below) == []
    with pytest.raises(AlreadyPublished):
        store.create("steps/1/image", SIZE)
    store.remove_tree("steps/1")
    assert list(store.bucket.keys(f"{store._below}steps")) == []


@pytest.mark.promise
def test_of_an_image_that_another_finished_meanwhile_the_others_is_kept(
    store: ObjectStore,
) -> None:
    sink = store.create("steps/1/image", SIZE)
    assert store.bucket.put(f"{store._below}steps/1/image", [b"another's"]).is_done
    fill(sink, content())
    with pytest.raises(AlreadyPublished):
        sink.finish()
    sink.abort()
    assert store.read("steps/1/image") == b"another's"


def test_an_image_that_is_given_up_leaves_nothing(store: ObjectStore) -> None:
    sink = store.create("steps/1/image", SIZE)
    fill(sink, content())
    sink.abort()
    assert store.list("steps") == [] and store.bucket.uploads(store._below) == []
    left = store.create("steps/1/image", SIZE)
    fill(left, content())
    store.remove_tree("steps/1")  # as `holdfast prune` does
    assert store.list("steps") == [] and store.bucket.uploads(store._below) == []


def test_parts_that_are_there_are_compared_and_not_sent_again(store: ObjectStore) -> None:
    data = content()
    broken = store.create("steps/1-1-abcdef/image", SIZE)
    broken.write(0, memoryview(data)[: 2 * PART])
    store._resumed.add("1-1-abcdef")
    sink = store.create("steps/1-1-abcdef/image", SIZE)
    assert isinstance(sink, UploadSink)
    changed = data[:PART] + bytes(PART) + data[2 * PART :]
    fill(sink, changed)
    assert sink.resumed_bytes == PART  # the second is another
    sink.finish()
    assert store.read("steps/1-1-abcdef/image") == changed
    assert store.bucket.uploads(store._below) == []


@pytest.mark.promise
@pytest.mark.parametrize("fault", ["lost", "late", "dropped"])
def test_of_an_image_whose_last_answers_are_lost_all_or_nothing_is_there(
    store: ObjectStore, faults: Faults, fault: str
) -> None:
    data, number = content(), 1
    while True:
        path = f"steps/{number}/image"
        sink = store.create(path, SIZE)
        fill(sink, data)
        before = len(faults.log)
        faults.at(number, fault)
        try:
            sink.finish()
            is_done = True
        except StorageError:
            is_done = False
        faults.land()
        sent, faults.of = len(faults.log) - before, lambda kind, key: ""
        if not is_done:
            sink.abort()
        assert store.exists(path) == is_done
        if is_done:
            assert store.read(path) == data
        assert store.bucket.uploads(store._below) == []
        if sent < number:
            break
        number += 1
    assert number > 2


def _finish_amid(sink: ImageSink, faults: Faults, fault: str, number: int) -> tuple[bool, bool]:
    """Finishes an image whose changes meet the fault from the ``number``-th request on: returns
    whether it is told finished, and whether there was such a request.
    """
    before = len(faults.log)

    def chosen(kind: str, key: str) -> str:
        is_read = kind.startswith(("GET", "HEAD"))
        return fault if len(faults.log) - before >= number and not is_read else ""

    faults.of = chosen
    try:
        sink.finish()
        is_done = True
    except StorageError:
        is_done = False
    sent, faults.of = len(faults.log) - before, lambda kind, key: ""
    return is_done, sent >= number


@pytest.mark.promise
@pytest.mark.parametrize("fault", ["lost", "dropped"])
def test_an_image_that_takes_anothers_place_is_not_told_finished_unless_it_has(
    store: ObjectStore, faults: Faults, fault: str
) -> None:
    old, new, number, is_met = content(), content(1), 0, True
    while is_met:
        number += 1
        path = f"steps/{number}/image"
        first = store.create(path, SIZE)
        fill(first, old)
        first.finish()
        sink = store.create(path, SIZE, aside=f"aside/{number}")
        fill(sink, new)
        is_done, is_met = _finish_amid(sink, faults, fault, number)
        there = store.read(path)
        assert there == new if is_done else there in (old, new)
        assert store.read(f"aside/{number}") == old


@pytest.mark.promise
@pytest.mark.parametrize("fault", ["lost", "dropped"])
def test_an_image_is_not_told_finished_because_anothers_came_to_its_place(
    store: ObjectStore, faults: Faults, fault: str
) -> None:
    other, own, number, is_met = content(), content(1), 0, True
    while is_met:
        number += 1
        path = f"steps/{number}/image"
        sink = store.create(path, SIZE)
        fill(sink, own)
        first = store.create(path, SIZE)
        fill(first, other)
        first.finish()
        is_done, is_met = _finish_amid(sink, faults, fault, number)
        there = store.read(path)
        assert there == own if is_done else there in (other, own)


# Conditions.


@pytest.mark.promise
def test_a_publication_whose_answer_is_lost_is_read_back(
    store: ObjectStore, faults: Faults
) -> None:
    store.publish("first", b"")  # the server is probed
    for name, fault in (("a", "lost"), ("b", "late")):
        faults.of = _once(f"{store._below}{name}", fault)
        store.publish(name, b"mine")
        faults.land()
        assert store.read(name) == b"mine"
    object_store(store._below[:-1]).publish("c", b"another's")
    faults.of = _once(f"{store._below}c", "dropped")
    with pytest.raises(AlreadyPublished):
        store.publish("c", b"mine")
    assert store.read("c") == b"another's"
    faults.of = lambda kind, key: "dropped" if (kind, key) == ("PUT", f"{store._below}d") else ""
    with pytest.raises(StorageError, match="is not known"):
        store.publish("d", b"mine")


def _once(key: str, fault: str) -> Chosen:
    left = [1]

    def chosen(kind: str, asked: str) -> str:
        if kind == "PUT" and asked == key and left[0]:
            left[0] -= 1
            return fault
        return ""

    return chosen


def test_the_server_keeps_all_that_a_root_needs(store: ObjectStore) -> None:
    kept = probe(store.bucket, store.probe_prefix)
    assert not kept.lacks and kept.replace
    print(kept.server, kept.table)
    assert store.bucket.uploads(store._below) == []
    assert list(store.bucket.keys(store._below)) == []


@pytest.mark.promise
def test_of_eight_that_create_or_replace_at_once_one_wins(store: ObjectStore, cloud: str) -> None:
    patience = Patience(total_s=20.0)  # a contended create may be told to come again
    racer = object_store("x", patience=patience).bucket
    gate = threading.Barrier(8)

    def create(number: int) -> Outcome:
        gate.wait()
        return racer.put(key, [b"%d" % number], if_none=True)

    def replace(number: int) -> Outcome:
        gate.wait()
        return racer.put(key, [b"r%d" % number], if_match=tag)

    with ThreadPoolExecutor(8) as pool:
        for turn in range(2):
            key = f"{store._below}race-{turn}"
            won = [one for one in pool.map(create, range(8)) if one.is_done]
            assert len(won) == 1
            tag = racer.head(key).header("etag")
            won = [one for one in pool.map(replace, range(8)) if one.is_done]
            assert len(won) == 1
            assert racer.get(key).body.startswith(b"r")


def test_a_lock_is_held_by_one_and_taken_over_by_its_tag(store: ObjectStore, cloud: str) -> None:
    rival = object_store(store._below[:-1])
    with store.lock("writer", "me"), pytest.raises(RootBusy, match="me"):
        rival.lock("writer", "another")
    with rival.lock("writer", "another"):
        pass


# Names, errors, credentials.


def test_a_list_has_a_tag_for_each_object_that_another_content_changes(store: ObjectStore) -> None:
    for name in ("1-1.json", "1-2.json", "12-1.json"):
        store.publish(f"manifests/{name}", b"one")
    before = store.tags("manifests")
    assert [*before] == store.list("manifests") and all(before.values())
    store.publish("manifests/1-2.json", b"two", replace=True)
    after = store.tags("manifests")
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"1-2.json"} and before.keys() == after.keys()
    assert list(store.tag_pages("manifests")) == [after]
    assert heads(store, "manifests", "-") == ["1", "12"]
    assert store.recall("index", 100) == b""
    store.note("index", b"advice")
    assert store.recall("index", 100) == b"advice" and store.list("") == ["manifests"]
    assert store.recall("index", 5) == b""


def test_names_with_special_letters_are_listed_as_they_are(store: ObjectStore) -> None:
    names = sorted(["a+b", "c d", "e%20f", "g&h", "i=j;k", "ü", "l'm", "n~o", "<p>"])
    for name in names:
        store.publish(f"odd/{name}", name.encode())
    assert store.list("odd") == names
    assert [store.read(f"odd/{name}").decode() for name in names] == names
    store.remove_tree("odd")
    assert store.list("odd") == []


@pytest.mark.parametrize(
    ("cloud", "server"), [("s3", "moto_server"), ("gs", "google_server"), ("az", "azurite_server")]
)
def test_a_bucket_that_is_not_there_is_named(
    cloud: str, server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(request.getfixturevalue(server), monkeypatch)  # SeaweedFS makes a bucket that is missing
    patience = Patience(total_s=0.3)
    missing = ObjectStore("holdfast-missing", "p", scheme=cloud, patience=patience)
    with pytest.raises(StorageError, match=r"NoSuchBucket|ContainerNotFound") as raised:
        missing.publish("name", b"")
    assert "Make the" in str(raised.value) and f"{cloud}://holdfast-missing/p" in str(raised.value)


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_a_root_is_one_url_and_has_no_credentials_in_it(scheme: str) -> None:
    assert roots.normal_root(f"{scheme}://bucket/p/") == f"{scheme}://bucket/p"
    assert roots.is_bucket(f"{scheme}://bucket/p")
    for wrong in (f"{scheme}://key:canary@bucket/p", f"{scheme}://bucket/p?sig=canary"):
        with pytest.raises(UsageError) as raised:
            roots.normal_root(wrong)
        assert "canary" not in str(raised.value)


def test_an_upload_of_anothers_is_ended_and_the_object_of_its_name_stays(
    google_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(google_server, monkeypatch)
    store = object_store(f"clouds/{uuid.uuid4().hex}")
    bucket, key = store.bucket, f"{store._below}name"
    assert isinstance(bucket, GoogleBucket)
    store.publish("name", b"data")
    foreign = bucket._begin(key, {})
    (found,) = bucket.uploads(key)
    assert (found.key, found.id) == (key, foreign)
    assert bucket.abort_upload(found.key, found.id).is_done
    assert bucket.uploads(key) == [] and store.read("name") == b"data"


@pytest.mark.promise
def test_a_token_that_ends_in_the_middle_of_an_upload_is_renewed(
    google_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(google_server, monkeypatch)
    store = object_store(f"clouds/{uuid.uuid4().hex}", least_part_bytes=PART)
    data = content()
    sink = store.create("image", SIZE)
    sink.write(0, memoryview(data)[:PART])
    bucket = store.bucket
    assert isinstance(bucket, GoogleBucket) and bucket._tokens is not None
    bucket._tokens._token = Token("ended", 3600.0)
    bucket._tokens._ends_s = float("inf")
    sink.write(PART, memoryview(data)[PART:])
    sink.finish()
    assert store.read("image") == data


def test_a_token_is_renewed_before_it_ends_and_kept_while_none_is_to_be_had() -> None:
    now_s, given = [0.0], [0]

    def fetch() -> Token:
        given[0] += 1
        if given[0] == 3:
            raise StorageError("away")
        return Token(str(given[0]), 3600.0)

    source = TokenSource(fetch, clock=lambda: now_s[0])
    assert [source.current().text for _ in range(3)] == ["1"] * 3
    now_s[0] = 3600.0 - tokens.RENEW_S + 1
    assert source.current().text == "2"
    now_s[0] += 3600.0 - 1  # it can't be renewed, and is valid for a second
    assert source.current().text == "2"
    source.forget()
    assert source.current().text == "4"


def test_an_account_without_its_secret_in_what_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY};EndpointSuffix=core.windows.net"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    found = account()
    assert found.server.name == f"{ACCOUNT}.blob.core.windows.net" and found.is_timed
    assert ACCOUNT_KEY not in repr(found) and found.hidden_in(f"x{ACCOUNT_KEY}x") == "x***x"
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "?sv=2023&sig=canary%2Fsecret%3D")
    found = account()
    target, headers = found.signed("GET", "/c/k", {"comp": "list"}, {})
    assert target == "/c/k?comp=list&sv=2023&sig=canary%2Fsecret%3D"
    assert "authorization" not in headers and "canary" not in repr(found)
    assert "canary" not in found.hidden_in(f"{target} canary/secret=")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT")
    with pytest.raises(UsageError, match="AZURE_STORAGE_ACCOUNT"):
        account()
