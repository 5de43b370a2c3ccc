"""Who is slow, from saves in which a fault was planted at a known place."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import events
from holdfast.observe.blame import (
    LATE_WINDOW,
    Blame,
    HostPressure,
    find_slow,
    more_than_chance,
    pressure_text,
)
from holdfast.observe.clocks import HostClocks
from holdfast.observe.lives import Lives
from holdfast.observe.records import RecordHead
from holdfast.observe.report_builder import read_report
from holdfast.observe.save_records import SaveRecords
from holdfast.observe.text import seconds_text
from support.runs.told import Told, tell_save, tell_start

HOSTS = {"a": (0, 1), "b": (2, 3), "c": (4, 5), "d": (6, 7)}
HOST_OF = {rank: host for host, ranks in HOSTS.items() for rank in ranks}
SAVES = 20
SIZE = 100_000_000
#: What a fault makes of what a rank does in a save: the seconds of each phase, and its bytes.
Fault = Callable[[int, int, dict[str, float]], None]


def blamed(fault: Fault, seed: int, *, skew_s: float = 0.0, hosts_on: int = 0) -> tuple[Blame, ...]:
    """Who is found in saves with a fault, of hosts whose clocks are apart; ``hosts_on``: how many
    hosts further on the fault lies than it says.
    """
    chance = random.Random(seed)
    clocks = HostClocks()
    lives, saves = Lives(), SaveRecords(clocks)
    lives.clocks = clocks
    ahead_s = {host: chance.uniform(-skew_s, skew_s) for host in HOSTS}

    def tell(event: Any, at_s: float, host: str) -> None:
        at_s += ahead_s[host]
        head = RecordHead(time_s=at_s + 1e6, mono_s=at_s, by_host=host, boot="x")
        lives.take(event, head)
        if not isinstance(event, events.RunStarted):
            saves.take(event, head)

    for rank, host in HOST_OF.items():
        start = events.RunStarted(incarnation=1, rank=rank, run_id="r", world=8, host=host, pid=1)
        tell(start, 1000 + chance.uniform(0, 0.002), host)
    for step in range(SAVES):
        for rank, host in HOST_OF.items():
            usual = {
                "volatile_s": 0.01,
                "copy_s": 0.3,
                "write_s": 0.4,
                "late_s": 0.01,
                "finish_s": 0.1,
            }
            does = {name: s * chance.uniform(0.8, 1.25) for name, s in usual.items()}
            does |= {"bytes": SIZE * chance.uniform(0.98, 1.02), "fence_s": 0.2}
            fault(step, (rank - 2 * hosts_on) % len(HOST_OF), does)
            at = 1010 + 10 * step + does["late_s"]
            who: dict[str, Any] = {"incarnation": 1, "step": step, "rank": rank}
            size = int(does["bytes"])
            returned = events.SaveReturned(
                **who,
                held_s=does["volatile_s"],
                describe_s=0.001,
                volatile_s=does["volatile_s"],
                wait_previous_s=0.0,
                leaves=1,
                size_bytes=size,
                durable=True,
            )
            tell(returned, at + does["volatile_s"], host)
            tell(events.FenceWaited(**who, held_s=does["fence_s"]), at + 1, host)
            image: dict[str, Any] = {"size_bytes": size, "elapsed_s": does["copy_s"]}
            tell(events.ImageCaptured(**who, copy_s=does["copy_s"], **image), at + 2, host)
            image = {"size_bytes": size, "elapsed_s": does["write_s"] + does["finish_s"]}
            image |= {"image": "i", "finish_s": does["finish_s"]}
            tell(events.ImageDurable(**who, **image), at + 3, host)
    return find_slow(saves.saves(lives.clock()), HOSTS, clock_error_s=0.002)


def slower(phase: str, *ranks: int, times: float = 4.0, since: int = 3) -> Fault:
    def act(step: int, rank: int, does: dict[str, float]) -> None:
        if rank in ranks and step >= since:
            does[phase] *= times

    return act


def heavier(step: int, rank: int, does: dict[str, float]) -> None:
    if rank == 5:
        for name in ("bytes", "copy_s", "write_s", "finish_s"):
            does[name] *= 2.5


def late(step: int, rank: int, does: dict[str, float]) -> None:
    if step >= 3:
        does["late_s"] += 1.5 if rank == 5 else 0.0
        does["fence_s"] += 0.0 if rank == 5 else 1.5  # the others wait for it


def busy(step: int, rank: int, does: dict[str, float]) -> None:
    if rank in (4, 5) and step >= 3:
        does["volatile_s"] *= 8
        does["copy_s"] *= 3
        does["write_s"] *= 2
        does["late_s"] += 1.5 if rank == 5 else 0.7


FAULTS: list[tuple[str, Fault, tuple[str, str, str]]] = [
    ("disk of a host", slower("write_s", 4, 5), ("host c", "slow", "write_s")),
    ("fsync of a host", slower("finish_s", 4, 5, times=12.0), ("host c", "slow", "finish_s")),
    ("fsync of a rank", slower("finish_s", 3, times=12.0), ("rank 3 on b", "slow", "finish_s")),
    (
        "fsync of all",
        slower("finish_s", *range(8), times=12.0, since=14),
        ("all 4 hosts", "slow", "finish_s"),
    ),
    ("memory of a host", slower("copy_s", 0, 1), ("host a", "slow", "copy_s")),
    ("link of a rank", slower("copy_s", 6), ("rank 6 on d", "slow", "copy_s")),
    ("CPU of a rank", slower("volatile_s", 3, times=20), ("rank 3 on b", "slow", "volatile_s")),
    ("storage of all", slower("write_s", *range(8), since=14), ("all 4 hosts", "slow", "write_s")),
    ("twice the bytes", heavier, ("rank 5 on c", "bytes", "copy_s")),
    ("a late rank", late, ("rank 5 on c", "late", "")),
    ("the CPUs of a host", busy, ("host c", "busy", "copy_s")),
]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("fault", "expected"), [each[1:] for each in FAULTS], ids=[each[0] for each in FAULTS]
)
def test_the_planted_place_is_named_and_nobody_else(
    fault: Fault, expected: tuple[str, str, str], seed: int
) -> None:
    found = blamed(fault, seed, skew_s=3600.0, hosts_on=seed % len(HOSTS))
    assert found, "nobody was blamed"
    place, cause, phase = expected
    if place.startswith("host"):
        place = f"host {moved(place[-1], seed)}"
    elif place.startswith("rank"):
        rank = (int(place[5]) + 2 * seed) % len(HOST_OF)
        place = f"rank {rank} on {HOST_OF[rank]}"
    worst = found[0]
    assert (worst.place, worst.cause) == (place, cause) and {one.place for one in found} == {place}
    assert phase in {one.phase for one in found}


def moved(host: str, by: int) -> str:
    names = list(HOSTS)
    return names[(names.index(host) + by) % len(names)]


@pytest.mark.parametrize("seed", range(50))
def test_nobody_is_blamed_in_a_healthy_run(seed: int) -> None:
    assert blamed(lambda *_: None, seed, skew_s=3600.0) == ()


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 1024])
def test_one_of_ranks_that_are_alike_is_not_late(ranks: int) -> None:
    """One of them is always the last, and of few it is often the same."""
    needed, chance = more_than_chance(LATE_WINDOW, ranks), random.Random(ranks)
    runs = [Counter(chance.choices(range(ranks), k=LATE_WINDOW)) for _ in range(4000)]
    wrong = sum(max(counts.values()) >= needed for counts in runs)
    assert wrong <= 0.02 * len(runs) and 3 <= needed <= LATE_WINDOW
    assert more_than_chance(5, 1024) == 3


@pytest.mark.parametrize("seed", range(10))
def test_ranks_that_all_come_when_they_like_are_not_late(seed: int) -> None:
    chance = random.Random(seed)

    def anyhow(_: int, __: int, does: dict[str, float]) -> None:
        does["late_s"] = chance.uniform(0.0, 0.8)

    assert blamed(anyhow, seed) == ()


@pytest.mark.parametrize("times", range(6))
def test_it_takes_three_of_the_last_five_saves(times: int) -> None:
    def now_and_then(step: int, rank: int, does: dict[str, float]) -> None:
        is_slow = rank == 2 and step in (19, 15, 17, 18, 16)[:times]
        does["copy_s"] = 1.5 if is_slow else 0.3

    assert bool(blamed(now_and_then, 1)) == (times >= 3)


def test_a_few_saves_that_go_well_do_not_end_what_began_before_them() -> None:
    """Of five saves in a row two are slow, of all since 1-6 most are."""
    slow = {1, 6, 7, 8, 9, 10, 11, 13, 15, 17, 18, 19}

    def now_and_then(step: int, rank: int, does: dict[str, float]) -> None:
        does["copy_s"] = 1.5 if rank == 2 and step in slow else 0.3

    (found,) = blamed(now_and_then, 1)
    assert found.since == "1-6" and "since 1-6;" in found.sentence


def test_storage_that_has_been_slow_for_longer_than_it_was_fast_is_still_slow() -> None:
    (found,) = blamed(slower("finish_s", *HOST_OF, since=7), 1)
    assert found.place == "all 4 hosts"


def test_the_sentence_has_place_cause_figures_since_when_and_where_to_look() -> None:
    (found,) = blamed(slower("write_s", 4, 5), 3)
    assert found.since == "1-3" and found.saves == 5 and found.score < 0.4
    assert found.sentence.startswith("host c, disk: writing an image takes 1.")
    assert "where others take 5" in found.sentence and "since 1-3" in found.sentence
    assert "durable 1." in found.sentence and "look at the disk" in found.sentence


@pytest.mark.promise
def test_who_waits_is_never_blamed() -> None:
    """Some wait at the fence, for longer than anything else takes."""

    def wait(step: int, rank: int, does: dict[str, float]) -> None:
        does["fence_s"] = 5.0 if rank in (1, 2, 5) else 0.0

    assert blamed(wait, 1) == ()


def test_the_pressure_of_a_host_explains_what_is_slow_there() -> None:
    (one,) = blamed(slower("write_s", 4, 5), 1)
    calm, pressed = HostPressure(0.02, 0.01), HostPressure(0.03, 0.6)
    assert pressure_text(one, HOST_OF, {"a": calm, "b": calm, "c": pressed, "d": calm}) == (
        "; processes of c waited for I/O 60 % of the time, elsewhere 1 %"
    )
    assert pressure_text(one, HOST_OF, {"a": pressed, "b": pressed, "c": pressed}) == ""
    assert pressure_text(one, HOST_OF, {"a": calm, "c": HostPressure(0.9, 0.1)}) == "", "the CPU"
    assert pressure_text(one, HOST_OF, {"c": HostPressure(-1.0, -1.0)}) == ""
    (cpu,) = blamed(slower("volatile_s", 3, times=20), 1)
    busy = {"a": calm, "b": HostPressure(0.5, 0.0)}
    assert "of b waited for a CPU 50 % of the time, elsewhere 2 %" in pressure_text(
        cpu, HOST_OF, busy
    )


def of_run(root: Path, ranks: dict[int, str], **seconds: Any) -> tuple[Blame, ...]:
    """Who is found in a run of so many saves that files are read one after the other."""
    told = Told(root)
    tell_start(told, 1, 10.0, ranks)
    for step in range(70):
        tell_save(told, 1, step, 20.0 + 10 * step, ranks, **seconds)
    report = read_report(told.write())
    return find_slow(report.saves, report.ranks_by_host)


def test_a_host_that_has_more_bytes_is_told_from_a_slow_one(tmp_path: Path) -> None:
    heavy = {"size_bytes": {4: 3_000_000, 5: 3_000_000}, "copy_s": {4: 0.6, 5: 0.6}}
    found = of_run(tmp_path, HOST_OF, **heavy)
    assert {(one.place, one.cause, one.phase) for one in found} == {
        ("rank 4 on c", "bytes", "copy_s"),
        ("rank 5 on c", "bytes", "copy_s"),
    }


@pytest.mark.parametrize(("own_s", "is_named"), [(0.060, True), (0.044, True), (0.037, False)])
def test_more_bytes_are_no_chance_however_little_they_cost(
    tmp_path: Path, own_s: float, is_named: bool
) -> None:
    times: dict[int, float] = dict.fromkeys(HOST_OF, 0.035) | {5: own_s}
    found = of_run(tmp_path, HOST_OF, size_bytes={5: 2_000_000}, copy_s=times)
    assert bool(found) == is_named
    for one in found:
        assert one.sentence.startswith("rank 5 on c has more bytes than the others, 2.00 MB where")
        takes = f"copying to shared memory takes {seconds_text(own_s)} where others take 35."
        assert f"have 1.00 MB, since 1-0: {takes}" in one.sentence


def test_a_slow_host_that_has_fewer_bytes_is_found(tmp_path: Path) -> None:
    light: dict[str, Any] = {"size_bytes": dict.fromkeys((4, 5), 500_000)}
    light |= {"copy_s": dict.fromkeys((4, 5), 0.1), "write_s": dict.fromkeys((4, 5), 0.6)}
    (one,) = of_run(tmp_path, HOST_OF, **light)
    assert (one.place, one.cause, one.phase) == ("host c", "slow", "write_s")


@pytest.mark.promise
def test_a_rank_of_a_few_bytes_is_not_slow_for_what_any_copy_takes(tmp_path: Path) -> None:
    tiny = {"size_bytes": {3: 1000}, "copy_s": {3: 0.004}, "write_s": {3: 0.01}}
    assert of_run(tmp_path, HOST_OF, **tiny) == ()


def test_one_of_two_ranks_of_a_busy_host_does_not_stand_for_it() -> None:
    """The copies of rank 5 are slow, and what both ranks of c write."""

    def fault(step: int, rank: int, does: dict[str, float]) -> None:
        if rank in (4, 5):
            does["write_s"] *= 4
        if rank == 5:
            does["copy_s"] *= 20

    (one,) = blamed(fault, 1)
    assert (one.place, one.cause, one.ranks) == ("host c", "busy", (4, 5))
    assert one.sentence.startswith("host c, CPU or memory")


def test_a_busy_host_is_one_since_the_first_that_it_does_slowly() -> None:
    def fault(step: int, rank: int, does: dict[str, float]) -> None:
        if rank in (4, 5):
            does["copy_s"] *= 4 if step >= 4 else 1
            does["write_s"] *= 8 if step >= 12 else 1

    (one,) = blamed(fault, 1)
    assert (one.cause, one.since) == ("busy", "1-4") and ", since 1-4;" in one.sentence
