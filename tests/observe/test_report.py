"""The report of a run, from event files as ranks and keepers leave them behind."""

from __future__ import annotations

import dataclasses
import io
import json
import os
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from holdfast import events
from holdfast.errors import NotFound
from holdfast.observe.lives import Lives
from holdfast.observe.log import Divergence, read_events
from holdfast.observe.phases import OF_SAVES
from holdfast.observe.records import RecordHead
from holdfast.observe.report import Figures, RefusedAtDoor, Report, Save, to_json
from holdfast.observe.report_builder import read_report
from holdfast.observe.sinks import JsonlSink
from holdfast.observe.tables import render
from support.runs.told import Told, of, tell_start


def write(
    root: Path,
    name: str,
    *records: events.Event | bytes,
    first_s: int = 1_000,
    host: str = "a",
    ahead_s: float = 0.0,
) -> None:
    """Append records, one second apart; bytes go in as they are.

    ``ahead_s``: how far both clocks of the host are ahead of all others.
    """
    path = root / "events" / name
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        for second, record in enumerate(records, start=first_s):
            if isinstance(record, bytes):
                file.write(record)
                continue
            fields = events.to_record(record, second + ahead_s)
            fields |= {"mono_s": second + ahead_s - 500, "by_host": host}
            file.write(msgspec.json.encode(fields) + b"\n")


def returned(step: int, rank: int, held_s: float, incarnation: int = 1) -> events.SaveReturned:
    return events.SaveReturned(
        incarnation=incarnation,
        step=step,
        rank=rank,
        held_s=held_s,
        describe_s=0.0,
        volatile_s=0.0,
        wait_previous_s=0.0,
        leaves=10,
        size_bytes=500,
        durable=False,
    )


