"""Eight processes race for one name: a server that lets several win is found, and told by name."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import uuid

import pytest

from holdfast.cli.doctor import root as doctor_root
from holdfast.cli.doctor.root import probe_storage
from holdfast.storage import racers
from holdfast.storage.racers import RaceReport, race
from support.servers.bucket_model import World, model_store
from support.servers.object_servers import BUCKET, ObjectServer, object_store, use


def won(rounds: int) -> RaceReport:
    store = object_store(f"races/{uuid.uuid4().hex}")
    report = race(store.bucket, store.probe_prefix, rounds)
    assert list(store.bucket.keys(store.probe_prefix)) == [], "nothing is left"
    return report


def test_a_deep_look_of_doctor_races_and_judges(
    moto_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(moto_server, monkeypatch)
    assert won(2) == RaceReport((1, 1), (1, 1))
    root = f"s3://{BUCKET}/doctor/{uuid.uuid4().hex}"
    lost = RaceReport((1, 3), (1, 1))
    monkeypatch.setattr(doctor_root, "race_in_bucket", lambda _: lost)
    found = probe_storage(root, deep=True)
    assert "told more than one" in found.fault and "create at once" in found.fault
    assert "replace at once" not in found.fault
    monkeypatch.setattr(doctor_root, "race_in_bucket", lambda _: RaceReport((1, 0), (1, 1)))
    found = probe_storage(root, deep=True)
    assert not found.fault and len(found.kept) == len(probe_storage(root).kept) + 2


@pytest.mark.parametrize("fault", ["lost", "busy"])
def test_a_racer_whose_answer_was_lost_is_told_by_what_is_there(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    world = World()
    store = model_store(world, monkeypatch)
    monkeypatch.setattr(racers, "open_bucket", lambda *_, **__: store.bucket)
    faults = itertools.cycle([fault, ""])  # of each write the first try, not the second
    world.fault = lambda kind, key: next(faults) if kind == "PUT" else ""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    racers._race((store.bucket.name, store.url, "root/"), 0, 3, threading.Barrier(1), theirs)
    assert ours.recv() == ([True] * 3, [True] * 3)
    world.fault, world.before = lambda kind, key: "", lambda: world.keep("root/0", b"another's")
    racers._race((store.bucket.name, store.url, "root/"), 0, 1, threading.Barrier(1), theirs)
    assert ours.recv() == ([False], [True]), "another has created it"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "server", ["seaweedfs_server", "moto_server", "azurite_server", "google_server"]
)
def test_one_of_eight_wins_in_two_hundred_rounds(
    server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(request.getfixturevalue(server), monkeypatch)
    report = won(200)
    assert set(report.created) == set(report.replaced) == {1}
