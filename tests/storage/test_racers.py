"""Eight processes race for one name: a server that lets several win is found, and told by name."""

from __future__ import annotations

import uuid

import pytest

from holdfast.cli.doctor import root as doctor_root
from holdfast.cli.doctor.root import probe_storage
from holdfast.storage.racers import RaceReport, race
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
