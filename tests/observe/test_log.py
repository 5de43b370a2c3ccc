"""What people see on stderr: all they asked for, and unasked what nobody may miss."""

from __future__ import annotations

import io

import pytest

from holdfast import events
from holdfast.errors import UsageError
from holdfast.observe.log import LogSink, NoticeSink, log_sink_from_environment


def fence(step: int) -> events.Event:
    return events.FenceWaited(step=step, rank=0, held_s=0.25)


def noticed(happened: list[tuple[events.Event, float]], rank: int = 0) -> list[str]:
    """The lines shown of these events, at their times."""
    stream = io.StringIO()
    sink = NoticeSink(rank, stream=stream)
    for event, time_s in happened:
        sink(event, time_s)
    return stream.getvalue().splitlines()


def missed(step: int, reason: str = "shared memory too small") -> events.Event:
    return events.SnapshotMissed(incarnation=2, step=step, rank=0, reason=reason)


def test_info_says_what_a_person_needs_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    sink = LogSink("info")
    sink(
        events.CheckpointPublished(
            incarnation=2, step=39, rank=0, elapsed_s=0.8, size_bytes=1_600_000_000, images=2
        ),
        0.0,
    )
    sink(fence(39), 0.0)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err[8:] == " holdfast rank 0 2-39: durable, 1.60 GB after 800 ms (2.00 GB/s)\n"


def test_debug_shows_every_event() -> None:
    stream = io.StringIO()
    LogSink("debug", stream=stream)(fence(39), 0.0)
    assert stream.getvalue()[8:] == " holdfast rank 0 0-39: FenceWaited held_s=0.25\n"


def unlike(*, is_known: bool, others: int = 0, box: str = "") -> events.Event:
    return events.ReplicasDiffer(
        incarnation=2,
        step=7,
        rank=0,
        leaf="model.w",
        box=box,
        ranks=(1,) if is_known else (0, 1),
        replicas=4 if is_known else 2,
        is_known_which=is_known,
        others=others,
    )


#: One of each, so that a phrase that asks for a field an event has not got is found here.
EXAMPLES: tuple[events.Event, ...] = (
    events.RunStarted(run_id="r", world=2, host="h", pid=1),
    events.SnapshotMissed(reason="no grant"),
    events.CheckpointPublished(elapsed_s=0.0, size_bytes=1, images=1),
    events.PersistBroke(reason="disk full"),
    events.Restored(
        source="arena", elapsed_s=1, size_bytes=1, saved_world=2, world=1, parent_incarnation=1
    ),
    events.SourceDropped(source="arena", reason="checksum"),
    events.KeeperStarted(pid=1, found_generations=0, elapsed_s=0.1),
    events.KeeperLost(reason="killed"),
    events.KeeperStopped(reason="closed"),
    events.RequestsRefused(host="a", door="peers", counts={"forged": 2}),
    events.LoopHeld(host="a", times=2, longest_s=0.25),
    events.ValuesDiffer(names=("tokens",)),
    unlike(is_known=True),
    events.SinkFailed(sink="s", reason="r"),
    events.Warned(message="look"),
)


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: type(event).__name__)
def test_info_has_words_for_whatever_a_person_should_know(event: events.Event) -> None:
    stream = io.StringIO()
    LogSink("info", stream=stream)(event, 0.0)
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize(
    ("setting", "kind"),
    [(None, NoticeSink), ("", NoticeSink), ("INFO", LogSink), ("debug", LogSink), ("off", None)],
)
def test_the_environment_says_what_is_shown(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, kind: type | None
) -> None:
    monkeypatch.delenv("HOLDFAST_LOG", raising=False)
    if setting is not None:
        monkeypatch.setenv("HOLDFAST_LOG", setting)
    sink = log_sink_from_environment(0)
    assert sink is None if kind is None else isinstance(sink, kind)


