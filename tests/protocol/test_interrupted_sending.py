"""Wherever a signal's handler raises while something is said, others can go on saying things."""

from __future__ import annotations

import socket
import sys
import threading
from types import FrameType

import pytest

from holdfast.errors import KeeperError
from holdfast.protocol import messages as m
from holdfast.protocol.client import KeeperClient


class Interrupt(BaseException):
    """As a signal's handler raises it."""


def interrupted(client: KeeperClient, message: m.Message, at: int) -> bool:
    """Say it, and raise behind the ``at``-th call out of ``send``; whether there were so many."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        if event == "c_return" and frame.f_code is KeeperClient.send.__code__:
            count += 1
            if count == at:
                raise Interrupt

    sys.setprofile(profile)
    try:
        client.send(message)
    except Interrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize("size", [1, 20_000])
def test_whoever_speaks_next_need_not_wait_for_one_who_was_interrupted(size: int) -> None:
    at = 1
    while True:
        here, there = socket.socketpair()
        client = KeeperClient(here, lambda _: None, lambda _: None)
        was_interrupted = interrupted(client, m.Announce(step=1, which="x" * size), at)
        failures: list[KeeperError] = []

        def speak(client: KeeperClient = client, failures: list[KeeperError] = failures) -> None:
            try:
                client.send(m.Explain(step=1))
            except KeeperError as error:
                failures.append(error)

        speaker = threading.Thread(target=speak, daemon=True)
        speaker.start()
        speaker.join(2.0)
        assert not speaker.is_alive(), f"interrupted behind call {at}"
        # What may be half said is followed by nothing.
        assert bool(failures) == (was_interrupted and size > 4096 and not client.is_open)
        client.close()
        there.close()
        if not was_interrupted:
            break
        at += 1
    assert at > 3
