"""PURE. Collects capture requests: joins what a host's ranks report, decides if a step is complete.

The joiner drops, repeats and reorders nothing: what it holds leaves before anything else of its
host, and after a bounded time. So the coordinator hears what it would have heard, at most that much
later.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Mapping, Sequence

import msgspec

from holdfast.protocol import messages as m

#: Number of declined steps remembered for ranks that are behind.
_DECLINED_STEPS = 8


class _StepRequests(msgspec.Struct):
    first_s: float
    by_rank: dict[int, m.RequestCapture] = msgspec.field(default_factory=dict)
    spare_s: float = math.inf
    """How long the others are waited for, so that no copy holds an update."""
    is_durable: bool = False

    def add(self, requests: Mapping[int, m.RequestCapture]) -> None:
        self.by_rank.update(requests)
        self.is_durable |= any(request.durable for request in requests.values())
        for spare_ms in {request.spare_ms for request in requests.values()} - {0}:
            self.spare_s = min(self.spare_s, spare_ms / 1000)


#: What all ranks are told must not grow with their number.
_MOST_LISTED = 16


def listed(items: Sequence[object]) -> str:
    """Return items in words, of many only the first."""
    more = len(items) - _MOST_LISTED
    return ", ".join(map(str, items[:_MOST_LISTED])) + (f" and {more} more" if more > 0 else "")


def state_mismatch(asks: Mapping[int, m.RequestCapture]) -> str:
    """Explain why these requests are from different states, by their update counts; "" if they
    agree.

    Ranks may have different optimizers: only the common ones are compared.
    """
    if len({request.updates for request in asks.values()}) == 1:
        return ""
    counts: dict[str, dict[int, int]] = {}
    for rank in sorted(asks):
        for key, count in asks[rank].updates:
            counts.setdefault(key, {})[rank] = count
    for key, by_rank in counts.items():
        if len(set(by_rank.values())) > 1:
            listed = ", ".join(f"rank {rank}: {count}" for rank, count in by_rank.items())
            what = f"whole updates of {key!r}" if key else "updates"
            return f"the ranks are not at the same update ({what}: {listed:.400})"
    return ""


class CaptureRequests:
    """Undecided capture requests by step."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._by_step: dict[int, _StepRequests] = {}
        self._step_of: dict[int, int] = {}
        """The one step that each rank waits for, so that a decision examines few steps."""
        self._declined: dict[int, tuple[str, bool]] = {}
        self._notified: dict[int, set[int]] = {}
        """Ranks that were told of a declined step, and may request it again; by step."""
        self.newest = -1
        """The latest step that any rank requested or declined."""
        self._last_of: dict[int, int] = {}
        """The last step that each rank requested."""

    def add(self, rank: int, request: m.RequestCapture, now_s: float) -> None:
        """Add a rank's capture request; the rank must wait for no other step (``step_of``)."""
        self._by_step.setdefault(request.step, _StepRequests(now_s)).add({rank: request})
        self._step_of[rank] = request.step

    def is_new(self, step: int, ranks: Collection[int]) -> bool:
        """Return True if the step is open, and nothing waits for these ranks."""
        is_open = step >= self.newest and step not in self._declined
        return is_open and self._step_of.keys().isdisjoint(ranks)

    def add_all(self, step: int, requests: Mapping[int, m.RequestCapture], now_s: float) -> None:
        """Add the requests of several ranks for a step for which ``is_new`` is true."""
        self._by_step.setdefault(step, _StepRequests(now_s)).add(requests)
        self._step_of.update(dict.fromkeys(requests, step))
        self._last_of.update(dict.fromkeys(requests, step))
        self.newest = step

    def note(self, rank: int, step: int) -> None:
        """Record the latest step that a rank has reached."""
        self.newest = max(self.newest, step)
        self._last_of[rank] = step

    def has_passed(self, step: int) -> bool:
        """Return True if a rank has passed this step, so that nobody would wait for a request for
        it.
        """
        if step >= self.newest or self._by_step:
            return False
        return any(last > step for last in self._last_of.values())

    def step_of(self, rank: int) -> int | None:
        """Return the undecided step that this rank requested, or None."""
        return self._step_of.get(rank)

    def decline(
        self, step: int, reason: str, *, is_passing: bool = False, by: int | None = None
    ) -> bool:
        """Decline a step for all ranks because one cannot save it; return True if a rank had
        requested it.

        ``is_passing``: ranks that are notified now, or that are told later, may request the step
        again, and so may ``by``, the rank that declines it.
        """
        self._declined[step] = reason, is_passing
        if is_passing:
            requested = self._by_step.get(step)
            self._notified.setdefault(step, set()).update(requested.by_rank if requested else ())
            self._notified[step] |= set() if by is None else {by}
        else:
            self._notified.pop(step, None)
        for old in sorted(self._declined)[:-_DECLINED_STEPS]:
            self._allow(old)
        return self.drop_step(step)

    def decline_reason(self, step: int, rank: int) -> tuple[str, bool] | None:
        """Return the reason why a requested step was declined for ``rank``, and if that is
        temporary.

        None if the step can be saved.
        """
        if rank in self._notified.get(step, ()):
            self._allow(step)
        declined = self._declined.get(step)
        if declined is not None and declined[1]:
            self._notified[step].add(rank)
        return declined

    def _allow(self, step: int) -> None:
        del self._declined[step]
        self._notified.pop(step, None)

    def start_clock(self, now_s: float) -> None:
        """Restart the waiting times: early requests waited for something else than the other
        ranks.
        """
        for requested in self._by_step.values():
            requested.first_s = now_s

    def drop_rank(self, rank: int) -> None:
        """Drop the rank's request."""
        step = self._step_of.pop(rank, None)
        if step is not None:
            request = self._by_step[step]
            del request.by_rank[rank]
            if not request.by_rank:  # nobody waits for it: nobody is late
                del self._by_step[step]

    def all_of(self, step: int, tables: Container[tuple[str, ...]]) -> bool:
        """Return True if all ranks requested the step, with leaf tables that are one of these."""
        requested = self._by_step.get(step)
        by_rank = requested.by_rank if requested is not None else {}
        is_whole = len(by_rank) == self._world
        return is_whole and tuple(by_rank[rank].table for rank in range(self._world)) in tables

    def steps(self) -> list[int]:
        """Return the undecided steps that at least one rank requested."""
        return sorted(self._by_step)

    def drop_step(self, step: int) -> bool:
        """Drop a step that nobody can save; return True if a rank had requested it."""
        return self._pop(step) is not None

    def _pop(self, step: int) -> _StepRequests | None:
        requested = self._by_step.pop(step, None)
        for rank in requested.by_rank if requested is not None else ():
            del self._step_of[rank]
        return requested

    def waited_s(self, rank: int, step: int, now_s: float) -> float | None:
        """Return how long the step has been waited for; None if ``rank`` does not wait for it."""
        requested = self._by_step.get(step)
        return (
            now_s - requested.first_s
            if requested is not None and rank in requested.by_rank
            else None
        )

    def pop_complete(self, step: int) -> dict[int, m.RequestCapture] | None:
        """Remove and return the requests for this step if all ranks have made theirs."""
        requested = self._by_step.get(step)
        if requested is None or len(requested.by_rank) < self._world:
            return None
        self._pop(step)
        return requested.by_rank

    def pop_missed(self) -> list[tuple[int, str]]:
        """Remove and return the steps that a rank has passed, with reasons, once every rank waits
        for a step.

        The latest step stays requested, so that the other ranks catch up with it.
        """
        if len(self._step_of) < self._world or not self._step_of:
            return []
        steps = listed([f"rank {rank}: {step}" for rank, step in sorted(self._step_of.items())])
        missed = sorted(self._by_step)[:-1]
        for step in missed:
            self._pop(step)
        return [(step, f"the ranks save different steps ({steps})") for step in missed]

    def late(self, now_s: float, deadline_s: float) -> list[tuple[int, float]]:
        """Return the steps that are waited for no more, with the time that they were waited for.

        A rank that has not requested one is waited for while its copy can still end before the
        next update of the others, and never beyond the deadline.
        """
        found = []
        for step, requested in self._by_step.items():
            is_whole = len(requested.by_rank) == self._world
            has_time = is_whole or requested.is_durable
            wait_s = deadline_s if has_time else min(deadline_s, requested.spare_s)
            if now_s - requested.first_s > wait_s:
                found.append((step, wait_s))
        return found

    def absent(self, step: int) -> list[int]:
        """Return the ranks that have not requested this step; empty if no rank has."""
        requested = self._by_step.get(step)
        return [] if requested is None else sorted(set(range(self._world)) - set(requested.by_rank))