def rendered(report: Report, *, last: int = 20) -> str:
    out = io.StringIO()
    render(report, Console(file=out, width=160), last=last)
    return out.getvalue()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two ranks: step 0 durable, step 1 captured, step 2 missed, then killed in step 3; resumed."""
    for rank in (0, 1):
        write(
            tmp_path,
            f"rank-{rank:05d}.jsonl",
            events.RunStarted(incarnation=1, rank=rank, run_id="r", world=2, host="a", pid=rank),
            returned(0, rank, 0.010 + rank / 100),
            events.FenceWaited(incarnation=1, step=0, rank=rank, held_s=0.25),
            events.FenceWaited(incarnation=1, step=0, rank=rank, held_s=0.5 * rank),
            events.ImageCaptured(
                incarnation=1, step=0, rank=rank, elapsed_s=0.3, copy_s=0.2, size_bytes=600
            ),
            events.SnapshotCaptured(
                incarnation=1, step=0, rank=rank, elapsed_s=0.3 + rank / 10, world=2
            ),
            returned(1, rank, 0.030),
            events.ImageCaptured(
                incarnation=1, step=1, rank=rank, elapsed_s=0.3, copy_s=0.2, size_bytes=700
            ),
            events.SnapshotCaptured(incarnation=1, step=1, rank=rank, elapsed_s=0.6, world=2),
            returned(2, rank, 0.002),
            events.SnapshotMissed(
                incarnation=1, step=2, rank=rank, reason="changed", overtaken=True, leaf="model.w"
            ),
            returned(3, rank, 0.001),
            events.KeeperLost(incarnation=1, rank=rank, reason="killed by signal 9"),
            b'{"event":"SaveRet',  # the kill
            b"\n",
            events.RunStarted(incarnation=2, rank=rank, run_id="r", world=2, host="a", pid=rank),
            events.Restored(
                incarnation=2,
                step=1,
                rank=rank,
                source="arena" if rank else "storage",
                elapsed_s=1.5 + rank,
                size_bytes=700,
                saved_world=2,
                world=2,
                parent_incarnation=1,
            ),
            returned(2, rank, 0.005, incarnation=2),
        )
    published = events.CheckpointPublished(
        incarnation=1, step=0, elapsed_s=2.0, size_bytes=1200, images=2
    )
    write(
        tmp_path,
        "keeper-a.jsonl",
        published,
        events.PersistBroke(incarnation=1, step=1, reason="no space left"),
        events.CheckpointPruned(pruned_step=0, pruned_incarnation=0),
        events.Warned(message="the disk is slow"),
        first_s=1_010,
    )
    return tmp_path


def test_a_host_that_was_waited_for_in_vain_is_named_with_the_saves_it_cost(tmp_path: Path) -> None:
    for step, hosts in ((4, ("b",)), (5, ()), (6, ("a", "b"))):
        missed = events.SnapshotMissed(incarnation=1, step=step, reason="r", late_hosts=hosts)
        write(tmp_path, "keeper-a.jsonl", missed, missed)
    report = read_report(tmp_path)
    assert report.late_hosts == {"a": 1, "b": 2} == to_json(report)["late_hosts"]
    assert "waited for b in vain at 2 saves" in rendered(report)


def test_a_save_takes_as_long_as_its_slowest_rank(run: Path) -> None:
    save = read_report(run).saves[0]
    of_ranks = {name for name in save.phases if OF_SAVES[name].side != "coordinator"}
    assert of_ranks == save.slowest.keys()
    assert save.phases["held_s"].slowest == ((1, 0.020), (0, 0.010))
    assert save.phases["held_s"].median_s == pytest.approx(0.010, rel=0.01)
    assert dataclasses.replace(save, phases={}, even={}) == Save(
        incarnation=1,
        step=0,
        state="durable",
        ranks=2,
        time_s=1000.98,
        late_s=0.01,
        late_rank=0,
        held_s=0.020,
        fence_s=0.75,  # two optimizers on one rank: their waits add up
        captured_s=4.02,  # from the first call of `save` to the first record of it
        durable_s=9.02,
        persist_s=2.0,
        size_bytes=1200,
        describe_s=0.0,
        volatile_s=0.0,
        wait_previous_s=0.0,
        copy_s=0.2,
        even_bytes={"copy_s": 600.0},
        slowest={
            "held_s": 1,
            "describe_s": 0,
            "volatile_s": 0,
            "wait_previous_s": 0,
            "fence_s": 1,
            "copy_s": 0,
        },
    )
    assert save.throughput_bytes_per_s == 600


def test_each_save_says_how_far_it_came(run: Path) -> None:
    saves = {(s.incarnation, s.step): s for s in read_report(run).saves}
    assert {key: save.state for key, save in saves.items()} == {
        (1, 0): "durable",
        (1, 1): "captured",
        (1, 2): "missed",
        (1, 3): "unfinished",
        (2, 2): "unfinished",  # the same step once more, and not the same generation
    }
    assert saves[1, 1].size_bytes == 1400
    assert saves[1, 1].throughput_bytes_per_s is None
    assert saves[1, 1].fence_s == 0.0, "captured in time for the update: no wait was recorded"
    assert saves[1, 3].fence_s is None, "nobody knows"
    assert saves[1, 2].reason == "overtaken at model.w: changed"


def test_restores_are_of_all_ranks_together(run: Path) -> None:
    (restore,) = read_report(run).restores
    assert (restore.incarnation, restore.parent_incarnation, restore.step) == (2, 1, 1)
    assert restore.sources == ("arena", "storage")
    assert restore.elapsed_s == 2.5
    assert restore.size_bytes == 1400


@pytest.mark.promise
def test_a_restore_is_from_as_far_away_as_that_of_the_farthest_rank(tmp_path: Path) -> None:
    told = Told(tmp_path)
    ranks = {0: "a", 1: "b", 2: "c"}
    tell_start(told, 1, 10.0, ranks)
    for number, origins in (
        (2, ("memory",) * 3),
        (3, ("memory", "peers", "memory")),
        (4, ("decoded",) * 3),
        (5, ("",) * 3),
    ):
        tell_start(told, number, 100.0 * number, ranks)
        for (rank, host), origin in zip(ranks.items(), origins, strict=True):
            source = "memory" if origin else "storage"
            fields = {"source": source, "origin": origin, "parent_incarnation": 1, "step": 3}
            restored = of(events.Restored, number, rank, elapsed_s=2.0 * number, **fields)
            told(restored, 100.0 * number + 20, host)
    report = read_report(told.write())
    assert [each.sources for each in report.restores] == [
        ("memory",),
        ("memory", "peers"),
        ("decoded",),
        ("storage",),
    ]
    assert report.ledger is not None
    assert report.ledger.restore_s == {"memory": 4, "peers": 6, "decoded": 8, "storage": 10}
    assert report.ledger.seconds["restore"] == 28.0


def test_a_lost_keeper_counts_once_however_many_ranks_noticed(run: Path) -> None:
    (loss,) = read_report(run).keeper_losses
    assert (loss.incarnation, loss.host, loss.reason) == (1, "a", "killed by signal 9")


def test_a_keeper_lost_twice_counts_twice(tmp_path: Path) -> None:
    lost = events.KeeperLost(incarnation=1, rank=0, reason="killed")
    write(tmp_path, "rank-00000.jsonl", lost, lost)
    write(tmp_path, "rank-00001.jsonl", events.KeeperLost(incarnation=1, rank=1, reason="killed"))
    assert len(read_report(tmp_path).keeper_losses) == 2


def test_sums_and_medians_are_over_the_saves_that_have_the_quantity(run: Path) -> None:
    figures = read_report(run).figures
    held = figures["held_s"]
    assert (held.count, held.median, held.largest) == (5, 0.005, 0.030)
    assert held.total == pytest.approx(0.058)
    assert (held.generation, held.rank) == ("1-1", 0)
    durable, persist = figures["durable_s"], figures["persist_s"]
    assert durable == Figures(1, 9.02, 9.02, 9.02, 9.02, 9.02, "1-0", -1)
    assert persist == Figures(1, 2.0, 2.0, 2.0, 2.0, 2.0, "1-0", -1)


def test_where_nobody_recorded_the_call_the_keepers_own_measure_stands(tmp_path: Path) -> None:
    captured = events.SnapshotCaptured(step=0, elapsed_s=0.5, world=1)
    published = events.CheckpointPublished(step=0, elapsed_s=2.0, size_bytes=8, images=1)
    write(tmp_path, "keeper-a.jsonl", captured, published)
    save = read_report(tmp_path).saves[0]
    assert (save.captured_s, save.durable_s, save.held_s) == (0.5, 2.0, None)


def test_torn_and_unknown_lines_are_skipped_and_counted(run: Path) -> None:
    write(run, "rank-00001.jsonl", b'{"event":"Invented","step":1}\n', b"\xff\xfe\n\n")
    write(run, "rank-00001.jsonl", b'{"event":"FenceWaited","step":0,"rank":1,"held_s":')
    report = read_report(run)
    assert report.unknown_lines == 1
    assert report.torn_lines == 4
    assert len(report.saves) == 5


def test_records_may_come_in_any_order(run: Path) -> None:
    before = read_report(run)
    for path in (run / "events").iterdir():
        path.write_bytes(b"\n".join(reversed(path.read_bytes().splitlines())))
    assert read_report(run).saves == before.saves


def test_a_checkpoint_counts_as_durable_although_a_rank_said_missed(tmp_path: Path) -> None:
    published = events.CheckpointPublished(step=0, elapsed_s=1.0, size_bytes=8, images=1)
    write(tmp_path, "keeper-a.jsonl", published, events.SnapshotMissed(step=0, reason="late"))
    assert read_report(tmp_path).saves[0].state == "durable"


def test_a_run_without_events_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no events in"):
        read_report(tmp_path)


def test_json_has_everything_and_nothing_that_json_has_not(run: Path) -> None:
    document: dict[str, Any] = json.loads(json.dumps(to_json(read_report(run))))
    assert document["saves"][0]["throughput_bytes_per_s"] == 600
    assert document["figures"]["durable_s"]["median"] == 9.02
    assert document["restores"][0]["sources"] == ["arena", "storage"]
    assert document["persist_failures"] == ["1-1: no space left"]
    assert document["pruned"] == 1


def test_the_tables_show_saves_sums_restores_and_troubles(run: Path) -> None:
    text = rendered(read_report(run))
    assert "2 incarnations, 5 saves (1 durable, 1 captured, 1 missed, 2 unfinished)" in text
    for phrase in (
        "20.0 ms",  # held
        "600 B/s",  # throughput
        "time to durable",
        "arena, storage",
        "missed 1-2: overtaken at model.w: changed",
        "killed by signal 9",
        "storage trouble at 1-1: no space left",
        "warning: the disk is slow",
        "2 torn lines were skipped",
    ):
        assert phrase in text


def unlike(step: int, rank: int, leaf: str, ranks: tuple[int, ...], known: bool) -> events.Event:
    return events.ReplicasDiffer(
        incarnation=1,
        step=step,
        rank=rank,
        leaf=leaf,
        box="",
        ranks=ranks,
        replicas=4,
        is_known_which=known,
    )


def test_replicas_that_differed_count_once_a_save_whoever_told(tmp_path: Path) -> None:
    told = [unlike(step, -1, "model.w", (2,), True) for step in (9, 5)]
    write(tmp_path, "keeper-a.jsonl", *told, unlike(9, -1, "model.b", (0, 1, 2, 3), False))
    write(tmp_path, "rank-00000.jsonl", unlike(9, 0, "model.w", (2,), True))
    report = read_report(tmp_path)
    assert report.divergences == (
        Divergence("model.b", (0, 1, 2, 3), 4, False, 1, (1, 9), (1, 9)),
        Divergence("model.w", (2,), 4, True, 2, (1, 5), (1, 9)),
    )
    text = " ".join(rendered(report).split())
    assert "model.w: rank 2 not as most of 4 replicas; seen from 1-5 to 1-9, in 2 saves" in text
    assert "model.b: ranks 0-3 not alike, and which is right is not known; seen at 1-9" in text


def test_where_everything_differed_the_report_stays_short(tmp_path: Path) -> None:
    everything = [unlike(5, -1, f"w{n:03}", (2,), True) for n in range(40)]
    write(tmp_path, "keeper-a.jsonl", *everything)
    text = rendered(read_report(tmp_path))
    assert "w009" in text and "w010" not in text
    assert "replicas differ: 30 leaves more" in text


def test_a_long_run_shows_its_last_saves_and_the_sums_of_all(tmp_path: Path) -> None:
    write(tmp_path, "rank-00000.jsonl", *(returned(step, 0, 0.001) for step in range(100)))
    report = read_report(tmp_path)
    text = rendered(report, last=3)
    assert "1-97" in text
    assert "1-96" not in text
    assert "97 earlier saves are in the sums only" in text
    assert "1-0 " in rendered(report, last=0)


def test_progress_never_goes_beyond_its_end(run: Path) -> None:
    calls: list[tuple[int, int]] = []
    read_report(run, progress=lambda done, total: calls.append((done, total)))
    assert calls
    assert all(0 < done <= total for done, total in calls)


def test_what_is_protected_and_what_losses_that_survives_is_said(tmp_path: Path) -> None:
    told = "on b: no network"
    write(
        tmp_path,
        "keeper-a.jsonl",
        events.ProtectionPlanned(incarnation=1, parity=1, hosts=4, survives="any 1 of 4 hosts"),
        events.SnapshotCaptured(incarnation=1, step=0, elapsed_s=0.5, world=4),
        events.SnapshotProtected(incarnation=1, step=0, survives="any 1 of 4 hosts", elapsed_s=1),
        events.SnapshotCaptured(incarnation=1, step=1, elapsed_s=0.5, world=4),
        events.SnapshotNotProtected(incarnation=1, step=1, reason=told),
    )
    write(
        tmp_path,
        "rank-0.jsonl",
        events.SnapshotNotProtected(incarnation=1, step=1, rank=0, reason=told),
    )
    report = read_report(tmp_path)
    assert [save.state for save in report.saves] == ["protected", "captured"]
    assert report.unprotected == (f"1-1: {told}",)
    shown = rendered(report)
    assert "protected snapshots of the last start survive any 1 of 4 hosts" in shown
    assert f"not protected 1-1: {told}" in shown


def test_what_keepers_turned_away_is_summed_by_host_and_door(tmp_path: Path) -> None:
    for counts in ({"forged": 2}, {"forged": 40, "too_large": 1}):
        told = events.RequestsRefused(host="a", door="peers", counts=counts)
        write(tmp_path, "keeper-a.jsonl", told)
    told = events.RequestsRefused(host="b", door="socket", counts={"malformed": 3})
    write(tmp_path, "keeper-b.jsonl", told)
    report = read_report(tmp_path)
    assert report.refused == (
        RefusedAtDoor("a", "peers", {"forged": 42, "too_large": 1}),
        RefusedAtDoor("b", "socket", {"malformed": 3}),
    )
    shown = rendered(report)
    assert "refused by the keeper of a (peers): 42 forged, 1 too large" in shown
    assert "refused by the keeper of b (socket): 3 malformed" in shown
    assert to_json(report)["refused"][1]["counts"] == {"malformed": 3}


def test_what_was_found_damaged_in_memory_is_listed_with_what_came_of_it(tmp_path: Path) -> None:
    write(
        tmp_path,
        "keeper-a.jsonl",
        events.DamageFound(
            incarnation=1,
            step=7,
            host="a",
            what="image",
            name="rank 2",
            size_bytes=1 << 20,
            outcome="repaired",
        ),
        events.DamageFound(
            incarnation=1,
            step=7,
            host="a",
            what="parity",
            name="row 0 of stripe 1",
            size_bytes=1 << 20,
            outcome="dropped",
            reason="no other host is in reach",
        ),
    )
    report = read_report(tmp_path)
    assert [one.outcome for one in report.damages] == ["repaired", "dropped"]
    shown = rendered(report)
    assert "damaged in the memory of a: image (rank 2) of 1-7" in shown
    assert "dropped, no other host is in reach" in shown


def test_a_clock_that_is_an_hour_behind_changes_no_duration(run: Path) -> None:
    before = read_report(run).saves
    behind = [
        events.RunStarted(incarnation=1, rank=2, run_id="r", world=3, host="b", pid=2),
        *(returned(step, 2, 0.001) for step in range(4)),
    ]
    write(run, "rank-00002.jsonl", *behind, host="b", ahead_s=-3600)
    after = read_report(run).saves
    assert [save.durable_s for save in after] == [save.durable_s for save in before]
    assert [save.captured_s for save in after] == [save.captured_s for save in before]
    assert before[0].durable_s == 9.02


def test_clocks_of_two_boots_of_a_host_are_never_subtracted(tmp_path: Path) -> None:
    """A host that was booted anew counts from zero again: a save of an hour would come of it."""
    published = events.CheckpointPublished(
        incarnation=1, step=0, elapsed_s=2.0, size_bytes=1, images=1
    )
    said = [(returned(0, 0, 0.5), 100.0, "b1"), (published, 3700.0, "b2")]
    lines = [
        events.to_record(event, at_s) | {"mono_s": at_s, "by_host": "a", "boot": boot}
        for event, at_s, boot in said
    ]
    (tmp_path / "events").mkdir()
    text = "\n".join(map(json.dumps, lines))
    path = tmp_path / "events" / "host-a.jsonl"
    path.write_text(text)
    assert read_report(tmp_path).saves[0].durable_s == 2.0
    path.write_text(text.replace("b2", "b1"))
    assert read_report(tmp_path).saves[0].durable_s == 3600.5


def sample_of(kind: type[events.Event]) -> events.Event:
    """An event with a value in every field."""
    text, number = "some text", 7
    hints = get_type_hints(kind)
    values: dict[type[Any], Any] = {
        str: text,
        int: number,
        float: 0.5,
        bool: True,
        tuple[str, ...]: (text,),
    }
    fields = {name: values.get(hints[name], number) for name in kind.__struct_fields__}
    for name in kind.__struct_fields__:
        if hints[name] == tuple[int, ...]:
            fields[name] = (1,)
        elif hints[name] == dict[str, int]:
            fields[name] = {text: number}
    return kind(**fields)


def kinds() -> list[type[events.Event]]:
    return [
        one
        for one in vars(events).values()
        if isinstance(one, type) and issubclass(one, events.Event) and one is not events.Event
    ]


@pytest.mark.promise
@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_no_kind_of_event_is_forgotten(kind: type[events.Event], tmp_path: Path) -> None:
    started = events.RunStarted(incarnation=7, rank=7, run_id="r", world=8, host="a", pid=1)
    base = [] if kind is events.RunStarted else [started]
    told = events.Warned(message="a first record")
    for directory, records in (
        ("without", [*base, told, told]),  # as many records, until the same moment
        ("with", [*base, told, sample_of(kind)]),
    ):
        (tmp_path / directory).mkdir()
        write(tmp_path / directory, "rank-00007.jsonl", *records)
    without, with_it = (
        to_json(read_report(tmp_path / directory)) | {"root": ""}
        for directory in ("without", "with")
    )
    assert with_it != without, f"{kind.__name__} is in no report"
    assert with_it["unknown_lines"] == with_it["invalid_lines"] == with_it["torn_lines"] == 0


def test_the_cost_of_being_killed_twice_is_told(tmp_path: Path) -> None:
    def life(number: int, first_s: int, steps: range, parent: tuple[int, int] | None) -> None:
        for rank in (0, 1):
            name = f"rank-{rank:05d}.jsonl"
            start = events.RunStarted(
                incarnation=number, rank=rank, run_id="r", world=2, host="a", pid=rank
            )
            records: list[events.Event] = [start]
            if parent is not None:
                records.append(
                    events.Restored(
                        incarnation=number,
                        step=parent[1],
                        rank=rank,
                        source="memory",
                        elapsed_s=0.5,
                        size_bytes=8,
                        saved_world=2,
                        world=2,
                        parent_incarnation=parent[0],
                    )
                )
            records += [returned(step, rank, 0.001, number) for step in steps]
            if number == 3:
                records.append(events.RunEnded(incarnation=3, rank=rank, outcome="closed"))
            write(tmp_path, name, *records, first_s=first_s)

    def lost(rank: int) -> events.Event:
        return events.TrainerLost(incarnation=1, rank=rank, host="a", pid=rank)

    life(1, 1000, range(10), None)
    # Rank 0 hung up and came again; then rank 1 was killed, and torchrun ended rank 0.
    write(tmp_path, "keeper-a.jsonl", lost(0), lost(1), lost(0), first_s=1011)
    life(2, 1030, range(8, 15), (1, 7))
    life(3, 1060, range(5, 20), (1, 4))
    first, second, third = read_report(tmp_path).starts
    assert (first.ended, first.open_ranks, first.down_s, first.lost_steps) == (
        "open",
        (0, 1),
        None,
        None,
    )
    assert (second.ended, second.down_s, second.lost_steps) == ("open", 20.0, 2)
    # Steps 8 to 14 of the second, and 5 to 7 of the first, on which it stood.
    assert (third.ended, third.open_ranks, third.down_s, third.lost_steps) == (
        "closed",
        (),
        22.0,
        10,
    )
    shown = " ".join(rendered(read_report(tmp_path)).split())
    assert "started again 2 times: 2 times ranks had not closed" in shown
    assert "42.0 s without training, 12 steps lost" in shown
    assert [(one.rank, one.time_s) for one in first.lost] == [(1, 1012), (0, 1013)]
    assert (second.lost, third.lost) == ((), ())
    assert "ranks 0-1 did not close, rank 1 on a first" in shown


@pytest.mark.promise
@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 40)), max_size=7), st.integers(0, 6))
def test_lost_steps_are_those_that_left_the_ancestry(
    history: list[tuple[int, int]], first: int
) -> None:
    """Against a plain model: the ancestry as a list of the steps themselves."""
    lives = Lives()

    def at(number: int) -> RecordHead:
        return RecordHead(time_s=float(number), by_host="a")

    def begin(number: int, parent: tuple[int, int] | None) -> None:
        lives.take(
            events.RunStarted(incarnation=number, rank=0, run_id="r", world=1, host="a", pid=1),
            at(number),
        )
        if parent is not None:
            restored = events.Restored(
                incarnation=number,
                step=parent[1],
                rank=0,
                source="memory",
                elapsed_s=0,
                size_bytes=0,
                saved_world=1,
                world=1,
                parent_incarnation=parent[0],
            )
            lives.take(restored, at(number))

    def train(number: int, steps: range) -> None:
        for step in steps:
            lives.take(returned(step, 0, 0.0, number), at(number))
            line.append((number, step))

    line: list[tuple[int, int]] = []
    begin(1, None)
    train(1, range(first + 1))
    expected: list[int | None] = [None]
    for number, (count, back) in enumerate(history, start=2):
        keep = max(1, len(line) - back)
        expected.append(len(line) - keep)
        del line[keep:]
        begin(number, line[-1])
        train(number, range(line[-1][1] + 1, line[-1][1] + 1 + count))
    assert [start.lost_steps for start in lives.starts(lives.clock())] == expected


def test_records_that_are_in_no_file_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "events" / "rank-00000.jsonl"
    sink = JsonlSink(path, host="a")
    for step in range(9):
        sink(returned(step, 0, 0.001), 1000.0 + step)
    sink.close()
    assert read_report(tmp_path).lost_records == 0
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3] + lines[5:]))
    report = read_report(tmp_path)
    assert report.lost_records == 2
    assert "2 records of events are in no file" in rendered(report)


ABSURD = {
    "time": b'{"event":"Warned","message":"m","time_s":1e12}',
    "negative time": b'{"event":"Warned","message":"m","time_s":-5}',
    "negative size": b'{"event":"ImageDurable","elapsed_s":1,"size_bytes":-5,"image":"i"}',
    "size": b'{"event":"ImageDurable","elapsed_s":1,"size_bytes":1' + b"0" * 400 + b',"image":"i"}',
    "duration": b'{"event":"FenceWaited","held_s":1e300,"step":1,"rank":0}',
    "step": b'{"event":"FenceWaited","held_s":1,"step":-7,"rank":0}',
    "rank": b'{"event":"FenceWaited","held_s":1,"step":1,"rank":99999999999}',
    "count": b'{"event":"RequestsRefused","host":"a","door":"peers","counts":{"x":-1}}',
    "field": b'{"event":"RunStarted","run_id":[],"world":1,"host":"a","pid":1}',
}


@pytest.mark.parametrize("line", ABSURD.values(), ids=ABSURD)
def test_a_record_with_a_value_that_cannot_be_is_counted_and_in_no_figure(
    line: bytes, run: Path
) -> None:
    before = read_report(run)
    write(run, "rank-00009.jsonl", line + b"\n")
    report = read_report(run)
    assert report.invalid_lines == 1
    assert (report.saves, report.warnings) == (before.saves, before.warnings)
    assert "1 records with values that cannot be" in rendered(report)


@pytest.mark.parametrize("kind", ["directory", "link", "pipe", "closed"])
def test_what_is_no_file_is_named_and_the_rest_is_told(kind: str, run: Path) -> None:
    bad = run / "events" / "rank-00007.jsonl"
    if kind == "directory":
        bad.mkdir()
    elif kind == "link":
        bad.symlink_to("nowhere")
    elif kind == "pipe":
        os.mkfifo(bad)
    else:
        bad.write_bytes(b"")
        real = Path.open

        def refuse(self: Path, *args: Any, **kwargs: Any) -> Any:
            if self == bad:
                raise PermissionError(13, "Permission denied", str(self))
            return real(self, *args, **kwargs)

        patch = pytest.MonkeyPatch()
        patch.setattr(Path, "open", refuse)
    report = read_report(run)
    if kind == "closed":
        patch.undo()
    assert len(report.saves) == 5
    (why,) = report.unreadable
    assert why.startswith("rank-00007.jsonl: ")
    assert why in rendered(report)


@pytest.mark.promise
def test_lines_too_long_or_too_deep_cost_themselves_alone(run: Path) -> None:
    before = read_report(run)
    long = b'{"event":"Warned","message":"' + b"x" * (5 << 20) + b'"}\n'
    after = msgspec.json.encode(events.to_record(events.Warned(message="after"), 5.0)) + b"\n"
    deep = b'{"event":"Newer","x":' + b"[" * 200_000 + b"\n"
    write(run, "rank-00009.jsonl", long, b'{"a":' * 100_000 + b"\n", deep, after)
    report = read_report(run)
    assert report.warnings == (*before.warnings, "after")
    assert report.torn_lines == before.torn_lines + 2
    assert list(read_events(run, events.Warned))[-1] == events.Warned(message="after")
