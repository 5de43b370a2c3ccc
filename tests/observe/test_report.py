"""The report of a run, from event files as ranks and keepers leave them behind."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from holdfast import events
from holdfast.errors import NotFound
from holdfast.observe.log import Divergence
from holdfast.observe.report import Figures, RefusedAtDoor, Report, Save, render, to_json
from holdfast.observe.report_builder import read_report


def write(root: Path, name: str, *records: events.Event | bytes, first_s: int = 1_000) -> None:
    """Append records, one second apart; bytes go in as they are."""
    path = root / "events" / name
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        for second, record in enumerate(records, start=first_s):
            if isinstance(record, bytes):
                file.write(record)
            else:
                file.write(msgspec.json.encode(events.to_record(record, float(second))) + b"\n")


def returned(step: int, rank: int, held_s: float, incarnation: int = 1) -> events.Event:
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
    assert save == Save(
        incarnation=1,
        step=0,
        state="durable",
        ranks=2,
        held_s=0.020,
        fence_s=0.75,  # two optimizers on one rank: their waits add up
        captured_s=4.02,  # from the first call of `save` to the first record of it
        durable_s=9.02,
        persist_s=2.0,
        size_bytes=1200,
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
    assert figures["durable_s"] == Figures(1, 9.02, 9.02, 9.02)
    assert figures["persist_s"] == Figures(1, 2.0, 2.0, 2.0)


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