# Tracks absent ranks, which the others do not wait for: disconnected, or silent past a deadline. A
# stopped rank costs the others one wait; a rank with a closed connection costs none. Requests made
# meanwhile are skipped at once, naming the absent ranks, until they are back.


class Absence:
    """The absent ranks of one incarnation."""

    def __init__(self) -> None:
        self._lost: set[int] = set()
        self._silent: set[int] = set()

    def lose(self, rank: int) -> None:
        """Record that the rank's connection was closed."""
        self._lost.add(rank)

    def miss(self, ranks: Iterable[int]) -> None:
        """Record ranks that made no request before the others' deadline."""
        self._silent |= set(ranks) - self._lost

    def end(self, rank: int) -> None:
        """Record that the rank joined again, or reported what it saves."""
        self._lost.discard(rank)
        self._silent.discard(rank)

    def clear(self) -> None:
        """Reset for a new start of all ranks."""
        self._lost.clear()
        self._silent.clear()

    @property
    def is_any(self) -> bool:
        """Return True if the ranks do not wait for some of them."""
        return bool(self._lost or self._silent)

    @property
    def has_lost(self) -> bool:
        """Return True if a rank's connection closed and the rank has not joined again."""
        return bool(self._lost)

    @property
    def reason(self) -> str:
        """Return the reason why no rank captures, with stable wording; "" if none is absent."""
        parts = []
        if self._lost:
            parts.append(f"ranks [{listed(sorted(self._lost))}] went away")
        if self._silent:
            parts.append(
                f"ranks [{listed(sorted(self._silent))}] let the others wait in vain (stopped, "
                "stuck, or far behind?)"
            )
        return f"{' and '.join(parts)}; no rank captures until they are back" if parts else ""


