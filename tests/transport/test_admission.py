"""Who is let in: signed, meant for us, of this incarnation, and never the same twice."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields, replace

from holdfast.errors import UsageError
from holdfast.transport.wire import admission as refusals
from holdfast.transport.wire.admission import REACH, Admission, AdmissionRefused, Window
from holdfast.transport.wire.signing import HttpAnswer, HttpRequest, Signer, digest, is_same

SIGNER = Signer(b"0123456789abcdef")


def mint() -> Callable[[], str]:
    numbers = itertools.count(1)
    return lambda: f"{next(numbers):032x}"


def admission(most_clients: int = 3) -> Admission:
    return Admission(SIGNER, name="host-1", incarnation=4, mint=mint(), most_clients=most_clients)


def request(door: Admission, counter: int = 1, client: int = 1) -> HttpRequest:
    return HttpRequest(
        method="GET",
        peer="host-1",
        path="/a",
        generation="3-1200",
        incarnation=4,
        nonce=f"{client:032x}",
        counter=counter,
        challenge=door.challenge,
        span="bytes=0-9",
        tag="0" * 16,
    )


def judge(door: Admission, asked: HttpRequest) -> AdmissionRefused | None:
    return door.judge(asked, SIGNER.of_request(asked))


def changed(value: Any) -> Any:
    return value + 1 if isinstance(value, int) else f"{value}x"


@pytest.mark.parametrize("name", [one.name for one in fields(HttpRequest)])
def test_a_request_in_which_anything_was_changed_is_forged(name: str) -> None:
    door = admission()
    asked = request(door)
    other = replace(asked, **{name: changed(getattr(asked, name))})
    assert door.judge(other, SIGNER.of_request(asked)) is refusals.FORGED
    assert judge(door, asked) is None


@pytest.mark.parametrize("name", [one.name for one in fields(HttpAnswer)])
def test_an_answer_in_which_anything_was_changed_has_another_signature(name: str) -> None:
    answer = HttpAnswer(206, 4, 10, "0-9/100", "0" * 16, "0" * 64, "0" * 32)
    other = replace(answer, **{name: changed(getattr(answer, name))})
    assert SIGNER.of_answer(answer, "a") != SIGNER.of_answer(other, "a")
    assert SIGNER.of_answer(answer, "a") != SIGNER.of_answer(answer, "b")
    assert is_same(SIGNER.of_answer(answer, "a"), SIGNER.of_answer(answer, "a"))


def test_another_secret_makes_another_signature() -> None:
    door = admission()
    asked = request(door)
    signature = Signer(b"0123456789abcdeF").of_request(asked)
    assert door.judge(asked, signature) is refusals.FORGED


def test_a_signed_request_is_no_signed_answer() -> None:
    assert request(admission()).text().split(b"\n")[0] != HttpAnswer(200).text("").split(b"\n")[0]


def test_a_secret_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(UsageError, match="has 15 bytes"):
        Signer(b"0123456789abcde")
    assert "0123" not in repr(Signer(b"0123456789abcdef"))


def test_a_document_is_known_by_its_digest() -> None:
    assert digest(b"a") == digest(bytearray(b"a")) != digest(b"b")


def test_a_request_that_was_served_once_is_served_never_again() -> None:
    door = admission()
    assert judge(door, request(door)) is None
    assert judge(door, request(door)) is refusals.REPLAYED
    assert judge(door, request(door, counter=2)) is None


def test_two_clients_may_count_alike() -> None:
    door = admission()
    assert judge(door, request(door, counter=7, client=1)) is None
    assert judge(door, request(door, counter=7, client=2)) is None
    assert judge(door, request(door, counter=7, client=1)) is refusals.REPLAYED


def test_a_request_to_another_host_is_not_for_us() -> None:
    door = admission()
    assert judge(door, replace(request(door), peer="host-2")) is refusals.MISDIRECTED


@pytest.mark.promise
def test_an_older_incarnation_is_fenced_and_a_newer_one_is_told_that_we_are_behind() -> None:
    door = admission()
    assert judge(door, replace(request(door), incarnation=3)) is refusals.FENCED
    assert judge(door, replace(request(door), incarnation=5)) is refusals.BEHIND
    door.begin(5)
    assert judge(door, request(door)) is refusals.FENCED
    assert judge(door, replace(request(door), incarnation=5)) is None


def test_an_incarnation_never_comes_back() -> None:
    door = admission()
    door.begin(5)
    door.begin(4)
    assert judge(door, request(door)) is refusals.FENCED


def test_what_is_signed_over_no_challenge_or_another_servers_is_refused() -> None:
    door = admission()
    assert judge(door, replace(request(door), challenge="")) is refusals.CHALLENGED
    other = Admission(SIGNER, name="host-1", incarnation=4, mint=lambda: "f" * 32)
    assert judge(other, request(door)) is refusals.CHALLENGED, "recorded before a restart"


def test_as_many_clients_are_remembered_as_there_is_room_for_and_none_gets_in_twice() -> None:
    door = admission(most_clients=3)
    served = [request(door, client=client) for client in (1, 2, 3)]
    assert [judge(door, one) for one in served] == [None] * 3
    assert judge(door, request(door, client=4)) is refusals.CHALLENGED
    assert door.clients == 0
    assert [judge(door, one) for one in served] == [refusals.CHALLENGED] * 3
    assert judge(door, request(door, client=4)) is None
    assert judge(door, request(door, client=1)) is None, "signed over the new challenge"


_counters = st.lists(
    st.integers(0, 40) | st.integers(REACH - 3, REACH + 40) | st.integers(0, 10**18), max_size=60
)


@given(_counters)
def test_a_counter_counts_once_in_any_order_within_reach(counters: list[int]) -> None:
    window, used, highest = Window(), set[int](), -1
    for counter in counters:
        is_new = counter not in used and counter > highest - REACH
        assert window.admit(counter) == is_new
        used.add(counter)
        highest = max(highest, counter)
