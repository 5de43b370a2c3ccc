"""PURE. Derives from the ledger how reliable a run was, and what a loss would cost now.

``docs/goodput.md`` defines each figure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from holdfast.observe.ledger import Ledger, LifeTimes

#: What the interval of the mean time to interrupt leaves out on both sides together.
_OUTSIDE = 0.05


@dataclass(frozen=True, slots=True)
class RunInterruption:
    """A start that did not close and was followed by another, and what that cost.

    ``incarnation``: the start that was interrupted. ``at_s``: when its first rank was gone, in
    seconds since 1970. ``detect_s`` to ``repeat_s``: the parts of coming back; ``repeat_s`` is None
    where the lost steps were never all made again. ``rank_hours``: lost work over all ranks.
    """

    incarnation: int
    at_s: float
    rank: int
    host: str
    phase: str
    cause: str
    """killed (a rank was gone without a goodbye) | failed (an error ended it)"""
    lost_steps: int | None
    rank_hours: float
    detect_s: float
    restart_s: float
    restore_s: float
    source: str
    repeat_s: float | None
    reason: str = ""
    """The error, where one was recorded."""

    @property
    def back_after_s(self) -> float:
        """Returns the seconds until training went on."""
        return self.detect_s + self.restart_s + self.restore_s


@dataclass(frozen=True, slots=True)
class Exposure:
    """What a loss would cost now, by what it takes; None where nothing would survive it.

    ``steps``: those since the newest generation that survives. ``seconds``: since it was made.
    """

    loss: str
    generation: str | None
    steps: int | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Reliability:
    """How reliable a run was; times in seconds, None where they are not known."""

    goodput: float
    ettr: float
    failures: int
    mtti_s: float | None
    mtti_low_s: float
    mtti_high_s: float | None
    mttr_s: dict[str, float]
    lost_steps: int
    lost_rank_hours: float
    interruptions: tuple[RunInterruption, ...]
    exposure: tuple[Exposure, ...]
    recovery_s: dict[str, float]
    step_s: float | None = None
    save_every_s: float | None = None
    save_cost_s: float | None = None
    predicted_ettr: float | None = None
    predicted_ettr_bytecheckpoint: float | None = None


@dataclass(frozen=True, slots=True)
class Interrupted:
    """What is known of an interruption beside its times; ``done_again_us``: when the newest step
    before it was made again.
    """

    incarnation: int
    rank: int
    host: str
    phase: str
    cause: str
    lost_steps: int | None
    done_again_us: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SavePace:
    """The usual step, the distance of saves in steps, and what a save of kept steps costs."""

    step_s: float | None = None
    save_every_steps: float | None = None
    save_cost_s: float | None = None
    exposure: tuple[Exposure, ...] = field(default=())


def measure(
    ledger: Ledger, lives: Mapping[int, LifeTimes], known: Sequence[Interrupted], pace: SavePace
) -> Reliability:
    """Returns the figures of a run.

    ``lives``: as the ledger was made of. ``known``: its interruptions, in their order.
    """
    numbers = sorted(lives)
    after = dict(pairwise(numbers))
    found = [_interruption(lives, one, after) for one in known if one.incarnation in after]
    low, high = poisson_interval(len(found))
    available_s = ledger.available_s
    mttr_s = _mean_parts(found)
    every_s = None
    if pace.step_s is not None and pace.save_every_steps is not None:
        every_s = pace.step_s * pace.save_every_steps
    mtti_s = available_s / len(found) if found else None
    back_s = sum(mttr_s.get(name, 0.0) for name in ("detect", "restart", "restore"))
    load_s = mttr_s.get("restore", 0.0)
    return Reliability(
        goodput=ledger.goodput,
        ettr=ledger.ettr,
        failures=len(found),
        mtti_s=mtti_s,
        mtti_low_s=available_s / high,
        mtti_high_s=available_s / low if low > 0 else None,
        mttr_s=mttr_s,
        lost_steps=sum(one.lost_steps or 0 for one in found),
        lost_rank_hours=ledger.rank_seconds["lost_work"] / 3600,
        interruptions=tuple(found),
        exposure=pace.exposure,
        recovery_s={one.source: one.back_after_s for one in found if one.source},
        step_s=pace.step_s,
        save_every_s=every_s,
        save_cost_s=pace.save_cost_s,
        predicted_ettr=_predicted(mtti_s, every_s, pace.save_cost_s, back_s),
        predicted_ettr_bytecheckpoint=_per_interval(every_s, pace.save_cost_s, load_s),
    )


def _interruption(
    lives: Mapping[int, LifeTimes], one: Interrupted, after: Mapping[int, int]
) -> RunInterruption:
    life, following = lives[one.incarnation], lives[after[one.incarnation]]
    deaths = [rank.died_us for rank in life.ranks.values() if rank.died_us is not None]
    gone_us = min(deaths, default=life.over_us)
    resumed = [rank.restored or (rank.began_us, rank.began_us) for rank in following.ranks.values()]
    restoring_us, resumed_us = min(a for a, _ in resumed), max(b for _, b in resumed)
    kept_us = life.saved_us.get(following.parent[1]) if following.parent is not None else None
    is_parent = following.parent is not None and following.parent[0] == one.incarnation
    lost_us = 0
    for rank in life.ranks.values():
        work_us = rank.restored[1] if rank.restored else rank.began_us
        since_us = max(work_us, kept_us) if is_parent and kept_us is not None else work_us
        lost_us += max(0, gone_us - since_us)
    return RunInterruption(
        incarnation=one.incarnation,
        at_s=gone_us / 1e6,
        rank=one.rank,
        host=one.host,
        phase=one.phase,
        cause=one.cause,
        reason=one.reason,
        lost_steps=one.lost_steps,
        rank_hours=lost_us / 3.6e9,
        detect_s=max(0, life.over_us - gone_us) / 1e6,
        restart_s=max(0, restoring_us - life.over_us) / 1e6,
        restore_s=max(0, resumed_us - max(restoring_us, life.over_us)) / 1e6,
        source=following.source,
        repeat_s=None
        if one.done_again_us is None
        else max(0, one.done_again_us - resumed_us) / 1e6,
    )


def _mean_parts(found: Sequence[RunInterruption]) -> dict[str, float]:
    if not found:
        return {}
    means = {
        "detect": statistics.fmean(one.detect_s for one in found),
        "restart": statistics.fmean(one.restart_s for one in found),
        "restore": statistics.fmean(one.restore_s for one in found),
        "repeat": statistics.fmean(one.repeat_s or 0.0 for one in found),
    }
    return {**means, "all": math.fsum(means.values())}


def _predicted(
    mtti_s: float | None, every_s: float | None, cost_s: float | None, back_s: float
) -> float | None:
    if every_s is None or every_s <= 0:
        return None
    lost = 0.0 if mtti_s is None else (every_s / 2 + back_s) / mtti_s
    return min(1.0, max(0.0, 1 - (cost_s or 0.0) / every_s - lost))


def _per_interval(every_s: float | None, cost_s: float | None, load_s: float) -> float | None:
    if every_s is None or every_s <= 0:
        return None
    return every_s / (every_s + (cost_s or 0.0) + every_s / 2 + load_s)


def poisson_interval(count: int, *, outside: float = _OUTSIDE) -> tuple[float, float]:
    """Returns the exact interval of the mean of a Poisson count that came out as ``count``.

    Garwood's: of each side ``outside / 2`` is left out; of no events all of it above.
    """
    if count == 0:
        return 0.0, -math.log(outside)

    def at_most(mean: float, most: int) -> float:
        terms = (k * math.log(mean) - mean - math.lgamma(k + 1) for k in range(most + 1))
        return math.fsum(math.exp(term) for term in terms)

    low = _solve(lambda mean: 1 - at_most(mean, count - 1) < outside / 2, count)
    high = _solve(lambda mean: at_most(mean, count) > outside / 2, count)
    return low, high


def _solve(is_below: Callable[[float], bool], near: int) -> float:
    low, high = 1e-12, 10.0 * near + 20
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return (low + high) / 2
