"""A request that nobody answered may land as late as a server takes it: nothing relies on less."""

from __future__ import annotations

import builtins
import subprocess
import sys
from typing import Any

import pytest

from holdfast.storage import lease_lock
from holdfast.storage.bucket import SETTLE_S
from holdfast.storage.google import GoogleBucket
from holdfast.storage.tokens import Token, TokenSource

#: A server takes a signature that is so much older or newer than its own clock says.
TAKEN_S = 15 * 60


@pytest.mark.promise
def test_a_clock_that_is_fast_signs_requests_that_land_for_twice_as_long() -> None:
    fast_s = TAKEN_S - 1  # ahead of the server's, which takes that
    assert fast_s + TAKEN_S < SETTLE_S


@pytest.mark.promise
def test_a_request_may_land_for_as_long_as_the_token_in_it_is_valid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://localhost:1")
    bucket = GoogleBucket("bucket", "gs://bucket")
    assert bucket.settle_s > 3600
    valid_s = iter((86_400.0, 3600.0))
    bucket._tokens = TokenSource(lambda: Token("token", next(valid_s)))
    for _ in range(2):  # also of the token before this one
        bucket._signed("PUT", "key", {}, {}, [])
        assert bucket.settle_s > 86_400
        bucket._tokens.forget()


@pytest.mark.promise
def test_a_process_that_is_hidden_from_us_is_not_taken_for_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mine = lease_lock.process_name().split("/", 4)
    old = "/".join([*mine[:2], str(child.pid), "1"])
    names = [old, f"{old}/{mine[4]}"]
    plain: Any = builtins.open

    def hidden(file: Any, *more: Any, **named: Any) -> Any:  # as with hidepid=2
        if file == f"/proc/{child.pid}/stat":
            raise FileNotFoundError(file)
        return plain(file, *more, **named)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", hidden)
        assert not any(map(lease_lock.is_dead, names))
    child.communicate(b"\n")
    assert all(map(lease_lock.is_dead, names))  # as an earlier version named it, too
    assert not lease_lock.is_dead("/".join([*mine[:2], str(child.pid), "1", "another-host"]))
    assert not lease_lock.is_dead(f"{mine[0]}/{mine[1]}/{10**30}/1/{mine[4]}")
