"""PURE. The rules by which a run is judged: one set of them, for every view of a run.

``find`` applies them to a report; ``docs/operations/alerts.md`` is generated from ``RULES``.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from holdfast.observe.blame import LEAST_S, HostPressure, began, find_slow, pressure_text
from holdfast.observe.links import slow_links
from holdfast.observe.report import Report, Save
from holdfast.observe.restore_view import complaints
from holdfast.observe.save_calls import UNSURE_S
from holdfast.observe.silence import find_silence
from holdfast.observe.stalls import who_came_late
from holdfast.observe.stuck_saves import (
    SILENT_S,
    find_stuck,
    lacking_text,
    newest_saves,
    paid_saves,
)
from holdfast.observe.text import count_text, counts_text, rate_text, seconds_text

#: Distances of saves, or medians of a step, after which a thing is missing.
TIMES = 3
#: Saves in a row, and how many of the newest are looked at.
ROW, NEWEST = 3, 5
#: What throughput may lose against its own past.
DOWN = 0.7
#: Seconds that clocks of hosts may be apart.
APART_S = 1.0
#: What steps may take longer behind a copy or a write.
INTERFERES = 0.05
#: How the reason begins for which a keeper ends when its run has closed.
RUN_ENDED = "the run ended"
#: Starts of a keeper that are more than chance, and starts without progress.
KEEPERS, LOOPS, DEATHS = 3, 3, 2


class Evidence(NamedTuple):
    """What a rule found: in words, and since when, in seconds since 1970 (None: not known)."""

    text: str
    since_s: float | None = None


@dataclass(frozen=True, slots=True)
class RunRule:
    """One rule. ``when``: what it finds. ``remedy``: what to do. ``check``: finds it in a report;
    it is handed the present moment, or None for a report of what was.
    """

    name: str
    severity: str
    """critical (what was promised is at risk) | warning (it costs time) | notice"""
    when: str
    remedy: str
    check: Callable[[Report, float | None], Iterator[Evidence]]


@dataclass(frozen=True, slots=True)
class RunFinding:
    """One thing that is wrong with a run. ``cause``: the name of the rule."""

    cause: str
    severity: str
    evidence: str
    since_s: float | None
    remedy: str


def find(report: Report, now_s: float | None = None) -> tuple[RunFinding, ...]:
    """Returns what is wrong with a run, the worst first.

    ``now_s``: the present moment, in seconds since 1970, for a run that trains; None for a report
    of what was, which cannot be silent.
    """
    return tuple(
        RunFinding(rule.name, rule.severity, text, since_s, rule.remedy)
        for rule in RULES
        for text, since_s in rule.check(report, now_s)
    )


def to_plain(findings: Sequence[RunFinding]) -> list[dict[str, Any]]:
    """Returns findings as plain values, for JSON."""
    return [asdict(one) for one in findings]


def _overdue(saves: list[Save], state: set[str], what: str) -> Iterator[Evidence]:
    """Yields that no save has reached a state for several times the usual distance."""
    reached = [save for save in saves if save.state in state]
    if what == "durable" and reached and reached[-1].asked_durable:
        since = saves[saves.index(reached[-1]) + 1 :]
        if not any(save.asked_durable for save in since):
            return  # a program that saves by hand asked for no more
    gaps = [b.step - a.step for a, b in pairwise(reached)]
    if not gaps:
        return
    behind, usual = saves[-1].step - reached[-1].step, statistics.median(gaps)
    if behind > TIMES * max(1.0, usual):
        newest = reached[-1]
        yield Evidence(
            f"the newest {what} generation is {newest.incarnation}-{newest.step}, {behind} steps "
            f"old, where one came every {count_text(round(usual), 'step')}",
            newest.time_s,
        )


def _not_durable(report: Report, now_s: float | None) -> Iterator[Evidence]:
    found = list(_overdue(newest_saves(report), {"durable"}, "durable"))
    stuck = find_stuck(report, now_s)
    if found and stuck is not None:
        text, since_s = found[0]
        yield Evidence(f"{text}; {lacking_text(report, stuck[0])}", since_s)
    elif stuck is not None:
        save, waited_s = stuck
        yield Evidence(
            f"save {save.incarnation}-{save.step} was to be durable, and is not after "
            f"{seconds_text(waited_s)}; {lacking_text(report, save)}",
            save.time_s,
        )
    else:
        yield from found


def _not_protected(report: Report, _: float | None) -> Iterator[Evidence]:
    saves = newest_saves(report)
    if saves and any(
        one.parity > 0 and one.incarnation == saves[-1].incarnation for one in report.protection
    ):
        yield from _overdue(saves, {"protected", "durable"}, "protected")


def _missed(report: Report, _: float | None) -> Iterator[Evidence]:
    row: list[Save] = []
    for save in reversed(newest_saves(report)):
        if save.state == "missed":
            row.append(save)
        elif save.state != "unfinished":
            break
    if len(row) >= ROW:
        text = f"{len(row)} saves in a row gave nothing, the last: {row[0].reason}"
        yield Evidence(text, row[-1].time_s)


def _storage_slow(report: Report, _: float | None) -> Iterator[Evidence]:
    paid = paid_saves(newest_saves(report))
    late = [one for one in paid[-NEWEST:] if one.took_s > one.next_s]
    if len(late) >= ROW:
        took_s = statistics.median(one.took_s for one in late)
        apart_s = statistics.median(one.next_s for one in late)
        yield Evidence(
            f"a save takes {seconds_text(took_s)} to be durable, and the next is asked for after "
            f"{seconds_text(apart_s)}",
            began(paid, lambda one: one.took_s > one.next_s).called_s,
        )


def _throughput_down(report: Report, _: float | None) -> Iterator[Evidence]:
    worlds = {start.incarnation: start.world for start in report.starts}
    saves = [save for save in report.saves if save.throughput_bytes_per_s and save.size_bytes]
    # Fewer hosts write less at once: saves of one world are compared.
    world = worlds.get(saves[-1].incarnation) if saves else None
    saves = [save for save in saves if worlds.get(save.incarnation) == world]
    if len(saves) < NEWEST + 2 * NEWEST:
        return
    rates = [save.throughput_bytes_per_s or 0.0 for save in saves]
    now, before = statistics.median(rates[-NEWEST:]), statistics.median(rates[:-NEWEST])
    if now < DOWN * before:
        size_bytes = statistics.median(
            save.size_bytes - (save.reused_bytes or 0) for save in saves[-NEWEST:]
        )
        longer_s = size_bytes / now - size_bytes / before
        if longer_s < LEAST_S:  # of a few bytes that is chance
            return
        text = f"saves go to storage at {rate_text(now)}, where they went at {rate_text(before)}"
        longer = seconds_text(longer_s)
        first = began(saves, lambda save: (save.throughput_bytes_per_s or 0.0) < DOWN * before)
        yield Evidence(f"{text}: each takes {longer} longer", first.time_s)


def _slow_place(report: Report, _: float | None) -> Iterator[Evidence]:
    errors = [UNSURE_S if one.error_s is None else one.error_s for one in report.clocks]
    at = {f"{save.incarnation}-{save.step}": save.time_s for save in report.saves}
    host_of = report.hosts_at(report.saves[-1].incarnation) if report.saves else {}
    places = report.ranks_by_host if host_of else {}  # a new start may have moved the ranks
    blames = find_slow(report.saves, places, clock_error_s=max(errors, default=0.0))
    pressure = {one.host: HostPressure(one.cpu_pressure, one.io_pressure) for one in report.keepers}
    for blame in blames:
        why = pressure_text(blame, host_of, pressure)
        yield Evidence(blame.sentence + why, at.get(blame.since))


def _slow_link(report: Report, _: float | None) -> Iterator[Evidence]:
    for sentence in slow_links(report.links):
        yield Evidence(sentence)


def _slow_restore(report: Report, _: float | None) -> Iterator[Evidence]:
    for restore in report.restores[-NEWEST:]:
        for sentence in complaints(restore, report.hosts_at(restore.incarnation)):
            yield Evidence(sentence, restore.time_s)


def _interference(report: Report, _: float | None) -> Iterator[Evidence]:
    found = report.interference
    if found is not None and found.low > INTERFERES:
        yield Evidence(found.sentence)


def _late_host(report: Report, _: float | None) -> Iterator[Evidence]:
    for host, saves in report.late_hosts.items():
        waited = f"the others waited in vain for {host} at {count_text(saves, 'save')}"
        yield Evidence(f"{waited}, of which nothing came")


def _keeper_lost(report: Report, _: float | None) -> Iterator[Evidence]:
    by_host = Counter(loss.host for loss in report.keeper_losses)
    for host, losses in by_host.items():
        own = [loss for loss in report.keeper_losses if loss.host == host]
        where = f" of {host}" if host else ""
        yield Evidence(
            f"the keeper{where} was lost {count_text(losses, 'time')}, the last: {own[-1].reason}",
            own[0].time_s,
        )


def _restart_loop(report: Report, now_s: float | None) -> Iterator[Evidence]:
    furthest, idle = -1, 0
    starts = report.starts
    if starts and starts[-1].ended == "open" and (now_s or math.inf) - report.last_s <= SILENT_S:
        starts = starts[:-1]  # it is at work, and may come further
    for before, start in pairwise((None, *starts)):
        newest = -1 if start is None or start.newest_step is None else start.newest_step
        is_idle = before is not None and before.ended != "closed" and newest <= furthest
        idle = idle + 1 if is_idle else 0
        furthest = max(furthest, newest)
    if idle >= LOOPS:
        at = "the first step" if furthest < 0 else f"step {furthest}"
        text = f"{idle} starts in a row came no further than {at}{_last_to_fail(report, idle)}"
        yield Evidence(text, starts[-idle].time_s)


def _last_to_fail(report: Report, starts: int) -> str:
    """Returns who ended so many starts, where that was one rank, and the last error."""
    known = report.reliability.interruptions if report.reliability is not None else ()
    who = {(one.rank, one.host) for one in known[-starts:]}
    (rank, host), *others = who or {(-1, "")}
    text = "" if rank < 0 or others else f", each until rank {rank} on {host} was gone"
    reasons = [one.reason for one in known if one.reason]
    return text + (f"; the last error is {reasons[-1]}" if reasons else "")


def _same_host(report: Report, _: float | None) -> Iterator[Evidence]:
    if report.reliability is None:
        return
    hosts = Counter(one.host for one in report.reliability.interruptions if one.host)
    several = {host for start in report.starts for host in start.hosts}
    for host, times in hosts.items():
        if times >= DEATHS and len(several) > 1 and 2 * times > hosts.total():
            own = [one for one in report.reliability.interruptions if one.host == host]
            lost = count_text(sum(one.lost_steps or 0 for one in own), "step")
            text = (
                f"{times} of {hosts.total()} interruptions began with a rank on {host}: {lost} lost"
            )
            yield Evidence(text, own[0].at_s)


def _stalled(report: Report, _: float | None) -> Iterator[Evidence]:
    ledger = report.ledger
    if ledger is not None and ledger.seconds["stall"] > 0.01 * ledger.elapsed_s:
        stalled = seconds_text(ledger.seconds["stall"])
        part = ledger.seconds["stall"] / ledger.elapsed_s
        who, since_s = who_came_late(report, ledger.seconds["stall"])
        text = f"steps that hung took {stalled} in all, {100 * part:.1f} % of the run{who}"
        yield Evidence(text, since_s)


def _silent(report: Report, now_s: float | None) -> Iterator[Evidence]:
    for text, since_s in find_silence(report, now_s):
        yield Evidence(text, since_s)


def _clocks_apart(report: Report, _: float | None) -> Iterator[Evidence]:
    for one in report.clocks:
        if abs(one.ahead_s) > max(APART_S, 3 * (one.error_s or 0.0)):
            side = "ahead" if one.ahead_s > 0 else "behind"
            yield Evidence(f"clock of host {one.host} is {seconds_text(abs(one.ahead_s))} {side}")


def _clocks_wrong(report: Report, _: float | None) -> Iterator[Evidence]:
    since = {f"{save.incarnation}-{save.step}": save.time_s for save in report.saves}
    for one in report.wrong_clocks:
        if one.saves < ROW:
            continue
        side = "ahead" if one.ahead_s > 0 else "behind"
        text = (
            f"clock of host {one.host} is at least {seconds_text(abs(one.ahead_s))} {side} of what "
            f"is known of it, in {count_text(one.saves, 'save')} since {one.since}"
        )
        yield Evidence(text, since.get(one.since))


def _corrupt(report: Report, _: float | None) -> Iterator[Evidence]:
    for one in report.damages:
        text = f"{one.what} {one.name} of {one.incarnation}-{one.step} changed in memory of "
        yield Evidence(f"{text}{one.host}: {one.outcome}", one.time_s)


def _dropped(report: Report, _: float | None) -> Iterator[Evidence]:
    for dropped in report.dropped_sources:
        yield Evidence(f"a restore went on without {dropped}")


def _replicas(report: Report, _: float | None) -> Iterator[Evidence]:
    if report.divergences:
        one = min(report.divergences, key=lambda each: each.first)
        more = len(report.divergences) - 1
        others = f", and {count_text(more, 'leaf')} more".replace("leafs", "leaves") if more else ""
        saves, first = count_text(one.saves, "save"), f"{one.first[0]}-{one.first[1]}"
        yield Evidence(
            f"{one.leaf} was not the same on all ranks in {saves}, since {first}{others}"
        )


def _weaker(report: Report, _: float | None) -> Iterator[Evidence]:
    for missing in report.protection[-1].missing if report.protection else ():
        yield Evidence(missing)


def _storage_trouble(report: Report, _: float | None) -> Iterator[Evidence]:
    if report.persist_failures:
        count = count_text(len(report.persist_failures), "save")
        yield Evidence(f"{count} could not be stored, the last {report.persist_failures[-1]}")


def _no_room(report: Report, _: float | None) -> Iterator[Evidence]:
    saves = newest_saves(report)
    if saves and saves[-1].ring_bytes:
        yield Evidence(
            "shared memory had no room for whole images: saves are durable or nothing",
            saves[-1].time_s,
        )


def _events_dropped(report: Report, _: float | None) -> Iterator[Evidence]:
    counts = {
        "lost": report.lost_records,
        "invalid": report.invalid_lines,
        "unreadable file": len(report.unreadable),
    }
    counts = {name: count for name, count in counts.items() if count}
    if counts:
        yield Evidence(f"of the records of this run there are {counts_text(counts)}")


def _held(report: Report, _: float | None) -> Iterator[Evidence]:
    for one in report.keepers:
        closed = sum(times for why, times in one.ends.items() if why.startswith(RUN_ENDED))
        if one.starts - closed >= KEEPERS:
            text = f"the keeper of {one.host} was started {one.starts} times"
            after = f", {count_text(closed, 'time')} of them for a run that ended in order"
            yield Evidence(text + after * bool(closed))


#: The worst first: in this order they are shown.
RULES = (
    RunRule(
        "no_sign_of_life",
        "critical",
        "a run that did not close has no record for 10 median steps, and for a minute; or none of "
        "its trainers for a quarter of an hour, and three times as long as any step or phase took; "
        "for four hours while one of them restores, or is in a phase of a name that is new",
        "Look whether its processes live; where they do, py-spy dump --pid shows where they wait, "
        "and where PyTorch's Flight Recorder left dumps, torchfrtrace reads them.",
        _silent,
    ),
    RunRule(
        "restart_loop",
        "critical",
        "three starts in a row came no further than the one before them",
        "The same step fails each time: read torchrun's error file of the rank that was the first, "
        "or restore an earlier generation by name.",
        _restart_loop,
    ),
    RunRule(
        "no_durable",
        "critical",
        "the newest durable generation is three times as old as they usually are apart, or a save "
        "that was to be durable is on its way for a minute, and ten times as long as usual",
        "Look at the other findings of storage and at the keeper's log; nothing newer survives the "
        "loss of all hosts.",
        _not_durable,
    ),
    RunRule(
        "no_protected",
        "critical",
        "the newest protected generation is three times as old as they usually are apart",
        "Look at what is said of parity, and at the network between the hosts.",
        _not_protected,
    ),
    RunRule(
        "saves_missed",
        "critical",
        "the last three saves, or more, gave no generation",
        "The reason names what is in the way; docs/operations/troubleshooting.md has it word by "
        "word.",
        _missed,
    ),
    RunRule(
        "damage",
        "critical",
        "sealed bytes changed in the memory of a host",
        "Take the host out and test its memory: nothing but a fault of it, or a stray write, does "
        "this.",
        _corrupt,
    ),
    RunRule(
        "replicas_differ",
        "critical",
        "a leaf that several ranks hold was not the same on all of them",
        "Training has diverged: look for a rank with another seed, a collective left out, or a "
        "faulty device.",
        _replicas,
    ),
    RunRule(
        "storage_trouble",
        "critical",
        "a snapshot could not be made durable",
        "The reason names the error of the storage: room, rights or network.",
        _storage_trouble,
    ),
    RunRule(
        "same_host_dies",
        "warning",
        "a host was the first to go in two interruptions, and in more than half of all",
        "Take the host out of the job, and look at its kernel log; where restart_loop is found "
        "too, look at the program first.",
        _same_host,
    ),
    RunRule(
        "source_dropped",
        "warning",
        "a source of a restore failed or did not verify, and another was used",
        "`holdfast verify --deep` finds what is damaged in storage, `holdfast repair` mends it "
        "from a copy.",
        _dropped,
    ),
    RunRule(
        "protection_lower",
        "warning",
        "hosts cannot protect each other as was asked",
        "docs/operations/choosing-parity.md says what it takes.",
        _weaker,
    ),
    RunRule(
        "keeper_lost",
        "warning",
        "a keeper went away; snapshots in memory of its host stayed, saves meanwhile did not",
        "Look whether it was killed (kernel log: out of memory) or left a trace in keeper.log.",
        _keeper_lost,
    ),
    RunRule(
        "keeper_restarts",
        "warning",
        "a keeper was started three times or more, not counting those that ended with a closed run",
        "Its log says why it ended; each start of a run that was killed with its keeper makes a "
        "new one.",
        _held,
    ),
    RunRule(
        "late_host",
        "warning",
        "the others waited for a host at a save, and gave up",
        "Look at what its ranks do in a step that others do not, and at its load.",
        _late_host,
    ),
    RunRule(
        "slow_place",
        "warning",
        "a rank, a host or all of them are slow in three of the last five saves, one rank has more "
        "bytes than the others, or comes last to more of the last ten than chance explains",
        "Where to look first is said above; `holdfast report` with `--by host` or `--by rank` has "
        "the figures of each.",
        _slow_place,
    ),
    RunRule(
        "slow_link",
        "warning",
        "short messages between two keepers take four times what is usual",
        "Look at the network card and switch port of that host (ethtool -S, ip -s link), at what "
        "else sends there, and at the load of its CPU; parity and restores go the same way.",
        _slow_link,
    ),
    RunRule(
        "slow_restore",
        "warning",
        "in one of the last five restores all waited for one rank, or went through sources that "
        "failed, for a second and a quarter of it",
        "Where to look first is said above; where a source failed, `holdfast verify --deep` "
        "finds what is damaged.",
        _slow_restore,
    ),
    RunRule(
        "storage_slow",
        "warning",
        "three of the last five saves that were to be durable were not, nor was a later one in "
        "their place, when the next was asked for",
        "Make fewer saves durable (storage=Every(...)), or use faster storage; a cache= on each "
        "host takes the peaks.",
        _storage_slow,
    ),
    RunRule(
        "throughput_down",
        "warning",
        "the last five saves went to storage at less than 70 % of the speed of those before, and "
        "take 0.05 s longer at least",
        "Look at what else uses the storage, and at how full it is.",
        _throughput_down,
    ),
    RunRule(
        "interference",
        "warning",
        "a step takes 5 % longer behind a copy or a write, at least, as its interval says",
        "Save less often, or give copies and writes less of what steps need: the bandwidth of "
        "memory (fewer threads), the CPUs (docs/operations/settings.md), or the disk of the data.",
        _interference,
    ),
    RunRule(
        "stalled",
        "warning",
        "steps of more than ten medians took more than 1 % of the run",
        "Look at the rank that is named, at its data and its network at these moments, and whether "
        "it was stopped; with ckpt.phase(...) what the program knows of is not counted.",
        _stalled,
    ),
    RunRule(
        "clocks_apart",
        "warning",
        "the clock of a host differs by more than a second from the first host's",
        "Let the host follow a time server; the report has taken the difference out.",
        _clocks_apart,
    ),
    RunRule(
        "clocks_wrong",
        "warning",
        "by its clock a host called three saves after all ranks had been given a place for them, "
        "or copied before that",
        "Let the host follow a time server, and look what sets its clock; who was late is not told "
        "by it, and what lies between hosts in a trace is not to be believed.",
        _clocks_wrong,
    ),
    RunRule(
        "no_room",
        "notice",
        "shared memory has no room for whole images",
        "Give the arena more room: docs/sizing.md.",
        _no_room,
    ),
    RunRule(
        "records_lost",
        "notice",
        "records of events are lost, invalid or cannot be read",
        "What is shown may lack something; look at the room of the disk and of /dev/shm.",
        _events_dropped,
    ),
)