def test_a_level_that_is_unknown_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_LOG", "loud")
    with pytest.raises(UsageError, match="HOLDFAST_LOG is 'loud': say info, debug or off"):
        log_sink_from_environment(0)


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: type(event).__name__)
def test_unasked_only_trouble_is_shown(event: events.Event) -> None:
    trouble = (
        events.SnapshotMissed,
        events.PersistBroke,
        events.KeeperLost,
        events.SourceDropped,
        events.Warned,
        events.ReplicasDiffer,
    )
    assert len(noticed([(event, 0.0)])) == isinstance(event, trouble)


def test_trouble_is_one_plain_line_that_says_what_and_where() -> None:
    event = missed(7, "shared memory too small:\n  5 MiB are free")
    (line,) = noticed([(event, 0.0)])
    assert line == "holdfast rank 0 2-7: snapshot missed: shared memory too small: 5 MiB are free"


def test_replicas_that_differ_are_named_with_what_is_known_of_them() -> None:
    known, unknown = unlike(is_known=True, others=3, box="0:4"), unlike(is_known=False)
    first, second = noticed([(known, 0.0), (unknown, 0.0)])
    assert first == (
        "holdfast rank 0 2-7: replicas differ: model.w[0:4] on rank 1 is not what most of its 4 "
        "replicas hold; 3 more leaves differ"
    )
    assert second == (
        "holdfast rank 0 2-7: replicas differ: model.w is not the same on ranks 0-1; which of "
        "them is right cannot be told"
    )


def test_the_same_trouble_is_shown_at_once_and_then_once_a_minute_with_its_count() -> None:
    reasons = [
        (missed(step, f"step {step}: slot {step}.slot is too small"), float(step))
        for step in range(150)
    ]
    first, second, third = noticed(reasons)
    assert "2-0" in first and "more" not in first
    assert "2-60" in second and "(59 more since this was last said)" in second
    assert "2-120" in third and "(59 more since this was last said)" in third


def test_another_trouble_is_not_held_back_by_the_first() -> None:
    broke = events.PersistBroke(incarnation=2, step=1, rank=0, reason="shared memory too small")
    happened = [(missed(1), 0.0), (broke, 1.0), (missed(2, "the keeper went away"), 2.0)]
    assert len(noticed(happened)) == 3


def test_a_clock_that_is_set_back_silences_nothing_for_long() -> None:
    assert len(noticed([(missed(1), 1e9), (missed(2), 1e6), (missed(3), 1e6 + 1)])) == 2


@pytest.mark.slow
def test_ever_new_troubles_take_no_more_memory() -> None:
    sink = NoticeSink(0, stream=io.StringIO())
    for number in range(2000):
        sink(missed(1, "a" * (number + 1)), 0.0)
    assert len(sink._shown) <= 256


def test_rank_0_speaks_for_all_and_a_rank_for_what_only_it_knows() -> None:
    for event in (missed(1), events.KeeperLost(rank=3, reason="killed")):
        assert noticed([(event, 0.0)], rank=3) == []
    warned = events.Warned(rank=3, message="its events cannot be written")
    assert len(noticed([(warned, 0.0)], rank=3)) == 1


@pytest.mark.parametrize("kind", [LogSink, NoticeSink])
def test_of_two_runs_in_one_process_one_says_what_both_hear(
    kind: type[LogSink] | type[NoticeSink],
) -> None:
    stream = io.StringIO()
    sinks = [
        NoticeSink(0, stream=stream) if kind is NoticeSink else LogSink(stream=stream)
        for _ in range(2)
    ]
    stops = [events.subscribe(sink) for sink in sinks]
    try:
        events.emit(missed(1, "one"))
        assert len(stream.getvalue().splitlines()) == 1
        stops[0]()
        events.emit(missed(2, "another"))
        assert len(stream.getvalue().splitlines()) == 2
    finally:
        for stop in stops:
            stop()
    sinks[0](missed(3, "a third, told directly"), 0.0)
    assert len(stream.getvalue().splitlines()) == 3
