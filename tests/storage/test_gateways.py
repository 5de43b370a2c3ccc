"""Gateways that speak S3: what each keeps of what a root needs, and that the others are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import HoldfastError, StorageError
from holdfast.storage.objects import ObjectStore
from holdfast.storage.probe import Kept, probe
from holdfast.storage.racers import race
from holdfast.storage.wrap import Patience
from support.servers.gateways import GATEWAYS
from support.servers.object_servers import BUCKET, running, use

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROUNDS = 40
#: What each keeps: create, replace, list after put, ranges.
EXPECTED = {
    "rclone": (False, False, True, False),
    "juicefs": (False, False, True, True),
    "swift": (True, False, True, True),
}


@pytest.mark.parametrize("name", GATEWAYS)
def test_a_gateway_keeps_what_the_documents_say_or_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(GATEWAYS[name](tmp_path), tmp_path) as server:
        use(server, monkeypatch)
        store = ObjectStore(BUCKET, "runs/a", patience=Patience(total_s=5.0))
        kept = probe(store.bucket, store.probe_prefix)
        print(server.name, kept)
        won = race(store.bucket, "races/", ROUNDS).created
        print(f"{sum(one == 1 for one in won)} of {ROUNDS} rounds with one winner: {sorted(won)}")
        assert found(kept) == EXPECTED[name]
        if kept.lacks:
            with pytest.raises(StorageError, match="cannot be a root") as refused:
                store.publish("holdfast.json", b"{}")
            assert not refused.value.retryable and not [*store.bucket.keys("runs/a/")]
        elif not kept.replace:
            with pytest.raises(HoldfastError, match="HOLDFAST_BUCKET_ONE_WRITER"):
                store.lock("writer", "me")


def found(kept: Kept) -> tuple[bool, ...]:
    return kept.create, kept.replace, kept.list_after_put, kept.ranges
