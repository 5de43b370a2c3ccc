"""Run one training under chaos: lose hosts at chosen moments, restart, and judge each loss.

All that chance decides comes from one generator, so that a seed tells the same story again as far
as the machine's timing allows.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos.life import Broke, Life, Reference, completed_by, sums_of
from benchmarks.chaos.verdict import HARD_FAIL, Generation, Outcome, Start, classify, promised
from holdfast.testing.faults import (
    Encoding,
    Hosts,
    events_of,
    flip_image,
    held,
    is_capturing,
    is_persisting,
    newest_durable,
    wait_protected,
    wait_until,
)
from holdfast.testing.runs.journals import RunIncarnation

#: When hosts are lost.
MOMENTS = ("any time", "capture", "encoding", "persist", "recovery")
#: What the next start has: others in place of the lost, what is left with as many ranks, or fewer.
NEXT = ("replaced", "left", "fewer")
STORAGE_EVERY = 8
#: A loss comes within so many steps of the last one; the reference must reach that far.
STRIDE = 12
DEADLINE_S = 90.0
MOMENT_S = 6.0


@dataclass(slots=True)
class Loss:
    """One loss of hosts, and what came of it."""

    moment: str
    lost: list[str]
    damaged: list[str]
    on: list[str]
    then: str
    next_on: list[str] = field(default_factory=list)
    promised: int = -1
    promised_from: str = ""
    completed: int = -1
    resumed: int = -1
    source: str = ""
    resume_s: float = 0.0
    verdict: str = ""
    why: str = ""

    @property
    def steps_lost(self) -> int:
        """Those that all ranks had made and that were made again."""
        return max(0, self.completed - self.resumed)


class Story:
    """A root of its own, hosts of its own, and the losses in their order."""

    def __init__(
        self,
        directory: Path,
        hosts: Hosts,
        *,
        count: int,
        parity: int,
        seed: int,
        reference: Reference,
        chance: random.Random,
        say: Callable[[Loss], None],
        root: str = "",
        cache: bool = False,
    ) -> None:
        self.directory, self.hosts, self.chance, self._say = directory, hosts, chance, say
        self.count, self.parity, self.reference = count, parity, reference
        self.root: Path | str = root or directory / "root"
        self._cache = directory / "cache"
        self.settings: dict[str, Any] = {
            "root": str(self.root),
            "steps": len(reference.sums),
            "storage": STORAGE_EVERY,
            "parity": parity,
            "seed": seed,
            "cache": str(self._cache) if cache else None,
        }
        self.starts: dict[int, Start] = {}
        self.known = dict(enumerate(reference.sums))
        """The sum over the state after each step, as it has to be."""
        self.is_resized = False
        self._names = iter(f"h{n}" for n in range(10_000))
        self.on = [next(self._names) for _ in range(count)]
        self.losses: list[Loss] = []
        self.life: Life | None = None
        self._here = -1
        self._fire: Callable[[], None] = lambda: None

    # ── the course of it ─────────────────────────────────────────────────────────────────

    def tell(self, most: int, is_time: Any) -> list[Loss]:
        """Up to ``most`` losses, and a last stretch that ends in order; stops at what breaks."""
        self._start()
        try:
            self._resumed(None)
        except (Broke, TimeoutError) as error:
            self.losses.append(self._broken(error))
            return self.losses
        while len(self.losses) < most and is_time():
            loss = self._draw()
            self.losses.append(loss)
            self._judge(loss)
            self._say(loss)
            if loss.verdict in (HARD_FAIL, "SILENT_DIVERGENCE"):
                return self.losses
            if self._room() < 2 * STRIDE:
                break
        self._end()
        return self.losses

    def _broken(self, error: Exception) -> Loss:
        return Loss("start", [], [], self.on, "", verdict=HARD_FAIL, why=f"{error}")

    def _room(self) -> int:
        """How many steps the reference still has."""
        return len(self.reference.sums) - (self.losses[-1].resumed if self.losses else 0)

    def _draw(self) -> Loss:
        """Which hosts, when, and what is there afterwards."""
        there = sorted(set(self.on))
        most = min(self.parity, len(there) - 1)
        count = self.chance.randint(1, max(1, most))
        if self.chance.random() < 0.2 and len(there) > most + 1:
            count = most + 1  # one more than parity replaces
        lost = self.chance.sample(there, count)
        left = [host for host in there if host not in lost]
        damaged = [self.chance.choice(left)] if left and self.chance.random() < 0.15 else []
        may_shrink = len(self.losses) >= 2 and not self.is_resized and len(left) > 1
        then = self.chance.choice(NEXT if may_shrink else NEXT[:2]) if left else NEXT[0]
        return Loss(self.chance.choice(MOMENTS), lost, damaged, list(self.on), then)

    def _judge(self, loss: Loss) -> None:
        outcome = Outcome()
        try:
            outcome = self._happen(loss)
        except (Broke, TimeoutError) as error:
            outcome = Outcome(completed=loss.completed, error=str(error))
        loss.why = outcome.error or "; ".join(outcome.differs)
        loss.verdict = classify(outcome, loss.promised)

    def _happen(self, loss: Loss) -> Outcome:
        differs = [*self._reach(loss), *self._lose(loss)]
        began = time.monotonic()
        self._start()
        more = self._resumed(loss)
        loss.resume_s = round(time.monotonic() - began, 2)
        return Outcome(loss.resumed, loss.source, loss.completed, (*differs, *more))

    def _end(self) -> None:
        """The last stretch: it ends in order, and its last bit is right."""
        assert self.life is not None
        last = self.losses[-1] if self.losses else None
        try:
            seen = self.life.wait(
                lambda now: completed_by(now) >= self._here + 3, DEADLINE_S, "progress"
            )
            differs = self._compare(seen)
            self.life.end()
        except (Broke, TimeoutError) as error:
            if last is not None:
                last.verdict, last.why = HARD_FAIL, f"afterwards: {error}"
            return
        if differs and last is not None:
            last.verdict, last.why = "SILENT_DIVERGENCE", "afterwards: " + "; ".join(differs)

    # ── starts ───────────────────────────────────────────────────────────────────────────

    def _start(self) -> None:
        self.life = Life(self.hosts, self.on, self.directory, self.settings)

    def _resumed(self, loss: Loss | None) -> list[str]:
        """Wait for the restore, and take note of what this start is; where its bits are wrong."""
        assert self.life is not None
        seen, total = self.life.wait_restored(DEADLINE_S)
        lines = list(seen.lines["restored"].values())
        steps = {line.step for line in lines}
        step, source = min(steps), lines[0].source
        if loss is not None:
            loss.resumed, loss.source = step, source
        self._here = step
        differs = [] if len(steps) == 1 else [f"ranks restored steps {sorted(steps)}"]
        if step >= 0 and total != self.known.get(step):
            differs.append(f"the state restored at step {step}")
        differs += self._other_draws(seen)
        if len(self.on) != self.count and not self.is_resized:
            self.is_resized = True
        if self.is_resized:  # gradients are summed in another order: what comes is what counts
            self.known = {s: known for s, known in self.known.items() if s <= step}
        hosts = frozenset(self.on)
        reached = min(self.parity, len(hosts) - 1)
        self.starts[seen.n] = Start(seen.n, hosts, reached, lines[0].parent)
        return differs

    def _compare(self, seen: RunIncarnation) -> list[str]:
        """Steps of this life whose bits are not those they have to be; new ones are learned."""
        wrong = [
            f"the state after step {step}"
            for step, found in sorted(sums_of(seen).items())
            if self.known.setdefault(step, found) != found
        ]
        return [*wrong[:3], *self._other_draws(seen)]

    def _other_draws(self, seen: RunIncarnation) -> list[str]:
        """Ranks whose generators are not at what they were at after the same step."""
        wrong = [
            f"the generators of rank {rank} after step {step}"
            for (step, rank), found in sorted(seen.drawn.items())
            if self.reference.drawn[step, rank] != found
        ]
        return wrong[:3]

    # ── losses ───────────────────────────────────────────────────────────────────────────

    def _reach(self, loss: Loss) -> list[str]:
        """Train until the moment of this loss has come; where the bits were wrong on the way."""
        assert self.life is not None
        life, here = self.life, self._here
        wait_until(
            lambda: life.seen() and newest_durable(self.root),
            timeout_s=DEADLINE_S,
            pause_s=0.05,
            what="a first checkpoint, for what parity does not replace",
        )
        if self.chance.random() < 0.85 and self.starts[max(self.starts)].parity:
            wait_protected(
                self.root,
                max(self.starts),
                more=self.chance.randint(1, 3),
                after=here,
                timeout_s=DEADLINE_S,
                check=life.seen,
            )
        elif self.chance.random() < 0.5:
            until = here + self.chance.randint(1, STRIDE // 2)
            life.wait(lambda now: completed_by(now) >= until, DEADLINE_S, f"step {until}")
        if loss.moment == "recovery":
            differs = self._crash(loss)
            self._start()
            assert self.life is not None
            self._fire = self.hosts.aim(*loss.lost)
            with suppress(TimeoutError):
                self.life.wait(lambda now: "start" in now.lines, DEADLINE_S, "", 0.002)
            time.sleep(self.chance.random() * 0.15)
            return differs
        self._await(loss)
        return self._compare(life.seen())

    def _crash(self, loss: Loss) -> list[str]:
        """Before a loss during recovery: all trainers die, and no host is lost yet."""
        assert self.life is not None
        seen = self.life.end()
        loss.completed = completed_by(seen)
        return self._compare(seen)

    def _await(self, loss: Loss) -> None:
        """Look for the moment; where it does not come it is any time."""
        aimed = self.chance.choice(loss.lost)
        time.sleep(self.chance.random() * 0.3)
        self._fire = self.hosts.aim(*loss.lost)
        if loss.moment == "any time":
            return
        arena = self.hosts.arena(aimed)
        is_so = {
            "capture": lambda: is_capturing(arena),
            "encoding": Encoding(arena),
            "persist": lambda: is_persisting(self.root),
        }[loss.moment]
        try:
            wait_until(is_so, timeout_s=MOMENT_S, pause_s=0.0005)
        except TimeoutError:
            loss.moment = "any time"

    def _lose(self, loss: Loss) -> list[str]:
        """What was told of before is promised; what comes in between may only be newer."""
        assert self.life is not None
        durable, at_s = newest_durable(self.root), time.time()
        self._fire()
        ended = self.life.end()
        loss.completed = max(loss.completed, completed_by(ended))
        protected: set[Generation] = {
            (int(event["incarnation"]), int(event["step"]))
            for event in events_of(self.root, "SnapshotProtected")
            if event["time_s"] < at_s
        }
        for start in self.starts.values():
            start.lost.update(loss.lost, loss.damaged)
        loss.promised, loss.promised_from = promised(self.starts, protected, durable)
        for host in loss.lost:
            for place in self._cache.glob(f"*@{host}"):
                shutil.rmtree(place)
        for host in loss.damaged:
            self._damage(host)
        self.on = self._next(loss)
        loss.next_on = list(self.on)
        return self._compare(ended)

    def _damage(self, host: str) -> None:
        """One bit of every image this host holds."""
        for one in held(self.hosts.arena(host)):
            flip_image(one, at=self.chance.randrange(1 << 30), bit=self.chance.randrange(8))

    def _next(self, loss: Loss) -> list[str]:
        """On which hosts the ranks are next: who they are changes, too."""
        left = sorted({host for host in self.on if host not in loss.lost})
        if loss.then == "fewer":
            on = left
        elif loss.then == "left":
            world = self.count if not self.is_resized else len(self.on)
            on = [*left, *(self.chance.choice(left) for _ in range(world - len(left)))]
        else:
            world = self.count if not self.is_resized else len(self.on)
            back = loss.lost if self.chance.random() < 0.5 else []  # by the same name, and empty
            new = [*back, *(next(self._names) for _ in range(world))]
            on = [*left, *new[: max(0, world - len(left))]]
        self.chance.shuffle(on)
        return on


def as_json(loss: Loss) -> dict[str, Any]:
    """For the results."""
    return asdict(loss) | {"steps_lost": loss.steps_lost}
