"""PURE. Decides how much of an update the device does, which subgroups, in which order.

The list of subgroups is worked from both ends: the host from the front, the device from the back,
so that both finish at the same time. The meeting point follows from the model (``simulate``). By
the model, a plan is never slower than leaving everything to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, chain, combinations

from holdfast.errors import UsageError
from holdfast.offload.planning.simulate import Rates, Timeline, run, tasks

__all__ = ["Rates", "Schedule", "plan", "replan", "replanning", "timeline"]

#: The device is used when the model promises to save at least this part of the step.
LEAST_GAIN = 0.02
#: Another schedule replaces the present one when it promises to save this part of the step.
LEAST_CHANGE = 0.05
#: With so few subgroups every division is tried, because one subgroup makes a large difference.
FEW = 6


@dataclass(frozen=True, slots=True)
class Schedule:
    """The subgroups of the host and of the device, each in order; together all of them, each
    once.
    """

    host: tuple[int, ...]
    device: tuple[int, ...]
    #: The part of all elements that is updated on the device.
    share: float
    #: The duration of the step by the model.
    expected_s: float = field(default=0.0, compare=False)
    #: The part of its own rate at which the host updates beside the copies, by the model. A
    #: duration measured in a step, times this, is the duration of the update alone.
    host_speed: float = field(default=1.0, compare=False)
    #: The rates from which ``expected_s`` was computed.
    rates: Rates | None = field(default=None, compare=False)


def plan(
    sizes: Sequence[int],
    rates: Rates,
    *,
    device_slots: int,
    device_share: float | None = None,
    ready_s: Sequence[float] = (),
    flush_is_awaited: bool = True,
) -> Schedule:
    """Return the schedule with the shortest step; ``device_share`` fixes the part of the device.

    ``sizes`` are the elements of each subgroup. The device has room for the state of
    ``device_slots`` of them. ``ready_s``: when each gradient is on the device, in seconds from the
    beginning of the step (below 0: before it); the host then takes the subgroups whose gradients
    come first. Without it the gradients are in place, and the host begins with the first subgroup.
    ``flush_is_awaited=False`` lets the last state return during the next forward.

    With ``device_share`` the result depends on ``sizes`` and the order alone, on no rate. Raises
    UsageError for an invalid share, size or number of slots.
    """
    _check(sizes, device_slots, device_share, ready_s)
    if device_share is not None:
        order = _ordered(sizes, ready_s)
        fixed = _divided(sizes, order, _nearest(sizes, order, device_share), ready_s)
        return _expecting(fixed, sizes, rates, device_slots, ready_s, flush_is_awaited)
    return min(_trials(sizes, rates, device_slots, ready_s, flush_is_awaited), key=_better)


def replan(
    current: Schedule,
    sizes: Sequence[int],
    rates: Rates,
    *,
    device_slots: int,
    ready_s: Sequence[float] = (),
) -> Schedule:
    """Return the best schedule by the present rates, or ``current``.

    Fluctuating rates are no reason to change: the best has to save ``LEAST_CHANGE`` of the step.
    Where no rate moved enough for that, nothing is computed.
    """
    *_, best = replanning(current, sizes, rates, device_slots=device_slots, ready_s=ready_s)
    return best


def replanning(
    current: Schedule,
    sizes: Sequence[int],
    rates: Rates,
    *,
    device_slots: int,
    ready_s: Sequence[float] = (),
    flush_is_awaited: bool = True,
) -> Iterator[Schedule]:
    """Run ``replan`` in steps: each simulates one division, the last yields the result.

    The steps before it yield ``current``. One division takes a millisecond for about 25 subgroups.
    """
    if current.rates is not None and _are_near(current.rates, rates):
        yield current
        return
    kept = _expecting(current, sizes, rates, device_slots, ready_s, flush_is_awaited)
    best = kept
    for one in _trials(sizes, rates, device_slots, ready_s, flush_is_awaited):
        yield current
        best = min(best, one, key=_better)
    yield best if best.expected_s < kept.expected_s * (1 - LEAST_CHANGE) else kept


def _are_near(before: Rates, now: Rates) -> bool:
    """Return whether every schedule takes nearly its old time, so that none can save
    ``LEAST_CHANGE``.

    With rates that are at most ``near`` times as high or low, so is the time of a schedule: the
    previous best can now be slower than another by twice that.
    """
    near = (1 - LEAST_CHANGE) ** -0.5
    pairs = ((getattr(before, one.name), getattr(now, one.name)) for one in fields(Rates))
    return all(a == b or (a and b and 1 / near < a / b < near) for a, b in pairs)


def timeline(
    sizes: Sequence[int],
    schedule: Schedule,
    rates: Rates,
    *,
    device_slots: int,
    ready_s: Sequence[float] = (),
) -> Timeline:
    """Simulate a step by this schedule."""
    given = tasks(
        sizes, schedule.host, schedule.device, rates, device_slots=device_slots, ready_s=ready_s
    )
    return run(given, rates)


def _expecting(
    schedule: Schedule,
    sizes: Sequence[int],
    rates: Rates,
    device_slots: int,
    ready_s: Sequence[float],
    flush_is_awaited: bool,
) -> Schedule:
    """Return this schedule with its expected duration by these rates."""
    played = timeline(sizes, schedule, rates, device_slots=device_slots, ready_s=ready_s)
    busy_s, worked_s = played.busy_s("host"), played.work_s("host")
    return replace(
        schedule,
        expected_s=played.finished_s if flush_is_awaited else played.visible_s,
        host_speed=worked_s / busy_s if busy_s else 1.0,
        rates=rates,
    )


def _better(one: Schedule) -> tuple[float, float]:
    return one.expected_s, one.share


def _ordered(sizes: Sequence[int], ready_s: Sequence[float]) -> list[int]:
    """Return all subgroups in the order in which their gradients arrive."""
    return sorted(range(len(sizes)), key=lambda one: (ready_s[one] if ready_s else 0.0, one))


def _trials(
    sizes: Sequence[int],
    rates: Rates,
    device_slots: int,
    ready_s: Sequence[float],
    flush_is_awaited: bool,
) -> Iterator[Schedule]:
    """Yield the host alone, and all divisions that are worth trying and promise more than it."""
    order = _ordered(sizes, ready_s)

    def trial(device: Sequence[int]) -> Schedule:
        schedule = _divided(sizes, order, device, ready_s)
        return _expecting(schedule, sizes, rates, device_slots, ready_s, flush_is_awaited)

    alone = trial(())
    yield alone
    if not device_slots or not sizes:
        return
    for one in _candidates(order, trial, rates):
        yield one if one.expected_s < alone.expected_s * (1 - LEAST_GAIN) else alone


# ── divisions between host and device ────────────────────────────────────────────────────────


def _divided(
    sizes: Sequence[int], order: Sequence[int], device: Sequence[int], ready_s: Sequence[float]
) -> Schedule:
    """Assign ``device`` to the device, from the back of ``order``, and the rest to the host.

    The device does not wait for a gradient that is still to come while it has others.
    """
    there = set(device)
    host = tuple(one for one in order if one not in there)
    share = sum(sizes[one] for one in there) / max(1, sum(sizes))
    from_back = (one for one in reversed(order) if one in there)
    by_need = sorted(from_back, key=lambda one: max(0.0, ready_s[one]) if ready_s else 0.0)
    return Schedule(host, tuple(by_need), share)


def _nearest(sizes: Sequence[int], order: Sequence[int], share: float) -> Sequence[int]:
    """Return the number from the back that comes nearest to this share; of two, the smaller."""
    reached = accumulate((sizes[one] for one in reversed(order)), initial=0)
    wanted = share * sum(sizes)
    count = min(enumerate(reached), key=lambda one: (abs(one[1] - wanted), one[0]))[0]
    return order[len(order) - count :]


def _candidates(
    order: Sequence[int], trial: Callable[[Sequence[int]], Schedule], rates: Rates
) -> Iterator[Schedule]:
    """Yield divisions that include the best: all of them, or those around the meeting point.

    The more the device takes, the longer it works and the shorter the host does. So the search
    descends from the meeting point of the rates alone, with smaller and smaller steps. Different
    sizes make small local minima, so a few divisions on both sides are tried too.
    """
    everyone = len(order)
    if everyone <= FEW:
        sets = (combinations(order[::-1], count) for count in range(1, everyone + 1))
        yield from map(trial, chain.from_iterable(sets))
        return
    known: dict[int, Schedule] = {}
    at, stride = round(everyone * _guess(rates)), max(1, everyone // 16)
    while stride:
        near = {at, max(0, at - stride), min(everyone, at + stride)}
        for count in sorted(near - known.keys()):
            known[count] = trial(order[everyone - count :])
            yield known[count]
        best = min(near, key=lambda count: (known[count].expected_s, count))
        at, stride = (at, stride // 2) if best == at else (best, stride)
    around = range(max(0, at - FEW // 2), min(everyone, at + FEW // 2) + 1)
    for count in sorted({*around, everyone} - known.keys()):
        yield trial(order[everyone - count :])


def _guess(rates: Rates) -> float:
    """Return the share with which both work equally long, if all their parts run in parallel."""
    slowest_s = max(
        rates.state_in_bytes / rates.h2d_bytes_s,
        rates.state_out_bytes / rates.d2h_bytes_s,
        1 / rates.device_update_elements_s,
    )
    return 1 / (1 + slowest_s * rates.host_elements_s)


def _check(
    sizes: Sequence[int], device_slots: int, device_share: float | None, ready_s: Sequence[float]
) -> None:
    if any(size < 0 for size in sizes):
        raise UsageError(f"a subgroup of {min(sizes)} elements: sizes are 0 or more")
    if device_slots < 0:
        raise UsageError(f"device_slots={device_slots}: 0 or more subgroups fit on the device")
    if ready_s and len(ready_s) != len(sizes):
        raise UsageError(f"{len(ready_s)} times for the gradients of {len(sizes)} subgroups")
    if device_share is None:
        return
    if not 0 <= device_share <= 1:
        raise UsageError(f"device_share={device_share!r}: a number from 0 to 1, or None, is needed")
    if device_share and not device_slots:
        raise UsageError(
            f"device_share={device_share!r}: the device has room for no subgroup (device_slots=0)"
        )
