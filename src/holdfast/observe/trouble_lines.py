"""Formats what else happened in a run: what was missed, lost, refused, warned of or not read."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.observe.log import lines_of
from holdfast.observe.run_report import KeeperLife, Report
from holdfast.observe.text import count_text, counts_text, moment_text, seconds_text, size_text

#: The lines of trouble that are shown: a run of thousands of hosts has as many.
_MOST_TROUBLES = 60
#: A save that waits for longer to be written is told of.
_LONG_QUEUED_S = 60.0
#: Short messages between keepers that take longer are told of.
_LONG_TRIP_S = 0.1


def trouble_lines(report: Report) -> list[str]:
    """Returns a line for each trouble, the first of very many, and for what was not read."""
    troubles = _troubles(report)
    more = len(troubles) - _MOST_TROUBLES
    told = [f"and {more} more like these: --json has all"] if more > 0 else []
    return [*troubles[:_MOST_TROUBLES], *told, *_gaps(report)]


def _troubles(report: Report) -> list[str]:
    lines = [f"missed {s.incarnation}-{s.step}: {s.reason}" for s in report.misses]
    lines += [
        f"waited for {host} in vain at {count_text(saves, 'save')}"
        for host, saves in report.late_hosts.items()
    ]
    lines += [
        f"keeper lost {moment_text(loss.time_s)}{' on ' + loss.host if loss.host else ''}"
        f" (incarnation {loss.incarnation}): {loss.reason}"
        for loss in report.keeper_losses
    ]
    lines += [f"source dropped at a restore: {dropped}" for dropped in report.dropped_sources]
    if report.differing_values:
        lines.append(f"values differed between ranks: {', '.join(report.differing_values)}")
    lines += [
        f"image of rank {one.rank} of {one.incarnation}-{one.step} was lost with its host: decoded "
        f"on {one.host}, {size_text(one.size_bytes)} in {seconds_text(one.elapsed_s)}"
        for one in report.rebuilt
    ]
    lines += [line for keeper in report.keepers for line in _keeper_lines(keeper)]
    lines += [
        f"messages between the keepers of {one.host} and {one.other} take "
        f"{seconds_text(one.newest_s)} there and back, {seconds_text(one.largest_s)} at most"
        for one in report.links
        if one.newest_s > _LONG_TRIP_S
    ]
    lines += [
        f"rank {one.rank} pinned {size_text(one.pinned_bytes)} of {size_text(one.size_bytes)} "
        f"of shared memory in {seconds_text(one.elapsed_s)}"
        for one in report.pinned
        if one.pinned_bytes < one.size_bytes
    ]
    lines += [f"storage trouble at {failure}" for failure in report.persist_failures]
    lines += [f"not protected {failure}" for failure in report.unprotected]
    lines += [missing for one in report.protection[-1:] for missing in one.missing]
    lines += [
        f"damaged in the memory of {one.host}: {one.what} ({one.name}) of "
        f"{one.incarnation}-{one.step}, {size_text(one.size_bytes)}: {one.outcome}"
        + (f", {one.reason}" if one.reason else "")
        for one in report.damages
    ]
    lines += lines_of(report.divergences)
    lines += [
        f"refused by the keeper of {at.host} ({at.door}): {counts_text(at.counts)}"
        for at in report.refused
    ]
    return lines + [f"warning: {message}" for message in report.warnings]


def _gaps(report: Report) -> list[str]:
    """Returns what was not read of the records."""
    lines = []
    if report.torn_lines:
        lines.append(f"{report.torn_lines} torn lines were skipped (left by killed processes)")
    if report.lost_records:
        lines.append(f"{count_text(report.lost_records, 'record')} of events are in no file")
    if report.invalid_lines:
        lines.append(f"{report.invalid_lines} records with values that cannot be were skipped")
    lines += [f"events not read: {why}" for why in report.unreadable]
    if report.unknown_lines:
        lines.append(f"{report.unknown_lines} records of a newer version were skipped")
    return lines


def _keeper_lines(keeper: KeeperLife) -> Iterator[str]:
    """Yields what a person should know of a host's keepers; that the run ended is no trouble."""
    where = keeper.host or "a host"
    for reason, count in keeper.ends.items():
        if reason != "the run ended":
            yield f"keeper of {where} stopped {count_text(count, 'time')}: {reason}"
    if keeper.longest_queued_s > _LONG_QUEUED_S:
        longest = seconds_text(keeper.longest_queued_s)
        yield f"storage of {where} was behind: a save waited {longest} to be written"
    if keeper.held:
        longest = seconds_text(keeper.longest_held_s)
        yield f"keeper of {where} answered nobody {keeper.held} times, for {longest} at most"
