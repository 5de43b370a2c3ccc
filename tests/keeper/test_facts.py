"""Whatever one keeper says to another, that one understands."""

from __future__ import annotations

from typing import get_args

import msgspec

from holdfast.keeper.hosts import messages
from holdfast.keeper.hosts.facts import Fact


def test_every_fact_can_be_heard_by_the_coordinator_or_by_a_hand() -> None:
    heard = {*get_args(messages.ToCoordinator), *get_args(messages.ToFollower)}
    assert set(Fact.__subclasses__()) - heard == set()


def test_a_fact_without_fields_arrives_as_what_it_is() -> None:
    for kind in get_args(messages.ToFollower):
        if not msgspec.structs.fields(kind):
            assert messages.from_coordinator(messages.pack(kind())) == kind()