#: How long a request is held for those of the other ranks of its host.
REQUESTS_HELD_S = 0.05
#: The same of a captured image: little is done with it before the last rank has captured its own.
CAPTURED_HELD_S = 0.5

RankReport = m.RequestCapture | m.Captured
HostReports = Mapping[int, RankReport]
"""Reports of one host about one step or one attempt, by rank or by connection, in their order."""


class HostJoiner:
    """Reports of a host's ``count`` ranks, held until all have made theirs, or for a moment."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._subject: int | str = ""
        """The step or attempt that the held reports are about."""
        self._reported: set[int] = set()
        """Ranks that reported about it, in what is held or was passed on."""
        self._held: dict[int, RankReport] = {}
        self.due_s = math.inf
        """When what is held must be passed on."""

    def add(self, rank: int, report: RankReport, now_s: float) -> list[HostReports]:
        """Hold a report; return what is to be passed on now, in this order."""
        is_request = isinstance(report, m.RequestCapture)
        subject = report.step if isinstance(report, m.RequestCapture) else report.attempt
        passed: list[HostReports] = []
        if subject != self._subject or rank in self._held:
            passed = self.flush()
            self._subject, self._reported = subject, set()
        if not self._held:
            self.due_s = now_s + (REQUESTS_HELD_S if is_request else CAPTURED_HELD_S)
        self._held[rank] = report
        self._reported.add(rank)
        if len(self._reported) < self._count:
            return passed
        self._reported = set()
        return passed + self.flush()

    def flush(self) -> list[HostReports]:
        """Return what is held, which must be passed on before anything else of this host."""
        held, self._held = self._held, {}
        self.due_s = math.inf
        return [held] if held else []
